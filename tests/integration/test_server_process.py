"""The server as a process: answers before the weights are in, stops cleanly, leaves nothing after a kill."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import httpx
import pytest

from support.servers import events_of

LONG = {"prompt": "def fib(n):", "max_tokens": 1900, "ignore_eos": True, "temperature": 0, "stream": True}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def process(port: int, *options: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "lean_laguna.cli.main", "serve", "--port", str(port), "--threads", "1"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    child = subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True, env=environment)
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


def wait_for(url: str, status: int) -> httpx.Response:
    limit = time.monotonic() + 60
    while True:
        with contextlib.suppress(httpx.TransportError):
            response = httpx.get(f"{url}/health", timeout=60)
            if response.status_code == status:
                return response
        assert time.monotonic() < limit
        time.sleep(0.05)


def stream_until_killed(url: str, child: subprocess.Popen[str]) -> None:
    with httpx.stream("POST", f"{url}/v1/completions", json=LONG, timeout=60) as stream:
        for line in stream.iter_lines():
            if line:
                child.send_signal(signal.SIGKILL)


def test_killed_during_a_stream_the_port_serves_again_and_a_signal_ends_it_cleanly() -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with process(port) as first:
        # The port takes connections at once and answers when there is something to say.
        loading = wait_for(url, 503)
        assert loading.json()["error"]["code"] == "loading"
        wait_for(url, 200)
        with pytest.raises(httpx.TransportError):
            stream_until_killed(url, first)
    with process(port, "--shutdown-timeout", "0") as second:
        wait_for(url, 200)
        with httpx.stream("POST", f"{url}/v1/completions", json=LONG, timeout=60) as stream:
            lines = stream.iter_lines()
            text = next(lines) + "\n"
            second.send_signal(signal.SIGTERM)
            text += "\n".join(lines)
        assert events_of(text)[-1]["error"]["code"] == "stopped"
        assert second.wait(30) == 0


def test_a_signal_while_it_loads_ends_it_cleanly() -> None:
    port = free_port()
    with process(port) as child:
        wait_for(f"http://127.0.0.1:{port}", 503)
        child.send_signal(signal.SIGTERM)
        _, err = child.communicate(timeout=60)
        assert child.returncode == 0
        assert "terminate called" not in err


def test_a_port_in_use_and_a_wrong_model_are_one_line_and_a_status() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with process(port) as child:
            _, err = child.communicate(timeout=60)
        assert child.returncode == 2
        assert err.splitlines()[-1].startswith(f"lean-laguna: error: cannot listen on 127.0.0.1:{port}:")
    with process(0, "--model", "nanu") as child:
        _, err = child.communicate(timeout=60)
    assert child.returncode == 2
    assert "did you mean 'nano'" in err
    assert "Traceback" not in err
