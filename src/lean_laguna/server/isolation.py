"""After a step that failed: which request made it fail."""

from __future__ import annotations

from collections import deque

from lean_laguna.engine.llm_engine import LLMEngine
from lean_laguna.engine.output import CompletionDelta


def step_one_by_one(engine: LLMEngine) -> tuple[list[CompletionDelta], dict[str, Exception]]:
    """Take a step with each running sequence alone, and abort the requests for which that fails.

    A sequence advances only when its tokens are committed, and what a sequence emits does not depend on its
    neighbours: repeating a failed step repeats nothing and changes nothing.

    Returns:
        What was added, that of the failed step included, and per failed request what it failed with.
    """
    scheduler = engine.scheduler
    running, waiting = list(scheduler.running), scheduler.waiting
    deltas: list[CompletionDelta] = []
    failed: dict[str, Exception] = {}
    for sequence in running:
        request = sequence.request
        if request.request_id in failed or not sequence.is_admitted:
            continue
        scheduler.running, scheduler.waiting = [sequence], deque()
        engine.forget_ahead()  # the others' steps: they are not this one's to read, nor their faults its own
        try:
            deltas += engine.step()
        except Exception as error:
            failed[request.request_id] = error
    engine.forget_ahead()
    deltas += engine.take_committed()  # where the last one failed, nobody's step has brought it
    scheduler.waiting = waiting
    scheduler.running = [sequence for sequence in running if sequence.is_admitted]
    for request_id in failed:
        engine.abort(request_id)
    return deltas, failed
