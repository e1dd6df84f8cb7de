"""Builds the kernels of an engine for every NVIDIA architecture, without a GPU: do they compile, do they fit?

    PYTHONPATH=src python benchmarks/gpu_builds.py --out FILE [--architectures 86,120] [--shapes laguna-xs]

For each architecture an engine is made for a card of its kind that is not there (``stand_in_card``), and what
it would launch is built as it would be at start: CUDA C++ by NVRTC, where it is installed, and Triton by
Triton. Shared memory, registers and stack come from the machine code and are held against what a program may
have there. Nothing runs: a kernel that builds and fits may still be wrong or slow.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

os.environ |= {"TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": ""}
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
os.environ.setdefault("TRITON_CACHE_DIR", str(Path(tempfile.gettempdir()) / "lean-laguna-builds"))

import triton
from stand_in_card import CARDS, Card, CudaLaunch, Launched, launches_of
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lean_laguna.core.errors import LeanLagunaError
from lean_laguna.core.provenance import describe_run
from lean_laguna.kernels.cuda.compiler import compiled, has_nvrtc

SHAPES = ("laguna-xs", "laguna-s")
FAMILIES = (80, 86, 90, 100, 120)
"""One architecture of each family: the others differ in little, and are built for fewer engines."""
BASIC: tuple[dict[str, Any], ...] = ({"drafter": "dummy"}, {"scheme": "nvfp4"}, {"kv_cache_dtype": "fp8"})
OTHERS: tuple[dict[str, Any], ...] = (
    {"drafter": "dummy-dspark"},
    {"scheme": "fp8"},
    {"scheme": "int8"},
    {"scheme": "int4"},
    {"scheme": "nvfp4-all"},
)
ON_TRITON: tuple[dict[str, Any], ...] = (
    {"kernels": "triton", "drafter": "dummy"},
    {"kernels": "triton", "scheme": "nvfp4"},
)
"""The same where CUDA C++ is not wanted, or there is no compiler for it."""
ON_CUDA: tuple[dict[str, Any], ...] = ({"kernels": "cuda", "drafter": "dummy"},)
"""The same where ``auto`` leaves CUDA C++ out."""
ALL: dict[str, Any] = {"drafter": None, "scheme": "bf16", "kv_cache_dtype": "auto", "kernels": "auto"}
KINDS = ("triton", "cuda")
REGISTERS = 65536
"""Of a multiprocessor."""
RESERVED = 1024
"""Bytes of shared memory that the system has of each program, beside its own; told from Hopper on."""
TENSOR_MEMORY = 512
"""Columns of a Blackwell multiprocessor's tensor memory."""
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")


@dataclass(frozen=True)
class Built:
    """One kernel for one architecture.

    Attributes:
        name: Of the kernel.
        what: Types and constants that it is built for.
        error: Why it does not build or would not launch, or "".
        shared_bytes: Shared memory it asks for.
        registers: Of a thread.
        stack_bytes: Of a thread: what did not fit its registers.
        threads: Of a program.
    """

    name: str
    what: str
    error: str = ""
    shared_bytes: int = 0
    registers: int = 0
    stack_bytes: int = 0
    threads: int = 0


def build(launch: Launched, card: Card) -> Built:
    """Build a kernel and say what it asks for."""
    columns = 0
    try:
        if isinstance(launch, CudaLaunch):
            code = compiled(launch.source, f"sm_{card.architecture}")
            registers, stack, own = usage(code)
            shared, threads = launch.shared_bytes + own, launch.threads
        else:
            target = GPUTarget("cuda", card.architecture, 32)
            source = ASTSource(launch.kernel, launch.signature, launch.constants, launch.attributes)
            kernel = triton.compile(source, target=target, options=launch.options.__dict__)
            registers, stack, _ = usage(kernel.asm["cubin"])
            shared, threads = kernel.metadata.shared, 32 * kernel.metadata.num_warps
            columns = getattr(kernel.metadata, "tmem_size", None) or 0
    except Exception as error:  # a compiler's, of whatever kind: it is what the table is about
        return Built(launch.name, launch.what, _cause(error))
    found = Built(launch.name, launch.what, "", shared, registers, stack, threads)
    if columns > TENSOR_MEMORY:
        return failed(found, f"{columns} columns of tensor memory, there are {TENSOR_MEMORY}")
    if found.shared_bytes > card.shared_bytes:
        return failed(found, f"{found.shared_bytes} bytes of shared memory, there are {card.shared_bytes}")
    if found.registers * found.threads > REGISTERS:
        return failed(found, f"{found.registers} registers in {found.threads} threads, there are {REGISTERS}")
    return found


