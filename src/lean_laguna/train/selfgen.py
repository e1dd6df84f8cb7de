"""Text written by the target itself: thousands of sequences at once on one device, with a static KV cache.

Prefixes are fed through the same one-token step as the rest, so there is one path, and a CUDA graph holds it.
Not the engine: no paging, no stop conditions, and bits that depend on the batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from lean_laguna.core.errors import DataError
from lean_laguna.models.laguna import LagunaForCausalLM
from lean_laguna.models.laguna_layers import DecoderLayer
from lean_laguna.train.generated import Generated, gumbel
from lean_laguna.train.recipe import SelfgenRecipe
from lean_laguna.train.tokenizer import ASSISTANT_ID, END_THINK_ID, EOS_ID


def choose_prefixes(
    stream: Tensor, recipe: SelfgenRecipe, count: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Cut prompts out of a token stream.

    Args:
        stream: [N] int32 on the CPU.
        recipe: Lengths and shares.
        count: M.
        generator: CPU generator.

    Returns:
        tokens [M, max_prefix] int64 (valid up to each length) and lengths [M] int64.
    """
    width = recipe.max_prefix
    limit = len(stream) - width
    if limit < 1:
        raise DataError(f"{len(stream)} tokens are too few to cut prefixes of {width} from")
    starts = torch.randint(limit, (count,), generator=generator)
    lengths = torch.randint(recipe.min_prefix, width + 1, (count,), generator=generator)
    kind = torch.rand(count, generator=generator)
    begins = (stream[:limit] == EOS_ID).nonzero()[:, 0]
    if len(begins):
        chosen = begins[torch.randint(len(begins), (count,), generator=generator)]
        starts = torch.where(kind < recipe.start_share, chosen, starts)
    chat_starts, chat_lengths = _chat_prompts(stream[: limit + width], begins, width)
    if len(chat_starts):
        pick = torch.randint(len(chat_starts), (count,), generator=generator)
        is_chat = kind > 1.0 - recipe.chat_share
        starts = torch.where(is_chat, chat_starts[pick], starts)
        lengths = torch.where(is_chat, chat_lengths[pick], lengths)
    return stream[starts[:, None] + torch.arange(width)].long(), lengths


