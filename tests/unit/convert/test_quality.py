"""Perplexity, agreement and acceptance of two checkpoints."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from lean_laguna.convert.quality import compare_acceptance, compare_on_text
from lean_laguna.core.errors import DataError
from lean_laguna.models.checkpoint import load_laguna
from lean_laguna.models.tokenizer import Tokenizer
from support.checkpoints import write_tiny_drafter, write_tiny_target
from support.quantised import convert

TEXT = "the quick brown fox jumps over the lazy dog " * 4


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_target(tmp_path_factory.mktemp("target"))


def test_a_checkpoint_agrees_with_itself(target: Path) -> None:
    seen: list[tuple[int, int, str]] = []
    found = compare_on_text(target, target, TEXT, progress=lambda *said: seen.append(said))
    assert [done for done, _, _ in seen] == [0, found.num_tokens + 1]
    assert {(total, what) for _, total, what in seen} == {(seen[1][0] * 2, f"{target.name}: perplexity")}
    assert found.perplexity_before == found.perplexity_after
    assert found.greedy_agreement == 1.0


def test_perplexity_is_that_of_the_next_tokens(target: Path) -> None:
    ids = torch.tensor(Tokenizer.from_dir(target).encode(TEXT))
    model = load_laguna(target)
    logits = model.compute_logits(model.forward_dense(ids[None, :-1]).hidden_states[0])
    losses = -torch.log_softmax(logits.double(), -1)[torch.arange(len(ids) - 1), ids[1:]]
    found = compare_on_text(target, target, TEXT)
    assert found.num_tokens == len(ids) - 1
    assert found.perplexity_before == pytest.approx(math.exp(losses.mean().item()), rel=1e-5)
    assert compare_on_text(target, target, TEXT, max_tokens=9).num_tokens == 8


def test_coarser_weights_agree_less(target: Path, tmp_path: Path) -> None:
    convert(target, tmp_path / "fine", "experts+attention", "int8")
    convert(target, tmp_path / "coarse", "experts+attention", "nvfp4")
    fine, coarse = (compare_on_text(target, tmp_path / name, TEXT) for name in ("fine", "coarse"))
    assert fine.perplexity_before == coarse.perplexity_before
    assert coarse.greedy_agreement <= fine.greedy_agreement <= 1.0
    ours = [abs(math.log(q.perplexity_after / q.perplexity_before)) for q in (fine, coarse)]
    assert ours[0] < ours[1]


def test_a_text_without_a_next_token_is_refused(target: Path) -> None:
    with pytest.raises(DataError, match="expected at least 2"):
        compare_on_text(target, target, "")


def test_acceptance_is_measured_before_and_after(target: Path, tmp_path: Path) -> None:
    (tmp_path / "drafter").mkdir()
    drafter = write_tiny_drafter(tmp_path / "drafter")
    convert(drafter, tmp_path / "made", "all", "fp8-channel")
    found = compare_acceptance(
        str(target), drafter, tmp_path / "made", ["a b c"], num_speculative_tokens=3, max_tokens=12
    )
    assert found.num_prompts == 1
    for length in (found.acceptance_length_before, found.acceptance_length_after):
        assert length is not None
        assert 1 <= length <= 4
