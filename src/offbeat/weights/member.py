"""One end's part in one group, from the rendezvous to its end. Both the sender and the receivers are members.

    main thread     connect → form → (watching: broadcast, wait, …) → kept for the next transfer, or fail / close
    lane            everything that blocks in torch
    watcher         while a transfer runs: reads what other members say, and ends the lane when one of them failed

Every wait ends by its result, by the deadline, by a peer's error or by `cancel` from any thread, whichever is first.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, TypeVar

from offbeat.errors import OffbeatError, WeightSyncError
from offbeat.network import Endpoint, source_address
from offbeat.weights.group import Group, Store
from offbeat.weights.lane import Job, Lane, LaneEnded, LaneFailed
from offbeat.weights.rendezvous import Rendezvous, connect, heard_ended, say_ended
from offbeat.weights.session import PEER_ENDED

if TYPE_CHECKING:
    import torch
    from torch import Tensor

T = TypeVar("T")

_WATCH_S = 0.02
_HEAR_S = 0.5
_CLOSE_S = 2.0


class Deadline:
    """The one outer deadline of a call, from which every inner time-out is taken."""

    def __init__(self, timeout_s: float, stall_s: float) -> None:
        self._timeout_s = timeout_s
        self._stall_s = stall_s
        self._end = time.monotonic() + timeout_s

    def left(self, phase: str) -> float:
        """Seconds for one operation: what is left, at most the stall limit. WeightSyncError when nothing is left."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise WeightSyncError(f"{phase}: the sync's {self._timeout_s:.1f} s are over (weights.timeout_s).")
        return min(left, self._stall_s)


