import argparse
from types import SimpleNamespace

import pytest

from lean_laguna.cli import bench, generate
from lean_laguna.cli.options import drafter_name, given_sampling, sampling_params, set_threads
from lean_laguna.cli.parser import json_object
from lean_laguna.core.errors import ConfigError, RequestError
from lean_laguna.core.structured_outputs import StructuredOutputs
from lean_laguna.core.types import SamplingParams

ALL_SAMPLING = (
    "--temperature 0.5 --top-p 0.9 --top-k 5 --min-p 0.1 --repetition-penalty 1.1 --presence-penalty -1 "
    "--frequency-penalty 0.5 --min-tokens 2 --max-tokens 9 --seed 3 --logprobs 2 --prompt-logprobs 1 "
    "--logit-bias 4=-5 7=1.5 --stop a b --stop c --stop-token-ids 1 2 --bad-words x --ignore-eos "
    "--allowed-token-ids 5 6 "
    "--include-stop-str-in-output --keep-special-tokens --thinking-token-budget 12 "
    """--structured-outputs {"regex":"[0-9]+"}"""
)


def parse(words, module=generate):
    return module.build_parser().parse_strictly(words.split())


def build(*words):
    return generate.build_parser().parse_strictly(words)


def test_every_sampling_flag_reaches_its_field():
    params = sampling_params(given_sampling(parse(ALL_SAMPLING)), {})
    assert params == SamplingParams(
        temperature=0.5,
        top_p=0.9,
        top_k=5,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=-1,
        frequency_penalty=0.5,
        min_tokens=2,
        max_tokens=9,
        seed=3,
        logprobs=2,
        prompt_logprobs=1,
        logit_bias={4: -5.0, 7: 1.5},
        stop=("a", "b", "c"),
        stop_token_ids=(1, 2),
        allowed_token_ids=(5, 6),
        bad_words=("x",),
        ignore_eos=True,
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        thinking_token_budget=12,
        structured_outputs=StructuredOutputs(regex="[0-9]+"),
    )


def test_every_field_of_sampling_params_can_be_given():
    given = given_sampling(parse(ALL_SAMPLING)) | {"n": parse("-n 2").n}
    assert set(given) == set(SamplingParams.__dataclass_fields__)


def test_what_is_not_given_comes_from_the_defaults():
    params = sampling_params(given_sampling(parse("--top-k 3")), {"temperature": 0.0, "top_k": 20})
    assert (params.temperature, params.top_k) == (0.0, 3)


def test_a_value_out_of_range_is_a_request_error():
    with pytest.raises(RequestError, match="top_p must be in"):
        sampling_params(given_sampling(parse("--top-p 2")), {})


def test_auto_is_the_drafter_made_for_the_model():
    assert drafter_name(parse(""), is_required=True) == "nano-dflash"
    assert drafter_name(parse("--drafter here"), is_required=True) == "here"
    assert drafter_name(parse("--drafter none"), is_required=False) is None


def test_a_model_without_a_known_drafter_needs_one_named_where_one_is_required():
    args = parse("--model /some/folder", bench)
    assert drafter_name(args, is_required=False) is None
    with pytest.raises(ConfigError, match=r"no drafter is known for the model '/some/folder'.*--drafter"):
        drafter_name(args, is_required=True)
    with pytest.raises(ConfigError, match="--drafter none"):
        drafter_name(parse("--drafter none", bench), is_required=True)


def test_a_published_drafter_that_is_not_downloaded_is_done_without_or_asked_for(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    args = parse("--model poolside/Laguna-XS-2.1")
    assert drafter_name(args, is_required=False) is None
    assert drafter_name(args, is_required=True) == "poolside/Laguna-XS-2.1-DFlash"


def test_vllm_s_speculative_config_gives_drafter_and_length():
    args = build("--speculative-config", '{"model": "here", "method": "dflash", "num_speculative_tokens": 7}')
    assert drafter_name(args, is_required=True) == "here"
    assert args.num_speculative_tokens == 7


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--speculative-config", "{"], "not valid JSON"),
        (["--speculative-config", '{"modle": "x"}'], "unknown key 'modle'; did you mean 'model'"),
        (["--speculative-config", '{"model": "x"}', "--drafter", "y"], "leave out --drafter"),
    ],
)
def test_a_speculative_config_that_is_wrong_says_how(words, message):
    with pytest.raises(ConfigError, match=message):
        drafter_name(build(*words), is_required=True)


def test_threads_are_as_asked_for_or_as_measured(monkeypatch):
    import torch

    from lean_laguna.engine import threads

    before = torch.get_num_threads()
    tuned = []
    monkeypatch.setattr(threads, "tune_num_threads", tuned.append)
    llm = SimpleNamespace(engine="engine")
    try:
        set_threads(parse("--threads 1"), llm)
        assert (torch.get_num_threads(), tuned) == (1, [])
        set_threads(parse(""), llm)
        assert tuned == ["engine"]
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a":' * 100_000, '{"regex": "a", "regex": "b"}', "[1]", ""]
)
def test_an_option_that_is_no_json_object_says_so(text):
    with pytest.raises(argparse.ArgumentTypeError, match="must be a JSON object"):
        json_object(text)
