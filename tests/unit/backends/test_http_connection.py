import pytest

from lean_laguna.backends.http_connection import HttpConnection
from lean_laguna.core.errors import BackendError
from support.foreign_server import foreign, words


@pytest.fixture
def asked():
    with foreign(lambda body: words("a", " b")) as server:
        connection = HttpConnection(f"{server.url}/v1")
        yield server, connection
        connection.close()


def test_what_a_server_says_about_itself_is_read_or_absent(asked):
    server, connection = asked
    assert connection.run(connection.version()) is None
    assert connection.run(connection.counts("theirs")) is None
    server.pages["/version"] = (200, {"version": "0.30.1"})
    server.pages["/metrics"] = "x:spec_decode_num_drafts_total 4\n"
    assert connection.run(connection.version()) == "0.30.1"
    assert connection.run(connection.counts("theirs")).num_drafts == 4
    server.pages["/version"] = (200, ["0.30.1"])
    assert connection.run(connection.version()) is None


def test_a_stream_is_its_events_without_the_closing_mark(asked):
    _, connection = asked

    async def collect():
        return [event async for event in connection.events("/v1/completions", {"prompt": "x"})]

    assert connection.run(collect()) == words("a", " b")[:-1]


def test_a_path_that_fails_names_itself(asked):
    server, connection = asked
    with pytest.raises(BackendError, match=f"{server.url}/nowhere answered 404: no such path"):
        connection.run(connection.get("/nowhere"))
    server.pages["/page"] = "<html>"
    with pytest.raises(BackendError, match="/page: not JSON: '<html>'"):
        connection.run(connection.get_json("/page"))
