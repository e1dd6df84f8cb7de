"""What scheduling by confidence brings on a GPU: DSpark scheduled, at fixed lengths, DFlash, and no drafts.

    PYTHONPATH=src python benchmarks/gpu_dspark_serving.py --out FOLDER [--parts walk,nano,xs,ece]

``walk``: the walk's kernels against plain PyTorch, in Laguna-XS's shape, and what a draft takes.
``nano``: real weights, whose steps cost much the same at any length on a large GPU. ``xs``: random weights in
Laguna-XS's shape, whose steps do not; drafts stand at rates that differ from step to step, as the chances
that ``nano-dspark`` gave do, and the drafter knows them. ``ece``: the calibration error of what the engine
counts, on held-out text. ``streams``: DFlash's own choice of length in that shape, 1 to 16 streams. Modes
take turns on the same texts and draws, in an order that changes; seven drafts stand twice, so that their
ratio says what chance does. Mismatches are against no drafts. ``first`` are an engine's first runs.
Writes gpu_dspark_serving.json. ``--tiny`` tries the script itself.
"""

from __future__ import annotations

import argparse
import json
import random
import time
import traceback
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from operator import mul
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import torch
from calibration import half_of_documents
from gpu_step_trace import StepTrace

from lean_laguna.core import heap
from lean_laguna.core.provenance import describe_run
from lean_laguna.core.types import SamplingParams
from lean_laguna.engine.llm import LLM
from lean_laguna.kernels.triton.launch import Launch
from lean_laguna.kernels.triton.rows import Rows
from lean_laguna.kernels.triton.walk import Chances, Walk, finish_walk, start_walk, walk_on
from lean_laguna.kernels.triton.weights import SparkWeights
from lean_laguna.spec.confidence import calibration_error
from lean_laguna.spec.noise import gumbel_noise
from lean_laguna.spec.synthetic import SyntheticAcceptance
from lean_laguna.train.dataset import load_tokens

NUM_SETS, LENGTH = 512, 7
DEFAULT_SETS = tuple(
    tuple(p ** (k + 1) for k in range(LENGTH)) for p in (0.2, 0.4, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)
)


BASES = ("dspark 7", "fixed 7")
NANO_RUNS = 8  # of the small model for each of the other: they take milliseconds


def over(rates: list[float], base: list[float]) -> dict[str, float]:
    """Return how many times as fast, run by run, and how far off the mean may be by chance."""
    ratios = [a / b for a, b in zip(rates, base, strict=True)]
    error = stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else 0.0
    return {"mean": round(mean(ratios), 4), "error": round(error, 4), "median": round(median(ratios), 4)}


