import re

import pytest

from lean_laguna.cli.serve import build_parser, engine_options, run, server_config
from lean_laguna.core.errors import CheckpointError, ConfigError, RequestError


def parsed(*words):
    args = build_parser().parse_strictly(words)
    args.model = args.model or args.model_flag or "nano"
    args.synthetic, args.drafter_options = {}, {}
    return args


def test_the_defaults_are_a_local_server_without_key_cors_or_admin():
    args = parsed()
    config = server_config(args)
    assert (args.host, args.port) == ("127.0.0.1", 8000)
    assert (config.api_keys, config.allowed_origins, config.enable_admin) == ((), (), False)
    assert (config.served_model_names, config.unknown_fields) == (("nano",), "refuse")


def test_vllms_flags_reach_the_engine_and_the_server():
    args = parsed(
        *("nano", "--max-model-len", "512", "--max-num-seqs", "4", "--max-num-batched-tokens", "64"),
        *("--block-size", "8", "--no-enable-prefix-caching", "--seed", "5", "--served-model-name", "a", "b"),
        *("--kv-cache-memory-bytes", "1000000", "--trust-remote-code", "--tensor-parallel-size", "1"),
        *("--default-chat-template-kwargs", '{"enable_thinking": true}', "--api-key", "k1", "k2"),
        *("--override-generation-config", '{"temperature": 0.1, "max_new_tokens": 9}'),
    )
    options = engine_options(args, "nano-dflash")
    assert options["max_model_len"] == 512
    assert (options["max_num_seqs"], options["prefill_chunk_size"], options["kv_block_size"]) == (4, 64, 8)
    assert (options["seed"], options["enable_prefix_caching"]) == (5, False)
    assert options["kv_cache_memory_bytes"] == 1_000_000
    assert options["speculative_config"] == {"model": "nano-dflash", "num_speculative_tokens": "auto"}
    config = server_config(args)
    assert (config.served_model_names, config.api_keys) == (("a", "b"), ("k1", "k2"))
    assert config.default_chat_template_kwargs == {"enable_thinking": True}
    assert config.override_generation_config == {"temperature": 0.1, "max_tokens": 9}


def test_the_key_may_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("LEAN_LAGUNA_API_KEY", "secret")
    assert server_config(parsed()).api_keys == ("secret",)
    assert server_config(parsed("--api-key", "given")).api_keys == ("given",)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--max-modellen", "5"], "did you mean '--max-model-len'"),
        (["--port", "70000"], "--port"),
        (["--default-chat-template-kwargs", "{"], "--default-chat-template-kwargs: not valid JSON"),
        (["--default-chat-template-kwargs", "[]"], "must be a JSON object"),
        (["--default-chat-template-kwargs", '{"messages": []}'], "must not set 'messages'"),
        (["--default-chat-template-kwargs", '{"self": 1}'], "must not set 'self'"),
        (["--api-key", "good", ""], "--api-key: a key must not be empty"),
        (["--override-generation-config", '{"temprature": 1}'], "did you mean 'temperature'"),
        (["--override-generation-config", '{"temperature": -1}'], "-config: temperature must be at least 0"),
        (["--tensor-parallel-size", "2"], "--tensor-parallel-size: only 1 is supported"),
        (["--gpu-memory-utilization", "0.9"], "--kv-cache-memory-bytes"),
        (["--speculative-config", '{"model": "nano-dflash", "metod": "dflash"}'], "did you mean 'method'"),
        (["nano", "--model", "nano"], "given twice"),
    ],
)
def test_mistakes_are_one_clear_line_before_anything_is_loaded(words, said):
    with pytest.raises((ConfigError, RequestError), match=re.escape(said)):
        run(build_parser().parse_strictly(words))


def test_an_unknown_model_is_refused_before_the_port_is_taken():
    with pytest.raises(CheckpointError, match="did you mean 'nano'"):
        run(build_parser().parse_strictly(["nanoo"]))
