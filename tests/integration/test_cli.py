"""Every command on tiny random checkpoints, from the words on the command line to files and exit status."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from xml.etree import ElementTree

import pytest

from lean_laguna.backends.local import LocalBackend
from lean_laguna.cli.drafts import harmless
from lean_laguna.cli.main import main
from support.checkpoints import write_tiny_drafter, write_tiny_target

PROMPT = "def f(x):"
ANSI = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    base = tmp_path_factory.mktemp("checkpoints")
    return write_tiny_target(base / "target"), write_tiny_drafter(base / "drafter")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LEAN_LAGUNA_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def run(folders, capsys):
    """Run a command on the tiny pair in this process; returns (status, standard output, standard error)."""

    def call(*words, model=folders[0], drafter=folders[1]):
        command, *rest = map(str, words)
        status = main([command, "--model", str(model), "--drafter", str(drafter), "--threads", "1", *rest])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


def measure(*words):
    return (*words, "--prompts", "trivial", "--num-prompts", "2", "--max-tokens", "12")


def one_line_error(result):
    status, out, err = result
    assert status == 2
    assert out == ""
    assert err.startswith("lean-laguna: error: ")
    assert err.count("\n") == 1
    return err


def test_generate_prints_the_text_and_says_how_it_went(run):
    status, out, err = run("generate", PROMPT, "--max-tokens", "12", "--json")
    line = json.loads(out)
    text = line["outputs"][0]["text"]
    assert status == 0
    assert len(line["outputs"][0]["token_ids"]) == 12
    assert line["outputs"][0]["finish_reason"] == "length"
    status, out, err = run("generate", PROMPT, "--max-tokens", "12")
    assert (status, out) == (0, text + "\n")
    assert "12 tokens (length)" in err
    assert "greedy" in err


def test_a_drafter_and_its_length_change_nothing_that_generate_prints(run):
    words = ("generate", PROMPT, "--max-tokens", "40", "--temperature", "0.8", "--seed", "5", "--top-k", "50")
    plain = run(*words, drafter="none")[1]
    for length in ("auto", "1", "15", "0"):
        assert run(*words, "--num-speculative-tokens", length)[1] == plain


def test_drafts_are_coloured_on_demand_and_the_text_stays_the_same(run):
    words = ("generate", PROMPT, "--max-tokens", "30", "--num-speculative-tokens", "7", "--show-drafts")
    plain = run(*words)[1]
    on_terminal = ANSI.sub("", run(*words, "--color", "always")[1])
    assert on_terminal == PROMPT + harmless(plain.removesuffix("\n")) + "\n"


def test_the_prompt_can_come_from_a_file_or_through_the_chat_template(run, tmp_path):
    (tmp_path / "prompt.py").write_text(PROMPT)
    from_file = run("generate", "--file", tmp_path / "prompt.py", "--max-tokens", "8", "--json")[1]
    assert json.loads(from_file)["prompt"] == PROMPT
    chat = json.loads(
        run("generate", "hi", "--chat", "--system", "Be brief.", "--max-tokens", "8", "--json")[1]
    )
    assert chat["prompt"] == "〈|EOS|〉<system>Be brief.</system>\n<user>hi</user>\n<assistant></think>"


def test_the_usual_length_gives_way_to_a_short_context_and_a_given_one_does_not(run):
    short = run("generate", PROMPT, "--max-model-len", "20", "--ignore-eos", "--json")
    line = json.loads(short[1])
    assert line["num_prompt_tokens"] + len(line["outputs"][0]["token_ids"]) == 20
    err = one_line_error(run("generate", PROMPT, "--max-model-len", "20", "--max-tokens", "20"))
    assert "the context limit is 20 tokens" in err


def test_several_completions_and_logprobs_reach_the_json_line(run):
    words = ("generate", PROMPT, "-n", "2", "--temperature", "1", "--seed", "1", "--max-tokens", "5")
    line = json.loads(run(*words, "--logprobs", "2", "--prompt-logprobs", "1", "--json")[1])
    assert [c["index"] for c in line["outputs"]] == [0, 1]
    assert all(len(c["logprobs"]) == 5 for c in line["outputs"])
    assert line["prompt_logprobs"][0] is None
    assert "completion 2 of 2" in run(*words)[1]


def test_bench_measures_both_sides_and_writes_what_it_found(run, tmp_path):
    out, page = tmp_path / "r.json", tmp_path / "r.html"
    words = measure("bench", "--num-speculative-tokens", "7", "--repeats", "2", "--out", out, "--html", page)
    status, printed, _ = run(*words, "--json")
    line = json.loads(printed)
    assert status == 0
    assert line == json.loads(out.read_text())
    assert line["parity"]["num_mismatches"] == 0
    assert line["parity"]["control"] == {"identical": 2, "near-tie": 0, "mismatch": 0}
    assert line["engines"]["speculative"]["num_speculative_tokens"] == 7
    assert line["engines"]["baseline"]["model"]["sha256"] == line["engines"]["speculative"]["model"]["sha256"]
    assert "drafter" not in line["engines"]["baseline"]
    assert not any(key.startswith("spec_decode") for key in line["sides"]["baseline"])
    assert line["sides"]["speculative"]["spec_decode_num_drafts"] > 0
    assert line["sides"]["baseline"]["total_output_tokens"] == 2 * 2 * 12
    assert page.read_text().startswith("<!doctype html>")


def test_bench_prints_a_report_for_people(run):
    status, out, err = run(*measure("bench", "--repeats", "1", "--num-speculative-tokens", "3"))
    assert status == 0
    for piece in (
        "without drafter",
        "with drafter",
        "decode, tok/s",
        "0 mismatches",
        "mean acceptance length",
    ):
        assert piece in out
    assert err == ""


def test_the_demo_shows_the_text_of_both_sides_first(run):
    status, out, _ = run(*measure("bench", "--demo"))
    assert status == 0
    first, rest = out.split("decode, tok/s", 1)
    assert first.count("def add(a, b):") == 2
    assert "0 mismatches" in rest


@pytest.mark.parametrize(("given", "repeats"), [((), 2), (("--repeats", "1"), 1)])
def test_the_demo_takes_the_repeats_that_are_given(run, given, repeats):
    status, out, _ = run(*measure("bench", "--demo", *given, "--json"))
    assert status == 0
    assert json.loads(out)["repeats"] == repeats


def test_sweep_names_the_best_length_and_draws_a_chart(run, tmp_path):
    chart = tmp_path / "s.svg"
    status, out, _ = run(
        *measure("sweep", "--draft-lengths", "1,4", "--repeats", "1", "--svg", chart, "--json")
    )
    line = json.loads(out)
    assert status == 0
    assert [row["num_speculative_tokens"] for row in line["rows"]] == [0, 1, 4]
    assert line["best_num_speculative_tokens"] in (0, 1, 4)
    assert line["parity"]["num_mismatches"] == 0
    ElementTree.parse(chart)


@pytest.mark.parametrize("temperature", ["0", "0.8"])
def test_parity_compares_every_length_with_a_control(run, temperature):
    status, out, _ = run(*measure("parity", "--temperature", temperature, "--seed", "3", "--json"))
    line = json.loads(out)
    assert status == 0
    assert list(line["verdicts"]) == [
        "baseline again", "1 draft token", "3 draft tokens", "7 draft tokens", "15 draft tokens"
    ]  # fmt: skip
    assert {v["kind"] for side in line["verdicts"].values() for v in side} == {"identical"}


def corrupt(monkeypatch, side):
    """Make one side change the last token of every output."""
    import dataclasses

    honest = LocalBackend.generate

    def generate(self, prompts, params, on_progress=None):
        results = honest(self, prompts, params, on_progress)
        if self.num_speculative_tokens != side:
            return results
        return [dataclasses.replace(r, token_ids=(*r.token_ids[:-1], 3)) for r in results]

    monkeypatch.setattr(LocalBackend, "generate", generate)


def test_a_mismatch_is_status_1_and_names_the_place(run, monkeypatch):
    corrupt(monkeypatch, 3)
    status, out, _ = run(*measure("parity", "--draft-lengths", "1,3"))
    assert status == 1
    assert "2 mismatches" in out
    assert "token 11" in out
    status, out, _ = run(*measure("sweep", "--draft-lengths", "1,3", "--repeats", "1"))
    assert status == 1
    assert "2 differ" in out


@pytest.mark.parametrize("command", ["generate", "bench", "sweep", "parity"])
def test_a_model_that_is_not_there_is_named_at_once(run, command):
    words = ["x"] if command == "generate" else []
    err = one_line_error(run(command, *words, model="/no/such/folder"))
    assert "/no/such/folder: no such folder" in err


def test_target_and_drafter_in_each_other_s_place_are_named(run, folders):
    target, drafter = folders
    assert "this is a drafter" in one_line_error(run("generate", "x", model=drafter, drafter="none"))
    assert str(target) in one_line_error(run("generate", "x", drafter=target))


def test_a_damaged_checkpoint_is_one_line(run, folders, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(folders[0], broken)
    weights = next(broken.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    assert weights.name in one_line_error(run("generate", "x", model=broken))
    (broken / "config.json").write_text("{")
    assert "config.json" in one_line_error(run("generate", "x", model=broken))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("generate", "x", "--max-tokens", "0"), "max_tokens must be at least 1"),
        (("generate", "x", "--max-tokens", "100000"), "100000"),
        (("generate", ""), "prompt"),
        (("generate", "--file", "/"), "--file /: cannot be read: Is a directory"),
        (("generate", "x", "--num-speculative-tokens", "99"), "99"),
        (("bench", "--prompts", "nothing.jsonl"), "nothing.jsonl"),
        (("bench", "--prompts", "trivial", "--max-tokens", "5000"), "beyond the context"),
        (("bench", "--out", "/no/such/place/r.json"), "does not exist"),
        (measure("sweep", "--draft-lengths", "3,99"), "at most 15"),
        (("parity", "--drafter", "none"), "--drafter none"),
    ],
)
def test_a_mistake_is_one_line_that_names_it(run, words, message):
    assert message in one_line_error(run(*words))


def start(folders, *words, **kwargs):
    """Start a command in a process of its own."""
    command, *rest = words
    argv = [sys.executable, "-m", "lean_laguna.cli.main", command]
    argv += ["--model", str(folders[0]), "--drafter", str(folders[1]), "--threads", "1", *map(str, rest)]
    env = {**os.environ, "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, **kwargs
    )


def test_an_interrupt_is_status_130_and_leaves_no_file(folders, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    words = ("bench", "--prompts", "trivial", "--max-tokens", "150", "--repeats", "1000")
    process = start(folders, *words, "--out", out / "r.json", "--demo")
    assert "Laguna model" in process.stdout.readline()  # it is at work
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    said = [line for line in err.splitlines() if "draft tokens were accepted" not in line]  # a random drafter
    assert said == ["", "lean-laguna: interrupted"]
    assert os.listdir(out) == []


def test_a_reader_that_has_enough_ends_it_quietly(folders):
    process = start(folders, "generate", PROMPT, "--max-tokens", "200", "--ignore-eos")
    process.stdout.read(3)
    process.stdout.close()
    process.stdout = None
    _, err = process.communicate(timeout=60)
    assert process.returncode == 141
    assert "Traceback" not in err


def test_a_pipe_gets_text_from_standard_input_as_it_comes_and_no_escape_codes(folders):
    process = start(folders, "generate", "--max-tokens", "20", "--show-drafts", stdin=subprocess.PIPE)
    out, err = process.communicate(PROMPT, timeout=60)
    assert process.returncode == 0
    assert not ANSI.search(out + err)
    assert "20 tokens" in err
