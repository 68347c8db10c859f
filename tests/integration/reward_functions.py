"""Reward functions of every bad (and good) kind, for the tests of the pool. The completion says which sample it is."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import time
from typing import Any


def resident_mib() -> float:
    """Memory that this process holds."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def resident(completion: str, text: str) -> float:
    assert len(text) == 1 << 18
    return resident_mib()


def right(completion: str, answer: str) -> float:
    return float(completion == answer)


def logged(completion: str, marks: str) -> float:
    """Leaves a line for each call, to count them."""
    with open(marks, "a", encoding="utf-8") as file:
        file.write(completion + "\n")
    if completion == "5":
        time.sleep(60)
    return float(completion)


def bad_at_5(completion: str, how: str) -> Any:
    if completion != "5":
        return 1.0
    if how == "loop":
        while True:
            pass
    if how == "sleep":
        time.sleep(60)
    if how == "regex":
        re.match(r"(a+)+$", "a" * 64 + "b")
    if how == "pow":
        return 10**10**10  # holds the interpreter's lock
    if how == "exit":
        sys.exit(3)
    if how == "os_exit":
        os._exit(3)
    if how == "raise":
        raise ValueError("no good")
    if how == "child":
        subprocess.run(["sleep", "61.5"], check=True)
    return {"nan": float("nan"), "text": "1", "none": None}[how]


def always_raises(completion: str) -> float:
    raise ValueError(f"cannot grade {completion}")


async def waits(completion: str, prompt: str) -> float:
    await asyncio.sleep(60 if completion == "5" else 0.2)
    return float(prompt.endswith(completion))


async def blocks(completion: str) -> float:
    await asyncio.sleep(0.01)
    if completion == "5":
        while True:
            pass
    return 1.0


async def stubborn(completion: str) -> float:
    while completion == "5":
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            continue
    return 1.0


def echo(completions: list[str], prompts: list[str], answer: list[str]) -> list[float]:
    assert len(completions) == len(prompts) == len(answer)
    return [float(p == f"prompt {a}") + 0.1 * len(completions) for p, a in zip(prompts, answer, strict=True)]


def one_for_all(completions: list[str]) -> list[float]:
    return [1.0]


def abstains(completion: str) -> float | None:
    return None if int(completion) % 2 else 1.0


def slow(completion: str) -> float:
    time.sleep(0.05)
    print("graded", completion)
    return 1.0


def needs_missing(completion: str, *, nowhere: str) -> float:
    return 0.0


async def stops_the_loop(completion: str) -> float:
    asyncio.get_running_loop().stop()
    await asyncio.sleep(0.01)
    return 1.0


async def cancels_all(completion: str) -> float:
    for task in asyncio.all_tasks():
        task.cancel()
    await asyncio.sleep(0)
    return 1.0


async def cancels_itself(completion: str) -> float:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    return 1.0


async def ends_generators(completion: str) -> float:
    raise StopIteration


class Untold(Exception):
    def __str__(self) -> str:
        raise SystemExit(3)


def untold(completion: str) -> float:
    raise Untold


class Unseen:
    def __repr__(self) -> str:
        raise SystemExit(3)


def unseen(completion: str) -> Unseen:
    return Unseen()


def closes_all(completion: str) -> float:
    os.closerange(0, 256)
    return 1.0
