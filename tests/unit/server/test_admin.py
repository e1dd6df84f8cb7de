import types

import pytest

from lean_laguna.core.types import SamplingParams
from lean_laguna.engine.llm import LLM
from lean_laguna.server.admin import _reload
from lean_laguna.server.errors import ApiError
from lean_laguna.server.metrics import Metrics
from lean_laguna.server.schemas import UpdateWeightsRequest
from lean_laguna.server.service import Service
from lean_laguna.server.settings import ServerConfig


@pytest.fixture
def dummy(tmp_path, monkeypatch):
    """An engine over random weights, started in a folder that holds some checkpoint's recommendations."""
    (tmp_path / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.25, "top_k": 3}')
    monkeypatch.chdir(tmp_path)
    return LLM(load_format="dummy", shape="nano", device="cpu", max_model_len=64)


def test_random_weights_recommend_nothing_whatever_lies_in_the_working_folder(dummy):
    for llm in (dummy, LLM.from_engine(dummy.engine, dummy.folder)):
        engine = types.SimpleNamespace(llm=llm)
        assert Service(ServerConfig(), engine, Metrics("m")).defaults() == {}
        assert llm.default_sampling_params() == SamplingParams(max_tokens=None)


def test_random_weights_are_not_said_to_be_replaced(dummy):
    with pytest.raises(ApiError, match="random weights") as caught:
        _reload(dummy, UpdateWeightsRequest(checkpoint="nano"))
    assert caught.value.status == 400
