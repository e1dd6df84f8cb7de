import pytest
import torch

from lean_laguna.kernels import linear as module
from lean_laguna.kernels.linear import ROW_TILE, batched_matmul, linear

# Inner and outer sizes: small, odd, wide, and one beyond the panel bound (see the fixture).
SHAPES = [(32, 64), (37, 51), (256, 784), (384, 256), (192, 2048), (1, 3)]


@pytest.fixture(autouse=True)
def forget_what_was_checked(monkeypatch):
    monkeypatch.setattr(module, "PANEL_FROM", 192 * 2048)
    yield
    module._heights.cache_clear()
    module._batch_mode.cache_clear()


def weight_of(inner, columns, layout, generator):
    weight = torch.randn(columns, inner, generator=generator)
    return weight.t().contiguous().t() if layout == "transposed" else weight


@pytest.mark.parametrize("layout", ["rows", "transposed"])
@pytest.mark.parametrize(("inner", "columns"), SHAPES)
def test_a_row_has_the_same_bits_alone_and_anywhere(inner, columns, layout, generator):
    weight = weight_of(inner, columns, layout, generator)
    rows = torch.randn(20, inner, generator=generator)
    alone = torch.cat([linear(row[None], weight) for row in rows])
    for count in range(1, 18):
        assert torch.equal(linear(rows[:count], weight), alone[:count])
    for start in range(9):
        assert torch.equal(linear(rows[start : start + 11], weight), alone[start : start + 11])
    assert torch.equal(linear(rows, weight), alone)
    loud = 1e6 * torch.randn(16, inner, generator=generator)
    for slot in range(16):
        loud_rows = loud.clone()
        loud_rows[slot] = rows[3]
        assert torch.equal(linear(loud_rows, weight)[slot], alone[3])


@pytest.mark.parametrize(("inner", "columns"), SHAPES)
def test_it_multiplies(inner, columns, generator):
    weight, rows = (
        torch.randn(columns, inner, generator=generator),
        torch.randn(13, inner, generator=generator),
    )
    expected = rows.double() @ weight.double().t()
    # K products of N(0, 1), rounded in float32.
    bound = 1e-6 * inner**0.5 * 4
    assert (linear(rows, weight) - expected).abs().max() < bound


def test_neighbours_that_are_not_finite_stay_alone(generator):
    weight, rows = torch.randn(24, 16, generator=generator), torch.randn(16, 16, generator=generator)
    expected = linear(rows, weight)
    rows[5], rows[9] = float("nan"), float("inf")
    found = linear(rows, weight)
    others = [i for i in range(16) if i not in (5, 9)]
    assert torch.equal(found[others], expected[others])


@pytest.mark.parametrize("count", [1, 2, 5, 16, 40])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_matrix_has_the_same_bits_in_any_batch(count, transposed, generator):
    a = torch.randn(40, 24, 32, generator=generator)
    b = torch.randn(40, 64, 32, generator=generator).transpose(1, 2)
    b = b if transposed else b.contiguous()
    alone = torch.cat([batched_matmul(a[i : i + 1], b[i : i + 1]) for i in range(40)])
    assert torch.equal(batched_matmul(a[:count], b[:count]), alone[:count])
    moved = a.roll(5, 1)
    assert torch.equal(batched_matmul(moved, b).roll(-5, 1), alone)


def test_a_blas_that_mixes_rows_is_met_row_by_row(monkeypatch, generator, capsys):
    monkeypatch.setattr(module, "_keeps_rows", lambda rows, transposed: False)
    module._heights.cache_clear()
    module._batch_mode.cache_clear()
    weight, rows = torch.randn(24, 16, generator=generator), torch.randn(11, 16, generator=generator)
    assert torch.equal(linear(rows, weight), torch.cat([torch.mm(row[None], weight.t()) for row in rows]))
    a, b = torch.randn(3, 8, 16, generator=generator), torch.randn(3, 16, 4, generator=generator)
    one = torch.cat([torch.mm(a[2, 4:5], b[2])])
    assert torch.equal(batched_matmul(a, b)[2, 4:5], one)
    large = torch.randn(2048, 256, generator=generator)
    rows = torch.randn(9, 256, generator=generator)
    assert torch.equal(linear(rows, large)[3:4], linear(rows[3:4], large))
    assert "row by row" in capsys.readouterr().err


def test_a_blas_that_mixes_batches_is_met_one_by_one(monkeypatch, generator):
    alone = torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda a, b: alone(a, b) + (len(a) > 1))
    module._batch_mode.cache_clear()
    a, b = torch.randn(5, 8, 16, generator=generator), torch.randn(5, 16, 4, generator=generator)
    assert torch.equal(batched_matmul(a, b), torch.stack([torch.mm(a[i], b[i]) for i in range(5)]))


def test_bfloat16_rows_keep_their_bits_too(generator):
    weight = torch.randn(48, 32, generator=generator).bfloat16()
    rows = torch.randn(20, 32, generator=generator).bfloat16()
    alone = torch.cat([linear(row[None], weight) for row in rows])
    assert torch.equal(linear(rows, weight), alone)


def test_the_tile_holds_a_verified_block_of_seven_drafts():
    assert ROW_TILE == 8


@pytest.mark.parametrize("height", module.TILE_HEIGHTS)
def test_every_height_of_a_tile_has_the_bits_of_eight_rows(height, generator):
    weight = weight_of(256, 784, "transposed", generator)
    rows = torch.randn(2 * ROW_TILE, 256, generator=generator)
    expected = torch.cat([torch.mm(tile, weight.t()) for tile in rows.split(ROW_TILE)])
    assert torch.equal(linear(rows[:height], weight), expected[:height])


def test_a_height_that_changes_bits_is_not_used(monkeypatch, generator):
    product = torch.mm

    def unlike(a, b, **options):
        return product(a, b * (1 + 1e-6 * (len(a) in (2, 16))), **options)

    monkeypatch.setattr(torch, "mm", unlike)
    module._heights.cache_clear()
    assert module._heights(16, 24, True, torch.float32, 1) == (4, 8, 12)
    weight = weight_of(16, 24, "transposed", generator)
    rows = torch.randn(16, 16, generator=generator)
    expected = torch.cat([product(tile, weight.t()) for tile in rows.split(ROW_TILE)])
    for count in range(1, 17):
        assert torch.equal(linear(rows[:count], weight), expected[:count])


@pytest.mark.parametrize("others", [2, 8, 32])
def test_batches_of_other_heights_agree_in_both_layouts(others, generator):
    a = torch.randn(3, 32, 32, generator=generator)
    keys = torch.randn(3, 64, 32, generator=generator).transpose(1, 2)
    if module.agrees(others, 16, 32, 64):
        assert torch.equal(
            batched_matmul(a[:, :others], keys.contiguous())[:, :2], batched_matmul(a[:, :16], keys)[:, :2]
        )
