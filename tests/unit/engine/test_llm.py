import itertools
import json

import pytest
import torch

import lean_laguna
from lean_laguna import LLM, SamplingParams
from lean_laguna.core.errors import CheckpointError, ConfigError, RequestError
from support.checkpoints import write_tiny_drafter, write_tiny_target
from support.engines import (
    EOS,
    PROPOSERS,
    assert_nothing_held,
    make_engine,
    outcome,
    plain,
    tokens_of,
)

PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, seed=0)
SMALL = {"prefill_chunk_size": 8, "kv_block_size": 4, "device": "cpu"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("checkpoints")
    write_tiny_target(root / "target")
    write_tiny_drafter(root / "drafter")
    recommended = {"eos_token_id": EOS, "temperature": 0.0, "max_new_tokens": 5}
    (root / "target" / "generation_config.json").write_text(json.dumps(recommended), encoding="utf-8")
    return root


@pytest.fixture(scope="module")
def llm(folders):
    return LLM(str(folders / "target"), **SMALL)


@pytest.fixture
def drafting():
    return LLM.from_engine(make_engine(PROPOSERS["dflash"]({}), 7))


def test_public_names():
    assert lean_laguna.__all__ == ["LLM", "SamplingParams"]
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = lean_laguna.nothing


def test_checkpoint_folders_give_the_same_output_with_and_without_a_drafter(folders, llm):
    prompts = ["def add(a, b):", "for i in range("]
    params = SamplingParams(temperature=0.8, max_tokens=20, ignore_eos=True, seed=3, logprobs=1)
    drafter = {"model": str(folders / "drafter"), "num_speculative_tokens": 7}
    with_drafter = LLM(str(folders / "target"), speculative_config=drafter, **SMALL)
    plainly, speculated = llm.generate(prompts, params), with_drafter.generate(prompts, params)
    assert [outcome(output) for output in speculated] == [outcome(output) for output in plainly]
    assert [output.prompt for output in plainly] == prompts
    assert plainly[0].outputs[0].speculation is None
    assert speculated[0].outputs[0].speculation.num_drafts > 0
    assert with_drafter.stats().speculation.num_drafts > 0
    assert with_drafter.config.speculative.num_speculative_tokens == 7


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_seq": 4}, "LLM: unknown key 'max_num_seq'; did you mean 'max_num_seqs'"),
        ({"speculative": None}, "did you mean 'speculative_config'"),
        ({"speculative_config": {"modle": "x"}}, "unknown key 'modle'; did you mean 'model'"),
        ({"device": "tpu"}, "device must be one of auto, cpu, cuda, found 'tpu'"),
        ({"kv_block_size": 3}, "must be a multiple of kv_block_size"),
    ],
)
def test_wrong_option_is_refused_before_anything_is_loaded(options, message):
    with pytest.raises(ConfigError, match=message):
        LLM("nowhere", **options)


def test_wrong_name_is_refused(folders):
    with pytest.raises(CheckpointError, match="unknown model 'nan'; did you mean 'nano'"):
        LLM("nan")
    with pytest.raises(CheckpointError, match="no such folder"):
        LLM(str(folders / "target"), speculative_config={"model": str(folders / "absent")}, **SMALL)


def test_prompts_come_in_any_shape(drafting):
    ids = drafting.tokenizer.encode("def add")
    shapes = ["def add", ids, {"prompt": "def add"}, {"prompt_token_ids": ids}]
    outputs = drafting.generate(shapes, PARAMS)
    assert len({output.outputs[0].token_ids for output in outputs}) == 1
    assert [output.prompt for output in outputs] == ["def add", None, "def add", None]
    for one in shapes:
        (output,) = drafting.generate(one, PARAMS)
        assert output.outputs[0].token_ids == outputs[0].outputs[0].token_ids


