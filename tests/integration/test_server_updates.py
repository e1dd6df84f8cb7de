"""New weights while everything else goes on: one at a time, between requests, or not at all."""

from __future__ import annotations

import contextlib
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from lean_laguna.core.types import SamplingParams
from lean_laguna.engine.llm import LLM
from lean_laguna.models.checkpoint import save_laguna
from lean_laguna.models.drafter_checkpoint import save_drafter
from lean_laguna.models.laguna import LagunaForCausalLM
from lean_laguna.server import admin
from support.checkpoints import write_tiny_drafter, write_tiny_target
from support.drafters import laguna_json, random_drafter
from support.engines import VOCAB, tiny_config
from support.servers import RunningServer, running, wait_until

PROMPT = [40 + i for i in range(21)]
BODY: dict[str, Any] = {
    "prompt": PROMPT,
    "temperature": 0,
    "max_tokens": 12,
    "ignore_eos": True,
    "return_token_ids": True,
}
LONG = {**BODY, "max_tokens": 200}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two targets of one shape, and a drafter."""
    made = {name: tmp_path_factory.mktemp(name) for name in ("one", "two", "drafter")}
    write_tiny_target(made["one"])
    write_tiny_target(made["two"])
    other = LagunaForCausalLM(tiny_config())
    other.reset_parameters(std=0.12, generator=torch.Generator().manual_seed(77))
    save_laguna(other, tiny_config(), made["two"])
    write_tiny_drafter(made["drafter"])
    return made


@pytest.fixture
def up(folders: dict[str, Path]) -> Iterator[RunningServer]:
    with serving(folders) as server:
        yield server


@contextlib.contextmanager
def serving(folders: dict[str, Path]) -> Iterator[RunningServer]:
    def load() -> LLM:
        torch.set_num_threads(1)
        drafter = {"model": str(folders["drafter"])}
        sizes = {"prefill_chunk_size": 8, "kv_block_size": 4, "max_num_seqs": 4}
        return LLM(str(folders["one"]), speculative_config=drafter, seed=0, **sizes)

    with running(load, enable_admin=True) as server:
        yield server


class Later:
    """A call that is under way."""

    def __init__(self, call: Callable[..., Any], *args: Any, **body: Any):
        self.found: list[Any] = []
        self._thread = threading.Thread(target=lambda: self.found.append(call(*args, **body)))
        self._thread.start()

    def join(self) -> Any:
        self._thread.join(60)
        return self.found[0]


class SlowLoading:
    """Stands for loading: says when it began and ends when it may."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.begun, self.may_end, self.models = threading.Semaphore(0), threading.Semaphore(0), []
        load = admin.load_engine

        def slowly(config: Any) -> Any:
            self.models.append(config.model)
            self.begun.release()
            assert self.may_end.acquire(timeout=60)
            return load(config)

        monkeypatch.setattr(admin, "load_engine", slowly)


def tokens(server: RunningServer, **body: Any) -> list[int]:
    found: list[int] = server.ok("/v1/completions", **{**BODY, **body})["choices"][0]["token_ids"]
    return found


def num_held(server: RunningServer) -> int:
    return server.service._num_held


def test_no_key_of_the_old_weights_is_served_with_the_new(
    up: RunningServer, folders: dict[str, Path]
) -> None:
    before = tokens(up)
    assert up.ok("/v1/completions", **BODY)["usage"]["prompt_tokens_details"]["cached_tokens"] == 16
    up.ok("/update_weights", checkpoint=str(folders["two"]), version="step-7")
    assert up.client.get("/version").json()["weights_version"] == "step-7"
    answer = up.ok("/v1/completions", **BODY)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    fresh = LLM(str(folders["two"])).generate([PROMPT], params)[0].outputs[0].token_ids
    assert answer["choices"][0]["token_ids"] == list(fresh) != before


