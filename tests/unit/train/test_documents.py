import json
import time

import pytest
import torch

from lean_laguna.core.errors import DataError
from lean_laguna.train.documents import PADDING, Document, pack, read_documents


def row(name="a", size=10, prompt=4, **changes):
    return {
        "id": name,
        "input_ids": list(range(size)),
        "loss_mask": [0] * prompt + [1] * (size - prompt),
    } | changes


def read(folder, *rows, **options):
    path = folder / "documents.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return read_documents(path, **{"vocab_size": 50, "max_length": 20, "min_supervised": 3} | options)


def test_documents_are_read_with_what_is_known_of_their_noise(tmp_path):
    first, second = read(
        tmp_path,
        row(seed=7, temperature=0.7, is_plain=True),
        row("b", seed=8, temperature=0.7, is_plain=False),
    )
    assert (first.seed, first.temperature, second.seed) == (7, 0.7, None)
    assert first.written.tolist() == [False] * 4 + [True] * 6


def test_documents_with_too_little_to_learn_from_are_left_out(tmp_path):
    assert [d.id for d in read(tmp_path, row(), row("b", size=6), row("c", size=7))] == ["a", "c"]
    with pytest.raises(DataError, match="none of its 1 documents has 3 written tokens"):
        read(tmp_path, row(size=6))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (row(prompt=10), "document 'a': its answer is empty"),
        (row(size=21), "document 'a': 21 tokens, and a row holds 20"),
        (row(input_ids=[1, 50], loss_mask=[0, 1]), "token 50 is outside the target's vocabulary"),
        (row(loss_mask=[1]), "10 'input_ids' and 1 'loss_mask'"),
        (row(input_ids="text"), "'input_ids' must be a list of whole numbers"),
        (row(input_ids=[1 << 31] * 10), "'input_ids' must be a list of whole numbers"),
        (row(loss_mask=[True] * 10), "'loss_mask' must be a list of whole numbers"),
        ({"id": "a"}, "a document needs 'input_ids' and 'loss_mask'"),
    ],
)
def test_bad_documents_are_refused_by_name(bad, message, tmp_path):
    with pytest.raises(DataError, match=message):
        read(tmp_path, row("fine"), bad)


def test_another_tokenizer_is_refused(tmp_path):
    (tmp_path / "documents.jsonl.meta.json").write_text(json.dumps({"tokenizer_sha256": "aa" * 32}))
    assert read(tmp_path, row(), tokenizer_sha256="aa" * 32)
    with pytest.raises(DataError, match="tokenised with another tokenizer"):
        read(tmp_path, row(), tokenizer_sha256="bb" * 32)


@pytest.mark.parametrize("meta", [b"", b"[]", b"{}", b"\xff"])
def test_a_damaged_note_of_the_tokenizer_is_refused(tmp_path, meta):
    (tmp_path / "documents.jsonl.meta.json").write_bytes(meta)
    with pytest.raises(DataError, match="does not say which tokenizer"):
        read(tmp_path, row(), tokenizer_sha256="aa" * 32)


def test_ids_of_documents_may_hold_line_ends_of_unicode(tmp_path):
    (tmp_path / "documents.jsonl").write_text(json.dumps(row("a\u2028b"), ensure_ascii=False) + "\n")
    (found,) = read_documents(tmp_path / "documents.jsonl", vocab_size=50, max_length=20, min_supervised=3)
    assert found.id == "a\u2028b"


def test_packing_keeps_documents_whole_and_apart():
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(3, 17, (30,), generator=generator).tolist()
    documents = [
        Document(str(i), torch.full((n,), i, dtype=torch.int32), torch.arange(n) >= 2)
        for i, n in enumerate(sizes)
    ]
    packed = pack(documents, 16)
    found = {}
    for tokens, written, owners in zip(packed.tokens, packed.written, packed.document_ids, strict=True):
        for owner in owners.unique().tolist():
            at = (owners == owner).nonzero()[:, 0]
            if owner == PADDING:
                assert not written[at].any()
                continue
            assert at.tolist() == list(range(int(at[0]), int(at[0]) + len(at)))
            (name,) = tokens[at].unique().tolist()
            found[name] = len(at)
            assert int(written[at].sum()) == len(at) - 2
    assert found == dict(enumerate(sizes))
    assert len(packed.tokens) <= -(-sum(sizes) // 16) + 3
    assert packed.sha256 == pack(documents, 16).sha256 != pack(documents[1:], 16).sha256


def test_packing_takes_no_time_for_each_document_and_row():
    """Looking through all rows for each document takes half a minute here."""
    sizes = torch.randint(3, 9, (40_000,), generator=torch.Generator().manual_seed(0)).tolist()
    written = {n: torch.ones(n, dtype=torch.bool) for n in range(3, 9)}
    documents = [
        Document(str(i), torch.full((n,), i, dtype=torch.int32), written[n]) for i, n in enumerate(sizes)
    ]
    began = time.process_time()
    pack(documents, 8)
    assert time.process_time() - began < 10
    few = documents[:200]
    rows: list[list[int]] = []
    for document in sorted(few, key=lambda d: -len(d.tokens)):
        fits = (row for row in rows if len(row) + len(document.tokens) <= 8)
        row = next(fits, None)
        if row is None:
            rows.append(row := [])
        row += document.tokens.tolist()
    assert pack(few, 8).tokens.tolist() == [row + [0] * (8 - len(row)) for row in rows]


@pytest.mark.parametrize("temperature", [10**400, -1.0, float("nan"), "hot", True])
@pytest.mark.parametrize("seed", [2**64, -1, True, "7"])
def test_noise_that_the_engine_cannot_have_made_is_unknown_noise(tmp_path, temperature, seed):
    (document,) = read(tmp_path, row(seed=seed, temperature=temperature, is_plain=True))
    assert (document.seed, document.temperature) == (None, None)
