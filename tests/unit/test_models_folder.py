"""Model folders, stop ids and tokenizer facts."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from data_tokenizers import character_tokenizer, model_folder

from offbeat.errors import ModelError
from offbeat.models import (
    check_architecture,
    inspect_model,
    load_tokenizer,
    stop_token_ids,
    tokenizer_hash,
)


def test_a_complete_folder_is_described(tmp_path: Path):
    found = inspect_model(str(model_folder(tmp_path / "m")))
    assert (found.model_type, found.max_length) == ("qwen3", 512)
    assert found.weight_bytes > 4
    check_architecture(found)


def test_inspecting_a_folder_loads_neither_torch_nor_transformers(tmp_path: Path):
    folder = model_folder(tmp_path / "m")
    code = (
        f"import sys; from offbeat.models import inspect_model; inspect_model({str(folder)!r}); "
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_typo_in_the_path_names_the_folder_that_is_there(tmp_path: Path):
    model_folder(tmp_path / "models" / "tiny-base")
    with pytest.raises(ModelError, match=r"did you mean .*models/tiny-base"):
        inspect_model(str(tmp_path / "models" / "tiny-bsae"))
    with pytest.raises(ModelError, match=r"did you mean .*models/tiny-base"):
        inspect_model(str(tmp_path / "modles" / "tiny-base"))


def test_a_hub_id_out_of_reach_is_an_error_within_five_seconds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    from huggingface_hub import HfApi

    def never(*_: object, **__: object) -> None:
        time.sleep(1.0)

    monkeypatch.setattr(HfApi, "model_info", never)
    monkeypatch.setattr("offbeat.models.HUB_TIMEOUT_S", 0.2)
    started = time.monotonic()
    with pytest.raises(ModelError, match=r"no-such/model.*not in the local cache.*no answer within"):
        inspect_model("no-such/model")
    assert time.monotonic() - started < 5


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_missing_part_is_named_with_the_next_step(tmp_path: Path, missing: str):
    folder = model_folder(tmp_path / "m")
    (folder / missing).unlink()
    with pytest.raises(ModelError, match=r"(no config\.json|no tokenizer|no weights).*;"):
        inspect_model(str(folder))


def test_a_folder_without_weights_is_enough_for_random_initialisation(tmp_path: Path):
    folder = model_folder(tmp_path / "m", weights=False)
    with pytest.raises(ModelError, match='init = "random"'):
        inspect_model(str(folder))
    assert inspect_model(str(folder), init="random").weight_bytes == 0


def test_an_index_whose_shards_are_missing_is_refused(tmp_path: Path):
    folder = model_folder(tmp_path / "m")
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    with pytest.raises(ModelError, match=r"1 of the 2 weight files.*model-00002-of-00002\.safetensors"):
        inspect_model(str(folder))


def test_weights_that_were_not_wholly_downloaded_are_refused(tmp_path: Path):
    folder = model_folder(tmp_path / "m")
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    for content, text in [
        (whole[:-2], "cut off"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "Git LFS pointer"),
        (b"", "empty"),
        (b"\xff" * 64, "not a safetensors file"),
    ]:
        weights.write_bytes(content)
        with pytest.raises(ModelError, match=text):
            inspect_model(str(folder))


@pytest.fixture
def cached(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder of owner/tiny in a cache of hub models: a whole model, until a test changes it."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    storage, commit = tmp_path / "models--owner--tiny", "0" * 40
    (storage / "refs").mkdir(parents=True)
    (storage / "refs" / "main").write_text(commit)
    return model_folder(storage / "snapshots" / commit)


def hub_says(monkeypatch: pytest.MonkeyPatch, answer: Exception | list[str]) -> None:
    from huggingface_hub import HfApi

    def model_info(*_: object, **__: object) -> SimpleNamespace:
        if isinstance(answer, Exception):
            raise answer
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=name, size=100) for name in answer])

    monkeypatch.setattr(HfApi, "model_info", model_info)


def test_a_model_in_the_local_cache_needs_no_hub(cached: Path, monkeypatch: pytest.MonkeyPatch):
    hub_says(monkeypatch, ConnectionError("asked"))
    assert inspect_model("owner/tiny").folder == cached


@pytest.mark.parametrize("online", [True, False])
@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_damaged_file_in_the_local_cache_is_told_as_it_is(
    cached: Path, monkeypatch: pytest.MonkeyPatch, name: str, online: bool
):
    hub_says(monkeypatch, ["config.json", "model.safetensors"] if online else ConnectionError("unreachable"))
    (cached / name).write_bytes((cached / name).read_bytes()[:-2])
    with pytest.raises(ModelError, match=rf"{name} .*\n.*hf download owner/tiny --force-download") as caught:
        inspect_model("owner/tiny")
    assert "not in the local cache" not in str(caught.value)


@pytest.mark.parametrize("whole", [True, False])
def test_a_cut_off_shard_is_found_beside_one_that_is_not_here_yet(
    cached: Path, monkeypatch: pytest.MonkeyPatch, whole: bool
):
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    first = (cached / "model.safetensors").rename(cached / shards[0])
    first.write_bytes(first.read_bytes()[: None if whole else -2])
    index = {"weight_map": dict(zip("ab", shards, strict=True))}
    (cached / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    hub_says(monkeypatch, ["model.safetensors.index.json", *shards])
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(cached))
    if whole:
        assert inspect_model("owner/tiny").weight_bytes == 200
    else:
        with pytest.raises(ModelError, match="cut off"):
            inspect_model("owner/tiny")


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_what_the_local_cache_lacks_is_asked_of_the_hub(cached: Path, monkeypatch: pytest.MonkeyPatch, missing: str):
    (cached / missing).unlink()
    hub_says(monkeypatch, ConnectionError("unreachable"))
    with pytest.raises(ModelError, match=r"the local cache has it in part \(.* has no .*\).*\(unreachable\)"):
        inspect_model("owner/tiny")


def test_an_unknown_architecture_names_the_nearest(tmp_path: Path):
    folder = model_folder(tmp_path / "m")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "qwen33"}), encoding="utf-8")
    with pytest.raises(ModelError, match=r"'qwen33' is unknown to transformers .*'qwen"):
        check_architecture(inspect_model(str(folder)))


def test_a_tokenizer_larger_than_the_model_is_refused(tmp_path: Path):
    found = inspect_model(str(model_folder(tmp_path / "m", vocab_size=50)))
    with pytest.raises(ModelError, match="tokens but the model only 50"):
        load_tokenizer(found)


def test_stop_ids_are_merged_from_tokenizer_and_generation_config_B084(tmp_path: Path):
    found = inspect_model(str(model_folder(tmp_path / "m", eos_token_id=[4, 3], top_k=20, temperature=0.6)))
    assert stop_token_ids(load_tokenizer(found), found) == (2, 3, 4)
    assert found.unused_generation_config == {"top_k": 20, "temperature": 0.6}


def test_a_stop_id_outside_the_vocabulary_is_refused(tmp_path: Path):
    found = inspect_model(str(model_folder(tmp_path / "m", eos_token_id=100_000)))
    with pytest.raises(ModelError, match="stop id 100000 is outside"):
        stop_token_ids(load_tokenizer(found), found)


def test_a_chat_template_file_takes_the_place_of_the_models_own(tmp_path: Path):
    found = inspect_model(str(model_folder(tmp_path / "m")))
    (tmp_path / "t.jinja").write_text("{{ messages[0].content }}", encoding="utf-8")
    assert load_tokenizer(found, tmp_path / "t.jinja").chat_template == "{{ messages[0].content }}"
    with pytest.raises(ModelError, match="cannot be read"):
        load_tokenizer(found, tmp_path / "missing.jinja")


def test_the_tokenizer_hash_sees_template_special_tokens_and_nothing_of_use():
    plain = tokenizer_hash(character_tokenizer())
    used = character_tokenizer()
    used(["a", "abc"], padding=False, truncation=True, max_length=2)
    assert tokenizer_hash(used) == plain
    assert tokenizer_hash(character_tokenizer(template=None)) != plain
    assert tokenizer_hash(character_tokenizer(bos="<s>")) != plain
