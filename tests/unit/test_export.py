"""An exported model: the same weights, tied as transformers ties them; a card with real figures; the hub's seam."""

from __future__ import annotations

import ast
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from offbeat.checkpoint import Checkpoint, State
from offbeat.commands.export import best_saved, default_dtype, resumed_at, while_it_is_there
from offbeat.config import Config, parse_config
from offbeat.errors import ConfigError, RunError
from offbeat.export.card import Facts, card
from offbeat.export.push import check_push, push
from offbeat.export.weights import check_model, needed_bytes, write_model
from offbeat.journal import open_journal
from offbeat.testing.fake_hub import FakeHub
from offbeat.testing.tiny_model import tiny_qwen3


@pytest.fixture(scope="module", name="model")
def _model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen3(tmp_path_factory.mktemp("model") / "model", layers=1)


def written(model: Path, target: Path, dtype: Any, stops: tuple[int, ...] = ()) -> Path:
    target.mkdir()
    write_model(model, target, dtype, stops)
    return target


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_folder_has_the_checkpoints_weights_at_its_dtype(model: Path, tmp_path: Path, dtype: Any) -> None:
    from safetensors.torch import load_file

    target = written(model, tmp_path / "out", dtype)
    found = check_model(model, target, dtype)
    assert (found.gap_max == 0) == (dtype == "float32")
    assert found.gap_max < 0.2
    source, made = load_file(model / "model.safetensors"), load_file(target / "model.safetensors")
    assert made.keys() == source.keys()  # tied weights are there once
    for name, tensor in source.items():
        assert torch.equal(made[name], tensor.to(getattr(torch, dtype)))
    assert json.loads((target / "config.json").read_text())["dtype"] == dtype
    assert found.bytes <= needed_bytes(model, dtype)


def test_a_difference_to_the_checkpoint_is_named(model: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    target = written(model, tmp_path / "out", "float32")
    tensors = load_file(target / "model.safetensors")
    tensors["model.norm.weight"][3] += 1e-6
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RunError, match=r"differs from the checkpoint in 'model.norm.weight'"):
        check_model(model, target, "float32")


def test_stop_ids_of_the_run_are_stop_ids_of_the_export(model: Path, tmp_path: Path) -> None:
    before = json.loads((model / "generation_config.json").read_text())["eos_token_id"]
    target = written(model, tmp_path / "out", "float32", (7,))
    assert json.loads((target / "generation_config.json").read_text())["eos_token_id"] == [before, 7]
    same = written(model, tmp_path / "same", "float32")
    assert json.loads((same / "generation_config.json").read_text())["eos_token_id"] == before


@pytest.mark.parametrize(
    ("stored", "dtype"),
    [({"dtype": "bfloat16"}, "bfloat16"), ({"torch_dtype": "bfloat16"}, "bfloat16"), ({"dtype": "float16"}, "float32")],
)
def test_the_dtype_is_the_base_models_where_that_is_bfloat16(
    model: Path, tmp_path: Path, stored: dict[str, str], dtype: str
) -> None:
    base = written(model, tmp_path / "base", "float32")
    values = json.loads((base / "config.json").read_text())
    del values["dtype"]
    (base / "config.json").write_text(json.dumps({**values, **stored}))
    assert default_dtype(str(base), None)[0] == dtype
    assert default_dtype(str(tmp_path / "gone"), None)[0] == "float32"


# --- the card -------------------------------------------------------------------------------------------------------


def config(**changes: Any) -> Config:
    data = [{"source": "/home/me/secret/train.jsonl", "rewards": {"/home/me/secret/rewards.py:right": 1.0}}]
    evals = [{"name": "held", "source": "hf://openai/gsm8k/main/test"}]
    values = {"model": "owner/base", "steps": 9, "prompts_per_step": 2, "data": data, "eval": evals}
    return parse_config({**values, **changes})


def record(version: int, value: float, error: float | None) -> dict[str, Any]:
    point = {"avg@4": value, "avg@4_error": error, "pass@4": 1 - value, "weights_version": version}
    return {"step": version, "reward_mean": 9.0, **{f"eval/held/{key}": value for key, value in point.items()}}


