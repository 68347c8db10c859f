"""A worker for the RPC tests; what it does is chosen by its settings and by the calls. Run by `Hub.start`."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from offbeat.faults import point
from offbeat.rpc.messages import Arguments, Nothing
from offbeat.rpc.server import Method, Progress, WorkerContext, serve


class Echo(Arguments, frozen=True):
    array: np.ndarray
    text: str = ""
    extra: dict[str, Any] = msgspec.field(default_factory=dict[str, Any])


class EchoResult(msgspec.Struct, frozen=True):
    array: np.ndarray
    text: str
    extra: dict[str, Any]
    thread: str
    writable: bool


class Sleep(Arguments, frozen=True):
    seconds: float
    note: str = ""
    steps: int = 1


class Fail(Arguments, frozen=True):
    how: str


class Text(msgspec.Struct, frozen=True):
    value: str


class Numbers(msgspec.Struct, frozen=True):
    values: tuple[int, ...]


class Grow(Arguments, frozen=True):
    bytes: int


class NeedsTwo(Exception):
    def __init__(self, first: str, second: int) -> None:
        super().__init__(first)
        self.second = second
        self.lock = threading.Lock()


class Base(BaseException):
    pass


class Unprintable(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


SLEEP = [sys.executable, "-S", "-c", "import time; time.sleep(300)"]
DAEMON = """
import os, time
if os.fork() == 0:
    os.setsid()
    if (pid := os.fork()) > 0:
        print(pid, flush=True)
        os._exit(0)
    os.close(1)
    time.sleep(300)
os.wait()
"""


def fail(call: Fail) -> Text:
    match call.how:
        case "two arguments":
            raise NeedsTwo("first words", 2)
        case "dynamic class":
            raise type("Dynamic", (Exception,), {"__module__": "only.here"})("gone on the other side")
        case "huge message":
            raise RuntimeError("x" * 50_000_000)
        case "not utf-8":
            raise RuntimeError("bad \udcff\udcfe text")
        case "base exception":
            raise Base("not an Exception")
        case "unprintable":
            raise Unprintable
        case "nested":
            try:
                raise KeyError("the root cause")
            except KeyError as error:
                raise RuntimeError("the outer one") from error
        case "surrogate result":
            return Text("\udcff")
        case "large result":
            return Text("x" * 40_000_000)
        case "wrong result":
            return object()  # pyright: ignore[reportReturnType] a handler that breaks its contract
        case "sys.exit":
            sys.exit(3)
        case "segfault":
            ctypes.string_at(0)
        case "abort":
            os.abort()
        case _:
            point(call.how)
    return Text("survived")


class Service:
    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.order: list[int] = []

    def echo(self, call: Echo) -> EchoResult:
        thread = threading.current_thread().name
        return EchoResult(call.array, call.text, call.extra, thread, bool(call.array.flags.writeable))

    def sleep(self, call: Sleep) -> Nothing:
        self.order.append(call.steps)
        for step in range(call.steps):
            self.progress.advance(call.note or None, step=step)
            time.sleep(call.seconds / call.steps)
        return Nothing()

    def hold_lock(self, call: Sleep) -> None:
        """Native code that keeps the interpreter lock."""
        ctypes.PyDLL(None).usleep(int(call.seconds * 1e6))

    def history(self, _: Nothing) -> Numbers:
        return Numbers(tuple(self.order))

    def grandchild(self, _: Nothing) -> Numbers:
        child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(300)"])
        return Numbers((child.pid,))

    def strays(self, _: Nothing) -> Numbers:
        """Two processes in sessions of their own; one of them has no parent any more."""
        child = subprocess.Popen(SLEEP, start_new_session=True)
        daemon = subprocess.run([sys.executable, "-S", "-c", DAEMON], stdout=subprocess.PIPE, check=True)
        return Numbers((child.pid, int(daemon.stdout)))

    def chatter(self, call: Grow) -> None:
        """Prints numbered lines, about so many bytes."""
        for index in range(call.bytes // 100):
            print(f"line {index:06d} ".ljust(99, "."), flush=True)

    def who(self, _: Nothing) -> Text:
        return Text(threading.current_thread().name)

    def modules(self, _: Nothing) -> Text:
        return Text(" ".join(sorted(sys.modules)))

    def grow(self, call: Grow) -> EchoResult:
        return EchoResult(np.ones(call.bytes, np.uint8), "", {}, "", False)


def build(context: WorkerContext) -> Mapping[str, Method]:
    settings = context.settings
    print(f"building {context.name}", flush=True)
    for step in range(int(settings.get("build_steps", 0))):
        context.progress.advance(f"loading part {step}", part=step)
        time.sleep(0.1)
    if settings.get("grandchild_file"):
        child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(300)"])
        with open(settings["grandchild_file"], "w") as file:
            file.write(str(child.pid))
    if "build_error" in settings:
        raise FileNotFoundError(settings["build_error"])
    point("build")
    service = Service(context.progress)
    return {
        "echo": Method(Echo, service.echo),
        "sleep": Method(Sleep, service.sleep),
        "hold_lock": Method(Sleep, service.hold_lock),
        "fail": Method(Fail, fail),
        "history": Method(Nothing, service.history, urgent=True),
        "who": Method(Nothing, service.who, urgent=True),
        "urgent_fail": Method(Fail, fail, urgent=True),
        "grandchild": Method(Nothing, service.grandchild),
        "strays": Method(Nothing, service.strays),
        "chatter": Method(Grow, service.chatter),
        "modules": Method(Nothing, service.modules),
        "grow": Method(Grow, service.grow),
        "nothing": Method(Nothing, lambda _: None),
    }


if __name__ == "__main__":
    serve(build)