@pytest.mark.parametrize(
    ("prompt", "error", "message"),
    [
        (5, RequestError, "prompts must be a prompt"),
        ([1.5], RequestError, "a prompt must be a text"),
        ({}, RequestError, "a prompt must be a text"),
        ({"promt": "x"}, ConfigError, "unknown key 'promt'; did you mean 'prompt'"),
        ([["a"]], RequestError, "a prompt must be a text"),
        ("", RequestError, "the prompt is empty"),
    ],
)
def test_wrong_prompt_is_refused(drafting, prompt, error, message):
    with pytest.raises(error, match=message):
        drafting.generate(prompt, PARAMS)
    assert not drafting.engine.has_unfinished


def test_one_bad_prompt_leaves_nothing_running(drafting):
    with pytest.raises(RequestError, match="context limit"):
        drafting.generate([[30], [31], tokens_of(0, 500)], PARAMS)
    assert_nothing_held(drafting.engine)


def test_params_may_be_given_one_each(drafting):
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (2, 5)]
    outputs = drafting.generate([[30], [31]], params)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [2, 5]
    with pytest.raises(RequestError, match="2 sampling parameters for 1 prompts"):
        drafting.generate([[30]], params)


def test_outputs_stand_in_the_order_of_the_prompts(drafting):
    lengths = [9, 1, 5, 3]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lengths]
    outputs = drafting.generate([tokens_of(i, 5) for i in range(4)], params)
    assert [output.prompt_token_ids for output in outputs] == [tuple(tokens_of(i, 5)) for i in range(4)]
    assert [len(output.outputs[0].token_ids) for output in outputs] == lengths


def test_checkpoint_recommends_where_nothing_is_asked(llm):
    params = llm.default_sampling_params()
    assert (params.temperature, params.max_tokens) == (0.0, 5)
    (output,) = llm.generate("def add")
    assert len(output.outputs[0].token_ids) <= 5
    (output,) = llm.generate([tokens_of(0, llm.engine.max_model_len - 3)])
    assert len(output.outputs[0].token_ids) <= 3


def test_progress_counts_up_to_the_end(drafting):
    seen = []
    drafting.generate([[30], [31, 32]], PARAMS, on_progress=lambda *counts: seen.append(counts))
    assert seen[-1] == (2, 2, 16)
    assert seen == sorted(seen, key=lambda counts: counts[2])


def test_stream_grows_to_what_generate_returns(drafting):
    params = SamplingParams(temperature=0.9, max_tokens=20, ignore_eos=True, seed=6, logprobs=1)
    snapshots = list(drafting.stream(tokens_of(0, 11), params))
    texts = [snapshot.outputs[0].text for snapshot in snapshots]
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
    assert [snapshot.finished for snapshot in snapshots] == [False] * (len(snapshots) - 1) + [True]
    assert outcome(snapshots[-1]) == outcome(plain(tokens_of(0, 11), params))


def test_closed_stream_frees_everything(drafting):
    stream = drafting.stream([30], SamplingParams(max_tokens=100, ignore_eos=True))
    next(stream)
    stream.close()
    assert_nothing_held(drafting.engine)


def test_streams_beside_each_other_do_not_mix(drafting):
    params = [SamplingParams(temperature=0.9, max_tokens=12, ignore_eos=True, seed=i) for i in range(2)]
    streams = [drafting.stream(tokens_of(i, 9), params[i]) for i in range(2)]
    last = [None, None]
    alive = [0, 1]
    while alive:
        for i in list(alive):
            snapshot = next(streams[i], None)
            if snapshot is None:
                alive.remove(i)
            else:
                last[i] = snapshot
    assert [outcome(last[i]) for i in range(2)] == [
        outcome(plain(tokens_of(i, 9), params[i])) for i in range(2)
    ]


def test_interrupted_generate_frees_everything(drafting):
    def interrupt(*counts):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        drafting.generate([[30], [31]], PARAMS, on_progress=interrupt)
    assert_nothing_held(drafting.engine)


