"""``torch.compile`` where it is faster, eager where it is not or fails; one line says which and why."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar, cast

import torch

from lean_laguna.core.errors import ConfigError

F = TypeVar("F", bound=Callable[..., Any])
CompileMode = Literal["auto", "on", "off"]


def choose_compiled(
    variants: Sequence[F],
    probe: Callable[[F], None],
    *,
    name: str,
    device: torch.device,
    mode: CompileMode,
    report: Callable[[str], None],
    repeats: int = 5,
) -> F:
    """Return the first variant that compiles and runs, or the last one, uncompiled, if that is faster.

    Args:
        variants: The same function written in different ways, the preferred one first; the last must run
            eagerly.
        probe: Runs a variant once on real shapes, backward pass included; leaves no trace behind.
        name: For the report.
        device: ``auto`` compiles on CUDA only.
        mode: ``on`` keeps the compiled form even if it is slower, ``off`` never compiles.
        report: Receives one line for each attempt.
        repeats: Timed runs of each form.

    Raises:
        ConfigError: The attempt broke the CUDA context, which nothing in this process can mend.
    """
    plain = variants[-1]
    if mode == "off" or (mode == "auto" and device.type != "cuda"):
        return plain
    for index, variant in enumerate(variants):
        try:
            started = time.monotonic()
            compiled = cast(F, torch.compile(variant, dynamic=False))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                for _ in range(3):
                    probe(compiled)
                _wait(device)
                compile_s = time.monotonic() - started
                fast = _seconds(probe, compiled, device, repeats)
                probe(plain)
                slow = _seconds(probe, plain, device, repeats)
        except Exception as error:  # whatever the compiler raises, training goes on without it
            reason = (str(error).strip().splitlines() or [""])[0][:160]
            report(f"{name}: variant {index} does not compile: {type(error).__name__}: {reason}")
            if not _answers(device):
                raise ConfigError(
                    f"compiling the {name} broke the CUDA context ({type(error).__name__}: {reason}), and "
                    "this process cannot use the GPU any more; run the command again with --compile off"
                ) from None
            continue
        kept = compiled if fast < slow or mode == "on" else plain
        which = f"variant {index} compiled" if kept is compiled else "eager"
        times = f"compiled {fast * 1e3:.1f} ms, eager {slow * 1e3:.1f} ms"
        report(f"{name}: {which}; {times}, compiling took {compile_s:.0f} s")
        return kept
    report(f"{name}: eager")
    return plain


K = TypeVar("K")


def fastest(
    kinds: Sequence[K],
    probe: Callable[[K], None],
    *,
    name: str,
    device: torch.device,
    report: Callable[[str], None],
    repeats: int = 3,
) -> K:
    """Return the way that takes least time; one that fails is left out, if the device survives it.

    Args:
        kinds: Ways to do the same, the first of which must work.
        probe: Runs one once on real shapes.
        name: For the report.
        device: Where it runs.
        report: Receives one line.
        repeats: Timed runs of each.
    """
    times: dict[K, float] = {}
    for kind in kinds:
        try:
            probe(kind)
            times[kind] = _seconds(probe, kind, device, repeats)
        except RuntimeError as error:
            if kind == kinds[0] or not _answers(device):
                raise
            report(f"{name}: {kind} fails: {(str(error).splitlines() or [''])[0][:160]}")
    listed = ", ".join(f"{kind} {seconds * 1e3:.1f} ms" for kind, seconds in times.items())
    report(f"{name}: {listed}")
    return min(times, key=lambda kind: times[kind])


def _answers(device: torch.device) -> bool:
    """Say whether the device still computes: after an illegal access every later call fails, too."""
    try:
        _wait(device)
        return torch.ones(1, device=device).add(1).item() == 2.0
    except Exception:  # whatever it is, the device does not answer
        return False


def _seconds(probe: Callable[[K], None], function: K, device: torch.device, repeats: int) -> float:
    _wait(device)
    started = time.perf_counter()
    for _ in range(repeats):
        probe(function)
    _wait(device)
    return (time.perf_counter() - started) / repeats


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
