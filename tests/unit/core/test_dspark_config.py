import pytest

from lean_laguna.core.drafter_config import DFlashConfig
from lean_laguna.core.dspark_config import DSparkHeads
from lean_laguna.core.errors import ConfigError
from support.drafters import DSPARK, deepspec_json, dspark_json, laguna_json, speculators_json


def test_heads_are_read_wherever_they_stand():
    expected = DSparkHeads(4)
    nested = dspark_json()
    on_top = laguna_json(architectures=["LagunaDSparkModel"], **DSPARK)
    prefixed = laguna_json(
        architectures=["LagunaDSparkModel"], **{f"dspark_{key}": value for key, value in DSPARK.items()}
    )
    inside = laguna_json(
        architectures=["LagunaDSparkModel"], dflash_config={**laguna_json()["dflash_config"], **DSPARK}
    )
    for given in (nested, on_top, prefixed, inside, deepspec_json()):
        assert DFlashConfig.from_dict(given).dspark == expected
    assert DFlashConfig.from_dict(laguna_json()).dspark is None


@pytest.mark.parametrize(
    ("given", "is_shifted", "num_drafts"),
    [
        (dspark_json(), False, 5),
        (deepspec_json(), True, 5),
        (speculators_json(speculators_model_type="dspark", sample_from_anchor=None), True, 6),
        (speculators_json(speculators_model_type="dspark"), False, 5),
        (dspark_json(dspark_config={**DSPARK, "sample_from_anchor": True}), True, 6),
    ],
)
def test_the_layout_is_the_formats_own_where_the_file_is_silent(given, is_shifted, num_drafts):
    config = DFlashConfig.from_dict(given)
    assert (config.sample_from_anchor, config.max_draft_tokens) == (is_shifted, num_drafts)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"markov_head_type": "rnn"}, "'markov_head_type' must be 'vanilla', found 'rnn'"),
        ({"markov_rank": 0}, "'markov_rank' must be a whole number of at least 1, found 0"),
        ({"enable_confidence_head": "yes"}, "'enable_confidence_head' must be true or false, found 'yes'"),
        ({"greedy_temperatures": [1.0, 0.0]}, "'greedy_temperatures' must be a list of numbers above 0"),
        ({"greedy_biases": ["x"]}, "'greedy_biases' must be a list of numbers, found"),
        ({"sample_from_anchor": 1}, "'sample_from_anchor' must be true or false"),
    ],
)
def test_wrong_values_are_named(changes, message):
    with pytest.raises(ConfigError, match=message):
        DFlashConfig.from_dict(dspark_json(dspark_config={**DSPARK, **changes}))


def test_a_shifted_dflash_is_refused():
    with pytest.raises(ConfigError, match="a DFlash mask predicts the token at its own position"):
        DFlashConfig.from_dict(laguna_json(sample_from_anchor=True))
