from pathlib import Path

import lean_laguna
from lean_laguna.models.tokenizer import Tokenizer
from lean_laguna.server.stream import Delta
from lean_laguna.server.token_texts import TokenTexts

NANO = Path(lean_laguna.__file__).parent / "assets" / "laguna-nano"


def test_texts_of_tokens_add_up_however_the_tokens_come():
    tokenizer = Tokenizer.from_dir(NANO)
    text = "naïve = '日本語 😀'\n"
    ids = tokenizer.encode(text)
    whole = TokenTexts(tokenizer, True).of(Delta(0, token_ids=ids, finish_reason="stop"))
    assert len(whole) == len(ids)
    assert "".join(whole) == text
    assert "" in whole  # the first bytes of a character say nothing yet
    one_by_one = TokenTexts(tokenizer, True)
    assert [one_by_one.of(Delta(0, token_ids=[token]))[0] for token in ids] == whole


def test_special_tokens_have_no_text_unless_asked_for():
    tokenizer = Tokenizer.from_dir(NANO)
    special = next(iter(tokenizer.special_token_ids))
    assert TokenTexts(tokenizer, True).of(Delta(0, token_ids=[special])) == [""]
    assert TokenTexts(tokenizer, False).of(Delta(0, token_ids=[special])) != [""]
    assert TokenTexts(tokenizer, True).of(Delta(0, finish_reason="stop")) == []
