"""One thread that does the blocking work of one process group, so that nobody else ever blocks in it.

    main thread ── submit(work) ──▶ lane: rendezvous, broadcast, broadcast, … , last(work)
                ◀── wait: result | deadline | end(reason) from any thread

A collective that waits for a peer cannot be called off (gloo's abort does not free a blocked receive). The thread that
needs its result can be: it waits here, and `end` or the deadline frees it at once. What is then still in flight keeps
its own references to buffers and group, and ends by its own time-out or when the peer's connection closes.
"""

from __future__ import annotations

import atexit
import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class LaneEnded(Exception):
    """The lane was ended from another thread; the text says why."""


class LaneFailed(Exception):
    """The work raised; only the text is kept, since a traceback would keep sockets and buffers alive."""


class Job(Generic[T]):
    """One piece of work handed to a lane. `done`, and then `value` or `error`, are guarded by the lane's lock."""

    def __init__(self, work: Callable[[], T], *, always: bool = False) -> None:
        self.always = always
        self.work: Callable[[], T] | None = work
        self.done = False
        self.value: T | None = None
        self.error = ""


class Lane:
    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Job[Any] | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._reason: str | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        _lanes.add(self)

    def submit(self, work: Callable[[], T]) -> Job[T]:
        """Work is done in the order of submission, by one thread."""
        job = Job(work)
        self._jobs.put(job)
        return job

    def wait(self, job: Job[T], timeout_s: float) -> T:
        """The job's result. Raises LaneFailed with its error's text, LaneEnded, or TimeoutError."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while not job.done:
                if self._reason is not None:
                    raise LaneEnded(self._reason)
                if (left := deadline - time.monotonic()) <= 0:
                    raise TimeoutError
                self._changed.wait(left)
            if job.error:
                raise LaneFailed(job.error)
            return job.value  # pyright: ignore[reportReturnType]  # done without error: the value is there

    def end(self, reason: str) -> None:
        """Free everybody who waits, now; work not yet begun is dropped. Thread-safe; the first reason stays."""
        with self._changed:
            if self._reason is None:
                self._reason = reason
            self._changed.notify_all()

    @property
    def ended(self) -> str | None:
        with self._changed:
            return self._reason

    def close(self, last: Callable[[], None], timeout_s: float) -> bool:
        """Do `last` after what is in flight, then end the thread. True when that was over within `timeout_s`."""
        self._jobs.put(Job(last, always=True))
        self._jobs.put(None)
        self.end("closed")
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def join_at_exit(self, timeout_s: float) -> None:
        """The process ends: let the lane finish what it is at, or give up on it."""
        self._jobs.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            if self.ended is None or job.always:
                self._do(job)
            del job  # or the buffers it holds would live until the next one comes

    def _do(self, job: Job[Any]) -> None:
        value, error = None, ""
        assert job.work is not None
        try:
            value = job.work()
        except Exception as failure:  # the job's own, told where it was asked for
            error = f"{type(failure).__name__}: {failure}"
        with self._changed:
            job.work, job.value, job.error, job.done = None, value, error, True
            self._changed.notify_all()


_lanes: weakref.WeakSet[Lane] = weakref.WeakSet()
_EXIT_S = 2.0


@atexit.register
def _join_all() -> None:
    """A thread that is inside torch when the interpreter goes away aborts the process."""
    deadline = time.monotonic() + _EXIT_S
    for lane in list(_lanes):
        lane.join_at_exit(max(0.0, deadline - time.monotonic()))
