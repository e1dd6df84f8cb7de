import pytest

from lean_laguna.backends import local
from lean_laguna.backends.local import LocalBackend
from lean_laguna.core.config import SpeculativeConfig
from lean_laguna.core.errors import ConfigError, RequestError
from lean_laguna.core.types import SamplingParams
from lean_laguna.engine.llm import LLM
from support.engines import dflash, make_engine

PARAMS = SamplingParams(temperature=0, max_tokens=12)


@pytest.fixture(autouse=True)
def no_hashing(monkeypatch):
    monkeypatch.setattr(local, "resolve_model", lambda name: name)
    monkeypatch.setattr(local, "checkpoint_hash", lambda folder: "f" * 64)


@pytest.fixture
def drafting():
    options = {"speculative": SpeculativeConfig("nano-dflash", num_speculative_tokens=7)}
    return LocalBackend(LLM.from_engine(make_engine(dflash(), enable_prefix_caching=False, **options)))


def test_a_backend_says_what_the_engine_says(drafting):
    (result,) = drafting.generate(["def f(x):"], PARAMS)
    expected = drafting.llm.generate(["def f(x):"], PARAMS)[0].outputs[0]
    assert (result.text, result.token_ids, result.finish_reason) == (
        expected.text,
        expected.token_ids,
        "length",
    )
    assert result.num_prompt_tokens == len(drafting.llm.tokenizer.encode("def f(x):"))


def test_the_arrival_of_each_run_of_tokens_is_seen(drafting):
    (result,) = drafting.generate(["x"], PARAMS)
    assert len(result.arrivals_s) == 1 + result.speculation.num_steps
    assert list(result.arrivals_s) == sorted(result.arrivals_s)
    assert result.arrivals_s[0] == pytest.approx(result.times.first_token_s, abs=0.05)
    assert result.arrivals_s[-1] == pytest.approx(result.times.last_token_s, abs=0.05)


def test_several_prompts_are_in_flight_together_and_come_back_in_order(drafting):
    prompts = ["a", "bcd", [30, 31]]
    seen = []
    results = drafting.generate(prompts, PARAMS, lambda done, total: seen.append((done, total)))
    assert [r.num_prompt_tokens for r in results] == [1, 3, 2]
    assert [r.token_ids for r in results] == [drafting.generate([p], PARAMS)[0].token_ids for p in prompts]
    assert seen[-1] == (3, 3)


def test_the_baseline_has_the_same_weights_and_no_drafter(drafting):
    baseline = drafting.without_drafter()
    assert baseline.llm.engine.target is drafting.llm.engine.target
    assert baseline.llm.engine.proposer is None
    a, b = (backend.generate(["def f"], PARAMS)[0] for backend in (baseline, drafting))
    assert a.token_ids == b.token_ids
    assert a.speculation is None
    assert b.speculation.num_drafts > 0
    assert "drafter" not in baseline.info()


def test_draft_lengths_share_an_engine(drafting):
    for length in (0, 1, 15):
        backend = drafting.with_draft_length(length)
        assert backend.llm is drafting.llm
        (result,) = backend.generate(["def f"], PARAMS)
        assert (result.speculation is None) == (length == 0)
        if length:
            assert result.speculation.num_draft_tokens <= length * result.speculation.num_drafts
    with pytest.raises(ConfigError, match="at most 15"):
        drafting.with_draft_length(16)


def test_the_facts_name_both_models_and_their_memory(drafting):
    info = drafting.info()
    assert info["model"]["sha256"] == "f" * 64
    assert info["drafter"]["name"] == "nano-dflash"
    assert info["num_speculative_tokens"] == 7
    assert set(info["memory"]) == {"target_weights", "kv_cache", "drafter_weights"}
    assert all(v > 0 for v in info["memory"].values())
    assert (info["device"], info["dtype"]) == ("cpu", "float32")


def test_more_than_one_completion_is_refused(drafting):
    with pytest.raises(RequestError, match="n must be 1"):
        drafting.generate(["x"], SamplingParams(n=2, temperature=1))
