import socket

import pytest

from lean_laguna.core.errors import ConfigError
from lean_laguna.server.listener import bind


def test_a_free_port_is_taken_and_answers_at_once():
    with bind("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname(), timeout=5):
        pass


def test_a_port_in_use_and_a_wrong_host_are_clear_errors():
    with bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}.*choose one with --port"):
            bind("127.0.0.1", port)
    with pytest.raises(ConfigError, match=r"--host no\.such\.host\.invalid"):
        bind("no.such.host.invalid", 0)
