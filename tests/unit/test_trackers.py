"""Between a run and its trackers nothing is repeated, skipped or waited for, and secrets are not written down."""

from __future__ import annotations

import asyncio
import json
import re
import runpy
import subprocess
import sys
import threading
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from test_trackers_libraries import last_evaluation, record, samples

from offbeat.commands.track import track
from offbeat.config import Config, parse_config
from offbeat.errors import ConfigError
from offbeat.testing.tracker_conformance import check_tracker
from offbeat.trackers import Opened, Outcome, TrackedRun, own, require_trackers, tracking
from offbeat.trackers.delivery import MESSAGE_LIMIT, RECORDS, TEXT_LIMIT, WAITING_TABLES, fault, table
from offbeat.trackers.state import ProgressFile
from offbeat.trackers.tracker import flat

PAGE = Path(__file__).parents[2] / "docs" / "trackers.md"
FAULTY = """
import json, sys, threading, time
from pathlib import Path
from offbeat.trackers import Opened

class Faulty:
    '''Writes each call into calls.jsonl of the run; `fail` says where it fails how often.'''
    def __init__(self, fail="", times=1, rewind=False, names=False, then=None):
        self.fail, self.times, self.rewind, self.names, self.then = fail, times, rewind, names, then
    def write(self, *call):
        with (self.folder / "calls.jsonl").open("a") as file:
            print(json.dumps(call), file=file)
        if self.fail == call[0] and self.times > 0:
            self.times -= 1
            self.fail = self.then or self.fail
            raise RuntimeError("no route to host")
        if self.fail == "hang " + call[0]:
            threading.Event().wait()
        if self.fail == "exit " + call[0]:
            sys.exit(3)
    def start(self, run):
        self.folder = run.folder
        self.write("start", run.next_step, run.delivered, dict(run.state))
        if self.names:
            self.write("name", run.name)
        if self.rewind:
            return Opened(min(run.next_step, run.delivered), replaces=True, state={"id": "x"})
        return Opened(run.delivered, state={"id": "x"})
    def log(self, step, metrics):
        self.write("log", step, dict(metrics))
    def samples(self, step, rows):
        self.write("samples", step, len(rows))
    def finish(self, outcome):
        self.write("finish", outcome.status, outcome.error)
"""
MINIMAL: dict[str, Any] = {
    "model": "m",
    "steps": 6,
    "prompts_per_step": 1,
    "data": [{"source": "rows.jsonl", "rewards": {"rewards.py:f": 1.0}}],
}


def config_with(*trackers: Mapping[str, Any], folder: Path | None = None) -> Config:
    return parse_config({**MINIMAL, "trackers": list(trackers)}, folder=folder)


def faulty(folder: Path, **options: Any) -> Config:
    (folder / "mine.py").write_text(FAULTY)
    return config_with({"kind": "mine.py:Faulty", "options": options}, folder=folder)


def part(
    config: Config,
    folder: Path,
    new: Sequence[Mapping[str, Any]],
    *,
    history: Sequence[Mapping[str, Any]] = (),
    next_step: int = 0,
    error: BaseException | None = None,
    finish_s: float = 20.0,
    ready: Callable[[int], bool] = lambda done: True,
    another_line: bool = False,
) -> list[str]:
    """One part of a run; returns the warnings. `ready(n)` must hold before the n-th record is made."""
    warnings: list[str] = []

    async def main() -> None:
        tracked = tracking(
            config,
            folder,
            next_step=next_step,
            history=history,
            warn=warnings.append,
            finish_s=finish_s,
            another_line=another_line,
        )
        async with tracked as trackers:
            for number, one in enumerate(new):
                async with asyncio.timeout(20):
                    while not ready(number):  # noqa: ASYNC110 – it looks at a file
                        await asyncio.sleep(0.01)
                trackers.recorded(one, samples(one["step"]) if "reward_mean" in one else [])
                warnings.extend(trackers.words())
            if error is not None:
                raise error

    try:
        asyncio.run(main())
    except BaseException as raised:
        if raised is not error:
            raise
    return warnings


