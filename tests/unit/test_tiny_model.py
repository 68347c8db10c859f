"""The tiny models load, differ where they say they differ, and leave the global random state alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from offbeat.testing.tiny_model import BOS, EOS, PAD, TURN_END, tiny_gpt2, tiny_moe, tiny_qwen3

Build = Callable[..., Path]
BUILDS: list[Build] = [tiny_qwen3, tiny_gpt2, tiny_moe]


def names_on_disk(folder: Path) -> set[str]:
    with safe_open(folder / "model.safetensors", "pt") as file:  # pyright: ignore[reportUnknownVariableType]: no stubs
        return set(file.keys())


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("tied", [True, False])
def test_a_built_folder_loads_and_computes_finite_logits(tmp_path: Path, build: Build, tied: bool) -> None:
    folder = build(tmp_path / "model", tied=tied)
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    logits = model(input_ids=torch.tensor([tokenizer("3152=").input_ids])).logits
    assert logits.shape == (1, 5, 78)
    assert torch.isfinite(logits).all()
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == tied
    assert ("lm_head.weight" in names_on_disk(folder)) != tied


@pytest.mark.parametrize("build", BUILDS)
def test_equal_seeds_give_equal_weights_and_other_seeds_others(tmp_path: Path, build: Build) -> None:
    def weights(name: str, seed: int) -> bytes:
        return (build(tmp_path / name, seed=seed) / "model.safetensors").read_bytes()

    assert weights("a", 1) == weights("b", 1)
    assert weights("a", 1) != weights("c", 2)


def test_building_leaves_the_global_random_state_alone(tmp_path: Path) -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    tiny_qwen3(tmp_path / "model", seed=7)
    assert torch.equal(torch.rand(1), expected)


def test_text_survives_the_tokenizer(tmp_path: Path) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(tiny_qwen3(tmp_path / "model", weights=False))
    text = "3152=1235 (a.Z)\n?"
    ids = tokenizer(text).input_ids
    assert len(ids) == len(text)
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == text
    assert (tokenizer.pad_token, tokenizer.eos_token) == (PAD, EOS)
    assert not (tmp_path / "model" / "model.safetensors").exists()


def test_chat_variant_renders_turns_and_stops_at_two_ids(tmp_path: Path) -> None:
    folder = tiny_qwen3(tmp_path / "model", chat=True, weights=False)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": "31="}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\n31=<|im_end|>\n<|im_start|>assistant\n"
    quiet = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, enable_thinking=False)
    assert quiet == text + "()\n"
    assert tokenizer.eos_token == TURN_END
    ends: Any = GenerationConfig.from_pretrained(folder).eos_token_id
    assert set(ends) == set(tokenizer.convert_tokens_to_ids([TURN_END, EOS]))


def test_start_token_is_put_by_both_encoder_and_template(tmp_path: Path) -> None:
    folder = tiny_qwen3(tmp_path / "model", chat=True, bos=True, weights=False)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.convert_ids_to_tokens(tokenizer("3").input_ids) == [BOS, "3"]
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "3"}], tokenize=False)
    assert rendered.startswith(BOS)


def test_padding_can_share_the_id_of_the_end(tmp_path: Path) -> None:
    folder = tiny_qwen3(tmp_path / "model", pad_is_eos=True, weights=False)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    config = json.loads((folder / "config.json").read_text())
    assert config["pad_token_id"] == config["eos_token_id"] == tokenizer.eos_token_id


@pytest.mark.parametrize(("vocab", "entries"), [(64, 64), (128, 78)])
def test_head_rows_may_differ_from_the_tokenizers_size(tmp_path: Path, vocab: int, entries: int) -> None:
    folder = tiny_qwen3(tmp_path / "model", vocab=vocab)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    assert len(tokenizer) == entries
    assert model.get_output_embeddings().weight.shape[0] == vocab


def test_experts_are_split_on_disk(tmp_path: Path) -> None:
    names = names_on_disk(tiny_moe(tmp_path / "model"))
    assert {f"model.layers.0.mlp.experts.{i}.up_proj.weight" for i in range(4)} <= names
