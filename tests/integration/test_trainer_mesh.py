"""Two ranks over gloo do what one process does, with unequal numbers of micro-batches and with a rank that is empty."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import trainer_mesh_rank
from safetensors.torch import load_file

from offbeat.testing.tiny_model import tiny_qwen3

pytestmark = pytest.mark.integration


def ranks(world: int, model: Path, folder: Path) -> list[dict[str, torch.Tensor]]:
    outs = [folder / f"rank-{rank}.safetensors" for rank in range(world)]
    processes = [
        subprocess.Popen(
            [
                sys.executable,
                trainer_mesh_rank.__file__,
                str(rank),
                str(world),
                str(folder / "store"),
                str(model),
                str(outs[rank]),
            ]
        )
        for rank in range(world)
    ]
    try:
        codes = [process.wait(90) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert codes == [0] * world
    return [load_file(out) for out in outs]


def test_two_ranks_equal_one_process_B012_B020_B041(tmp_path: Path) -> None:
    model = tiny_qwen3(tmp_path / "model", vocab=40, layers=1)
    first, second = ranks(2, model, tmp_path)
    trainer_mesh_rank.main(0, 1, "", str(model), str(tmp_path / "alone.safetensors"))
    alone = load_file(tmp_path / "alone.safetensors")
    for name, wanted in alone.items():
        assert torch.equal(first[name], second[name]), name
        assert torch.allclose(first[name], wanted, rtol=1e-4, atol=1e-5), name
    assert alone["metric/empty_updates"] == 1
    assert alone["metric/updates"] == 2
