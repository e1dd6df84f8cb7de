"""The port, bound before anything slow happens: whoever calls meanwhile waits instead of being refused."""

from __future__ import annotations

import errno
import socket

from lean_laguna.core.errors import ConfigError


def bind(host: str, port: int) -> socket.socket:
    """Return a listening socket; port 0 takes a free one.

    Raises:
        ConfigError: The address cannot be had; says why.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"--host {host}: {error.strerror or error}") from None
    # A port whose last connections are winding down is free, also after a kill.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        hint = "; another process has it: choose one with --port" if error.errno == errno.EADDRINUSE else ""
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}{hint}") from None
    listener.setblocking(False)
    return listener