class Watch:
    """Chances of each block of seven drafts, and how many were accepted."""

    def __init__(self, engine: Any):
        self.blocks: list[tuple[tuple[float, ...], int]] = []
        self._engine, self._inner = engine, engine._commit
        engine._commit = self._commit

    def stop(self) -> None:
        """Leave the engine as it was."""
        self._engine._commit = self._inner

    def _commit(self, launched: Any, deltas: Any) -> Any:
        spoke = self._inner(launched, deltas)
        for one in spoke:
            own, (num, accepted) = one.chances(), one.counts
            if own is not None and num == len(own) == LENGTH:
                self.blocks.append((tuple(accumulate(own, mul)), accepted))
        return spoke

    def sets(self) -> tuple[tuple[float, ...], ...]:
        """Return as many of the blocks' chances, from the least to the most promising at even distances."""
        blocks = sorted((own for own, _ in self.blocks), key=sum)
        if not blocks:
            return DEFAULT_SETS
        count = min(NUM_SETS, len(blocks))
        found = (blocks[i * len(blocks) // count] for i in range(count))
        return tuple(tuple(round(chance, 4) for chance in own) for own in found)

    def errors(self) -> list[float]:
        """Return the calibration error of each position's survival."""
        if not self.blocks:
            return []
        chances = torch.tensor([own for own, _ in self.blocks])
        accepted = torch.tensor([count for _, count in self.blocks])
        return [round(calibration_error(chances[:, k], accepted > k), 4) for k in range(LENGTH)]


class Bench:
    """What has been found, and the clock."""

    def __init__(self, args: argparse.Namespace):
        self.args, self.begin = args, time.monotonic()
        self.found: dict[str, Any] = {"errors": {}, "kernels": args.kernels, **describe_run(None)}
        self.sets = {0.0: DEFAULT_SETS, 0.8: DEFAULT_SETS}
        self.traces: dict[int, StepTrace] = {}
        if args.chances is not None:
            nano = json.loads(args.chances.read_text())["nano"]
            self.sets = {t: tuple(map(tuple, nano[f"T={t} chances"]["sets"])) for t in self.sets}

    def left(self) -> float:
        return float(self.args.budget) - (time.monotonic() - self.begin)

    def part(self, name: str) -> None:
        start = time.monotonic()
        try:
            getattr(self, name)(self.found.setdefault(name, {}))
        except Exception:
            self.found["errors"][name] = traceback.format_exc()
            print(f"FAILED {name}\n{traceback.format_exc()[-2500:]}", flush=True)
        print(f"-- {name}: {time.monotonic() - start:.1f} s, {self.left():.0f} s left", flush=True)
        self.write()

    def write(self) -> None:
        self.args.out.mkdir(parents=True, exist_ok=True)
        self.args.out.mkdir(parents=True, exist_ok=True)
        (self.args.out / "gpu_dspark_serving.json").write_text(json.dumps(self.found, indent=1, default=str))

    def engine(self, model: str, drafter: str, **options: Any) -> Any:
        start = time.monotonic()
        options = {
            "max_num_seqs": 16,
            "kernels": self.args.kernels,
            "enable_prefix_caching": False,
            **options,
        }
        speculative = {"model": drafter, **options.pop("speculative", {})}
        engine: Any = LLM(model, speculative_config=speculative, **options).engine
        self.traces[id(engine)] = StepTrace(engine)
        heap.settle()  # as a server does
        print(f"   {drafter}: ready after {time.monotonic() - start:.1f} s", flush=True)
        return engine

    def run(
        self,
        engine: Any,
        k: int | None,
        prompts: list[list[int]],
        temperature: float,
        new: int,
        seed: int = 0,
    ) -> Any:
        """Decode all prompts at once: tokens a second once each has a token, and what they say."""
        states = [
            engine.add_request(
                ids,
                SamplingParams(
                    temperature=temperature, max_tokens=new, ignore_eos=True, seed=1000 * seed + i
                ),
                num_speculative_tokens=k,
            )
            for i, ids in enumerate(prompts)
        ]
        said = [state.sequences[0].completion for state in states]
        while min(len(own.token_ids) for own in said) < 1:
            engine.step()
        before, start = sum(len(own.token_ids) for own in said), time.perf_counter()
        while engine.has_unfinished:
            engine.step()
        seconds = time.perf_counter() - start
        rate = (sum(len(own.token_ids) for own in said) - before) / max(1e-9, seconds)
        counts = [state.snapshot().outputs[0].speculation for state in states]
        return rate, [own.token_ids for own in said], counts

    def compare(
        self,
        modes: dict[str, tuple[Any, int | None]],
        prompts_of: Callable[[int], list[list[int]]],
        temperature: float,
        new: int,
    ) -> dict[str, Any]:
        """Let the modes take turns, on the prompts of turn 0, 1, ..."""
        rates: dict[str, list[float]] = {name: [] for name in modes}
        counts: dict[str, list[Any]] = {name: [] for name in modes}
        mismatches = dict.fromkeys(modes, 0)
        first: dict[str, list[float]] = {}
        where: dict[str, Any] = {}
        for name, (engine, k) in modes.items():
            runs = range(4 if k is None else 1)
            first[name] = [round(self.run(engine, k, prompts_of(i), temperature, new)[0], 1) for i in runs]
        for engine, _ in modes.values():
            self.traces[id(engine)].take()
        is_small = engine.target.config.hidden_size < 1024 and not self.args.tiny
        repeats, order = self.args.repeats * (NANO_RUNS if is_small else 1), list(modes)
        draw = random.Random(0)
        for i in range(repeats):
            said, prompts = {}, prompts_of(i)
            draw.shuffle(order)
            for name in order:
                rate, said[name], own = self.run(*modes[name], prompts, temperature, new, 1 + i)
                rates[name].append(rate)
                counts[name] += own
                trace = self.traces[id(modes[name][0])].take()
                if i == repeats - 1:
                    where[name] = trace
            for name, tokens in said.items():
                plain = said[next(iter(modes))]
                mismatches[name] += sum(a != b for a, b in zip(tokens, plain, strict=True))
        found: dict[str, Any] = {}
        base = next((rates[name] for name in modes if name in BASES), next(iter(rates.values())))
        for name in modes:
            steps = sum(own.num_steps for own in counts[name] if own)
            drafts = sum(own.num_draft_tokens for own in counts[name] if own)
            accepted = sum(own.num_accepted_tokens for own in counts[name] if own)
            found[name] = {
                "tok_per_s": round(median(rates[name]), 1),
                "over_seven": over(rates[name], base),
                "all": [round(rate, 1) for rate in rates[name]],
                "mean_acceptance_length": round(1 + accepted / max(1, steps), 3),
                "steps_per_s": round(median(rates[name]) * steps / max(1, steps + accepted), 2),
                "drafts_a_step": round(drafts / max(1, steps), 2),
                "cut": sum(own.num_cut_draft_tokens for own in counts[name] if own),
                "mismatches": mismatches[name],
                "first": first[name],
                "last_run": where.get(name),
            }
            print(f"   {temperature} x{len(prompts)} {name}: {found[name]}", flush=True)
        return found

    @staticmethod
    def turn_of(texts: list[list[int]], streams: int, turn: int) -> list[list[int]]:
        """Return the texts of a turn."""
        return [texts[(turn * streams + i) % len(texts)] for i in range(streams)]

    def walk(self, result: dict[str, Any]) -> None:
        """Seven drafts of two requests, greedy and sampled: equal to PyTorch's, and microseconds a draft."""
        vocab, rank, width = (500, 16, 32) if self.args.tiny else (100352, 256, 2048)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        rows = Rows(*(torch.zeros(16, dtype=torch.int32, device=device) for _ in range(6)))
        rows.num_rows[0], rows.num_requests[0] = 16, 2
        rows.row_start[1], rows.row_count[:2] = 8, 8
        rows.row_request[8:] = 1
        rows.positions[:] = torch.arange(100, 116)
        ones = torch.ones(2, 16, device=device)
        draw = partial(torch.randn, device=device)
        weights = SparkWeights(
            draw(vocab, rank).to(dtype),
            draw(vocab, rank).to(dtype) * rank**-0.5,
            draw(width).to(dtype) * 0.05,
            draw(1).to(dtype),
            draw(vocab),
            ones,
            ones - 1,
            False,
            LENGTH,
        )
        walk, hidden = Walk.allocate(vocab, device), draw(16, width).to(dtype)
        walk.logits.normal_()
        ids = torch.randint(vocab, (16,), dtype=torch.int32, device=device)
        seeds = torch.full((16,), 2**40 + 7, device=device)
        temperatures = torch.tensor([0.0] * 8 + [0.8] * 8, device=device)

        chances = Chances(*(torch.zeros(size, device=device) for size in (64, 64, 64, 1)))

        def go() -> None:
            start_walk(weights, walk, rows, Launch(16), hidden=hidden, chances=chances)
            for step in range(1, LENGTH + 1):
                walk_on(step, weights, walk, ids, seeds, temperatures, rows, Launch(16), chances=chances)
            finish_walk(walk, ids, rows, Launch(16))

        go()
        noise = torch.from_numpy(gumbel_noise([2**40 + 7] * 16, list(range(100, 116)), vocab)).to(device)
        equal, off = 0, 0.0
        for row in (row for row in range(16) if row % 8):
            before = weights.before[int(ids[row - 1])].float()
            scores = (walk.logits[row] + weights.bias.float() @ before).double()
            scores = scores / 0.8 + noise[row] if row > 8 else scores
            equal += int(scores.argmax()) == int(ids[row])
            guess = hidden[row].float() @ weights.confidence.float() + weights.after[int(ids[row - 1])]
            chance = torch.sigmoid(guess + weights.confidence_bias.float())
            off = max(off, abs(float(chance - chances.given[row])))
        result |= {"drafts_equal": equal, "of": 14, "chance_off": off}
        if device.type == "cuda":
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                go()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            for name, least in (("us_per_block_of_7", 0.0), ("us_where_only_the_first_is_made", 1.0)):
                chances.least.fill_(least)
                graph.replay()
                start.record()
                for _ in range(20):
                    graph.replay()
                end.record()
                end.synchronize()
                result[name] = round(50 * start.elapsed_time(end), 1)
        print(f"   {result}", flush=True)

    def nano(self, result: dict[str, Any]) -> None:
        """Real weights: T = 0 and 0.8; 1, 4 and 16 streams."""
        tiny = self.args.tiny
        options = {"max_model_len": 64 if tiny else 1024, "kv_cache_memory_bytes": None if tiny else 1 << 30}
        spark = self.engine("nano", "nano-dspark", **options)
        others: dict[str, tuple[Any, int | None]] = {}
        if not self.args.lean:
            flash = self.engine("nano", "nano-dflash", **options)
            fp8 = self.engine("nano", "nano-dspark", speculative={"quantization": "fp8"}, **options)
            others = {"dflash 7": (flash, LENGTH), "dspark 7 fp8": (fp8, LENGTH)}
        result["seconds_by_rows"] = spark._prices.costs.table.tolist()
        modes = {
            "off": (spark, 0),
            "dspark 7": (spark, LENGTH),
            "dspark 7 again": (spark, LENGTH),
            "dspark scheduled": (spark, None),
            **others,
        }
        pieces = [text for text in Path(__file__).read_text().split("\n\n") if len(text) > 80]
        texts = [
            spark.tokenizer.encode(text)[: 8 if tiny else 8 + 3 * (i % 16)] for i, text in enumerate(pieces)
        ]
        for temperature in (0.0, 0.8):
            for streams in (1,) if tiny else self.args.streams:
                if self.left() < 12 and not tiny:
                    break

                prompts_of = partial(Bench.turn_of, texts, streams)
                found = self.compare(modes, prompts_of, temperature, 8 if tiny else 256)
                found["draft_length"] = spark.stats().draft_length_reason
                result[f"T={temperature} {streams} streams"] = found
            watch = Watch(spark)  # which takes time of its own
            for seed in range(2 if tiny else 40):
                self.run(spark, LENGTH, prompts_of(seed)[:1], temperature, 8 if tiny else 256, seed)
            watch.stop()
            self.sets[temperature] = watch.sets()
            result[f"T={temperature} chances"] = {"sets": self.sets[temperature], "errors": watch.errors()}

    def ece(self, result: dict[str, Any]) -> None:
        """How far the engine's own confidences can be believed: held-out texts, all seven drafts sent."""
        tiny = self.args.tiny
        stream = half_of_documents(load_tokens(self.args.data, "val"), 1)  # of the calibration's check
        count, size, new = (3, 8, 8) if tiny else (self.args.num_texts, 64, 256)
        options = {"max_model_len": 64 if tiny else 512, "kv_cache_memory_bytes": None if tiny else 1 << 30}
        spark = self.engine("nano", self.args.drafter, **options)
        starts = range(0, len(stream) - size, (len(stream) - size) // count)
        prompts = [stream[start : start + size].tolist() for start in starts][:count]
        blocks = Watch(spark).blocks
        for temperature in (0.0, 0.8):
            blocks.clear()
            rate = self.run(spark, LENGTH, prompts, temperature, new)[0]
            chances = torch.tensor([own for own, _ in blocks])
            accepted = torch.tensor([num for _, num in blocks])
            errors = [round(calibration_error(chances[:, k], accepted > k), 4) for k in range(LENGTH)]
            result[f"T={temperature}"] = {
                "texts": len(prompts),
                "blocks": len(blocks),
                "errors": errors,
                "mean": round(mean(errors), 4),
                "mean_accepted": round(float(accepted.double().mean()), 3),
                "mean_claimed": round(float(chances.sum(1).mean()), 3),
                "tok_per_s": round(rate),
            }
            print(f"   T={temperature} {result[f'T={temperature}']}", flush=True)

    def streams(self, result: dict[str, Any]) -> None:
        """The engine's own draft length beside fixed ones, on the same draws: DFlash in a published shape."""
        tiny = self.args.tiny
        result["synthetic"] = True
        engine = self.engine(
            self.args.shape,
            "nano-dflash" if tiny else "dummy",
            load_format="dummy",
            shape=self.args.shape,
            max_model_len=64 if tiny else 1024,
            kv_cache_memory_bytes=None if tiny else 4 << 30,
            speculative={
                "rejection_sample_method": "synthetic",
                "synthetic_acceptance_rates": [0.90, 0.81, 0.73, 0.62, 0.52, 0.46, 0.40],
            },
        )
        result["seconds_by_rows"] = engine._prices.costs.table.tolist()
        lengths = (3,) if tiny else (3, 7) if self.args.lean else (0, 1, 3, 5, 7)
        modes = {f"fixed {k}": (engine, k) for k in lengths} | {"auto": (engine, None)}
        draw, vocab = random.Random(0), engine.target.config.vocab_size
        for streams in (1,) if tiny else self.args.streams:
            if self.left() < 8 and not tiny:
                break
            size, new = (6, 8) if tiny else (256, 193)
            prompts = [[draw.randrange(100, vocab) for _ in range(size)] for _ in range(streams)]
            found = self.compare(modes, lambda _, own=prompts: own, 0.0, new)
            for mode in found.values():
                mode.pop("mismatches")
            found["draft_length"] = engine.stats().draft_length_reason
            best = max(found[name]["tok_per_s"] for name in modes if name != "auto")
            found["auto_over_best"] = round(found["auto"]["tok_per_s"] / best, 3)
            result[f"{streams} streams"] = found
            print(f"   {streams} streams: auto {found['auto_over_best']} {found['draft_length']}", flush=True)

    def xs(self, result: dict[str, Any]) -> None:
        """Random weights in a published shape, drafts accepted at nano's chances."""
        tiny = self.args.tiny
        result["synthetic"] = True
        engine = self.engine(
            self.args.shape,
            "nano-dspark" if tiny else "dummy-dspark",
            load_format="dummy",
            shape=self.args.shape,
            max_model_len=64 if tiny else 2048,
            kv_cache_memory_bytes=None if tiny else 4 << 30,
            speculative={
                "rejection_sample_method": "synthetic",
                "synthetic_acceptance_rates": self.sets[0.8],
            },
        )
        result["seconds_by_rows"] = engine._prices.costs.table.tolist()
        modes = {
            "off": (engine, 0),
            "fixed 7": (engine, LENGTH),
            "fixed 7 again": (engine, LENGTH),
            "scheduled": (engine, None),
            **({} if self.args.lean else {"fixed 3": (engine, 3)}),
        }
        draw = random.Random(0)
        vocab = engine.target.config.vocab_size
        for temperature in (0.8, 0.0):
            kept = engine.programs._thresholds
            kept.copy_(torch.tensor(SyntheticAcceptance(self.sets[temperature]).thresholds(kept.shape[-1])))
            for streams in (1,) if tiny or self.args.lean else (1, 4):
                if self.left() < 12 and not tiny:
                    break
                size = 6 if tiny else 256
                texts = [[draw.randrange(100, vocab - 100) for _ in range(size)] for _ in range(16 * streams)]

                def prompts_of(
                    turn: int, texts: list[list[int]] = texts, streams: int = streams
                ) -> list[list[int]]:
                    return [texts[(turn * streams + i) % len(texts)] for i in range(streams)]

                new = 8 if tiny else 320 if streams == 1 else 128
                found = self.compare(modes, prompts_of, 0.0, new)
                for mode in found.values():
                    mode.pop("mismatches")  # synthetic output differs by what is drafted
                found["draft_length"] = engine.stats().draft_length_reason
                result[f"rates of T={temperature} {streams} streams"] = found


def main() -> None:
    """Run the parts that were asked for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--budget", type=float, default=100.0, help="seconds")
    parser.add_argument("--parts", default="walk,nano,xs")
    parser.add_argument("--kernels", default="triton", help="or cuda: CUDA C++ where it fits")
    parser.add_argument("--shape", default="laguna-xs")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 16], help="of nano")
    parser.add_argument("--chances", type=Path, help="an earlier result with nano's, where that is not run")
    parser.add_argument(
        "--data", type=Path, default=Path("runs/nano/data-cut"), help="of ece: its held-out text"
    )
    parser.add_argument("--num-texts", type=int, default=384, help="of ece")
    parser.add_argument("--drafter", default="nano-dspark", help="of ece")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--lean", action="store_true", help="only scheduled, seven drafts, and none")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    if args.tiny:
        args.shape, args.repeats = "nano", 1
    bench = Bench(args)
    for name in args.parts.split(","):
        bench.part(name)


if __name__ == "__main__":
    main()
