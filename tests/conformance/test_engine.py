"""The engine conformance suite against the fake, the real engine, and engines that break one promise each."""

from __future__ import annotations

import re
import runpy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from offbeat.testing.conformance import ENGINE_CHECKS, CheckResult, check_engine
from offbeat.testing.fakes import FakeEngine, World
from offbeat.testing.leaks import no_leaks
from offbeat.testing.tiny_project import write_config, write_project
from offbeat.testing.virtual_time import run_in_virtual_time
from offbeat.types import GenerateRequest, Rollout, Sampling

EXTENDING = Path(__file__).parents[2] / "docs" / "extending.md"


def failed(results: Sequence[CheckResult]) -> dict[str, str]:
    return {result.name: result.problem for result in results if result.problem}


def test_the_fake_engine_keeps_every_promise() -> None:
    results = run_in_virtual_time(check_engine(FakeEngine(World(), version=3)))
    assert failed(results) == {}
    assert len(results) == len(ENGINE_CHECKS)


class Broken(FakeEngine):
    """A fake whose answers are changed on the way out."""

    change: Callable[[list[Rollout]], list[Rollout]]

    async def generate(self, requests: Sequence[GenerateRequest], sampling: Sampling) -> list[Rollout]:
        return self.change(await super().generate(requests, sampling))


def each(**changes: Callable[[Rollout], Any]) -> Callable[[list[Rollout]], list[Rollout]]:
    def change(rollouts: list[Rollout]) -> list[Rollout]:
        return [msgspec.structs.replace(r, **{name: f(r) for name, f in changes.items()}) for r in rollouts]

    return change


BREAKS: dict[str, tuple[Callable[[list[Rollout]], list[Rollout]], str]] = {
    "order": (lambda r: r[::-1], "answers in order by identity"),
    "one too few": (lambda r: r[:-1], "answers in order by identity"),
    "prompt altered": (each(prompt_token_ids=lambda r: r.prompt_token_ids + 1), "answers in order by identity"),
    "logprob missing": (each(logprobs=lambda r: r.logprobs[:-1]), "tokens have logprobs and versions"),
    "logprob not a number": (each(logprobs=lambda r: r.logprobs * np.nan), "tokens have logprobs and versions"),
    "probabilities": (each(logprobs=lambda r: np.exp(r.logprobs)), "tokens have logprobs and versions"),
    "old version": (each(versions=lambda r: ((2, len(r.token_ids)),)), "tokens have logprobs and versions"),
    "logprobs all alike": (
        each(logprobs=lambda r: r.logprobs * 0 - 1),
        "the most likely token alone is certain",
    ),
    "logprobs all certain": (each(logprobs=lambda r: r.logprobs * 0), "temperature sharpens and flattens"),
    "one token for all": (each(token_ids=lambda r: r.token_ids * 0), "seeds decide"),
    "stop id cut off": (
        each(token_ids=lambda r: r.token_ids[:-1] if r.finish_reason == "stop" else r.token_ids),
        "any stop id ends a sample and stays in it",
    ),
    "finish reason": (each(finish_reason=lambda r: "stop"), "length is bounded"),
}


@pytest.mark.parametrize("name", BREAKS)
def test_an_engine_that_breaks_a_promise_is_named(name: str) -> None:
    change, check = BREAKS[name]
    engine = Broken(World(), version=3)
    engine.change = change
    assert check in failed(run_in_virtual_time(check_engine(engine)))


class Deaf(FakeEngine):
    """Does not hear of a part of the sampling."""

    fields: dict[str, Any]

    async def generate(self, requests: Sequence[GenerateRequest], sampling: Sampling) -> list[Rollout]:
        return await super().generate(requests, msgspec.structs.replace(sampling, **self.fields))


@pytest.mark.parametrize(
    ("fields", "check"),
    [
        ({"top_k": 0}, "the most likely token alone is certain"),
        ({"temperature": 1.0}, "temperature sharpens and flattens"),
    ],
)
def test_an_engine_that_does_not_hear_of_the_sampling_is_named(fields: dict[str, Any], check: str) -> None:
    engine = Deaf(World(), version=3)
    engine.fields = fields
    assert check in failed(run_in_virtual_time(check_engine(engine)))


@pytest.mark.parametrize("error", [ValueError("no"), IndexError("no"), KeyError("no"), SystemExit("no")])
def test_whatever_an_engine_raises_is_a_failed_check(error: BaseException) -> None:
    class Raising(FakeEngine):
        async def generate(self, requests: Sequence[GenerateRequest], sampling: Sampling) -> list[Rollout]:
            raise error

    results = run_in_virtual_time(check_engine(Raising(World(), version=3)))
    assert len(results) == len(ENGINE_CHECKS)
    assert failed(results)["seeds decide"] == f"{type(error).__name__}: {error}"


def test_a_stale_engine_fails_with_its_own_words() -> None:
    problems = failed(run_in_virtual_time(check_engine(FakeEngine(World()))))
    assert "is stale" in problems["seeds decide"]


@pytest.mark.integration
def test_two_hf_engines_keep_every_promise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the script that docs/extending.md gives to people who write an engine."""
    blocks = re.findall(r"^```python\n(.*?)^```$", EXTENDING.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    (script,) = [text for text in blocks if text.startswith("# engine_conforms.py")]
    (tmp_path / "engine_conforms.py").write_text(script, encoding="utf-8")
    config = write_config(write_project(tmp_path / "project"), rollout={"replicas": 2})
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["engine_conforms.py", str(config)])
    with no_leaks(), pytest.raises(SystemExit) as end:
        runpy.run_path("engine_conforms.py", run_name="__main__")
    printed = capsys.readouterr().out
    assert end.value.code == 0, printed
    assert printed.count("holds") == len(ENGINE_CHECKS)
