"""The `hf` engine as a process: `python -m offbeat.rollout.worker`, started and called by the controller.

    main thread   describe, generate, resume and the weights, strictly one after the other: no step overlaps a load
    I/O thread    pause: closes admission at once; `abort` cuts the running samples short at their next token

The model starts with random weights and is STALE: nothing is generated before a verified transfer. Keys and values
live within one `generate` call, so no cache survives a weight update. torch is imported in `build`, when the
connection is up.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import msgspec

from offbeat.errors import RunError
from offbeat.faults import point
from offbeat.rollout.settings import EngineSettings
from offbeat.rpc.messages import EngineDescription, GenerateCall, GenerateResult, Nothing, PauseCall
from offbeat.rpc.server import Method, Progress, WorkerContext, serve
from offbeat.rpc.work import WorkLog

if TYPE_CHECKING:
    from offbeat.rollout.hf import HfSampler
    from offbeat.weights.session import EngineState

CAPABILITIES = (
    "logprobs of the sampled distribution",
    "seed per sample",
    "shared prefill",
    "abort",
)


class EngineService:
    """The four methods that are not about weights."""

    def __init__(
        self,
        name: str,
        sampler: HfSampler,
        tokens: TokenCount,
        state: EngineState,
        describe: Callable[[], EngineDescription],
    ) -> None:
        self._name = name
        self._sampler = sampler
        self._tokens = tokens
        self._state = state
        self._describe = describe
        self._paused = threading.Event()

    def methods(self) -> dict[str, Method]:
        return {
            "describe": Method(Nothing, lambda _: self._describe()),
            "generate": Method(GenerateCall, self.generate),
            "pause": Method(PauseCall, self.pause, urgent=True),
            # In the queue of the main thread: behind the samples that an abort cuts short, so that it cannot undo it.
            "resume": Method(Nothing, self.resume),
        }

    def generate(self, call: GenerateCall) -> GenerateResult:
        if self._paused.is_set():
            raise RunError(f"{self._name} is paused and takes no requests: resume it first.")
        with self._state.request(probe=call.probe) as version:
            point("engine.generate")
            self._tokens.begin()
            started_s = time.monotonic()
            work = WorkLog()
            rollouts = self._sampler.generate(call.requests, call.sampling, version, work)
            return GenerateResult(rollouts=tuple(rollouts), busy_s=time.monotonic() - started_s, spans=work.spans())

    def pause(self, call: PauseCall) -> None:
        """Returns at once; the reply to a later `describe` says that the running call has ended."""
        self._paused.set()
        if call.mode == "abort":
            self._sampler.aborting.set()

    def resume(self, _: Nothing) -> None:
        self._sampler.aborting.clear()
        self._paused.clear()


class TokenCount:
    """Tokens sampled and samples finished so far by the call at work, as the engine's sign of progress."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._tokens = 0
        self._samples = 0

    def begin(self) -> None:
        self._tokens = self._samples = 0
        self._progress.advance(tokens=0, samples=0)

    def add(self, count: int) -> None:
        point("engine.step")
        self._tokens += count
        self._progress.advance(tokens=self._tokens)

    def finished(self, count: int) -> None:
        self._samples += count
        self._progress.advance(samples=self._samples)


def build(context: WorkerContext) -> Mapping[str, Method]:
    """Build the model; all weights come with the first transfer."""
    settings = msgspec.convert(dict(context.settings), EngineSettings)
    point("engine.init")
    context.progress.advance(note="loading libraries")
    import torch
    import transformers

    from offbeat.devices import choose_device
    from offbeat.layer_progress import tell_of_layers
    from offbeat.rollout.empty_model import empty_model
    from offbeat.rollout.hf import HfSampler
    from offbeat.rollout.weight_sink import ModelWeightSink
    from offbeat.weights.receiver import WeightReceiver
    from offbeat.weights.session import EngineState

    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    device = choose_device(settings.device)
    context.progress.advance(note=f"building the model on {device}")
    model = empty_model(settings.model, settings.revision, settings.dtype, device)
    tell_of_layers(model, context.progress.advance)  # a prefill pass can be long
    point("engine.after_load")
    context.progress.advance(note="ready")
    state = EngineState()
    tokens = TokenCount(context.progress)
    sampler = HfSampler(
        model, name=context.name, max_rows=settings.max_rows, on_tokens=tokens.add, on_finished=tokens.finished
    )

    def describe() -> EngineDescription:
        return EngineDescription(
            engine="hf",
            engine_version=transformers.__version__,
            torch_version=str(torch.__version__),
            weights_version=state.version,
            state=state.name,
            vocab_size=sampler.forward.vocab_size,
            dtype=settings.dtype,
            device=str(device),
            capabilities=CAPABILITIES,
            max_length=sampler.forward.max_length or 0,
        )

    receiver = WeightReceiver(ModelWeightSink(model, settings.dtype), state, context.progress)
    return {**EngineService(context.name, sampler, tokens, state, describe).methods(), **receiver.methods()}


if __name__ == "__main__":
    serve(build)