def calls(folder: Path) -> list[list[Any]]:
    return [json.loads(line) for line in (folder / "calls.jsonl").read_text().splitlines()]


def logged(folder: Path) -> list[int]:
    return [call[1] for call in calls(folder) if call[0] == "log"]


# --- the order of calls ---------------------------------------------------------------------------------------------


def test_a_run_is_told_in_order_with_the_table_after_its_step(tmp_path: Path) -> None:
    config = faulty(tmp_path)
    assert part(config, tmp_path, [record(5), last_evaluation(6)], next_step=5) == []
    numbers = {"weights_version": 5, "reward_mean": 5.0, "tokens_generated": 45, "reward/length": 0.5}
    assert calls(tmp_path) == [
        ["start", 5, 0, {}],
        ["log", 5, numbers],
        ["samples", 5, 4],
        ["log", 6, {"weights_version": 6, "eval/held/avg@4": 1.5}],
        ["finish", "done", None],
    ]


@pytest.mark.parametrize(
    ("error", "ended"),
    [
        (None, ["finish", "interrupted", None]),
        (RuntimeError("engine-0: killed\nlog"), ["finish", "failed", "engine-0: killed"]),
        (asyncio.CancelledError(), ["finish", "interrupted", None]),
    ],
)
def test_a_tracker_is_told_how_the_run_ended(tmp_path: Path, error: BaseException | None, ended: list[Any]) -> None:
    part(faulty(tmp_path), tmp_path, [record(0)], error=error)
    assert calls(tmp_path)[-1] == ended


@pytest.mark.parametrize("early", [False, True])
def test_steps_done_again_are_not_sent_again(tmp_path: Path, early: bool) -> None:
    """Whether the tracker has started before they are done, or after."""
    config = faulty(tmp_path)
    part(config, tmp_path, [record(step) for step in range(4)])

    def started_again(number: int) -> bool:
        del number
        return not early or '["start", 2' in (tmp_path / "calls.jsonl").read_text()

    again = [record(2), record(3), record(4)]
    part(config, tmp_path, again, history=[record(0), record(1)], next_step=2, ready=started_again)
    assert logged(tmp_path) == [0, 1, 2, 3, 4]
    assert ["start", 2, 4, {"id": "x"}] in calls(tmp_path)


def test_a_tracker_that_can_replace_gets_them_again(tmp_path: Path) -> None:
    config = faulty(tmp_path, rewind=True)
    part(config, tmp_path, [record(step) for step in range(4)])
    part(config, tmp_path, [record(2), record(3), record(4)], history=[record(0), record(1)], next_step=2)
    assert logged(tmp_path) == [0, 1, 2, 3, 2, 3, 4]


def test_a_run_that_goes_back_to_an_earlier_checkpoint_is_another_run_at_the_tracker(tmp_path: Path) -> None:
    """Of the line that is given up nothing is mixed into the new one, which has all its steps."""
    config = faulty(tmp_path, names=True)
    steps = [record(step) for step in range(5)]
    part(config, tmp_path, [*steps, last_evaluation(5)])
    for again, line in enumerate((2, 3), start=1):
        (tmp_path / "calls.jsonl").unlink()
        told = part(config, tmp_path, steps[2:4], history=steps[:2], next_step=2, another_line=True)
        assert told == [
            f"tracker {tmp_path}/mine.py:Faulty: it keeps the steps that are given up; what is trained from step 2 on "
            f"is another run there, {tmp_path.name}-{line}"
        ], again
        assert calls(tmp_path)[:2] == [["start", 2, 0, {}], ["name", f"{tmp_path.name}-{line}"]]
        assert logged(tmp_path) == [0, 1, 2, 3]
    part(config, tmp_path, steps[4:], history=steps[:4], next_step=4)
    assert calls(tmp_path)[-5:-3] == [["start", 4, 4, {"id": "x"}], ["name", f"{tmp_path.name}-3"]]
    assert logged(tmp_path) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("rewind", "done"), [(True, 4), (False, 2)])