RECORDS = [record(0, 0.25, 0.01), {"step": 1, "reward_mean": 9.0}, record(4, 0.5, None), record(8, 0.875, 0.02)]


def facts(step: int = 4, base: str = "owner/base", **changes: Any) -> Facts:
    values: dict[str, Any] = {"base_revision": None, "warm_starts": 0, "dtype": "bfloat16"}
    return Facts(name="my | model", step=step, base=base, **{**values, **changes})


def test_the_card_has_the_figures_of_the_exported_step_and_no_others() -> None:
    text = card(facts(), config(), RECORDS)
    assert text.startswith('---\nbase_model: "owner/base"\n')
    assert "| held/avg@4 | .250 ±.010 | .500 |" in text
    assert ".875" not in text
    assert "# my \\| model" in text
    assert "for 4 of 9 steps" in text
    assert "not evaluated" in card(facts(step=5), config(), RECORDS)


def test_a_card_of_a_resumed_run_says_of_which_part_its_settings_are(tmp_path: Path) -> None:
    assert "resumed" not in card(facts(), config(), RECORDS)
    path = tmp_path / "journal.jsonl"
    assert resumed_at(path) == ()
    for part in (None, (4, None), (2, None), (4, None)):
        with open_journal(path, resumed_at=part):
            pass
    path.write_bytes(path.read_bytes() + b"nonsense\n")
    assert resumed_at(path) == (2, 4)
    text = card(facts(resumed_at=(2, 4)), config(), RECORDS)
    assert "resumed at step 2, 4. These are the settings of its last part" in text


def test_a_model_that_began_at_random_says_so() -> None:
    assert "from random weights, with the architecture and tokenizer of" in card(facts(), config(init="random"), [])


def test_the_card_tells_no_path_of_this_machine(tmp_path: Path) -> None:
    text = card(facts(base=str(tmp_path / "base")), config(model=str(tmp_path / "base")), RECORDS)
    assert "/home" not in text
    assert str(tmp_path) not in text
    assert "base_model" not in text
    assert "train.jsonl; rewards rewards.py:right × 1" in text


def test_the_code_in_the_card_compiles() -> None:
    for form in ("chat", "text"):
        data = [{**config().data[0].model_dump(), "format": form}]
        code = card(facts(), config(data=data), RECORDS).partition("```python\n")[2].partition("```")[0]
        compile(code, "README.md", "exec")
        assert ("apply_chat_template" in code) == (form == "chat")


def test_the_code_in_the_card_prompts_as_the_run_did() -> None:
    system = 'Say "no".\n```\n\\'
    data = [{**config().data[0].model_dump(), "system": system}]
    text = card(facts(), config(data=data, sampling={"chat_template_kwargs": {"enable_thinking": False}}), RECORDS)
    code = text.partition("```python\n")[2].partition("\n```")[0]
    (call,) = [
        node
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "apply_chat_template"
    ]
    assert ast.literal_eval(call.args[0]) == [
        {"role": "system", "content": system},
        {"role": "user", "content": "…"},
    ]
    assert {"enable_thinking": False} in [ast.literal_eval(one.value) for one in call.keywords]
    assert "system" not in card(facts(), config(), RECORDS)


def test_a_checkpoint_that_is_removed_meanwhile_is_named_as_the_reason(tmp_path: Path) -> None:
    state = State(next_step=4, weights_version=4, seed=0, data="", elapsed_s=0.0)
    (tmp_path / "complete.json").write_text("{}")
    with pytest.raises(OSError, match="disk quota"), while_it_is_there(Checkpoint(tmp_path, state)):
        raise OSError("disk quota")
    (tmp_path / "complete.json").unlink()
    with (
        pytest.raises(RunError, match=r"the checkpoint of step 4 was removed while it was read.*export again"),
        while_it_is_there(Checkpoint(tmp_path, state)),
    ):
        raise OSError("no file named model.safetensors")


