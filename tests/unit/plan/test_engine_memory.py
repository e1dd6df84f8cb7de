"""Planned memory, held against what the engine really allocates, byte by byte."""

import random

import pytest
import torch

from lean_laguna.core.config import EngineConfig
from lean_laguna.core.drafter_config import DFlashConfig
from lean_laguna.core.engine_sizes import MAX_ROWS, gpu_chunks
from lean_laguna.core.errors import ConfigError
from lean_laguna.core.model_config import LagunaConfig
from lean_laguna.engine.gpu_cache import PagedPools
from lean_laguna.engine.gpu_engine import GpuEngine
from lean_laguna.engine.gpu_prompts import most_rows
from lean_laguna.engine.gpu_weights import target_weights
from lean_laguna.engine.kv_budget import kv_cache_for, stored_groups
from lean_laguna.engine.llm_engine import LLMEngine
from lean_laguna.engine.scheduler import Scheduler, SchedulerLimits
from lean_laguna.kernels.triton.prefill_scratch import PrefillScratch
from lean_laguna.kernels.triton.step import Scratch
from lean_laguna.kernels.triton.tiles import Tiles
from lean_laguna.models.dflash import DFlashDrafter
from lean_laguna.models.kv_cache import KVCache
from lean_laguna.models.laguna import LagunaForCausalLM
from lean_laguna.models.shapes import drafter_shape, laguna_shape
from lean_laguna.plan.engine_memory import (
    EngineLimits,
    EngineMemory,
    bytes_by_group,
    kv_groups,
    loaded_bytes,
)
from lean_laguna.plan.inventory import drafter_from_config, target_from_config
from lean_laguna.plan.schemes import stored_as
from support import drafters, targets
from support.engines import tiny_target, tiny_tokenizer

NUM_CONFIGS = 200
FULL, SLIDING = targets.FULL, targets.SLIDING


def random_case(seed):
    """Return a target's and a drafter's config (or None), limits, a context and a number of sequences."""
    pick = random.Random(seed)
    layers = pick.randint(1, 6)
    kinds = [pick.choice((FULL, SLIDING)) for _ in range(layers)]
    heads = pick.choice((1, 2, 4))
    limit = pick.choice((40, 256, 700))
    given = targets.laguna_json(
        num_hidden_layers=layers,
        layer_types=kinds,
        num_attention_heads=heads,
        num_attention_heads_per_layer=[heads * pick.choice((1, 2)) for _ in kinds],
        num_key_value_heads=heads,
        mlp_layer_types=["dense"] * layers,
        head_dim=pick.choice((8, 16)),
        sliding_window=pick.choice((1, 8, 33, 300)),
        max_position_embeddings=limit,
    )
    drafter = None
    if pick.random() < 0.6:
        count = pick.randint(1, 3)
        drafter = DFlashConfig.from_dict(
            drafters.laguna_json(
                num_hidden_layers=count,
                layer_types=[pick.choice((FULL, SLIDING))] * count,
                sliding_window=pick.choice((4, 20)),
                num_target_layers=layers,
                block_size=pick.choice((2, 6, 16)),
                dflash_config={"target_layer_ids": [layers - 1], "mask_token_id": 12, "causal": True},
            )
        )
    block = pick.choice((4, 8, 16))
    limits = EngineLimits(
        pick.choice(("float32", "bfloat16")),
        block * pick.randint(1, 6),
        block,
        pick.random() < 0.5,
        is_on_gpu=pick.random() < 0.5,
        kv_cache_dtype=pick.choice(("auto", "fp8")),
    )
    return LagunaConfig.from_dict(given), drafter, limits, pick.randint(1, limit), pick.randint(1, 5)


def allocate(config, drafter, limits, context, num_seqs, budget, cache=KVCache):
    """Allocate as an engine of these settings does; return its storages' bytes, budget and pools."""
    with torch.device("meta"):
        groups = stored_groups(LagunaForCausalLM(config).kv_groups(), limits.kv_cache_dtype)
        groups += DFlashDrafter(drafter).kv_groups() if drafter is not None else ()
    scheduler_limits = SchedulerLimits(
        num_seqs,
        limits.prefill_chunk_size,
        limits.kv_block_size,
        drafter.max_draft_tokens if drafter is not None else 0,
        GpuEngine._STEPS_AHEAD if limits.is_on_gpu else 0,
    )
    engine = EngineConfig(
        max_num_seqs=num_seqs,
        prefill_chunk_size=limits.prefill_chunk_size,
        kv_block_size=limits.kv_block_size,
        enable_prefix_caching=limits.enable_prefix_caching,
        kv_cache_memory_bytes=budget,
    )
    made, found = kv_cache_for(
        groups, engine, scheduler_limits, context, limits.torch_dtype, torch.device("cpu"), cache
    )
    used = [i for i, group in enumerate(groups) if group.num_layers]
    scheduler = Scheduler(
        scheduler_limits,
        [groups[i] for i in used],
        [found.num_blocks[i] for i in used],
        enable_prefix_caching=limits.enable_prefix_caching,
    )
    sizes = {
        group.name: sum(tensor.nbytes for layer in range(group.num_layers) for tensor in made.layer(i, layer))
        for i, group in enumerate(groups)
        if group.num_layers
    }
    return sizes, found, scheduler.pools