def _cause(error: BaseException) -> str:
    """Return the line of a compiler's words that says what is wrong, or all of them in short."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = f"{type(error).__name__}: {error}".splitlines()
    told = [line for line in lines if any(word in line for word in ("fatal", "error  ", "error:", "rror : "))]
    return " ".join(" ".join((told or lines)[:3]).split())[:300]


def failed(found: Built, error: str) -> Built:
    """Return what was built with why it would not launch."""
    return Built(**asdict(found) | {"error": error})


def usage(code: bytes) -> tuple[int, int, int]:
    """Return registers and bytes of stack of a thread, and bytes of shared memory that code sets aside."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        tool = Path(triton.backends.__file__).parent / "nvidia" / "bin" / "cuobjdump"
        command = [str(tool), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = _USAGE.findall(text)
    registers, stack, shared, _ = (max(int(own[i]) for own in found) for i in range(4))
    return registers, stack, max(0, shared - RESERVED)


def models(card: Card, shapes: Sequence[str], *, is_quick: bool) -> Iterator[dict[str, Any]]:
    """Return the engines to be made for a card: more of them for one card of a family."""
    if is_quick:
        yield ALL | {"shape": shapes[0]} | BASIC[0]
        return
    is_first = card.architecture in FAMILIES
    other_kernels = ON_TRITON if card.capability >= (9, 0) else ON_CUDA
    for own in BASIC:
        for shape in shapes if is_first else shapes[:1]:
            yield ALL | {"shape": shape} | own
    for own in (*other_kernels, *OTHERS) if is_first else ():
        yield ALL | {"shape": shapes[0]} | own


def note(card: Card, shapes: Sequence[str], *, is_quick: bool) -> tuple[list[Launched], list[dict[str, Any]]]:
    """Return the different launches of all engines on a card, and what each engine says of itself."""
    launches: dict[tuple[str, ...], Launched] = {}
    engines = []
    for model in models(card, shapes, is_quick=is_quick):
        try:
            noted = launches_of(card, **model)
        except LeanLagunaError as error:
            engines.append(model | {"refused": str(error)})
            continue
        launches |= noted.launches
        told = {"runs_on": noted.kernels, "most_rows": noted.most_rows, "num_kernels": len(noted.launches)}
        engines.append(model | told)
    return list(launches.values()), engines


def _send(launch: Launched, card: Card, result: Connection) -> None:
    result.send(build(launch, card))


def build_each(launches: Sequence[Launched], card: Card, workers: int, until: float) -> list[Built | None]:
    """Build kernels side by side, each in a process of its own: a compiler may die of what it is given.

    Returns:
        In order; None for what was not begun before ``until``.
    """
    fork = multiprocessing.get_context("fork")
    found: list[Built | None] = [None] * len(launches)
    waiting, running = deque(range(len(launches))), dict[Connection, tuple[int, Any]]()
    while running or (waiting and time.time() < until):
        while waiting and len(running) < workers and time.time() < until:
            index = waiting.popleft()
            result, own = fork.Pipe(duplex=False)
            process = fork.Process(target=_send, args=(launches[index], card, own))
            process.start()
            own.close()
            running[result] = index, process
        for ready in wait(list(running)):
            assert isinstance(ready, Connection)
            index, process = running.pop(ready)
            try:
                found[index] = ready.recv()
            except EOFError:
                process.join()
                died = f"the compiler died, exit status {process.exitcode}"
                found[index] = Built(launches[index].name, launches[index].what, died)
            process.join()
            ready.close()
    return found


def build_for(architecture: int, kind: str, args: argparse.Namespace) -> dict[str, Any]:
    """Build one architecture's kernels of one kind.

    Args:
        architecture: 90 for sm_90.
        kind: ``cuda`` or ``triton``.
        args: From ``parse``.

    Returns:
        What its engines are, and fields of ``Built`` for every kernel, None for those not begun.
    """
    card, until, is_cuda = CARDS[architecture], args.until, kind == "cuda"
    launches, engines = note(card, args.shapes.split(","), is_quick=args.quick)
    wanted = [
        launch
        for launch in launches
        if isinstance(launch, CudaLaunch) == is_cuda
        and any(part in launch.name for part in args.only.split(","))
    ]
    built, rest = _known(wanted, architecture, args.add)
    if is_cuda:
        # In threads: NVRTC lets go of Python's lock, and did not survive a fork.
        with ThreadPoolExecutor(args.workers) as pool:
            built += pool.map(lambda own: build(own, card) if time.time() < until else None, rest)
    else:
        built += build_each(rest, card, args.workers, until)
    return {"engines": engines, "built": [None if own is None else asdict(own) for own in built]}


def _known(
    launches: Sequence[Launched], architecture: int, file: Path | None
) -> tuple[list[Built | None], list[Launched]]:
    """Return what an earlier result has of these kernels, and those that it has not."""
    found: list[Built | None] = []
    rest: list[Launched] = []
    rows = json.loads(file.read_text())["architectures"].get(f"sm_{architecture}") if file else None
    known = [Built(**own) for own in (rows or {}).get("each", ())]
    by_name: dict[tuple[str, str], list[Built]] = defaultdict(list)
    for own in known:
        by_name[own.name, own.what].append(own)
    for launch in launches:
        same = by_name[launch.name, launch.what]
        if same:
            found.append(same.pop())
        else:
            rest.append(launch)
    return found, rest


def build_apart(task: tuple[int, str], args: argparse.Namespace) -> dict[str, Any]:
    """Do what ``build_for`` does, in a process of its own where there are to be several."""
    architecture, kind = task
    if args.workers == 1:
        return build_for(architecture, kind, args)
    workers = -(-args.workers // (len(KINDS) * len(args.architectures.split(","))))
    own = {"architectures": architecture, "part": kind, "workers": workers, "until": args.until}
    own |= {"shapes": args.shapes, "only": args.only}
    command = [sys.executable, __file__, *(f"--{name}={value}" for name, value in own.items())]
    command += ["--quick"] * args.quick + ([] if args.add is None else [f"--add={args.add}"])
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def summary(
    card: Card, built: Sequence[Built | None], engines: list[dict[str, Any]], *, keeps_each: bool
) -> dict[str, Any]:
    """Return an architecture's part of the result."""
    kernels: dict[str, dict[str, int]] = {}
    for own in filter(None, built):
        row = kernels.setdefault(own.name, {"built": 0, "failed": 0})
        row["failed" if own.error else "built"] += 1
        for name in ("shared_bytes", "registers", "stack_bytes"):
            row[f"most_{name}"] = max(row.get(f"most_{name}", 0), getattr(own, name))
    failures = {f"{own.name}: {own.error}": own.what for own in filter(None, built) if own.error}
    return {
        "card": card.name,
        "shared_bytes_a_program": card.shared_bytes,
        "built": sum(own is not None and not own.error for own in built),
        "failed": sum(own is not None and bool(own.error) for own in built),
        "left_out": sum(own is None for own in built),
        "with_stack": sum(own is not None and own.stack_bytes > 0 for own in built),
        "most_shared_bytes": max((own.shared_bytes for own in filter(None, built)), default=0),
        "failures": failures,
        "engines": engines,
        "kernels": dict(sorted(kernels.items())),
    } | ({"each": [asdict(own) for own in built if own is not None]} if keeps_each else {})


def line(architecture: int, found: dict[str, Any]) -> str:
    """Return an architecture's line of the table."""
    return (
        f"sm_{architecture:<4} {found['card']:24} {found['built']:5} built {found['failed']:3} failed "
        f"{found['left_out']:3} left out {found['with_stack']:3} with a stack  "
        f"{found['most_shared_bytes'] // 1024:3} of {found['shared_bytes_a_program'] // 1024} KiB shared"
    )


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--json", action="store_true", help="print the result as one line, last")
    parser.add_argument("--architectures", default=",".join(map(str, CARDS)), help="such as 86,120")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--only", default="", help="such as norm,project.cu: kernels so named")
    parser.add_argument("--quick", action="store_true", help="one engine a card: BF16 and a DFlash drafter")
    parser.add_argument("--each", action="store_true", help="keep a line for every kernel in the file")
    parser.add_argument("--add", type=Path, help="an earlier result of --each, to go on from")
    parser.add_argument(
        "--workers",
        type=int,
        default=os.cpu_count() or 1,
        help="kernels built at once",
    )
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds; then no more are begun")
    parser.add_argument("--until", type=float, default=float("inf"), help=argparse.SUPPRESS)
    parser.add_argument("--part", choices=("triton", "cuda"), help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the script; 1 where something does not build."""
    args = parse(argv)
    args.until = min(args.until, time.time() + args.budget)
    architectures = [int(name) for name in args.architectures.split(",")]
    if args.part is not None:
        print(json.dumps(build_for(architectures[0], args.part, args)))
        return 0
    kinds = KINDS if has_nvrtc() else KINDS[:1]
    tasks = [(own, kind) for own in architectures for kind in kinds]
    with ThreadPoolExecutor(min(args.workers, len(tasks))) as pool:
        done = dict(zip(tasks, pool.map(partial(build_apart, args=args), tasks), strict=True))
    rows = {}
    for own in architectures:
        built = [None if row is None else Built(**row) for kind in kinds for row in done[own, kind]["built"]]
        rows[f"sm_{own}"] = summary(CARDS[own], built, done[own, "triton"]["engines"], keeps_each=args.each)
    note = "built only, nothing was run" + ("" if has_nvrtc() else "; no NVRTC here: Triton's alone")
    found = {"run": describe_run(argv), "note": note, "architectures": rows}
    if args.add is not None:
        earlier = json.loads(args.add.read_text())
        found["earlier_runs"] = [*earlier.get("earlier_runs", ()), earlier["run"]]
    if args.out is not None:
        args.out.write_text(json.dumps(found, indent=1) + "\n")
    for own in architectures:
        print(line(own, rows[f"sm_{own}"]))
        for failure, what in rows[f"sm_{own}"]["failures"].items():
            print(f"    {failure}\n        {what[:600]}")
    if args.json:
        print(json.dumps(found))
    return int(any(row["failed"] for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
