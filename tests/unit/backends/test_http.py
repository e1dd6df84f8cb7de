import socket

import pytest

from lean_laguna.backends.http import HttpBackend
from lean_laguna.backends.local import LocalBackend
from lean_laguna.core.errors import BackendError, ConfigError, RequestError
from lean_laguna.core.types import SamplingParams
from lean_laguna.engine.llm import LLM
from support.engines import dflash, make_engine
from support.foreign_server import ForeignServer, foreign, words
from support.servers import running, tiny

PARAMS = SamplingParams(temperature=0, max_tokens=12)
SAMPLED = SamplingParams(temperature=0.8, top_k=20, seed=5, max_tokens=12, logprobs=2)


@pytest.fixture(scope="module")
def server():
    with running(tiny()) as up:
        yield up


@pytest.fixture(scope="module")
def ours(server):
    backend = HttpBackend(server.url)
    yield backend
    backend.close()


@pytest.fixture(scope="module")
def local():
    return LocalBackend(LLM.from_engine(make_engine(dflash())))


@pytest.fixture(autouse=True)
def no_key(monkeypatch):
    for name in ("LEAN_LAGUNA_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("params", [PARAMS, SAMPLED], ids=["greedy", "sampled"])
def test_over_a_socket_the_result_is_the_local_one(ours, local, params):
    for prompt in ("def f(x):", [30, 31, 32]):
        (remote,), (here,) = (b.generate([prompt], params) for b in (ours, local))
        assert (remote.text, remote.token_ids) == (here.text, here.token_ids)
        assert (remote.finish_reason, remote.num_prompt_tokens) == ("length", here.num_prompt_tokens)
        assert remote.num_tokens == len(remote.token_ids) == 12
        if params.logprobs:
            for far, near in zip(remote.logprobs, here.logprobs, strict=True):
                assert set(far) == set(near)
                for token in far:
                    assert far[token].logprob == pytest.approx(near[token].logprob, abs=1e-5)
                    # The wire holds no rank; beyond the top it is only known to be beyond.
                    assert far[token].rank == min(near[token].rank, params.logprobs + 1)


def test_our_server_lacks_nothing_and_says_what_it_is(ours):
    assert ours.limits == []
    info = ours.info()
    assert (info["engine"], info["model"], info["limits"]) == ("lean-laguna", {"name": "nano"}, [])
    assert info["max_model_len"] > 0
    assert "num_speculative_tokens" not in info
    ours.check_seed()
    assert ours.limits == []


def test_several_prompts_run_together_and_come_back_in_order(ours, local):
    seen = []
    prompts = ["a", "bcd", [30, 31]]
    results = ours.generate(prompts, PARAMS, lambda done, total: seen.append((done, total)))
    assert [r.token_ids for r in results] == [r.token_ids for r in local.generate(prompts, PARAMS)]
    assert seen == [(1, 3), (2, 3), (3, 3)]


def test_the_switch_turns_drafting_off_and_sets_its_length(ours):
    off, three = ours.with_speculation(False), ours.with_draft_length(3)
    plain, drafted = (b.generate(["def f(x):"], PARAMS)[0] for b in (off, three))
    assert plain.token_ids == drafted.token_ids
    assert plain.speculation is None
    assert len(drafted.speculation.num_accepted_tokens_per_pos) <= 15
    assert 0 < drafted.speculation.num_draft_tokens <= 3 * drafted.speculation.num_drafts
    assert three.info()["num_speculative_tokens"] == 3
    with pytest.raises(ConfigError, match="a draft length of 99 is beyond the drafter at http"):
        ours.with_draft_length(99)


def test_times_are_of_tokens_not_of_the_closing_chunks(ours):
    (result,) = ours.generate(["def f(x):"], PARAMS)
    assert result.times.arrival_s < result.times.first_token_s < result.times.last_token_s
    assert list(result.arrivals_s) == sorted(result.arrivals_s)
    assert len(result.arrivals_s) <= 12


def test_a_prompt_too_long_is_refused_with_the_servers_words(ours):
    with pytest.raises(RequestError, match=r"refuses the request \(400\).*maximum context length") as caught:
        ours.generate([[30] * 5000], PARAMS)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(RequestError, match="n must be 1"):
        ours.generate(["a"], SamplingParams(n=2))


def test_a_server_that_is_not_there_a_wrong_key_and_a_wrong_model_are_told_apart(server):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        dead = f"http://127.0.0.1:{probe.getsockname()[1]}"
    with pytest.raises(BackendError, match=f"cannot reach {dead}: .*is the server running"):
        HttpBackend(dead)
    with pytest.raises(ConfigError, match="does not serve the model 'nanu'; did you mean 'nano'"):
        HttpBackend(server.url + "/v1/", model="nanu")
    with running(tiny(), api_keys=("right",)) as locked:
        with pytest.raises(ConfigError, match=r"refuses the API key \(401: .*--api-key"):
            HttpBackend(locked.url, api_key="wrong")
        HttpBackend(locked.url, api_key="right").close()


def test_a_plain_server_is_used_for_what_it_can_and_its_limits_are_named():
    with foreign(lambda body: words("a", " b", " c")) as theirs:
        backend = HttpBackend(theirs.url)
        (result,) = backend.generate(["x"], PARAMS)
        assert (result.text, result.token_ids, result.num_tokens) == ("a b c", (), 4)
        assert (result.speculation, result.logprobs) == (None, None)
        assert len(result.arrivals_s) == 3
        assert [limit.split(":")[0] for limit in backend.limits] == [
            "it does not report token ids",
            "it gives no log-probabilities",
            "it does not report usage while it streams",
            "it reports no speculation counters (vLLM's spec_decode_*)",
        ]
        assert backend.info()["engine"] == "vllm"
        with pytest.raises(ConfigError, match=r"cannot be asked for no drafting .*--base-url-b"):
            backend.with_speculation(False)
        backend.close()


def test_extras_that_a_server_refuses_are_left_out():
    def strict(body):
        odd = set(body) - {"model", "prompt", "stream", "stream_options", "temperature", "max_tokens"}
        if odd or "continuous_usage_stats" in body["stream_options"]:
            return 400, {"error": {"message": f"unknown: {odd}"}}
        return words("a", " b")

    with foreign(strict) as theirs:
        backend = HttpBackend(theirs.url)
        assert backend.generate(["x"], PARAMS)[0].num_tokens == 3
        with pytest.raises(RequestError, match=r"unknown: \{'min_p'\}"):
            backend.generate(["x"], SamplingParams(min_p=0.5))
        backend.close()


def test_a_server_that_only_chats_is_asked_by_message_and_that_is_said():
    def chat(body):
        assert body["messages"] == [{"role": "user", "content": body["messages"][0]["content"]}]
        chunks = [{"choices": [{"delta": {"content": text}}]} for text in ("a", "b")]
        return [*chunks, {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 5}}, "[DONE]"]

    with foreign(chat) as theirs:
        theirs.missing.add("/v1/completions")
        backend = HttpBackend(theirs.url)
        (result,) = backend.generate(["hi"], PARAMS)
        assert (result.text, result.num_tokens) == ("ab", 5)
        assert theirs.asked[-1]["messages"][0]["content"] == "hi"
        assert "it has no /v1/completions" in backend.limits[0]
        with pytest.raises(RequestError, match="takes no token ids"):
            backend.generate([[1, 2]], PARAMS)
        backend.close()
        theirs.missing.add("/v1/chat/completions")
        with pytest.raises(BackendError, match="/v1/chat/completions answered 404"):
            HttpBackend(theirs.url)


