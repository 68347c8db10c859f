"""States of an engine: no order but the right one, and nothing served after a failure."""

from __future__ import annotations

import threading
import time

import pytest

from offbeat.errors import WeightSyncError
from offbeat.rpc.messages import Manifest, TensorEntry
from offbeat.weights.session import EngineState, first_difference


def serving(version: int = 1) -> EngineState:
    state = EngineState()
    state.begin(version, drain_s=0)
    state.loaded(version)
    state.commit(version)
    return state


def test_the_right_order_raises_the_version_at_commit_only_B076_B114() -> None:
    state = EngineState()
    seen = [(state.name, state.version)]
    state.begin(0, drain_s=0)
    seen.append((state.name, state.version))
    state.loaded(0)
    seen.append((state.name, state.version))
    state.commit(0)
    seen.append((state.name, state.version))
    assert seen == [("stale", -1), ("receiving", -1), ("probing", -1), ("serving", 0)]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda s: s.loaded(1),
        lambda s: s.commit(1),
        lambda s: (s.begin(1, drain_s=0), s.commit(1)),
        lambda s: (s.begin(1, drain_s=0), s.loaded(2)),
        lambda s: (s.begin(1, drain_s=0), s.begin(1, drain_s=0)),
        lambda s: (s.begin(1, drain_s=0), s.loaded(1), s.commit(2)),
        lambda s: (s.begin(1, drain_s=0), s.loaded(1), s.loaded(1)),
    ],
)
def test_every_other_order_is_refused_B114(wrong: object) -> None:
    assert callable(wrong)
    with pytest.raises(WeightSyncError, match="the engine is"):
        wrong(EngineState())


def test_requests_are_admitted_while_serving_and_probes_while_probing_only() -> None:
    state = EngineState()
    for move, request, probe in (
        (lambda: None, None, None),
        (lambda: state.begin(4, drain_s=0), None, None),
        (lambda: state.loaded(4), None, 4),
        (lambda: state.commit(4), 4, None),
    ):
        move()
        for is_probe, allowed in ((False, request), (True, probe)):
            if allowed is None:
                with pytest.raises(WeightSyncError, match=state.name):
                    state.admit(probe=is_probe)
            else:
                assert state.admit(probe=is_probe) == allowed


@pytest.mark.parametrize("steps", range(4))
def test_a_failure_at_any_point_makes_it_stale_until_a_full_transfer_B096(steps: int) -> None:
    state = serving(1)
    for step in [lambda: state.begin(2, drain_s=0), lambda: state.loaded(2), lambda: state.commit(2)][:steps]:
        step()
    state.fail("the loader broke")
    state.fail("a later report")
    assert state.name == "stale"
    for probe in (False, True):
        with pytest.raises(WeightSyncError, match="because the loader broke"):
            state.admit(probe=probe)
    with pytest.raises(WeightSyncError):
        state.commit(2)
    state.begin(3, drain_s=0)
    state.loaded(3)
    state.commit(3)
    assert state.admit(probe=False) == 3


def test_an_older_version_is_not_taken() -> None:
    with pytest.raises(WeightSyncError, match="older than version 5"):
        serving(5).begin(4, drain_s=0)


def test_running_requests_are_awaited_and_new_ones_refused_B009_B030() -> None:
    state = serving(1)
    inside, leave, admitted = threading.Event(), threading.Event(), list[str]()

    def request() -> None:
        with state.request(probe=False):
            inside.set()
            leave.wait(5)

    worker = threading.Thread(target=request)
    worker.start()
    inside.wait(5)
    begun = threading.Thread(target=lambda: state.begin(2, drain_s=5))
    begun.start()
    while state.name == "serving":  # until admission has closed
        time.sleep(0.001)
    try:
        state.admit(probe=False)
        admitted.append("while draining")
    except WeightSyncError:
        pass
    assert begun.is_alive()
    leave.set()
    begun.join(5)
    worker.join(5)
    assert not admitted
    state.loaded(2)


def test_requests_that_never_end_give_a_bounded_error_with_their_number_B030() -> None:
    state = serving(1)
    with state.request(probe=False), state.request(probe=False):
        with pytest.raises(WeightSyncError, match=r"2 requests were still running after 0\.1 s"):
            state.begin(2, drain_s=0.05)
        assert state.name == "stale"


def test_the_first_differing_tensor_is_named() -> None:
    manifest = Manifest(entries=(TensorEntry("a", (1,), "float32"), TensorEntry("b", (2,), "float32")))
    assert first_difference(manifest, ["1", "2"], ["1", "2"]) is None
    assert "b [2] float32" in str(first_difference(manifest, ["1", "2"], ["1", "3"]))
    assert "1 digests for 2" in str(first_difference(manifest, ["1", "2"], ["1"]))
