import types

import pytest

from lean_laguna.bench import profile as measuring
from lean_laguna.cli import profile as module
from lean_laguna.cli.bench import build_parser, run
from lean_laguna.core.errors import ConfigError


@pytest.mark.parametrize(
    "words",
    [
        ("--base-url", "http://127.0.0.1:1"),
        ("--html", "page.html"),
        ("--demo",),
        ("--num-prompts", "3"),
        ("--repeats", "1"),
        ("--speculative-config", '{"model": "nano-dflash"}'),
    ],
)
def test_what_a_profile_could_not_honour_is_refused(words):
    with pytest.raises(ConfigError, match=f"^{words[0]}: not with --profile"):
        run(build_parser().parse_strictly(["--profile", *words]))


def test_the_threads_asked_for_are_those_that_are_timed(monkeypatch):
    engine = types.SimpleNamespace(max_model_len=128)
    monkeypatch.setattr("lean_laguna.engine.llm.LLM", lambda *a, **k: types.SimpleNamespace(engine=engine))
    monkeypatch.setattr(measuring, "profile", lambda llm, context_len: {})
    monkeypatch.setattr(measuring, "profile_report", lambda content: "")
    told = []
    monkeypatch.setattr(module, "set_threads", lambda args, llm: told.append(args.threads))
    assert run(build_parser().parse_strictly(["--profile", "--threads", "1"])) == 0
    assert told == [1]
