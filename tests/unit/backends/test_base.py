import pytest

from lean_laguna.backends.base import GenerationResult, per_prompt_params
from lean_laguna.core.types import RequestTimes, SamplingParams


def result(num_tokens, first=2.0, last=5.0):
    return GenerationResult("", tuple(range(num_tokens)), 3, "length", RequestTimes(1.0, first, last))


def test_each_phase_has_its_own_seconds():
    one = result(4)
    assert one.ttft_s == 1.0
    assert one.decode_s == 3.0
    assert one.num_decode_tokens == 3


@pytest.mark.parametrize("one", [result(1, 2.0, 2.0), result(0, None, None)])
def test_fewer_than_two_tokens_have_no_decode_phase(one):
    assert one.decode_s is None
    assert one.num_decode_tokens == 0


def test_no_token_has_no_first_token():
    assert result(0, None, None).ttft_s is None


def test_one_set_of_parameters_serves_all_prompts_and_a_wrong_count_is_refused():
    params = SamplingParams()
    assert per_prompt_params(params, 3) == [params] * 3
    assert per_prompt_params([params], 1) == [params]
    with pytest.raises(ValueError, match="1 sampling parameters for 2 prompts"):
        per_prompt_params([params], 2)
