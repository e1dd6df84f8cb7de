"""Pausing, new weights, and a request that fails: what happens to one leaves the others alone."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from support.engines import assert_nothing_held
from support.servers import RunningServer, nano, running, tiny, wait_until

BODY = {"prompt": "def fib(n):", "temperature": 0, "max_tokens": 24}


def later(call: Any, **body: Any) -> tuple[threading.Thread, list[Any]]:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(call("/v1/completions", **body)))
    thread.start()
    return thread, found


def test_pause_keeps_requests_and_new_weights_take_over_between_them() -> None:
    with running(nano(), enable_admin=True) as up:
        before = up.ok("/v1/completions", **BODY)["choices"]
        assert up.ok("/pause")["is_paused"] is True
        thread, found = later(up.ok, **BODY)
        wait_until(lambda: up.service.engine.num_live_seqs == 1)
        thread.join(0.3)
        assert not found
        assert up.post("/update_weights", checkpoint="nano").status_code == 400  # a request is kept
        assert up.ok("/resume")["is_paused"] is False
        thread.join()
        assert found[0]["choices"] == before
        assert up.client.get("/version").json()["weights_version"] == "1"
        thread, found = later(up.ok, **{**BODY, "max_tokens": 60, "ignore_eos": True})
        assert up.ok("/update_weights", checkpoint="nano", drafter="nano-dflash")["weights_version"] == "2"
        thread.join()
        assert found[0]["usage"]["completion_tokens"] == 60
        assert up.ok("/v1/completions", **BODY)["choices"] == before
        refused = up.post("/update_weights", checkpoint="no-such-model")
        assert refused.status_code == 400
        assert up.ok("/v1/completions", **BODY)["choices"] == before
        thread, found = later(up.post, **{**BODY, "max_tokens": 1900, "ignore_eos": True})
        while up.service.engine.num_live_seqs == 0:
            pass
        assert up.ok("/pause", mode="abort")["is_paused"] is True
        thread.join()
        assert found[0].status_code == 503
        assert up.ok("/resume")
        assert up.ok("/v1/completions", **BODY, model="nano")["choices"] == before


def test_a_request_that_makes_a_step_fail_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(tiny(max_num_seqs=8)) as up:
        bodies: list[dict[str, Any]] = [
            {
                "prompt": [40 + i, 50, 60],
                "seed": i,
                "max_tokens": 40,
                "ignore_eos": True,
                "return_token_ids": True,
            }
            for i in range(6)
        ]
        alone = [up.ok("/v1/completions", **body)["choices"] for body in bodies]
        poison = {**bodies[0], "seed": 666}
        from lean_laguna.spec.request import SamplingRequest

        commit = SamplingRequest.commit

        def failing(self: SamplingRequest, token_ids: Any) -> None:
            if self.seed == 666 and len(self.output_token_ids) > 5:
                raise RuntimeError("a fault of this request alone")
            commit(self, token_ids)

        monkeypatch.setattr(SamplingRequest, "commit", failing)
        with ThreadPoolExecutor(8) as pool:
            answers = list(
                pool.map(lambda b: up.post("/v1/completions", **b), [*bodies[:3], poison, *bodies[3:]])
            )
        failed = answers.pop(3)
        assert failed.status_code == 500
        assert failed.json()["error"]["type"] == "server_error"
        assert "fault of this request" not in failed.text
        assert [answer.json()["choices"] for answer in answers] == alone
        assert up.metric("request_success_total", finished_reason="error") == 1
        assert_nothing_held(up.service.engine.llm.engine)


def test_an_engine_that_fails_whole_fails_its_requests_and_stays(server: RunningServer) -> None:
    with running(tiny()) as up:
        engine = up.service.engine.llm.engine
        step = engine.step
        engine.step = lambda: 1 / 0  # type: ignore[assignment,method-assign]
        assert up.post("/v1/completions", prompt=[40, 50], max_tokens=4).status_code == 500
        engine.step = step  # type: ignore[method-assign]
        assert up.ok("/v1/completions", prompt=[40, 50], max_tokens=4)
