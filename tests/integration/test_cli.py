"""The command as a person meets it: exit codes, the one sentence about a mistake, what each command prints.

Mistakes are found in this process (`command`), where starting anything is made impossible; a few commands run in a
process of their own, for the exit code, the streams and the time that they take.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from tiny_run import (
    BASE,
    Ended,
    command,
    merge,
    records,
    run_command,
    steps_of,
    write_config,
    write_project,
    write_rows,
)

import offbeat
from offbeat.testing.leaks import no_leaks

pytestmark = pytest.mark.integration

EXAMPLES = Path(__file__).parents[2] / "examples"
QUICKSTART = (EXAMPLES / "quickstart.toml").read_text(encoding="utf-8").splitlines()
KEY = re.compile(r"^(\[*)([a-z_]+)\b")


@pytest.fixture(scope="module", name="project")
def _project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_project(tmp_path_factory.mktemp("project"))
    (folder / "no_weights").mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / "model" / name, folder / "no_weights")
    (folder / "old.py").write_text("def needs(completion, gold):\n    return 1.0\n")
    write_rows(folder / "heldout.jsonl", [{"prompt": f"{i}-{i}=", "answer": "0"} for i in range(4)])
    return folder


@pytest.fixture(autouse=True)
def _nothing_is_left_behind() -> Iterator[None]:
    with no_leaks(adopt=True):
        yield


def refused(ended: Ended, *, problems: int = 1) -> str:
    """What was said of a mistake, after checking how: exit 2, so many sentences on stderr and nothing else."""
    assert ended.code == 2, ended.told
    assert ended.out == "", ended.told
    lines = ended.err.splitlines()
    assert len(lines) == problems, ended.told
    for line in lines:
        assert line.startswith("error: "), ended.told
        assert line[-1] in ".?", ended.told
    return ended.err


def train_that_must_not_start(*words: str | Path, cwd: Path) -> Ended:
    """The command, where the start of a process or the making of a run folder is a failure."""

    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("the run was begun")

    with (
        mock.patch("offbeat.rpc.worker.Child", never),
        mock.patch("offbeat.training.start", never),
        mock.patch("offbeat.commands.serving.start", never),
    ):
        ended = command("train", *words, cwd=cwd)
    assert not (cwd / "runs").exists()
    return ended


# --- mistakes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [n for n, line in enumerate(QUICKSTART) if KEY.match(line)])
def test_one_wrong_letter_in_any_key_of_the_quickstart_gets_one_sentence_with_the_right_key(
    number: int, tmp_path: Path
) -> None:
    match = KEY.match(QUICKSTART[number])
    assert match is not None
    key = match[2]
    wrong = f"{key[:2]}{key[3:]}" if len(key) > 3 else f"{key}x"
    lines = [*QUICKSTART[:number], QUICKSTART[number].replace(key, wrong, 1), *QUICKSTART[number + 1 :]]
    (tmp_path / "quickstart.toml").write_text("\n".join(lines), encoding="utf-8")
    said = refused(train_that_must_not_start("quickstart.toml", cwd=tmp_path))
    assert f"{wrong}: unknown key; did you mean '{key}'" in said


def data(**changes: Any) -> list[dict[str, Any]]:
    return [merge({key: value for key, value in BASE["data"][0].items() if key not in changes}, changes)]


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "text for a number": ({"steps": "ten"}, 'steps = "ten": must be a whole number.'),
    "a fraction for a count": ({"steps": 3.5}, "steps = 3.5: must be a whole number."),
    "a number for a section": ({"trainer": 3}, "trainer = 3: must be a section"),
    "a short list": ({"trainer": {"betas": [0.9]}}, "trainer.betas = [0.9]: has too few values."),
    "a word for a switch": ({"loss": {"scale_by_std": "yes"}}, 'loss.scale_by_std = "yes": must be true or false.'),
    "out of range": ({"samples_per_prompt": 1}, "samples_per_prompt = 1: must be greater than or equal to 2."),
    "not one of": ({"recipe": "gpro"}, "recipe = \"gpro\": must be 'grpo' or 'dr_grpo'."),
    "no data file": ({"data": data(source="trian.jsonl")}, r"data.data.source = .*did you mean .*/train.jsonl\?"),
    "no eval file": ({"eval": [{"source": "heldot.jsonl"}]}, r"eval.eval.source = .*did you mean .*/heldout.jsonl\?"),
    "no warm-up file": ({"warmup": {"source": "gone/w.jsonl", "steps": 1}}, "warmup.source = .*there is no folder"),
    "no reward file": ({"data": data(rewards={"reward.py:length": 1.0})}, r"reward.py; did you mean .*/rewards.py\?"),
    "no reward function": ({"data": data(rewards={"rewards.py:lenght": 1.0})}, "'lenght'; did you mean 'length'"),
    "no such reward": ({"data": data(rewards={"exact_mach": 1.0})}, "did you mean 'exact_match'"),
    "a parameter that is no column": (
        {"data": data(rewards={"old.py:needs": 1.0})},
        "parameter 'gold', which every row of data would need as a column; columns are prompt, answer",
    ),
    "no chat template": ({"data": data(format="chat")}, 'format = "chat" needs a chat template.*format = "text"'),
    "no template file": ({"sampling": {"chat_template": "t.jinja"}}, "sampling.chat_template = .*no such file"),
    "no such column": ({"data": data(prompt="promt")}, "data.data.prompt = 'promt': .* did you mean 'prompt'"),
    "no model": ({"model": "./modle"}, "model = .*no such folder; did you mean .*/model"),
    "no weights": ({"model": "no_weights"}, 'has no weights: .*set init = "random"'),
    "too few rows": ({"prompts_per_step": 50}, "12 after, but a batch takes 50 of them; add rows or lower"),
    "all rows too long": ({"data": data(max_prompt_tokens=2)}, "12 rows before filtering, 0 after: .*; raise it"),
    "longer than the model": (
        {"sampling": {"max_new_tokens": 500}},
        "max_new_tokens = 500 .* 256 positions; set it to less",
    ),
    "no such interpreter": ({"rollout": {"python": "venv/python"}}, "rollout.python = '/.*/venv/python': no such"),
    "no interpreter": ({"rollout": {"python": "/bin/true"}}, "'/bin/true': it is no Python interpreter that can"),
    "no such device": ({"trainer": {"device": "cuda:7"}}, "trainer.device = 'cuda:7': .*usable here: auto, cpu"),
    "no device at all": ({"rollout": {"device": "gpu"}}, "rollout.device = 'gpu' is not a device; usable here"),
    "no such backend": ({"weights": {"backend": "glo"}}, "weights.backend = 'glo': .*Available here: gloo"),
    "a wildcard": ({"weights": {"host": "::"}}, "weights.host = '::' is a wildcard"),
    "an address of another machine": ({"weights": {"host": "192.0.2.1"}}, "weights.host: .*192.0.2.1"),
}


@pytest.mark.parametrize("what", MISTAKES)
def test_a_mistake_is_named_before_anything_starts(what: str, project: Path, tmp_path: Path) -> None:
    changes, pattern = MISTAKES[what]
    said = refused(train_that_must_not_start(write_config(project, **changes), cwd=tmp_path))
    assert re.search(pattern, said) or pattern in said, said


def test_all_mistakes_are_told_at_once(project: Path, tmp_path: Path) -> None:
    config = write_config(project, model="no_weights", data=data(source="trian.jsonl"), eval=[{"source": "hld.jsonl"}])
    said = refused(train_that_must_not_start(config, cwd=tmp_path), problems=3)
    assert "no_weights" in said
    assert "trian.jsonl" in said
    assert "hld.jsonl" in said


@pytest.mark.parametrize(
    ("words", "pattern"),
    [
        (["no.toml"], r"config no.toml: no such file; give the path of a TOML file."),
        (["."], r"config \.: is a folder; give the path of a TOML file."),
        (["{run}", "trainer.lr"], r"override 'trainer.lr': write key=value, e.g. trainer.lr=1e-5."),
        (["{run}", "trainer.lrr=1"], r"trainer.lrr: unknown key; did you mean 'lr'\?"),
        (
            ["{run}", "data.source=x"],
            r"override 'data.source=x': name the entry, e.g. data.0.source=x; there are: 0 \(data\).",
        ),
        (["{run}", "steps=abc"], r'steps = "abc": must be a whole number.'),
        (["{run}", "--run-dir", "{project}"], r"--run-dir .* is not empty .*choose another, or empty this one."),
    ],
)
def test_a_wrong_command_line_is_told_like_a_wrong_file(
    words: list[str], pattern: str, project: Path, tmp_path: Path
) -> None:
    run = write_config(project)
    filled = [word.format(run=run, project=project) for word in words]
    said = refused(train_that_must_not_start(*filled, cwd=tmp_path))
    assert re.search(pattern, said), said


@pytest.mark.parametrize("words", [["trian"], ["train"], ["train", "run.toml", "--rundir", "x"], ["resume"]])
def test_bad_usage_ends_with_2(words: list[str], tmp_path: Path) -> None:
    ended = command(*words, cwd=tmp_path)
    assert ended.code == 2, ended.told
    assert "Error" in ended.err
    assert "Traceback" not in ended.err


def test_a_folder_that_is_no_run_is_refused(project: Path, tmp_path: Path) -> None:
    for name in ("resume", "eval"):
        assert "is not the folder of a run: it has no config.json" in refused(command(name, project, cwd=tmp_path))
    assert "does not exist" in refused(command("resume", tmp_path / "gone", cwd=tmp_path))
    assert "no [[eval]] set" in refused(command("eval", write_config(project), cwd=tmp_path))


def test_mistakes_are_told_within_seconds(project: Path, tmp_path: Path) -> None:
    """A process of its own. The bound is for a quiet machine; the first mistake loads no library at all."""
    early = run_command("train", write_config(project, data=data(source="trian.jsonl")), cwd=tmp_path)
    assert refused(early)
    assert early.cpu_s < 2, early.told
    late = run_command("train", write_config(project, prompts_per_step=50), cwd=tmp_path)
    assert refused(late)
    assert late.cpu_s < 10, late.told
    assert not (tmp_path / "runs").exists()


# --- check ----------------------------------------------------------------------------------------------------------


def test_check_shows_prompt_ids_stops_arithmetic_and_memory_and_starts_nothing(project: Path, tmp_path: Path) -> None:
    config = write_config(project, eval=[{"name": "heldout", "source": "heldout.jsonl"}], updates_per_step=2)
    with mock.patch("subprocess.Popen", side_effect=AssertionError("a process was started")):
        ended = command("check", config, "--tokens", cwd=tmp_path)
    assert ended.code == 0, ended.told
    assert ended.err == ""
    for pattern in (
        r"^model   model · qwen3 · 16k parameters$",
        r"^memory  about [\d.]+ [MG]iB for the trainer, [\d.]+ [MG]iB for each engine$",
        r"^disk    about [\d.]+ [KM]iB for a checkpoint · 2 are kept, and one more while it is saved · saved after "
        r"each step$",
        r"^batch   2 prompts × 4 = 8 samples → 2 updates → 1 version; lag 1$",
        r"^engines 1 × hf · float32 · weights over gloo on 127\.0\.0\.1$",
        r"^data    data: 12 rows · 0 too long · 6\.0 steps per epoch · rewards rewards\.py:length × 1$",
        r"^eval    heldout: 4 prompts × 1 · rewards rewards\.py:length × 1$",
        r"^sample  temperature 1 · .* · at most 6 new tokens$",
        r"^stop    <eos> \(1\)$",
        r"^prompt  data/\d+, \d+ tokens:$",
        r"^            0 +\d+  '\d'$",
    ):
        assert re.search(pattern, ended.out, re.M), f"{pattern}\n{ended.told}"
    assert list(tmp_path.iterdir()) == []


def test_check_looks_at_a_config_for_another_machine(project: Path, tmp_path: Path) -> None:
    config = write_config(project, trainer={"device": "cuda:1"}, weights={"backend": "nccl"})
    ended = command("check", config, cwd=tmp_path)
    assert ended.code == 0, ended.told
    assert "machine ! not this one: trainer.device = 'cuda:1'" in ended.out
    assert "machine ! not this one: weights.backend = 'nccl'" in ended.out


def test_check_works_where_only_ascii_can_be_shown(project: Path, tmp_path: Path) -> None:
    ended = run_command("check", write_config(project), cwd=tmp_path, env={"LC_ALL": "C", "PYTHONIOENCODING": "ascii"})
    assert ended.code == 0, ended.told
    assert "batch   2 prompts x 4 = 8 samples -> 1 update" in ended.out


def test_version_and_help() -> None:
    assert command("--version").out == f"offbeat {offbeat.__version__}\n"
    shown = command("--help")
    assert shown.code == 0
    for name in ("train", "resume", "eval", "check"):
        assert re.search(rf"\b{name}\b", shown.out)


# --- a whole run ----------------------------------------------------------------------------------------------------


def test_a_run_from_another_folder_through_a_pipe_then_evaluated_and_continued(project: Path, tmp_path: Path) -> None:
    changes = {"steps": 2, "eval": [{"name": "heldout", "source": "heldout.jsonl", "samples_per_prompt": 4}]}
    config = write_config(project, "piped", **changes)
    ended = run_command("train", config, cwd=tmp_path, env={"LC_ALL": "C", "TERM": "xterm-256color"})
    assert ended.code == 0, ended.told
    assert ended.err == "", ended.told
    assert re.fullmatch(r"[^\x00-\x09\x0b-\x1f\x7f-\x9f]*", ended.out), "control characters"
    (run,) = (tmp_path / "runs").iterdir()
    assert re.fullmatch(r"piped-\d{8}-\d{6}", run.name)
    assert steps_of(run) == [0, 1]
    assert re.search(rf"^evaluate   \S.* eval \S*{run.name}$", ended.out, re.M), ended.told
    last = evaluation_line(ended.out, 2)
    assert "\nstart     evaluating heldout: 4 prompts, 4 samples each\n" in ended.out

    # The same weights, seeds and prompts: the same numbers, from the run's folder.
    again = command("eval", run, cwd=tmp_path)
    assert again.code == 0, again.told
    assert evaluation_line(again.out, 2) == last
    missing = refused(command("eval", run, "--step", "7", cwd=tmp_path))
    assert "saved are 1, 2" in missing

    assert "has done all its 2 steps; continue with more" in refused(command("resume", run, cwd=tmp_path))
    assert "holds a run already" in refused(command("train", config, "--run-dir", run, cwd=tmp_path))
    more = command("resume", run, "steps=3", "--quiet", cwd=tmp_path)
    assert more.code == 0, more.told
    assert steps_of(run) == [0, 1, 2]
    assert [r["weights_version"] for r in records(run)][:3] == [0, 1, 2]
    assert not re.search(r"^(step|start|batch) ", more.out, re.M)  # quiet
    check_trace(run)


def check_trace(run: Path) -> None:
    """Both parts of a run that was continued: valid JSON, rows for each process, no second counted for another."""
    events = json.loads((run / "trace.json").read_text())
    assert {event["args"]["name"] for event in events if event["name"] == "process_name"} == {
        "controller",
        "trainer-0",
        "engine-0",
        "rewards",
    }
    spans = [event for event in events if event["ph"] == "X"]
    of = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    seen = {(of[span["pid"]], span["name"]) for span in spans}
    assert seen >= {("engine-0", name) for name in ("start", "prefill", "decode", "load weights", "digest")}
    assert seen >= {("trainer-0", name) for name in ("forward_backward", "optimizer", "send weights", "save", "load")}
    assert seen >= {("controller", name) for name in ("generate", "advantages", "train", "sync", "transfer", "probe")}
    assert ("rewards", "score") in seen
    first, second = (span["ts"] for span in spans if (of[span["pid"]], span["name"]) == ("controller", "start"))
    generated = [span for span in spans if (span["name"], span["cat"]) == ("decode", "generate")]
    assert {span["args"]["step"] for span in generated if span["ts"] < second} == {0, 1}
    assert {span["args"]["step"] for span in generated if span["ts"] > second} == {2}
    assert max(span["ts"] + span["dur"] for span in spans if span["ts"] < second) < second
    assert first < second
    for record in records(run)[:3]:
        parts = [record[f"time_sync_{part}_s"] for part in ("rendezvous", "transfer", "verify", "probe")]
        assert 0 < sum(part or 0 for part in parts) <= record["time_sync_s"]


def test_eval_of_a_config_shows_its_model_as_it_is(project: Path, tmp_path: Path) -> None:
    config = write_config(project, eval=[{"name": "heldout", "source": "heldout.jsonl"}])
    ended = command("eval", config, cwd=tmp_path)
    assert ended.code == 0, ended.told
    assert evaluation_line(ended.out, 0)
    assert list(tmp_path.iterdir()) == []


def evaluation_line(out: str, version: int) -> str:
    """What was said of the evaluation at a version, without the change since an earlier one."""
    (found,) = re.findall(rf"^eval {version}  (heldout avg@\d \S+ ±\S+)", out, re.M)
    return found
