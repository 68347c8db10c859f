"""A safetensors file written one tensor at a time: a save needs host memory for the largest tensor, not for all.

Layout (github.com/huggingface/safetensors, "Format"): length of the header (8 bytes, little-endian), the header as
JSON padded with spaces, then the tensors' bytes without a gap. Any safetensors reader can read it.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

_NAMES = {torch.float32: "F32", torch.uint8: "U8"}


def write_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """float32 and uint8, on any device. Raises `OSError`."""
    header: dict[str, object] = {}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            file.write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
