"""Room for prompts: how long they may be, of training and of every held-out set, for the positions that a model has.

A sequence is a prompt and what is sampled after it, so a prompt has the model's positions less `max_new_tokens`. Limits
that the config leaves out are lowered to that; limits that it gives are refused where they are more.
"""

from __future__ import annotations

from collections.abc import Mapping

from offbeat.config import Config, EvalSection
from offbeat.models import ModelFolder


def fit_to_model(config: Config, model: ModelFolder) -> tuple[Config, list[str]]:
    """The config with prompts limited to what the model has positions for, and a sentence for each limit that is not.

    A held-out set that leaves `max_prompt_tokens` to the first `[[data]]` gets one of its own where it has less room.
    """
    if model.max_length is None:
        return config, []
    problems: list[str] = []
    new_tokens = config.sampling.max_new_tokens
    room = model.max_length - new_tokens
    if room < 1:
        problems.append(_no_room(f"sampling.max_new_tokens = {new_tokens}", model.max_length))
    else:
        problems += [
            _too_much(f"data.{section.name}", section.max_prompt_tokens, _new_tokens(config), room, model.max_length)
            for section in config.data
            if section.max_prompt_tokens > room and "max_prompt_tokens" in section.model_fields_set
        ]
        data = [
            section.model_copy(update={"max_prompt_tokens": min(section.max_prompt_tokens, room)})
            for section in config.data
        ]
        config = config.model_copy(update={"data": tuple(data)})
    sets: list[EvalSection] = []
    for section in config.eval:
        fitted, problem = _fit_set(config, section, model.max_length)
        sets.append(fitted)
        problems += [] if problem is None else [problem]
    config = config.model_copy(update={"eval": tuple(sets)})
    return config, problems or _rope_problems(config, model)


def _fit_set(config: Config, section: EvalSection, positions: int) -> tuple[EvalSection, str | None]:
    room = positions - _count(config, section)
    if room < 1:
        own = section.max_new_tokens is not None  # else it is told of [sampling] already
        return section, _no_room(f"eval.{section.name}.{_new_tokens(config, section)}", positions) if own else None
    if _longest_prompt(config, section) <= room:
        return section, None
    if section.max_prompt_tokens is None:
        return section.model_copy(update={"max_prompt_tokens": room}), None
    where, new_tokens = f"eval.{section.name}", _new_tokens(config, section)
    return section, _too_much(where, section.max_prompt_tokens, new_tokens, room, positions)


def _count(config: Config, section: EvalSection | None = None) -> int:
    own = None if section is None else section.max_new_tokens
    return config.sampling.max_new_tokens if own is None else own


def _new_tokens(config: Config, section: EvalSection | None = None) -> str:
    """`sampling.max_new_tokens = 64`, or `max_new_tokens = 400` where the set has its own."""
    whose = "sampling." if section is None or section.max_new_tokens is None else ""
    return f"{whose}max_new_tokens = {_count(config, section)}"


def _longest_prompt(config: Config, section: EvalSection) -> int:
    return section.max_prompt_tokens or config.data[0].max_prompt_tokens


def _no_room(what: str, positions: int) -> str:
    return f"{what} leaves no room for a prompt: the model has {positions} positions; set it to less."


def _too_much(where: str, prompt: int, new_tokens: str, room: int, positions: int) -> str:
    return (
        f"{where}.max_prompt_tokens = {prompt} and {new_tokens} make more than the model's {positions} positions; set "
        f"it to at most {room}, or lower max_new_tokens."
    )


def _rope_problems(config: Config, model: ModelFolder) -> list[str]:
    """`longrope` picks its frequencies by the longest sequence that is computed together.

    Beyond the original length a sample's logprobs then depend on its neighbours in the batch, in the engine and in the
    trainer differently: the ratios would be wrong, and nothing would say so; nor would an evaluation be repeatable.
    """
    rope = model.config.get("rope_scaling") or model.config.get("rope_parameters") or {}
    if not isinstance(rope, Mapping) or "longrope" not in (rope.get("rope_type"), rope.get("type")):
        return []
    original = model.config.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings")
    lengths = {f"data.{section.name}": section.max_prompt_tokens + _count(config) for section in config.data}
    lengths |= {
        f"eval.{section.name}": _longest_prompt(config, section) + _count(config, section) for section in config.eval
    }
    where = max(lengths, key=lambda name: lengths[name])
    if not isinstance(original, int) or lengths[where] <= original:
        return []
    return [
        f"model = {config.model!r} uses longrope, whose frequencies change when any sequence of a batch is longer than "
        f"{original} tokens; max_prompt_tokens + max_new_tokens = {lengths[where]} of {where}: lower them to "
        f"{original} together."
    ]
