import json

import pytest

from lean_laguna.core.errors import DataError
from lean_laguna.train.conversations import read_conversations

QUESTION, ANSWER = {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because."}


def written(folder, *rows):
    path = folder / "rows.jsonl"
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_all_shapes_are_read_alike(tmp_path):
    path = written(
        tmp_path,
        {"prompt_id": "u", "prompt": "Why?", "messages": [QUESTION, ANSWER]},
        {
            "uuid": "m",
            "conversations": [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "Because."}],
        },
        {"id": "p", "prompt": "Why?", "response": "Because."},
        "",
        {"instruction": "Why?"},
    )
    found = read_conversations(path)
    assert [c.id for c in found] == ["u", "m", "p", "5"]
    for conversation in found[:3]:
        assert conversation.messages == (QUESTION, ANSWER)
    assert found[3].question() == (QUESTION,)


def test_a_text_may_hold_line_ends_of_unicode_and_a_file_windows_marks(tmp_path):
    text = "one\u2028two\u0085three\u2029"
    path = tmp_path / "rows.jsonl"
    path.write_bytes(f'\ufeff{{"prompt": "{text}"}}\r\n{{"instruction": "", "prompt": "x"}}\r\n'.encode())
    first, second = read_conversations(path)
    assert first.messages == ({"role": "user", "content": text},)
    assert second.messages == ({"role": "user", "content": "x"},)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": ""}, "line 1: the user's text is empty"),
        ({"prompt": "\ud800"}, "line 1: not JSON: it holds half a character"),
        ("{", "line 1: not JSON"),
        ("[1]", "must be an object, found list"),
        ({"text": "x"}, r"of no known shape, its keys are \['text'\]"),
        ({"messages": [{"role": "user", "content": " "}]}, "the user's text is empty"),
        ({"messages": [QUESTION, {"role": "assistant", "content": ""}]}, "the assistant's text is empty"),
        ({"messages": [{"role": "bot", "content": "x"}]}, "role 'bot' is not one of"),
        ({"messages": []}, "line 1: nobody speaks; a line is"),
        ({"messages": [{"role": "user"}]}, "each turn needs the text 'content'"),
    ],
)
def test_bad_lines_are_named(row, message, tmp_path):
    with pytest.raises(DataError, match=message):
        read_conversations(written(tmp_path, row))


def test_ids_may_count_from_0_and_lines_without_one_get_out_of_their_way(tmp_path):
    rows = [{"prompt": "a"}, {"id": 0, "prompt": "b"}, {"id": 1, "prompt": "c"}, {"prompt": "d"}]
    found = read_conversations(written(tmp_path, *rows))
    assert [(c.id, c.messages[0]["content"]) for c in found] == [
        ("line 1", "a"), ("0", "b"), ("1", "c"), ("4", "d"),
    ]  # fmt: skip


def test_an_id_used_twice_and_an_empty_file_are_refused(tmp_path):
    with pytest.raises(DataError, match="line 2: id 'a' was used before"):
        read_conversations(written(tmp_path, {"id": "a", "prompt": "x"}, {"id": "a", "prompt": "y"}))
    with pytest.raises(DataError, match="holds no conversation"):
        read_conversations(written(tmp_path))
    with pytest.raises(DataError, match="cannot be read"):
        read_conversations(tmp_path / "none.jsonl")
    (conversation,) = read_conversations(written(tmp_path, {"messages": [ANSWER]}))
    with pytest.raises(DataError, match="no message of the user"):
        conversation.question()
