"""The page at ``/`` in headless Chromium: what a person would see."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.chromium import browser
from support.servers import RunningServer, nano, running

TEXT = "document.querySelector('#{} {}').textContent"


def test_the_page_is_one_file_that_talks_to_its_own_server_only(server: RunningServer) -> None:
    response = server.client.get("/")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/html")
    assert "connect-src 'self'" in response.headers["content-security-policy"]
    assert "default-src 'none'" in response.headers["content-security-policy"]
    for outside in ("http://", "https://", "src=", "@import"):
        assert outside not in response.text


def test_streams_tell_which_tokens_were_drafts_only_when_asked(server: RunningServer) -> None:
    body = {"prompt": "class Stack:\n    def", "max_tokens": 40, "temperature": 0}
    flags = {"return_draft_flags": True, "return_token_ids": True}
    whole = server.ok("/v1/completions", **body, **flags)["choices"][0]
    assert len(whole["is_draft_token"]) == len(whole["token_texts"]) == len(whole["token_ids"]) == 40
    assert "".join(whole["token_texts"]) == whole["text"]
    pieces = [e["choices"][0] for e in server.events("/v1/completions", **body, **flags)]
    assert [f for piece in pieces for f in piece["is_draft_token"]].count(True) > 0
    assert [t for piece in pieces for t in piece["token_texts"]] == whole["token_texts"]
    bare = server.ok("/v1/completions", **body, speculative=False, **flags)["choices"][0]
    assert not any(bare["is_draft_token"])
    assert not {"is_draft_token", "token_texts"} & set(server.ok("/v1/completions", **body)["choices"][0])


@pytest.mark.slow
def test_a_person_sees_tokens_arrive_marked_and_both_speeds(server: RunningServer, tmp_path: Path) -> None:
    with browser(tmp_path / "profile") as tab:
        tab.resize(1240, 900)
        tab.open(f"{server.url}/")
        tab.wait("document.getElementById('model').textContent.startsWith('nano · context 2048')")
        tab.run("document.getElementById('limit').value = 60; document.getElementById('heat').value = 0")
        tab.run("document.getElementById('go').click()")
        tab.wait("document.querySelectorAll('#with mark').length > 0")
        assert tab.run("document.getElementById('go').textContent") == "Stop"
        tab.wait("document.getElementById('go').textContent === 'Run'")
        assert "the text is the same, to the last character" in tab.run(
            "document.getElementById('said').textContent"
        )
        said = {side: tab.run(TEXT.format(side, "pre")) for side in ("with", "without")}
        assert said["with"] == said["without"]
        body = {
            "prompt": tab.run("document.getElementById('prompt').value"),
            "max_tokens": 60,
            "temperature": 0,
        }
        assert said["with"] == body["prompt"] + server.ok("/v1/completions", **body)["choices"][0]["text"]
        assert tab.run("document.querySelectorAll('#without mark').length") == 0
        for side in ("with", "without"):
            assert float(tab.run(TEXT.format(side, ".rate")).split()[0]) > 0
            assert tab.run(TEXT.format(side, ".count")).startswith("60 tokens")
        shares = tab.run(
            "[...document.querySelectorAll('#bars > div')].map(bar => parseInt(bar.textContent))"
        )
        assert shares == sorted(shares, reverse=True)
        assert 0 < shares[0] <= 100
        tab.screenshot(tmp_path / "page.png")
        assert (tmp_path / "page.png").stat().st_size > 20_000
        tab.resize(400, 800)
        assert tab.run("document.documentElement.scrollWidth <= 400")
        assert tab.messages == []


@pytest.mark.slow
def test_mistakes_a_key_and_stopping_are_told_in_words(tmp_path: Path) -> None:
    said = "document.getElementById('said').textContent"
    with running(nano(), api_keys=("right",)) as locked, browser(tmp_path / "profile") as tab:
        tab.open(f"{locked.url}/")
        tab.wait("!document.getElementById('keyrow').hidden")
        tab.run("document.getElementById('key').value = 'right'")
        tab.run("document.getElementById('limit').value = 9000; document.getElementById('go').click()")
        tab.wait(f"{said}.includes('maximum context length')")
        tab.run("document.getElementById('limit').value = 1500; document.getElementById('go').click()")
        tab.wait("document.querySelectorAll('#with mark').length > 0")
        tab.run("document.getElementById('go').click()")
        tab.wait(f"{said} === 'Stopped.'")
        tab.wait("document.getElementById('go').textContent === 'Run'")
        tab.run("document.getElementById('how').value = 'chat'; document.getElementById('limit').value = 8")
        tab.run("document.getElementById('go').click()")
        tab.wait(f"{said}.includes('to the last character') || {said}.includes('at once')")
