"""The values that flow through a run: `Prompt → Rollout → Scored → Batch`. All frozen, none filled in later.

    data ── Prompt ──▶ engines ── Rollout ──▶ rewards ── Scored ──▶ advantages ── Batch ──▶ trainer

They are msgspec structs with numpy arrays, so that the same value is used in a process and on the wire (arrays travel
as raw little-endian frames, 12 bytes a token). This module imports neither torch nor any engine.

Identity is explicit: (`prompt_id`, `sample_index`, `epoch`). Two equal prompts are two prompts; a group is the set of
rollouts with one (`prompt_id`, `epoch`), never a run of neighbouring rows.

Shapes: P prompt tokens, T sampled tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, TypeAlias

import msgspec
import numpy as np

IntArray: TypeAlias = np.ndarray
"""int32, one-dimensional: token ids."""
FloatArray: TypeAlias = np.ndarray
"""float32, one-dimensional: one number a token."""

FinishReason: TypeAlias = Literal["stop", "length", "abort"]
"""`stop`: a stop id was sampled (it is the last token). `length`: `max_new_tokens` reached. `abort`: cut short."""


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How to sample. The logprob of a sampled token is that of the distribution it was really drawn from."""

    max_new_tokens: int
    temperature: float = 1.0
    """0 is greedy: the reported logprobs are then those at temperature 1."""
    top_p: float = 1.0
    """1 is off."""
    top_k: int = 0
    """0 is off."""
    min_p: float = 0.0
    """0 is off."""
    stop_token_ids: tuple[int, ...] = ()
    """Any of these ends a sample; the sampled stop id stays in the sample and is trained."""

    @property
    def truncates(self) -> bool:
        """True when tokens outside a nucleus get probability zero."""
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt of one epoch, rendered and tokenised. Lives in the controller."""

    id: str
    """Stable and unique within the run: `<source name>/<row number>`."""
    epoch: int
    source: str
    """Name of the `[[data]]` or `[[eval]]` entry."""
    token_ids: IntArray
    text: str
    """The rendered prompt, for samples.jsonl and for rewards; never tokenised again."""
    columns: dict[str, Any]
    """The data row as it was read; reward functions see it."""

    @property
    def row_digest(self) -> str:
        """Of the columns, 16 hex digits: tells later whether a row is still what a sample was graded with."""
        import hashlib

        return hashlib.blake2b(repr(self.columns).encode("utf-8", "backslashreplace"), digest_size=8).hexdigest()


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine needs of a prompt: token ids, and one seed for each of the n samples."""

    prompt_id: str
    epoch: int
    token_ids: IntArray
    seeds: tuple[int, ...]
    """One 63-bit seed a sample, in order of `sample_index`; see `sample_seed`."""


class Rollout(msgspec.Struct, frozen=True, kw_only=True):
    """One sampled continuation, as sampled: its ids are never re-tokenised."""

    prompt_id: str
    sample_index: int
    epoch: int
    prompt_token_ids: IntArray
    token_ids: IntArray
    """int32 (T,), with the stop id at the end when `finish_reason` is `stop`."""
    logprobs: FloatArray
    """float32 (T,), of the distribution that each token was drawn from."""
    versions: tuple[tuple[int, int], ...]
    """Run-length code of the weights version of each token: ((version, count), …), counts sum to T."""
    finish_reason: FinishReason
    engine: str
    """Name of the engine process."""
    started_s: float
    finished_s: float
    """Monotonic clock of the engine's host."""
    loss_mask: IntArray | None = None
    """uint8 (T,), 1 where the token is the model's own and trained; None means all ones (single turn)."""

    @property
    def version_min(self) -> int:
        """The oldest weights version among the tokens."""
        return min(version for version, _ in self.versions)


class Scored(msgspec.Struct, frozen=True, kw_only=True):
    """A rollout with its reward. `reward` is the weighted sum; `parts` has each function's own value."""

    rollout: Rollout
    prompt: Prompt
    text: str
    """The decoded continuation, special tokens left out: what reward functions saw."""
    reward: float
    parts: dict[str, float]
    errors: tuple[str, ...] = ()
    """One text for each reward function that failed on this sample; its value counted as 0."""


class TrainSample(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to train on. The only shape in which samples reach the trainer."""

    prompt_token_ids: IntArray
    token_ids: IntArray
    logprobs: FloatArray
    """The behaviour policy's, as sampled."""
    advantages: FloatArray
    """float32 (T,)."""
    loss_mask: IntArray
    """uint8 (T,)."""


class MiniBatch(msgspec.Struct, frozen=True, kw_only=True):
    """The samples of one optimizer update on this rank, with what is global about it."""

    samples: tuple[TrainSample, ...]
    denominator: float
    """Of the loss aggregation, over all ranks and micro-batches: the only place where the loss is normalised."""


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """Everything one training step consumes."""

    step: int
    minibatches: tuple[MiniBatch, ...]
    """In order: one optimizer update each. Epochs over the batch are written out."""
    sampling: Sampling
    """What the samples were drawn with: the trainer scores with the same temperature and truncation."""


class SupervisedSample(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt and the continuation to imitate (the stop id included)."""

    prompt_token_ids: IntArray
    token_ids: IntArray


def run_length(versions: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Run-length code of a version per token: `[3, 3, 4]` gives `((3, 2), (4, 1))`."""
    runs: list[tuple[int, int]] = []
    for version in versions:
        if runs and runs[-1][0] == version:
            runs[-1] = (version, runs[-1][1] + 1)
        else:
            runs.append((version, 1))
    return tuple(runs)


def pass_at(samples: int) -> tuple[int, ...]:
    """The k of the pass@k that an evaluation with so many samples a prompt reports: 1, 2, 4, … and `samples` itself."""
    return tuple(sorted({2**i for i in range(samples.bit_length()) if 2**i <= samples} | {samples}))


def sample_seed(run_seed: int, prompt_id: str, sample_index: int, epoch: int) -> int:
    """The seed of one sample: a hash of its identity, equal on every machine and in every process (63 bits)."""
    import hashlib

    key = f"{run_seed}\x1f{prompt_id}\x1f{sample_index}\x1f{epoch}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1
