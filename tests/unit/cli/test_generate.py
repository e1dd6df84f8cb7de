import io
import json
import sys
import types

import pytest

from lean_laguna.cli.generate import build_parser, read_prompt, to_json
from lean_laguna.cli.main import main
from lean_laguna.core.errors import ConfigError
from lean_laguna.core.types import (
    CompletionOutput,
    Logprob,
    RequestOutput,
    RequestTimes,
    SpeculationStats,
)


def prompt_of(words, monkeypatch, stdin=None):
    if stdin is not None:
        stream = types.SimpleNamespace(isatty=lambda: False, buffer=io.BytesIO(stdin))
    else:
        stream = types.SimpleNamespace(isatty=lambda: True)
    monkeypatch.setattr(sys, "stdin", stream)
    return read_prompt(build_parser().parse_strictly(words))


def test_the_prompt_comes_from_the_argument_a_file_or_standard_input(monkeypatch, tmp_path):
    (tmp_path / "p").write_text("fil\u00e9\n", encoding="utf-8")
    assert prompt_of(["hello"], monkeypatch, b"unread") == "hello"
    assert prompt_of(["--file", str(tmp_path / "p")], monkeypatch) == "fil\u00e9\n"
    assert prompt_of([], monkeypatch, "st\u00e4\n".encode()) == "st\u00e4\n"
    assert prompt_of(["-"], monkeypatch, b"x") == "x"
    assert prompt_of(["--", "--flag-like"], monkeypatch) == "--flag-like"


@pytest.mark.parametrize(
    ("words", "stdin", "message"),
    [
        ([], None, "no prompt: give it"),
        (["a", "b"], None, "put it in quotes"),
        (["a", "--file", "x"], None, "given twice"),
        (["--file", "/nowhere"], None, "--file /nowhere: cannot be read"),
        ([], b"\xff", "standard input is not UTF-8"),
        (["a", "--system", "s"], None, "--system needs --chat"),
    ],
)
def test_a_prompt_that_cannot_be_had_says_why(words, stdin, message, monkeypatch):
    with pytest.raises(ConfigError, match=message):
        prompt_of(words, monkeypatch, stdin)


def test_the_json_line_has_counts_and_no_infinity():
    import json

    completion = CompletionOutput(
        0, "ab", (1, 2), -0.5, ({1: Logprob(float("-inf"), 3, "a")}, {2: Logprob(-0.5, 1, "b")}),
        "length", None, (False, True), 7, SpeculationStats(1, 3, 1, (1, 0, 0), 1),
    )  # fmt: skip
    output = RequestOutput("r", "p", (5,), (completion,), True, (None,), 0, RequestTimes(1.0, 1.5, 2.5))
    line = json.loads(json.dumps(to_json(output), allow_nan=False))
    assert (line["ttft_s"], line["decode_s"]) == (0.5, 1.0)
    first = line["outputs"][0]
    assert first["speculative_decoding"]["mean_acceptance_length"] == 2.0
    assert first["is_draft_token"] == [False, True]
    assert first["logprobs"][0]["1"]["logprob"] is None
    assert line["prompt_logprobs"] == [None]


def test_what_auto_learned_is_kept_from_run_to_run(tmp_path, capsys):
    profile = tmp_path / "drafts.json"
    words = ["generate", "def f(", "--max-tokens", "24", "--draft-profile", str(profile), "--threads", "1"]
    assert main(words) == 0
    first = json.loads(profile.read_text())
    assert main(words) == 0
    second = json.loads(profile.read_text())

    def num_steps(found):
        return sum(sum(len(times) for times in entry["steps"].values()) for entry in found["times"])

    assert first["times"]
    assert num_steps(second) >= num_steps(first)
    profile.write_text('{"version": 0}')
    assert main(words) != 0
    assert "draft-length profile" in capsys.readouterr().err


def test_a_profile_needs_a_drafter(tmp_path, capsys):
    words = ["generate", "x", "--drafter", "none", "--draft-profile", str(tmp_path / "p.json")]
    assert main(words) != 0
    assert "no drafter" in capsys.readouterr().err
    assert not (tmp_path / "p.json").exists()
