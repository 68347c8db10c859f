"""What must agree before the first transfer, found from what both sides say of themselves. Pure, no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from offbeat.errors import WeightSyncError
from offbeat.rpc.messages import EngineDescription, TrainerDescription


def check_hello(trainer: TrainerDescription, engines: Sequence[EngineDescription], *, dtype: str | None = None) -> None:
    """WeightSyncError that names everything that does not fit. `dtype`: what every engine is to compute in."""
    problems: list[str] = []
    for index, engine in enumerate(engines):
        who = f"engine {index} ({engine.engine} {engine.engine_version})"
        if engine.vocab_size != trainer.vocab_size:
            problems.append(
                f"{who} has a vocabulary of {engine.vocab_size}, the trainer's is {trainer.vocab_size}: give both the "
                "same model"
            )
        if dtype is not None and engine.dtype != dtype:
            problems.append(f"{who} computes in {engine.dtype}, asked was {dtype}")
        if engine.max_length > trainer.max_length > 0:
            problems.append(
                f"{who} makes sequences of up to {engine.max_length} tokens, the trainer takes {trainer.max_length}: "
                "lower the engine's limit"
            )
        if engine.weights_version > trainer.weights_version:
            problems.append(
                f"{who} serves version {engine.weights_version}, newer than the trainer's {trainer.weights_version}: "
                "it belongs to another run; start it anew"
            )
    if problems:
        raise WeightSyncError("trainer and engines do not fit together: " + "; ".join(problems) + ".")


def check_collective(backend: str, versions: Mapping[str, str]) -> None:
    """Members (name → collective version) must be able to talk. NCCL itself refuses other versions, later and worse."""
    if backend != "nccl" or len(set(versions.values())) <= 1:
        return
    seen = ", ".join(f"{name} has {version}" for name, version in versions.items())
    raise WeightSyncError(
        f"weights.backend = 'nccl' needs one NCCL version on all sides: {seen}. Install the same torch in both "
        'environments (or the same nvidia-nccl package), or set weights.backend = "gloo".'
    )


def check_versions(version: int, engines: Mapping[str, EngineDescription]) -> None:
    """After a commit every engine itself must say that it serves this version: a sync that does nothing is caught."""
    for name, engine in engines.items():
        if engine.weights_version != version or engine.state != "serving":
            raise WeightSyncError(
                f"{name} says it is {engine.state!r} at version {engine.weights_version} after version {version} was "
                "committed: its weights do not follow the trainer's."
            )
