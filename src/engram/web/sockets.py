"""Listening sockets, bound before anything else starts so that a taken port is told plainly."""

from __future__ import annotations

import socket

from engram.kernel.errors import ConfigError


def bound(host: str, port: int) -> socket.socket:
    """A socket bound to `host:port`; 0 takes any free port."""
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror}", hint="set GATEWAY_PORT to a free port"
        ) from error
    return sock


def free_port(host: str = "127.0.0.1") -> int:
    with bound(host, 0) as sock:
        port: int = sock.getsockname()[1]
        return port
