import pytest
import torch

from lean_laguna.engine.llm import LLM
from lean_laguna.server.settings import ServerConfig
from lean_laguna.server.summary import summary


@pytest.fixture(scope="module")
def llm():
    torch.set_num_threads(1)
    return LLM(
        "nano", speculative_config={"model": "nano-dflash", "num_speculative_tokens": 7}, max_model_len=256
    )


def test_one_line_says_what_is_used_and_why(llm):
    line = summary(llm, ServerConfig())
    assert "\n" not in line
    for part in (
        "cpu (no GPU found)" if not torch.cuda.is_available() else "cuda (a GPU was found)",
        "plain PyTorch kernels" if not torch.cuda.is_available() else "Triton kernels",
        "drafter nano-dflash, 7 of at most 15 tokens a step (asked for)",
        "parsers poolside_v1 (made for this architecture)",
        "thinking off by default (the checkpoint)",
        "temperature 0.8, top_p 1.0, top_k 20 (generation_config.json)",
        "context 256 tokens",
        "MiB of keys and values",
    ):
        assert part in line


def test_keys_and_values_in_fp8_are_said_to_be():
    small = LLM("nano", max_model_len=64, kv_cache_dtype="fp8")
    assert "MiB of keys and values in FP8" in summary(small, ServerConfig())


def test_what_was_asked_for_is_said_to_be(llm):
    config = ServerConfig(
        default_chat_template_kwargs={"enable_thinking": True},
        override_generation_config={"temperature": 0.0},
        reasoning_parser="none",
    )
    line = summary(llm, config)
    assert "thinking on by default (asked for)" in line
    assert "temperature 0.0" in line
    assert "as overridden" in line
    assert "parsers off (asked for)" in line
