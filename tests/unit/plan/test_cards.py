import pytest

from lean_laguna.core.errors import ConfigError
from lean_laguna.plan.cards import ALIASES, CARDS, GIB, card


@pytest.mark.parametrize("name", ["h200", "H200", "NVIDIA H200", " h200 "])
def test_case_and_spaces_do_not_matter(name):
    assert card(name).name == "NVIDIA H200"


@pytest.mark.parametrize(
    ("name", "key"), [("rtx pro 6000", "rtx-pro-6000"), ("spark", "gb10"), ("4090", "rtx-4090")]
)
def test_usual_names_are_known(name, key):
    assert card(name) is CARDS[key]


def test_an_unknown_card_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'rtx-5090'"):
        card("rtx 5080ti")


def test_the_table_is_plausible():
    assert set(ALIASES.values()) <= set(CARDS)
    for entry in CARDS.values():
        assert 16 * GIB < entry.memory_bytes < 200 * GIB
        assert 0.2e12 < entry.bandwidth < 10e12
        assert entry.reached is None or 0.5 * entry.bandwidth < entry.reached < entry.bandwidth
        # Where the system lives in the same memory, some is left to it.
        assert (entry.usable_bytes < entry.memory_bytes) == entry.is_unified


def test_published_figures():
    # The bandwidth of the DGX Spark recipe; what a read-only kernel reached on an H200.
    assert (card("gb10").bandwidth, card("gb10").reached) == (273e9, 231e9)
    assert (card("h200").bandwidth, card("h200").reached) == (4.8e12, 4.57e12)