def generate_text(
    target: LagunaForCausalLM,
    stream: Tensor,
    recipe: SelfgenRecipe,
    *,
    deadline: float | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> Generated:
    """Write training text, greedy and sampled sequences mixed in every batch.

    Args:
        target: On the device to use; its weights' dtype is the dtype of the cache.
        stream: [N] int32 on the CPU, held-in tokens that prefixes are cut from.
        recipe: Counts and shares.
        deadline: ``time.monotonic()`` after which no new batch is begun.
        report: Receives one line a batch.
    """
    generator = torch.Generator().manual_seed(recipe.seed)
    torch.manual_seed(recipe.seed)
    device = target.lm_head.weight.device
    batch = min(recipe.batch, recipe.num_sequences)
    writer = _Writer(target, batch, recipe.length, report)
    wanted = recipe.num_sequences
    whole = -(-wanted // batch) * batch  # batches have one size: what is beyond the last sequence is dropped
    is_greedy = torch.rand(whole, generator=generator) < recipe.greedy_share
    tokens: list[Tensor] = []
    all_lengths: list[Tensor] = []
    began = time.monotonic()
    for start in range(0, whole, batch):
        if deadline is not None and time.monotonic() > deadline and tokens:
            report(f"self-generation stopped by the clock after {start:,} of {wanted:,} sequences")
            break
        prefixes, lengths = choose_prefixes(stream, recipe, batch, generator)
        temperatures = torch.where(is_greedy[start : start + batch], 0.0, recipe.temperature)
        tokens.append(writer.write(prefixes.to(device), lengths.to(device), temperatures.to(device)))
        all_lengths.append(lengths)
        per_second = len(tokens) * batch * recipe.length / (time.monotonic() - began)
        report(f"self-generated {min(start + batch, wanted):,} sequences, {per_second:,.0f} tok/s")
    written, lengths = torch.cat(tokens)[:wanted], torch.cat(all_lengths)[:wanted]
    return Generated(written, lengths, recipe.temperature, 0, target.config.vocab_size)


def generate_held_out(
    target: LagunaForCausalLM, stream: Tensor, recipe: SelfgenRecipe, temperature: float
) -> Generated:
    """Write evaluation text after held-out prefixes of ``max_prefix`` tokens, with reproducible noise."""
    generator = torch.Generator().manual_seed(recipe.seed + 1)
    device = target.lm_head.weight.device
    plain = SelfgenRecipe(
        min_prefix=recipe.max_prefix, max_prefix=recipe.max_prefix, start_share=0.0, chat_share=0.0
    )
    prefixes, lengths = choose_prefixes(stream, plain, recipe.eval_sequences, generator)
    empty = torch.empty(recipe.eval_sequences, recipe.length, dtype=torch.int32, device=device)
    seeded = Generated(empty, lengths, temperature, recipe.seed + 1, target.config.vocab_size)
    writer = _Writer(target, recipe.eval_sequences, recipe.length, lambda line: None, graph=False)
    temperatures = torch.full((recipe.eval_sequences,), temperature, device=device)
    noise = seeded.noise(0, recipe.eval_sequences) if temperature > 0 else None
    tokens = writer.write(prefixes.to(device), lengths.to(device), temperatures, noise)
    return Generated(tokens, lengths, temperature, seeded.noise_seed, seeded.vocab_size)


class _Writer:
    """Static buffers and the one-token step; on a GPU the step is a CUDA graph where that can be captured."""

    def __init__(
        self,
        target: LagunaForCausalLM,
        batch: int,
        length: int,
        report: Callable[[str], None],
        graph: bool = True,
    ) -> None:
        config = target.config
        self._target, self._length = target, length
        weight = target.lm_head.weight
        device = weight.device
        shape = (config.num_hidden_layers, 2, batch, config.num_key_value_heads, length, config.head_dim)
        is_gpu = device.type == "cuda"
        self._cache = torch.zeros(shape, device=device, dtype=torch.bfloat16 if is_gpu else weight.dtype)
        self._tokens = torch.zeros(batch, length, dtype=torch.int64, device=device)
        self._prefix_lengths = torch.ones(batch, dtype=torch.int64, device=device)
        self._temperatures = torch.zeros(batch, device=device)
        self._position = torch.zeros(1, dtype=torch.int64, device=device)
        self._graph: torch.cuda.CUDAGraph | None = None
        if graph and is_gpu:
            self._graph = self._capture(report)

    @torch.no_grad()
    def write(
        self, prefixes: Tensor, lengths: Tensor, temperatures: Tensor, noise: Tensor | None = None
    ) -> Tensor:
        """Continue prefixes [B, W] of the given lengths; returns [B, S] int32."""
        self._tokens.zero_()
        self._tokens[:, : prefixes.shape[1]] = prefixes
        self._prefix_lengths.copy_(lengths)
        self._temperatures.copy_(temperatures)
        for position in range(self._length - 1):
            self._position.fill_(position)
            if self._graph is not None and noise is None:
                self._graph.replay()
            else:
                self._step(None if noise is None else noise[:, position + 1])
        return self._tokens.int()

    def _step(self, noise: Tensor | None) -> None:
        """Feed the token at the current position; write the next one unless it belongs to the prefix."""
        position, tokens = self._position, self._tokens
        logits = _next_logits(self._target, tokens.index_select(1, position), position, self._cache)
        if noise is None:
            noise = gumbel(torch.rand_like(logits))
        sampled = (logits + self._temperatures[:, None] * noise).argmax(-1, keepdim=True)
        following = position + 1
        given = tokens.index_select(1, following)
        tokens.index_copy_(
            1, following, torch.where(following < self._prefix_lengths[:, None], given, sampled)
        )

    def _capture(self, report: Callable[[str], None]) -> torch.cuda.CUDAGraph | None:
        try:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side), torch.no_grad():
                for _ in range(2):
                    self._step(None)
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.no_grad(), torch.cuda.graph(graph):
                self._step(None)
        except Exception as error:  # whatever capture raises, the eager step does the same
            torch.cuda.synchronize()
            reason = f"{type(error).__name__}: {str(error)[:120]}"
            report(f"self-generation: eager, because the CUDA graph failed: {reason}")
            return None
        report("self-generation: CUDA graph")
        return graph


def _next_logits(target: LagunaForCausalLM, ids: Tensor, position: Tensor, cache: Tensor) -> Tensor:
    """Run one token of every sequence, writing its keys and values.

    Args:
        target: The target.
        ids: [B, 1] int64.
        position: [1] int64, the same for all.
        cache: [L, 2, B, J, S, P].

    Returns:
        [B, V] float32.
    """
    config = target.config
    places = position.expand_as(ids)
    turns = {kind: target.rotary[kind].compute(places) for kind in set(config.layer_types)}
    keys = torch.arange(cache.shape[4], device=ids.device)
    past = keys <= position
    near = past & (keys > position - config.sliding_window)
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=ids.is_cuda, cache_enabled=False):
        residual = target.embed(ids)
        for i, (layer, kind) in enumerate(zip(target.model.layers, config.layer_types, strict=True)):
            seen = past if kind == "full_attention" else near

            def attend(q: Tensor, k: Tensor, v: Tensor, kv: Tensor = cache[i], seen: Tensor = seen) -> Tensor:
                return _attend_cached(q, k, v, kv, position, seen)

            residual, _ = cast(DecoderLayer, layer).dense(residual, *turns[kind], attend)
        hidden = F.rms_norm(
            residual.float(), (config.hidden_size,), target.model.norm.weight.float(), config.rms_norm_eps
        )
        return F.linear(hidden[:, 0], target.lm_head.weight).float()


def _attend_cached(q: Tensor, k: Tensor, v: Tensor, kv: Tensor, position: Tensor, seen: Tensor) -> Tensor:
    """Write k and v [B, J, 1, P] at the position of kv [2, B, J, S, P], then attend from q [B, H, 1, P]."""
    batch, heads, _, size = q.shape
    kv[0].index_copy_(2, position, k.to(kv.dtype))
    kv[1].index_copy_(2, position, v.to(kv.dtype))
    grouped = q.reshape(batch, k.shape[1], -1, size).to(kv.dtype)
    scores = (grouped @ kv[0].transpose(-1, -2)).float() * size**-0.5
    weights = torch.softmax(scores.masked_fill(~seen, float("-inf")), dim=-1)
    return (weights.to(kv.dtype) @ kv[1]).view(batch, heads, 1, size).to(q.dtype)


def _chat_prompts(stream: Tensor, begins: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Find prompts that end where an answer begins: starts and lengths of those within ``width`` tokens."""
    is_answer = (stream[:-1] == ASSISTANT_ID) & (stream[1:] == END_THINK_ID)
    ends = is_answer.nonzero()[:, 0] + 2
    if not len(ends) or not len(begins):
        return begins[:0], begins[:0]
    at = torch.searchsorted(begins, ends) - 1
    ends, at = ends[at >= 0], at[at >= 0]
    starts = begins[at]
    fits = ends - starts <= width
    return starts[fits], (ends - starts)[fits]
