"""A DSpark drafter on the Triton kernels: the drafts of a CPU, and the same output however they are cut."""

from types import SimpleNamespace

import pytest

pytest.importorskip("triton", reason="Triton is not installed; it comes with PyTorch's CUDA builds")

from lean_laguna.core.types import SamplingParams
from lean_laguna.engine import gpu_engine
from lean_laguna.engine.gpu_costs import RowCosts
from lean_laguna.engine.llm_engine import LLMEngine
from lean_laguna.spec.draft_schedule import StepCosts
from lean_laguna.spec.dspark_proposer import make_proposer
from support.engines import assert_nothing_held, run_all, tokens_of
from support.gpu import toy_config, toy_drafter, toy_engine, toy_target, toy_tokenizer

pytestmark = pytest.mark.interpreted

PROMPTS = [[token % 200 + 20 for token in tokens_of(i, n)] for i, n in enumerate((5, 11, 3))]


def params(temperature=0.0, max_tokens=5, **options):
    return SamplingParams(temperature=temperature, max_tokens=max_tokens, ignore_eos=True, seed=4, **options)


def drafts_on_device(engine):
    """Note the drafts of every block that one request's steps lay out."""
    found, run = [], engine.programs.run

    def noted(name, cols, **options):
        run(name, cols, **options)
        if name in ("propose", "step"):
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


SAMPLED, FILTERED = {"temperature": 0.9}, {"temperature": 0.9, "top_k": 8, "top_p": 0.9}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("dspark", {}),
        ("shifted", SAMPLED),
        ("fp8", SAMPLED),
        pytest.param("dspark", SAMPLED, marks=pytest.mark.slow),
        pytest.param("dspark", FILTERED, marks=pytest.mark.slow),
        pytest.param("shifted", FILTERED, marks=pytest.mark.slow),
    ],
)
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
        found.append((state.sequences[0].completion.token_ids, [block for block in drafts if block]))
    (tokens, drafts), (expected_tokens, expected) = found
    assert tokens == expected_tokens
    assert drafts[: len(expected)] == expected
    assert len(expected) >= 2


def said(engine, **options):
    """What three requests say, two of them sampled, and how many drafts each had cut."""
    states = [
        engine.add_request(prompt, params(0.9 * (i % 2), 3 + i, **options))
        for i, prompt in enumerate(PROMPTS)
    ]
    run_all(engine)
    assert_nothing_held(engine)
    completions = [state.sequences[0].completion for state in states]
    return [c.token_ids for c in completions], engine.stats().speculation


def steep(engine):
    """Have every further row cost as much as a step."""
    engine._prices.costs = RowCosts((16,), [[float(rows) for rows in range(17)]])

    def choose(batch, context_len, *, may_schedule):
        engine.controller.schedule.costs = StepCosts([1.0] * 8, 0.5)
        return 5

    engine.controller.choose = choose
    return engine


@pytest.fixture(scope="module")
def expected():
    return said(toy_engine())[0]


def test_drafts_cut_by_confidence_change_nothing(expected):
    found, counts = said(steep(toy_engine("auto", kind="dspark")))
    assert found == expected
    assert counts.num_cut_draft_tokens > 0
    assert counts.num_draft_tokens > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dspark", "shifted"])
def test_drafts_all_sent_change_nothing(expected, kind):
    found, counts = said(toy_engine(4, kind=kind))
    assert found == expected
    assert counts.num_cut_draft_tokens == 0


@pytest.mark.slow
def test_steps_that_the_host_decides_are_cut_too():
    plain, _ = said(toy_engine(), logprobs=1, repetition_penalty=1.3)
    found, counts = said(steep(toy_engine("auto", kind="dspark")), logprobs=1, repetition_penalty=1.3)
    assert found == plain
    assert counts.num_cut_draft_tokens > 0


def test_steps_that_teach_are_chosen_before_they_come(monkeypatch):
    """A wait of the step itself is long where it sends much: who learns from such steps expects too much."""
    engine, asked, heard = toy_engine("auto", kind="dspark"), [], []
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(gpu_engine, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    wait_for, hears = engine._lanes.wait_for, engine._draft_lengths.hears
    is_enough = engine._spare_time.is_enough

    def waiting(launched):
        clock.now += 1e-3
        wait_for(launched)

    def enough(waited_s):
        asked.append(waited_s)
        return is_enough(waited_s)

    def hearing(sequences, counts, *, is_idle):
        heard.append(is_idle)
        return hears(sequences, counts, is_idle=is_idle)

    monkeypatch.setattr(engine._lanes, "wait_for", waiting)
    monkeypatch.setattr(engine._spare_time, "is_enough", enough)
    monkeypatch.setattr(engine._draft_lengths, "hears", hearing)
    for prompt in PROMPTS[:2]:
        engine.add_request(prompt, params(max_tokens=14))
        run_all(engine)
    assert asked == pytest.approx([1e-3] * len(heard))
    assert any(heard)
    assert not any(heard[:4])  # nobody knew yet how long a wait is
