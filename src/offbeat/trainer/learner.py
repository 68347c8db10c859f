"""Learning with one model: policy updates, supervised updates, scoring. No RPC, no files.

    update(batch)      for each mini-batch: gradient (micro-batches) → sum over ranks → clip → AdamW
                       weights_version + 1, whatever happened inside

An update whose loss or gradient is not finite is not applied: weights, optimizer and schedule stay as they are, and
`max_skipped_updates` of them in a row end the run. An update without tokens is not applied either, is counted apart and
neither counts to that limit nor resets it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.optim import AdamW
from transformers import PreTrainedModel

from offbeat.algorithms.losses import clipped_policy_loss
from offbeat.algorithms.reduce import reduce_loss, token_weights
from offbeat.config import LossSection, TrainerSection
from offbeat.errors import TrainingDiverged
from offbeat.layer_progress import tell_of_layers
from offbeat.rpc.messages import UpdateResult
from offbeat.rpc.work import WorkLog
from offbeat.trainer.batching import MicroBatch, Sequenced, micro_batches
from offbeat.trainer.forward import Scorer
from offbeat.trainer.loading import check_float32, checkpoint_activations
from offbeat.trainer.mesh import Mesh
from offbeat.trainer.optimizer import adamw, apply, clip_gradients, scheduled_rate, trainable
from offbeat.trainer.tally import StepTally, UpdateFacts, UpdateTally
from offbeat.types import Batch, FloatArray, MiniBatch, Sampling, SupervisedSample, TrainSample

SUPERVISED_BETAS = (0.9, 0.95)
SUPERVISED_SAMPLING = Sampling(max_new_tokens=1)
"""Temperature 1, no truncation: plain cross entropy."""


@dataclass
class Counters:
    """What a resume must bring back."""

    weights_version: int = 0
    """Training steps done."""
    optimizer_updates: int = 0
    """Policy updates applied: the place in the learning-rate schedule."""
    skipped_updates: int = 0
    """Updates with a non-finite loss or gradient, in all."""
    skipped_in_a_row: int = 0


class Learner:
    """Owns the optimizers; the model is the caller's and is changed in place. Not thread-safe."""

    def __init__(
        self,
        model: PreTrainedModel,
        trainer: TrainerSection,
        loss: LossSection,
        *,
        total_updates: int,
        mesh: Mesh | None = None,
        progress: Callable[[str | None], None] = lambda note: None,
    ) -> None:
        """`progress` is called with a note before each micro-batch, and with None after each layer of it.

        It must be thread-safe.
        """
        check_float32(model)
        if trainer.gradient_checkpointing:
            checkpoint_activations(model)
        self.model = model
        self.counters = Counters()
        self.policy: AdamW = adamw(model, betas=trainer.betas, eps=trainer.eps, weight_decay=trainer.weight_decay)
        self.supervised: AdamW | None = None
        self._trainer = trainer
        self._loss = loss
        self._total_updates = total_updates
        self._mesh = mesh or Mesh()
        self._progress = progress
        self._parameters = trainable(model)
        self.device = self._parameters[0].device
        self._scorer = Scorer(model, self.device, trainer.dtype)
        tell_of_layers(model, lambda: progress(None))

    def update(self, batch: Batch) -> UpdateResult:
        """One training step. Raises `TrainingDiverged` after too many non-finite updates in a row."""
        started, work = time.monotonic(), WorkLog()
        tally = StepTally()
        for index, minibatch in enumerate(batch.minibatches):
            if minibatch.denominator <= 0:  # global, so every rank skips the same updates
                tally.empty.append(index)
                continue
            facts = self.gradient(minibatch, batch.sampling)
            work.lap("forward_backward")
            norm = clip_gradients(self._parameters, self._trainer.max_grad_norm)
            rate = scheduled_rate(self._trainer, self.counters.optimizer_updates, self._total_updates)
            if self._applied(self.policy, rate, norm, finite=facts.finite, what=f"update {index} of step {batch.step}"):
                self.counters.optimizer_updates += 1
                tally.applied.append((facts, rate, norm))
            else:
                tally.nonfinite.append(index)
            work.lap("optimizer")
        self.counters.weights_version += 1
        return self._result(tally.metrics(), tally.skipped, started, work)

    def gradient(self, minibatch: MiniBatch, sampling: Sampling) -> UpdateFacts:
        """Leaves the gradient of the whole update, over all ranks, in the parameters; changes nothing else."""
        self.model.zero_grad(set_to_none=True)
        tally = UpdateTally(self.device)
        parts = list(micro_batches(minibatch.samples, self._trainer.micro_batch_tokens))
        for number, micro in enumerate(parts, start=1):
            self._progress(f"update, micro-batch {number} of {len(parts)}")
            samples = [minibatch.samples[row] for row in micro.rows]
            self._policy_backward(micro, samples, minibatch.denominator, sampling, tally)
        self._progress("update, optimizer")
        self._mesh.sum_gradients(self._parameters)
        return tally.finish(self._mesh)

    def _policy_backward(
        self,
        micro: MicroBatch,
        samples: Sequence[TrainSample],
        denominator: float,
        sampling: Sampling,
        tally: UpdateTally,
    ) -> None:
        tensor = self._scorer.tensor
        behaviour_N = tensor(np.concatenate([s.logprobs for s in samples]).astype(np.float32))
        advantages_N = tensor(np.concatenate([s.advantages for s in samples]).astype(np.float32))
        mask_N = tensor(np.concatenate([s.loss_mask for s in samples]).astype(bool))
        weight_N = token_weights(mask_N, tensor(micro.sample_N), self._loss.aggregation)

        scored = self._scorer.score(micro, sampling, entropy=True)
        self._progress(None)
        trained_N = mask_N & scored.inside_N
        policy = clipped_policy_loss(
            scored.logprobs_N,
            behaviour_N,
            advantages_N,
            clip_low=self._loss.clip_low,
            clip_high=self._loss.clip_high,
            dual_clip=self._loss.dual_clip,
        )
        loss = reduce_loss(policy.loss_N, weight_N * scored.inside_N, denominator)
        loss.backward()
        tally.add(loss, policy, scored.entropy_N, trained_N, (mask_N & ~scored.inside_N).sum())

    def _applied(self, optimizer: AdamW, rate: float, norm: float, *, finite: bool, what: str) -> bool:
        """Steps if the gradient is sound; otherwise drops it and counts."""
        if finite and math.isfinite(norm):
            apply(optimizer, rate)
            self.counters.skipped_in_a_row = 0
            return True
        self.model.zero_grad(set_to_none=True)
        self.counters.skipped_updates += 1
        self.counters.skipped_in_a_row += 1
        limit = self._trainer.max_skipped_updates
        if self.counters.skipped_in_a_row >= limit:
            raise TrainingDiverged(
                f"{what}: the loss or gradient is not finite (gradient norm {norm}), {limit} times in a row "
                f"(trainer.max_skipped_updates). None of them was applied; lower trainer.lr (now {rate:.3g} here), or "
                "resume from an earlier checkpoint."
            )
        return False

    def supervise(self, samples: Sequence[SupervisedSample], rate: float, *, last: bool) -> UpdateResult:
        """One update on the mean cross entropy of all continuation tokens, with an optimizer state of its own.

        The version and the policy optimizer stay as they are. `last` drops the supervised optimizer.
        """
        started, work = time.monotonic(), WorkLog()
        tokens = int(self._mesh.sum(torch.tensor(sum(len(s.token_ids) for s in samples), device=self.device)))
        metrics = {"loss": math.nan, "grad_norm": math.nan, "lr": rate, "tokens_trained": float(tokens)}
        applied = False
        if tokens:
            if self.supervised is None:
                self.supervised = adamw(self.model, betas=SUPERVISED_BETAS, eps=self._trainer.eps, weight_decay=0.0)
            loss = self._supervised_gradient(samples, tokens)
            norm = clip_gradients(self._parameters, self._trainer.max_grad_norm)
            applied = self._applied(self.supervised, rate, norm, finite=math.isfinite(loss), what="supervised update")
            metrics |= {"loss": loss, "grad_norm": norm}
        if last:
            self.supervised = None
        work.lap("supervise")
        return self._result(metrics, () if applied else (0,), started, work)

    def _supervised_gradient(self, samples: Sequence[SupervisedSample], tokens: int) -> float:
        self.model.zero_grad(set_to_none=True)
        losses: list[torch.Tensor] = []
        for micro in micro_batches(samples, self._trainer.micro_batch_tokens):
            self._progress("supervise")
            scored = self._scorer.score(micro, SUPERVISED_SAMPLING)
            self._progress(None)
            loss = -scored.logprobs_N.sum() / tokens
            loss.backward()
            losses.append(loss.detach())
        self._progress("supervise, optimizer")
        self._mesh.sum_gradients(self._parameters)
        own = torch.stack(losses).sum() if losses else torch.zeros((), device=self.device)
        return float(self._mesh.sum(own))

    @torch.no_grad()
    def logprobs(self, sequences: Sequence[Sequenced], sampling: Sampling) -> list[FloatArray]:
        """One float32 array a sequence, as `Trainer.logprobs`. -inf: outside this model's own nucleus."""
        results: list[FloatArray] = [np.zeros(0, np.float32) for _ in sequences]
        for micro in micro_batches(sequences, self._trainer.micro_batch_tokens):
            self._progress("logprobs")
            scored = self._scorer.score(micro, sampling)
            logprobs_N = torch.where(scored.inside_N, scored.logprobs_N, float("-inf")).cpu().numpy()
            counts = [len(sequences[row].token_ids) for row in micro.rows]
            for row, part in zip(micro.rows, np.split(logprobs_N, np.cumsum(counts)[:-1]), strict=True):
                results[row] = part
        self._progress(None)
        return results

    def _result(
        self, metrics: dict[str, float], skipped: tuple[int, ...], started: float, work: WorkLog
    ) -> UpdateResult:
        return UpdateResult(
            metrics=metrics,
            weights_version=self.counters.weights_version,
            optimizer_updates=self.counters.optimizer_updates,
            skipped=skipped,
            busy_s=time.monotonic() - started,
            spans=work.spans(),
        )
