import pytest

from lean_laguna.core.errors import RequestError
from lean_laguna.core.types import MAX_SEED
from lean_laguna.server.errors import ApiError
from lean_laguna.server.sampling import draft_length, sampling_params
from lean_laguna.server.schemas import SamplingFields, Speculative


def test_the_request_wins_over_the_defaults_and_the_endpoint_over_both():
    fields = SamplingFields(temperature=0.5, top_k=None, logit_bias={"7": 1.5})
    params = sampling_params(fields, {"temperature": 0.1, "top_k": 20, "max_tokens": 9}, max_tokens=4)
    assert (params.temperature, params.top_k, params.max_tokens, params.logit_bias) == (0.5, 20, 4, {7: 1.5})


@pytest.mark.parametrize(
    ("seed", "key"), [(None, None), (-1, None), (5, 5), (-7, MAX_SEED - 6), (MAX_SEED, MAX_SEED)]
)
def test_seeds_become_keys_of_random_streams(seed, key):
    assert sampling_params(SamplingFields(seed=seed), {}).seed == key


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"seed": 2**64}, "seed"),
        ({"seed": -(2**63) - 1}, "seed"),
        ({"logit_bias": {"²": 1.0}}, "logit_bias"),
        ({"logit_bias": {"-1": 1.0}}, "logit_bias"),
        ({"logit_bias": {"9" * 5000: 1.0}}, "logit_bias"),
        ({"min_p": 1.5}, "min_p"),
    ],
)
def test_what_is_out_of_range_is_named(fields, param):
    with pytest.raises((ApiError, RequestError)) as caught:
        sampling_params(SamplingFields(**fields), {})
    assert caught.value.param == param


def test_speculation_of_a_request():
    assert draft_length(None) is None
    assert draft_length(True) is None
    assert draft_length(False) == 0
    assert draft_length(Speculative(num_speculative_tokens=3)) == 3
