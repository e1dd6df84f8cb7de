"""Counter-based Gumbel noise: the only source of randomness in sampling.

The noise of a token at a position is a function of (seed, position, token id) and of nothing else, so a
row draws the same noise whichever step, batch or draft it is computed in. That makes sampled output
equal with and without speculation, and lets drafter and target draw with the same noise.

Source: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011 (Philox4x32-10);
Maddison, Tarlow and Minka, "A* Sampling", NeurIPS 2014 (the Gumbel-max trick).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

UInt64Array = NDArray[np.uint64]
Float64Array = NDArray[np.float64]

NUM_ROUNDS = 10
LANES = 4
_LOW_WORD = np.uint64(0xFFFFFFFF)
_WORD_BITS = np.uint64(32)
_MULTIPLIER_0, _MULTIPLIER_1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_KEY_STEP_0, _KEY_STEP_1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_UINT64_MASK = 2**64 - 1
_GOLDEN_RATIO = 0x9E3779B97F4A7C15
_BLOCKS_IN_CACHE = 8192  # per call: the temporaries of eight small rows stay in a core's cache
_CACHE_BYTES = 64 * 2**20
_CACHE_ROWS = 512
_LEAST_ROWS_PER_CALL = 4  # one row costs nearly as much as two: what a call costs beside its arithmetic


def philox4x32(counter: Sequence[UInt64Array], key: Sequence[UInt64Array]) -> tuple[UInt64Array, ...]:
    """Run Philox4x32-10 on many counters at once.

    Args:
        counter: Four arrays of 32-bit words held in uint64, of equal rank and broadcastable to one shape.
            Words constant along an axis are best given with length 1 there: the first rounds stay small.
        key: Two arrays of 32-bit words held in uint64, broadcastable likewise.

    Returns:
        Four arrays of random 32-bit words held in uint64, broadcastable to the common shape.
    """
    word_0, word_1, word_2, word_3 = counter
    key_0, key_1 = key
    for _ in range(NUM_ROUNDS):
        product_0 = word_0 * _MULTIPLIER_0
        product_1 = word_2 * _MULTIPLIER_1
        # Words 1 and 3 keep garbage above bit 31; the mask in the next round's _mix takes it off.
        word_0, word_1 = _mix(product_1, word_1, key_0), product_1
        word_2, word_3 = _mix(product_0, word_3, key_1), product_0
        key_0 = (key_0 + _KEY_STEP_0) & _LOW_WORD
        key_1 = (key_1 + _KEY_STEP_1) & _LOW_WORD
    return word_0, word_1 & _LOW_WORD, word_2, word_3 & _LOW_WORD


def _mix(product: UInt64Array, other: UInt64Array, key: UInt64Array) -> UInt64Array:
    """Return the low word of (high half of ``product``) xor ``other`` xor ``key``."""
    mixed = product >> _WORD_BITS
    for operand in (other, key):
        fits = operand.shape[:-1] == mixed.shape[:-1] and operand.shape[-1] in (1, mixed.shape[-1])
        if fits or operand.size == 1:
            mixed ^= operand
        else:
            mixed = mixed ^ operand
    mixed &= _LOW_WORD
    return mixed


def _gumbel(uniform: Float64Array) -> Float64Array:
    """Turn uniform 32-bit words, given as float64, into standard Gumbel noise within [-3.2, 22.9], in place.

    With v = (word + 0.5) / 2**32 this is -log(-log1p(-v)); 1 - v needs 33 bits, so float64 holds it exactly
    and log does as well as log1p, at a fifth of the time.
    """
    uniform -= 2.0**32 - 0.5
    uniform *= -(2.0**-32)
    np.log(uniform, out=uniform)
    np.negative(uniform, out=uniform)
    np.log(uniform, out=uniform)
    return np.negative(uniform, out=uniform)


def _split(seeds: UInt64Array) -> tuple[UInt64Array, UInt64Array]:
    return seeds & _LOW_WORD, seeds >> _WORD_BITS


def gumbel_noise(seeds: Sequence[int], positions: Sequence[int], vocab_size: int) -> Float64Array:
    """Return the noise of every token for each (seed, position).

    Key (seed low, seed high), counter (token // 4, position, 0, 0), lane token % 4.

    Args:
        seeds: R keys in [0, 2**64).
        positions: R absolute positions of the token to be drawn, in [0, 2**32).
        vocab_size: V, at least 1.

    Returns:
        [R, V] float64; row r depends on seeds[r] and positions[r] alone.
    """
    num_blocks = -(-vocab_size // LANES)
    noise = np.empty((len(seeds), num_blocks, LANES), dtype=np.float64)
    keys = np.array(seeds, dtype=np.uint64)[:, None]
    counters = np.array(positions, dtype=np.uint64)[:, None]
    blocks = np.arange(num_blocks, dtype=np.uint64)[None]
    zero = np.zeros((1, 1), dtype=np.uint64)
    num_rows = max(1, _BLOCKS_IN_CACHE // num_blocks)
    for start in range(0, len(seeds), num_rows):
        rows = slice(start, start + num_rows)
        same_key = len(set(seeds[rows])) == 1
        low, high = _split(keys[start : start + 1] if same_key else keys[rows])
        for lane, words in enumerate(philox4x32((blocks, counters[rows], zero, zero), (low, high))):
            noise[rows, :, lane] = words
        _gumbel(noise[rows])
    return noise.reshape(len(seeds), num_blocks * LANES)[:, :vocab_size]


def gumbel_noise_at(
    seeds: Sequence[int] | UInt64Array, positions: Sequence[int] | UInt64Array, token_ids: NDArray[np.int64]
) -> Float64Array:
    """Return the noise of single tokens: element i is that of token_ids[i] at positions[i] under seeds[i].

    Equal, bit for bit, to the same entries of `gumbel_noise`; cheaper where few tokens are left.

    Args:
        seeds: N keys in [0, 2**64).
        positions: N absolute positions.
        token_ids: [N] token ids.

    Returns:
        [N] float64.
    """
    low, high = _split(np.asarray(seeds, dtype=np.uint64))
    tokens = token_ids.astype(np.uint64)
    zero = np.zeros((1,), dtype=np.uint64)
    lanes = philox4x32((tokens >> np.uint64(2), np.asarray(positions, np.uint64), zero, zero), (low, high))
    return _gumbel(np.choose(token_ids & (LANES - 1), lanes).astype(np.float64))


def derive_seed(seed: int, completion_index: int) -> int:
    """Return the key of one of a request's ``n`` completions.

    Completion 0 draws from the request's own seed, so that it equals a request with n = 1; completion i > 0
    from splitmix64's output function applied to seed + i * 0x9E3779B97F4A7C15 (mod 2**64).

    Args:
        seed: The request's seed in [0, 2**64).
        completion_index: 0 to n - 1.

    Source: Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014.
    """
    if completion_index == 0:
        return seed
    mixed = (seed + completion_index * _GOLDEN_RATIO) & _UINT64_MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _UINT64_MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _UINT64_MASK
    return mixed ^ (mixed >> 31)


class NoiseCache:
    """Noise rows by (seed, position), so that each is computed once.

    The drafter draws a position before the target verifies it, and a rejected position comes back in the
    next step; each finds the row here. Owned by the engine and passed to whoever samples. Rows are a function
    of their key, so evicting one costs time and changes nothing. Not safe for use from several threads.
    """

    def __init__(self, vocab_size: int, max_rows: int | None = None):
        """Make an empty cache.

        Args:
            vocab_size: Width V of every row.
            max_rows: Rows kept, the least recently used going first; None keeps up to 512 in at most 64 MiB.
        """
        self.vocab_size = vocab_size
        self._max_rows = max_rows or max(1, min(_CACHE_ROWS, _CACHE_BYTES // (8 * vocab_size)))
        self._slots: OrderedDict[tuple[int, int], int] = OrderedDict()
        self._rows = np.empty((0, vocab_size), dtype=np.float64)

    def rows(self, seeds: Sequence[int], positions: Sequence[int]) -> Float64Array:
        """Return `gumbel_noise` of R keys as a new [R, V] float64 array."""
        keys = list(zip(seeds, positions, strict=True))
        wanted = dict.fromkeys(keys)
        if len(wanted) > self._max_rows:
            return gumbel_noise(seeds, positions, self.vocab_size)
        missing = []
        for key in wanted:
            if key in self._slots:
                self._slots.move_to_end(key)
            else:
                missing.append(key)
        if missing:
            missing += self._ahead(missing, len(wanted))
            new_slots = [self._claim(key) for key in missing]
            noise = gumbel_noise([seed for seed, _ in missing], [at for _, at in missing], self.vocab_size)
            self._rows[new_slots] = noise
        return self._rows[[self._slots[key] for key in keys]]

    def _ahead(self, missing: list[tuple[int, int]], num_wanted: int) -> list[tuple[int, int]]:
        """Return positions after the last missing one, which will be asked for next, to fill up a call."""
        seed, position = missing[-1]
        spare = min(_LEAST_ROWS_PER_CALL - len(missing), self._max_rows - num_wanted)
        following = ((seed, position + 1 + offset) for offset in range(max(0, spare)))
        return [key for key in following if key not in self._slots and key not in missing]

    def _claim(self, key: tuple[int, int]) -> int:
        if len(self._slots) == self._max_rows:
            _, slot = self._slots.popitem(last=False)
        else:
            slot = len(self._slots)
            if slot == len(self._rows):
                grown = np.empty((min(self._max_rows, max(16, 2 * slot)), self.vocab_size), dtype=np.float64)
                grown[:slot] = self._rows
                self._rows = grown
        self._slots[key] = slot
        return slot
