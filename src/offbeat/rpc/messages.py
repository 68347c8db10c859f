"""Arguments and results of every remote call, as typed values. The services and their methods:

    rollout engine      describe, generate, pause, resume,
                        weights_prepare, weights_receive, weights_commit, weights_abandon
    trainer rank        describe, update, supervise, logprobs, save, load,
                        weights_offer, weights_send, weights_close
    reward worker       describe, score

Argument structs refuse unknown fields (an argument is never dropped); results ignore them, so that a newer worker
can say more. Arrays inside travel as raw frames. No torch here.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from offbeat.types import Batch, FloatArray, GenerateRequest, IntArray, Rollout, Sampling, SupervisedSample


class Arguments(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the arguments of a call."""


class Nothing(Arguments, frozen=True):
    """No arguments, or no result."""


class WorkSpan(msgspec.Struct, frozen=True):
    """When a process did one thing, on the monotonic clock of its host: one clock for all processes of a Linux host."""

    name: str
    """`prefill`, `optimizer`, …"""
    start_s: float
    end_s: float


class Worked(msgspec.Struct, frozen=True, kw_only=True):
    """Base of results that tell when the work was done; see `offbeat.rpc.work.WorkLog`."""

    spans: tuple[WorkSpan, ...] = ()
    """In order, none overlapping another; empty where the process does not say."""


# --- rollout engine ---------------------------------------------------------------------------------------------


