"""Which options hand a request's steps to the host, by name; all others stay on the device."""

import pytest

pytest.importorskip("triton", reason="Triton is not installed; it comes with PyTorch's CUDA builds")

from lean_laguna.core.types import SamplingParams
from lean_laguna.engine.gpu_host_steps import needs_host, samples_on_host
from support.engines import make_engine


def sequence_of(**options):
    return make_engine().add_request([30, 31], SamplingParams(max_tokens=4, **options)).sequences[0]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"temperature": 1.0}, []),
        ({"temperature": 1.0, "top_k": 64, "top_p": 0.9, "min_p": 0.1}, []),
        ({"temperature": 1.0, "top_k": 65}, ["top_k"]),
        ({"temperature": 1.0, "top_p": 0.9, "min_p": 0.1}, ["top_p", "min_p"]),
        ({"temperature": 0, "top_p": 0.9}, []),
        ({"temperature": 0, "stop": ("x",), "stop_token_ids": (5,)}, []),
        ({"temperature": 0, "min_tokens": 2}, ["min_tokens"]),
        ({"temperature": 0, "logit_bias": {40: 1.0}}, ["logit_bias"]),
        ({"temperature": 0, "presence_penalty": 0.5}, ["penalties"]),
        ({"temperature": 0, "allowed_token_ids": [40, 41]}, ["allowed_token_ids"]),
        ({"temperature": 0, "bad_words": ("abc",)}, ["bad_words"]),
    ],
)
def test_options_that_the_device_cannot_apply_are_named(options, named):
    assert samples_on_host(sequence_of(**options)) == named


def test_log_probabilities_need_the_host_but_not_its_choice():
    sequence = sequence_of(temperature=1.0, logprobs=2)
    assert needs_host(sequence) == ["logprobs"]
    assert samples_on_host(sequence) == []
