"""A model folder of a checkpoint, written anew at a dtype, and compared with what it was made of. Imports torch."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offbeat.config import Dtype
from offbeat.errors import ConfigError, RunError
from offbeat.install import pip_install

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

MAX_SHARD = "5GB"
SEQUENCES, TOKENS = 4, 16
ROUNDING_LIMIT = 0.05
"""Largest mean |logprob difference| that rounding to bfloat16 may make."""
_WRITTEN_BY_THE_MODEL = ("config.json", "generation_config.json", "README.md")
_WEIGHTS = (".safetensors", ".safetensors.index.json")
_OF_THIS_MACHINE = ("is_local", "local_files_only")


@dataclass(frozen=True)
class Written:
    """What was checked after writing."""

    parameters: int
    files: int
    bytes: int
    tensors: int
    """All of them equal the checkpoint's, bit for bit, at the dtype written."""
    gap_mean: float
    gap_max: float
    """|logprob difference| to the float32 checkpoint, over `SEQUENCES` × `TOKENS` fixed tokens: 0 for float32."""


def needed_bytes(source: Path, dtype: Dtype) -> int:
    """Of the folder that will be written; the checkpoint's weights are float32."""
    weights = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    rest = sum(path.stat().st_size for path in source.iterdir() if path.is_file()) - weights
    return (weights // 2 if dtype == "bfloat16" else weights) + rest + (1 << 20)


def write_model(source: Path, target: Path, dtype: Dtype, stop_token_ids: Iterable[int] = ()) -> None:
    """Into an existing, empty folder: weights as transformers shards and ties them, tokenizer, configuration.

    `stop_token_ids` are added to the ids that end a completion in generation_config.json: what the run stopped at.
    """
    _load(source, dtype).save_pretrained(target, max_shard_size=MAX_SHARD)
    for path in sorted(source.iterdir()):
        if path.is_file() and path.name not in _WRITTEN_BY_THE_MODEL and not path.name.endswith(_WEIGHTS):
            shutil.copyfile(path, target / path.name)
    settings = target / "tokenizer_config.json"
    if settings.is_file():
        values = json.loads(settings.read_text(encoding="utf-8"))
        _write_json(settings, {key: value for key, value in values.items() if key not in _OF_THIS_MACHINE})
    _add_stops(target, stop_token_ids)


def _add_stops(target: Path, added: Iterable[int]) -> None:
    from transformers import AutoTokenizer

    path = target / "generation_config.json"
    values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    named = values.get("eos_token_id")
    before = {i for i in (named if isinstance(named, list) else [named]) if isinstance(i, int)}
    end = AutoTokenizer.from_pretrained(str(target), local_files_only=True).eos_token_id
    stops = before | set(added) | ({end} if isinstance(end, int) else set())
    if stops != before:
        ids = sorted(stops)
        _write_json(path, {**values, "eos_token_id": ids if len(ids) > 1 else ids[0]})


def check_model(source: Path, target: Path, dtype: Dtype) -> Written:
    """Load the new folder again and compare it with the checkpoint. Raises `RunError` that names a difference."""
    import torch

    expected, found = _load(source, dtype), _load(target, None)
    theirs = found.state_dict()
    for name, tensor in expected.state_dict().items():
        other = theirs.pop(name, None)
        if other is None or other.dtype != tensor.dtype or not torch.equal(other, tensor):
            raise RunError(f"the exported model differs from the checkpoint in {name!r}; nothing was kept of it.")
    if theirs:
        raise RunError(f"the exported model has a tensor {next(iter(theirs))!r} that the checkpoint has not.")
    tensors, parameters = len(found.state_dict()), sum(p.numel() for p in found.parameters())
    logits = _logits(found)
    if not torch.equal(logits, _logits(expected)):
        raise RunError("the exported model gives other logits than the checkpoint; nothing was kept of it.")
    del expected, found, theirs
    whole = logits if dtype == "float32" else _logits(_load(source, "float32"))
    gaps = (logits.log_softmax(-1) - whole.log_softmax(-1)).abs()
    _check_tokenizer(source, target)
    mean = float(gaps.mean())
    if not mean <= ROUNDING_LIMIT:
        raise RunError(
            f"rounded to {dtype} the model's logprobs change by {mean:.3f} on average, more than {ROUNDING_LIMIT:g}; "
            "export it with --dtype float32."
        )
    files = [path for path in target.iterdir() if path.is_file()]
    size = sum(path.stat().st_size for path in files)
    return Written(parameters, len(files), size, tensors, mean, float(gaps.max()))


def _load(folder: Path, dtype: Dtype | None) -> PreTrainedModel:
    """At a dtype, or at the one that the folder's own configuration names."""
    try:
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging
    except ImportError as error:
        raise ConfigError(f"export needs torch and transformers ({error}); {pip_install('train')}.") from error
    logging.disable_progress_bar()
    wanted: Any = "auto" if dtype is None else getattr(torch, dtype)
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(str(folder), dtype=wanted, local_files_only=True)
    return model.eval()


def _logits(model: PreTrainedModel) -> Tensor:
    """float32, (sequences, tokens, vocabulary), computed in float32 whatever the weights are stored in."""
    import torch

    embeddings: Any = model.get_input_embeddings()
    vocabulary = embeddings.weight.shape[0]
    # Spread over the vocabulary, the same ids at every call (Knuth's multiplicative hash).
    tokens = (torch.arange(SEQUENCES * TOKENS) * 2654435761 % int(vocabulary)).view(SEQUENCES, TOKENS)
    with torch.no_grad():
        return model.float()(input_ids=tokens).logits.float()


def _check_tokenizer(source: Path, target: Path) -> None:
    from transformers import AutoTokenizer

    from offbeat.models import tokenizer_hash

    before, after = (
        tokenizer_hash(AutoTokenizer.from_pretrained(str(folder), local_files_only=True)) for folder in (source, target)
    )
    if before != after:
        raise RunError("the exported tokenizer differs from the checkpoint's; nothing was kept of it.")


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
