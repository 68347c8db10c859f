"""What every `Engine` must do, as checks to run against one: offbeat's own, a fake, or yours.

    results = await check_engine(engine)            # an engine that serves some version
    assert not [r for r in results if r.problem]

The engine is only spoken to through `ports.Engine`. A check that fails has a sentence saying what was seen; nothing is
assumed of the model but its vocabulary, and one token id that is sampled now and then is found by sampling.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec
import numpy as np

from offbeat.errors import OffbeatError
from offbeat.ports import Engine
from offbeat.rpc.messages import PauseCall
from offbeat.types import GenerateRequest, Rollout, Sampling, sample_seed

SAMPLING = Sampling(max_new_tokens=4)
SAMPLES = 3


@dataclass(frozen=True)
class CheckResult:
    name: str
    problem: str | None
    """None: it holds."""


class _Failed(Exception):
    """A promise does not hold; the text says which."""


@contextmanager
def checking(results: list[CheckResult], check: Callable[..., object]) -> Generator[Callable[[str | None], None]]:
    """Adds the result of one check, whose problem is given to what is yielded; the guard of every suite.

    Whatever error comes out of the part under test is a failed check, not the end of the suite.
    """
    problems: list[str | None] = []
    try:
        yield problems.append
    except _Failed as failed:
        problems.append(str(failed))
    except (Exception, SystemExit) as error:
        problems.append(f"{type(error).__name__}: {error}")
    name = check.__name__.replace("_", " ")
    results.append(CheckResult(name, next((problem for problem in problems if problem is not None), None)))


def _hold(condition: bool, text: str) -> None:
    if not condition:
        raise _Failed(text)


def requests(seed: int = 0, *, samples: int = SAMPLES) -> list[GenerateRequest]:
    """Three prompts of unequal length, two of them with equal tokens: identity must come from ids."""
    prompts = {"a": [5, 6, 7], "b": [9], "c": [5, 6, 7]}
    return [
        GenerateRequest(
            prompt_id=name,
            epoch=seed,
            token_ids=np.array(ids, np.int32),
            seeds=tuple(sample_seed(seed, name, index, 0) for index in range(samples)),
        )
        for name, ids in prompts.items()
    ]


def _tokens(rollouts: Sequence[Rollout]) -> list[list[int]]:
    return [rollout.token_ids.tolist() for rollout in rollouts]


async def answers_in_order_by_identity(engine: Engine) -> None:
    """One rollout for each seed of each request, in order, with ids and prompt tokens as sent."""
    asked = requests()
    rollouts = await engine.generate(asked, SAMPLING)
    wanted = [(r.prompt_id, index, r.epoch, r.token_ids.tolist()) for r in asked for index in range(len(r.seeds))]
    got = [(r.prompt_id, r.sample_index, r.epoch, r.prompt_token_ids.tolist()) for r in rollouts]
    _hold(got == wanted, f"asked for {wanted}, got {got}")


async def nothing_asked_gives_nothing(engine: Engine) -> None:
    _hold(await engine.generate([], SAMPLING) == [], "no requests must give no rollouts")


async def tokens_have_logprobs_and_versions(engine: Engine) -> None:
    """As many logprobs and versions as tokens; logprobs finite and not above 0; versions those of `describe`."""
    version = (await engine.describe()).weights_version
    for rollout in await engine.generate(requests(), SAMPLING):
        count = len(rollout.token_ids)
        _hold(count > 0, "a sample has no token")
        _hold(len(rollout.logprobs) == count, f"{count} tokens but {len(rollout.logprobs)} logprobs")
        _hold(bool(np.isfinite(rollout.logprobs).all()), f"logprobs {rollout.logprobs} are not all finite")
        _hold(bool((rollout.logprobs <= 1e-6).all()), f"logprobs {rollout.logprobs} are above 0")
        _hold(rollout.versions == ((version, count),), f"versions {rollout.versions}, expected {version} × {count}")


async def seeds_decide(engine: Engine) -> None:
    """Equal seeds give equal tokens, other seeds others (over 36 tokens)."""
    first, again = [_tokens(await engine.generate(requests(), SAMPLING)) for _ in range(2)]
    _hold(first == again, "the same seeds gave other tokens")
    other = _tokens(await engine.generate(requests(seed=1), SAMPLING))
    _hold(first != other, "other seeds gave the same tokens")
    _hold(first[:SAMPLES] != first[2 * SAMPLES :], "equal prompts with other seeds gave the same tokens")


async def the_most_likely_token_alone_is_certain(engine: Engine) -> None:
    """With top_k = 1 the logprob of each token is 0, or -log k where k tokens are equally likely, and seeds decide
    nothing: the logprobs are those of the distribution that was sampled, and not of another one."""
    certain: dict[tuple[int, ...], list[int]] = {}
    for rollout in await engine.generate(requests(), msgspec.structs.replace(SAMPLING, top_k=1)):
        allowed = [-math.log(tied) for tied in range(1, 5)]
        off = [p for p in rollout.logprobs.tolist() if not any(abs(p - value) < 1e-3 for value in allowed)]
        _hold(not off, f"logprobs {off} of tokens that nothing else could be sampled for: they must be 0")
        if max(abs(rollout.logprobs)) < 1e-3:
            prompt, tokens = tuple(rollout.prompt_token_ids.tolist()), rollout.token_ids.tolist()
            first = certain.setdefault(prompt, tokens)
            _hold(
                first == tokens, f"the most likely tokens after {prompt} were {first}, and with another seed {tokens}"
            )
    _hold(bool(certain), "with top_k = 1 no sample was certain")


async def temperature_sharpens_and_flattens(engine: Engine) -> None:
    """Sampled tokens are almost certain near 0, less likely at 1, and less still at 10."""
    means: list[float] = []
    for temperature in (0.01, 1.0, 10.0):
        rollouts = await engine.generate(requests(), msgspec.structs.replace(SAMPLING, temperature=temperature))
        means.append(float(np.concatenate([rollout.logprobs for rollout in rollouts]).mean()))
    said = f"mean logprobs at temperatures 0.01, 1 and 10 are {', '.join(f'{mean:.3f}' for mean in means)}"
    _hold(means[0] > means[1] > means[2], f"{said}: they must fall")
    _hold(means[0] > -0.5, f"{said}: the first must be almost 0")


async def a_sample_does_not_depend_on_its_neighbours(engine: Engine) -> None:
    """Its random numbers come from its own seed: alone it gives the same tokens as among others."""
    together = _tokens(await engine.generate(requests(), SAMPLING))
    alone = _tokens(await engine.generate(requests()[1:2], SAMPLING))
    _hold(together[SAMPLES : 2 * SAMPLES] == alone, f"among others {together[SAMPLES : 2 * SAMPLES]}, alone {alone}")


async def length_is_bounded(engine: Engine) -> None:
    for limit in (1, 3):
        sampling = msgspec.structs.replace(SAMPLING, max_new_tokens=limit)
        for rollout in await engine.generate(requests(), sampling):
            _hold(len(rollout.token_ids) <= limit, f"{len(rollout.token_ids)} tokens, allowed {limit}")
            full = len(rollout.token_ids) == limit
            _hold(
                rollout.finish_reason == "length" or not full, f"finish reason {rollout.finish_reason!r} at the limit"
            )


async def any_stop_id_ends_a_sample_and_stays_in_it(engine: Engine) -> None:
    """Two stop ids, both among the tokens that these seeds give."""
    free = _tokens(await engine.generate(requests(), SAMPLING))
    stops = (free[0][1], free[-1][2])
    sampling = msgspec.structs.replace(SAMPLING, stop_token_ids=stops)
    for whole, rollout in zip(free, await engine.generate(requests(), sampling), strict=True):
        ends = [position for position, token in enumerate(whole) if token in stops]
        wanted = whole[: ends[0] + 1] if ends else whole
        _hold(rollout.token_ids.tolist() == wanted, f"stops {stops}: got {rollout.token_ids.tolist()}, not {wanted}")
        reason = "stop" if ends else "length"
        _hold(rollout.finish_reason == reason, f"finish reason {rollout.finish_reason!r}, expected {reason!r}")


async def calls_at_the_same_time_are_all_answered(engine: Engine) -> None:
    alone = _tokens(await engine.generate(requests(), SAMPLING))
    both = await asyncio.gather(*(engine.generate(requests(), SAMPLING) for _ in range(3)))
    _hold(all(_tokens(rollouts) == alone for rollouts in both), "a call beside others gave other tokens")


async def a_paused_engine_refuses_and_a_resumed_one_serves(engine: Engine) -> None:
    await engine.pause(PauseCall(mode="wait"))
    try:
        await engine.generate(requests()[:1], SAMPLING)
    except OffbeatError:
        pass
    else:
        raise _Failed("a paused engine answered a request")
    finally:
        await engine.resume()
    _hold(len(await engine.generate(requests()[:1], SAMPLING)) == SAMPLES, "a resumed engine does not serve")


ENGINE_CHECKS: tuple[Callable[[Engine], Awaitable[None]], ...] = (
    answers_in_order_by_identity,
    nothing_asked_gives_nothing,
    tokens_have_logprobs_and_versions,
    seeds_decide,
    the_most_likely_token_alone_is_certain,
    temperature_sharpens_and_flattens,
    a_sample_does_not_depend_on_its_neighbours,
    length_is_bounded,
    any_stop_id_ends_a_sample_and_stays_in_it,
    calls_at_the_same_time_are_all_answered,
    a_paused_engine_refuses_and_a_resumed_one_serves,
)


async def check_engine(engine: Engine, *, timeout_s: float = 60.0) -> list[CheckResult]:
    """Run every check, each with a deadline. An error of the engine is a failed check, not the end."""
    results: list[CheckResult] = []
    for check in ENGINE_CHECKS:
        with checking(results, check) as found:
            try:
                async with asyncio.timeout(timeout_s):
                    await check(engine)
            except TimeoutError:
                found(f"no answer within {timeout_s:g} s")
    return results