def test_a_tracker_that_replaces_or_has_nothing_of_what_is_given_up_goes_on_in_its_run(
    tmp_path: Path, rewind: bool, done: int
) -> None:
    config = faulty(tmp_path, rewind=rewind, names=True)
    steps = [record(step) for step in range(4)]
    part(config, tmp_path, steps[:done])
    assert part(config, tmp_path, steps[2:], history=steps[:2], next_step=2, another_line=True) == []
    assert [call for call in calls(tmp_path) if call[0] == "name"] == [["name", tmp_path.name]] * 2
    assert logged(tmp_path)[done:] == [2, 3]


@pytest.mark.parametrize("rewind", [False, True])
def test_an_evaluation_after_the_last_step_is_there_once_when_the_run_goes_on(tmp_path: Path, rewind: bool) -> None:
    config = faulty(tmp_path, rewind=rewind)
    history = [record(0), record(1)]
    part(config, tmp_path, [*history, last_evaluation(2)])
    part(config, tmp_path, [{**record(2), **last_evaluation(2)}], history=history, next_step=2)
    last = calls(tmp_path)[-3]
    assert last[:2] == ["log", 2]
    assert ("eval/held/avg@4" in last[2]) == ("weights_version" in last[2]) == rewind
    assert last[2]["reward_mean"] == 2.0


# --- faults ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fail", ["start", "log"])
def test_a_fault_is_told_once_and_what_was_missed_is_sent_when_it_works_again(tmp_path: Path, fail: str) -> None:
    config = faulty(tmp_path, fail=fail, times=1)
    file = tmp_path / "calls.jsonl"
    seen = f'["{fail}", 0'
    steps = [record(step) for step in range(6)]
    told = part(config, tmp_path, steps, ready=lambda n: n != 1 or (file.exists() and seen in file.read_text()))
    (text,) = told
    assert "mine.py:Faulty: RuntimeError: no route to host. The run goes on" in text
    assert logged(tmp_path) == ([0] if fail == "log" else []) + list(range(6))
    assert calls(tmp_path)[-1] == ["finish", "done", None]


def test_a_library_that_ends_the_program_ends_nothing_and_the_rest_is_sent_later(tmp_path: Path) -> None:
    fault, missing = part(faulty(tmp_path, fail="exit log"), tmp_path, [record(0)])
    assert "SystemExit: 3" in fault
    assert "1 of 1 records were not delivered" in missing
    assert part(faulty(tmp_path), tmp_path, [], history=[record(0)], next_step=1) == []
    assert [call[0] for call in calls(tmp_path)][-3:] == ["start", "log", "finish"]


def test_a_tracker_that_hangs_is_left_alone_after_the_deadline_and_the_rest_is_sent_later(tmp_path: Path) -> None:
    (text,) = part(faulty(tmp_path, fail="hang log"), tmp_path, [record(0), record(1)], finish_s=0.3)
    assert "did not end within 0.3 s" in text
    assert "2 of 2 records were not delivered" in text
    assert f"'offbeat track {tmp_path}'" in text
    assert part(faulty(tmp_path), tmp_path, [], history=[record(0), record(1)], next_step=2) == []
    assert logged(tmp_path) == [0, 0, 1]


def test_a_fault_of_a_table_or_of_the_end_costs_no_metrics(tmp_path: Path) -> None:
    for fail, follows in (("samples", "without this table"), ("finish", "may not know that the run has ended")):
        folder = tmp_path / fail
        folder.mkdir()
        (text,) = part(faulty(folder, fail=fail, times=9), folder, [record(0), record(1)])
        assert "no route to host" in text
        assert follows in text
        assert "gets then what it missed" not in text
        assert logged(folder) == [0, 1]


