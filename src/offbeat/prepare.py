"""From a config to checked inputs: all that can be found wrong without starting a process is found here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from offbeat.config import Config
from offbeat.data.prompts import EvalSet as EvalData
from offbeat.data.prompts import PromptStream, open_eval, open_train, own_problems
from offbeat.data.sources import check_source
from offbeat.data.warmup import WarmupSet, open_warmup
from offbeat.errors import ConfigError, DataError
from offbeat.evaluate import EvalSet
from offbeat.models import ModelFolder, check_architecture, inspect_model, load_tokenizer, stop_token_ids
from offbeat.rewards.checks import check_rewards
from offbeat.rewards.functions import file_digests, inspect_function
from offbeat.rollout.settings import CANNOT_SAMPLE
from offbeat.room import fit_to_model
from offbeat.saved_models import origin_of, resolve_model
from offbeat.types import Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
    if config.rollout.engine == "hf" and model.model_type in CANNOT_SAMPLE:
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
