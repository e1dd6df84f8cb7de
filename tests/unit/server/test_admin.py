import gc
import types
import weakref

import pytest
import torch

from lean_laguna.core.errors import CheckpointError, ConfigError
from lean_laguna.core.types import SamplingParams
from lean_laguna.engine.llm import LLM
from lean_laguna.server import admin
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
        admin._exchange(None, dummy, UpdateWeightsRequest(checkpoint="nano"))
    assert caught.value.status == 400


class Thread:
    """Serves with whatever it is given."""

    def __init__(self):
        self.llm, self.error = None, None

    def replace(self, llm):
        self.llm = llm

    def give_up(self, error):
        self.error = error


@pytest.fixture
def on_a_card(monkeypatch):
    """An engine whose memory another one needs, and what is loaded, and whether the old weights were gone."""
    llm = LLM("nano", speculative_config={"model": "nano-dflash"}, max_model_len=64, seed=0)
    before = [weakref.ref(weight) for weight in llm.engine.target.parameters()]
    cache = weakref.ref(llm.engine._runner)
    loads, load = [], admin.load_engine

    def watched(config):
        loads.append((config.model, cache() is None and all(weight() is None for weight in before)))
        if config.model == "damaged":
            raise CheckpointError("damaged: a tensor is not finite")
        return load(config)

    monkeypatch.setattr(admin, "load_engine", watched)
    monkeypatch.setattr(admin, "_leaves_first", lambda llm: True)
    yield llm, loads
    gc.unfreeze()


def said(llm):
    params = SamplingParams(temperature=0, max_tokens=8)
    return llm.generate(["def fib(n):"], params)[0].outputs[0].token_ids


def test_where_there_is_no_room_for_both_the_old_weights_leave_first(on_a_card):
    llm, loads = on_a_card
    expected, thread = said(llm), Thread()
    admin._exchange(thread, llm, UpdateWeightsRequest(checkpoint="nano"))
    assert loads == [("nano", True)]
    assert said(thread.llm) == expected
    assert (llm.tokenizer.vocab_size, llm.engine.max_model_len) == (4096, 64)  # it still says what it was


def test_a_checkpoint_that_headers_give_away_leaves_the_old_one_serving(on_a_card, tmp_path):
    llm, loads = on_a_card
    expected = said(llm)
    (tmp_path / "config.json").write_text("{}")
    for name in (str(tmp_path), "no-such-model"):
        with pytest.raises((CheckpointError, ConfigError)):
            admin._exchange(Thread(), llm, UpdateWeightsRequest(checkpoint=name))
    assert not loads
    assert said(llm) == expected


@pytest.mark.parametrize("template", [None, "{% if %}"])
def test_a_checkpoint_without_a_chat_template_leaves_the_old_one_serving(template, on_a_card, tmp_path):
    llm, loads = on_a_card
    for file in llm.folder.iterdir():
        if file.name != "chat_template.jinja":
            (tmp_path / file.name).symlink_to(file)
    if template is not None:
        (tmp_path / "chat_template.jinja").write_text(template)
    with pytest.raises(CheckpointError, match="template"):
        admin._exchange(Thread(), llm, UpdateWeightsRequest(checkpoint=str(tmp_path)))
    assert not loads
    assert said(llm)


def test_weights_that_cannot_be_loaded_after_all_bring_the_old_ones_back(on_a_card, monkeypatch):
    llm, loads = on_a_card
    expected, thread = said(llm), Thread()
    resolve = admin.resolve_model
    monkeypatch.setattr(admin, "check_checkpoints", lambda config: None)
    monkeypatch.setattr(admin, "resolve_model", lambda name: resolve("nano"))
    with pytest.raises(CheckpointError, match="not finite"):
        admin._exchange(thread, llm, UpdateWeightsRequest(checkpoint="damaged"))
    assert loads == [("damaged", True), ("nano", True)]
    assert said(thread.llm) == expected
    assert thread.error is None


def test_what_was_loaded_before_the_fault_has_left_too(on_a_card, monkeypatch):
    """A reader's own error, told in other words, holds the frames of the reader: half of the new weights."""
    llm, _ = on_a_card
    held, is_gone, load = [], [], admin.load_engine

    def read():
        half = torch.zeros(8)
        held.append(weakref.ref(half))
        raise ValueError("no such tensor")

    def fails_at_first(config):
        if held:
            is_gone.append(held[0]() is None)
            return load(config)
        try:
            return read()
        except ValueError as error:
            raise CheckpointError(f"damaged: {error}") from None

    monkeypatch.setattr(admin, "load_engine", fails_at_first)
    with pytest.raises(CheckpointError, match="no such tensor"):
        admin._exchange(Thread(), llm, UpdateWeightsRequest(checkpoint="nano"))
    assert is_gone == [True]


def test_without_any_weights_the_server_says_so(on_a_card, monkeypatch):
    llm, _ = on_a_card
    thread = Thread()

    def fails(config):
        raise CheckpointError(f"{config.model}: gone")

    monkeypatch.setattr(admin, "load_engine", fails)
    with pytest.raises(CheckpointError, match="gone"):
        admin._exchange(thread, llm, UpdateWeightsRequest(checkpoint="nano"))
    assert "gone" in str(thread.error)
