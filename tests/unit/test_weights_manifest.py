"""Names, shapes and tying of the checkpoint on disk, read from live models."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers import AutoModelForCausalLM

from offbeat.errors import WeightSyncError
from offbeat.rollout.weight_sink import ModelWeightSink
from offbeat.rpc.messages import Manifest, TensorEntry
from offbeat.testing.tiny_model import tiny_moe, tiny_qwen3
from offbeat.trainer.weight_source import ModelWeightSource
from offbeat.weights.manifest import build_manifest, diff, manifest_hash


def on_disk(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118  # not a mapping
    return found


@pytest.mark.parametrize("make", [tiny_qwen3, tiny_moe])
@pytest.mark.parametrize("tied", [True, False])
def test_the_manifest_is_what_save_pretrained_writes_B003(tmp_path: Path, make: Any, tied: bool) -> None:
    model = AutoModelForCausalLM.from_pretrained(make(tmp_path / "model", tied=tied))
    source = ModelWeightSource(model)
    model.save_pretrained(tmp_path / "saved")
    wanted = on_disk(tmp_path / "saved")
    manifest = source.manifest(None)
    assert {entry.name: entry.shape for entry in manifest.entries} == {n: tuple(t.shape) for n, t in wanted.items()}
    assert [entry.name for entry in manifest.entries] == [name for name, _ in source.tensors()]
    for name, tensor in source.tensors():
        assert torch.equal(tensor, wanted[name]), name
    assert manifest.tied == ((("lm_head.weight", "model.embed_tokens.weight"),) if tied else ())


def test_a_mixture_of_experts_is_loaded_through_views_of_its_fused_memory_twice_B003(tmp_path: Path) -> None:
    folder = tiny_moe(tmp_path / "model")
    trainer = AutoModelForCausalLM.from_pretrained(folder)
    engine = AutoModelForCausalLM.from_pretrained(folder)
    source, sink = ModelWeightSource(trainer), ModelWeightSink(engine, "float32")
    ids = torch.tensor([[3, 4, 5]])
    for _ in range(2):
        with torch.no_grad():
            for parameter in trainer.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
            for name, parameter in list(engine.named_parameters()):  # a post-load step that makes parameters anew
                if "experts" in name:
                    owner, _, leaf = name.rpartition(".")
                    setattr(engine.get_submodule(owner), leaf, nn.Parameter(parameter.clone()))
        manifest = source.manifest("float32")
        sink.check(manifest)
        sink.load(source.tensors())
        held = sink.finish(manifest)
        assert all(torch.equal(held[name], tensor) for name, tensor in source.tensors())
        with torch.no_grad():
            assert torch.equal(trainer(ids).logits, engine(ids).logits)


class Block(nn.Module):
    """Has a layer that is really called `module`, as a wrapper's would be."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(3, 3)
        self.inner = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))


def data_parallel(module: nn.Module) -> nn.Module:
    return nn.DataParallel(module)


def compiled(module: nn.Module) -> nn.Module:
    wrapped: Any = torch.compile(module)
    return wrapped


WRAPPERS: list[Callable[[nn.Module], nn.Module]] = [data_parallel, compiled, checkpoint_wrapper]


@pytest.mark.parametrize("order", [order for count in (1, 2, 3) for order in itertools.permutations(range(3), count)])
def test_wrappers_nested_in_any_order_at_any_level_leave_names_alone_B004(order: tuple[int, ...]) -> None:
    plain, wrapped = Block(), Block()
    for index in order:
        wrapped.inner[0] = WRAPPERS[index](wrapped.inner[0])
        wrapped.module = WRAPPERS[index](wrapped.module)  # pyright: ignore[reportAttributeAccessIssue]  # a wrapped Linear
    outer: nn.Module = wrapped
    for index in order:
        outer = WRAPPERS[index](outer)
    names = [entry.name for entry in ModelWeightSource(outer).manifest(None).entries]
    assert names == list(plain.state_dict())
    assert "module.weight" in names


def test_adapters_are_refused_by_name() -> None:
    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q = nn.Module()
            self.q.base_layer = nn.Linear(2, 2)

    with pytest.raises(WeightSyncError, match=r"q\.base_layer\.weight.*merge them"):
        ModelWeightSource(Adapted()).manifest(None)


def test_floating_tensors_are_stated_at_the_engines_dtype_and_others_at_their_own_B109() -> None:
    tensors = {"w": torch.zeros(2), "n": torch.zeros(2, dtype=torch.int64)}
    assert [e.dtype for e in build_manifest(tensors, {}, "bfloat16").entries] == ["bfloat16", "int64"]
    assert [e.dtype for e in build_manifest(tensors, {}, None).entries] == ["float32", "int64"]
    with pytest.raises(WeightSyncError, match="float32 or bfloat16"):
        build_manifest(tensors, {}, "int32")
    with pytest.raises(WeightSyncError, match=r"'c'.*complex64"):
        build_manifest({"c": torch.zeros(1, dtype=torch.complex64)}, {}, None)


A, B = TensorEntry("a", (2,), "float32"), TensorEntry("b", (3,), "float32")


@pytest.mark.parametrize(
    ("theirs", "says"),
    [
        (Manifest(entries=(A,)), "b is missing"),
        (Manifest(entries=(A, B, TensorEntry("c", (), "int8"))), "c is not expected"),
        (Manifest(entries=(A, TensorEntry("b", (4,), "float32"))), r"b has shape \[4\], expected \[3\]"),
        (Manifest(entries=(A, TensorEntry("b", (3,), "bfloat16"))), "b has dtype bfloat16, expected float32"),
        (Manifest(entries=(B, A)), "the order differs"),
        (Manifest(entries=(A, B, B)), "a name is there twice"),
        (Manifest(entries=(A, B), tied=(("c", "a"),)), "tied names"),
    ],
)
def test_the_first_difference_is_named_and_changes_the_hash(theirs: Manifest, says: str) -> None:
    ours = Manifest(entries=(A, B))
    assert diff(ours, ours) is None
    found = diff(ours, theirs)
    assert found is not None
    assert re.search(says, found), found
    assert manifest_hash(theirs) != manifest_hash(ours)


def test_every_missing_unexpected_or_misshapen_tensor_is_named_B119(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_qwen3(tmp_path / "model"))
    manifest = ModelWeightSource(model).manifest("float32")
    dropped = "model.layers.1.self_attn.k_proj.weight"
    entries = [e for e in manifest.entries if e.name != dropped]
    entries[0] = TensorEntry(entries[0].name, (1, 2), "float32")
    entries.append(TensorEntry("model.ghost", (1,), "float32"))
    with pytest.raises(WeightSyncError) as caught:
        ModelWeightSink(model, "float32").check(Manifest(entries=tuple(entries), tied=manifest.tied))
    for name in (dropped, entries[0].name, "model.ghost"):
        assert name in str(caught.value)


def test_a_model_loaded_in_another_dtype_than_asked_is_refused_B163() -> None:
    model = nn.Linear(2, 2).bfloat16()
    with pytest.raises(WeightSyncError, match="is bfloat16 here though the engine was asked for float32"):
        ModelWeightSink(model, "float32").check(ModelWeightSource(model).manifest("float32"))
