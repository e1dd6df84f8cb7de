"""A DSpark drafter on the Triton kernels: the drafts of a CPU, and the same output however they are cut."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed; it comes with PyTorch's CUDA builds")

from lean_laguna.core.types import SamplingParams
from lean_laguna.engine.llm_engine import LLMEngine
from lean_laguna.spec.dspark_proposer import make_proposer
from support.engines import assert_nothing_held, run_all, tokens_of
from support.gpu import toy_config, toy_drafter, toy_engine, toy_target, toy_tokenizer

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="toy shapes are for the interpreter")

PROMPTS = [[token % 200 + 20 for token in tokens_of(i, n)] for i, n in enumerate((5, 11, 3))]


def params(temperature=0.0, max_tokens=6, **options):
    return SamplingParams(temperature=temperature, max_tokens=max_tokens, ignore_eos=True, seed=4, **options)


def drafts_on_device(engine):
    """Note the drafts of every block that one request's steps lay out."""
    found, run = [], engine.programs.run

    def noted(name, cols, **options):
        run(name, cols, **options)
        if name == "propose":
            fields = engine.programs.state.fields
            found.append(fields["input_ids"][1 : fields["num_rows"][0]].tolist())

    engine.programs.run = noted
    return found


def drafts_on_host(engine):
    found, propose = [], engine.proposer.propose

    def noted(*args):
        drafts = propose(*args)
        found.append(drafts[0])
        return drafts

    engine.proposer.propose = noted
    return found


@pytest.mark.parametrize("kind", ["dspark", "shifted"])
@pytest.mark.parametrize("options", [{}, {"temperature": 0.9}, {"temperature": 0.9, "top_k": 8, "top_p": 0.9}])
def test_drafts_are_those_of_a_cpu(kind, options):
    on_host = LLMEngine(
        toy_target(),
        toy_tokenizer(),
        make_proposer(toy_drafter(kind), toy_target()),
        toy_config(),
        num_speculative_tokens=5,
    )
    found = []
    for engine, note in ((toy_engine(5, kind=kind), drafts_on_device), (on_host, drafts_on_host)):
        drafts = note(engine)
        state = engine.add_request(PROMPTS[0], params(**options))
        run_all(engine)
        drafts = [block for block in drafts if block]
        found.append((state.sequences[0].completion.token_ids, drafts[: len(drafts)]))
    (tokens, drafts), (expected_tokens, expected) = found
    assert tokens == expected_tokens
    assert drafts[: len(expected)] == expected
    assert len(expected) > 2
