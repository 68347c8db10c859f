"""Batched sampling from any causal language model of transformers. Pure compute: no RPC, no state between calls.

    waiting requests ──admit──▶ prefill (each prompt once) ──▶ rows (n a prompt) ──step──▶ … ──▶ finished samples
                                                                 ▲      │ finished rows leave at once
                                                                 └──────┘

At most `max_rows` samples are computed at a time; as rows finish, further requests are taken in, in order. Which rows
are computed together is a function of the call's arguments and of the sampled tokens alone, so that the same call
gives bit-identical results. No cache outlives a call: nothing of older weights can be continued from.

Shapes: B rows, P distinct prompts, S prompt columns, V vocabulary.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from offbeat.algorithms.truncation import sampled_logits
from offbeat.errors import ConfigError, RunError
from offbeat.rollout.kv_rows import KvRows
from offbeat.rollout.model_forward import ModelForward
from offbeat.rollout.sampling import check_sampling, draw, take_most_likely, uniforms
from offbeat.rpc.work import WorkLog
from offbeat.types import FinishReason, GenerateRequest, Rollout, Sampling

PREFILL_TOKENS = 16384
"""Padded prompt tokens of one prefill pass, unless a single prompt is longer. Memory only."""
REFILL_SHARE = 4
"""New requests join when 1/4 of the rows is free: a prefill pass costs about as much as a step."""


class HfSampler:
    """Samples from a model that stays where it is; its weights may change between calls, never during one.

    Args:
        model: in eval mode, on its device.
        name: of the engine; it is written into every rollout and error.
        max_rows: samples computed at once.
        on_tokens: called at every step with the number of tokens just sampled.
        on_finished: called with the number of samples that have just ended, where any has.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        name: str = "hf",
        max_rows: int = 256,
        on_tokens: Callable[[int], None] = lambda count: None,
        on_finished: Callable[[int], None] = lambda count: None,
    ) -> None:
        if max_rows < 1:
            raise ConfigError(f"max_rows = {max_rows}: must be at least 1.")
        self.forward = ModelForward(model)
        self.name = name
        self.max_rows = max_rows
        self.on_tokens = on_tokens
        self.on_finished = on_finished
        self.aborting = threading.Event()
        """Set it from any thread to cut running samples short at their next token; clear it to sample again."""

    def generate(
        self, requests: Sequence[GenerateRequest], sampling: Sampling, version: int, work: WorkLog | None = None
    ) -> list[Rollout]:
        """One rollout for each seed of each request, in that order, all stamped with `version`.

        `work` gets a lap `prefill` for each wave of requests that is taken in, and one `decode` until the next.

        Raises `ConfigError` for a request that cannot be computed, `RunError` when the model gives a NaN.
        """
        check_sampling(sampling)
        for request in requests:
            self._check(request, sampling)
        call = _Call(self, requests, sampling, version)
        with torch.inference_mode():
            call.run(work or WorkLog())
        return call.rollouts()

    def _check(self, request: GenerateRequest, sampling: Sampling) -> None:
        length = len(request.token_ids)
        if not length:
            raise ConfigError(
                f"prompt {request.prompt_id!r} is empty: there is nothing to continue; give it at least one token, "
                "e.g. the start token."
            )
        limit = self.forward.max_length
        if limit is not None and length + sampling.max_new_tokens > limit:
            raise ConfigError(
                f"prompt {request.prompt_id!r} has {length} tokens and max_new_tokens = {sampling.max_new_tokens}: "
                f"together more than the {limit} positions of the model; lower max_new_tokens or max_prompt_tokens."
            )
        low, high = int(request.token_ids.min()), int(request.token_ids.max())
        if low < 0 or high >= self.forward.vocab_size:
            raise ConfigError(
                f"prompt {request.prompt_id!r} has token id {low if low < 0 else high}, but the model has ids 0 to "
                f"{self.forward.vocab_size - 1}: the tokenizer is not this model's."
            )


@dataclass(frozen=True)
class _Sample:
    """One sample to draw: its request, its place in it."""

    request: GenerateRequest
    index: int


