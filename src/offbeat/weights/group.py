"""The process group of a transfer: built beside any default group, from a backend's name. The only file that touches
process-group constructors.

    "gloo", "nccl", "xccl"   torch's own classes, `torch.distributed.ProcessGroup<Name>`
    anything else            whatever was registered with `torch.distributed.Backend.register_backend` (hccl does it on
                             `import torch_npu`; a plug-in of yours does it at import)

Nothing global is touched: no default group, no shared store, no environment variable. Everything here may block and
runs in a lane. Sockets of gloo are bound to the address that the caller gives, never to what the host's name resolves
to.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, TypeAlias

import torch
import torch.distributed
from torch import Tensor

from offbeat.errors import WeightSyncError

dist: Any = torch.distributed
"""Stores and group classes are public in torch.distributed, but its type information does not export them."""
Store: TypeAlias = Any
"""A `torch.distributed.Store`."""

_DEVICES = {"gloo": "cpu", "nccl": "cuda", "xccl": "xpu"}


class Group:
    """A process group of `members`; rank 0 sends. Blocking. `close` before the last reference goes."""

    def __init__(
        self, backend: str, store: Store, *, name: str, rank: int, members: int, address: str, timeout_s: float
    ) -> None:
        """Waits for every member. `name` keys this group in the store; `address` is this machine's own, numeric."""
        require_backend(backend)
        own = dist.PrefixStore(name, store)
        limit = timedelta(seconds=timeout_s)
        match backend:
            case "gloo":
                self.device = torch.device("cpu")
                self._group: Any = dist.ProcessGroupGloo(own, rank, members, _gloo_options(address, limit))
            case "nccl" | "xccl":
                self.device = torch.device(_DEVICES[backend])
                cls: Any = getattr(dist, f"ProcessGroup{backend.upper()}")
                options = cls.Options()
                options._timeout = limit  # the only way to set it before the group exists
                self._group = cls(own, rank, members, options)
            case _:
                self._group, self.device = _from_registry(backend, own, rank, members, limit)

    def broadcast(self, buffer: Tensor, timeout_s: float) -> None:
        """Rank 0's bytes reach every member's `buffer` (uint8, on `device`). Returns when they have landed here."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.timeout = timedelta(seconds=timeout_s)
        self._group.broadcast([buffer], options).wait()
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def close(self) -> None:
        """Closes every connection: a peer that waits on one is freed."""
        group, self._group = self._group, None
        if group is not None and hasattr(group, "abort") and self.device.type != "cpu":
            group.abort()  # gloo closes with its last reference; device collectives are to be called off first
        del group


def available_backends() -> tuple[str, ...]:
    """Names that `Group` can build here."""
    own = [name for name in _DEVICES if hasattr(dist, f"ProcessGroup{_class_suffix(name)}")]
    return (*own, *sorted(name for name in _registry() if name not in _DEVICES))


def require_backend(backend: str) -> None:
    """WeightSyncError unless this torch can build such a group; the message names those that it can."""
    if not dist.is_available():
        raise WeightSyncError("this torch was built without torch.distributed; install a build that has it.")
    if backend not in available_backends():
        raise WeightSyncError(
            f"weights.backend = {backend!r}: this process's torch {torch.__version__} has no such collective backend. "
            f"Available here: {', '.join(available_backends())}. A plug-in registers itself when it is imported."
        )


def collective_version(backend: str) -> str:
    """What must agree between members, e.g. `nccl 2.27.3`; for gloo the torch release that bundles it."""
    require_backend(backend)
    if backend == "nccl":
        from torch.cuda.nccl import version as nccl_version

        version = nccl_version()
        return "nccl " + ".".join(str(part) for part in version)
    return f"torch {torch.__version__} {backend}"


def _class_suffix(backend: str) -> str:
    return "Gloo" if backend == "gloo" else backend.upper()


def _gloo_options(address: str, limit: timedelta) -> Any:
    cls: Any = dist.ProcessGroupGloo
    options = cls._Options()  # torch exports gloo's options under this name only (`Options` is the base class's)
    # Without a device of its own gloo binds to the address of the host's *name*, which may be loopback.
    options._devices = [cls.create_device(hostname=address)]
    options._timeout = limit
    return options


def _registry() -> dict[str, Any]:
    """Backends registered with torch by plug-ins. torch has no public way to read what `register_backend` stored."""
    plugins: dict[str, Any] = getattr(dist.Backend, "_plugins", {})
    return {name.lower(): plugin for name, plugin in plugins.items()}


def _from_registry(backend: str, store: Store, rank: int, members: int, limit: timedelta) -> tuple[Any, torch.device]:
    plugin = _registry()[backend]
    if getattr(plugin, "extended_api", False):
        raise WeightSyncError(
            f"weights.backend = {backend!r}: it was registered with extended_api=True, which needs torch's default "
            "group; register it without, or use gloo."
        )
    group = plugin.creator_fn(store, rank, members, limit)
    capability: dict[str, list[str]] = getattr(dist.Backend, "backend_capability", {})
    devices = capability.get(backend, ["cpu"])
    return group, torch.device("cpu" if "cpu" in devices else devices[0])
