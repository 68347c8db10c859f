"""Fault points: what the variable says, and what a point then does."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from offbeat.errors import ConfigError
from offbeat.faults import Fault, FaultInjected, parse_faults, point


def test_every_form_of_an_entry_is_understood() -> None:
    text = (
        "a.b=kill@2; engine-1/c=exit:7;d=sleep:0.5 ;; e=stop;f=term;g=raise;controller/h.i=enospc@1;j=kill:engine-0@3"
    )
    assert parse_faults(text) == (
        Fault(None, "a.b", "kill", at=2),
        Fault("engine-1", "c", "exit", 7.0),
        Fault(None, "d", "sleep", 0.5),
        Fault(None, "e", "stop"),
        Fault(None, "f", "term"),
        Fault(None, "g", "raise"),
        Fault("controller", "h.i", "enospc", at=1),
        Fault(None, "j", "kill", at=3, target="engine-0"),
    )


@pytest.mark.parametrize(
    "entry",
    [
        "a=explode",
        "a",
        "=kill",
        "/a=kill",
        "a=kill@0",
        "a=kill@x",
        "a=kill@",
        "a=exit",
        "a=exit:999",
        "a=exit:1.5",
        "a=sleep:-1",
        "a=sleep:nan",
        "a=sleep:soon",
        "a=raise:1",
        "a=kill:",
    ],
)
def test_a_wrong_entry_is_refused_by_name(entry: str) -> None:
    with pytest.raises(ConfigError, match="OFFBEAT_FAULTS") as caught:
        parse_faults(f"ok=kill;{entry};also=wrong_action")
    assert len(caught.value.problems) == 2
    assert repr(entry) in caught.value.problems[0]


def test_a_point_does_nothing_when_the_variable_is_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OFFBEAT_FAULTS", raising=False)
    started = time.perf_counter()
    for _ in range(10_000):
        point("engine.generate")
    assert time.perf_counter() - started < 0.5  # measured: 0.01 s


def test_raise_and_enospc_raise_at_their_count_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFBEAT_FAULTS", "count.me=raise@2;disk=enospc")
    point("count.me")
    with pytest.raises(FaultInjected, match=r"count\.me"):
        point("count.me")
    point("count.me")
    for _ in range(2):
        with pytest.raises(OSError, match="injected at disk") as caught:
            point("disk")
        assert caught.value.errno == errno.ENOSPC


def test_a_process_name_limits_a_fault_to_that_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFBEAT_FAULTS", "engine-1/p=raise")
    monkeypatch.setenv("OFFBEAT_PROCESS", "engine-0")
    point("p")
    monkeypatch.setenv("OFFBEAT_PROCESS", "engine-1")
    with pytest.raises(FaultInjected):
        point("p")
    monkeypatch.delenv("OFFBEAT_PROCESS")
    monkeypatch.setenv("OFFBEAT_FAULTS", "controller/p=raise")
    with pytest.raises(FaultInjected):
        point("p")


def test_the_wrong_variable_is_an_error_at_the_first_point(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFBEAT_FAULTS", "p=boom")
    with pytest.raises(ConfigError, match="unknown action 'boom'"):
        point("anything")


@pytest.mark.parametrize(
    ("action", "code"), [("kill", -signal.SIGKILL), ("term", -signal.SIGTERM), ("exit:9", 9), ("sleep:0.01", 0)]
)
def test_actions_that_end_a_process(action: str, code: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from offbeat.faults import point; point('p')"],
        env={"OFFBEAT_FAULTS": f"p={action}", "PATH": ""},
        capture_output=True,
        timeout=30,
    )
    assert done.returncode == code
    assert b"fault injected at p" in done.stderr


# A stand-in for a controller with one child: who starts whom, and what is in their environment, is as in a run.
_FAMILY = """
import os, subprocess, sys
from offbeat.faults import point
child = subprocess.Popen([sys.executable, "-c", "input()"], env={**os.environ, "OFFBEAT_PROCESS": "engine-0"}, stdin=-1)
while b"OFFBEAT_PROCESS=engine-0" not in open(f"/proc/{child.pid}/environ", "rb").read().split(bytes(1)):
    pass  # not in its program yet
try:
    point("p")
finally:
    if sys.argv[1:]:
        child.kill()
print(child.wait())
"""


def test_a_signal_can_be_sent_to_another_process_of_the_run() -> None:
    command = [sys.executable, "-c", _FAMILY]
    told = {**os.environ, "OFFBEAT_FAULTS": "p=term:engine-0"}
    done = subprocess.run(command, env=told, capture_output=True, text=True, timeout=30)
    assert done.stdout == f"{-signal.SIGTERM}\n", done.stderr
    told["OFFBEAT_FAULTS"] = "p=kill:engine-7"
    done = subprocess.run([*command, "end"], env=told, capture_output=True, text=True, timeout=30)
    assert "no process engine-7 to send a signal to" in done.stderr


def test_a_log_holds_every_fault_and_one_with_a_count_acts_once_in_a_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    log = tmp_path / "faults"
    monkeypatch.setenv("OFFBEAT_FAULTS_LOG", str(log))
    monkeypatch.setenv("OFFBEAT_FAULTS", "a.log=raise@1;b.log=sleep:0")
    with pytest.raises(FaultInjected):
        point("a.log")
    point("b.log")
    # The process that takes its place counts from 1 again.
    monkeypatch.setattr("offbeat.faults._reached", Counter[tuple[str, str]]())
    point("a.log")
    point("b.log")
    entries = [json.loads(line) for line in log.read_text().splitlines()]
    assert [(e["process"], e["point"], e["action"]) for e in entries] == [
        ("controller", "a.log", "raise"),
        ("controller", "b.log", "sleep"),
        ("controller", "b.log", "sleep"),
    ]
    assert abs(entries[0]["time"] - time.time()) < 10
