from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lean_laguna.bench.charts import Point, bars_svg, line_svg, text_bar


@given(st.floats(-1, 2), st.integers(1, 40))
def test_a_bar_is_as_wide_as_its_column_and_never_overflows(share, width):
    assert len(text_bar(share, width)) == width


def test_a_bar_grows_by_eighths():
    assert text_bar(0, 4) == "    "
    assert text_bar(0.5, 4) == "██  "
    assert text_bar(1 / 32, 4) == "▏   "
    assert text_bar(1, 4) == "████"


@pytest.mark.parametrize(
    "points",
    [
        [],
        [Point("a", 0.0)],
        [Point('a < & "b"', 1e-9), Point("c", 3.0, 2.0, 4.0, is_good=False)],
        [Point(str(i), 10.0**i) for i in range(5)],
    ],
)
def test_charts_are_well_formed_xml_and_stay_inside(points):
    for svg in (
        bars_svg("a & <b>", points, y_label="t/s"),
        bars_svg("share", points, y_label="s", top=1.0),
        line_svg("x", points, y_label="y", x_label="x", baseline=2.0),
        line_svg("x", points, y_label="y", x_label="x", baseline=None),
    ):
        ElementTree.fromstring(svg)
    tallest = ElementTree.fromstring(bars_svg("t", points, y_label="y"))
    assert all(float(r.get("height", "0")) >= 0 for r in tallest.iter("{http://www.w3.org/2000/svg}rect"))
