"""The embedded Redis: its password, its port, and its data after a kill."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from engram.embedded import EmbeddedRedis, redis_binary, running_redis
from engram.embedded.waiting import wait_for
from engram.kernel.errors import EmbeddedError
from engram.kernel.logs import redact


def ask(redis: EmbeddedRedis, *commands: str) -> list[str]:
    """The replies, line by line, without the one to AUTH."""
    password, _, port = redis.url().removeprefix("redis://:").removesuffix("/0").rpartition("@127.0.0.1:")
    with socket.create_connection(("127.0.0.1", int(port)), timeout=10) as connection:
        lines = [f"AUTH {password}", *commands, "QUIT"]
        connection.sendall("".join(f"{line}\r\n" for line in lines).encode())
        with connection.makefile("r", newline="\r\n") as stream:
            replies = stream.read().split("\r\n")
    assert replies[0] == "+OK"
    return replies[1:-2]


def written(redis: EmbeddedRedis) -> bool:
    """Whether everything acknowledged has been handed to the kernel and to the disk."""
    info = ask(redis, "INFO persistence")
    return "aof_buffer_length:0" in info and "aof_pending_bio_fsync:0" in info


@pytest.fixture
def stranger_on_port() -> Iterator[socket.socket]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken


def test_it_keeps_an_append_only_file_and_evicts_nothing(data_dir):
    with EmbeddedRedis(data_dir) as redis:
        asked = ("appendonly", "appendfsync", "maxmemory-policy", "bind", "protected-mode", "save")
        told = {name: ask(redis, f"CONFIG GET {name}")[-1] for name in asked}
        assert told == {
            "appendonly": "yes",
            "appendfsync": "everysec",
            "maxmemory-policy": "noeviction",
            "bind": "127.0.0.1",
            "protected-mode": "yes",
            "save": "",
        }


def test_it_lets_nobody_in_without_the_password(data_dir):
    with EmbeddedRedis(data_dir) as redis:
        port = int(redis.url().rpartition(":")[2].removesuffix("/0"))
        with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
            connection.sendall(b"PING\r\n")
            assert connection.recv(100).startswith(b"-NOAUTH")


def test_the_password_is_in_private_files_only(data_dir):
    with EmbeddedRedis(data_dir) as redis:
        password = (redis.folder / "password").read_text()
        assert len(password) >= 32
        assert password.encode() not in Path(f"/proc/{redis.pid}/cmdline").read_bytes()
        assert password not in redis.log_file.read_text()
        assert password not in redact(f"connecting with {password}")
        for name in ("password", "redis.conf"):
            assert (redis.folder / name).stat().st_mode & 0o777 == 0o600


def test_data_survives_a_kill_and_a_restart(data_dir, kill):
    with EmbeddedRedis(data_dir) as redis:
        assert ask(redis, "SET colour blue", "XADD s 1-1 k v")[0] == "+OK"
        assert wait_for(lambda: written(redis), 10)
        kill(redis.pid)
        redis.start()
        assert ask(redis, "GET colour", "XLEN s") == ["$4", "blue", ":1"]
    with EmbeddedRedis(data_dir) as redis:
        assert ask(redis, "GET colour") == ["$4", "blue"]


def test_a_torn_tail_of_the_file_is_dropped(data_dir):
    with EmbeddedRedis(data_dir) as redis:
        ask(redis, "SET first 1", "SET second 2")
    with (redis.folder / "appendonly.aof").open("ab") as handle:
        handle.write(b"*3\r\n$3\r\nSET\r\n$5\r\nthi")
    with redis.start():
        assert ask(redis, "MGET first second") == ["*2", "$1", "1", "$1", "2"]


def test_a_damaged_file_is_refused_with_its_reason(data_dir):
    with EmbeddedRedis(data_dir) as redis:
        ask(redis, "SET first 1", "SET second 2")
    with (redis.folder / "appendonly.aof").open("r+b") as handle:
        handle.write(b"garbage!")
    with pytest.raises(EmbeddedError, match="Bad file format") as caught:
        redis.start()
    assert "REDIS_URL" in str(caught.value.hint)


def test_the_port_is_kept(data_dir):
    with EmbeddedRedis(data_dir) as redis:
        first = redis.url()
    with EmbeddedRedis(data_dir) as redis:
        assert redis.url() == first


def test_a_port_that_somebody_took_is_chosen_anew(data_dir, stranger_on_port):
    taken = stranger_on_port.getsockname()[1]
    with EmbeddedRedis(data_dir) as redis:
        pass
    (redis.folder / "port").write_text(str(taken))
    with redis.start():
        assert ask(redis, "PING") == ["+PONG"]
        assert not redis.url().endswith(f":{taken}/0")


def test_a_foreign_redis_on_our_port_is_not_adopted(data_dir, tmp_path, kill):
    """Not even one that knows our password: it works in another folder."""
    mine = EmbeddedRedis(data_dir).start()
    foreign = EmbeddedRedis(tmp_path / "foreign").start()
    shutil.copy(foreign.folder / "port", mine.folder / "port")
    shutil.copy(foreign.folder / "password", mine.folder / "password")
    assert mine.url() == foreign.url()
    assert running_redis(data_dir) is None
    kill(mine.pid)
    assert running_redis(data_dir) is None
    with mine.start():
        assert mine.pid != foreign.pid
        assert mine.url() != foreign.url()
        assert foreign.is_alive()
    assert foreign.is_alive()
    foreign.release()


def test_finding_a_running_server_without_starting_one(data_dir):
    assert running_redis(data_dir) is None
    assert not data_dir.exists()
    with EmbeddedRedis(data_dir) as redis:
        assert running_redis(data_dir) == redis.url()
    assert running_redis(data_dir) is None


def test_an_url_before_the_first_start_is_an_error(data_dir):
    with pytest.raises(EmbeddedError, match="password") as caught:
        EmbeddedRedis(data_dir).url()
    assert "start it first" in str(caught.value.hint)


def test_a_folder_with_a_space(data_dir):
    with EmbeddedRedis(data_dir / "a b") as redis:
        assert ask(redis, "PING") == ["+PONG"]


def test_its_own_client_is_there(data_dir):
    assert redis_binary("redis-cli").is_file()
