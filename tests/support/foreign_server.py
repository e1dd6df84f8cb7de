"""A server of somebody else's: answers what it was told to, as other engines do and as broken ones do."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

# What each request gets: a status and JSON, or the lines of a stream (None breaks the connection off).
Answer = tuple[int, Any] | list[Any]
MODELS = {"data": [{"id": "theirs", "owned_by": "vllm", "max_model_len": 99}]}


class ForeignServer:
    """A scripted server.

    Attributes:
        url: Where it listens.
        asked: Bodies of the completions requests so far.
        completions: Answers a completions request.
        pages: Answers of GET requests by path.
        missing: Paths of POST requests that do not exist.
    """

    def __init__(self, completions: Callable[[dict[str, Any]], Answer]):
        self.completions = completions
        self.pages: dict[str, Answer | str] = {"/v1/models": (200, MODELS)}
        self.missing: set[str] = set()
        self.asked: list[dict[str, Any]] = []
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, format: str, *args: Any) -> None:
                pass

            def do_GET(self) -> None:
                self._answer(server.pages.get(self.path, (404, {"error": {"message": "no such path"}})))

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                server.asked.append(body)
                if self.path in server.missing:
                    self._answer((404, {"error": {"message": "no such path"}}))
                    return
                self._answer(server.completions(body))

            def _answer(self, answer: Answer | str) -> None:
                if isinstance(answer, list):
                    self._stream(answer)
                    return
                status, content = (200, answer) if isinstance(answer, str) else answer
                text = content if isinstance(content, str) else json.dumps(content)
                self.send_response(status)
                self.send_header("content-length", str(len(text.encode())))
                self.end_headers()
                self.wfile.write(text.encode())

            def _stream(self, events: list[Any]) -> None:
                self.send_response(200)
                if None in events:  # a length that never comes: the client can tell that it broke
                    self.send_header("content-length", "999999")
                self.end_headers()
                self.close_connection = True
                for event in events:
                    if event is None:
                        return
                    text = event if isinstance(event, str) else json.dumps(event)
                    self.wfile.write(f"data: {text}\n\n".encode())
                    self.wfile.flush()

        return Handler


def words(*texts: str, usage: bool = True, **extra: Any) -> list[Any]:
    """Return the stream of a completion, one chunk a text, as a server without extras sends it."""
    chunks: list[Any] = [{"choices": [{"text": text, "finish_reason": None}]} for text in texts]
    chunks[-1]["choices"][0]["finish_reason"] = "length"
    if usage:
        counts = {"prompt_tokens": 3, "completion_tokens": len(texts) + 1}
        chunks.append({"choices": [], "usage": counts, **extra})
    return [*chunks, "[DONE]"]


@contextlib.contextmanager
def foreign(completions: Callable[[dict[str, Any]], Answer]) -> Iterator[ForeignServer]:
    """Run one until the block ends."""
    server = ForeignServer(completions)
    thread = threading.Thread(target=server.http.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.http.shutdown()
        thread.join()
        server.http.server_close()