class _Call:
    """The state of one `generate` call."""

    def __init__(
        self, sampler: HfSampler, requests: Sequence[GenerateRequest], sampling: Sampling, version: int
    ) -> None:
        self.sampler = sampler
        self.forward = sampler.forward
        self.sampling = sampling
        self.version = version
        self.samples = [_Sample(request, index) for request in requests for index in range(len(request.seeds))]
        count = len(self.samples)
        self.seeds = np.array([sample.request.seeds[sample.index] for sample in self.samples], dtype=np.uint64)
        self.lengths = np.zeros(count, dtype=np.int64)
        self.reasons: list[FinishReason] = ["abort"] * count
        self.started_s = [time.monotonic()] * count
        self.finished_s = [0.0] * count
        self.is_stop_V = np.zeros(self.forward.vocab_size, dtype=bool)
        self.is_stop_V[[token for token in sampling.stop_token_ids if 0 <= token < len(self.is_stop_V)]] = True
        self.drawn: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        """What each step drew: which samples, their tokens, their logprobs."""
        self.waiting = list(range(count))
        if not self.forward.pads:
            self.waiting.sort(key=self._prompt_length)  # stable: equal lengths keep their order
        self.waiting.reverse()  # the next one is at the end
        self.kv: KvRows = self._new_rows()
        self.rows_B = np.zeros(0, dtype=np.int64)
        """Which sample each row computes."""
        self.first_B = np.zeros(0, dtype=np.int64)
        """First column of each row's prompt."""
        self.columns = 0
        self._first_on_device: Tensor = torch.zeros(0, dtype=torch.int64, device=self.forward.device)
        self._tokens_B: Tensor = self._first_on_device
        """The newest token of each row: sampled, not yet fed."""

    def _new_rows(self) -> KvRows:
        return self.forward.new_rows(min(len(self.samples), self.sampler.max_rows), self.sampling.max_new_tokens)

    def run(self, work: WorkLog) -> None:
        while (self.waiting or len(self.rows_B)) and not self.sampler.aborting.is_set():
            wave = self._wave()
            if wave:
                self._admit(wave)
                work.lap("prefill")
            else:
                self._step()
                work.lap("decode")
        now = time.monotonic()
        for sample, reason in enumerate(self.reasons):
            if reason == "abort":
                self.finished_s[sample] = now

    # --- taking requests in -------------------------------------------------------------------------------------

    def _prompt_length(self, sample: int) -> int:
        return len(self.samples[sample].request.token_ids)

    def _wave(self) -> list[int]:
        """The samples to take in now: whole requests while they fit, in order; none if too few rows are free."""
        rows, limit = len(self.rows_B), self.sampler.max_rows
        free = limit - rows
        if not self.waiting or (rows and (not self.kv.joins or not self.forward.pads or free * REFILL_SHARE < limit)):
            return []
        wave: list[int] = []
        length = self._prompt_length(self.waiting[-1])
        while self.waiting and (self.forward.pads or self._prompt_length(self.waiting[-1]) == length):
            request = self.samples[self.waiting[-1]].request
            size = next(
                (i for i, s in enumerate(reversed(self.waiting)) if self.samples[s].request is not request),
                len(self.waiting),
            )
            if len(wave) + size > free:
                if wave or rows:
                    break
                size = free  # a request with more samples than there are rows is computed in parts
            wave.extend(self.waiting.pop() for _ in range(size))
        return wave

    def _admit(self, wave: list[int]) -> None:
        """Prefill each distinct prompt of the wave once, draw first tokens, and add the rows that go on."""
        now = time.monotonic()
        by_prompt: dict[bytes, list[int]] = {}
        for sample in wave:
            self.started_s[sample] = now
            key = np.ascontiguousarray(self.samples[sample].request.token_ids, dtype=np.int32).tobytes()
            by_prompt.setdefault(key, []).append(sample)
        groups = list(by_prompt.values())
        if self.kv.joins:
            groups.sort(key=lambda group: self._prompt_length(group[0]))
        for part in self._parts(groups):
            self._prefill(part)

    def _parts(self, groups: list[list[int]]) -> list[list[list[int]]]:
        """Prompts split by padded tokens, where the parts can be joined again."""
        if not self.kv.joins:
            return [groups]
        parts: list[list[list[int]]] = [[]]
        for group in groups:  # in order of length, so the newest one is the longest
            if parts[-1] and (len(parts[-1]) + 1) * self._prompt_length(group[0]) > PREFILL_TOKENS:
                parts.append([])
            parts[-1].append(group)
        return parts

    def _prefill(self, groups: list[list[int]]) -> None:
        lengths_P = np.array([self._prompt_length(group[0]) for group in groups])
        width = int(lengths_P.max())
        tokens_PS = np.zeros((len(groups), width), dtype=np.int64)
        for row, group in enumerate(groups):
            tokens_PS[row, width - lengths_P[row] :] = self.samples[group[0]].request.token_ids
        first_P = width - lengths_P
        logits_PV, cache = self.forward.prefill(self._to_device(tokens_PS), self._to_device(first_P))

        samples_B = np.array([sample for group in groups for sample in group])
        prompt_B = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
        going, tokens_B = self._draw(logits_PV.index_select(0, self._to_device(prompt_B)), samples_B)
        if not going.any():
            return
        missing = max(0, width - self.columns)
        self.columns += missing
        self.kv.join(cache, self._to_device(prompt_B[going]))
        self.rows_B = np.concatenate([self.rows_B, samples_B[going]])
        new_first_B = first_P[prompt_B[going]] + self.columns - width
        self._tokens_B = torch.cat([self._tokens_B, tokens_B[self._to_device(np.flatnonzero(going))]])
        self._set_first(np.concatenate([self.first_B + missing, new_first_B]))

    # --- one token a row ----------------------------------------------------------------------------------------

    def _step(self) -> None:
        logits_BV = self.forward.step(self._tokens_B, self._first_on_device, self.columns, self.kv.cache)
        self.columns += 1
        going, self._tokens_B = self._draw(logits_BV, self.rows_B)
        if not going.all():
            self._remove(going)

    def _draw(self, logits_BV: Tensor, samples_B: np.ndarray) -> tuple[np.ndarray, Tensor]:
        """Draw a token for each of these samples; which of them go on (bool, host), and the tokens (device)."""
        logits_BV = sampled_logits(logits_BV, self.sampling)
        if self.sampling.temperature == 0.0:
            tokens_B, logprobs_B = take_most_likely(logits_BV)
        else:
            numbers_B = uniforms(self.seeds[samples_B], self.lengths[samples_B])
            tokens_B, logprobs_B = draw(logits_BV, self._to_device(numbers_B))
        # One transfer a step: float64 holds a token id and a logprob exactly.
        host_tokens_B, host_logprobs_B = torch.stack([tokens_B.double(), logprobs_B]).cpu().numpy()
        host_tokens_B = host_tokens_B.astype(np.int32)
        if not np.isfinite(host_logprobs_B).all():
            self._refuse(int(samples_B[np.flatnonzero(~np.isfinite(host_logprobs_B))[0]]))
        self.drawn.append((samples_B, host_tokens_B, host_logprobs_B.astype(np.float32)))
        self.lengths[samples_B] += 1
        self.sampler.on_tokens(len(samples_B))

        stopped_B = self.is_stop_V[host_tokens_B]
        done_B = stopped_B | (self.lengths[samples_B] >= self.sampling.max_new_tokens)
        now = time.monotonic()
        for row in np.flatnonzero(done_B):
            self.reasons[samples_B[row]] = "stop" if stopped_B[row] else "length"
            self.finished_s[samples_B[row]] = now
        if done_B.any():
            self.sampler.on_finished(int(done_B.sum()))
        return ~done_B, tokens_B

    def _remove(self, going: np.ndarray) -> None:
        """Finished rows leave: the last rows that go on move into their places; leading padding is dropped."""
        count = int(going.sum())
        order = np.arange(count)
        order[~going[:count]] = count + np.flatnonzero(going[count:])
        self.rows_B = self.rows_B[order]
        if not count:
            self.kv, self.columns = self._new_rows(), 0
            self._tokens_B = self._tokens_B[:0]
            self._set_first(self.first_B[:0])
            return
        order_on_device = self._to_device(order)
        self.kv.keep(order_on_device)
        self._tokens_B = self._tokens_B.index_select(0, order_on_device)
        first_B = self.first_B[order]
        padding = int(first_B.min())
        if padding and self.kv.joins:
            self.kv.trim(padding)
            self.columns -= padding
            first_B = first_B - padding
        self._set_first(first_B)

    def _set_first(self, first_B: np.ndarray) -> None:
        self.first_B = first_B
        self._first_on_device = self._to_device(first_B)

    def _to_device(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.forward.device)

    def _refuse(self, sample: int) -> None:
        request, index = self.samples[sample].request, self.samples[sample].index
        raise RunError(
            f"{self.sampler.name}: the model gave no finite logprob for prompt {request.prompt_id!r}, sample {index}, "
            f"token {self.lengths[sample]}, with weights version {self.version}: its weights or its logits hold NaN or "
            "infinity; look at grad_norm and loss of the steps before, or lower the learning rate."
        )

    # --- results ------------------------------------------------------------------------------------------------

    def rollouts(self) -> list[Rollout]:
        """The samples in the order of the call."""
        samples = np.concatenate([np.zeros(0, dtype=np.int64), *(step[0] for step in self.drawn)])
        order = np.argsort(samples, kind="stable")  # by sample; a sample's tokens stay in the order of their steps
        tokens = np.concatenate([np.zeros(0, dtype=np.int32), *(step[1] for step in self.drawn)])[order]
        logprobs = np.concatenate([np.zeros(0, dtype=np.float32), *(step[2] for step in self.drawn)])[order]
        ends = np.cumsum(self.lengths)
        return [
            self._rollout(i, tokens[end - length : end], logprobs[end - length : end])
            for i, (end, length) in enumerate(zip(ends, self.lengths, strict=True))
        ]

    def _rollout(self, sample: int, token_ids: np.ndarray, logprobs: np.ndarray) -> Rollout:
        request = self.samples[sample].request
        return Rollout(
            prompt_id=request.prompt_id,
            sample_index=self.samples[sample].index,
            epoch=request.epoch,
            prompt_token_ids=np.asarray(request.token_ids, dtype=np.int32),
            token_ids=token_ids,
            logprobs=logprobs,
            versions=((self.version, len(token_ids)),),
            finish_reason=self.reasons[sample],
            engine=self.sampler.name,
            started_s=self.started_s[sample],
            finished_s=self.finished_s[sample],
        )