def test_a_chat_that_wants_the_newer_name_of_the_limit_gets_it():
    def chat(body):
        if "max_tokens" in body:
            said = "'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead."
            return 400, {"error": {"message": said, "code": "unsupported_parameter"}}
        chunks = [{"choices": [{"delta": {"content": text}}]} for text in ("a", "b")]
        return [*chunks, {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 5}}, "[DONE]"]

    with foreign(chat) as theirs:
        theirs.missing.add("/v1/completions")
        backend = HttpBackend(theirs.url)
        for asked in (backend, backend.with_speculation(True)):
            assert asked.generate(["hi"], PARAMS)[0].text == "ab"
            assert theirs.asked[-1]["max_completion_tokens"] == 12
        assert len([body for body in theirs.asked if "messages" in body and "max_tokens" in body]) == 1
        backend.close()


def test_a_server_that_lists_no_model_and_ends_without_a_mark_is_asked_by_name():
    """As the one that the transformers package brings along does."""

    def completions(body):
        chunks = [{"choices": [{"text": text}]} for text in ("a", "b")]
        usage = {"prompt_tokens": 9, "completion_tokens": 5}
        return [*chunks, {"choices": [{"text": "", "finish_reason": "length"}], "usage": usage}]

    with foreign(completions) as theirs:
        theirs.pages["/v1/models"] = (200, {"data": []})
        with pytest.raises(BackendError, match="names no model; give one with --model"):
            HttpBackend(theirs.url)
        backend = HttpBackend(theirs.url, model="theirs")
        (result,) = backend.generate(["hi"], PARAMS)
        assert (result.text, result.num_tokens, result.finish_reason) == ("ab", 5, "length")
        assert theirs.asked[-1]["model"] == "theirs"
        assert any("does not report usage while it streams" in limit for limit in backend.limits)
        backend.close()


