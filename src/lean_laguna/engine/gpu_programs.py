"""What a step launches, over one set of static buffers, as CUDA graphs: verify, propose, tell the host.

Nothing here depends on how many rows are live: it is read on the device. On a CPU the same bodies run
directly, under Triton's interpreter.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lean_laguna.core.engine_sizes import LONE, NARROW, WIDE, WIDTHS, rows_of_launch
from lean_laguna.engine.gpu_cache import PagedPools
from lean_laguna.engine.gpu_graphs import Program, interpreted_tiles
from lean_laguna.engine.gpu_state import ENDED, MAX_ROWS, STARTED, VERIFIED, Block, Said
from lean_laguna.engine.gpu_weights import drafter_weights, target_weights
from lean_laguna.kernels.triton.accept import Requests, accept
from lean_laguna.kernels.triton.compiling import compile_ahead
from lean_laguna.kernels.triton.draft_step import DraftStep, Features
from lean_laguna.kernels.triton.filters import Filters, choose_filtered
from lean_laguna.kernels.triton.launch import Launch, starts_early
from lean_laguna.kernels.triton.layer_cache import LayerCache, has_e4m3
from lean_laguna.kernels.triton.publish import publish
from lean_laguna.kernels.triton.rows import Rows
from lean_laguna.kernels.triton.schedule import schedule
from lean_laguna.kernels.triton.step import Caches, Inputs, LayerRunner, Scratch, TargetStep, run_layer
from lean_laguna.kernels.triton.tiles import Tiles
from lean_laguna.kernels.triton.walk import Chances, Walk
from lean_laguna.models.dflash import DRAFT_FULL_GROUP, DRAFT_SLIDING_GROUP, DFlashDrafter
from lean_laguna.models.laguna import FULL_GROUP, SLIDING_GROUP, LagunaForCausalLM

if TYPE_CHECKING:
    from lean_laguna.kernels.cuda.layers import CudaLayers

TRITON_ROWS = WIDE
"""Rows of a launch whose layers run on Triton's kernels."""
STEPS = ("step", "verify", "decode")
"""Programs that end by leaving the block on the host."""


