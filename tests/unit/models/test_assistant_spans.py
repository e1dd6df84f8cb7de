from pathlib import Path

import pytest

from lean_laguna.core.errors import DataError
from lean_laguna.models.assistant_spans import tokens_with_mask
from lean_laguna.models.catalog import resolve_model
from lean_laguna.models.chat_template import ChatTemplate
from lean_laguna.models.tokenizer import Tokenizer

NANO = resolve_model("nano")
MESSAGES = [
    {"role": "user", "content": "Say <assistant> twice"},
    {"role": "assistant", "content": "No."},
    {"role": "user", "content": "Why?"},
    {"role": "assistant", "content": "def f():\n    return 1"},
]


def said(template, messages, **kwargs):
    tokenizer = Tokenizer.from_dir(NANO)
    ids, mask = tokens_with_mask(template, tokenizer, messages, **kwargs)
    assert tokenizer.decode(ids, skip_special_tokens=False) == template.render(
        messages, add_generation_prompt=False, **kwargs
    )
    runs, before = [], False
    for token, own in zip(ids, mask, strict=True):
        if own and not before:
            runs.append([])
        if own:
            runs[-1].append(token)
        before = own
    return [tokenizer.decode(run, skip_special_tokens=False) for run in runs]


def test_the_assistants_tokens_are_those_between_the_templates_markers():
    template = ChatTemplate.from_dir(NANO)
    assert said(template, MESSAGES) == [
        "</think>No.</assistant>\n",
        "</think>def f():\n    return 1</assistant>\n",
    ]
    thinking = [MESSAGES[0], {"role": "assistant", "content": "No.", "reasoning_content": "Hm."}]
    assert said(template, thinking, enable_thinking=True) == ["<think>Hm.</think>No.</assistant>\n"]


def test_a_template_without_markers_is_read_by_what_an_answer_adds():
    source = ChatTemplate.from_dir(NANO).source
    for word in ("{%- generation -%}", "{%- endgeneration -%}"):
        assert word in source
        source = source.replace(word, "")
    plain = ChatTemplate(source)
    assert said(plain, MESSAGES) == ["No.</assistant>\n", "def f():\n    return 1</assistant>\n"]


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        (MESSAGES[:1], "no answer of the assistant"),
        ([{"role": "user", "content": "a\x00b"}, MESSAGES[1]], "null character"),
    ],
)
def test_what_nothing_can_be_learnt_from_is_refused(messages, message):
    with pytest.raises(DataError, match=message):
        tokens_with_mask(ChatTemplate.from_dir(NANO), Tokenizer.from_dir(Path(NANO)), messages)
