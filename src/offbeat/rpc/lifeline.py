"""What ties a worker to the hub that started it: the invitation on stdin, and the death of either side.

A worker must not outlive its hub. Two things see to it here:
- the death pipe: stdin stays open as long as the hub lives; at its end the worker kills its own group;
- the parent-death signal of Linux, which also ends a worker that is stopped or deep in native code.
The signal may be first, and then nobody here can end the worker's own children: the hub's guard process does that.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
import threading
from typing import NoReturn

import msgspec

from offbeat.errors import ProtocolError
from offbeat.rpc.codec import check_protocol
from offbeat.rpc.guard import end_session, start_ticks
from offbeat.rpc.wire import Invitation

_PR_SET_PDEATHSIG = 1
_MAX_LINE = 64 << 20


def accept_invitation() -> Invitation:
    """Reads the invitation, then hands stdin to a thread that waits for its end. Exits with a text if there is none."""
    if os.isatty(0):
        _refuse("this module is started by offbeat and cannot be run by hand")
    # Ctrl-C is the controller's business: it reaches the workers as a shutdown message.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Only the thread that crashed: the others would push the reason out of sight.
    faulthandler.enable(all_threads=False)
    # A look inside a worker that hangs: kill -USR1 <pid> writes every thread's stack to its log.
    faulthandler.register(signal.SIGUSR1)
    line = _read_line()
    try:
        invitation = msgspec.json.decode(line, type=Invitation)
        check_protocol(invitation.protocol, "the controller")
    except (msgspec.MsgspecError, ProtocolError) as error:
        _refuse(str(error))
    _die_with_parent(invitation)
    # Children of this worker must not read from the pipe, and `input()` in user code must fail, not hang.
    pipe = os.dup(0)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    threading.Thread(target=_wait_for_end, args=(pipe,), name="death pipe", daemon=True).start()
    return invitation


def _read_line() -> bytes:
    line = bytearray()
    while not line.endswith(b"\n"):
        part = os.read(0, 1 << 16)
        if not part or len(line) > _MAX_LINE:
            _refuse("the controller ended before it said what to do")
        line += part
    return bytes(line)


def _die_with_parent(invitation: Invitation) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # The parent may have died before the request took effect. A wrapper script may stand between the two, so another
    # parent alone says nothing.
    if os.getppid() != invitation.parent_pid and start_ticks(invitation.parent_pid) != invitation.parent_started:
        _end_group()


def _wait_for_end(pipe: int) -> None:
    try:
        while os.read(pipe, 4096):
            pass
    except OSError:
        pass
    _end_group()


def _end_group() -> None:
    if os.getpgrp() == os.getsid(0):
        end_session(os.getpgrp())
    os.kill(os.getpid(), signal.SIGKILL)


def _refuse(reason: str) -> NoReturn:
    print(f"offbeat: {reason}", file=sys.stderr, flush=True)
    sys.exit(2)
