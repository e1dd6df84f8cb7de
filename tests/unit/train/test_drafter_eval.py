import pytest
import torch

from lean_laguna.train.dataset import load_tokens
from lean_laguna.train.documents import Document
from lean_laguna.train.drafter_eval import (
    document_text,
    evaluate,
    evaluate_argmax,
    evaluate_documents,
    evaluate_further,
    evaluate_kinds,
)
from lean_laguna.train.drafter_start import build_drafter
from lean_laguna.train.metrics import chain_counts
from lean_laguna.train.selfgen import generate_held_out
from lean_laguna.train.target import build_target
from support.training import drafter_recipe, selfgen_recipe, target_recipe

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def pair(data):
    target = build_target(target_recipe(init_std=0.3), CPU, "test").requires_grad_(False)
    drafter = build_drafter(drafter_recipe(), target, CPU, "test").requires_grad_(False)
    val = load_tokens(data, "val")
    recipe = selfgen_recipe()
    held_out = {
        kind: generate_held_out(target, val, recipe, temperature)
        for kind, temperature in (("greedy", 0.0), ("sampled", 0.8))
    }
    return drafter, target, held_out


def test_the_argmax_of_a_greedy_text_is_always_accepted(pair):
    _, target, held_out = pair
    found = evaluate_argmax(target, held_out["greedy"], 3)
    assert found["match"] == 1.0
    # 16 written tokens: cycles of 4 after the first, the last one cut short by the end.
    cycles, drafts = chain_counts([3] * 16, 0, 16)
    assert found["tau_chain"] == 1 + drafts / cycles


def test_the_ceiling_of_sampled_text_equals_a_walk_by_hand(pair):
    _, target, held_out = pair
    text, prefix = held_out["sampled"], 8
    cycles = drafts = 0
    for row in text.tokens.long():
        best = target.compute_logits(target.forward_dense(row[None]).hidden_states[0]).argmax(-1)
        hits = [bool(best[i] == row[i + 1]) for i in range(len(row) - 1)]
        anchor = prefix
        while (room := len(row) - anchor - 2) > 0:
            count = 0
            while count < min(3, room) and hits[anchor + count]:
                count += 1
            cycles, drafts, anchor = cycles + 1, drafts + count, anchor + count + 1
    assert evaluate_argmax(target, text, 3, rows=2)["tau_chain"] == pytest.approx(1 + drafts / cycles)


def test_every_figure_has_its_place(pair):
    drafter, target, held_out = pair
    found = evaluate_kinds(drafter, target, held_out, 2)
    assert found["greedy_tau_chain"] == evaluate(drafter, target, held_out["greedy"], 2)["tau_chain"]
    further = evaluate_further(drafter, target, held_out, 2)
    assert set(further) == {
        "greedy_tau_chain_at_3",
        "sampled_tau_chain_at_3",
        "sampled_argmax_ceiling_tau_chain",
        "sampled_argmax_ceiling_match",
    }


def test_what_follows_the_last_answer_of_a_document_changes_nothing(pair):
    drafter, target, held_out = pair
    tokens = held_out["greedy"].tokens[0]
    written = torch.arange(len(tokens)) >= 8
    answer = Document("a", tokens, written)
    rest = torch.tensor([5, 6], dtype=torch.int32)
    followed = Document(
        "b", torch.cat([tokens, rest]), torch.cat([written, torch.zeros(2, dtype=torch.bool)])
    )
    text = document_text(followed, target)
    assert torch.equal(text.tokens[0], tokens)
    assert text.prefix_lengths.tolist() == [8]
    found = [evaluate_documents(drafter, target, [document], 3) for document in (answer, followed)]
    assert found[0] == found[1]
    assert found[0]["documents_tau_chain"] >= 1.0
