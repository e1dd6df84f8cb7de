"""The chain-walked acceptance that the trainer finds for a DSpark drafter is the engine's, count by count.

The drafter is the shipped DFlash one with heads at random: they must matter, not help.
"""

import dataclasses

import pytest
import torch

from lean_laguna import LLM, SamplingParams
from lean_laguna.core.dspark_config import DSparkHeads
from lean_laguna.models.catalog import resolve_model
from lean_laguna.models.checkpoint import load_laguna
from lean_laguna.models.drafter_checkpoint import load_drafter, save_drafter
from lean_laguna.models.dspark import DSparkDrafter
from lean_laguna.train.drafter_eval import correct_slots
from lean_laguna.train.generated import Generated
from lean_laguna.train.metrics import accepted_lengths, chain_counts

NUM_DRAFT_TOKENS, MAX_TOKENS = 7, 48
PROMPT = "class TemperatureLog:\n    def __init__(self, path):\n        self.path = path"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    target = load_laguna(resolve_model("nano"))
    base = load_drafter(resolve_model("nano-dflash"), target.config)
    drafter = DSparkDrafter(dataclasses.replace(base.config, dspark=DSparkHeads(16)))
    generator = torch.Generator().manual_seed(0)
    drafter.init_weights(generator=generator)
    heads = {name: value for name, value in drafter.state_dict().items() if name not in base.state_dict()}
    for name in ("markov_w2", "confidence_weight"):
        torch.nn.init.normal_(heads[name], std=1.5, generator=generator)
    drafter.load_state_dict(base.state_dict() | heads)
    path = tmp_path_factory.mktemp("dspark")
    save_drafter(drafter, path)
    return path


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_tau_chain_is_the_mean_acceptance_length_as_served(folder, temperature):
    config = {"model": str(folder), "num_speculative_tokens": NUM_DRAFT_TOKENS}
    llm = LLM("nano", speculative_config=config)
    params = SamplingParams(temperature=temperature, max_tokens=MAX_TOKENS, ignore_eos=True, seed=5)
    (output,) = llm.generate([PROMPT], params)
    completion, prompt = output.outputs[0], output.prompt_token_ids
    target = load_laguna(resolve_model("nano")).requires_grad_(False)
    drafter = load_drafter(folder, target.config)
    tokens = torch.tensor([[*prompt, *completion.token_ids]], dtype=torch.int32)
    text = Generated(
        tokens, torch.tensor([len(prompt)]), temperature, 0, target.config.vocab_size, completion.seed
    )
    with torch.no_grad():
        correct, mask = correct_slots(drafter, target, text, 0, 1, NUM_DRAFT_TOKENS)
    cycles, drafts = chain_counts(accepted_lengths(correct, mask).tolist(), 0, MAX_TOKENS)
    served = completion.speculation
    assert (cycles, drafts) == (served.num_drafts, served.num_accepted_tokens)
    assert 0 < drafts < 6 * cycles
    plain = LLM("nano").generate([PROMPT], params)[0].outputs[0]
    assert plain.token_ids == completion.token_ids
