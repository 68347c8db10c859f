"""Where the members of one group meet: a store that rank 0 serves on a socket which it bound itself.

    rank 0                                engine r
    listen(host), port 0 ── address by RPC ──▶ connect, bounded
    store: name = nonce                    name must be this nonce; rank r must be free
           ended ◀── the first error of any member, in its own words

Each group has a fresh store on a fresh port: a late member of an earlier group finds nobody, or another nonce, and is
turned away. Closing the store frees every member that waits in it.

A store client that waits blocks its other users. While a group is being set up the members of other processes have
their one client busy with that, and hear of a failure through the controller or by the store's end; afterwards the
watcher has it. Rank 0 speaks through the store itself. Clients are few on purpose: at each connection torch looks up
the *name* of the peer's address (for its log), and where the name server does not answer that takes five seconds.
"""

from __future__ import annotations

import socket
import time
from datetime import timedelta

from offbeat.errors import ConfigError, WeightSyncError
from offbeat.network import Endpoint, listen
from offbeat.weights.group import Store, dist

_NAME_KEY = "offbeat/nonce"
_ENDED_KEY = "offbeat/ended"


class Rendezvous:
    """Rank 0's store. Holds its listening socket from the moment when the address is known until `close`."""

    def __init__(self, host: str, nonce: str, members: int, timeout_s: float) -> None:
        try:
            bound, self.endpoint = listen(host)
        except ConfigError as error:
            raise WeightSyncError(f"weights.host: {error}") from error
        limit = timedelta(seconds=timeout_s)
        # The store owns the descriptor from here on and closes it with itself.
        store = dist.TCPStore(
            self.endpoint.host,
            self.endpoint.port,
            members,
            is_master=True,
            timeout=limit,
            wait_for_workers=False,
            master_listen_fd=bound.detach(),
        )
        store.set(_NAME_KEY, nonce)
        self.store: Store | None = store

    def close(self) -> None:
        """Ends the rendezvous: members that wait in it get an error at once."""
        self.store = None


def connect(endpoint: Endpoint, nonce: str, rank: int, timeout_s: float) -> Store:
    """This member's client. WeightSyncError if this is not the group meant, or the rank is taken."""
    deadline = time.monotonic() + timeout_s
    _reach(endpoint, timeout_s)
    limit = timedelta(seconds=max(0.1, deadline - time.monotonic()))
    store = dist.TCPStore(endpoint.host, endpoint.port, None, is_master=False, timeout=limit, wait_for_workers=False)
    # `check` never waits; a `get` on a store that lacks the key would.
    served = store.get(_NAME_KEY).decode() if store.check([_NAME_KEY]) else ""
    if served != nonce:
        raise WeightSyncError(f"{endpoint} serves the group {served!r}, not {nonce!r}: this member came too late.")
    if store.add(f"offbeat/rank/{rank}", 1) != 1:
        raise WeightSyncError(f"rank {rank} of group {nonce!r} is taken: two members were given the same rank.")
    return store


def say_ended(watch: Store, text: str) -> None:
    """Tell every member that this group is over and why. The first text stays."""
    watch.compare_set(_ENDED_KEY, "", text)


def heard_ended(watch: Store) -> str | None:
    """What a member said with `say_ended`; None while the group goes on. Raises when the store is gone."""
    return watch.get(_ENDED_KEY).decode() if watch.check([_ENDED_KEY]) else None


def _reach(endpoint: Endpoint, timeout_s: float) -> None:
    """A plain connection first: it fails at once and in words, where a store client would retry until its time-out."""
    try:
        socket.create_connection((endpoint.host, endpoint.port), timeout=timeout_s).close()
    except OSError as error:
        raise WeightSyncError(
            f"nobody can be reached at {endpoint} ({error}): the trainer has closed this group, or weights.host is an "
            "address that this machine cannot reach."
        ) from error
