"""The composition root: from a config to checked inputs, and from those to running processes.

    prepare(config) → Prepared     everything that can be wrong is found here; no process, no device
    start(prepared) → System       engines, trainer and reward workers, connected and checked; ended on leaving

The only module that knows which implementation stands behind each seam.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, assert_never

import msgspec

from offbeat.config import Config
from offbeat.data.chat import decode_completions
from offbeat.data.prompts import EvalSet as EvalData
from offbeat.data.prompts import PromptStream, open_eval, open_train, own_problems
from offbeat.data.sources import check_source
from offbeat.data.warmup import WarmupSet, open_warmup
from offbeat.errors import ConfigError, DataError, first_cause
from offbeat.evaluate import EvalSet
from offbeat.metrics.spans import Timeline
from offbeat.metrics.writer import RunFolder
from offbeat.models import (
    ModelFolder,
    check_architecture,
    inspect_model,
    load_tokenizer,
    stop_token_ids,
)
from offbeat.ports import Engine
from offbeat.rewards.checks import check_rewards
from offbeat.rewards.functions import file_digests, inspect_function
from offbeat.rewards.pool import RewardPool
from offbeat.rollout.pool import EnginePool
from offbeat.rollout.remote import RemoteEngine
from offbeat.rollout.settings import EngineSettings
from offbeat.room import fit_to_model
from offbeat.rpc.client import Hub, Worker
from offbeat.rpc.messages import EngineDescription, TrainerDescription
from offbeat.rpc.process import ProcessSpec
from offbeat.saved_models import origin_of, resolve_model
from offbeat.stages import generate_requests
from offbeat.trainer.client import RemoteTrainer
from offbeat.trainer.settings import TrainerSettings
from offbeat.types import IntArray, Sampling
from offbeat.weights.sync import Probe, WeightTransaction, check_hello

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROBE_PROMPTS = 4
PROBE_SAMPLES = 2
PROBE_TOKENS = 64
# Their state is no cache of keys and values: kept from step to step as one, it gives logprobs of another model.
_HF_CANNOT_SAMPLE = ("recurrent_gemma", "mamba", "falcon_mamba", "rwkv", "xlnet", "minimax")


@dataclass(frozen=True)
class Prepared:
    """A config whose model, data and reward functions have been looked at and fit together."""

    config: Config
    model: ModelFolder
    tokenizer: PreTrainedTokenizerBase
    sampling: Sampling
    prompts: PromptStream
    eval_data: tuple[EvalData, ...]
    warmup: WarmupSet | None
    inputs: Mapping[str, str]
    """Digests of what may change before a resume without being refused: files of reward functions, held-out rows."""

    @property
    def loaded(self) -> Config:
        """The config with the model that processes load, where another one stands in for what the run began with."""
        return self.config.model_copy(update={"model": self.model.model, "revision": self.model.revision})

    @property
    def model_name(self) -> str:
        """For people: the model's last name, or the checkpoint that it comes from."""
        origin = origin_of(self.config.model)
        return Path(self.config.model).name if origin is None else f"from {origin}"

    @property
    def eval_sets(self) -> tuple[EvalSet, ...]:
        """With their own sampling where a set has it."""
        return tuple(_eval_set(data, self.sampling) for data in self.eval_data)

    @property
    def reward_weights(self) -> Mapping[str, Mapping[str, float]]:
        """Source or set → reward function → weight."""
        data = {section.name: section.rewards for section in self.config.data}
        return data | {data.name: data.rewards for data in self.eval_data}


def _eval_set(data: EvalData, sampling: Sampling) -> EvalSet:
    fields = ("temperature", "top_p", "top_k", "min_p", "max_new_tokens")
    own = {name: value for name in fields if (value := getattr(data.section, name)) is not None}
    return EvalSet(
        name=data.name,
        prompts=data.prompts,
        sampling=msgspec.structs.replace(sampling, **own),
        samples_per_prompt=data.section.samples_per_prompt,
        pass_threshold=data.section.pass_threshold,
    )


