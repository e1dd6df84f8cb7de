"""A tiny random Laguna, drafters for it that follow a script, and engines over both."""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tokenizers
import torch

from lean_laguna.core.config import EngineConfig
from lean_laguna.core.drafter_config import DFlashConfig
from lean_laguna.core.dspark_config import DSparkHeads
from lean_laguna.core.model_config import LagunaConfig
from lean_laguna.core.types import RequestOutput, SamplingParams
from lean_laguna.engine.llm_engine import LLMEngine
from lean_laguna.engine.sequence import RequestState
from lean_laguna.models.dflash import DFlashDrafter
from lean_laguna.models.dspark import DSparkDrafter
from lean_laguna.models.laguna import LagunaForCausalLM
from lean_laguna.models.tokenizer import Tokenizer
from lean_laguna.spec.dspark_proposer import DSparkProposer
from lean_laguna.spec.proposer import DFlashProposer, DraftRequest, Proposer
from support.tokenizers import byte_level_json

VOCAB = 320
EOS = 2
WINDOW = 8
MAX_POSITIONS = 256


@functools.cache
def tiny_tokenizer() -> Tokenizer:
    """Byte-level, 320 tokens; token 2 ends a sequence."""
    return Tokenizer(tokenizers.Tokenizer.from_str(byte_level_json(VOCAB)), (EOS,))


@functools.cache
def tiny_config() -> LagunaConfig:
    """Return a shape with every feature: F S S F, window 8, 4 and 6 heads, 8 experts top-2 plus shared."""
    return LagunaConfig.from_dict(
        {
            "model_type": "laguna",
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "num_hidden_layers": 4,
            "num_attention_heads_per_layer": [4, 6, 6, 4],
            "num_key_value_heads": 2,
            "head_dim": 8,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
            "sliding_window": WINDOW,
            "intermediate_size": 48,
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
            "moe_routed_scaling_factor": 2.5,
            "gating": "per-head",
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": MAX_POSITIONS,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 500000.0,
                    "partial_rotary_factor": 0.5,
                    "factor": 4.0,
                    "original_max_position_embeddings": 64,
                    "beta_fast": 32.0,
                    "beta_slow": 1.0,
                    "attention_factor": 1.1386294361119891,
                },
                "sliding_attention": {
                    "rope_type": "default",
                    "rope_theta": 10000.0,
                    "partial_rotary_factor": 1.0,
                },
            },
            "eos_token_id": EOS,
        },
        "tiny",
    )


@functools.cache
def tiny_target() -> LagunaForCausalLM:
    """Return a random target whose text wanders; never changed by tests."""
    target = LagunaForCausalLM(tiny_config())
    target.reset_parameters(std=0.12, generator=torch.Generator().manual_seed(1))
    return target.eval()


@functools.cache
def tiny_drafter(max_position_embeddings: int = MAX_POSITIONS, layers: str = "SF") -> DFlashDrafter:
    """Return a random DFlash drafter with a block of 16 for the tiny target."""
    names = {"S": "sliding_attention", "F": "full_attention"}
    config = DFlashConfig.from_dict(
        {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "hidden_size": 32,
            "num_hidden_layers": len(layers),
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "intermediate_size": 48,
            "layer_types": [names[kind] for kind in layers],
            "sliding_window": WINDOW,
            "use_sliding_window": True,
            "vocab_size": VOCAB,
            "max_position_embeddings": max_position_embeddings,
            "num_target_layers": 4,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "block_size": 16,
            "dflash_config": {"target_layer_ids": [0, 2, 3], "mask_token_id": 5},
        },
        "tiny drafter",
    )
    drafter = DFlashDrafter(config)
    drafter.init_weights(std=0.12, generator=torch.Generator().manual_seed(2))
    return drafter.eval()


@functools.cache
def tiny_dspark(sample_from_anchor: bool = False) -> DSparkDrafter:
    """Return that drafter with DSpark's heads, at random, so that drafts depend on those before them."""
    base = tiny_drafter()
    heads = DSparkHeads(8, greedy_temperatures=(1.0, 2.0), sampled_temperatures=(0.5,))
    drafter = DSparkDrafter(
        dataclasses.replace(base.config, dspark=heads, sample_from_anchor=sample_from_anchor)
    )
    drafter.init_weights(std=0.12, generator=torch.Generator().manual_seed(2))
    generator = torch.Generator().manual_seed(3)
    assert drafter.confidence_weight is not None
    for head in (drafter.markov_w1, drafter.markov_w2, drafter.confidence_weight):
        torch.nn.init.normal_(head, std=0.7, generator=generator)
    return drafter.requires_grad_(False).eval()


class ScriptedProposer:
    """Drafts from known outputs, by the request's seed; without a context of its own.

    Args:
        scripts: Seed to the output that plain decoding gives.
        change: From (true token, its position) to the draft token.
        max_draft_tokens: Longest draft.
        max_position: Nothing is drafted for this position and beyond.
    """

    target_layer_ids: tuple[int, ...] = ()

    def __init__(
        self,
        scripts: Mapping[int, Sequence[int]],
        change: Callable[[int, int], int] = lambda token, position: token,
        *,
        max_draft_tokens: int = 15,
        max_position: int = 10**9,
    ):
        self.scripts, self.change = scripts, change
        self.max_draft_tokens, self.max_position = max_draft_tokens, max_position
        self.asked: list[int] = []

    def kv_groups(self):
        return ()

    def append_context(self, aux_hidden_states, batch, kv_cache):
        raise AssertionError("no taps were asked for")

    def propose(self, requests: Sequence[DraftRequest], kv_cache, noise) -> list[list[int]]:
        drafts = []
        for wanted in requests:
            self.asked.append(wanted.num_draft_tokens)
            request = wanted.request
            start, first = len(request.output_token_ids), request.next_position
            room = min(wanted.num_draft_tokens, max(0, self.max_position - first))
            ahead = self.scripts.get(request.seed, ())[start : start + room]
            drafts.append([self.change(token, first + i) for i, token in enumerate(ahead)])
        return drafts