class Member:
    """Not formed until `form`; unusable after the first error. `cancel` alone may be called from another thread."""

    def __init__(self, endpoint: Endpoint, *, nonce: str, rank: int, members: int, backend: str) -> None:
        self.nonce, self.rank, self.members, self.backend = nonce, rank, members, backend
        self.endpoint = endpoint
        self.server: Rendezvous | None = None
        """Rank 0 only."""
        self._group: Group | None = None
        self._client: Store | None = None
        self._lane = Lane(f"weights {nonce}")
        self._heard = threading.Event()
        self._peer = ""
        self._closed = False

    @property
    def usable(self) -> bool:
        return self._lane.ended is None

    @property
    def device(self) -> torch.device:
        assert self._group is not None, "form comes first"
        return self._group.device

    def connect(self, deadline: Deadline) -> None:
        """Reach rank 0's store and take this member's rank there."""
        if self._client is None:
            left = deadline.left("rendezvous")
            work = lambda: connect(self.endpoint, self.nonce, self.rank, left)  # noqa: E731  # names what runs in the lane
            self._client = self._wait(self._lane.submit(work), left, f"rendezvous at {self.endpoint}")

    def form(self, deadline: Deadline) -> None:
        """Build the group with all other members, unless it stands already."""
        if self._group is not None:
            return
        store, left = self._client, deadline.left("group set-up")
        if store is None:
            raise WeightSyncError(f"group set-up: {PEER_ENDED}: {self._lane.ended or 'not connected'}")

        def build() -> Group:
            from datetime import timedelta

            store.set_timeout(timedelta(seconds=left))
            return Group(
                self.backend, store, name=self.nonce, rank=self.rank, members=self.members,
                address=self.endpoint.host if self.rank == 0 else source_address(self.endpoint), timeout_s=left,
            )  # fmt: skip

        self._group = self._wait(self._lane.submit(build), left, f"set-up of the group of {self.members} members")

    def broadcast(self, buffer: Tensor, deadline: Deadline, phase: str) -> Job[None]:
        """Hand one bucket to the lane. The buffer is not to be touched until `finish` has returned."""
        group = self._group
        if group is None:
            raise WeightSyncError(f"{phase}: {PEER_ENDED}: {self._lane.ended or 'the group is not formed'}")
        left = deadline.left(phase)
        return self._lane.submit(lambda: group.broadcast(buffer, left))

    def finish(self, job: Job[None], deadline: Deadline, phase: str) -> None:
        self._wait(job, deadline.left(phase), phase)

    @contextmanager
    def watching(self) -> Generator[None]:
        """While the block runs, another member's failure ends every wait in it."""
        client = self._speaker()
        if client is None:
            raise WeightSyncError(f"rendezvous: {PEER_ENDED}: {self._lane.ended or 'not connected'}")
        stop = threading.Event()
        watcher = threading.Thread(target=self._watch, args=(client, stop), name=f"watch {self.nonce}", daemon=True)
        del client
        watcher.start()
        try:
            yield
        finally:
            stop.set()
            watcher.join(_CLOSE_S)

    def fail(self, text: str) -> None:
        """Tell the others, in this member's own words, then let go of every connection."""
        client = self._speaker()
        if client is not None and not self._peer and not self._closed:
            # In a thread of its own: a stopped rank 0 does not answer, and this member must not wait for it.
            said = threading.Thread(target=_say, args=(client, text), name=f"say {self.nonce}", daemon=True)
            said.start()
            said.join(_HEAR_S)
        self.cancel(text)
        self.close(wait_s=0.0, keep_server=True)

    def cancel(self, reason: str) -> None:
        """Free the thread that waits here, now. Thread-safe and quick; `close` is still to be called."""
        self._lane.end(reason)

    def close(self, *, wait_s: float = _CLOSE_S, keep_server: bool = False) -> bool:
        """Let go of group and store. True when nothing is left in flight. Called again it does the rest only."""
        clean = True
        if not self._closed:
            self._closed = True
            group, self._group, self._client = self._group, None, None
            clean = self._lane.close(group.close if group is not None else _nothing, wait_s)
            del group
        if self.server is not None and not keep_server:
            self.server.close()
            self.server = None
        return clean

    def _speaker(self) -> Store | None:
        """What this member says and hears failures through."""
        return self.server.store if self.server is not None else self._client

    def _wait(self, job: Job[T], timeout_s: float, phase: str) -> T:
        try:
            return self._lane.wait(job, timeout_s)
        except LaneEnded as ended:
            if self._peer:
                raise WeightSyncError(f"{phase}: {self._peer}") from None
            raise WeightSyncError(f"{phase}: {PEER_ENDED}: {ended}") from None
        except TimeoutError:
            text = f"{phase}: {_stalled(timeout_s)}"
        except LaneFailed as failure:
            text = f"{phase}: {_plain(str(failure))}"
            if "imed out" in text or "imeout" in text:
                text = f"{phase}: {_stalled(timeout_s)}"
            elif "losed by peer" in text or "reset by peer" in text.lower() or "roken pipe" in text:
                # Someone let go of the group: wait a moment for what it has to say.
                self._heard.wait(_HEAR_S)
                text = f"{phase}: {self._peer}" if self._peer else f"{phase}: {PEER_ENDED}: {_plain(str(failure))}"
        raise WeightSyncError(text)

    def _watch(self, client: Store, stop: threading.Event) -> None:
        while not stop.wait(_WATCH_S):
            try:
                text = heard_ended(client)
            except Exception:
                # The store went with rank 0; its text, if any, came through the controller.
                text = f"the rendezvous at {self.endpoint} is gone: the trainer ended or closed the group"
            if text is not None:
                self._peer = f"{PEER_ENDED}: {text}"
                self._heard.set()
                self._lane.end(text)
                return


def _say(client: Store, text: str) -> None:
    with suppress(Exception):  # the store may be gone: then the others know already
        say_ended(client, text)


def _stalled(timeout_s: float) -> str:
    return f"stalled, nothing moved for {timeout_s:.1f} s (weights.stall_s, or all that was left of weights.timeout_s)"


def _plain(text: str) -> str:
    """A torch error's first line without its source location: what a person can read."""
    line = text.splitlines()[0] if text else "no reason given"
    kind, _, message = line.partition(": ")
    message = message.rpartition("] ")[2] if message.startswith("[/") and "[" not in message[1:] else message
    if message.startswith("[/"):
        message = message.partition("] ")[2]
    return message or kind


def _nothing() -> None:
    return None


def run_guarded(member: Member, name: str, work: Callable[[], T], on_failure: Callable[[str], None]) -> T:
    """Run this end's part of a transfer; any failure is told to the other members and to `on_failure`, then raised."""
    try:
        with member.watching():
            return work()
    except BaseException as error:
        text = str(error) if isinstance(error, OffbeatError) else f"{type(error).__name__}: {error}"
        on_failure(text)
        member.fail(f"{name}: {text}")
        if isinstance(error, Exception) and not isinstance(error, OffbeatError):
            raise WeightSyncError(text) from error
        raise