def prepare(config: Config, *, at_hand: str | None = None) -> Prepared:
    """Check everything that can be checked without starting a process. Raises `ConfigError` with all that it found.

    Cheap checks come first: a wrong path is reported before any library is loaded. A `model` that names a run or a
    checkpoint becomes the folder of the model saved there, in the config that is returned. `at_hand` is a model folder
    to be loaded in place of the config's, which stays in the config: it is where the run comes from.
    """
    config, model = _check_early(config, at_hand)
    check_architecture(model)
    tokenizer = load_tokenizer(model, config.sampling.chat_template)
    config, problems = fit_to_model(config, model)
    prompts, eval_data, warmup, missing = None, list[EvalData](), None, dict[str, str]()
    try:
        prompts = open_train(config, tokenizer)
    except ConfigError as error:
        problems.extend(error.problems)
        missing = error.missing if isinstance(error, DataError) else {}
    for section in config.eval:
        try:
            eval_data.append(open_eval(config, section, tokenizer))
        except DataError as error:
            problems.extend(own_problems(config, section, error, missing))
        except ConfigError as error:
            problems.extend(error.problems)
    try:
        warmup = open_warmup(config, tokenizer)
    except ConfigError as error:
        problems.extend(error.problems)
    if prompts is not None:
        try:
            check_rewards([*prompts.sources, *(data.source for data in eval_data)])
        except ConfigError as error:
            problems.extend(error.problems)
    sampling = config.sampling.resolve(stop_token_ids(tokenizer, model))
    unknown = [stop for stop in config.sampling.stop_token_ids if stop >= model.vocab_size]
    if unknown:
        problems.append(
            f"sampling.stop_token_ids: {unknown} are not in the vocabulary of {model.vocab_size} tokens; remove them."
        )
    if not sampling.stop_token_ids:
        problems.append(
            f"model = {config.model!r}: neither tokenizer nor generation config names an end token, so no sample would "
            "ever stop; set sampling.stop_token_ids."
        )
    if problems or prompts is None:
        raise ConfigError(*dict.fromkeys(problems))
    inputs = file_digests(_reward_specs(config)) | {f"rows of eval {data.name}": data.digest() for data in eval_data}
    return Prepared(config, model, tokenizer, sampling, prompts, tuple(eval_data), warmup, inputs)


def _check_early(config: Config, at_hand: str | None) -> tuple[Config, ModelFolder]:
    """What needs no library to be found wrong, all at once."""
    problems = _path_problems(config)
    try:
        config = resolve_model(config)
        model = inspect_model(at_hand or config.model, None if at_hand else config.revision, config.init)
    except ConfigError as error:
        raise ConfigError(*error.problems, *problems) from error
    if config.rollout.engine == "hf" and model.model_type in _HF_CANNOT_SAMPLE:
        problems.append(
            f"model = {config.model!r}: the hf engine cannot sample a {model.model_type}; use another model."
        )
    if model.config.get("quantization_config"):
        problems.append(
            f"model = {config.model!r} is quantised (quantization_config in its config.json): its stored layout is not "
            "what is trained; give the unquantised model."
        )
    if problems:
        raise ConfigError(*problems)
    return config, model


def _path_problems(config: Config) -> list[str]:
    problems: list[str] = []

    def collect(check: Callable[[], object], where: str = "") -> None:
        try:
            check()
        except ConfigError as error:
            problems.extend(where + problem for problem in error.problems)

    named = [(f"data.{section.name}.", section) for section in config.data]
    named += [(f"eval.{section.name}.", section) for section in config.eval]
    named += [("warmup.", config.warmup)] if config.warmup else []
    for where, section in named:
        collect(partial(check_source, section.source, section.options), where)
    for spec in _reward_specs(config):
        collect(partial(inspect_function, spec))
    template = config.sampling.chat_template
    if template is not None and not Path(template).is_file():
        problems.append(
            f"sampling.chat_template = {template!r}: no such file; give the path of a Jinja file, relative to the "
            "configuration file."
        )
    return problems


def _reward_specs(config: Config) -> list[str]:
    """Each once."""
    return list(dict.fromkeys(name for section in (*config.data, *config.eval) for name in section.rewards or ()))


# --- processes ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class System:
    """The running processes of a run, behind their seams."""

    trainer_worker: Worker
    engine_workers: tuple[Worker, ...]
    trainer: RemoteTrainer
    engine: Engine
    reward: RewardPool
    weights: WeightTransaction
    trainer_description: TrainerDescription
    engine_descriptions: tuple[EngineDescription, ...]

    @property
    def workers(self) -> tuple[Worker, ...]:
        """Those whose end is the end of the run; reward workers are replaced by their pool."""
        return (self.trainer_worker, *self.engine_workers)


