import itertools
import json
import threading
import time

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from lean_laguna.core.errors import CheckpointError, RequestError
from lean_laguna.models.tokenizer import IncrementalDetokenizer, Tokenizer
from support.tokenizers import byte_level_json, write_tokenizer

TOKENIZER = Tokenizer(tokenizers.Tokenizer.from_str(byte_level_json()))
BACKEND = tokenizers.Tokenizer.from_str(byte_level_json())
UNICODE = st.text(max_size=60)  # hypothesis leaves surrogates out by default
TAGS = st.sampled_from(["<think>", "</assistant>", "〈|EOS|〉", "😀", "日", "Ġ", "é", "\ufffd", "<pad>", " "])
ANY_TEXT = st.lists(st.one_of(UNICODE, TAGS), max_size=8).map("".join)


def pushed(tokenizer, ids, cuts, skip_special_tokens):
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens)
    edges = [0, *sorted(min(c, len(ids)) for c in cuts), len(ids)]
    pieces = [detokenizer.push(ids[a:b]) for a, b in itertools.pairwise(edges)]
    return [*pieces, detokenizer.flush()]


@given(ANY_TEXT, st.lists(st.integers(0, 200), max_size=12))
def test_any_split_of_a_text_s_ids_gives_the_text_back(text, cuts):
    ids = TOKENIZER.encode(text)
    pieces = pushed(TOKENIZER, ids, cuts, skip_special_tokens=False)
    assert "".join(pieces) == text
    assert sum(piece.count("\ufffd") for piece in pieces) == text.count("\ufffd")


@given(ANY_TEXT, st.integers(0, 200))
def test_a_cut_generation_never_ends_in_a_broken_character(text, length):
    text = text.replace("\ufffd", "")
    ids = TOKENIZER.encode(text)[:length]
    assert text.startswith(TOKENIZER.decode(ids, skip_special_tokens=False))


@given(
    st.lists(st.integers(0, TOKENIZER.vocab_size + 3), max_size=40), st.lists(st.integers(0, 40), max_size=8)
)
@settings(max_examples=300)
def test_any_ids_decode_as_the_tokenizers_package_does_but_for_an_unfinished_tail(ids, cuts):
    for skip in (True, False):
        text = TOKENIZER.decode(ids, skip_special_tokens=skip)
        assert "".join(pushed(TOKENIZER, ids, cuts, skip)) == text
        reference = BACKEND.decode(ids, skip_special_tokens=skip)
        assert reference == text or reference == text + "\ufffd"


@given(ANY_TEXT)
def test_a_text_has_no_fewer_tokens_than_its_length_says(text):
    assert TOKENIZER.fewest_tokens(text) <= len(TOKENIZER.encode(text))
    assert (TOKENIZER.fewest_tokens(text) > 0) == bool(text)


@pytest.mark.parametrize("change", [{"normalizer": {"type": "NFKC"}}, {"lstrip": True}])
def test_nothing_is_said_of_a_text_s_tokens_where_text_can_vanish(change):
    source = json.loads(byte_level_json())
    source["added_tokens"][0] |= {key: value for key, value in change.items() if key != "normalizer"}
    source["normalizer"] = change.get("normalizer")
    tokenizer = Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(source)))
    assert tokenizer.fewest_tokens("x" * 1000) == 0


def test_a_long_text_has_the_tokens_of_its_encoding_and_leaves_other_threads_running():
    text = "def f(日, é): 😀<think>\n" * 6_000
    ticks, done = 0, threading.Event()
    found = []
    thread = threading.Thread(target=lambda: (found.extend(TOKENIZER.encode(text)), done.set()))
    thread.start()
    while not done.wait(0.001):
        ticks += 1
    thread.join()
    assert found == BACKEND.encode(text, add_special_tokens=False).ids
    assert ticks > 5


def test_special_tokens_are_left_out_on_demand_and_role_tags_are_not():
    ids = TOKENIZER.encode("a<think>b〈|EOS|〉c")
    assert TOKENIZER.decode(ids) == "a<think>bc"
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == "a<think>b〈|EOS|〉c"


