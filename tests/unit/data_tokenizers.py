"""Small tokenizers made on the spot: one token a character, with or without start token and chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

CHARACTERS = [chr(code) for code in range(32, 127)] + ["\n", "é", "你", "好", "\N{SLIGHTLY SMILING FACE}", "\ufffd"]
SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is defined and not enable_thinking %}"
    "(no thinking)\n{% endif %}{% endif %}"
)


def character_tokenizer(
    *, bos: str | None = None, adds_bos: bool = False, adds_eos: bool = False, template: str | None = TEMPLATE
) -> PreTrainedTokenizerFast:
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *CHARACTERS])}
    backend = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = Split(Regex(r"[\s\S]"), behavior="isolated")  # pyright: ignore[reportAttributeAccessIssue] -- a setter that the stubs lack
    backend.decoder = Fuse()  # pyright: ignore[reportAttributeAccessIssue] -- as above
    if adds_bos or adds_eos:
        single = ("<s> " if adds_bos else "") + "$A" + (" </s>" if adds_eos else "")
        backend.post_processor = TemplateProcessing(  # pyright: ignore[reportAttributeAccessIssue] -- as above
            single=single, special_tokens=[("<s>", vocabulary["<s>"]), ("</s>", vocabulary["</s>"])]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=bos,
        eos_token="</s>",
        unk_token="<unk>",
        additional_special_tokens=["<s>", "<|im_start|>", "<|im_end|>"],
    )
    tokenizer.chat_template = template
    return tokenizer


def model_folder(folder: Path, *, vocab_size: int | None = None, weights: bool = True, **generation: Any) -> Path:
    """A folder that looks like a model: config, tokenizer, a valid empty weight file."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = character_tokenizer(bos="<s>")
    tokenizer.save_pretrained(str(folder))
    config = {
        "model_type": "qwen3",
        "vocab_size": vocab_size or len(tokenizer),
        "max_position_embeddings": 512,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    if generation:
        (folder / "generation_config.json").write_text(json.dumps(generation), encoding="utf-8")
    if weights:
        header = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
        (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    return folder
