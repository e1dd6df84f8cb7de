import pytest

from lean_laguna.core.errors import ConfigError
from lean_laguna.core.json_fields import Fields, is_count, is_finite_number


@pytest.mark.parametrize("found", [0, -1, 1.0, "3", True])
def test_a_count_is_a_positive_whole_number(found):
    with pytest.raises(ConfigError, match=r"a\.json: 'n' must be a whole number of at least 1, found"):
        Fields({"n": found}, "a.json").count("n")


def test_null_counts_as_absent():
    fields = Fields({"n": None}, "a.json")
    assert "n" not in fields
    assert fields.count("n", 7) == 7
    assert fields.ids("n") is None
    with pytest.raises(ConfigError, match="'n' is missing; expected a whole number of at least 1"):
        fields.count("n")


def test_a_section_names_where_it_stands():
    fields = Fields({"part": {"n": "x"}, "list": []}, "a.json")
    with pytest.raises(ConfigError, match=r"a\.json: part: 'n' must be"):
        fields.section("part").count("n")
    assert not fields.section("absent").values
    with pytest.raises(ConfigError, match="'list' must be a JSON object"):
        fields.section("list")


@pytest.mark.parametrize("found", [[], [1, "2"], [True], 3, [1.0]])
def test_ids_are_a_list_of_whole_numbers(found):
    with pytest.raises(ConfigError, match="'ids' must be a non-empty list"):
        Fields({"ids": found}, "a.json").ids("ids")


@pytest.mark.parametrize("found", [0, -1e-6, "1", True, float("nan")])
def test_a_number_is_above_zero(found):
    with pytest.raises(ConfigError, match="'eps' must be a number above 0"):
        Fields({"eps": found}, "a.json").number("eps", 1.0)


@pytest.mark.parametrize("value", [10**30, 2**31, 10**400, -1, True, 1.0, "1", None, [1]])
def test_a_count_is_a_whole_number_that_a_tensor_can_have(value):
    assert not is_count(value, 0)


@pytest.mark.parametrize("value", [10**400, float("nan"), float("inf"), True, "1", None, []])
def test_a_finite_number_is_one_that_a_float_can_hold(value):
    assert not is_finite_number(value)
    assert is_finite_number(1)
    assert is_finite_number(-0.5)
