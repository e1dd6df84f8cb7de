import ast
import dataclasses
import json

import pytest

from lean_laguna.core.errors import DataError
from lean_laguna.tasks.prompts import load_prompts


def test_the_mixed_set_runs_from_easy_to_hard():
    prompts = load_prompts("mixed").prompts
    assert len(prompts) == 14
    order = [("easy", "medium", "hard").index(p.difficulty) for p in prompts]
    assert order == sorted(order)
    assert set(order) == {0, 1, 2}


def test_the_trivial_set_has_twenty():
    assert len(load_prompts("trivial").prompts) == 20


@pytest.mark.parametrize("name", ["mixed", "trivial"])
def test_prompts_are_the_beginning_of_valid_python_and_end_at_a_token(name):
    for prompt in load_prompts(name).prompts:
        ast.parse(prompt.prompt)
        assert prompt.prompt == prompt.prompt.strip()
        assert len({p.prompt for p in load_prompts(name).prompts}) == len(load_prompts(name).prompts)


def test_a_selection_is_spread_over_the_difficulties_and_has_its_own_hash():
    whole = load_prompts("mixed")
    some = whole.first(3)
    assert [p.difficulty for p in some.prompts] == ["easy", "medium", "hard"]
    assert some.sha256 != whole.sha256
    assert whole.first(None) is whole.first(99) is whole


def test_a_set_survives_being_written_and_read(tmp_path):
    whole = load_prompts("mixed")
    lines = [json.dumps(dataclasses.asdict(prompt)) for prompt in whole.prompts]
    (tmp_path / "p.jsonl").write_text("\n".join(lines))
    again = load_prompts(str(tmp_path / "p.jsonl"))
    assert again.prompts == whole.prompts
    assert again.sha256 == whole.sha256


def test_a_text_file_is_one_prompt(tmp_path):
    (tmp_path / "p.py").write_text("def f():\n")
    assert [p.prompt for p in load_prompts(str(tmp_path / "p.py")).prompts] == ["def f():\n"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        ("{", "line 1: not JSON"),
        ('{"prompt": "x"}\n{"prompt": 3}', "line 2: must be an object"),
        ('{"prompt": ""}', "line 1: must be"),
        ("[1]", "line 1: must be"),
        ('{"id": 1, "prompt": "x"}\n{"id": 1, "prompt": "y"}', "line 2: id '1' is used twice"),
    ],
)
def test_a_bad_file_names_the_line(tmp_path, content, message):
    (tmp_path / "p.jsonl").write_text(content)
    with pytest.raises(DataError, match=message):
        load_prompts(str(tmp_path / "p.jsonl"))


def test_an_unknown_name_suggests_the_nearest_and_a_binary_file_is_refused(tmp_path):
    with pytest.raises(DataError, match="did you mean 'mixed'"):
        load_prompts("mixd")
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match="UTF-8"):
        load_prompts(str(tmp_path / "b.txt"))


def test_a_unicode_line_separator_in_a_prompt_is_not_a_line_end(tmp_path):
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "a\u2028b"}, ensure_ascii=False))
    assert load_prompts(str(tmp_path / "p.jsonl")).prompts[0].prompt == "a\u2028b"