def test_encoding_adds_nothing_and_spelled_special_tokens_become_their_ids():
    assert TOKENIZER.encode("") == []
    assert TOKENIZER.encode("〈|EOS|〉") == [TOKENIZER.token_to_id("〈|EOS|〉")]


def test_limits_of_the_training_run_in_the_file_do_not_cut_or_pad():
    backend = tokenizers.Tokenizer.from_str(byte_level_json())
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    assert len(Tokenizer(backend).encode("x = 1\n" * 10)) > 4
    assert len(Tokenizer(backend).encode("x")) == 1


def test_an_unpaired_surrogate_is_refused_by_position():
    with pytest.raises(RequestError, match=r"unpaired surrogate.*character 2"):
        TOKENIZER.encode("ab\ud800")


def test_an_added_token_outside_ascii_decodes_to_itself():
    backend = tokenizers.Tokenizer.from_str(byte_level_json())
    backend.add_tokens(["é"])  # the package's own decoder takes this for the byte E9
    tokenizer = Tokenizer(backend)
    assert tokenizer.decode(tokenizer.encode("café!")) == "café!"


def test_token_text_shows_partial_bytes_as_replacement():
    ids = TOKENIZER.encode("🦊")
    assert b"".join(TOKENIZER.token_bytes(i) for i in ids) == "🦊".encode()
    assert "\ufffd" in TOKENIZER.token_text(ids[0])
    assert TOKENIZER.token_bytes(10_000) == b""


def test_pushing_takes_time_in_proportion_to_the_new_ids():
    ids = TOKENIZER.encode("x = 1\n" * 4000)
    detokenizer = IncrementalDetokenizer(TOKENIZER)

    def seconds(part):
        start = time.process_time()
        for i in part:
            detokenizer.push([i])
        return time.process_time() - start

    tenth = len(ids) // 10
    first = min(seconds(ids[:tenth]) for _ in range(3))
    for i in ids:
        detokenizer.push([i])
    assert min(seconds(ids[:tenth]) for _ in range(3)) < 5 * first + 0.01


def test_a_tokenizer_that_is_not_byte_level_streams_what_it_decodes():
    pieces = ["<unk>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "▁a", "b", "▁the", "日"]
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab={p: i for i, p in enumerate(pieces)}, merges=[], byte_fallback=True, unk_token="<unk>"
        )
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = Tokenizer(backend)
    assert not tokenizer.is_byte_level
    ids = [
        tokenizer.token_to_id(p)
        for p in ["▁the", "▁a", "b", *(f"<0x{b:02X}>" for b in "😀".encode()), "日", "b"]
    ]
    assert tokenizer.decode(ids) == "the ab😀日b"
    detokenizer = IncrementalDetokenizer(tokenizer)
    pieces = [detokenizer.push([i]) for i in ids]
    assert "".join(pieces) + detokenizer.flush() == "the ab😀日b"
    assert not any("\ufffd" in piece for piece in pieces)


def test_stop_ids_come_from_every_place_and_the_assistant_end(tmp_path):
    write_tokenizer(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 5}))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": [2, 5]}))
    tokenizer = Tokenizer.from_dir(tmp_path)
    assert tokenizer.eos_token_ids == (5, 2, tokenizer.token_to_id("</assistant>"))


@pytest.mark.parametrize("value", [320, 10**6, "2", True, -1, [2, None]])
def test_a_stop_id_that_is_no_token_is_refused(tmp_path, value):
    write_tokenizer(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(CheckpointError, match=r"generation_config\.json.*eos_token_id"):
        Tokenizer.from_dir(tmp_path)


def test_a_missing_or_damaged_tokenizer_names_the_file(tmp_path):
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: no such file"):
        Tokenizer.from_dir(tmp_path)
    (tmp_path / "tokenizer.json").write_text(byte_level_json()[:500])
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: not a tokenizer"):
        Tokenizer.from_dir(tmp_path)
