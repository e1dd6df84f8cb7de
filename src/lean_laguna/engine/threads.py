"""How many CPU threads decode fastest, measured on the loaded model as the machine is now.

More is not better: a small model's step is shorter than the wake-up of a second thread, and on a machine that
has other work to do threads wait for each other. The bits of the output do not depend on the number.
"""

from __future__ import annotations

import time

import torch

from lean_laguna.core.cpus import usable_cpus
from lean_laguna.core.types import SamplingParams
from lean_laguna.engine.llm_engine import LLMEngine

NUM_STEPS = 6
VERIFY_ROWS = 8
MAX_SECONDS = 0.5
PREFER_FEWER = 1.05  # fewer threads leave the machine to others, and vary less


def tune_num_threads(engine: LLMEngine) -> int:
    """Set torch's number of threads to the fastest for decoding one request, and return it.

    With a drafter, plain steps and steps of as many rows as a verification has count alike.

    Takes a fraction of a second for a small model and a few steps for a large one. Does nothing on a GPU.

    Args:
        engine: Idle; a short request runs through it for each candidate.
    """
    if next(engine.target.parameters()).device.type != "cpu":
        return torch.get_num_threads()
    chosen, chosen_step_s = 1, float("inf")
    for num_threads in _candidates():
        torch.set_num_threads(num_threads)
        step_s = _decode_step_s(engine)
        if engine.proposer is not None:
            # Steps that verify are most of the time then, and more rows keep more threads busy.
            step_s += _verify_step_s(engine)
        if step_s * PREFER_FEWER > chosen_step_s:
            break  # more threads did not help: still more will not
        chosen, chosen_step_s = num_threads, step_s
    torch.set_num_threads(chosen)
    return chosen


def _candidates() -> list[int]:
    """Return 1, 2, 4 ... and the number of usable cores."""
    usable = usable_cpus()
    powers = [2**i for i in range(usable.bit_length()) if 2**i < usable]
    return [*powers, usable]


def _decode_step_s(engine: LLMEngine) -> float:
    """Return the median time of a plain decode step, after a step that is not counted."""
    params = SamplingParams(temperature=0, max_tokens=NUM_STEPS + 2, ignore_eos=True)
    state = engine.add_request([1], params, num_speculative_tokens=0)
    times: list[float] = []
    try:
        engine.step()  # the prompt
        engine.step()  # threads wake up
        started = time.perf_counter()
        while not state.is_finished and (not times or time.perf_counter() - started < MAX_SECONDS):
            before = time.perf_counter()
            engine.step()
            times.append(time.perf_counter() - before)
    finally:
        engine.abort(state.request_id)
    return sorted(times)[len(times) // 2]


def _verify_step_s(engine: LLMEngine) -> float:
    """Return the median time of a step of as many rows as a verification has: that of a prompt so long.

    No draft is made, so what the engine learns of its drafter stays untouched.
    """
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    times: list[float] = []
    for i in range(NUM_STEPS):
        # Another first token each time, so that no prefix is found again.
        engine.add_request([1 + i] * VERIFY_ROWS, params, num_speculative_tokens=0)
        before = time.perf_counter()
        while engine.has_unfinished:
            engine.step()
        times.append(time.perf_counter() - before)
    return sorted(times[1:])[len(times) // 2 - 1]