@asynccontextmanager
async def start(prepared: Prepared, folder: RunFolder, timeline: Timeline | None = None) -> AsyncGenerator[System]:
    """Start every process; all of them have ended when the block is left. `timeline` hears what they work on."""
    config, timeline = prepared.config, timeline or Timeline()
    hub = Hub(heartbeat_s=config.limits.heartbeat_s, worked=timeline.worked)
    async with hub, AsyncExitStack() as ending:
        specs = [_trainer_spec(prepared.loaded, folder), *engine_specs(prepared.loaded, folder)]
        with timeline.span("controller", "start"):
            reward, (trainer_worker, *engine_workers) = await _start_all(hub, prepared, specs, folder)
        ending.push_async_callback(reward.close)
        trainer = RemoteTrainer(trainer_worker, config.limits)
        engines = [RemoteEngine(worker, config.limits) for worker in engine_workers]
        descriptions = tuple(await asyncio.gather(*(engine.describe() for engine in engines)))
        trainer_description = await trainer.describe()
        check_hello(trainer_description, descriptions, dtype=config.engine_dtype)
        system = System(
            trainer_worker=trainer_worker,
            engine_workers=tuple(engine_workers),
            trainer=trainer,
            engine=EnginePool(engines),
            reward=reward,
            weights=WeightTransaction(
                trainer_worker, engine_workers, config.weights, config.engine_dtype, _probe(prepared)
            ),
            trainer_description=trainer_description,
            engine_descriptions=descriptions,
        )
        try:
            yield system
        except asyncio.CancelledError:  # told to end now: nobody waits for what they are at
            for worker in system.workers:
                worker.kill()
            raise


async def _start_all(
    hub: Hub, prepared: Prepared, specs: list[ProcessSpec], folder: RunFolder
) -> tuple[RewardPool, list[Worker]]:
    """All at once; the first failure ends the others, and what explains it is raised."""
    config = prepared.config

    def decode(completions: Sequence[IntArray]) -> list[str]:
        return decode_completions(prepared.tokenizer, completions, prepared.sampling.stop_token_ids)

    pool: asyncio.Task[RewardPool] | None = None
    try:
        async with asyncio.TaskGroup() as group:
            pool = group.create_task(
                RewardPool.start(
                    hub, config.rewards, prepared.reward_weights, decode, folder.logs, start_s=config.limits.start_s
                )
            )
            workers = [group.create_task(hub.start(spec, start_s=config.limits.start_s)) for spec in specs]
    except BaseException as error:
        if pool is not None and pool.done() and not pool.cancelled() and pool.exception() is None:
            await pool.result().close()
        first = first_cause(error)
        raise first from first.__cause__
    return pool.result(), [worker.result() for worker in workers]


def threads_each(config: Config) -> int:
    """CPU threads of a process that has none set: the cores, shared out evenly between trainer and engines."""
    return max(1, len(os.sched_getaffinity(0)) // (config.rollout.replicas + 1))


def _environment(threads: int) -> dict[str, str]:
    return {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}


def _trainer_spec(config: Config, folder: RunFolder) -> ProcessSpec:
    threads = config.trainer.threads or threads_each(config)
    settled = config.model_copy(update={"trainer": config.trainer.model_copy(update={"threads": threads})})
    return ProcessSpec(
        name="trainer-0",
        module="offbeat.trainer.worker",
        settings=msgspec.to_builtins(TrainerSettings.of(settled)),
        log=folder.log("trainer-0"),
        env=_environment(threads),
    )


def engine_specs(config: Config, folder: RunFolder) -> list[ProcessSpec]:
    match config.rollout.engine:
        case "hf":
            module = "offbeat.rollout.worker"
        case other:  # pyright: ignore[reportUnnecessaryComparison] (one engine so far)
            assert_never(other)
    threads = config.rollout.threads or threads_each(config)
    settings = EngineSettings(
        model=config.model,
        revision=config.revision,
        dtype=config.engine_dtype,
        device=config.rollout.device,
        threads=threads,
        max_rows=config.rollout.max_rows,
    )
    return [
        ProcessSpec(
            name=f"engine-{index}",
            module=module,
            settings=msgspec.to_builtins(settings),
            log=folder.log(f"engine-{index}"),
            python=config.rollout.python,
            env=_environment(threads),
        )
        for index in range(config.rollout.replicas)
    ]


def _probe(prepared: Prepared) -> Probe:
    """A few short samples of the first prompts, at the run's own sampling."""
    prompts = prepared.prompts.batch(0)[:PROBE_PROMPTS]
    tokens = min(PROBE_TOKENS, prepared.sampling.max_new_tokens)
    return Probe(
        requests=tuple(generate_requests(prompts, PROBE_SAMPLES, prepared.config.seed)),
        sampling=msgspec.structs.replace(prepared.sampling, max_new_tokens=tokens),
    )
