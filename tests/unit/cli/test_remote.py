"""Commands that ask a server, from the words on the command line to exit status."""

import json

import pytest

from lean_laguna.cli.main import main
from support.foreign_server import foreign, words
from support.servers import running, tiny


@pytest.fixture(scope="module")
def server():
    with running(tiny()) as up:
        yield up


@pytest.fixture
def run(capsys):
    def call(*given):
        status = main([str(word) for word in given])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


def measure(command, url, *more):
    words = (command, "--base-url", url, "--prompts", "trivial", "--num-prompts", "2", "--max-tokens", "10")
    return (*words, "--json", *more)


def test_an_ab_of_one_server_turns_its_drafter_off_and_on(run, server):
    # A length of its own: left to the engine, a busy machine may make it zero.
    how = ("--num-speculative-tokens", "3", "--repeats", "1", "--warmup", "0")
    status, out, err = run(*measure("bench", server.url, *how))
    result = json.loads(out)
    assert status == 0, err
    assert result["engines"]["baseline"]["base_url"] == server.url
    assert "spec_decode_num_drafts" not in result["sides"]["baseline"]
    assert result["sides"]["speculative"]["spec_decode_num_drafts"] > 0
    assert result["sides"]["speculative"]["total_output_tokens"] == 20
    assert result["parity"]["num_mismatches"] == 0
    assert f"over HTTP: {server.url} (lean-laguna" in err


def test_draft_lengths_are_asked_for_per_request(run, server):
    status, out, err = run(
        *measure("sweep", server.url, "--draft-lengths", "2,5", "--repeats", "1", "--warmup", "0")
    )
    assert status == 0, err
    rows = json.loads(out)["rows"]
    assert [row["num_speculative_tokens"] for row in rows] == [0, 2, 5]
    assert len(rows[1]["spec_decode_per_position_acceptance_rates"]) >= 2
    sampled = ("--draft-lengths", "3", "--temperature", "0.8", "--seed", "2")
    status, out, err = run(*measure("parity", server.url, *sampled))
    assert (status, json.loads(out)["parity"]["num_mismatches"]) == (0, 0), err


def test_two_servers_are_compared_as_they_are(run, server):
    with foreign(lambda body: words("a", " b")) as theirs:
        status, out, err = run(*measure("parity", server.url, "--base-url-b", theirs.url, "--model", "nano"))
        assert status == 2
        assert "does not serve the model 'nano'" in err
        status, out, err = run(*measure("parity", server.url, "--base-url-b", theirs.url))
        result = json.loads(out)
    assert status == 1
    assert [v["kind"] for v in result["verdicts"]["other server"]] == ["mismatch"] * 2
    assert all(v["kind"] == "identical" for v in result["verdicts"]["baseline again"])
    assert result["verdicts"]["other server"][0]["reason"].startswith("character 0: ")
    assert f"note, {theirs.url}: it does not report token ids" in err


def test_generate_prints_what_the_server_streams(run, server):
    status, out, err = run("generate", "def f", "--base-url", server.url, "--max-tokens", "6", "--json")
    line = json.loads(out)
    assert status == 0, err
    assert (line["outputs"][0]["num_tokens"], line["engine"]) == (6, "lean-laguna")
    assert line["outputs"][0]["text"] in err
    assert "6 tokens (length) · first after" in err
    assert "· greedy · " in err
    status, out, err = run(
        "generate",
        "def f",
        "--base-url",
        server.url,
        "--max-tokens",
        "6",
        "--show-drafts",
        "--color",
        "always",
    )
    assert (status, "does not say which tokens were drafts" in err) == (0, False)


def test_a_chat_goes_to_the_chat_endpoint(run):
    with foreign(lambda body: words("a")) as theirs:
        chunk = {
            "choices": [{"delta": {"reasoning_content": "hm ", "content": "yes"}, "finish_reason": "stop"}]
        }
        last = {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 2}}
        plain = theirs.completions
        theirs.completions = lambda body: [chunk, last, "[DONE]"] if "messages" in body else plain(body)
        given = ("generate", "hi", "--chat", "--system", "be kind", "--base-url", theirs.url)
        status, out, err = run(*given)
    assert (status, out) == (0, "hm yes\n"), err
    assert [message["role"] for message in theirs.asked[-1]["messages"]] == ["system", "user"]
    assert "note: it reports no speculation counters" in err


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("bench", "--base-url-b", "http://x"), "--base-url-b needs --base-url"),
        (("generate", "x", "--api-key", "k"), "--api-key needs --base-url"),
        (("bench", "--base-url", "http://x", "--device", "cpu"), "--device: not with --base-url"),
        (("bench", "--base-url", "http://x", "--demo"), "--demo: not with --base-url"),
        (("generate", "x", "--base-url", "http://x", "--drafter", "none"), "--drafter: not with --base-url"),
        (("generate", "x", "--base-url", "http://x", "-n", "2"), "one completion at a time"),
        (("generate", "x", "--base-url", "x:1"), "not an address: 'x:1'"),
        (("parity", "--base-url", "http://127.0.0.1:9"), "cannot reach http://127.0.0.1:9"),
    ],
)
def test_what_makes_no_sense_is_one_line(run, given, message):
    status, out, err = run(*given)
    assert (status, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
