import pytest

from lean_laguna.core.errors import ConfigError
from lean_laguna.plan.units import count, gb, gib, parse_bandwidth, parse_bytes, per_s


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("24GiB", 24 * 2**30),
        ("24G", 24 * 2**30),
        ("24 GB", 24 * 10**9),
        ("1.5tb", 15 * 10**11),
        ("12884901888", 12884901888),
        ("512MiB", 2**29),
    ],
)
def test_sizes_are_read_as_written(text, expected):
    assert parse_bytes(text, "--memory") == expected


@pytest.mark.parametrize(("text", "expected"), [("273", 273e9), ("273GB/s", 273e9), ("4.8 TB/s", 4.8e12)])
def test_bandwidths_are_read_as_written(text, expected):
    assert parse_bandwidth(text, "--bandwidth") == expected


@pytest.mark.parametrize("text", ["", "many", "-1G", "0", "24XB", "1e9", "9" * 400])
def test_what_is_no_size_is_refused_by_flag(text):
    with pytest.raises(ConfigError, match="--memory must be a size"):
        parse_bytes(text, "--memory")
    with pytest.raises(ConfigError, match="--bandwidth must be a bandwidth"):
        parse_bandwidth(text, "--bandwidth")


def test_less_than_a_byte_is_no_size():
    with pytest.raises(ConfigError, match=r"--memory must be at least one byte, .* found '0\.5'"):
        parse_bytes("0.5", "--memory")


def test_numbers_carry_their_units():
    assert [gib(n) for n in (512, 2**21, 3 * 2**30, -(2**30))] == [
        "0.5 KiB",
        "2.0 MiB",
        "3.00 GiB",
        "-1.00 GiB",
    ]
    assert [gb(n) for n in (4096, 5.5e6, 4.18e9)] == ["4.1 kB", "5.5 MB", "4.18 GB"]
    assert [per_s(n) for n in (273e9, 4.8e12)] == ["273 GB/s", "4.80 TB/s"]
    assert [count(n) for n in (12, 4100, 122.7e6, 33.44e9)] == ["12", "4.1 K", "122.7 M", "33.44 B"]