def test_a_fault_of_a_table_does_not_keep_a_later_one_of_the_metrics_from_being_told(tmp_path: Path) -> None:
    words = part(faulty(tmp_path, fail="samples", then="log", times=9), tmp_path, [record(0), record(1), record(2)])
    assert len(words) == 3
    assert "without this table" in words[0]
    assert "gets then what it missed" in words[1]
    assert "2 of 3 records were not delivered" in words[2]


def test_a_slow_tracker_loses_tables_only_and_it_is_said(tmp_path: Path) -> None:
    steps = WAITING_TABLES + 5
    config = faulty(tmp_path, fail="hang start")
    (text,) = part(config, tmp_path, [record(step) for step in range(steps)], finish_s=0.2)
    assert "5 sample tables were left out" in text
    assert f"{steps} of {steps} records were not delivered" in text


def test_one_tracker_does_not_hold_up_another(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FAULTY + "\nclass Other(Faulty):\n    pass\n")
    hangs = {"kind": "mine.py:Other", "options": {"fail": "hang start"}}
    config = config_with(hangs, {"kind": "mine.py:Faulty"}, folder=tmp_path)
    part(config, tmp_path, [record(0)], finish_s=1)
    assert logged(tmp_path) == [0]
    assert ["finish", "interrupted", None] in calls(tmp_path)


def test_a_secret_of_the_environment_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "abcdef123456")
    assert "abcdef123456" not in fault("wandb", ValueError("invalid key abcdef123456\n\nmore"), RECORDS)
    assert "\n" not in fault("wandb", ValueError("a\nb"), RECORDS)
    for before in range(MESSAGE_LIMIT - 12, MESSAGE_LIMIT):  # the message is cut within it
        assert "abcdef" not in fault("wandb", ValueError("." * before + "abcdef123456"), RECORDS)


@pytest.mark.parametrize(
    ("error", "ended"),
    [
        (RuntimeError("engine-0: killed"), ["finish", "failed", "engine-0: killed"]),
        (asyncio.CancelledError(), ["finish", "interrupted", None]),
        (None, ["finish", "done", None]),
    ],
)
def test_track_tells_the_outcome_that_the_run_had_and_opens_no_tracker_that_has_everything(
    tmp_path: Path, error: BaseException | None, ended: list[Any]
) -> None:
    steps = [record(step) for step in range(6)]
    part(faulty(tmp_path, fail="hang log"), tmp_path, steps, error=error, finish_s=0.3)
    config = faulty(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config.model_dump(mode="json")))
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in steps))
    said: list[str] = []
    track(tmp_path, say=said.append)
    assert calls(tmp_path)[-1] == ended
    assert logged(tmp_path)[1:] == [0, 1, 2, 3, 4, 5]
    before = calls(tmp_path)
    track(tmp_path, say=said.append)
    assert calls(tmp_path) == before
    assert said == [f"6 records are with {tmp_path}/mine.py:Faulty"] * 2


def test_the_outcome_of_an_earlier_part_is_not_that_of_one_that_was_killed(tmp_path: Path) -> None:
    config = faulty(tmp_path)
    part(config, tmp_path, [record(0)], error=RuntimeError("full disk"))
    assert ProgressFile(tmp_path).outcome == Outcome("failed", "full disk")
    seen: list[Outcome | None] = []

    def running(number: int) -> bool:
        del number
        seen.append(ProgressFile(tmp_path).outcome)
        return True

    part(config, tmp_path, [record(1)], history=[record(0)], next_step=1, ready=running)
    assert seen == [None]
    assert ProgressFile(tmp_path).outcome == Outcome("interrupted")