def test_200_random_configurations_are_allocated_as_planned_to_the_byte():
    for seed in range(NUM_CONFIGS):
        config, drafter, limits, context, num_seqs = random_case(seed)
        memory = EngineMemory(config, drafter, limits)
        planned = memory.kv(context, num_seqs)
        cache = PagedPools if limits.is_on_gpu else KVCache
        sizes, found, pools = allocate(config, drafter, limits, context, num_seqs, planned.total_bytes, cache)
        assert bytes_by_group(memory.groups, planned) == sizes, seed
        assert planned.total_bytes == sum(sizes.values()) == found.total_bytes, seed
        assert found.num_full_length_seqs == num_seqs, seed
        assert [pool.num_blocks for pool in pools] == [
            count for count, group in zip(planned.num_blocks, memory.groups, strict=True) if group.num_layers
        ], seed


@pytest.mark.parametrize("seed", range(25))
def test_the_longest_context_and_the_most_streams_are_what_the_engine_can_serve(seed):
    config, drafter, limits, context, num_seqs = random_case(seed)
    memory = EngineMemory(config, drafter, limits)
    room = memory.beside_weights(context, num_seqs) + random.Random(seed).randint(0, 3000)

    def serves(length, streams):
        budget = room - sum(memory.workspace(length, streams).values())
        try:
            found = allocate(config, drafter, limits, length, streams, budget)[1]
        except ConfigError:
            return False
        return found.num_full_length_seqs >= streams

    longest, most = memory.longest_context(num_seqs, room), memory.most_streams(context, room)
    assert longest >= context
    assert most >= num_seqs
    assert serves(longest, num_seqs)
    assert serves(context, most)
    assert longest == config.max_position_embeddings or not serves(longest + 1, num_seqs)
    assert not serves(context, most + 1)


def test_nothing_fits_into_nothing():
    memory = EngineMemory(laguna_shape("laguna-xs"), None, EngineLimits())
    assert memory.longest_context(1, 0) == memory.most_streams(1000, 0) == memory.most_streams(1, -5) == 0


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("stored", ["auto", "fp8"])
def test_a_running_engine_holds_what_was_planned(caching, stored):
    target = tiny_target()
    config = EngineConfig(
        max_model_len=100, max_num_seqs=3, enable_prefix_caching=caching, kv_cache_dtype=stored
    )
    engine = LLMEngine(target, tiny_tokenizer(), None, config)
    limits = EngineLimits("float32", enable_prefix_caching=caching, is_on_gpu=False, kv_cache_dtype=stored)
    assert engine.kv_bytes == EngineMemory(target.config, None, limits).kv(100, 3).total_bytes


@pytest.mark.parametrize("name", ["laguna-xs-2.1", "laguna-s-2.1"])
def test_groups_are_those_of_the_networks(name):
    config, drafter = laguna_shape(name), drafter_shape(name)
    with torch.device("meta"):
        expected = (*LagunaForCausalLM(config).kv_groups(), *DFlashDrafter(drafter).kv_groups())
    assert kv_groups(config, drafter) == expected


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_are_those_of_the_networks(dtype):
    limits = EngineLimits(dtype, is_on_gpu=False)
    given = targets.laguna_json()
    config, inventory = target_from_config(given, "tiny")
    with torch.device("meta"):
        target = LagunaForCausalLM(config).to(limits.torch_dtype)
        drafter = DFlashDrafter(DFlashConfig.from_dict(drafters.laguna_json())).to(limits.torch_dtype)
    assert loaded_bytes(inventory, limits) == sum(p.nbytes for p in target.parameters())
    described = drafter_from_config(drafter.config)
    assert loaded_bytes(described, limits) == sum(p.nbytes for p in drafter.parameters())


def test_quantised_weights_stay_packed_on_a_gpu_and_are_decoded_on_a_cpu():
    inventory = stored_as(laguna_shape("laguna-xs"), "nvfp4")
    on_gpu = loaded_bytes(inventory, EngineLimits("bfloat16"))
    on_cpu = loaded_bytes(inventory, EngineLimits("bfloat16", is_on_gpu=False))
    assert on_gpu == inventory.stored_bytes
    assert on_cpu == inventory.num_weights() * 2


def test_the_workspace_grows_with_rows_and_context():
    memory = EngineMemory(laguna_shape("laguna-xs"), drafter_shape("laguna-xs"), EngineLimits())
    small, large = memory.workspace(2048, 1), memory.workspace(262144, 8)
    assert all(large[part] >= small[part] for part in small)
    assert small["logits"] == 16 * 100352 * 8
    assert large["logits"] == MAX_ROWS * 100352 * 8


@pytest.mark.parametrize("chunk", [64, 8192, None])
@pytest.mark.parametrize("changes", [{}, {"num_experts_per_tok": 7}, {"intermediate_size": 700}])
def test_the_workspace_on_a_gpu_holds_the_buffers_of_its_kernels(changes, chunk):
    config = LagunaConfig.from_dict(targets.laguna_json(**changes, head_dim=16))
    target, context = targets.random_target(config), 5000 if chunk is None else 240
    weights = target_weights(target, context + 16)
    block, most, _ = gpu_chunks(chunk)
    limits = EngineLimits("float32", chunk)
    found = EngineMemory(config, None, limits).workspace(context, 1)
    scratch = PrefillScratch.allocate(weights, most_rows(most, block, context), block=block)
    chunk_bytes = sum(t.nbytes for t in (scratch.hidden, scratch.normed, scratch.room))
    assert chunk_bytes == found["a chunk of prompt"]
    tables = {id(t): t.nbytes for layer in weights.layers for t in layer.rotary}
    assert sum(tables.values()) == found["rotary tables"]
    step = Scratch.allocate(weights.layers, weights.head, Tiles())
    assert sum(t.nbytes for t in step.partial) <= found["parts of attention"]
