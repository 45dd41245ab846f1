"""Listening sockets: a taken port is told plainly."""

from __future__ import annotations

import socket

import pytest

from engram.kernel.errors import ConfigError
from engram.web.sockets import bound, free_port


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_zero_takes_any_free_port(host: str) -> None:
    with bound(host, 0) as sock:
        assert sock.getsockname()[0] == "127.0.0.1"
        assert sock.getsockname()[1] > 0


def test_a_taken_port_is_refused_with_a_next_step() -> None:
    with bound("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError) as refused:
            bound("127.0.0.1", port)
    assert f"127.0.0.1:{port}" in refused.value.message
    assert "GATEWAY_PORT" in str(refused.value.hint)


@pytest.mark.parametrize("host", ["192.0.2.1", "no such host"])
def test_an_address_that_is_not_ours_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match="cannot listen"):
        bound(host, 0)


def test_a_free_port_can_be_bound_right_after() -> None:
    port = free_port()
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", port))
        assert sock.getsockname()[1] == port
