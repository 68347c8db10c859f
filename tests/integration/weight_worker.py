"""Worker processes for the weight-sync tests: a trainer and an engine that are as small as can be, with switches.

Both hold a real transformers model and serve `weights_*` over the real RPC. The engine samples greedily or at a
temperature without a cache; the trainer's "update" adds a number to every weight.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from offbeat.rollout.weight_sink import ModelWeightSink
from offbeat.rpc.messages import (
    Arguments,
    EngineDescription,
    GenerateCall,
    GenerateResult,
    LogprobsCall,
    LogprobsResult,
    Manifest,
    Nothing,
    TrainerDescription,
)
from offbeat.rpc.server import Method, WorkerContext, serve
from offbeat.trainer.weight_source import ModelWeightSource
from offbeat.types import Rollout
from offbeat.weights.receiver import WeightReceiver
from offbeat.weights.sender import WeightSender
from offbeat.weights.session import EngineState


class Step(Arguments, frozen=True, kw_only=True):
    """The trainer's weights change and its version rises."""

    seed: int = 0


class Peek(Arguments, frozen=True, kw_only=True):
    """Bytes of one tensor, sockets and threads of the process."""

    name: str


class Break(Arguments, frozen=True, kw_only=True):
    """From now on this engine loads wrongly (`fault`), or reaches fault points (`points`)."""

    fault: str = ""
    points: str = ""


class Peeked(Arguments, frozen=True, kw_only=True):
    total: float
    descriptors: int
    threads: int


def build(context: WorkerContext) -> Mapping[str, Method]:
    torch.set_num_threads(1)
    settings = context.settings
    dtype = getattr(torch, settings.get("dtype", "float32"))
    model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=dtype)
    model.eval()
    if settings["role"] == "trainer":
        return _trainer(context, model)
    return _engine(context, model)


def _logprobs(model: Any, prompt: np.ndarray, continuation: np.ndarray, temperature: float) -> torch.Tensor:
    ids = torch.tensor([[*prompt.tolist(), *continuation.tolist()]])
    with torch.no_grad():
        logits = model(ids).logits[0].float() / temperature
    picked = logits[len(prompt) - 1 : -1].log_softmax(-1)
    return picked.gather(1, torch.tensor(continuation.tolist())[:, None])[:, 0]


def _trainer(context: WorkerContext, model: Any) -> Mapping[str, Method]:
    version = 0

    def step(call: Step) -> None:
        nonlocal version
        version += 1
        generator = torch.Generator().manual_seed(call.seed + version)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter.dtype) * 0.05)

    def describe(_: Nothing) -> TrainerDescription:
        return TrainerDescription(
            torch_version=str(torch.__version__), parameters=0, vocab_size=model.config.vocab_size, dtype="float32",
            device="cpu", max_length=4096, weights_version=version, optimizer_updates=0,
        )  # fmt: skip

    def logprobs(call: LogprobsCall) -> LogprobsResult:
        rows = tuple(
            _logprobs(model, s.prompt_token_ids, s.token_ids, call.sampling.temperature).numpy() for s in call.sequences
        )
        return LogprobsResult(logprobs=rows, weights_version=version)

    def break_(call: Break) -> None:
        os.environ["OFFBEAT_FAULTS"] = call.points

    sender = WeightSender(ModelWeightSource(model), lambda: version, context.progress)
    return {
        "break": Method(Break, break_),
        "describe": Method(Nothing, describe),
        "step": Method(Step, step),
        "peek": Method(Peek, _peek(model)),
        "logprobs": Method(LogprobsCall, logprobs),
        **sender.methods(),
    }