def test_updates_that_overlap_take_turns_and_the_gate_stays_closed(
    up: RunningServer, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = SlowLoading(monkeypatch)
    first = Later(up.ok, "/update_weights", checkpoint=str(folders["two"]), version="a")
    assert slow.begun.acquire(timeout=60)
    second = Later(up.ok, "/update_weights", checkpoint=str(folders["one"]), version="b")
    asked = Later(up.ok, "/v1/completions", **BODY)
    wait_until(lambda: num_held(up) == 1)
    assert len(slow.models) == 1  # the second waits for its turn
    slow.may_end.release()
    assert first.join()["weights_version"] == "a"
    assert slow.begun.acquire(timeout=60)
    assert num_held(up) == 1
    assert up.service.engine.num_live_seqs == 0
    slow.may_end.release()
    assert second.join()["weights_version"] == "b"
    served = asked.join()["choices"][0]["token_ids"]
    assert served == tokens(up)


def test_one_that_fails_beside_another_opens_nothing(
    up: RunningServer, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = SlowLoading(monkeypatch)
    first = Later(up.ok, "/update_weights", checkpoint=str(folders["two"]))
    assert slow.begun.acquire(timeout=60)
    wrong = Later(up.post, "/update_weights", checkpoint="no-such-model")
    assert up.post("/update_weights").status_code == 400  # says nothing to load: known at once
    asked = Later(up.ok, "/v1/completions", **BODY)
    wait_until(lambda: num_held(up) == 1)
    assert up.ok("/resume")["is_paused"] is False
    assert num_held(up) == 1
    slow.may_end.release(2)
    assert first.join()["weights_version"] == "2"
    assert wrong.join().status_code == 400
    assert asked.join()["choices"][0]["token_ids"] == tokens(up)
    assert up.client.get("/version").json()["weights_version"] == "2"


def test_resuming_while_an_update_waits_lets_nobody_in(up: RunningServer, folders: dict[str, Path]) -> None:
    assert up.ok("/pause")["is_paused"]
    kept = Later(up.ok, "/v1/completions", **LONG)
    wait_until(lambda: up.service.engine.num_live_seqs == 1)
    assert up.post("/update_weights", checkpoint=str(folders["two"])).status_code == 400
    assert up.service.gate.is_open  # one that was refused holds nobody back
    up.service.engine.is_paused = False  # as a step that takes its time: it runs, and has not ended
    update = Later(up.ok, "/update_weights", checkpoint=str(folders["two"]))
    wait_until(lambda: not up.service.gate.is_open)
    assert up.ok("/resume")["is_paused"] is False
    late = Later(up.ok, "/v1/completions", **BODY)
    kept.join()
    update.join()
    assert late.join()["choices"][0]["token_ids"] == tokens(up)


def test_a_pause_outlasts_an_update_and_holds_between_two(
    up: RunningServer, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = SlowLoading(monkeypatch)
    update = Later(up.ok, "/update_weights", checkpoint=str(folders["two"]))
    assert slow.begun.acquire(timeout=60)
    assert up.ok("/pause", mode="wait")["is_paused"]
    slow.may_end.release(2)
    update.join()
    assert up.client.get("/is_paused").json()["is_paused"]
    asked = Later(up.ok, "/v1/completions", **BODY)
    wait_until(lambda: num_held(up) == 1)
    up.ok("/update_weights", checkpoint=str(folders["one"]))
    assert num_held(up) == 1
    assert not asked.found
    assert up.ok("/resume")["is_paused"] is False
    assert asked.join()["choices"][0]["token_ids"] == tokens(up)


def test_resuming_ends_a_pause_that_still_waits(up: RunningServer) -> None:
    up.ok("/pause")
    kept = Later(up.ok, "/v1/completions", **LONG)
    wait_until(lambda: up.service.engine.num_live_seqs == 1)
    up.service.engine.is_paused = False  # not a step is taken: nothing has told the engine's thread
    pause = Later(up.ok, "/pause", mode="wait")
    wait_until(lambda: not up.service.gate.is_open)
    assert up.ok("/resume")["is_paused"] is False
    kept.join()
    pause.join()
    assert tokens(up)


def test_who_is_aborted_learns_why_and_who_waits_is_served(
    up: RunningServer, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = SlowLoading(monkeypatch)
    up.ok("/pause")
    kept = Later(up.post, "/v1/completions", **LONG)
    wait_until(lambda: up.service.engine.num_live_seqs == 1)
    update = Later(up.ok, "/update_weights", checkpoint=str(folders["two"]), mode="abort")
    answer = kept.join()
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "aborted")
    assert slow.begun.acquire(timeout=60)
    asked = Later(up.ok, "/v1/completions", **BODY)
    wait_until(lambda: num_held(up) == 1)
    up.ok("/resume")
    slow.may_end.release()
    update.join()
    assert asked.join()["choices"][0]["token_ids"] == tokens(up)


@pytest.mark.parametrize("wrong", [{"checkpoint": "no-such-model"}, {"drafter": "no-such-drafter"}, {}])
def test_what_is_wrong_at_sight_ends_and_holds_nobody(up: RunningServer, wrong: dict[str, str]) -> None:
    up.ok("/pause")
    kept = Later(up.post, "/v1/completions", **LONG)
    wait_until(lambda: up.service.engine.num_live_seqs == 1)
    assert up.post("/update_weights", **wrong, mode="abort").status_code == 400
    up.ok("/resume")
    assert kept.join().json()["usage"]["completion_tokens"] == 200


def test_a_checkpoint_without_a_chat_template_ends_nobody(
    up: RunningServer, folders: dict[str, Path], tmp_path: Path
) -> None:
    shutil.copytree(folders["two"], tmp_path / "bare")
    config = tmp_path / "bare" / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "chat_template": None}))
    (tmp_path / "bare" / "chat_template.jinja").unlink(missing_ok=True)
    up.ok("/pause")
    kept = Later(up.post, "/v1/completions", **LONG)
    wait_until(lambda: up.service.engine.num_live_seqs == 1)
    answer = up.post("/update_weights", checkpoint=str(tmp_path / "bare"), mode="abort")
    assert answer.status_code == 400
    assert "no chat template" in answer.text
    up.ok("/resume")
    assert kept.join().json()["usage"]["completion_tokens"] == 200