class StepPrograms:
    """Weights, pages and buffers of the device, and every program over them; owned by one engine.

    Attributes:
        device: Where it all is.
        pools: Keys and values.
        state: The block that programs read and change.
        said: What steps leave of it on the host.
        most_rows: Rows, and requests, that one launch takes.
        widths: Columns of products that there are programs for, ascending, ``LONE`` apart.
        tables: Per KV group, [most_rows, max_blocks] int32 block tables of the requests in ``state``.
        target: Weights of the target.
        drafter: Weights of the drafter, or None.
        draft_group: KV group of the drafter's layers.
        scratch: Buffers of a step.
        caches: Pages and tables of the target, layer by layer.
        logits: [WIDE, V] float32, written by ``rows`` and ``choose``; see ``logits_of``.
        verified_logits: [most_rows, V] float32 of the last step's rows, where they are kept.
        bounds: [1 + W * (most_rows + 1)] float32: the chance below which no more drafts are made, then the
            tokens that a step with so many rows is worth, for each width, by which they are cut; zeros make
            and keep all.
    """

    def __init__(
        self,
        target: LagunaForCausalLM,
        drafter: DFlashDrafter | None,
        pools: PagedPools,
        max_model_len: int,
        thresholds: Sequence[Sequence[int]] | None = None,
        *,
        use_cuda: bool = False,
        num_blocks_said: int = 64,
        max_requests: int = WIDE,
        max_rows: int = WIDE,
    ):
        """Lay the weights out and set the buffers aside.

        Args:
            target: The target; its parameters become views.
            drafter: The drafter, or None; likewise.
            pools: Keys and values of the groups of both.
            max_model_len: Longest prompt plus output, tokens.
            thresholds: [n][MAX_ROWS] of synthetic acceptance, or None.
            use_cuda: Run the parts of layers that fit them on the CUDA C++ kernels.
            num_blocks_said: Steps that may be launched before the first one's block must have been read.
            max_requests: That there can be at once.
            max_rows: Of all of them, with their drafts: launches are no wider.
        """
        self.pools = pools
        self.target = target_weights(target, max_model_len + WIDE, is_by_lane=use_cuda)
        self.device = self.target.head.device
        self.drafter = (
            drafter_weights(drafter, max_model_len + WIDE, is_by_lane=use_cuda)
            if drafter is not None
            else None
        )
        self._is_gpu = self.device.type == "cuda"
        self._tiles = Tiles() if self._is_gpu else interpreted_tiles(drafter)
        layers = self.target.layers + (self.drafter.layers if self.drafter is not None else ())
        self._cuda_layers = _cuda_layers(self.device, pools.kv_block_size) if use_cuda else None
        self._run_layer: LayerRunner = self._cuda_layers or run_layer
        kernel_rows = self._cuda_layers.most_rows(layers) if self._cuda_layers is not None else TRITON_ROWS
        self._set_widths(rows_of_launch(max_rows, kernel_rows))
        self._max_requests = max_requests
        self.state, self.said = Block.allocate(self.device), Said(self.device, num_blocks_said)
        max_blocks = -(-(max_model_len + WIDE) // pools.kv_block_size)
        self.tables = [
            torch.zeros(self.most_rows, max_blocks, dtype=torch.int32, device=self.device)
            for _ in pools.groups
        ]
        self.caches = self._target_caches(target)
        own_head = None if drafter is None or drafter.lm_head is None else drafter.lm_head.weight.detach()
        self._draft_head = self.target.head if own_head is None else own_head
        self._token_map = None if drafter is None or own_head is None else drafter.d2t
        cuda = self._cuda_layers
        self._head = None if cuda is None else cuda.head(self.target.head, self.most_rows)
        has_parts = self._cuda_layers is None or not self._cuda_layers.attends_all(layers)
        self.scratch = Scratch.allocate(
            layers, self.target.head, self._tiles, TRITON_ROWS, has_parts=has_parts
        )
        self.tap_layers = drafter.config.target_layer_ids if drafter is not None else ()
        self._taps = self._empty(MAX_ROWS, len(self.tap_layers), self.target.norm.shape[0])
        self._thresholds = (
            None if thresholds is None else torch.tensor(thresholds, dtype=torch.int64, device=self.device)
        )
        self.draft_group = DRAFT_FULL_GROUP
        if drafter is not None and drafter.config.window is not None:
            self.draft_group = DRAFT_SLIDING_GROUP
        spark = self.drafter.spark if self.drafter is not None else None
        self._walk = (
            Walk.allocate(spark.bias.shape[0], self.device, self.most_rows) if spark is not None else None
        )
        self._survival = torch.zeros(MAX_ROWS, device=self.device), torch.zeros(MAX_ROWS, device=self.device)
        self._features = Features.allocate(self.drafter) if self.drafter is not None else None
        self._pool = torch.cuda.graph_pool_handle() if self._is_gpu else None
        self._programs: dict[tuple[str, int, bool], Program] = {}
        self._filtered = self._keeps_logits = False
        self._left = (0, self.state)

    def _set_widths(self, most_rows: int) -> None:
        """Say what launches take.

        On a CPU always as many columns: the interpreter's products are numpy's, whose sums follow the width.
        """
        self.most_rows = most_rows
        self.widths = tuple(cols for cols in WIDTHS if cols <= most_rows) if self._is_gpu else (most_rows,)
        self.bounds = torch.zeros(1 + len(self.widths) * (most_rows + 1), device=self.device)

    @property
    def graph_pool(self) -> Any:
        """Memory of the graphs, to be shared by those of prompts; None where nothing is captured."""
        return self._pool

    @property
    def uses_cuda(self) -> bool:
        """Whether steps run on the CUDA C++ kernels where they fit, and on Triton's elsewhere."""
        return self._cuda_layers is not None

    def keep_logits(self) -> None:
        """Have steps write ``verified_logits`` too, for whoever checks them."""
        self._keeps_logits = True
        self._programs.clear()

    def columns(self, num_rows: int) -> int:
        """Return the token columns for so many rows, at most ``most_rows``."""
        if num_rows == 1 and self.uses_cuda:
            return LONE
        return next(cols for cols in self.widths if cols >= num_rows)

    def run(self, name: str, cols: int, *, filtered: bool = False) -> None:
        """Launch a program.

        Args:
            name: ``step``: target, the drafter's context, acceptance, the next rows, their drafts, the block
                to the host; ``verify``: the same without drafts; ``decode``: without the context either;
                ``rows``: target with logits and the context, nothing decided; ``propose``: drafts for the
                rows laid out; ``fill``: target without head, and the context; ``choose``: logits and tokens
                of ``scratch.normed``.
            cols: From ``columns``, of the live rows before it or after, whichever are more.
            filtered: Some of the requests filter their tokens.
        """
        # Only plain decoding often has one row: a program more for the others would not pay.
        key = (name, cols if name == "decode" else max(cols, NARROW), filtered)
        program = self._programs.get(key)
        if program is None:
            program = self._programs[key] = Program(partial(self._body, *key), self._pool)
        program()
        if name in STEPS:
            self._left = self.said.next()

    def run_step(self, name: str, cols: int, *, filtered: bool = False) -> tuple[int, Block]:
        """Launch one of ``STEPS``; return its number and the block that it will leave on the host."""
        self.run(name, cols, filtered=filtered)
        return self._left

    def _body(self, name: str, cols: int, filtered: bool) -> None:
        self._filtered = filtered
        make: Callable[[int], None] = getattr(self, f"_{name}")
        make(cols)

    def warm_up(self, others: Sequence[Callable[[], object]] = ()) -> None:
        """Compile all programs side by side, then run each on no rows and capture it; nothing on a CPU.

        Args:
            others: Launches whose kernels are compiled along with them.
        """
        if not self._is_gpu:
            return
        self.state.words.zero_()
        self._compile(others)
        for name, cols in self._usual():
            if name != "rows" or cols == WIDE:
                for filtered in {False, cols <= NARROW}:  # the rest when first used
                    for _ in range(2):
                        self.run(name, cols, filtered=filtered)
        self.said.restart()
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()

    def _usual(self) -> list[tuple[str, int]]:
        """Return the programs that are likely to be run, and their columns."""
        names = ["decode", "rows", "choose"]
        names += ["step", "verify", "propose"] if self.drafter is not None else []
        found = [(name, cols) for name in names for cols in self.widths if cols <= self._widest(name)]
        return found + [("decode", LONE)] * self.uses_cuda

    def _widest(self, name: str) -> int:
        """Return the most columns that a program is likely to have."""
        if name in ("step", "propose"):
            return self.most_rows
        # One row a request; and the host lays out few at a time.
        return max(WIDE, self.columns(min(self._max_requests, self.most_rows))) if name in STEPS else WIDE

    def _compile(self, others: Sequence[Callable[[], object]]) -> None:
        """Compile all kernels side by side; where CUDA C++ does not compile, layers stay with Triton's."""
        usual = self._usual()
        bodies = [partial(self._body, name, cols, False) for name, cols in usual]
        bodies += [partial(self._body, name, NARROW, True) for name in dict(usual)]
        if self.uses_cuda:
            from lean_laguna.kernels.cuda import driver
            from lean_laguna.kernels.cuda.compiler import CompilationError

            try:
                with driver.collecting() as sources:
                    compile_ahead([*bodies, *others])
                driver.compile_ahead(sources, self.device)
                return
            except CompilationError as error:
                print(
                    f"lean-laguna: Triton kernels alone: CUDA C++ does not compile: {error}", file=sys.stderr
                )
                self._cuda_layers, self._run_layer = None, run_layer
                self._set_widths(rows_of_launch(self.most_rows, TRITON_ROWS))
                drafter = self.drafter.layers if self.drafter is not None else ()
                self.scratch = self.scratch.with_parts(self.target.layers + drafter)
                self._compile(others)
                return
        compile_ahead([*bodies, *others])

    @cached_property
    def logits(self) -> Tensor:
        """[WIDE, V] float32."""
        return torch.zeros(WIDE, self.target.head.shape[0], device=self.device)

    @cached_property
    def _wide_logits(self) -> Tensor:
        return torch.zeros(self.most_rows, self.target.head.shape[0], device=self.device)

    def logits_of(self, cols: int) -> Tensor:
        """Return where programs of so many columns write logits; few wide ones do, so room for them waits."""
        return self.logits if cols <= WIDE else self._wide_logits

    @cached_property
    def verified_logits(self) -> Tensor:
        """[most_rows, V] float32."""
        return torch.zeros(self.most_rows, self.target.head.shape[0], device=self.device)

    def _launch(self, cols: int) -> Launch:
        if not self._is_gpu:
            return Launch(cols, programs=1, attention_programs=1)
        return Launch(cols, pdl=self._cuda_layers is not None and starts_early(self.device))

    def _empty(self, *size: int) -> Tensor:
        return torch.zeros(size, dtype=self.target.head.dtype, device=self.device)

    def _target_caches(self, target: LagunaForCausalLM) -> Caches:
        layers: list[LayerCache | tuple[Tensor, Tensor]] = []
        tables, counts = [], [0, 0]
        for i, kind in enumerate(target.config.layer_types):
            group = FULL_GROUP if kind == "full_attention" else SLIDING_GROUP
            pages = self.pools.layer(group, counts[group])
            if pages[0].dtype == torch.float8_e4m3fn:
                keys, values = pages if has_e4m3(self.device) else (page.view(torch.uint8) for page in pages)
                layers.append(LayerCache(keys, values, *target.kv_scales_of(i)))
            else:
                layers.append(pages)
            tables.append(self.tables[group])
            counts[group] += 1
        return Caches(tuple(layers), tuple(tables))

    @cached_property
    def rows(self) -> Rows:
        """Where the rows stand."""
        f = self.state.fields
        return Rows(
            num_rows=f["num_rows"],
            num_requests=f["num_requests"],
            row_start=f["row_start"],
            row_count=f["row_count"],
            row_request=f["row_request"],
            positions=f["positions"],
        )

    @cached_property
    def _inputs(self) -> Inputs:
        f = self.state.fields
        clock = f["stamps"][STARTED : STARTED + 1]
        return Inputs(f["input_ids"], f["row_seeds"], f["row_temperatures"], self.rows, clock)

    @cached_property
    def _requests(self) -> Requests:
        names = ["remaining", "num_drafts", "seeds", "temperatures", "stop_ids", "ring"]
        names += ["emitted", "accepted", "drafted"]
        return Requests(
            **{name: self.state.fields[name] for name in names},
            thresholds=self._thresholds,
            clock=self.state.fields["stamps"][VERIFIED : VERIFIED + 1],
        )

    def _target_step(self, cols: int, *, taps: bool, logits: bool = False) -> TargetStep:
        return TargetStep(
            self.target,
            self.caches,
            self._inputs,
            self.scratch,
            self.state.fields["sampled"],
            tap_layers=self.tap_layers if taps else (),
            taps=self._taps if taps and self.tap_layers else None,
            logits=self.logits_of(cols) if logits else None,
            launch=self._launch(cols),
            tiles=self._tiles,
            layer=self._run_layer,
            head=self._head,
        )

    def _draft_step(self, cols: int, *, filters: bool = False) -> DraftStep:
        assert self.drafter is not None
        assert self._features is not None
        return DraftStep(
            self.drafter,
            self.target.embed,
            self._draft_head,
            self.pools.group(self.draft_group),
            self.tables[self.draft_group],
            self._inputs,
            self.scratch,
            self._features,
            token_map=self._token_map,
            logits=self.logits_of(cols) if filters and self._walk is None else None,
            walk=self._walk,
            chances=self._chances(),
            filters=self._filters if filters else None,
            launch=self._launch(cols),
            tiles=self._tiles,
            layer=self._run_layer,
            multiply=self._head if self._draft_head is self.target.head else None,
        )

    def _accept(self, cols: int) -> None:
        inputs, state = self._inputs, self.state.fields
        accept(
            inputs.input_ids,
            state["sampled"],
            self.rows,
            inputs.seeds,
            inputs.temperatures,
            self._requests,
            self._launch(cols),
            mask_token=self.drafter.mask_token if self.drafter is not None else 0,
        )

    @cached_property
    def _filters(self) -> Filters:
        return Filters(*(self.state.fields[name] for name in ("top_k", "top_p", "log_min_p")))

    def _filter(self, cols: int, tokens: Tensor, position_offset: int, *, is_draft: bool = False) -> None:
        if self._filtered:
            inputs = self._inputs
            choose_filtered(
                self.logits_of(cols),
                tokens,
                self._filters,
                inputs.seeds,
                inputs.temperatures,
                self.rows,
                self._launch(cols),
                position_offset=position_offset,
                is_draft=is_draft,
            )

    def _run_target(self, cols: int, *, taps: bool, logits: bool) -> None:
        self._target_step(cols, taps=taps, logits=logits or self._filtered).run()
        self._filter(cols, self.state.fields["sampled"], 1)

    def _step(self, cols: int) -> None:
        self._advance(cols, has_context=True)
        self._propose(cols)
        self._publish(cols)

    def _verify(self, cols: int) -> None:
        self._advance(cols, has_context=True)
        self._publish(cols)

    def _decode(self, cols: int) -> None:
        self._advance(cols, has_context=False)
        self._publish(cols)

    def _advance(self, cols: int, *, has_context: bool) -> None:
        """Verify the rows laid out, and lay out the next ones."""
        self._note_time(STARTED)
        self._run_target(cols, taps=has_context, logits=self._keeps_logits)
        if self._keeps_logits:
            logits = self.logits_of(cols)
            self.verified_logits[: len(logits)].copy_(logits)
        if has_context:
            self._draft_step(cols).append_context(self._taps)
        self._accept(cols)
        self._note_time(VERIFIED)

    def _publish(self, cols: int) -> None:
        self._note_time(ENDED)
        state = self.state.fields
        publish(
            self.state.words,
            self.said.words,
            self.said.turn,
            self._launch(cols),
            entries=state["ring"],
            num_entries=state["num_requests"],
        )

    def _note_time(self, stamp: int) -> None:
        """Note the time where no kernel does."""
        if not self._is_gpu:
            self.state.fields["stamps"][stamp] = time.perf_counter_ns()

    def _rows(self, cols: int) -> None:
        self._run_target(cols, taps=True, logits=True)
        if self.drafter is not None:
            self._draft_step(cols).append_context(self._taps)

    def _fill(self, cols: int) -> None:
        self._target_step(cols, taps=True).fill()
        if self.drafter is not None:
            self._draft_step(cols).append_context(self._taps)

    def _propose(self, cols: int) -> None:
        # A drafter with a vocabulary of its own drafts unfiltered: its logits are of other tokens.
        is_filtered = self._filtered and self._token_map is None
        self._draft_step(cols, filters=is_filtered).propose()
        if is_filtered and self._walk is None:
            self._filter(cols, self._inputs.input_ids, 0, is_draft=True)
        chances, inputs, state = self._chances(), self._inputs, self.state.fields
        if chances is not None:
            schedule(
                chances,
                self.bounds[1:].view(len(self.widths), -1)[self.widths.index(max(cols, self.widths[0]))],
                state["cut"],
                state["skipped"],
                inputs.input_ids,
                inputs.seeds,
                inputs.temperatures,
                self.rows,
                self._launch(cols),
            )

    def _chances(self) -> Chances | None:
        """Return where a drafter that says how confident it is says so."""
        spark = self.drafter.spark if self.drafter is not None else None
        if spark is None or spark.confidence is None:
            return None
        state = self.state.fields
        return Chances(*self._survival, state["chances"], self.bounds[:1], self._thresholds, state["seeds"])

    def _choose(self, cols: int) -> None:
        self._target_step(cols, taps=False, logits=True).choose()
        self._filter(cols, self.state.fields["sampled"], 1)


def _cuda_layers(device: torch.device, kv_block: int) -> CudaLayers:
    from lean_laguna.kernels.cuda.layers import CudaLayers

    return CudaLayers(device, kv_block)
