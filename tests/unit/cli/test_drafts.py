import io

import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from lean_laguna.cli.drafts import DraftColours, StreamPrinter, acceptance_text, harmless
from lean_laguna.core.types import CompletionOutput, SamplingParams, SpeculationStats
from lean_laguna.models.tokenizer import Tokenizer
from support.tokenizers import byte_level_json

TOKENIZER = Tokenizer(tokenizers.Tokenizer.from_str(byte_level_json()))
PARAMS = SamplingParams()


def grown(text, cuts, held_back=0, flags=None):
    """The completion as a stream shows it after each of ``cuts`` tokens."""
    ids = TOKENIZER.encode(text)
    flags = flags or [i % 3 != 0 for i in range(len(ids))]
    for cut in [*sorted(min(c, len(ids)) for c in cuts), len(ids)]:
        shown = TOKENIZER.decode(ids[:cut], skip_special_tokens=True)
        end = len(shown) - (held_back if cut < len(ids) else 0)
        yield CompletionOutput(0, shown[: max(end, 0)], tuple(ids[:cut]), is_draft_token=tuple(flags[:cut]))


@given(st.text(max_size=30), st.lists(st.integers(0, 60), max_size=6).map(sorted), st.integers(0, 3))
def test_the_pieces_are_the_text_whatever_the_steps(text, cuts, held_back):
    colours = DraftColours(TOKENIZER, PARAMS)
    shown = ""
    for completion in grown(text, cuts, held_back):
        shown += "".join(piece for piece, _ in colours.new_pieces(completion))
        assert completion.text.startswith(shown[: len(completion.text)])
    assert shown == TOKENIZER.decode(TOKENIZER.encode(text))


def test_text_cut_at_a_stop_is_not_shown():
    ids = TOKENIZER.encode("one STOP two")
    colours = DraftColours(TOKENIZER, PARAMS)
    pieces = colours.new_pieces(CompletionOutput(0, "one ", tuple(ids), is_draft_token=(True,) * len(ids)))
    assert "".join(text for text, _ in pieces) == "one "


def test_each_piece_has_the_colour_of_its_token():
    ids = TOKENIZER.encode("abc")
    colours = DraftColours(TOKENIZER, PARAMS)
    pieces = colours.new_pieces(CompletionOutput(0, "abc", tuple(ids), is_draft_token=(False, True, False)))
    assert pieces == [("a", False), ("b", True), ("c", False)]


def printed(*, show_drafts, terminal):
    console = Console(file=io.StringIO(), force_terminal=terminal, width=20, color_system="standard")
    printer = StreamPrinter(console, TOKENIZER, PARAMS, show_drafts=show_drafts)
    for completion in grown("x = [1]  # a line longer than the screen is wide\n", [1, 3, 7]):
        printer.show(completion)
    return console.file.getvalue()


def test_a_pipe_gets_the_bare_text_even_with_drafts_asked_for():
    text = "x = [1]  # a line longer than the screen is wide\n"
    assert printed(show_drafts=False, terminal=False) == text
    assert printed(show_drafts=True, terminal=False) == text
    assert printed(show_drafts=False, terminal=True) == text


def test_a_terminal_gets_colour_and_nothing_else_changes():
    import re

    coloured = printed(show_drafts=True, terminal=True)
    assert "\x1b[32m" in coloured
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == printed(show_drafts=False, terminal=False)


def test_text_cannot_steer_the_terminal():
    assert harmless("a\x1b]0;title\x07b\r\n\tc\x9bd") == "a␛]0;title␇b␍\n\tc\ufffdd"


@given(st.text())
def test_ordinary_text_is_left_alone(text):
    shown = harmless(text)
    assert len(shown) == len(text)
    assert all(a == b for a, b in zip(text, shown, strict=True) if a.isprintable() or a in "\n\t")


def test_steps_without_drafts_are_not_counted_among_those_with():
    drafted = {"num_drafts": 5, "num_draft_tokens": 26, "num_accepted_tokens": 6}
    assert acceptance_text(SpeculationStats(num_steps=249)) is None
    assert acceptance_text(SpeculationStats(**drafted, num_steps=5)) == "2.20 tokens a step"
    few = "2.20 tokens a step with drafts"
    assert acceptance_text(SpeculationStats(**drafted, num_steps=249)) == f"{few} (5 of 249 steps)"
    assert acceptance_text(SpeculationStats(**drafted)) == few
