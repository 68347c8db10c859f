"""Which device is chosen, and what is said when it is not there."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from offbeat.devices import ACCELERATORS, choose_device, slow_in_bfloat16
from offbeat.errors import ConfigError


def only(monkeypatch: pytest.MonkeyPatch, **counts: int) -> None:
    """Make torch see this many accelerators of each kind."""
    for kind in ACCELERATORS:
        count = counts.get(kind, 0)
        fake = SimpleNamespace(is_available=lambda count=count: count > 0, device_count=lambda count=count: count)
        monkeypatch.setattr(torch, kind, fake, raising=False)


def test_auto_takes_the_cpu_where_there_is_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch)
    assert choose_device("auto") == torch.device("cpu")


def test_auto_prefers_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, cuda=1, xpu=1)
    assert choose_device("auto") == torch.device("cuda")


def test_a_numbered_device_is_taken_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, cuda=2)
    assert choose_device("cuda:1") == torch.device("cuda:1")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("cuda", r"device = 'cuda'.* sees no cuda; usable here: auto, cpu, xpu:0\."),
        ("xpu:3", r"device = 'xpu:3': there are 1 of them.*usable here"),
        ("gpu", r"device = 'gpu' is not a device; usable here"),
    ],
)
def test_a_device_that_is_not_there_is_refused_with_those_that_are(
    name: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    only(monkeypatch, xpu=1)
    with pytest.raises(ConfigError, match=text):
        choose_device(name)


@pytest.mark.parametrize(
    ("flags", "slow"),
    [
        ("flags : fpu avx512f avx512_bf16 amx_tile", False),
        ("flags : fpu avx2 avx512f", True),
        ("Features : fp asimd bf16", False),
        ("", False),
    ],
)
def test_a_cpu_that_has_no_arithmetic_for_bfloat16_is_known_by_its_flags(flags: str, slow: bool) -> None:
    assert slow_in_bfloat16("cpu", flags) is slow
