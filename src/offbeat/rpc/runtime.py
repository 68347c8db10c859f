"""The private folder of a run's sockets: short path, mode 0700, removed at exit.

It lies under $XDG_RUNTIME_DIR or the system's temporary folder and never in the run folder, because a socket path has
at most 107 bytes. A file `owner` in it says which process made it; the next start removes the folders whose owner is
gone. A folder of another user, of another process-id namespace (a container that shares the temporary folder), or
without a readable owner is left alone.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from offbeat.errors import ConfigError
from offbeat.rpc.guard import start_ticks

PREFIX = "offbeat-"
SOCKET = "hub"
MAX_SOCKET_PATH_BYTES = 107


class Owner(msgspec.Struct, frozen=True, kw_only=True):
    pid: int
    started: int | None
    """Clock ticks since boot."""
    namespace: str
    """Process ids mean nothing outside their namespace."""


def runtime_roots() -> list[Path]:
    """Where runtime folders may lie, best first."""
    roots = [Path(tempfile.gettempdir())]
    session = os.environ.get("XDG_RUNTIME_DIR", "")
    if session and os.access(session, os.W_OK | os.X_OK) and Path(session).is_dir():
        roots.insert(0, Path(session))
    return list(dict.fromkeys(roots))


def create_runtime_folder() -> Path:
    """A new folder with its owner file.

    Raises:
        ConfigError: every possible place has too long a path for a socket, or none can be written to.
    """
    problems: list[str] = []
    for root in runtime_roots():
        # mkdtemp adds eight characters to the prefix.
        length = len(os.fsencode(root / f"{PREFIX}12345678" / SOCKET))
        if length > MAX_SOCKET_PATH_BYTES:
            problems.append(f"{root}: socket path of {length} bytes, at most {MAX_SOCKET_PATH_BYTES} are possible")
            continue
        try:
            folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=root))
        except OSError as error:
            problems.append(f"{root}: {error.strerror or error}")
            continue
        (folder / "owner").write_bytes(msgspec.json.encode(_self()))
        return folder
    raise ConfigError(
        f"no place for sockets: {'; '.join(problems)}. Set TMPDIR or XDG_RUNTIME_DIR to a short, writable folder."
    )


def clear_stale_folders() -> list[Path]:
    """Removes the folders that dead processes of this user left behind; returns what was removed."""
    stale = [folder for folder, owner in _folders() if not _alive(owner)]
    for folder in stale:
        shutil.rmtree(folder, ignore_errors=True)
    return stale


def own_folders(pid: int | None = None) -> list[Path]:
    """The folders that exist now and were made by this process (or by `pid`)."""
    pid = os.getpid() if pid is None else pid
    return [folder for folder, owner in _folders() if owner.pid == pid]


def _folders() -> Iterator[tuple[Path, Owner]]:
    """Runtime folders of this user and this namespace."""
    here = _namespace()
    for root in runtime_roots():
        for folder in root.glob(f"{PREFIX}*"):
            with suppress(OSError, msgspec.MsgspecError):
                if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                    continue
                owner = msgspec.json.decode((folder / "owner").read_bytes(), type=Owner)
                if owner.namespace == here:
                    yield folder, owner


def _alive(owner: Owner) -> bool:
    started = start_ticks(owner.pid)
    return started is not None and (owner.started is None or owner.started == started)


def _self() -> Owner:
    return Owner(pid=os.getpid(), started=start_ticks(os.getpid()), namespace=_namespace())


def _namespace() -> str:
    """Of process ids, on this boot: both must be equal for a process id to mean the same process."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return ""
