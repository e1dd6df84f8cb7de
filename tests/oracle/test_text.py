"""Tokenizer and chat template against transformers on the same files."""

import pytest

from lean_laguna.models.chat_template import ChatTemplate
from lean_laguna.models.tokenizer import Tokenizer
from support.templates import SOURCES
from support.tokenizers import write_tokenizer

pytestmark = pytest.mark.oracle
CALL = {
    "type": "function",
    "function": {"name": "add", "arguments": {"a": 1.5, "b": "é<", "c": [None, True]}},
}
CONVERSATION = [
    {"role": "system", "content": "Be brief.\n"},
    {"role": "user", "content": "日本 <b> & 'x'"},
    {"role": "assistant", "content": " 3 ", "reasoning": "r", "tool_calls": [CALL]},
    {"role": "tool", "content": "1\n2"},
]
TOOLS = [{"type": "function", "function": {"name": "add", "description": "größe & <sum>", "parameters": {}}}]
TEXTS = ["def f(x):\n\treturn x  # ☃\n", "a<think>b</think> 😀\u200d", "", "   ", "〈|EOS|〉x"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    transformers = pytest.importorskip("transformers")
    folder = write_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), bos_token="〈|EOS|〉"
    )
    return Tokenizer.from_dir(folder), theirs


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("kwargs", [{}, {"enable_thinking": True}])
@pytest.mark.parametrize("open_turn", [True, False])
def test_a_rendered_prompt_is_the_one_transformers_renders(pair, name, tools, kwargs, open_turn):
    ours = ChatTemplate(SOURCES[name], special_tokens={"bos_token": "〈|EOS|〉"})
    expected = pair[1].apply_chat_template(
        CONVERSATION,
        chat_template=SOURCES[name],
        tools=tools,
        tokenize=False,
        add_generation_prompt=open_turn,
        **kwargs,
    )
    assert ours.render(CONVERSATION, tools, add_generation_prompt=open_turn, **kwargs) == expected


@pytest.mark.parametrize("text", TEXTS)
def test_ids_and_text_are_those_of_transformers(pair, text):
    ours, theirs = pair
    ids = theirs(text, add_special_tokens=False)["input_ids"]
    assert ours.encode(text) == ids
    assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids)
