"""The states of a weight transfer, as pure values and one small thread-safe machine. No torch, no sockets.

An engine:

            begin            loaded             commit
    STALE ────────▶ RECEIVING ──────▶ PROBING ─────────▶ SERVING
      ▲               │ ▲               │                  │ │
      └──── fail ─────┘ └───────────────│───── begin ──────┘ │
      └──── fail ───────────────────────┘──── fail ──────────┘

Only SERVING answers requests, only PROBING answers the parity probe. `version` rises at `commit` and nowhere else.
After any failure the engine is STALE, whatever it held before: part of its memory may be of another version.

The controller goes through typed stages, each made from the one before it, so that a step cannot be left out or taken
out of order: Offered → Prepared → Moved → Verified → Probed → committed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, TypeAlias

from offbeat.errors import WeightSyncError
from offbeat.rpc.messages import Manifest, WeightsMoved, WeightsOffered

PEER_ENDED = "ended by another member"
"""Part of every error that only reports what another member suffered: the first cause is the one without it."""

StateName: TypeAlias = Literal["stale", "receiving", "probing", "serving"]


class EngineState:
    """What an engine may do now. Thread-safe: the main thread works, urgent calls may fail it from another thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._name: StateName = "stale"
        self._version = -1
        self._pending: int | None = None
        self._reason = "no weights were received yet"
        self._running = 0

    @property
    def version(self) -> int:
        """The last committed version; -1 before the first."""
        with self._changed:
            return self._version

    @property
    def name(self) -> StateName:
        with self._changed:
            return self._name

    @property
    def reason(self) -> str:
        """Why the engine is stale; empty when it is not."""
        with self._changed:
            return self._reason if self._name == "stale" else ""

    def admit(self, *, probe: bool) -> int:
        """The version to stamp on the tokens of a request. WeightSyncError unless such a request is allowed now."""
        with self._changed:
            return self._admit(probe)

    @contextmanager
    def request(self, *, probe: bool) -> Generator[int]:
        """`admit`, and counted as running until the block ends: `begin` waits for it."""
        with self._changed:
            version = self._admit(probe)
            self._running += 1
        try:
            yield version
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    def begin(self, version: int, *, drain_s: float) -> None:
        """Close admission and wait at most `drain_s` seconds for running requests; then weights may be written."""
        deadline = time.monotonic() + drain_s
        with self._changed:
            if self._name in ("receiving", "probing"):
                raise self._refuse(f"weights version {version} cannot be received: a transfer is under way")
            if version < self._version:
                raise self._refuse(f"weights version {version} is older than version {self._version}, served before")
            self._name, self._pending = "receiving", version
            while self._running and self._name == "receiving" and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)
            if self._name != "receiving":  # failed from another thread meanwhile
                raise self._refuse(f"weights version {version} cannot be received")
            if self._running:
                text = f"{self._running} requests were still running after {drain_s:.1f} s, so no weights were written"
                self._fail(text)
                raise WeightSyncError(f"{text}; abort them, or raise weights.stall_s.")

    def loaded(self, version: int) -> None:
        """Every tensor is in place and caches are reset: only the parity probe is answered."""
        with self._changed:
            self._expect("receiving", version, "finish the load of")
            self._name = "probing"

    def commit(self, version: int) -> None:
        """This version is served from now on."""
        with self._changed:
            self._expect("probing", version, "commit")
            self._name, self._version, self._pending, self._reason = "serving", version, None, ""

    def fail(self, reason: str) -> None:
        """Nothing is served until a full transfer has succeeded. The first reason stays."""
        with self._changed:
            self._fail(reason)

    def _admit(self, probe: bool) -> int:
        if probe and self._name == "probing" and self._pending is not None:
            return self._pending
        if not probe and self._name == "serving":
            return self._version
        kind = "the parity probe is answered between load and commit only" if probe else "requests are not served"
        raise self._refuse(f"{kind} (version {self._version})")

    def _expect(self, name: StateName, version: int, action: str) -> None:
        if self._name != name or self._pending != version:
            waiting = "" if self._pending is None else f", version {self._pending} under way"
            raise self._refuse(f"cannot {action} version {version}: that needs state {name!r}{waiting}")

    def _fail(self, reason: str) -> None:
        if self._name != "stale":
            self._name, self._pending, self._reason = "stale", None, reason
        self._changed.notify_all()

    def _refuse(self, what: str) -> WeightSyncError:
        because = f" because {self._reason}" if self._name == "stale" else ""
        return WeightSyncError(f"{what}: the engine is {self._name!r}{because}.")


# --- stages of the controller's transaction ------------------------------------------------------------------------


@dataclass(frozen=True)
class Offered:
    """The trainer holds a listener and said what it will send."""

    version: int
    nonce: str
    offer: WeightsOffered


@dataclass(frozen=True)
class Prepared:
    """Every engine found that the manifest is what its model needs."""

    offered: Offered


@dataclass(frozen=True)
class Moved:
    """Every byte was sent, received and loaded; engines are PROBING."""

    offered: Offered
    sent: WeightsMoved
    held: tuple[tuple[str, WeightsMoved], ...]
    """(engine, what it holds)."""


@dataclass(frozen=True)
class Verified:
    """The digests of every engine's memory equal those of what was sent."""

    moved: Moved


@dataclass(frozen=True)
class Probed:
    """Engines compute what the trainer computes, or no probe was due."""

    verified: Verified
    gap_mean: float | None
    gap_max: float | None


def first_difference(manifest: Manifest, sent: Sequence[str], held: Sequence[str]) -> str | None:
    """Name of the first tensor whose digests differ, or what else is wrong; None when all agree."""
    for side, digests in (("sender", sent), ("engine", held)):
        if len(digests) != len(manifest.entries):
            return f"the {side} has {len(digests)} digests for {len(manifest.entries)} tensors"
    for entry, ours, theirs in zip(manifest.entries, sent, held, strict=True):
        if ours != theirs:
            return f"{entry.name} {list(entry.shape)} {entry.dtype}: sent {ours}, in the engine's memory {theirs}"
    return None
