"""One rank of a trainer of several: `trainer_mesh_rank.py RANK WORLD STORE MODEL OUT`. Run by test_trainer_mesh."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import distributed

from offbeat.config import LossSection, TrainerSection
from offbeat.trainer.learner import Learner
from offbeat.trainer.loading import load_model
from offbeat.trainer.mesh import Mesh
from offbeat.types import Batch, MiniBatch, Sampling, TrainSample

LENGTHS = (30, 31, 32, 33, 34, 1, 2, 1, 2, 3)


def sample(index: int) -> TrainSample:
    rng = np.random.default_rng(index)
    tokens = LENGTHS[index]
    return TrainSample(
        prompt_token_ids=rng.integers(2, 40, size=3).astype(np.int32),
        token_ids=rng.integers(2, 40, size=tokens).astype(np.int32),
        logprobs=np.full(tokens, -3.0, np.float32),
        advantages=np.full(tokens, (-1.0) ** index, np.float32),
        loss_mask=np.ones(tokens, np.uint8),
    )


def shards(rank: int, world: int) -> Batch:
    """First update: five long sequences for rank 0, five short ones for rank 1. Second: rank 1 has none."""
    whole = [sample(index) for index in range(len(LENGTHS))]
    first = whole if world == 1 else [whole[:5], whole[5:]][rank]
    second = whole[:3] if rank == 0 else []
    updates = (
        MiniBatch(samples=tuple(first), denominator=float(sum(LENGTHS))),
        MiniBatch(samples=tuple(second), denominator=float(sum(LENGTHS[:3]))),
        MiniBatch(samples=(), denominator=0.0),
    )
    return Batch(step=0, minibatches=updates, sampling=Sampling(max_new_tokens=64))


def main(rank: int, world: int, store: str, model: str, out: str) -> None:
    torch.set_num_threads(1)
    mesh = Mesh()
    if world > 1:
        distributed.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=40),
        )
        mesh = Mesh(rank, world)
    loaded = load_model(model, None, init="pretrained", seed=0)
    section = TrainerSection(dtype="float32", lr=1e-2, micro_batch_tokens=40)
    learner = Learner(loaded, section, LossSection(), total_updates=2, mesh=mesh)
    result = learner.update(shards(rank, world))
    tensors = {name: p.detach().contiguous().clone() for name, p in loaded.named_parameters()}
    metrics = {f"metric/{name}": torch.tensor(value) for name, value in result.metrics.items()}
    save_file({**tensors, **metrics}, Path(out))
    if world > 1:
        distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
