"""Text that a target wrote: its tokens, the noise that chose them, and the file they are kept in."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from lean_laguna.core.errors import DataError
from lean_laguna.core.files import atomic_writer
from lean_laguna.spec.noise import gumbel_noise
from lean_laguna.train.run_state import DAMAGE


@dataclass(frozen=True)
class Generated:
    """Sequences of one length: a prefix each, then what the target wrote.

    Attributes:
        tokens: [M, S] int32.
        prefix_lengths: [M] int64 on the CPU.
        temperature: Of all sequences, 0 for greedy; for mixed training text the value is not used.
        noise_seed: Seed of the noise that chose the tokens; only evaluation text has one.
        vocab_size: V.
        engine_seed: Of the one sequence's noise where the engine wrote it; its noise is another function.
    """

    tokens: Tensor
    prefix_lengths: Tensor
    temperature: float
    noise_seed: int
    vocab_size: int
    engine_seed: int | None = None

    def written_mask(self, rows: slice | Tensor) -> Tensor:
        """Return which tokens the target wrote, [B, S] bool on the CPU."""
        return torch.arange(self.tokens.shape[1]) >= self.prefix_lengths[rows][:, None]

    def noise(self, start: int, stop: int) -> Tensor:
        """Return the Gumbel noise of rows start..stop, [B, S, V] float32 on the tokens' device."""
        device, length = self.tokens.device, self.tokens.shape[1]
        if self.engine_seed is not None:
            rows = gumbel_noise([self.engine_seed] * length, range(length), self.vocab_size)
            return torch.from_numpy(rows).float().to(device)[None]
        return torch.stack(
            [
                gumbel_rows(self.noise_seed * 65_537 + row, length, self.vocab_size, device)
                for row in range(start, stop)
            ]
        )


def save_generated(text: Generated, path: Path) -> None:
    """Write text to a file, whole or not at all, so that a killed run need not have it written again."""
    held = {"tokens": text.tokens.cpu(), "prefix_lengths": text.prefix_lengths}
    plain = {"temperature": text.temperature, "noise_seed": text.noise_seed, "vocab_size": text.vocab_size}
    with atomic_writer(path) as file:
        torch.save(held | plain, file)


def load_generated(path: Path, device: torch.device) -> Generated:
    """Read what :func:`save_generated` wrote.

    Raises:
        DataError: The file is damaged.
    """
    try:
        held = torch.load(path, map_location="cpu", weights_only=True)
        return Generated(**held | {"tokens": held["tokens"].to(device)})
    except DAMAGE as error:
        raise DataError(f"'{path}' is damaged: {error}; remove it to have the text written again") from None


def gumbel_rows(seed: int, length: int, vocab_size: int, device: torch.device) -> Tensor:
    """Return standard Gumbel noise [length, V] float32, the same for a seed on the same kind of device."""
    generator = torch.Generator(device).manual_seed(seed)
    return gumbel(torch.rand(length, vocab_size, generator=generator, device=device))


def gumbel(uniform: Tensor) -> Tensor:
    """Turn uniform numbers in 0..1 into standard Gumbel noise, element by element."""
    return -torch.log(-torch.log(uniform.clamp(1e-20, 1.0 - 2**-24)))