class EngineDescription(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine says of itself: compared with the controller's and the trainer's view before the first sync."""

    engine: str
    """`hf`, `vllm`, …"""
    engine_version: str
    torch_version: str
    weights_version: int
    """-1 until the first verified sync."""
    state: str
    """`stale`, `probing` or `serving`."""
    vocab_size: int
    """Rows of the output head."""
    dtype: str
    device: str
    capabilities: tuple[str, ...]
    max_length: int
    """Longest prompt plus continuation, in tokens; 0 where the model has no limit of its own."""


class GenerateCall(Arguments, frozen=True):
    """Sample a continuation for each seed of each request. `probe` is allowed between load and commit only."""

    requests: tuple[GenerateRequest, ...]
    sampling: Sampling
    probe: bool = False


class GenerateResult(Worked, frozen=True, kw_only=True):
    """Rollouts in the order of requests and seeds."""

    rollouts: tuple[Rollout, ...]
    busy_s: float
    """Seconds of work, waiting excluded."""


class PauseCall(Arguments, frozen=True):
    """`abort`: cut running samples short. `wait`: let them finish. New requests are refused until `resume`."""

    mode: Literal["abort", "wait"] = "wait"


# --- weights ----------------------------------------------------------------------------------------------------


class TensorEntry(msgspec.Struct, frozen=True):
    """One tensor of the checkpoint on disk."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """torch's name without the prefix: `float32`, `bfloat16`, …"""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a transfer carries, in order: the names of `save_pretrained`, and which names are tied to which."""

    entries: tuple[TensorEntry, ...]
    tied: tuple[tuple[str, str], ...] = ()
    """(`alias`, `name it is tied to`): the alias is not sent."""


class WeightsOffer(Arguments, frozen=True):
    """Trainer rank 0: hold a listener for this group and say where it is and what will be sent."""

    nonce: str
    """Names the group; a member of another group is turned away."""
    host: str
    """Address to bind and to advertise: never a wildcard."""
    backend: str
    """`gloo`, `nccl`, `hccl`, …"""
    dtype: str | None
    """Floating tensors are cast to it on the sending side; None: as they are."""
    bucket_bytes: int
    members: int
    """All members of the group: the sender and each engine worker."""
    timeout_s: float


class WeightsOffered(msgspec.Struct, frozen=True, kw_only=True):
    host: str
    port: int
    manifest: Manifest
    manifest_hash: str
    collective_version: str
    """E.g. `torch 2.13.0 gloo`, `nccl 2.27.3`."""


class WeightsJoin(Arguments, frozen=True):
    """Engine: check the manifest against what the model needs, then be ready to join as `rank`."""

    nonce: str
    host: str
    port: int
    rank: int
    members: int
    backend: str
    bucket_bytes: int
    manifest: Manifest
    manifest_hash: str
    timeout_s: float


class WeightsJoined(msgspec.Struct, frozen=True, kw_only=True):
    manifest_hash: str
    """As computed by the engine from what it was given."""
    collective_version: str


class WeightsMove(Arguments, frozen=True):
    """Both sides: move every tensor once. The trainer sends, the engine receives and loads."""

    nonce: str
    version: int
    timeout_s: float
    stall_s: float


class WeightsMoved(Worked, frozen=True, kw_only=True):
    """Digests of every tensor in manifest order: of what was sent (trainer), of what lies in the model (engine)."""

    version: int
    digests: tuple[str, ...]
    bytes_moved: int
    seconds: float


class WeightsCommit(Arguments, frozen=True):
    """Engine: caches are reset, then this version is served."""

    version: int


class WeightsAbandon(Arguments, frozen=True):
    """Either side: drop the group. An engine is stale until a full sync succeeds."""

    nonce: str
    reason: str


# --- trainer ----------------------------------------------------------------------------------------------------


class TrainerDescription(msgspec.Struct, frozen=True, kw_only=True):
    torch_version: str
    parameters: int
    vocab_size: int
    dtype: str
    device: str
    max_length: int
    weights_version: int
    """Training steps done: the version that a sync publishes."""
    optimizer_updates: int


class UpdateCall(Arguments, frozen=True):
    batch: Batch


class UpdateResult(Worked, frozen=True, kw_only=True):
    """Means over the step's updates unless the name says otherwise."""

    metrics: dict[str, float]
    weights_version: int
    optimizer_updates: int
    skipped: tuple[int, ...]
    """Indices of the mini-batches that were not applied: gradient not finite, or nothing to train."""
    busy_s: float

    @property
    def skipped_updates(self) -> int:
        return len(self.skipped)


class SuperviseCall(Arguments, frozen=True):
    """One supervised update (token-mean cross entropy) with its own learning rate and optimizer state."""

    samples: tuple[SupervisedSample, ...]
    lr: float
    last: bool = False
    """True: the supervised optimizer state is dropped afterwards."""


class ScoredSequence(Arguments, frozen=True):
    prompt_token_ids: IntArray
    token_ids: IntArray


class LogprobsCall(Arguments, frozen=True):
    """Logprobs of given tokens under the current weights, at this sampling's temperature and truncation."""

    sequences: tuple[ScoredSequence, ...]
    sampling: Sampling


class LogprobsResult(Worked, frozen=True, kw_only=True):
    logprobs: tuple[FloatArray, ...]
    weights_version: int


class SaveCall(Arguments, frozen=True):
    """Write this rank's state into an existing folder (not yet visible as a checkpoint)."""

    folder: str


class LoadCall(Arguments, frozen=True):
    folder: str


class SaveResult(Worked, frozen=True, kw_only=True):
    files: tuple[str, ...]
    bytes_written: int


class LoadResult(Worked, frozen=True, kw_only=True):
    weights_version: int


# --- reward worker ----------------------------------------------------------------------------------------------


class RewardItem(msgspec.Struct, frozen=True, kw_only=True):
    """One rollout as reward functions see it."""

    prompt: str
    completion: str
    columns: dict[str, Any]


class ScoreCall(Arguments, frozen=True):
    """Score items with one function. A group function gets the items of a group at once, others one at a time."""

    function: str
    items: tuple[RewardItem, ...]
    groups: tuple[int, ...] = ()
    """Sizes of the groups that follow each other in `items`, for a group function; empty: all items are one group."""


class ScoreResult(msgspec.Struct, frozen=True, kw_only=True):
    values: tuple[float | None, ...]
    """None where the function abstained, or failed: `errors` then has its text at the same place."""
    errors: tuple[str | None, ...]
    broken: tuple[int, ...] = ()
    """Places where the function did not fail but broke its contract: returned no finite number, or a wrong count."""
