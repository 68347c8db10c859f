"""Every issued sample ends once: as trained or dropped. Whatever breaks that is said."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.journal import Account, Journal, account, open_journal, read_journal, staleness_problems
from offbeat.journal.events import (
    ENDED,
    FAILED,
    INTERRUPTED,
    NO_SPREAD,
    NO_TOKENS,
    SKIPPED,
    STOPPED,
    AnyEvent,
    Dropped,
    Issued,
    Trained,
)
from offbeat.journal.writer import untrained
from offbeat.rpc.messages import UpdateResult
from offbeat.types import Batch, GenerateRequest, MiniBatch, Prompt, Rollout, Sampling, Scored, TrainSample

SAMPLING = Sampling(max_new_tokens=4)
SAMPLES = 2


def requests(step: int) -> list[GenerateRequest]:
    """Two prompts a step, never seen before."""
    ids = np.zeros(1, np.int32)
    return [
        GenerateRequest(prompt_id=f"data/{2 * step + i}", epoch=0, token_ids=ids, seeds=tuple(range(SAMPLES)))
        for i in range(2)
    ]


def scored_samples(step: int, tokens: int = 3) -> list[Scored]:
    return [scored_sample(request.prompt_id, index, tokens) for request in requests(step) for index in range(SAMPLES)]


def scored_sample(prompt_id: str, index: int, tokens: int = 3) -> Scored:
    ids = np.zeros(1, np.int32)
    rollout = Rollout(
        prompt_id=prompt_id,
        sample_index=index,
        epoch=0,
        prompt_token_ids=ids,
        token_ids=np.arange(tokens, dtype=np.int32),
        logprobs=np.zeros(tokens, np.float32),
        versions=((7, tokens),),
        finish_reason="stop",
        engine="engine-0",
        started_s=0.0,
        finished_s=1.0,
    )
    prompt = Prompt(id=prompt_id, epoch=0, source="data", token_ids=ids, text="", columns={})
    return Scored(rollout=rollout, prompt=prompt, text="", reward=0.0, parts={})


def batch_of(*minibatches: list[Scored]) -> Batch:
    def sample(one: Scored) -> TrainSample:
        rollout, ones = one.rollout, np.ones(len(one.rollout.token_ids), np.float32)
        return TrainSample(
            prompt_token_ids=rollout.prompt_token_ids,
            token_ids=rollout.token_ids,
            logprobs=rollout.logprobs,
            advantages=ones,
            loss_mask=ones.astype(np.uint8),
        )

    return Batch(
        step=0,
        minibatches=tuple(MiniBatch(samples=tuple(map(sample, m)), denominator=1.0) for m in minibatches),
        sampling=SAMPLING,
    )


def update(version: int, skipped: tuple[int, ...] = ()) -> UpdateResult:
    return UpdateResult(metrics={}, weights_version=version, optimizer_updates=version, skipped=skipped, busy_s=0.0)


def train(journal: Journal, step: int) -> None:
    scored = scored_samples(step)
    journal.trained(step, scored, batch_of(scored), update(step + 1))


def told(path: Path) -> Account:
    return account(read_journal(path))


def test_a_run_that_ends_in_order_accounts_for_every_sample(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    with open_journal(path) as journal:
        for step in range(3):
            journal.issued(step, requests(step))
            journal.generated(step, [one.rollout for one in scored_samples(step)])
            journal.rewarded(step, scored_samples(step))
            train(journal, step)
            journal.saved(step + 1)
    found = told(path)
    assert (found.issued, found.trained, dict(found.dropped), found.unended) == (12, 12, {}, {})
    assert (found.next_step, found.lost, found.problems) == (3, 0, [])
    assert found.versions == {step: {7: 4} for step in range(3)}


@pytest.mark.parametrize("reason", [STOPPED, FAILED, ENDED])
def test_what_was_in_the_making_is_dropped_for_the_reason_the_run_ended_and_issued_again(
    tmp_path: Path, reason: str
) -> None:
    path = tmp_path / "journal.jsonl"
    error = {STOPPED: None, FAILED: RuntimeError("a worker died"), ENDED: KeyboardInterrupt()}[reason]
    offset = 0
    with contextlib.suppress(RuntimeError, KeyboardInterrupt), open_journal(path) as journal:
        journal.issued(0, requests(0))
        train(journal, 0)
        journal.issued(1, requests(1))  # one step off-policy: in flight while step 0 is saved
        offset = journal.mark()
        if error is not None:
            raise error
    events = [event for _, event in read_journal(path)]
    assert isinstance(events[-1], Dropped)
    assert (events[-1].step, events[-1].reason) == (1, reason)
    assert told(path).lost == 0
    with open_journal(path, resumed_at=(1, offset)) as journal:
        journal.issued(1, requests(1))
        train(journal, 1)
    found = told(path)
    assert (found.issued, found.trained, found.unended, found.problems) == (8, 8, {}, [])
    assert (found.resumes, found.done_again) == ([1], 0)


def test_steps_after_the_checkpoint_are_superseded_and_done_again(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    offset = 0
    with open_journal(path) as journal:
        for step in range(4):
            journal.issued(step, requests(step))
            train(journal, step)
            if step == 1:
                offset = journal.mark()
    with open_journal(path, resumed_at=(2, offset)) as journal:
        for step in range(2, 5):
            journal.issued(step, requests(step))
            train(journal, step)
    found = told(path)
    assert (found.issued, found.trained, found.problems, found.done_again) == (20, 20, [], 2)


def test_a_line_cut_off_by_a_kill_is_removed_when_the_run_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    with open_journal(path) as journal:
        journal.issued(0, requests(0))
        train(journal, 0)
        offset = journal.mark()
    whole = path.read_bytes()
    for cut in range(offset, len(whole) + 30):
        path.write_bytes((whole + b'{"event":"issued","step":1,"time":1.0,"sampl')[:cut])
        with open_journal(path, resumed_at=(1, offset)) as journal:
            journal.issued(1, requests(1))
            train(journal, 1)
        found = told(path)
        assert (found.trained, found.problems) == (8, [])


def test_a_run_that_kept_no_journal_begins_one_where_it_is_continued(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    with open_journal(path, resumed_at=(5, None)) as journal:
        journal.issued(5, requests(5))
        train(journal, 5)
    found = told(path)
    assert (found.first_step, found.next_step, found.trained, found.problems) == (5, 6, 4, [])


def test_samples_that_taught_nothing_are_dropped_with_the_reason() -> None:
    learned, spreadless, skipped, empty = (scored_sample(f"data/{i}", 0, tokens=3 * (i < 3)) for i in range(4))
    batch = batch_of([learned, skipped], [skipped])
    assert untrained([learned, spreadless, empty], batch, ()) == {
        NO_SPREAD: (("data/1", 0, (0,)),),
        NO_TOKENS: (("data/3", 0, (0,)),),
    }
    assert untrained([learned, skipped], batch_of([learned], [skipped]), (1,)) == {SKIPPED: (("data/2", 0, (0,)),)}
    assert untrained([skipped], batch_of([skipped], [skipped]), (1,)) == {}, "one pass of it was applied"


def test_dropped_samples_are_not_trained_and_not_lost(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    with open_journal(path) as journal:
        journal.issued(0, requests(0))
        scored = scored_samples(0)
        journal.trained(0, scored, batch_of(scored[:2]), update(1))
    found = told(path)
    assert (found.issued, found.trained, dict(found.dropped), found.problems) == (4, 2, {NO_SPREAD: 2}, [])


# Each is a way in which a run could go wrong; the account must say it.
WRONG: dict[str, tuple[Callable[[list[AnyEvent]], list[AnyEvent]], str]] = {
    "a step trained twice": (lambda events: [*events, events[-1]], "step 2 was trained where step 3 was due"),
    "a step left out": (lambda events: [e for e in events if e.step != 1], "step 2 was trained where step 1 was due"),
    "trained, never issued": (
        lambda events: [e for e in events if not (isinstance(e, Issued) and e.step == 1)],
        "samples that were not issued",
    ),
    "issued twice": (lambda events: [*events[:1], *events], "step 0 was issued twice"),
    "samples of an earlier step again": (
        lambda events: [
            msgspec.structs.replace(e, samples=issued_for(events, 0)) if isinstance(e, Issued) and e.step == 2 else e
            for e in events
        ],
        "4 samples that had ended before",
    ),
    "a version left out": (
        lambda events: [
            msgspec.structs.replace(e, version=9) if isinstance(e, Trained) and e.step == 1 else e for e in events
        ],
        "published version 9 instead of 2",
    ),
    "one sample twice in a step": (
        lambda events: [*events, Issued(step=3, time=0.0, samples=(("data/6", 0, (0, 0)),))],
        "1 samples twice",
    ),
    "dropped, never issued": (
        lambda events: [*events, Dropped(step=3, time=0.0, reason=NO_SPREAD, samples=(("data/9", 0, (0,)),))],
        "not issued for it",
    ),
}


def issued_for(events: list[AnyEvent], step: int) -> tuple[tuple[str, int, tuple[int, ...]], ...]:
    return next(e.samples for e in events if isinstance(e, Issued) and e.step == step)


@pytest.mark.parametrize("name", WRONG)
def test_what_must_not_happen_is_said(name: str) -> None:
    samples = [tuple((r.prompt_id, r.epoch, (0, 1)) for r in requests(step)) for step in range(3)]
    events: list[AnyEvent] = []
    for step in range(3):
        events.append(Issued(step=step, time=0.0, samples=samples[step]))
        events.append(Trained(step=step, time=0.0, version=step + 1))
    assert account(enumerate(events)).problems == []
    change, says = WRONG[name]
    problems = account(enumerate(change(events))).problems
    assert any(says in problem for problem in problems), problems


@pytest.mark.parametrize("ended_by", [asyncio.CancelledError, KeyboardInterrupt, RuntimeError])
def test_a_full_disk_at_the_end_does_not_hide_what_ended_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended_by: type[BaseException]
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def run() -> None:
        with open_journal(tmp_path / "journal.jsonl"):
            monkeypatch.setattr(Journal, "end", full)
            raise ended_by

    with pytest.raises(ended_by):
        run()


def test_a_resume_is_on_the_disk_before_other_files_are_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "journal.jsonl"
    with open_journal(path) as journal:
        offset = journal.mark()
    synced = list[int]()
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_size))
    with open_journal(path, resumed_at=(0, offset)):
        assert synced == [path.stat().st_size]


def test_a_journal_that_is_shorter_than_its_checkpoint_saw_is_said(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    with open_journal(path) as journal:
        journal.issued(0, requests(0))
        train(journal, 0)
        offset = journal.mark()
    path.write_bytes(path.read_bytes()[:40])
    with open_journal(path, resumed_at=(1, offset)) as journal:
        journal.issued(1, requests(1))
        train(journal, 1)
    found = told(path)
    (problem,) = found.problems
    assert "there were only" in problem
    assert (found.first_step, found.next_step, found.lost) == (1, 2, 0)


def test_samples_older_than_allowed_are_said() -> None:
    assert staleness_problems({0: {0: 4}, 1: {0: 4}, 2: {1: 4}}, {}, 1) == []
    (problem,) = staleness_problems({0: {0: 4}, 3: {1: 2, 2: 2}}, {}, 1)
    assert "step 3 trained on samples 1 to 2 versions behind" in problem
    assert staleness_problems({3: {4: 1}}, {}, 1) != [], "newer than the weights there were"
    assert staleness_problems({1: {0: 4}, 2: {2: 4}}, {1: 1, 2: 0}, 0) == [], "each step by what was allowed then"
    assert staleness_problems({1: {0: 4}, 2: {1: 4}}, {1: 1, 2: 0}, 1) != []


def test_a_resume_may_ask_for_another_staleness_and_for_other_samples_of_the_step_in_flight(tmp_path: Path) -> None:
    """`offbeat resume RUN max_staleness=0 samples_per_prompt=4`, one step off-policy before; and back again."""
    path = tmp_path / "journal.jsonl"

    def sampled(journal: Journal, step: int, version: int) -> None:
        rollouts = [msgspec.structs.replace(one.rollout, versions=((version, 3),)) for one in scored_samples(step)]
        journal.generated(step, rollouts)

    with open_journal(path, max_staleness=1) as journal:
        journal.issued(0, requests(0))
        sampled(journal, 0, 0)
        journal.issued(1, requests(1))
        sampled(journal, 1, 0)
        train(journal, 0)
        train(journal, 1)
        journal.issued(2, requests(2))
        sampled(journal, 2, 1)
        offset = journal.mark()
    with open_journal(path, resumed_at=(2, offset), max_staleness=0) as journal:
        more = [msgspec.structs.replace(request, seeds=tuple(range(4))) for request in requests(2)]
        journal.issued(2, more)
        sampled(journal, 2, 2)
        train(journal, 2)
        offset = journal.mark()
    with open_journal(path, resumed_at=(3, offset), max_staleness=1) as journal:
        journal.issued(3, requests(3))
        sampled(journal, 3, 2)
        train(journal, 3)
    found = told(path)
    assert (found.problems, found.lost) == ([], 0)
    assert (found.issued, found.trained) == (4 + 4 + 8 + 4, 4 + 4 + 8 + 4)
    assert found.max_staleness == {0: 1, 1: 1, 2: 0, 3: 1}
    for config in (0, 1):
        assert staleness_problems(found.versions, found.max_staleness, config) == []


def test_a_step_that_an_earlier_resume_has_superseded_is_not_in_flight(tmp_path: Path) -> None:
    """What a second resume calls interrupted is of the surviving line, which an earlier resume had shortened."""
    path = tmp_path / "journal.jsonl"
    with open_journal(path) as journal:
        journal.issued(0, requests(0))
        train(journal, 0)
        first = journal.mark()
        for step in (1, 2, 3):
            journal.issued(step, requests(step))
    with open_journal(path, resumed_at=(1, first)) as journal:
        journal.issued(1, requests(1))
        train(journal, 1)
        second = journal.mark()
    with open_journal(path, resumed_at=(2, second)):
        pass
    drops = [event for _, event in read_journal(path) if isinstance(event, Dropped) and event.reason == INTERRUPTED]
    assert drops == []


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_however_often_a_run_is_killed_no_sample_is_lost_or_trained_twice(data: st.DataObject) -> None:
    """One step off-policy, killed at any byte of its journal, any number of times, saved at any steps."""
    import tempfile

    steps, saves = 6, [(0, 0)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal.jsonl"
        for part in itertools.count():
            first, offset = saves[-1] if part else (0, None)
            last_part = part == 4 or data.draw(st.booleans())
            with open_journal(path, resumed_at=(first, offset) if part else None, clock=lambda: 0.0) as journal:
                if not part:
                    saves = [(0, journal.mark())]
                journal.issued(first, requests(first))
                for step in range(first, steps):
                    if step + 1 < steps:
                        journal.issued(step + 1, requests(step + 1))
                    train(journal, step)
                    if data.draw(st.booleans()):
                        saves.append((step + 1, journal.mark()))
            if last_part:
                break
            # Killed: nothing after some byte was written; checkpoints from before it survive.
            size = path.stat().st_size
            cut = data.draw(st.integers(saves[0][1] or 0, size))
            path.write_bytes(path.read_bytes()[:cut])
            saves = [(step, offset) for step, offset in saves if offset <= cut and step < steps]
        found = told(path)
    assert (found.problems, found.unended, found.lost) == ([], {}, 0)
    assert (found.issued, found.trained, found.next_step) == (4 * steps, 4 * steps, steps)