def test_a_reader_of_an_old_reply_that_leaves_late_ends_nobody_else_s(
    up: RunningServer, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine that takes over gives its ids from the first on."""
    engine, late = up.service.engine, []
    abort = engine.abort
    monkeypatch.setattr(engine, "abort", late.append)
    up.events("/v1/completions", **BODY)
    wait_until(lambda: len(late) == 1)
    up.ok("/update_weights", checkpoint=str(folders["two"]))
    up.ok("/pause")
    asked = Later(up.ok, "/v1/completions", **BODY)
    wait_until(lambda: engine.num_live_seqs == 1)
    assert [state.request_id for state in late[0].states] == list(engine._streams)
    abort(late[0])
    up.ok("/resume")
    assert asked.join()["usage"]["completion_tokens"] == 12


@pytest.mark.parametrize("is_stream", [False, True])
def test_who_leaves_while_held_back_holds_no_place(
    up: RunningServer, folders: dict[str, Path], is_stream: bool
) -> None:
    assert up.ok("/pause", mode="wait")["is_paused"]
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{up.url}/v1/completions", json={**BODY, "stream": is_stream}, timeout=0.3)
    wait_until(lambda: num_held(up) == 0)
    up.ok("/resume")
    assert tokens(up)
    assert up.service.engine.llm.stats().num_requests == 1


def cut_short(folder: Path) -> None:
    file = next(folder.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-100])


def without_template(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{% if %}", encoding="utf-8")


def with_other_tokens(folder: Path) -> None:
    file = folder / "tokenizer.json"
    fields = json.loads(file.read_text(encoding="utf-8"))
    vocab = fields["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    file.write_text(json.dumps(fields), encoding="utf-8")


@pytest.mark.parametrize(
    ("harm", "named"),
    [(cut_short, "safetensors"), (without_template, "chat_template"), (with_other_tokens, "tokens are not")],
)
def test_a_checkpoint_that_cannot_be_served_leaves_the_old_one(
    up: RunningServer, folders: dict[str, Path], tmp_path: Path, harm: Callable[[Path], None], named: str
) -> None:
    before = tokens(up)
    wrong = shutil.copytree(folders["two"], tmp_path / "wrong")
    harm(wrong)
    refused = up.post("/update_weights", checkpoint=str(wrong))
    assert refused.status_code == 400
    assert named in refused.json()["error"]["message"]
    assert tokens(up) == before
    assert up.client.get("/version").json()["weights_version"] == "1"


def test_a_drafter_of_another_shape_leaves_the_old_one(
    up: RunningServer, folders: dict[str, Path], tmp_path: Path
) -> None:
    before = tokens(up)
    shape = {"vocab_size": VOCAB, "draft_vocab_size": VOCAB, "num_target_layers": 4}
    taps = {"target_layer_ids": [0, 2, 3], "mask_token_id": 5, "causal": True}
    short, wide = tmp_path / "short", tmp_path / "wide"
    save_drafter(random_drafter(laguna_json(**shape, block_size=4, dflash_config=taps)), short)
    save_drafter(random_drafter(laguna_json(**shape, hidden_size=64, dflash_config=taps)), wide)
    assert up.post("/update_weights", drafter=str(wide)).status_code == 400
    assert up.post("/update_weights", drafter=str(folders["two"])).status_code == 400
    assert tokens(up, speculative={"num_speculative_tokens": 15}) == before
    assert up.ok("/update_weights", drafter=str(short))
    assert tokens(up, speculative={"num_speculative_tokens": 3}) == before
    assert up.post("/v1/completions", **BODY, speculative={"num_speculative_tokens": 15}).status_code == 400
    assert up.client.get("/metrics").status_code == 200


def test_counters_go_on_and_the_cache_is_described_anew(
    up: RunningServer, folders: dict[str, Path], tmp_path: Path
) -> None:
    names = ("generation_tokens_total", "prompt_tokens_total", "spec_decode_num_drafts_total")
    tokens(up)
    before = {name: up.metric(name) for name in names}
    assert all(before.values())
    size = up.service.engine.llm.engine.kv_bytes
    assert up.metric("cache_config_info", kv_cache_memory_bytes=str(size)) == 1
    shape = {"vocab_size": VOCAB, "draft_vocab_size": VOCAB, "num_target_layers": 4, "num_hidden_layers": 1}
    taps = {"target_layer_ids": [0, 2, 3], "mask_token_id": 5, "causal": True}
    layers = {"layer_types": ["sliding_attention"], "block_size": 4, "dflash_config": taps}
    save_drafter(random_drafter(laguna_json(**shape, **layers)), tmp_path / "small")
    up.ok("/update_weights", drafter=str(tmp_path / "small"))
    assert {name: up.metric(name) for name in names} == before
    now = up.service.engine.llm.engine.kv_bytes
    assert now != size
    assert up.metric("cache_config_info") == up.metric("cache_config_info", kv_cache_memory_bytes=str(now))
    tokens(up)
    assert up.metric("generation_tokens_total") == before["generation_tokens_total"] + BODY["max_tokens"]


def test_the_description_says_what_a_second_update_does(up: RunningServer) -> None:
    operation = up.client.get("/openapi.json").json()["paths"]["/update_weights"]["post"]
    assert "waits for its turn" in operation["description"]
