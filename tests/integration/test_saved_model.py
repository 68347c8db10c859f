"""What a run saves is a folder that transformers can use, and resuming keeps what the run has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_run import command, write_config, write_project

pytestmark = pytest.mark.integration


def records(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def evaluated(run: Path) -> list[int]:
    return [record["step"] for record in records(run) if any(key.startswith("eval/") for key in record)]


def test_the_saved_folder_is_a_model_and_a_resume_keeps_its_evaluation_and_refuses_other_rows(tmp_path: Path) -> None:
    """B028: template and generation config are there as well, and another config takes the folder as its model."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    project, run = write_project(tmp_path / "project"), tmp_path / "run"
    (project / "chat.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    config = write_config(
        project, steps=2, eval=[{"source": "train.jsonl"}], sampling={"chat_template": str(project / "chat.jinja")}
    )
    assert command("train", config, "--run-dir", run).code == 0
    model = run / "checkpoints" / "step-2" / "trainer-0" / "model"
    tokenizer = AutoTokenizer.from_pretrained(model)
    assert tokenizer("3+3=").input_ids == AutoTokenizer.from_pretrained(project / "model")("3+3=").input_ids
    assert tokenizer.chat_template == (project / "chat.jinja").read_text()
    loaded = AutoModelForCausalLM.from_pretrained(model)
    assert loaded.config.vocab_size == len(tokenizer)
    given = GenerationConfig.from_pretrained(project / "model")
    assert (model / "generation_config.json").is_file()
    assert loaded.generation_config.eos_token_id == given.eos_token_id
    checked = command("check", write_config(project, "further", model=str(model)))
    assert checked.code == 0, checked.told

    before = (run / "config.json").read_text()
    refused = command("resume", run, "steps=3", f"model={model}")
    assert refused.code == 2, refused.told
    assert "the run has" in refused.err
    assert (run / "config.json").read_text() == before

    with (project / "rewards.py").open("a") as rewards:
        rewards.write("# edited\n")
    resumed = command("resume", run, "steps=3", cwd=project)
    assert resumed.code == 0, resumed.told
    warnings = [line for line in resumed.out.splitlines() if line.startswith("! ")]
    assert warnings[:2] == [
        "! resumed with other settings than before: steps",
        "! changed since step 2, and used as they are now: rewards.py",
    ]
    assert evaluated(run) == [0, 2, 3]

    rows = (project / "train.jsonl").read_text()
    (project / "train.jsonl").write_text(rows.replace("1+1=", "1-1="))
    refused = command("resume", run, "steps=4")
    assert refused.code == 2, refused.told
    assert "the data is not what it was" in refused.err
