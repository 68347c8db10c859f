"""Rendering prompts to token ids, and completions back to text."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from data_tokenizers import TEMPLATE, character_tokenizer

from offbeat.data.chat import Renderer, decode_completions
from offbeat.errors import ConfigError, DataError, ModelError


def _starts(ids: Any) -> int:
    return int((np.asarray(ids) == 1).sum())


@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize("template_bos", [False, True])
def test_chat_prompts_have_the_start_tokens_of_the_template_and_no_more_B043(adds_bos: bool, template_bos: bool):
    template = ("{{ bos_token }}" if template_bos else "") + TEMPLATE
    tokenizer = character_tokenizer(bos="<s>", adds_bos=adds_bos, template=template)
    rendered = Renderer(tokenizer, format="chat").render("hi", "row 0")
    assert _starts(rendered.token_ids) == int(template_bos)
    assert rendered.text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.decode(rendered.token_ids) == rendered.text


@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize("text", ["3152=", "<s>3152="])
def test_text_prompts_have_one_start_token_where_the_tokenizer_wants_one_B043(adds_bos: bool, text: str):
    tokenizer = character_tokenizer(bos="<s>", adds_bos=adds_bos, adds_eos=True)
    rendered = Renderer(tokenizer, format="text").render(text, "row 0")
    assert _starts(rendered.token_ids) == int(adds_bos or text.startswith("<s>"))
    assert rendered.token_ids[-1] != 2, "no end token before the completion"
    assert rendered.text == text


def test_two_start_tokens_are_refused_B043():
    tokenizer = character_tokenizer(bos="<s>", template="{{ bos_token }}{{ messages[0].content }}")
    with pytest.raises(DataError, match=r"row 3.*two start tokens"):
        Renderer(tokenizer, format="chat").render("<s>hi", "row 3")


@pytest.mark.parametrize("prompt", ["hi", [{"role": "user", "content": "hi"}]])
def test_without_a_chat_template_the_error_gives_advice_B026(prompt: Any):
    tokenizer = character_tokenizer(template=None)
    with pytest.raises(ModelError, match=r'format = "text".*sampling\.chat_template.*instruct'):
        Renderer(tokenizer, format="chat")
    text = Renderer(tokenizer, format="text")
    if isinstance(prompt, str):
        assert text.render(prompt, "row 0").text == "hi"
    else:
        with pytest.raises(DataError, match="list of chat messages"):
            text.render(prompt, "row 0")


def test_several_chat_templates_without_a_default_are_not_called_none():
    tokenizer = character_tokenizer()
    tokenizer.chat_template = {"rag": "{{ messages[0].content }}", "other": "{{ messages[0].content }}"}
    with pytest.raises(ModelError, match=r"can be taken \(ValueError: .*rag.*sampling\.chat_template") as caught:
        Renderer(tokenizer, format="chat")
    assert "has none" not in str(caught.value)


def test_measuring_and_using_count_the_same_tokens_tools_included_B055():
    tools = [{"type": "function", "function": {"name": "f", "description": "x" * 300}}]
    plain = Renderer(character_tokenizer(), format="chat")
    with_tools = Renderer(character_tokenizer(), format="chat", template_kwargs={"tools": tools})
    prompts = ["hi", [{"role": "user", "content": "hello"}]]
    lengths = with_tools.lengths(prompts, ["row 0", "row 1"])
    assert lengths == [len(with_tools.render(prompt, "row").token_ids) for prompt in prompts]
    assert lengths[0] > plain.lengths(["hi"], ["row 0"])[0] + 300


def test_the_system_message_is_put_first_unless_the_row_has_its_own():
    renderer = Renderer(character_tokenizer(), format="chat", system="be brief")
    assert renderer.render("hi", "row").text.startswith("<|im_start|>system\nbe brief<|im_end|>")
    own = [{"role": "system", "content": "mine"}, {"role": "user", "content": "hi"}]
    assert "be brief" not in renderer.render(own, "row").text


def test_template_arguments_reach_the_template_and_unknown_ones_are_refused():
    renderer = Renderer(character_tokenizer(), format="chat", template_kwargs={"enable_thinking": False})
    assert renderer.render("hi", "row").text.endswith("(no thinking)\n")
    with pytest.raises(ConfigError, match=r"chat_template_kwargs\.enable_thinkin:.*'enable_thinking'"):
        Renderer(character_tokenizer(), format="chat", template_kwargs={"enable_thinkin": False})
    with pytest.raises(ConfigError, match="set by offbeat itself"):
        Renderer(character_tokenizer(), format="chat", template_kwargs={"tokenize": False})


def test_a_row_that_the_template_refuses_is_named_among_many():
    template = (
        "{% for m in messages %}{% if m.content == 'bad' %}{{ raise_exception('no bad ones') }}{% endif %}"
        "{{ m.content }}{% endfor %}"
    )
    renderer = Renderer(character_tokenizer(template=template), format="chat")
    with pytest.raises(DataError, match=r"row 1: .*no bad ones"):
        renderer.lengths(["good", "bad", "good"], ["row 0", "row 1", "row 2"])


def test_a_prompt_that_renders_to_nothing_is_an_error():
    renderer = Renderer(character_tokenizer(template="{{ '' }}"), format="chat")
    with pytest.raises(DataError, match="row 5: the prompt has no tokens"):
        renderer.render("hi", "row 5")


def test_completions_are_decoded_without_the_stop_id_whichever_it_is_B084():
    tokenizer = character_tokenizer()
    ids = tokenizer("42", add_special_tokens=False)["input_ids"]
    a = tokenizer("a", add_special_tokens=False)["input_ids"]
    assert decode_completions(tokenizer, [[*ids, 4], [*ids, 2], ids, [*ids, *a], []], (2, 4, a[0])) == [
        "42",
        "42",
        "42",
        "42",
        "",
    ]
