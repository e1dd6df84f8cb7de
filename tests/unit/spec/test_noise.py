import numpy as np
import pytest

from lean_laguna.spec.noise import NoiseCache, derive_seed, gumbel_noise, gumbel_noise_at, philox4x32

# Random123's kat_vectors, "philox4x32 10": counter, key, result.
KNOWN_ANSWERS = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


def words(values):
    return [np.array([value], dtype=np.uint64) for value in values]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_gives_the_published_vectors(counter, key, expected):
    assert [int(word[0]) for word in philox4x32(words(counter), words(key))] == expected


def test_philox_runs_many_counters_at_once():
    counters = [
        np.array(column, dtype=np.uint64) for column in zip(*(c for c, _, _ in KNOWN_ANSWERS), strict=True)
    ]
    keys = [
        np.array(column, dtype=np.uint64) for column in zip(*(k for _, k, _ in KNOWN_ANSWERS), strict=True)
    ]
    got = np.stack(philox4x32(counters, keys), axis=1)
    assert got.tolist() == [expected for _, _, expected in KNOWN_ANSWERS]


def test_noise_is_the_documented_function_of_seed_position_and_token():
    seed, position = (0x299F31D0 << 32) | 0xA4093822, 0x85A308D3
    got = gumbel_noise([seed], [position], 40)[0]
    for token in range(40):
        lanes = philox4x32(words([token // 4, position, 0, 0]), words([0xA4093822, 0x299F31D0]))
        v = (float(lanes[token % 4][0]) + 0.5) / 2**32
        assert got[token] == pytest.approx(-np.log(-np.log1p(-v)), rel=1e-14)


@pytest.mark.parametrize("vocab_size", [1, 3, 4, 257, 4096, 50_001])
def test_a_row_does_not_depend_on_the_rows_beside_it(vocab_size):
    seeds = [5, 2**64 - 1, 5, 7, 5, 5, 9, 5, 5, 11]
    positions = [0, 3, 1, 2**32 - 1, 0, 8, 9, 10, 11, 12]
    together = gumbel_noise(seeds, positions, vocab_size)
    assert together.shape == (10, vocab_size)
    for row, (seed, position) in enumerate(zip(seeds, positions, strict=True)):
        assert np.array_equal(together[row], gumbel_noise([seed], [position], vocab_size)[0])


@pytest.mark.parametrize("num_tokens", [1, 2, 7, 160, 1000])
def test_noise_of_single_tokens_equals_the_row_bit_for_bit(num_tokens):
    ids = np.random.default_rng(num_tokens).integers(0, 4099, num_tokens)
    rows = gumbel_noise([1, 2**63], [10, 11], 4099)
    seeds, positions = [1, 2**63] * num_tokens, [10, 11] * num_tokens
    got = gumbel_noise_at(seeds, positions, np.repeat(ids, 2))
    assert np.array_equal(got, rows[:, ids].T.reshape(-1))


def test_noise_is_standard_gumbel():
    noise = gumbel_noise([1, 2, 3, 4], [1, 1, 2, 2], 50_000).reshape(-1)
    # Mean Euler's constant, variance pi^2/6; four standard errors of 200,000 draws.
    assert abs(noise.mean() - np.euler_gamma) < 4 * np.sqrt(np.pi**2 / 6 / noise.size)
    assert abs(noise.var() - np.pi**2 / 6) < 4 * np.sqrt(4.4 / noise.size) * np.pi**2 / 6
    assert -3.2 < noise.min() < noise.max() < 22.9


def test_neighbouring_seeds_positions_and_lanes_are_uncorrelated():
    base = gumbel_noise([1], [1], 40_000)[0]
    others = [
        gumbel_noise([2], [1], 40_000)[0],
        gumbel_noise([1], [2], 40_000)[0],
        np.roll(base, 1),
        np.roll(base, 4),
    ]
    for other in others:
        assert abs(np.corrcoef(base, other)[0, 1]) < 4 / np.sqrt(40_000)


def test_completion_zero_keeps_the_seed_and_the_others_differ():
    seeds = [derive_seed(42, index) for index in range(100)]
    assert seeds[0] == 42
    assert len(set(seeds)) == 100
    assert all(0 <= seed < 2**64 for seed in seeds)
    # splitmix64 started at 0: its published first outputs.
    assert [derive_seed(0, i) for i in (1, 2, 3)] == [
        0xE220A8397B1DCDAF,
        0x6E789E6AA1B965F4,
        0x06C45D188009454F,
    ]


def test_cache_returns_the_noise_whatever_was_asked_before():
    cache = NoiseCache(50, max_rows=6)
    rng = np.random.default_rng(0)
    for _ in range(60):
        num = int(rng.integers(1, 9))
        seeds, positions = rng.integers(0, 3, num).tolist(), rng.integers(0, 8, num).tolist()
        assert np.array_equal(cache.rows(seeds, positions), gumbel_noise(seeds, positions, 50))


def test_cache_hands_out_copies():
    cache = NoiseCache(8)
    cache.rows([1], [2])[:] = 0
    assert np.array_equal(cache.rows([1], [2]), gumbel_noise([1], [2], 8))


def test_cache_computes_a_position_once(monkeypatch):
    drawn = []

    def counting(seeds, positions, vocab_size):
        drawn.extend(zip(seeds, positions, strict=True))
        return gumbel_noise(seeds, positions, vocab_size)

    monkeypatch.setattr("lean_laguna.spec.noise.gumbel_noise", counting)
    cache = NoiseCache(8)
    for anchor in range(0, 40, 3):  # draft seven, verify eight, keep three
        cache.rows([1] * 7, list(range(anchor + 1, anchor + 8)))
        cache.rows([1] * 8, list(range(anchor + 1, anchor + 9)))
    assert len(drawn) == len(set(drawn))
    assert len(drawn) <= 39 + 8 + 4
