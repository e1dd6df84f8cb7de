import json

import pytest

from lean_laguna.core.drafter_config import DFlashConfig
from lean_laguna.core.drafter_writing import FORMATS, write_config
from lean_laguna.core.errors import ConfigError
from support.drafters import deepspec_json, laguna_json, speculators_json, zlab_json


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("given", [laguna_json(), zlab_json(), speculators_json(), deepspec_json()])
def test_a_config_is_written_so_that_it_reads_the_same_or_is_refused(given, format):
    config = DFlashConfig.from_dict(given)
    try:
        written = json.loads(json.dumps(write_config(config, format)))
    except ConfigError as error:
        assert f"cannot be written as {format}" in str(error).replace("Laguna native", "laguna")  # noqa: PT017
        return
    again = DFlashConfig.from_dict(written)
    differing = {name for name, value in vars(config).items() if getattr(again, name) != value}
    assert differing <= {"format", "num_target_layers"}


def test_causal_full_layers_cannot_be_said_in_the_speculators_format():
    config = DFlashConfig.from_dict(zlab_json(is_causal=True))
    assert write_config(config, "z-lab")["dflash_config"]["causal"] is True
    with pytest.raises(ConfigError, match="full-attention layers are causal inside the block"):
        write_config(config, "speculators")
