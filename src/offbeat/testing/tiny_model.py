"""Tiny random models with their tokenizers, written to a folder as `save_pretrained` would: for tests and examples.

    folder = tiny_qwen3(tmp_path / "model", tied=False, seed=1)
    AutoModelForCausalLM.from_pretrained(folder); AutoTokenizer.from_pretrained(folder)

The tokenizer has one token a character. torch and transformers are imported inside the calls; the global random state
is left as it was.
"""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack

PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"
BOS = "<bos>"
TURN_START, TURN_END = "<|im_start|>", "<|im_end|>"
CHARACTERS = string.digits + "=+-*/.,:?() \n" + string.ascii_letters
"""In order of id, after the special tokens. A small vocabulary drops letters from the end."""

CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and not enable_thinking %}{{- '()\\n' }}{% endif %}"
    "{%- endif %}"
)
"""ChatML. `enable_thinking = false` adds an empty thought, `()`."""


class TinyOptions(TypedDict, total=False):
    """What all tiny models have in common."""

    vocab: int
    """Rows of the output head, 78 by default. Above the tokenizer's size the rest is padding, as in real models."""
    hidden: int
    """32 by default; a multiple of 32 keeps the head size at 32 (Qwen3) or 16 (GPT-2)."""
    layers: int
    """2 by default."""
    max_length: int
    """Positions, 256 by default."""
    tied: bool
    """Output head and token embedding are one tensor; True by default."""
    dtype: Literal["float32", "bfloat16"]
    init_std: float
    """0.2 by default, so that the next-token distributions are far from uniform."""
    seed: int
    """Of the weights."""
    chat: bool
    """A ChatML template. The tokenizer's end token is then `<|im_end|>`; the generation config stops at it *and* at
    `<eos>`, as instruct models do."""
    bos: bool
    """The tokenizer puts `<bos>` before every text that it encodes; a chat template writes it, too."""
    pad_is_eos: bool
    """Padding has the id of `<eos>`, as in many base models."""
    weights: bool
    """False leaves the weights out: a folder for `init = "random"`."""


def tiny_qwen3(folder: Path | str, **options: Unpack[TinyOptions]) -> Path:
    """Qwen3: rotary positions, normalised queries and keys, gated feed-forward."""
    return _write(Path(folder), _qwen3(options), options)


def tiny_moe(folder: Path | str, **options: Unpack[TinyOptions]) -> Path:
    """Qwen3-MoE: 4 experts, 2 a token. transformers fuses them in memory and splits them on disk."""
    hidden = options.get("hidden", 32)
    experts: dict[str, Any] = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 2 * hidden,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "router_aux_loss_coef": 0.0,
    }
    return _write(Path(folder), _qwen3(options) | experts, options)


def tiny_gpt2(folder: Path | str, **options: Unpack[TinyOptions]) -> Path:
    """GPT-2: learned absolute positions, biases, transposed (Conv1D) weights."""
    hidden = options.get("hidden", 32)
    config: dict[str, Any] = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_embd": hidden,
        "n_head": max(1, hidden // 16),
        "n_inner": 2 * hidden,
        "n_layer": options.get("layers", 2),
        "n_positions": options.get("max_length", 256),
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
    }
    return _write(Path(folder), config, options)


def write_tokenizer(folder: Path, options: TinyOptions) -> dict[str, int]:
    """Write `tokenizer.json` and `tokenizer_config.json`; returns the id of each token."""
    chat, bos = options.get("chat", False), options.get("bos", False)
    special = [PAD, EOS, UNK, *([BOS] if bos else []), *([TURN_START, TURN_END] if chat else [])]
    ids = {token: index for index, token in enumerate([*special, *CHARACTERS][: options.get("vocab", 78)])}
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": EOS if options.get("pad_is_eos", False) else PAD,
        "eos_token": TURN_END if chat else EOS,
        "unk_token": UNK,
        "clean_up_tokenization_spaces": False,
        "model_max_length": options.get("max_length", 256),
    }
    if bos:
        settings["bos_token"] = BOS
    if chat:
        settings["chat_template"] = ("{{- bos_token }}" if bos else "") + CHAT_TEMPLATE
    _write_json(folder / "tokenizer.json", _tokenizer(ids, special, bos))
    _write_json(folder / "tokenizer_config.json", settings)
    return ids


def _tokenizer(ids: dict[str, int], special: list[str], bos: bool) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    start = {"SpecialToken": {"id": BOS, "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    template = {
        "type": "TemplateProcessing",
        "single": [start, text],
        "pair": [start, text, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {BOS: {"id": BOS, "ids": [ids.get(BOS)], "tokens": [BOS]}},
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": ids[token], "content": token, **flags} for token in special],
        "normalizer": None,
        # A dot leaves newlines out.
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"Regex": "[\\s\\S]"},
            "behavior": "Isolated",
            "invert": False,
        },
        "post_processor": template if bos else None,
        # Without a decoder the tokens would be joined by spaces.
        "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": ids, "unk_token": UNK},
    }


def _qwen3(options: TinyOptions) -> dict[str, Any]:
    hidden = options.get("hidden", 32)
    heads = max(1, hidden // 32)
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": options.get("layers", 2),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": 32,
        "hidden_act": "silu",
        "max_position_embeddings": options.get("max_length", 256),
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_cache": True,
    }


def _write(folder: Path, architecture: dict[str, Any], options: TinyOptions) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    ids = write_tokenizer(folder, options)
    ends = [ids[TURN_END], ids[EOS]] if options.get("chat", False) else ids[EOS]
    special = {
        "pad_token_id": ids[EOS] if options.get("pad_is_eos", False) else ids[PAD],
        "bos_token_id": ids.get(BOS),
        "eos_token_id": ends,
    }
    config = architecture | {
        "vocab_size": options.get("vocab", 78),
        "initializer_range": options.get("init_std", 0.2),
        "tie_word_embeddings": options.get("tied", True),
        "dtype": options.get("dtype", "float32"),
        **special,
    }
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", special)
    if options.get("weights", True):
        _write_weights(folder, options)
    return folder


def _write_weights(folder: Path, options: TinyOptions) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(options.get("seed", 0))
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    model.to(getattr(torch, options.get("dtype", "float32"))).save_pretrained(folder)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