COUNTERS = """# HELP vllm:spec_decode_num_drafts_total x
vllm:spec_decode_num_drafts_total{{engine="0",model_name="theirs"}} {0}.0
vllm:spec_decode_num_draft_tokens_total{{engine="0",model_name="theirs"}} {1}
vllm:spec_decode_num_accepted_tokens_total{{engine="0",model_name="theirs"}} {2}
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="theirs",position="0"}} {3}
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="theirs",position="1"}} {4}
vllm:spec_decode_num_drafts_total{{engine="0",model_name="another"}} 5000
"""


def test_acceptance_is_what_the_counters_grew_by():
    with foreign(lambda body: words("a")) as theirs:
        drafts = [100]

        def count(body):
            drafts[0] += 10
            theirs.pages["/metrics"] = COUNTERS.format(
                drafts[0], 2 * drafts[0], drafts[0], 70, 30 + drafts[0]
            )
            return words("a", " b")

        theirs.completions = count
        count({})
        backend = HttpBackend(theirs.url)
        (result,) = backend.generate(["x"], PARAMS)
        stats = result.speculation
        assert (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens) == (10, 20, 10)
        assert stats.num_accepted_tokens_per_pos == (0, 10)
        assert backend.max_draft_tokens == 2
        # Several at once cannot be told apart by a counter.
        assert [r.speculation for r in backend.generate(["x", "y"], PARAMS)] == [None, None]
        with pytest.raises(ConfigError, match="it drafted 20 tokens in 10 steps"):
            backend.with_speculation(False)
        backend.close()


def refuse_seed(server: ForeignServer) -> None:
    texts = iter("abcdefgh")
    server.completions = lambda body: words(next(texts), "!")


def test_a_server_that_ignores_seeds_is_found_out():
    with foreign(lambda body: words("a")) as theirs:
        backend = HttpBackend(theirs.url)
        backend.check_seed()
        assert not any("seed" in limit for limit in backend.limits)
        refuse_seed(theirs)
        backend.check_seed()
        backend.check_seed()
        assert sum("does not repeat itself under a seed" in limit for limit in backend.limits) == 1
        backend.close()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ([{"choices": [{"text": "a"}]}, None], "the connection broke after 1 events"),
        ([{"choices": [{"text": "a"}]}], r"broke off after 1 events, before its \[DONE\]"),
        (["{]"], "a broken event in the stream"),
        (["[1]"], "a broken event in the stream"),
        ([{"error": {"message": "out of memory"}}], "gave up in the stream: out of memory"),
        (words("a", usage=False), "ended without 'usage'"),
        ((500, "<html>oops</html>"), "/v1/completions answered 500: <html>oops</html>"),
        ((503, {"error": {"message": "loading"}}), "answered 503: loading"),
    ],
)
def test_a_broken_server_is_an_error_in_words(answer, message):
    with foreign(lambda body: words("a")) as theirs:
        backend = HttpBackend(theirs.url)
        theirs.completions = lambda body: answer
        with pytest.raises(BackendError, match=message):
            backend.generate(["x"], PARAMS)
        backend.close()


@pytest.mark.parametrize(
    ("page", "message"),
    [
        ((200, "hello"), "not JSON"),
        ((200, {"data": []}), "names no model"),
        ((200, [1]), "names no model"),
        ((404, "nothing here"), "/v1/models answered 404: nothing here"),
    ],
)
def test_something_else_at_that_address_is_said(page, message):
    with foreign(lambda body: words("a")) as theirs:
        theirs.pages["/v1/models"] = page
        with pytest.raises(BackendError, match=message):
            HttpBackend(theirs.url)


@pytest.mark.parametrize("address", ["127.0.0.1:8000", "ftp://x", "http://", ""])
def test_what_is_no_address_is_refused(address):
    with pytest.raises(ConfigError, match="not an address"):
        HttpBackend(address)
