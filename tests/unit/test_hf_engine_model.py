"""The engine's model before its first weights: right architecture, dtype, mode and buffers, no weight file read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from offbeat.errors import ModelError, RunError
from offbeat.rollout.empty_model import empty_model, require_dtype
from offbeat.testing.tiny_model import tiny_qwen3

CPU = torch.device("cpu")


def test_with_the_weights_of_another_copy_it_computes_the_same(tmp_path: Path) -> None:
    """What no checkpoint holds (rotary frequencies) must come from the constructor."""
    folder = tiny_qwen3(tmp_path / "model")
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    empty = empty_model(str(folder), None, "float32", CPU)
    empty.load_state_dict(loaded.state_dict())
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        assert torch.equal(empty(ids).logits, loaded(ids).logits)


def test_it_needs_no_weight_file_and_is_ready_for_inference(tmp_path: Path) -> None:
    model = empty_model(str(tiny_qwen3(tmp_path / "model", weights=False)), None, "bfloat16", CPU)
    assert not model.training
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_a_loader_that_ignores_the_dtype_is_found_out_B163(tmp_path: Path) -> None:
    model = empty_model(str(tiny_qwen3(tmp_path / "model", weights=False)), None, "float32", CPU)
    with pytest.raises(RunError, match=r"asked for torch.bfloat16, but model.embed_tokens.weight .* torch.float32"):
        require_dtype(model, torch.bfloat16)


def test_a_folder_without_a_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="its configuration cannot be read"):
        empty_model(str(tmp_path), None, "float32", CPU)
