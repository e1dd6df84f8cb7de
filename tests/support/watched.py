"""An engine whose logits are hashed, sequence by sequence."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from lean_laguna.core.types import SamplingParams


class WatchedEngine:
    """Runs requests on an engine of the GPU kernels.

    Attributes:
        engine: The engine.
        num_accepted: Drafts accepted so far.
    """

    def __init__(self, engine: Any):
        self.engine, self.num_accepted = engine, 0
        self._digests: dict[Any, Any] = {}
        engine.watch_logits(self._watch)

    def _watch(self, sequence: Any, logits: Any) -> None:
        rows = logits[: sequence.completion.num_remaining].contiguous().numpy()
        self._digests.setdefault(sequence, hashlib.sha256()).update(rows)

    def run(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], num_drafts: int | None
    ) -> list[Any]:
        """Run requests to their end at once; per request tokens, log-probabilities, hash of the logits."""
        states = [
            self.engine.add_request(prompt, one, num_speculative_tokens=num_drafts)
            for prompt, one in zip(prompts, params, strict=True)
        ]
        while any(not state.is_finished for state in states):
            self.engine.step()
        found = []
        for state in states:
            output = state.snapshot().outputs[0]
            self.num_accepted += output.speculation.num_accepted_tokens if output.speculation else 0
            digest = self._digests.pop(state.sequences[0]).hexdigest()
            found.append((list(output.token_ids), output.logprobs, digest))
        return found