def oracle(scripts: Mapping[int, Sequence[int]]) -> ScriptedProposer:
    """Draft what plain decoding emits."""
    return ScriptedProposer(scripts)


def never(scripts: Mapping[int, Sequence[int]]) -> ScriptedProposer:
    """Draft the token after the right one, always wrong."""
    return ScriptedProposer(scripts, lambda token, position: (token + 1) % VOCAB)


def mixed(scripts: Mapping[int, Sequence[int]]) -> ScriptedProposer:
    """Draft right half the time."""
    return ScriptedProposer(
        scripts, lambda token, position: token if zlib.crc32(b"%d" % position) % 2 else (token + 7) % VOCAB
    )


def short(scripts: Mapping[int, Sequence[int]]) -> ScriptedProposer:
    """Draft right, up to a small position limit."""
    return ScriptedProposer(scripts, max_position=30)


SCRIPTED = {"oracle": oracle, "never": never, "mixed": mixed, "short": short}


def dflash(scripts: Mapping[int, Sequence[int]] | None = None) -> DFlashProposer:
    """Draft with the random DFlash drafter."""
    return DFlashProposer(tiny_drafter(), tiny_target())


def dspark(scripts: Mapping[int, Sequence[int]] | None = None) -> DSparkProposer:
    """Draft with the random DSpark drafter, laid out as DFlash's."""
    return DSparkProposer(tiny_dspark(), tiny_target())


def dspark_shifted(scripts: Mapping[int, Sequence[int]] | None = None) -> DSparkProposer:
    """Draft with the random DSpark drafter whose anchor predicts, too."""
    return DSparkProposer(tiny_dspark(True), tiny_target())


PROPOSERS: dict[str, Callable[[Mapping[int, Sequence[int]]], Proposer]] = {
    **SCRIPTED,
    "dflash": dflash,
    "dspark": dspark,
    "dspark_shifted": dspark_shifted,
}


def make_engine(
    proposer: Proposer | None = None, num_speculative_tokens: Any = None, **options: Any
) -> LLMEngine:
    """Return an engine over the tiny target; chunks of 8, pages of 4."""
    config = EngineConfig(
        **{"prefill_chunk_size": 8, "kv_block_size": 4, "max_num_seqs": 8, "seed": 0, **options}
    )
    return LLMEngine(
        tiny_target(), tiny_tokenizer(), proposer, config, num_speculative_tokens=num_speculative_tokens
    )


def run_all(engine: LLMEngine) -> None:
    """Step until nothing is left."""
    for _ in range(20_000):
        if not engine.has_unfinished:
            return
        engine.step()
    raise AssertionError("the engine does not come to an end")


def complete(
    engine: LLMEngine, prompt: Sequence[int], params: SamplingParams, **kwargs: Any
) -> RequestOutput:
    """Run one request alone."""
    state: RequestState = engine.add_request(prompt, params, **kwargs)
    run_all(engine)
    return state.snapshot()


@functools.cache
def _plain(prompt: tuple[int, ...], params: SamplingParams) -> RequestOutput:
    return complete(make_engine(enable_prefix_caching=False), prompt, params)


def plain(prompt: Sequence[int], params: SamplingParams) -> RequestOutput:
    """Return what a plain engine gives: one request, no drafter, no prefix cache."""
    hashable = dataclasses.replace(
        params,
        stop=tuple(params.stop),
        stop_token_ids=tuple(params.stop_token_ids),
        bad_words=tuple(params.bad_words),
    )
    if params.logit_bias is not None:  # a mapping cannot be a cache's key
        return complete(make_engine(enable_prefix_caching=False), prompt, params)
    return _plain(tuple(prompt), hashable)


def scripts_of(*outputs: RequestOutput) -> dict[int, Sequence[int]]:
    """Return what each completion said, by its seed, for scripted drafters."""
    return {c.seed: c.token_ids for output in outputs for c in output.outputs if c.seed is not None}


def outcome(output: RequestOutput) -> list[tuple[Any, ...]]:
    """Return everything that must not depend on speculation, batching, chunks or caching."""
    return [
        (
            completion.token_ids,
            completion.text,
            completion.logprobs,
            completion.cumulative_logprob,
            completion.finish_reason,
            completion.stop_reason,
            completion.seed,
        )
        for completion in output.outputs
    ] + [(output.prompt_logprobs,)]


def assert_nothing_held(engine: LLMEngine) -> None:
    """Every KV block is free once the prefix cache is emptied."""
    assert not engine.has_unfinished
    scheduler = engine.scheduler
    assert not scheduler.running
    assert not scheduler.waiting
    assert all(pool.num_in_use == 0 for pool in scheduler.pools)
    engine.reset_prefix_cache()
    assert all(pool.num_available == pool.capacity and pool.num_cached_only == 0 for pool in scheduler.pools)


def tokens_of(seed: int, length: int) -> list[int]:
    """Return a prompt of ordinary tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(20, VOCAB - 10, (length,), generator=generator).tolist()
