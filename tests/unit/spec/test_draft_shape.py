import pytest

from lean_laguna.spec.draft_shape import StepShape


def test_rows_cost_and_no_drafts_cost_no_drafting():
    shape = StepShape()
    draft, verify = zip(*(shape.times(1, k) for k in range(16)), strict=True)
    assert draft[0] == 0 < draft[1] < draft[15]
    assert draft[1] < verify[0] < verify[1]
    assert list(verify) == sorted(verify)


def test_rows_within_a_tile_cost_less_than_those_beyond_it():
    _, seven = StepShape(None, (8, 16)).times(1, 7)
    _, eight = StepShape(None, (8, 16)).times(1, 8)
    _, six = StepShape(None, (8, 16)).times(1, 6)
    assert eight - seven > 2 * (seven - six) > 0


@pytest.mark.parametrize(
    ("batch", "drafts", "launches"), [(4, 3, 1), (2, 7, 1), (4, 7, 2), (5, 3, 2), (3, 15, 3)]
)
def test_requests_share_launches_as_far_as_they_fit(batch, drafts, launches):
    shape = StepShape(16, (8, 16))
    draft, _ = shape.times(batch, drafts)
    assert draft == pytest.approx(0.3 * launches + 0.01 * batch * (1 + drafts))
    assert shape.times(16, 0)[1] < 2 * shape.times(8, 0)[1]


def test_the_shape_is_sure_within_a_tile_and_least_of_all_of_plain_steps():
    shape = StepShape(None, (4, 8, 16))
    assert shape.doubt(1, 6, 7) < shape.doubt(1, 4, 7) < shape.doubt(1, 3, 4) < shape.doubt(1, 0, 4)
    assert shape.doubt(2, 3, 4) == shape.doubt(1, 3, 4), "eight rows and ten"


def test_launches_that_were_timed_take_what_they_took():
    verify = [
        [0.0, *[1 + 0.1 * rows for rows in range(1, 33)]],
        [0.0, *[4 + 0.05 * rows for rows in range(1, 33)]],
    ]
    draft = [[0.0] + [0.5] * 32, [0.0] + [0.75] * 32]
    shape = StepShape(32, (8, 32), (verify, draft))
    assert shape.times(1, 7) == pytest.approx((0.5, 1.8))
    assert shape.times(4, 7) == pytest.approx((0.75, 5.6))
    assert shape.times(5, 7) == pytest.approx((0.75 + 0.5, 5.6 + 1.8)), "a launch of 32 rows, and one of 8"
    assert shape.times(2, 0) == pytest.approx((0.0, 1.2))
    assert shape.doubt(4, 7, 1) < StepShape(32, (8, 32)).doubt(4, 7, 1)


def test_a_request_of_more_rows_than_a_launch_takes_as_many_of_the_widest():
    timed = [[0.0, *[1.0 + rows for rows in range(16)]]] * 2
    shape = StepShape(16, (8, 16), (timed, timed))
    assert shape.times(1, 31)[1] == 2 * shape.times(1, 15)[1] == 32
