"""The trainer process: `python -m offbeat.trainer.worker`. One rank, its calls strictly one after the other.

describe   update   supervise   logprobs   save   load      and, from the weight sender: weights_offer, _send, _close
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np
import torch

from offbeat.devices import choose_device
from offbeat.faults import point
from offbeat.rpc.messages import (
    LoadCall,
    LoadResult,
    LogprobsCall,
    LogprobsResult,
    Nothing,
    SaveCall,
    SaveResult,
    SuperviseCall,
    TrainerDescription,
    UpdateCall,
    UpdateResult,
)
from offbeat.rpc.server import Method, WorkerContext, serve
from offbeat.rpc.work import WorkLog
from offbeat.trainer import state
from offbeat.trainer.learner import Learner
from offbeat.trainer.loading import head_rows, load_model, max_length
from offbeat.trainer.mesh import Mesh
from offbeat.trainer.settings import TrainerSettings
from offbeat.trainer.weight_source import ModelWeightSource
from offbeat.weights.sender import WeightSender


class TrainerService:
    """The handlers: messages in and out, the work is the learner's."""

    def __init__(self, learner: Learner, dtype: str, rank: int) -> None:
        self._learner = learner
        self._dtype = dtype
        self._rank = rank

    def describe(self, call: Nothing) -> TrainerDescription:
        model, counters = self._learner.model, self._learner.counters
        return TrainerDescription(
            torch_version=str(torch.__version__),
            parameters=sum(p.numel() for p in model.parameters()),
            vocab_size=head_rows(model),
            dtype=self._dtype,
            device=str(self._learner.device),
            max_length=max_length(model),
            weights_version=counters.weights_version,
            optimizer_updates=counters.optimizer_updates,
        )

    def update(self, call: UpdateCall) -> UpdateResult:
        point("trainer.update")
        return self._learner.update(call.batch)

    def supervise(self, call: SuperviseCall) -> UpdateResult:
        point("trainer.supervise")
        return self._learner.supervise(call.samples, call.lr, last=call.last)

    def logprobs(self, call: LogprobsCall) -> LogprobsResult:
        point("trainer.logprobs")
        work = WorkLog()
        logprobs = self._learner.logprobs(call.sequences, call.sampling)
        work.lap("logprobs")
        return LogprobsResult(
            logprobs=tuple(logprobs),
            weights_version=self._learner.counters.weights_version,
            spans=work.spans(),
        )

    def save(self, call: SaveCall) -> SaveResult:
        point("trainer.save")
        folder, work = Path(call.folder), WorkLog()
        files = state.save(self._learner, folder, self._rank)
        work.lap("save")
        point("trainer.after_save")
        return SaveResult(
            files=tuple(str(path.relative_to(folder)) for path in files),
            bytes_written=sum(path.stat().st_size for path in files),
            spans=work.spans(),
        )

    def load(self, call: LoadCall) -> LoadResult:
        point("trainer.load")
        work = WorkLog()
        state.load(self._learner, Path(call.folder), self._rank)
        work.lap("load")
        return LoadResult(weights_version=self._learner.counters.weights_version, spans=work.spans())

    def methods(self) -> dict[str, Method]:
        return {
            "describe": Method(Nothing, self.describe),
            "update": Method(UpdateCall, self.update),
            "supervise": Method(SuperviseCall, self.supervise),
            "logprobs": Method(LogprobsCall, self.logprobs),
            "save": Method(SaveCall, self.save),
            "load": Method(LoadCall, self.load),
        }


def build(context: WorkerContext) -> Mapping[str, Method]:
    """Loads the model; everything that this process can do, by name."""
    settings = msgspec.convert(context.settings, TrainerSettings)
    section, loss = settings.trainer_section(), settings.loss_section()
    if section.threads is not None:
        torch.set_num_threads(section.threads)
    random.seed(settings.seed)
    np.random.seed(settings.seed % (1 << 32))
    torch.manual_seed(settings.seed)
    context.progress.advance("loading the model")
    model = load_model(settings.model, settings.revision, init=settings.init, seed=settings.seed)
    model.to(choose_device(section.device))  # pyright: ignore[reportArgumentType] - mistyped by transformers' wrapper
    point("trainer.init")
    mesh = Mesh()
    learner = Learner(
        model,
        section,
        loss,
        total_updates=settings.total_updates,
        mesh=mesh,
        progress=context.progress.advance,
    )
    sender = WeightSender(ModelWeightSource(model), lambda: learner.counters.weights_version, context.progress)
    return {**TrainerService(learner, section.dtype, mesh.rank).methods(), **sender.methods()}


if __name__ == "__main__":
    serve(build)
