"""What a DSpark drafter's heads say about the token before, computed once a token: text repeats few of them.

A walk asks for one bias row after another, each a product of the whole table; on a CPU that costs as much as
a layer. Rows are kept, the least recently used going first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lean_laguna.models.dspark import DSparkDrafter

Float32Array = NDArray[np.float32]

MAX_BYTES = 64 * 2**20


class MarkovRows:
    """Bias rows and confidence terms by previous token, of a drafter on a CPU; owned by its proposer."""

    def __init__(self, drafter: DSparkDrafter, max_bytes: int = MAX_BYTES):
        """Start with nothing kept.

        Args:
            drafter: Whose heads; weights changed later are noticed.
            max_bytes: Of bias rows, at least one of which is kept.
        """
        self._drafter = drafter
        self._max_rows = max(1, max_bytes // (4 * drafter.config.vocab_size))
        self._rows: OrderedDict[int, Float32Array] = OrderedDict()
        self._own: tuple[Float32Array, float] | None = None
        self._terms: list[float] | None = None
        self._version: tuple[int, ...] = ()

    def refresh(self) -> None:
        """Forget everything if the weights have changed."""
        drafter = self._drafter
        weights = (drafter.markov_w1, drafter.markov_w2, drafter.confidence_weight)
        version = tuple(
            0 if weight.is_inference() else weight._version + weight.data_ptr()
            for weight in weights
            if weight is not None
        )
        if version != self._version:
            self._version, self._own, self._terms = version, None, None
            self._rows.clear()

    def biases(self, tokens: Sequence[int]) -> list[Float32Array]:
        """Return the bias [V] on the target's vocabulary after each of some tokens; not to be changed."""
        missing = [token for token in dict.fromkeys(tokens) if token not in self._rows]
        found: dict[int, Float32Array] = {}
        if missing:
            rows = self._drafter.markov_rows(torch.tensor(missing))
            computed = self._drafter.markov_bias(rows).detach().float().numpy()
            found = dict(zip(missing, computed, strict=True))
        for token in tokens:
            if token in self._rows:
                self._rows.move_to_end(token)
                found[token] = self._rows[token]
        self._rows.update((token, found[token]) for token in missing)
        while len(self._rows) > self._max_rows:
            self._rows.popitem(last=False)
        return [found[token] for token in tokens]

    def guesses(self, hidden: Tensor) -> list[float]:
        """Return the part of each slot's confidence logit [R] that its state [R, D] decides."""
        if self._own is None:
            weight, bias = self._drafter.confidence_weight, self._drafter.confidence_bias
            assert weight is not None
            assert bias is not None
            own = weight[0, : hidden.shape[1]].detach().float().numpy()
            self._own = own, float(bias)
        values: list[float] = (hidden.float().numpy() @ self._own[0] + self._own[1]).tolist()
        return values

    def guess_after(self, token: int) -> float:
        """Return the part of a confidence logit that the token before decides; 0 for a head without it."""
        drafter = self._drafter
        if not drafter.heads.confidence_with_markov:
            return 0.0
        if self._terms is None:
            weight = drafter.confidence_weight
            assert weight is not None
            terms = drafter.markov_w1.float() @ weight[0, -drafter.heads.markov_rank :].float()
            self._terms = terms.tolist()
        return self._terms[token]