class _FaultySink(ModelWeightSink):
    """Loads wrongly as `fault` says: what a real engine's loader has done at some time."""

    def __init__(self, model: Any, dtype: str, fault: str) -> None:
        self.fault = fault
        self._old_head = model.get_output_embeddings().weight.detach().clone()
        self._model = model
        self._tied = model.lm_head.weight is model.get_input_embeddings().weight
        super().__init__(model, dtype, refresh=[self._after])

    def check(self, manifest: Manifest) -> None:
        if self.fault == "refuse":
            raise RuntimeError("this engine does not like the manifest")
        super().check(manifest)

    def _after(self) -> None:
        if self.fault == "reset_fails":
            raise RuntimeError("the prefix cache could not be reset: 3 requests hold blocks")

    def finish(self, manifest: Manifest) -> dict[str, torch.Tensor]:
        memory = super().finish(manifest)
        if self.fault == "forget_tied_head":  # the head that is used is a stale copy; what is shown is right
            self._model.lm_head = torch.nn.Linear(*reversed(self._old_head.shape), bias=False)
            self._model.lm_head.weight = torch.nn.Parameter(self._old_head, requires_grad=False)
        elif self._tied and self._model.lm_head.weight is not self._model.get_input_embeddings().weight:
            self._model.lm_head.weight = self._model.get_input_embeddings().weight  # mended
        if self.fault == "stale_layer":
            name = next(name for name in memory if "layers.1" in name and "q_proj" in name)
            memory[name].zero_()
        if self.fault == "swap":
            names = [name for name in memory if "layers.0" in name and "norm" in name]
            first, second = memory[names[0]], memory[names[1]]
            kept = first.clone()
            first.copy_(second)
            second.copy_(kept)
        return memory


def _engine(context: WorkerContext, model: Any) -> Mapping[str, Method]:
    dtype = context.settings.get("dtype", "float32")
    state = EngineState()
    sink = _FaultySink(model, dtype, context.settings.get("fault", ""))
    receiver = WeightReceiver(sink, state, context.progress)

    def describe(_: Nothing) -> EngineDescription:
        return EngineDescription(
            engine="test", engine_version="1", torch_version=str(torch.__version__), weights_version=state.version,
            state=state.name, vocab_size=model.config.vocab_size, dtype=dtype, device="cpu", capabilities=(),
            max_length=256,
        )  # fmt: skip

    def generate(call: GenerateCall) -> GenerateResult:
        with state.request(probe=call.probe) as version:
            temperature = 1.0 if sink.fault == "ignore_temperature" else call.sampling.temperature
            rollouts = [
                _sample(model, request, seed, index, call.sampling.max_new_tokens, temperature, version, context.name)
                for request in call.requests
                for index, seed in enumerate(request.seeds)
            ]
        return GenerateResult(rollouts=tuple(rollouts), busy_s=0.0)

    def break_(call: Break) -> None:
        sink.fault = call.fault
        os.environ["OFFBEAT_FAULTS"] = call.points

    return {
        "break": Method(Break, break_),
        "describe": Method(Nothing, describe),
        "generate": Method(GenerateCall, generate),
        "peek": Method(Peek, _peek(model)),
        **receiver.methods(),
    }


def _sample(
    model: Any, request: Any, seed: int, index: int, tokens: int, temperature: float, version: int, engine: str
) -> Rollout:
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = request.token_ids.tolist()
    for _ in range(tokens):
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, -1].float() / temperature
        ids.append(int(torch.multinomial(logits.softmax(-1), 1, generator=generator)))
    continuation = np.array(ids[len(request.token_ids) :], np.int32)
    return Rollout(
        prompt_id=request.prompt_id, sample_index=index, epoch=0, prompt_token_ids=request.token_ids,
        token_ids=continuation, versions=((version, tokens),), finish_reason="length", engine=engine, started_s=0.0,
        finished_s=0.0, logprobs=_logprobs(model, request.token_ids, continuation, temperature).numpy(),
    )  # fmt: skip


def _peek(model: Any) -> Callable[[Peek], Peeked]:
    def peek(call: Peek) -> Peeked:
        tensor = model.state_dict()[call.name]
        return Peeked(
            total=float(tensor.double().sum()),
            descriptors=len(os.listdir("/proc/self/fd")),
            threads=len(os.listdir("/proc/self/task")),
        )

    return peek


if __name__ == "__main__":
    serve(build)
