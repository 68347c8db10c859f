"""The parts of the RPC that need no process: failures as text, the runtime folder, addresses to bind, exit texts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import zmq

from offbeat.errors import ConfigError
from offbeat.rpc import runtime
from offbeat.rpc.failure import failure_of
from offbeat.rpc.guard import start_ticks
from offbeat.rpc.process import describe_exit
from offbeat.rpc.server import Progress
from offbeat.rpc.transport import Listener
from offbeat.rpc.worker import ProgressSnapshot, stalled


def test_a_failure_is_bounded_and_has_the_whole_chain_B029() -> None:
    try:
        try:
            raise KeyError("root")
        except KeyError as error:
            raise RuntimeError("y" * 50_000_000) from error
    except RuntimeError as error:
        failure = failure_of(error)
    assert failure.type_name == "RuntimeError"
    assert len(failure.message) < 5000
    assert "50000000 characters" in failure.message
    assert failure.traceback_text.index("KeyError: 'root'") < failure.traceback_text.index("RuntimeError: yyy")
    assert len(failure.traceback_text) < 30_000


def test_a_failure_never_raises_B029() -> None:
    class Hostile(Exception):
        def __str__(self) -> str:
            raise RuntimeError("inside __str__")

    failure = failure_of(Hostile())
    assert "__str__ raised RuntimeError" in failure.message
    msgspec.msgpack.encode(failure_of(ValueError("\udcff\udcfe")))
    cause = ValueError("a")
    cause.__cause__ = RuntimeError("b")
    cause.__cause__.__cause__ = cause
    assert "b" in failure_of(cause).traceback_text


def test_a_deep_recursion_is_reported_shortly() -> None:
    def deeper(n: int) -> int:
        return deeper(n + 1) + 1

    with pytest.raises(RecursionError) as caught:
        deeper(0)
    assert len(failure_of(caught.value).traceback_text) < 30_000


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def test_the_runtime_folder_is_private_and_short(root: Path) -> None:
    folder = runtime.create_runtime_folder()
    assert folder.parent == root
    assert folder.stat().st_mode & 0o777 == 0o700
    assert runtime.own_folders() == [folder]


def test_a_folder_whose_owner_lives_is_kept_and_one_of_a_dead_owner_is_cleared_B011(root: Path) -> None:
    alive = runtime.create_runtime_folder()
    dead = runtime.create_runtime_folder()
    foreign = runtime.create_runtime_folder()
    stranger = root / "offbeat-without-owner"
    stranger.mkdir()
    ended = subprocess.Popen([sys.executable, "-S", "-c", ""])
    ended.wait(30)
    owner = msgspec.json.decode((dead / "owner").read_bytes(), type=runtime.Owner)
    gone = msgspec.structs.replace(owner, pid=ended.pid)
    (dead / "owner").write_bytes(msgspec.json.encode(gone))
    (foreign / "owner").write_bytes(msgspec.json.encode(msgspec.structs.replace(gone, namespace="elsewhere")))
    assert set(runtime.clear_stale_folders()) == {dead}
    assert alive.exists()
    assert foreign.exists()
    assert stranger.exists()
    assert not dead.exists()


def test_a_process_id_that_was_used_again_does_not_keep_a_folder(root: Path) -> None:
    folder = runtime.create_runtime_folder()
    owner = msgspec.json.decode((folder / "owner").read_bytes(), type=runtime.Owner)
    assert owner.started == start_ticks(os.getpid())
    (folder / "owner").write_bytes(msgspec.json.encode(msgspec.structs.replace(owner, started=1)))
    assert folder in runtime.clear_stale_folders()


def test_a_path_that_is_too_long_for_a_socket_is_refused_with_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(long))
    with pytest.raises(ConfigError, match=r"at most 107 are possible.*Set TMPDIR or XDG_RUNTIME_DIR"):
        runtime.create_runtime_folder()
    assert list(long.iterdir()) == []


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "[::]", "*", "", "0:0:0:0:0:0:0:0", "::ffff:0.0.0.0"])
def test_a_wildcard_is_never_bound_B061(host: str) -> None:
    with pytest.raises(ConfigError):
        Listener("tcp", host, None, 1 << 20)


@pytest.mark.parametrize(
    ("host", "start"), [("127.0.0.1", "tcp://127.0.0.1:"), ("::1", "tcp://[::1]:"), ("[::1]", "tcp://[::1]:")]
)
def test_both_address_families_are_bound_and_advertised_in_brackets_B010(host: str, start: str) -> None:
    listener = Listener("tcp", host, None, 1 << 20)
    try:
        assert listener.address.startswith(start)
        assert int(listener.address.rpartition(":")[2]) > 0
    finally:
        listener.close()


def test_exits_are_named() -> None:
    assert describe_exit(3) == "exit code 3"
    assert describe_exit(-11) == "killed by SIGSEGV"
    assert describe_exit(-9).startswith("killed by SIGKILL (")


def test_progress_keeps_the_latest_values_and_never_fails_to_encode() -> None:
    progress = Progress()
    progress.advance("loading \udcff" + "x" * 1000, shard=1)
    progress.advance(tokens=5, shard=2)
    beat = progress.beat(running=4)
    assert (beat.running, beat.progress, beat.counters) == (4, 2, {"shard": 2.0, "tokens": 5.0})
    assert beat.note.startswith("loading \\udcff")
    assert len(beat.note) < 300
    msgspec.msgpack.encode(beat)


def test_curve_is_available() -> None:
    assert zmq.has("curve"), "this pyzmq was built without CURVE: tcp transport cannot be used"


def test_a_stall_says_what_it_is_and_what_to_do_where_it_is_only_slow() -> None:
    log, advice = Path("logs/trainer-0.log"), "raise limits.stall_s."
    during = ProgressSnapshot(count=7, note="update, micro-batch 1 of 2", changed=20.0)
    assert stalled("trainer-0.update", 120.0, during, 10.0, log, advice) == (
        "trainer-0.update: no progress for 120 s; its last progress was 'update, micro-batch 1 of 2'; see "
        "logs/trainer-0.log; if it is slow and not stuck, raise limits.stall_s."
    )
    before = ProgressSnapshot(count=11, note="logprobs", changed=5.0)
    assert "'logprobs', before this call; see" in stalled("trainer-0.update", 120.0, before, 10.0, log, advice)
    assert (
        stalled("e.f", 0.5, ProgressSnapshot(), 10.0, log, "") == "e.f: no progress for 0.5 s; see logs/trainer-0.log"
    )
