"""Which device a process computes on: the one place that knows accelerators by name."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from offbeat.errors import ConfigError

if TYPE_CHECKING:
    from torch import device as Device

ACCELERATORS = ("cuda", "npu", "xpu")
"""What `auto` looks for, in this order; `npu` appears in torch once torch_npu is installed."""


def choose_device(name: str) -> Device:
    """`auto`, `cpu`, `cuda`, `cuda:1`, `npu:0`, … → a device that exists here.

    `auto` is the first accelerator that is there, else the CPU. Raises `ConfigError` that says what there is instead.
    """
    import torch

    if name == "auto":
        found = next((kind for kind in ACCELERATORS if _count(kind)), "cpu")
        return torch.device(found)
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device = {name!r} is not a device; {_available()}") from error
    if device.type == "cpu":
        return torch.device("cpu")
    count = _count(device.type)
    if not count:
        raise ConfigError(f"device = {name!r}: this torch ({torch.__version__}) sees no {device.type}; {_available()}")
    if ":" in name and device.index >= count:
        raise ConfigError(f"device = {name!r}: there are {count} of them, numbered from 0; {_available()}")
    return device


def slow_in_bfloat16(name: str, cpu_flags: str | None = None) -> bool:
    """Whether the device is a CPU that computes bfloat16 by way of float32. Raises `ConfigError` as `choose_device`.

    `cpu_flags`: default: those of /proc/cpuinfo; where there are none, False.
    """
    if choose_device(name).type != "cpu":
        return False
    if cpu_flags is None:
        try:
            cpu_flags = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return False
    words = set(cpu_flags.split())
    return bool(words) and not words & {"amx_bf16", "avx512_bf16", "bf16"}


def _count(kind: str) -> int:
    """How many devices of this kind can be used; 0 too when torch does not know the kind."""
    import torch

    module: Any = getattr(torch, kind, None)
    if module is None or not callable(getattr(module, "is_available", None)) or not module.is_available():
        return 0
    return int(module.device_count())


def _available() -> str:
    usable = ["auto", "cpu"]
    for kind in ACCELERATORS:
        usable.extend(f"{kind}:{index}" for index in range(_count(kind)))
    return f"usable here: {', '.join(usable)}."
