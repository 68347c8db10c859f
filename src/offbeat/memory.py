"""An estimate of what a run needs in memory and on disk, from shapes alone: nothing is loaded or started. No torch.

Trainer: float32 master weights, gradients and two AdamW moments (16 bytes a parameter), the compute copy, the
activations of the largest micro-batch that the data can fill (34·h bytes a token and layer at two bytes a number
without recomputation: Korthikanti et al. 2022, arXiv 2205.05198, eq. 1 without its attention term, which SDPA does not
store), and three copies of its float32 logits. Engine: weights, and the KV cache and logits of the samples that it
computes at once, each of full length: its share of a step or of a held-out set, whichever takes more, and at most
`max_rows` of them. Both: two buckets. It leaves out what libraries and allocators add; expect ±30 %.
"""

from __future__ import annotations

import msgspec

from offbeat.config import Config


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """What the estimate needs to know of a model."""

    parameters: int
    hidden: int
    layers: int
    kv_heads: int
    head_dim: int
    vocab: int


class MemoryEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes."""

    trainer: int
    engine: int


class SetSize(msgspec.Struct, frozen=True, kw_only=True):
    """A held-out set."""

    prompts: int
    longest: int
    """Tokens of its longest prompt."""


class Lengths(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of the longest of each that the data has."""

    prompt: int
    """Of training."""
    warmup: int = 0
    """A prompt and its answer."""
    sets: tuple[SetSize, ...] = ()
    """In the order of `[[eval]]`; none: nothing is evaluated."""


def estimate_memory(config: Config, shape: ModelShape, lengths: Lengths) -> MemoryEstimate:
    compute_bytes = 2 if config.trainer.dtype == "bfloat16" else 4
    engine_bytes = 2 if config.engine_dtype == "bfloat16" else 4
    tokens = micro_batch_tokens(config, lengths)
    layers = 1 if config.trainer.gradient_checkpointing else shape.layers
    activations = tokens * (34 * shape.hidden * layers * compute_bytes // 2 + 2 * shape.hidden * shape.layers)
    logits = tokens * shape.vocab * 4 * 3
    copies = shape.parameters * compute_bytes if compute_bytes == 2 else 0
    buckets = round(2 * config.weights.bucket_mib * 2**20)
    token = shape.layers * 2 * shape.kv_heads * shape.head_dim * engine_bytes
    sampling = max(rows * (length * token + shape.vocab * 4 * 2) for rows, length in engine_batches(config, lengths))
    return MemoryEstimate(
        trainer=shape.parameters * 16 + copies + activations + logits + buckets,
        engine=shape.parameters * engine_bytes + sampling + buckets,
    )


def engine_batches(config: Config, lengths: Lengths) -> list[tuple[int, int]]:
    """(samples that an engine computes at once, tokens of a full one): of a step, then of each held-out set."""

    def rows(prompts: int, samples: int) -> int:
        share = -(-prompts // config.rollout.replicas) * samples  # the samples of a prompt stay together
        return min(config.rollout.max_rows, share)

    new_tokens = config.sampling.max_new_tokens
    batches = [(rows(config.prompts_per_step, config.samples_per_prompt), lengths.prompt + new_tokens)]
    for section, size in zip(config.eval if lengths.sets else (), lengths.sets, strict=True):
        longest = size.longest + (section.max_new_tokens or new_tokens)
        batches.append((rows(size.prompts, section.samples_per_prompt), longest))
    return batches


def micro_batch_tokens(config: Config, lengths: Lengths) -> int:
    """Padded tokens of the largest micro-batch: whole rows up to the budget, at least one, at most the mini-batch."""
    prompts = -(-config.prompts_per_step // config.updates_per_step)
    passes = [(prompts * config.samples_per_prompt, lengths.prompt + config.sampling.max_new_tokens)]
    if config.warmup is not None:
        passes.append((config.warmup.samples_per_step, lengths.warmup))
    budget = config.trainer.micro_batch_tokens
    return max(length * max(1, min(rows, budget // max(1, length))) for rows, length in passes)


def checkpoint_bytes(shape: ModelShape) -> int:
    """On disk: float32 weights and two AdamW moments."""
    return shape.parameters * 12


def read_shape(model: str, revision: str | None) -> ModelShape:
    """Shapes from the model's config alone; the model is never allocated (torch's meta device)."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(model, revision=revision)
    with torch.device("meta"):
        parameters = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    text = config.get_text_config()
    heads = text.num_attention_heads
    return ModelShape(
        parameters=parameters,
        hidden=text.hidden_size,
        layers=text.num_hidden_layers,
        kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        vocab=text.vocab_size,
    )