@pytest.mark.parametrize(
    "content", ["", '{"wandb": {"next', "[]", '{"k": {"next_step": "3"}}', '{"outcome": 3}', "\xff"]
)
def test_a_damaged_trackers_json_is_told_of_and_everything_is_sent_again(tmp_path: Path, content: str) -> None:
    config = faulty(tmp_path)
    steps = [record(step) for step in range(3)]
    part(config, tmp_path, steps[:2])
    (tmp_path / "calls.jsonl").unlink()
    (tmp_path / "trackers.json").write_text(content, encoding="latin-1")
    (text,) = part(config, tmp_path, steps[2:], history=steps[:2], next_step=2)
    assert text.startswith(f"{tmp_path}/trackers.json cannot be read (")
    assert logged(tmp_path) == [0, 1, 2]
    assert ProgressFile(tmp_path).read(f"{tmp_path}/mine.py:Faulty").next_step == 3


# --- values ---------------------------------------------------------------------------------------------------------


def test_the_table_is_spread_over_the_step_and_bounded() -> None:
    rows = [{**row, "completion": "x" * 5000, "prompt": "half a pair \ud800"} for row in samples(3) * 4]
    chosen = table(rows, 3)
    assert len(chosen) == 3
    assert all(len(row["completion"]) == TEXT_LIMIT + 1 for row in chosen)
    assert "advantage" not in chosen[0]
    assert chosen[0]["prompt"] == "half a pair \ufffd"
    assert table(rows, 0) == []
    assert len(table(rows[:2], 8)) == 2


def test_a_config_is_flattened_to_the_dotted_paths_of_its_keys() -> None:
    leaves = flat({"steps": 3, "trainer": {"lr": 1.0, "betas": [0.9, 0.95]}, "data": [{"name": "a"}], "eval": []})
    assert leaves == {"steps": 3, "trainer.lr": 1.0, "trainer.betas": [0.9, 0.95], "data.0.name": "a", "eval": []}


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("import sys\nsys.exit(3)", r"cannot be imported \(SystemExit: 3\)"),
        ("open('gone.txt')", r"cannot be imported \(FileNotFoundError: .*gone\.txt"),
        ("class T:\n def __init__(self): raise SystemExit('no key')", r"cannot be made \(SystemExit: no key\)"),
    ],
)
def test_a_file_of_ones_own_that_exits_or_fails_is_told_of_with_its_words(tmp_path: Path, code: str, says: str) -> None:
    methods = "".join(f" def {name}(self, *_): ...\n" for name in ("start", "log", "samples", "finish"))
    (tmp_path / "mine.py").write_text(f"{code}\n{methods if 'class' in code else ''}")
    with pytest.raises(ConfigError, match=says):
        own.make(f"{tmp_path / 'mine.py'}:T", {})
    with pytest.raises(ConfigError, match="no such file"):
        own.make(f"{tmp_path / 'gone.py'}:T", {})