def test_drafts_can_be_turned_off_per_call(drafting):
    off, on = (drafting.generate([tokens_of(0, 9)], PARAMS, num_speculative_tokens=k)[0] for k in (0, 7))
    assert outcome(off) == outcome(on)
    assert off.outputs[0].speculation is None
    assert on.outputs[0].speculation.num_drafts > 0


def test_chat_renders_the_checkpoints_template(llm):
    messages = [{"role": "user", "content": "Hi"}]
    (output,) = llm.chat(messages, PARAMS)
    assert output.prompt == llm.chat_template.render(messages)
    assert "Hi" in output.prompt
    both = llm.chat([messages, [{"role": "user", "content": "Bye"}]], PARAMS)
    assert both[0].outputs[0].token_ids == output.outputs[0].token_ids
    assert "Bye" in both[1].prompt
    (thinking,) = llm.chat(messages, PARAMS, chat_template_kwargs={"enable_thinking": True})
    assert thinking.prompt != output.prompt


def test_chat_without_a_template_is_refused(drafting):
    with pytest.raises(CheckpointError):
        drafting.chat([{"role": "user", "content": "Hi"}], PARAMS)


@pytest.mark.parametrize("prompts", [5, None, [None], [[1.5]]])
def test_what_is_no_prompt_is_refused(llm, prompts):
    with pytest.raises(RequestError, match="must be a"):
        llm.generate(prompts, PARAMS)


@pytest.mark.parametrize("params", [5, {"n": 1}, [None]])
def test_what_are_no_sampling_parameters_is_refused(llm, params):
    with pytest.raises(RequestError, match="must be SamplingParams"):
        llm.generate("a", params)


@pytest.mark.parametrize("length", ["auto", -1, 1.0, True])
def test_a_draft_length_that_is_no_count_is_refused(llm, length):
    with pytest.raises(RequestError, match="num_speculative_tokens must be a whole number"):
        llm.generate("a", PARAMS, num_speculative_tokens=length)


@pytest.mark.parametrize("messages", [5, None, "hi", [5]])
def test_what_are_no_messages_is_refused(llm, messages):
    with pytest.raises(RequestError, match="must be a list"):
        llm.chat(messages, PARAMS)


def test_a_chat_that_could_never_end_a_turn_is_refused(tmp_path):
    folder = write_tiny_target(tmp_path)
    file = folder / "tokenizer.json"
    file.write_text(file.read_text().replace("</assistant>", "</somebody>"))
    llm = LLM(str(folder), **SMALL)
    with pytest.raises(CheckpointError, match="</assistant>, which is not a token"):
        llm.chat([{"role": "user", "content": "hi"}], PARAMS)


@pytest.mark.parametrize("num_bytes", [10**15, 10**30])
def test_more_kv_cache_than_the_machine_has_is_refused(folders, num_bytes):
    with pytest.raises(ConfigError, match="the KV cache needs"):
        LLM(str(folders / "target"), kv_cache_memory_bytes=num_bytes, **SMALL)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model", None),
        ("seed", "x"),
        ("seed", -1),
        ("attention_factor", float("inf")),
        ("attention_factor", 9e18),
        ("attention_factor", "x"),
        ("enable_prefix_caching", "no"),
    ],
)
def test_an_option_of_the_wrong_kind_is_named(name, value):
    with pytest.raises(ConfigError, match=f"{name} must be"):
        LLM(**{name: value})


def test_models_can_be_trained_after_serving(folders):
    speculative_config = {"model": str(folders / "drafter"), "num_speculative_tokens": 3}
    served = LLM(str(folders / "target"), speculative_config=speculative_config, **SMALL)
    served.generate([[1, 2, 3]], SamplingParams(temperature=0.0, max_tokens=6))
    served.engine.target.requires_grad_(True)
    hidden = served.engine.target.forward_dense(torch.tensor([[1, 2, 3, 4]])).hidden_states
    hidden.square().mean().backward()
    grads = [parameter.grad for parameter in served.engine.target.parameters() if parameter.grad is not None]
    assert grads
    assert all(torch.isfinite(grad).all() for grad in grads)
