"""The configuration: closed, typed, all problems at once, and every key known by name."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from offbeat.config import Config, config_fields, load_config, parse_config
from offbeat.config.synonyms import SYNONYMS
from offbeat.errors import ConfigError

MINIMAL: dict[str, Any] = {
    "model": "m",
    "steps": 3,
    "prompts_per_step": 4,
    "data": [{"source": "rows.jsonl", "rewards": {"rewards.py:f": 1.0}}],
}
FROZEN = Path(__file__).with_name("config_fields.txt")
EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.toml"))


def problems(values: dict[str, Any], *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse_config(values, overrides)
    return list(caught.value.problems)


def with_key(path: str, value: Any) -> dict[str, Any]:
    """The minimal config with one key set; `data[].name` means the first entry."""
    values = json.loads(json.dumps(MINIMAL))
    here: Any = values
    *parents, last = path.replace("[]", "").split(".")
    for parent in parents:
        fresh: Any = {"source": "rows.jsonl", "steps": 1} if parent == "warmup" else {}
        if parent == "eval":
            fresh = [{"source": "rows.jsonl"}]
        if parent == "trackers":
            fresh = [{"kind": "wandb"}]
        here = here.setdefault(parent, fresh)
        here = here[0] if isinstance(here, list) else here
    here[last] = value
    return values


def test_the_list_of_fields_is_frozen() -> None:
    """A new knob is a visible change: add it to config_fields.txt and to the changelog."""
    assert config_fields() == FROZEN.read_text(encoding="utf-8").split()


@pytest.mark.parametrize("path", config_fields())
@pytest.mark.parametrize("misspell", [lambda key: key + "x", lambda key: key[:-1], lambda key: key[1:] + key[0]])
def test_a_misspelt_key_is_an_error_with_the_nearest_name_B018(path: str, misspell: Callable[[str], str]) -> None:
    prefix, dot, key = path.rpartition(".")
    wrong = misspell(key)
    if not wrong or any(known.split(".")[-1] == wrong for known in config_fields()):
        return  # the misspelling is itself a key
    found = problems(with_key(prefix + dot + wrong, 1))
    mine = [text for text in found if f"{wrong}: unknown key" in text]
    assert mine, found
    if len(key) > 3:
        assert repr(key) in mine[0]


def test_a_key_in_the_wrong_section_is_told_where_it_belongs() -> None:
    assert "it belongs to 'trainer.betas'" in problems({**MINIMAL, "betas": [0.9, 0.9]})[0]


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"lr": 1e-5}, "it belongs to 'trainer.lr', or to 'warmup.lr' in a section that is not in this config."),
        ({"warmup": {"source": "r", "steps": 1}, "lr": 1e-5}, "it belongs to 'trainer.lr' or 'warmup.lr'."),
        ({"top_p": 0.9}, "it belongs to 'sampling.top_p', or to 'eval.<name>.top_p' in a section that is not"),
        (
            {"warmup": {"source": "r", "steps": 1}, "prompt": "q"},
            "it belongs to 'data.data.prompt' or 'warmup.prompt', or to",
        ),
        ({"tags": ["a"]}, "it belongs to 'trackers.<name>.tags' in a section that is not in this config."),
    ],
)
def test_a_misplaced_key_names_every_place_the_absent_sections_last(values: dict[str, Any], says: str) -> None:
    assert says in problems({**MINIMAL, **values})[0]


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"trainer": {"learning_rate": 1e-5}}, "trainer.learning_rate: unknown key; here it is called 'trainer.lr'."),
        ({"num_generations": 8}, "here it is called 'samples_per_prompt'."),
        ({"sampling": {"max_tokens": 8}}, "here it is called 'sampling.max_new_tokens'."),
        ({"max_prompt_length": 8}, "here it is called 'data.data.max_prompt_tokens'."),
    ],
)
def test_a_key_of_another_framework_is_told_what_it_is_called_here(values: dict[str, Any], says: str) -> None:
    assert says in problems({**MINIMAL, **values})[0]


def test_a_key_that_another_framework_calls_otherwise_is_not_also_missing() -> None:
    (text,) = problems({"model_name_or_path": "m", **{key: MINIMAL[key] for key in MINIMAL if key != "model"}})
    assert "'model'" in text


def test_synonyms_stand_for_keys_that_exist_and_are_none_themselves() -> None:
    assert set(SYNONYMS.values()) <= set(config_fields())
    assert not SYNONYMS.keys() & {path.split(".")[-1] for path in config_fields()}


def test_an_override_takes_the_name_of_an_entry_as_well_as_its_number() -> None:
    values = {
        **MINIMAL,
        "data": [{**MINIMAL["data"][0], **name} for name in ({"name": "sums"}, {}, {"name": "gsm8k.v2"})],
        "eval": [{"source": "e"}],
        "trackers": [{"kind": "wandb"}],
    }
    overrides = ("sums.weight=2", "data.weight=3", "gsm8k.v2.weight=4", "0.prompt=question")
    config = parse_config(
        values, [*(f"data.{one}" for one in overrides), "eval.eval.every_steps=5", "trackers.wandb.project=p"]
    )
    assert [section.weight for section in config.data] == [2, 3, 4]
    assert config.data[0].prompt == "question"
    assert (config.eval[0].every_steps, config.trackers[0].project) == (5, "p")


def test_a_name_that_two_entries_have_is_no_way_to_name_one() -> None:
    values = {**MINIMAL, "data": [{"source": "a"}, {"source": "b"}]}
    assert "'data' is no entry of data; it is 0 (data), 1 (data)." in problems(values, "data.data.weight=2")[0]


def test_all_problems_of_a_file_are_reported_at_once() -> None:
    found = problems({**MINIMAL, "stepz": 1, "steps": 0, "trainer": {"lr": -1.0}, "sampling": {"top_p": 2.0}})
    text = "\n".join(found)
    assert len(found) == 4
    for key in ("stepz", "steps = 0", "trainer.lr = -1.0", "sampling.top_p = 2.0"):
        assert key in text


def test_what_does_not_fit_together_is_reported_beside_wrong_fields() -> None:
    found = problems({**MINIMAL, "checkpoint": {"best": "held"}, "updates_per_step": 9, "trainer": {"lrr": 1.0}})
    assert [text.split(" ")[0] for text in found] == ["trainer.lrr:", "updates_per_step", "checkpoint.best"]


@pytest.mark.parametrize(
    ("wrong", "key"),
    [
        ({"eval": [{"source": 3}]}, "eval.0.source"),  # the set may be there once that is right
        ({"evals": [{"name": "held", "source": "rows.jsonl"}]}, "evals"),  # a name that means eval
        ({"checkpoint": {"best": "held", "keep": 1}}, "checkpoint.keep"),
    ],
)
def test_what_hangs_on_a_wrong_section_is_not_reported(wrong: dict[str, Any], key: str) -> None:
    (text,) = problems({**MINIMAL, "checkpoint": {"best": "held"}, **wrong})
    assert text.startswith(key)


def test_a_rule_that_needs_a_wrong_number_waits_and_others_do_not() -> None:
    values = {**MINIMAL, "steps": "many", "eval": [{"name": "held", "source": "r"}], "checkpoint": {"best": "held/x"}}
    first, second = problems(values)
    assert first.startswith("steps = ")
    assert "held has avg@1, pass@1" in second


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("data[].shuffle", "False"),
        ("data[].shuffle", 0),
        ("data[].shuffle", "no"),
        ("trainer.lr", "1e-6"),
        ("steps", "8"),
        ("steps", 8.0),
        ("steps", True),
        ("steps", None),
        ("sampling.temperature", "hot"),
        ("sampling.chat_template_kwargs", [1]),
        ("trainer.betas", [0.9]),
        ("trainer", "fast"),
        ("trainer.lr", float("nan")),
        ("trainer.lr", float("inf")),
        ("data", {"source": "x"}),
    ],
)
def test_a_value_of_the_wrong_type_is_never_converted_B090(path: str, value: Any) -> None:
    found = problems(with_key(path, value))
    assert path.split(".")[0].replace("[]", "") in found[0]


@pytest.mark.parametrize("text", ["False", "no", "0", "'true'", "off", ""])
def test_text_on_the_command_line_is_no_truth_value(text: str) -> None:
    """B090: nor is a number in quotes a number."""
    assert "data.0.shuffle" in problems(MINIMAL, f"data.0.shuffle={text}")[0]
    assert "trainer.lr" in problems(MINIMAL, "trainer.lr='1e-6'")[0]
    assert parse_config(MINIMAL, ["data.0.shuffle=false", "trainer.lr=1e-6"]).trainer.lr == 1e-6


def test_a_number_written_without_a_point_is_a_number() -> None:
    assert parse_config(with_key("trainer.lr", 1)).trainer.lr == 1.0


@pytest.mark.parametrize("prompts", range(1, 9))
@pytest.mark.parametrize("updates", range(1, 9))
@pytest.mark.parametrize("samples", [2, 5])
def test_batch_arithmetic_is_checked_with_all_numbers_in_the_message_B019_B122(
    prompts: int, updates: int, samples: int
) -> None:
    values = {**MINIMAL, "prompts_per_step": prompts, "updates_per_step": updates, "samples_per_prompt": samples}
    if updates <= prompts:
        assert parse_config(values).samples_per_step == prompts * samples
    else:
        (text,) = problems(values)
        assert f"updates_per_step = {updates}" in text
        assert f"prompts_per_step = {prompts}" in text


def test_sections_that_may_be_left_out_have_working_defaults_B150() -> None:
    config = parse_config(MINIMAL)
    assert config.trainer.micro_batch_tokens > 0
    assert config.weights.timeout_s > config.weights.stall_s > 0


@pytest.mark.parametrize("recipe", [{}, {"recipe": "grpo"}, {"recipe": "dr_grpo"}])
@pytest.mark.parametrize(
    ("values", "overrides"),
    [({"updates_per_step": 5}, []), ({}, ["updates_per_step=5"]), ({"updates_per_step": 4}, ["prompts_per_step=3"])],
)
def test_the_arithmetic_is_checked_after_recipe_and_overrides_whatever_is_left_out(
    recipe: dict[str, Any], values: dict[str, Any], overrides: list[str]
) -> None:
    """B150: no way round it."""
    (text,) = problems({**MINIMAL, **recipe, **values}, *overrides)
    assert "updates_per_step = " in text
    assert "is more than prompts_per_step = " in text


@pytest.mark.parametrize("name", ["dapo", "ppo", "GRPO", ""])
def test_an_unknown_recipe_or_engine_lists_the_choices_B106(name: str) -> None:
    assert "'grpo' or 'dr_grpo'" in problems({**MINIMAL, "recipe": name})[0]
    assert "'hf'" in problems(with_key("rollout.engine", name))[0]


def test_another_recipe_for_a_config_that_has_every_value_is_refused_unless_its_values_are_given_too() -> None:
    """`offbeat resume RUN recipe=dr_grpo`, `offbeat.run(config, "recipe=dr_grpo")`: it would be a name and no more."""
    resolved = parse_config(MINIMAL).model_dump(mode="json")
    (text,) = problems(resolved, "recipe=dr_grpo", "loss.clip_low=0.1")
    assert text.startswith("recipe = 'dr_grpo': every value is set here already")
    assert text.endswith("set what it stands for, too: loss.aggregation=constant loss.scale_by_std=false.")
    values = text.rstrip(".").split(": ")[-1].split()
    config = parse_config(resolved, ["recipe=dr_grpo", *values])
    assert config == parse_config({**MINIMAL, "recipe": "dr_grpo"})
    back = config.model_dump(mode="json")
    (text,) = problems(back, "recipe=grpo")
    assert "loss.aggregation=token_mean loss.scale_by_std=true" in text
    assert parse_config(back, ["recipe=dr_grpo", "loss.aggregation=token_mean"]).loss.aggregation == "token_mean"
    assert parse_config(MINIMAL, ["recipe=dr_grpo"]).loss.aggregation == "constant", "a file has what was given only"


def test_a_recipe_sets_fields_and_the_file_overrides_them() -> None:
    plain = parse_config({**MINIMAL, "recipe": "dr_grpo"})
    assert (plain.loss.scale_by_std, plain.loss.aggregation) == (False, "constant")
    own = parse_config({**MINIMAL, "recipe": "dr_grpo", "loss": {"aggregation": "token_mean"}})
    assert (own.loss.scale_by_std, own.loss.aggregation) == (False, "token_mean")
    assert parse_config(MINIMAL).loss.scale_by_std is True


def test_overrides_win_over_the_file_and_are_typed() -> None:
    config = parse_config(MINIMAL, ["trainer.lr=1e-5", "data.0.weight=2", "model=other/name", "rollout.replicas=2"])
    assert config.trainer.lr == 1e-5
    assert config.data[0].weight == 2.0
    assert config.model == "other/name"
    assert config.rollout.replicas == 2


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("steps", "write key=value"),
        ("stepz=3", "did you mean 'steps'"),
        ("data.7.weight=2", "'7' is no entry of data; it is 0 (data)."),
        ("data.gsm8k.weight=2", "'gsm8k' is no entry of data; it is 0 (data)."),
        ("steps.x=2", "is not a section"),
        ("data.weight=2", "name the entry"),
        ("trainer.lr=fast", "must be a number"),
    ],
)
def test_a_wrong_override_is_explained(override: str, says: str) -> None:
    assert any(says in text for text in problems(MINIMAL, override)), problems(MINIMAL, override)


@pytest.mark.parametrize("text", ["2024-05-01", "07:32:00", "2024-05-01T07:32:00Z", "2024-05-01 07:32:00"])
def test_an_override_that_looks_like_a_date_is_text(text: str) -> None:
    config = parse_config(MINIMAL, [f"revision={text}", f"data.0.options.since={text}"])
    assert config.revision == text
    assert config.data[0].options == {"since": text}


def test_a_date_without_quotes_is_told_of_by_its_key(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(
        'model = "m"\nrevision = 2024-05-01\nsteps = 1\nprompts_per_step = 1\n[[data]]\nsource = "rows.jsonl"\n'
        'options = { at = [07:32:00] }\nrewards = { "r.py:f" = 1.0 }\n'
    )
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "run.toml", ["sampling.chat_template_kwargs={ today = 2024-05-01T00:00:00 }"])
    assert caught.value.problems == (
        'revision = 2024-05-01: is a date, which no key takes; for text write it in quotes: "2024-05-01".',
        'data.0.options.at.0 = 07:32:00: is a time, which no key takes; for text write it in quotes: "07:32:00".',
        "sampling.chat_template_kwargs.today = 2024-05-01T00:00:00: is a date, which no key takes; for text write it "
        'in quotes: "2024-05-01T00:00:00".',
    )


def test_an_override_may_begin_any_section_that_a_resolved_config_does_not_have() -> None:
    resolved = parse_config(MINIMAL).model_dump(mode="json")
    absent = {path.partition(".")[0] for path in config_fields() if "." in path and "[]" not in path}
    absent = {section for section in absent if resolved[section] is None}
    assert absent == {"warmup"}
    config = parse_config(resolved, ["warmup.steps=3", "warmup.source=w.jsonl"])
    assert config.warmup is not None
    assert config.warmup.steps == 3
    assert "warmup.source: missing" in problems(resolved, "warmup.steps=3")[0]
    assert "must be text in quotes" in problems(resolved, "revision.x=1")[0]


def test_what_is_written_to_config_json_reads_back_as_the_same_config(tmp_path: Path) -> None:
    config = parse_config({**MINIMAL, "recipe": "dr_grpo", "eval": [{"source": "e.jsonl"}]}, folder=tmp_path)
    again = parse_config(json.loads(json.dumps(config.model_dump(mode="json"))), folder=Path("/"))
    assert again == config


def test_paths_are_taken_from_the_folder_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "run.toml").write_text(
        'model = "m"\nsteps = 1\nprompts_per_step = 1\n[[data]]\nsource = "rows.jsonl"\n'
        'rewards = { "r.py:f" = 1.0, "pkg.mod:f" = 1.0 }\n'
    )
    config = load_config(tmp_path / "run.toml")
    assert config.model == str(tmp_path / "m")
    assert config.data[0].source == str(tmp_path / "rows.jsonl")
    assert list(config.data[0].rewards) == [f"{tmp_path / 'r.py'}:f", "pkg.mod:f"]


def _loop(folder: Path) -> str:
    (folder / "a").symlink_to("b")
    (folder / "b").symlink_to("a")
    return "a"


def _pipe(folder: Path) -> str:
    os.mkfifo(folder / "pipe.jsonl")
    return "pipe.jsonl"


NO_PATHS: dict[str, tuple[Callable[[Path], str], str]] = {
    "a pipe": (_pipe, "is a pipe or a device; give a file or a folder"),
    "a device": (lambda _: "/dev/zero", "is a pipe or a device"),
    "a link to itself": (_loop, "that can be followed|cannot be looked at"),
    "nobody's home": (lambda _: "~nobody-of-this-name/rows.jsonl", "no path that can be followed"),
    "too long a name": (lambda _: "n" * 300 + ".jsonl", "File name too long"),
    "a zero byte": (lambda _: "a\0b", "is no path"),
}


@pytest.mark.parametrize("name", NO_PATHS)
def test_a_path_that_no_file_can_have_is_told_of_with_every_key_that_has_it(name: str, tmp_path: Path) -> None:
    make, says = NO_PATHS[name]
    path = make(tmp_path)
    values: dict[str, Any] = {
        **MINIMAL,
        "model": "./" + path if path[0] not in "/~" else path,
        "data": [{"source": path, "rewards": {"exact_match": 1.0}}],
        "eval": [{"source": path}],
        "warmup": {"source": path, "steps": 1},
        "sampling": {"chat_template": path},
        "rollout": {"python": "./" + path if path[0] not in "/~" else path},
        "trackers": [{"kind": "tensorboard", "dir": path}],
    }
    with pytest.raises(ConfigError) as error:
        parse_config(values, folder=tmp_path)
    keys = [problem.partition(" = ")[0] for problem in error.value.problems]
    assert sorted(keys) == [
        "data.0.source",
        "eval.0.source",
        "model",
        "rollout.python",
        "sampling.chat_template",
        "trackers.0.dir",
        "warmup.source",
    ]
    assert all(re.search(says, problem) for problem in error.value.problems), error.value.problems


@pytest.mark.parametrize(
    "values",
    [
        {"model": "m\udc80"},
        {"data": [{"source": "rows\udc80.jsonl", "rewards": {"exact_match": 1.0}}]},
        {"data": [{"source": "rows.jsonl", "rewards": {"r\udc80.py:f": 1.0}}]},
        {"data": [{"source": "rows.jsonl", "options": {"a\udcff": "b"}}]},
    ],
)
def test_a_byte_that_is_no_utf_8_is_told_of_by_its_key(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"(model|data\.0\.\w+) = '.*\\udc.*': holds a byte that is not UTF-8"):
        parse_config({**MINIMAL, **values})


@pytest.mark.parametrize("depth", [150, 600, 5000])
def test_values_within_values_without_end_are_told_of(depth: int, tmp_path: Path) -> None:
    nested = "[" * depth + "]" * depth
    (tmp_path / "c.toml").write_text(f'model = "m"\n[[data]]\nsource = "a"\noptions = {{ a = {nested} }}\n')
    for read in (
        lambda: load_config(tmp_path / "c.toml"),
        lambda: parse_config(MINIMAL, [f"data.0.options.a={nested}"]),
    ):
        with pytest.raises(ConfigError, match=r"nested (too|more than 100) deep"):
            read()


@pytest.mark.parametrize("weight", [1e200, -2e6, float("inf"), float("nan")])
def test_the_weight_of_a_reward_leaves_room_for_its_square(weight: float) -> None:
    with pytest.raises(ConfigError, match=r"rewards\.exact_match"):
        parse_config({**MINIMAL, "data": [{"source": "rows.jsonl", "rewards": {"exact_match": weight}}]})


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "[::]", "*", ""])
def test_a_wildcard_is_never_advertised_B061(host: str) -> None:
    assert any("weights.host" in text for text in problems(with_key("weights.host", host)))


@pytest.mark.parametrize(
    ("write", "says"),
    [
        (lambda p: p.write_bytes(b"\xff\xfe"), "cannot be read"),
        (lambda p: p.write_text("steps = = 3"), "not valid TOML"),
        (lambda p: p.mkdir(), "is a folder"),
        (lambda p: None, "no such file"),
    ],
)
def test_a_file_that_cannot_be_read_is_one_clear_error(tmp_path: Path, write: Any, says: str) -> None:
    path = tmp_path / "run.toml"
    write(path)
    with pytest.raises(ConfigError, match=says):
        load_config(path)


def test_a_misspelt_file_name_is_told_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "quickstart.toml").write_text("")
    with pytest.raises(ConfigError, match=r"did you mean .*quickstart\.toml"):
        load_config(tmp_path / "quikstart.toml")


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_is_a_valid_config(path: Path) -> None:
    assert isinstance(load_config(path), Config)


def test_names_of_sources_and_sets_are_unique() -> None:
    twice = {**MINIMAL, "data": MINIMAL["data"] * 2, "eval": [{"source": "a"}, {"source": "b"}]}
    text = "\n".join(problems(twice))
    assert "2 sources are named 'data'" in text
    assert "2 sets are named 'eval'" in text


def test_a_source_without_rewards_or_a_config_without_data_is_refused() -> None:
    assert "name at least one function" in problems({**MINIMAL, "data": [{"source": "x"}]})[0]
    assert "no source of prompts" in problems({**MINIMAL, "data": []})[0]


def test_a_field_that_needs_another_one_is_refused_at_the_start_B152() -> None:
    text = problems(
        with_key("data[].system", "Be brief.") | {"data": [{**MINIMAL["data"][0], "system": "x", "format": "text"}]}
    )
    assert "only for format" in text[0]


@pytest.mark.parametrize("key", ["device", "dtype", "max_rows", "threads"])
def test_a_setting_of_the_engines_reaches_them_as_it_was_given_B151(key: str, tmp_path: Path) -> None:
    from offbeat.build import engine_specs
    from offbeat.metrics.writer import RunFolder

    value = {"device": "cuda:3", "dtype": "bfloat16", "max_rows": 7, "threads": 3}[key]
    config = parse_config(with_key(f"rollout.{key}", value))
    (spec,) = engine_specs(config, RunFolder(tmp_path))
    assert spec.settings[key] == value


@pytest.mark.parametrize(
    ("key", "value"),
    [("max_new_tokens", 7), ("temperature", 0.3), ("top_p", 0.7), ("top_k", 9), ("min_p", 0.01)],
)
def test_a_sampling_option_reaches_the_engines_as_it_was_given(key: str, value: Any) -> None:
    """B151: in what every request to an engine is sampled with."""
    section = parse_config(with_key(f"sampling.{key}", value)).sampling
    default = parse_config(MINIMAL).sampling
    assert getattr(section.resolve([2]), key) == value
    assert getattr(default.resolve([2]), key) != value
    stops = parse_config(with_key("sampling.stop_token_ids", [5, 2])).sampling.resolve([2, 3])
    assert stops.stop_token_ids == (2, 3, 5)


def test_a_held_out_set_may_be_greedy_and_training_may_not() -> None:
    assert parse_config({**MINIMAL, "eval": [{"source": "a", "temperature": 0}]}).eval[0].temperature == 0.0
    (text,) = problems({**MINIMAL, "eval": [{"source": "a", "temperature": 1e-4}]})
    assert "eval.eval.temperature = 0.0001: must be 0 (greedy), or at least 0.001" in text
    assert "sampling.temperature" in problems(with_key("sampling.temperature", 0))[0]