# --- the config -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ({"kind": "wandbb"}, "did you mean 'wandb'?"),
        ({"kind": "mine.py"}, "must be one of tensorboard, wandb, trackio, mlflow; or file.py:Class"),
        ({"kind": "tensorboard", "project": "p"}, "trackers.0.project: tensorboard has none, only wandb"),
        ({"kind": "mlflow", "mode": "offline"}, "trackers.0.mode: mlflow has none, only wandb"),
        ({"kind": "wandb", "mode": "of"}, "trackers.0.mode"),
        ({"kind": "wandb", "options": {"entiti": "x"}}, "did you mean 'entity'?"),
        ({"kind": "tensorboard", "options": {"x": 1}}, "known here: max_queue, flush_secs, filename_suffix"),
        ({"kind": "wandb", "options": {"api_key": "x7secretx7"}}, "set WANDB_API_KEY"),
        ({"kind": "m.py:C", "options": {"auth": {"Token": "x7secretx7"}}}, "set an environment variable"),
        ({"kind": "mlflow", "url": "https://me:x7secretx7@host"}, "MLFLOW_TRACKING_TOKEN"),
        ({"kind": "trackio", "url": "https://host?write_token=x7secretx7"}, "TRACKIO_WRITE_TOKEN"),
        ({"kind": "trackio", "url": "https://x7secretx7@host"}, "set HF_TOKEN or TRACKIO_WRITE_TOKEN instead"),
        ({"kind": "mlflow", "url": "https://host/?key=x7secretx7"}, "MLFLOW_TRACKING_TOKEN"),
        ({"kind": "mlflow", "url": "https://host/?access_key=x7secretx7"}, "MLFLOW_TRACKING_TOKEN"),
        ({"kind": "wandb", "options": {"auth": "x7secretx7"}}, "trackers.0.options.auth: secrets do not belong"),
        ({"kind": "m.py:C", "options": {"pwd": "x7secretx7"}}, "trackers.0.options.pwd: secrets do not belong"),
        ({"kind": "m.py:C", "options": {"access_key": "x7secretx7"}}, "set an environment variable"),
        ({"kind": "m.py:C", "options": {"a": [{"to": "https://x7secretx7@h"}]}}, "trackers.0.options.to: holds a pass"),
        ({"kind": "wandb", "samples": 1000}, "trackers.0.samples = 1000: must be less than or equal to 256"),
        ({"kind": "wandb", "nmae": "x"}, "trackers.0.nmae: unknown key; did you mean 'name'?"),
        ({}, "trackers.0.kind: missing"),
    ],
)
def test_a_mistake_is_one_sentence_that_repeats_no_secret(section: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_with(section)
    (text,) = caught.value.problems
    assert says in text
    assert "x7secretx7" not in text


@pytest.mark.parametrize(
    "section",
    [
        {"kind": "mlflow", "url": "postgresql://me@host/runs"},
        {"kind": "mlflow", "url": "sqlite:///runs.db?mode=ro"},
        {
            "kind": "m.py:C",
            "options": {"author": "me", "key": "reward_mean", "to": "https://host/a?step=3", "x": "a://["},
        },
    ],
)
def test_what_is_no_secret_is_let_in(section: dict[str, Any]) -> None:
    assert config_with(section).trackers[0].kind.endswith(section["kind"])


def test_two_of_a_kind_are_refused() -> None:
    with pytest.raises(ConfigError, match="is there already"):
        config_with({"kind": "wandb"}, {"kind": "wandb", "project": "p"})


@pytest.mark.parametrize(
    ("kind", "options", "says"),
    [
        ("gone.py:Mine", {}, "no such file"),
        ("mine.py:Faultyy", {}, "did you mean 'Faulty'?"),
        ("mine.py:Faulty", {"fial": 1}, "options do not fit its parameters: got an unexpected keyword argument 'fial'"),
        ("mine.py:Opened", {}, "has no method start and no log and no samples and no finish"),
        ("no_such_package.module:Mine", {}, "cannot be imported"),
    ],
)
def test_a_tracker_of_ones_own_is_checked_before_anything_starts(
    tmp_path: Path, kind: str, options: dict[str, Any], says: str
) -> None:
    (tmp_path / "mine.py").write_text(FAULTY)
    with pytest.raises(ConfigError) as caught:
        require_trackers(config_with({"kind": kind, "options": options}, folder=tmp_path))
    assert says in str(caught.value)


def test_a_library_that_is_missing_is_named_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(name: str) -> None:
        del name

    monkeypatch.setattr("importlib.util.find_spec", nothing)
    with pytest.raises(ConfigError, match=re.escape("run pip install -e ") + r".*\[track\]' \(all four libraries\)"):
        require_trackers(config_with({"kind": "wandb"}))


def test_no_library_is_imported_by_the_check_before_the_start() -> None:
    """Not even when it is named: a slow import is the tracker's thread's."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import test_trackers as t, offbeat.training;"
        "from offbeat.trackers.opening import make_tracker;"
        "kinds = ('tensorboard', 'wandb', 'trackio', 'mlflow');"
        "[make_tracker(s) for k in kinds for s in t.config_with({'kind': k}).trackers];"
        "print([n for n in kinds if n in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(Path(__file__).parent)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.strip() == "[]", done.stderr


# --- the conformance suite, and the page that shows it ------------------------------------------------------------


class Recording:
    """Keeps points in a list of the test, as a conforming tracker does."""

    def __init__(
        self,
        points: list[tuple[int, str, float]],
        *,
        forget: bool = False,
        change: Callable[[Mapping[str, float]], Mapping[str, float]] = dict,
    ) -> None:
        self.points = points
        self.forget = forget
        self.change = change

    def start(self, run: TrackedRun) -> Opened:
        return Opened(0 if self.forget else run.delivered)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        assert threading.current_thread() is not threading.main_thread()
        self.points.extend((step, key, value) for key, value in self.change(metrics).items())

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        json.dumps([step, rows])

    def finish(self, outcome: Outcome) -> None: ...


def test_the_conformance_suite_passes_a_good_tracker_and_finds_one_that_repeats_steps(tmp_path: Path) -> None:
    for forget in (False, True):
        stored: dict[Path, list[tuple[int, str, float]]] = {}
        results = check_tracker(
            lambda run, forget=forget, stored=stored: Recording(stored.setdefault(run, []), forget=forget),
            tmp_path / str(forget),
            read=lambda run, stored=stored: stored[run],
        )
        problems = {result.name: result.problem for result in results if result.problem}
        assert bool(problems) == forget, problems
        if forget:
            assert "it is at [0, 0, 1, 1, " in problems["a resumed run neither repeats nor skips a step"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda metrics: dict.fromkeys(metrics, 0.0), "is 0.0; "),
        (lambda metrics: {**metrics, "reward/my reward": 1e30}, "reward/my reward of step 0 is 1e+30; -1e+30 was sent"),
        (lambda metrics: {**metrics, "lr": 0.0}, "lr of step 0 is 0.0; 1e-09 was sent"),
        (lambda metrics: {k: v for k, v in metrics.items() if k != "sync_bytes"}, "sync_bytes should be there once"),
    ],
)
def test_the_conformance_suite_finds_a_tracker_that_loses_or_changes_a_value(
    tmp_path: Path, change: Callable[[Mapping[str, float]], Mapping[str, float]], says: str
) -> None:
    stored: dict[Path, list[tuple[int, str, float]]] = {}
    results = check_tracker(
        lambda run: Recording(stored.setdefault(run, []), change=change), tmp_path, read=lambda run: stored[run]
    )
    problems = {result.name: result.problem or "" for result in results}
    assert says in problems["a run is logged from start to end"]


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


def test_every_section_in_the_page_is_a_valid_configuration(tmp_path: Path) -> None:
    found = blocks("toml")
    assert {kind for text in found for kind in re.findall(r'kind = "(\w+)"', text)} >= {
        "tensorboard",
        "wandb",
        "trackio",
        "mlflow",
    }
    for text in found:
        parse_config({**MINIMAL, **tomllib.loads(text)}, folder=tmp_path)


def test_the_tracker_in_the_page_conforms_as_the_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tracker, check = blocks("python")
    (tmp_path / "lines.py").write_text(tracker)
    (tmp_path / "test_lines.py").write_text(check)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (test,) = [value for name, value in runpy.run_path("test_lines.py").items() if name.startswith("test_")]
    (tmp_path / "of the test").mkdir()
    test(tmp_path / "of the test")
    section = {"kind": "lines.py:Lines", "options": {"file": "lines.jsonl"}}
    assert part(config_with(section, folder=tmp_path), tmp_path, [record(0)]) == []
    assert json.loads((tmp_path / "lines.jsonl").read_text())["reward_mean"] == 0.0
