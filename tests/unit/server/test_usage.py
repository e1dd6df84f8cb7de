from lean_laguna.core.types import CompletionOutput, RequestOutput, SpeculationStats
from lean_laguna.server.usage import speculation_metrics, usage
from lean_laguna.spec.statistics import SpeculationCounter


def output(*stats):
    completions = tuple(CompletionOutput(i, "", (), speculation=s) for i, s in enumerate(stats))
    return RequestOutput("r", None, (1,), completions, finished=True)


def test_numbers_of_speculation_have_vllms_shape_and_agree():
    # Four steps of three drafts: 3, 1, 0 and 1 accepted; and one without.
    counter = SpeculationCounter(keeps_steps=True)
    for drafted, accepted in ((3, 3), (3, 1), (0, 0), (3, 0), (3, 1)):
        counter.record(drafted, accepted)
    stats = counter.stats()
    numbers = speculation_metrics([output(stats)], "summary")["speculative_decoding"]
    assert numbers == {
        "mean_acceptance_length": 1 + 5 / 4,
        "draft_acceptance_rate": 5 / 12,
        "acceptance_histogram": [1, 2, 0, 1],
        "num_spec_steps": 4,
        "num_accepted_draft_tokens": 5,
        "num_draft_tokens": 12,
        "num_spec_tokens": 3,
    }
    detailed = speculation_metrics([output(stats)], "detailed")["speculative_decoding"]
    steps = {"per_step_accepted": [3, 1, 0, 1], "per_step_drafted": [3, 3, 3, 3]}
    assert detailed == numbers | steps
    assert speculation_metrics([output(stats)], "none") is None
    counter.record_cut(4)
    with_cut = speculation_metrics([output(counter.stats())], "summary")["speculative_decoding"]
    assert with_cut == numbers | {"num_cut_draft_tokens": 4}


def test_there_are_none_for_several_completions_or_without_a_drafter():
    stats = SpeculationStats(1, 1, 1, (1,), 1)
    assert speculation_metrics([output(stats, stats)], "detailed") is None
    assert speculation_metrics([output(stats), output(stats)], "summary") is None
    assert speculation_metrics([output(None)], "summary") is None
    assert speculation_metrics([], "summary") is None


def test_usage_adds_up():
    counts = usage(7, 5, 4, 2)
    assert counts["total_tokens"] == 12
    assert counts["prompt_tokens_details"] == {"cached_tokens": 4}
    assert counts["completion_tokens_details"] == {"reasoning_tokens": 2}
    assert "completion_tokens_details" not in usage(7, 5, 4, None)
