"""What signs of life from each layer cost: passes of one model with and without them, in turns.

    python benchmarks/layer_progress.py

Prints, for a tiny and a small model, the median time of a forward pass (as an engine decodes one token of 8 samples)
and of a forward and backward pass, with the signs as a multiple of those without.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from offbeat.layer_progress import tell_of_layers

SHAPES = {
    "0.4 million parameters, 4 layers": {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 4},
    "20 million parameters, 12 layers": {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 12},
}
TURNS = 200


def model(shape: dict[str, int], *, told: bool) -> LlamaForCausalLM:
    torch.manual_seed(0)
    made = LlamaForCausalLM(LlamaConfig(vocab_size=512, num_attention_heads=6, num_key_value_heads=2, **shape))
    if told:
        tell_of_layers(made, lambda: None)
    return made


def decode(network: LlamaForCausalLM) -> None:
    with torch.no_grad():
        network(torch.zeros((8, 1), dtype=torch.long))


def update(network: LlamaForCausalLM) -> None:
    network(torch.zeros((4, 32), dtype=torch.long)).logits.sum().backward()
    network.zero_grad()


def ratio(work: Callable[[LlamaForCausalLM], None], shape: dict[str, int]) -> tuple[float, float]:
    """(median seconds without signs, median over turns of the time with signs divided by that without)."""
    networks = model(shape, told=False), model(shape, told=True)
    plain, ratios = list[float](), list[float]()
    for turn in range(TURNS + 10):
        seconds = [0.0, 0.0]
        for which in (0, 1) if turn % 2 else (1, 0):
            started = time.perf_counter()
            work(networks[which])
            seconds[which] = time.perf_counter() - started
        if turn >= 10:
            plain.append(seconds[0])
            ratios.append(seconds[1] / seconds[0])
    return statistics.median(plain), statistics.median(ratios)


def main() -> None:
    torch.set_num_threads(1)
    for name, shape in SHAPES.items():
        for work in (decode, update):
            seconds, times = ratio(work, shape)
            print(f"{name}: {work.__name__} {1000 * seconds:.1f} ms without, × {times:.3f} with signs of life")


if __name__ == "__main__":
    main()