def test_the_best_saved_step_is_found_or_it_is_said_why_there_is_none() -> None:
    assert best_saved(RECORDS, "held", [0, 4])[0] == 4
    assert best_saved(RECORDS, "held/pass@4", [4, 8])[0] == 4
    assert best_saved(RECORDS, "held/avg@4", [4, 8]) == (8, "highest held/avg@4 of the saved steps, .875")
    with pytest.raises(ConfigError, match=r"measured at versions \[0, 4, 8\], saved are \[1, 2\]"):
        best_saved(RECORDS, "held", [1, 2])
    with pytest.raises(ConfigError, match=r"has not measured it; measured is held/avg@4, held/pass@4"):
        best_saved(RECORDS, "held/avg@8", [4])


# --- the hub --------------------------------------------------------------------------------------------------------


def test_a_push_is_private_unless_it_is_said_otherwise(tmp_path: Path) -> None:
    for public in (False, True):
        hub = FakeHub()
        check_push(hub, "me/m", public=public)
        assert push(hub, tmp_path, "me/m", public=public, message="Step 4") == "https://hub.test/me/m"
        assert hub.there == {"me/m": not public}
        assert hub.uploads == [("me/m", [], "Step 4")]


def test_a_repository_of_another_visibility_is_refused_before_anything_is_written() -> None:
    with pytest.raises(ConfigError, match="is there already and is public; add --public"):
        check_push(FakeHub({"me/m": False}), "me/m", public=False)
    with pytest.raises(ConfigError, match="is private; leave --public out"):
        check_push(FakeHub({"me/m": True}), "me/m", public=True)
    check_push(FakeHub({"me/m": True}), "me/m", public=False)
    with pytest.raises(ConfigError, match="write OWNER/NAME"):
        check_push(FakeHub(), "just-a-name", public=False)


def test_a_push_leaves_no_weights_of_an_earlier_one(tmp_path: Path) -> None:
    """A single model.safetensors would be loaded in place of a newer index with its shards."""
    old = ("model.safetensors", "pytorch_model.bin", "adapter_config.json", "README.md", "notes.txt", "plot.png")
    hub = FakeHub({"me/m": True}, files={"me/m": dict.fromkeys(old, b"old")})
    shards = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    for name in (*shards, "model.safetensors.index.json", "README.md"):
        (tmp_path / name).write_bytes(b"new")
    push(hub, tmp_path, "me/m", public=False, message="Step 4")
    found = hub.files["me/m"]
    assert {name for name, content in found.items() if content == b"old"} == {"notes.txt", "plot.png"}
    assert {name for name, content in found.items() if content == b"new"} == {path.name for path in tmp_path.iterdir()}
    (single := tmp_path / "single").mkdir()
    (single / "model.safetensors").write_bytes(b"newest")
    push(hub, single, "me/m", public=False, message="Step 5")
    assert [name for name in hub.files["me/m"] if "safetensors" in name] == ["model.safetensors"]


def test_a_push_that_fails_says_how_to_go_on(tmp_path: Path) -> None:
    with pytest.raises(
        RunError, match=rf"failed \(disk quota\); [^\n]*\nhf upload me/m {tmp_path} \. '--delete=\*\.safetensors'"
    ):
        push(FakeHub(broken=OSError("disk quota")), tmp_path, "me/m", public=False, message="")


class _Refuses(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = b'{"error": "Invalid username or password."}'
        self.send_response(401)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None: ...


def test_a_token_that_a_hub_does_not_know_is_refused_in_words() -> None:
    from huggingface_hub import HfApi

    with HTTPServer(("127.0.0.1", 0), _Refuses) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            hub: Any = HfApi(endpoint=f"http://127.0.0.1:{server.server_port}", token="hf_none")
            with pytest.raises(ConfigError, match=r"does not know who you are .*hf auth login.*HF_TOKEN"):
                check_push(hub, "me/m", public=False)
        finally:
            server.shutdown()
            thread.join()


def test_without_a_network_or_a_token_a_push_is_refused_in_words() -> None:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import LocalTokenNotFoundError

    nobody: Any = HfApi(endpoint="http://127.0.0.1:9", token="hf_none")
    with pytest.raises(ConfigError, match=r"http://127\.0\.0\.1:9 cannot be asked .*check the network"):
        check_push(nobody, "me/m", public=False)
    with pytest.raises(ConfigError, match=r"does not know who you are .*hf auth login"):
        check_push(FakeHub(unknown=LocalTokenNotFoundError("no token found")), "me/m", public=False)
