"""Source 004's run in small: a DFlash start laid out shifted learns to look one token further."""

import json
from dataclasses import replace

import pytest
import torch

from lean_laguna.models.catalog import resolve_model
from lean_laguna.models.checkpoint import load_laguna
from lean_laguna.train.document_stages import run_responses, split_documents
from lean_laguna.train.documents import pack, read_documents
from lean_laguna.train.drafter import train_drafter
from lean_laguna.train.drafter_eval import evaluate_documents
from lean_laguna.train.drafter_start import build_drafter
from lean_laguna.train.recipe import DrafterRecipe, load_recipe
from lean_laguna.train.recipe_files import find_recipe
from lean_laguna.train.responses import ResponseOptions
from lean_laguna.train.text_source import PackedSource

STEPS = 16


@pytest.mark.slow
def test_acceptance_on_held_out_answers_rises(tmp_path):
    prompts = find_recipe("tiny/dspark").with_name("prompts.jsonl").read_text().splitlines()[:16]
    (tmp_path / "prompts.jsonl").write_text("\n".join(prompts) + "\n")
    answers = tmp_path / "answers.jsonl"
    run_responses(
        tmp_path / "prompts.jsonl", resolve_model("nano"), answers, ResponseOptions(max_tokens=80),
        device="cpu", drafter="nano-dflash", is_given=False, report=lambda line: None,
    )  # fmt: skip
    target = load_laguna(resolve_model("nano"), dtype=torch.float32).requires_grad_(False)
    recipe = load_recipe(DrafterRecipe, find_recipe("tiny/dspark"))
    layout = recipe.model["dflash_config"] | {"sample_from_anchor": True}
    recipe = replace(recipe, model=recipe.model | {"dflash_config": layout}, save_every_s=1e9)
    documents = read_documents(
        answers, vocab_size=target.config.vocab_size, max_length=recipe.length,
        min_supervised=14,
    )  # fmt: skip
    kept, held_out = split_documents(documents, recipe)
    before = build_drafter(recipe, target, torch.device("cpu"), "test").requires_grad_(False)
    start = evaluate_documents(before, target, held_out, recipe.num_eval_draft_tokens)
    _, end = train_drafter(
        recipe, target=target, text=PackedSource(pack(kept, recipe.length), torch.device("cpu")),
        held_out=held_out, work=tmp_path / "work", out=tmp_path / "out", provenance={}, steps=STEPS,
        echo=lambda kind, values: None,
    )  # fmt: skip
    assert end["documents_tau_chain"] > start["documents_tau_chain"] + 0.1
    log = [json.loads(line) for line in (tmp_path / "out" / "train_log.jsonl").read_text().splitlines()]
    losses = [line["ce"] for line in log if line["event"] == "step"]
    assert losses[-1] < 0.8 * losses[0]
