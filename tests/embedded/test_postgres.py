"""The embedded PostgreSQL: its cluster, its socket, its databases, and what can go wrong with them."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg
import pytest

from engram.embedded import EmbeddedPostgres, accounts, postgres_binary, running_postgres, server
from engram.embedded.processes import Process, servers_in
from engram.embedded.waiting import wait_for
from engram.kernel.errors import EmbeddedError

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can set this up")
NOBODY = 65534


def ask(dsn: str, sql: str) -> object:
    with psycopg.connect(dsn, autocommit=True) as connection:
        row = connection.execute(sql).fetchone()
        return row[0] if row and len(row) == 1 else row


def write(dsn: str, sql: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(sql)


def test_the_cluster_is_durable_private_and_utf8(data_dir):
    with EmbeddedPostgres(data_dir) as pg:
        settings = "select current_setting('{}')"
        assert ask(pg.dsn(), "select current_user") == "engram"
        assert ask(pg.dsn(), "select current_database()") == "engram"
        shown = {
            name: ask(pg.dsn(), settings.format(name))
            for name in ("fsync", "synchronous_commit", "full_page_writes", "listen_addresses")
        }
        assert shown == {
            "fsync": "on",
            "synchronous_commit": "on",
            "full_page_writes": "on",
            "listen_addresses": "",
        }
        assert ask(pg.dsn(), settings.format("max_connections")) == "200"
        assert ask(pg.dsn(), settings.format("server_encoding")) == "UTF8"
        assert ask(pg.dsn(), "select datlocale from pg_database where datname = 'engram'") == "C.UTF-8"
        assert ask(pg.dsn(), "select count(*) from pg_hba_file_rules where type <> 'local'") == 0
        assert ask(pg.dsn(), "select lower('ÄÖ')") == "äö"


@pytest.mark.usefixtures("reused")
def test_the_pid_is_the_postmasters(data_dir):
    with EmbeddedPostgres(data_dir) as pg:
        assert os.path.basename(os.readlink(f"/proc/{pg.pid}/exe")) == "postgres"
        recorded = (pg.folder / "postmaster.pid").read_text().splitlines()[0]
        assert pg.pid == int(recorded)


@pytest.mark.usefixtures("reused")
def test_what_was_committed_is_there_after_a_kill(data_dir, kill):
    with EmbeddedPostgres(data_dir) as pg:
        write(pg.dsn(), "create table t as select 41 + 1 as x")
        kill(pg.pid)
        pg.start()
        assert ask(pg.dsn(), "select x from t") == 42
    with EmbeddedPostgres(data_dir) as pg:
        assert ask(pg.dsn(), "select x from t") == 42


@pytest.mark.parametrize("name", ["with a space", 'quote\'d "and" back\\slash', "comma, separated", "中文"])
def test_any_folder_name_will_do(data_dir, name, monkeypatch, short_tmp):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_tmp))
    data_dir.mkdir(mode=0o700)
    with EmbeddedPostgres(data_dir / name) as pg:
        assert ask(pg.dsn(), "select 1") == 1
    assert not list(servers_in("postgres", pg.folder))


def test_a_path_too_long_for_a_socket(data_dir, monkeypatch, short_tmp):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_tmp))
    long = data_dir / ("x" * 120)
    with EmbeddedPostgres(long) as pg:
        assert ask(pg.dsn(), "select 1") == 1
        (outside,) = short_tmp.glob("engram-*")
        assert outside.stat().st_mode & 0o777 == 0o700
        monkeypatch.delenv("XDG_RUNTIME_DIR")
        assert str(outside) in (running_postgres(long) or "")
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_tmp))
    assert not outside.exists()


@pytest.mark.parametrize(("length", "inside"), [(107, True), (108, False)])
def test_the_longest_path_that_fits(monkeypatch, short_tmp, length, inside):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_tmp))
    data_dir = short_tmp / "data"
    taken = len(os.fsencode(data_dir / "x" / "postgres.socket" / ".s.PGSQL.5432")) - 1
    with EmbeddedPostgres(data_dir / ("x" * (length - taken))) as pg:
        assert ask(pg.dsn(), "select 1") == 1
        assert (pg.data_dir / "postgres.socket").exists() == inside


def test_a_socket_folder_that_is_not_private_is_refused(data_dir, monkeypatch, short_tmp):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_tmp))
    long = data_dir / ("x" * 120)
    with EmbeddedPostgres(long):
        (outside,) = short_tmp.glob("engram-*")
    outside.mkdir(mode=0o755)
    with pytest.raises(EmbeddedError, match="not a private folder"):
        EmbeddedPostgres(long).start()
    outside.rmdir()
    outside.symlink_to(short_tmp)
    with pytest.raises(EmbeddedError, match="not a private folder"):
        EmbeddedPostgres(long).start()


@pytest.mark.usefixtures("reused")
def test_a_folder_named_through_a_link_is_the_same_folder(data_dir, tmp_path):
    (tmp_path / "link").symlink_to(data_dir)
    with EmbeddedPostgres(data_dir) as one, EmbeddedPostgres(tmp_path / "link") as two:
        assert one.pid == two.pid


@pytest.mark.usefixtures("reused")
def test_databases_are_created_once_however_many_ask(data_dir):
    with EmbeddedPostgres(data_dir) as pg:
        names = ["memory", "Weird \"name\" of 'mine'"] * 4
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(pg.ensure_database, names))
        pg.ensure_database("memory")
        for name in set(names):
            assert ask(pg.dsn(name), "select current_database()") == name
        with pytest.raises(EmbeddedError, match="did not create"):
            pg.ensure_database("")


def test_finding_a_running_server_without_starting_one(data_dir):
    assert running_postgres(data_dir) is None
    assert not data_dir.exists()
    with EmbeddedPostgres(data_dir) as pg:
        assert running_postgres(data_dir) == pg.dsn()
        assert ask(running_postgres(data_dir, "postgres") or "", "select current_database()") == "postgres"
    assert running_postgres(data_dir) is None


def test_a_server_with_no_connection_left_is_still_adopted(data_dir):
    with EmbeddedPostgres(data_dir) as pg:
        write(pg.dsn(), "alter system set max_connections = 5")
        write(pg.dsn(), "alter system set superuser_reserved_connections = 0")
        write(pg.dsn(), "alter system set reserved_connections = 0")
        write(pg.dsn(), "alter system set max_wal_senders = 0")
    with EmbeddedPostgres(data_dir) as pg:
        connections = [psycopg.connect(pg.dsn()) for _ in range(5)]
        with EmbeddedPostgres(data_dir) as other:
            assert other.pid == pg.pid
        with pytest.raises(EmbeddedError, match="too many clients"):
            pg.ensure_database("another")
        for connection in connections:
            connection.close()


@pytest.mark.usefixtures("reused")
def test_a_busy_backend_of_a_killed_server_does_not_block_the_next(data_dir, kill, monkeypatch):
    monkeypatch.setattr(server, "STRAY_PATIENCE", 0.3)
    pg = EmbeddedPostgres(data_dir).start()
    busy = psycopg.connect(pg.dsn(), autocommit=True)
    pid = busy.info.backend_pid
    active = f"select true from pg_stat_activity where pid = {pid} and state = 'active'"

    def spin() -> None:
        with pytest.raises(psycopg.OperationalError):
            busy.execute("do $$ begin loop end loop; end $$")

    spinning = threading.Thread(target=spin)
    spinning.start()
    assert wait_for(lambda: ask(pg.dsn(), active), 10)
    kill(pg.pid)
    assert Process.of(pid), "the backend ended by itself: the test shows nothing"
    pg.start()
    spinning.join(10)
    assert Process.of(pid) is None
    assert ask(pg.dsn(), "select 1") == 1
    busy.close()
    pg.release()


def test_a_first_start_killed_half_way(data_dir, another_user):
    user = another_user(EmbeddedPostgres)
    assert wait_for(lambda: any(data_dir.glob("postgres.unfinished-*/PG_VERSION")), 20)
    (initdb,) = Path(f"/proc/{user.process.pid}/task/{user.process.pid}/children").read_text().split()
    os.kill(int(initdb), signal.SIGSTOP)
    user.end()
    assert not (data_dir / "postgres").exists(), "it was not interrupted: the test shows nothing"
    with (data_dir / "postgres.turn").open() as turn, pytest.raises(BlockingIOError):
        fcntl.flock(turn, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.kill(int(initdb), signal.SIGCONT)
    with EmbeddedPostgres(data_dir) as pg:
        assert ask(pg.dsn(), "select 1") == 1
    assert not list(data_dir.glob("postgres.unfinished-*"))


@pytest.mark.usefixtures("reused")
def test_a_starter_killed_before_the_server_is_ready(data_dir, another_user):
    with EmbeddedPostgres(data_dir):
        pass
    user = another_user(EmbeddedPostgres)
    assert wait_for(lambda: any(servers_in("postgres", data_dir / "postgres")), 20)
    user.end()
    with EmbeddedPostgres(data_dir) as pg:
        assert ask(pg.dsn(), "select 1") == 1


def test_a_cluster_of_another_version(data_dir):
    with EmbeddedPostgres(data_dir) as pg:
        pass
    (pg.folder / "PG_VERSION").write_text("16\n")
    before = sorted(path.name for path in pg.folder.iterdir())
    with pytest.raises(EmbeddedError, match=r"PostgreSQL 16, and this engram brings 18") as caught:
        pg.start()
    assert "pg_dump" in str(caught.value.hint)
    assert sorted(path.name for path in pg.folder.iterdir()) == before


def test_a_cluster_that_lost_its_heart(data_dir):
    with EmbeddedPostgres(data_dir) as pg:
        pass
    (pg.folder / "PG_VERSION").unlink()
    with pytest.raises(EmbeddedError, match="not a whole PostgreSQL cluster"):
        pg.start()


def test_a_server_that_refuses_to_start_says_why(data_dir):
    with EmbeddedPostgres(data_dir) as pg:
        pass
    (pg.folder / "postgresql.conf").write_text("no_such_setting = 1\n")
    with pytest.raises(EmbeddedError, match="no_such_setting") as caught:
        pg.start()
    assert "postgres.log" in str(caught.value.hint)


@pytest.mark.usefixtures("reused")
def test_a_server_that_is_too_slow_is_stopped_again(data_dir, running, monkeypatch):
    monkeypatch.setattr(server, "STOP_LIMIT", 5.0)
    monkeypatch.setattr(server, "START_LIMIT", 0)
    pg = EmbeddedPostgres(data_dir)
    with pytest.raises(EmbeddedError, match="has not answered"):
        pg.start()
    assert not running()
    monkeypatch.undo()
    with pg:
        assert ask(pg.dsn(), "select 1") == 1


@pytest.mark.usefixtures("reused")
def test_an_immediate_stop_when_a_fast_one_hangs(data_dir, tmp_path, monkeypatch):
    """A fast shutdown waits for a replica to confirm what it was sent; this one never does."""
    monkeypatch.setattr(server, "STOP_LIMIT", 1.0)
    pg = EmbeddedPostgres(data_dir).start()
    (tmp_path / "wal").mkdir()
    replica = subprocess.Popen(
        [str(postgres_binary("pg_receivewal")), "-n", "-D", str(tmp_path / "wal"), "-d", pg.dsn()],
        stderr=subprocess.DEVNULL,
    )
    streaming = "select true from pg_stat_replication where state = 'streaming'"
    assert wait_for(lambda: ask(pg.dsn(), streaming), 20)
    replica.send_signal(signal.SIGSTOP)
    pg.release()
    assert "immediate shutdown" in pg.log_file.read_text()
    replica.kill()
    replica.wait()
    with pg:
        assert ask(pg.dsn(), "select 1") == 1


@as_root
def test_as_root_without_user_namespaces(data_dir, monkeypatch):
    monkeypatch.setattr(accounts, "_NAMESPACE", ("--no-such-option",))
    with pytest.raises(EmbeddedError, match="user namespaces do not work here") as caught:
        EmbeddedPostgres(data_dir).start()
    assert "POSTGRES_DSN" in str(caught.value.hint)
    assert not (data_dir / "postgres").exists()
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(EmbeddedError, match="no `unshare` program"):
        EmbeddedPostgres(data_dir).start()


@pytest.fixture
def home_of_nobody() -> Iterator[Path]:
    """A folder that an ordinary user can reach; the tests' own are root's."""
    home = Path(tempfile.mkdtemp(prefix="engram-nobody-", dir="/tmp"))
    os.chown(home, NOBODY, NOBODY)
    yield home
    shutil.rmtree(home)


@as_root
def test_root_in_another_users_folder_runs_it_as_that_user(home_of_nobody):
    with EmbeddedPostgres(home_of_nobody) as pg:
        assert ask(pg.dsn(), "select 1") == 1
        assert Path(f"/proc/{pg.pid}").stat().st_uid == NOBODY
    assert {path.lstat().st_uid for path in home_of_nobody.rglob("*")} == {NOBODY}


@as_root
def test_an_ordinary_user(home_of_nobody):
    program = """
import os, sys
from pathlib import Path
from engram.embedded import EmbeddedPostgres, EmbeddedRedis
"a name".encode("idna")
# After the imports: the interpreter's own files may be out of an ordinary user's reach.
os.setgroups([]); os.setgid(65534); os.setuid(65534)
home = Path(sys.argv[1])
with EmbeddedPostgres(home / "d") as pg, EmbeddedRedis(home / "d") as redis:
    print(os.stat(f"/proc/{pg.pid}").st_uid, os.stat(f"/proc/{redis.pid}").st_uid)
(home / "d" / "postgres").chmod(0)
try:
    EmbeddedPostgres(home / "d").start()
except Exception as error:
    print(type(error).__name__, error)
(home / "d" / "postgres").chmod(0o700)
try:
    EmbeddedPostgres(Path("/engram-data")).start()
except Exception as error:
    print(type(error).__name__, error)
"""
    done = subprocess.run(
        [sys.executable, "-B", "-c", program, str(home_of_nobody)],
        capture_output=True,
        text=True,
        timeout=60,
        cwd="/",
        check=False,
    )
    owners, unreadable, unwritable = done.stdout.splitlines() or [done.stderr] * 3
    assert owners == f"{NOBODY} {NOBODY}"
    for line in (unreadable, unwritable):
        assert line.startswith("EmbeddedError PostgreSQL cannot use")
        assert "Permission denied" in line


def on_a_small_disk(tmp_path: Path, megabytes: int, program: str) -> list[str]:
    """Run a program whose folder is a tmpfs of that size, in a mount namespace of its own."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = f'mount -t tmpfs -o size={megabytes}m tmpfs "$1" || exit 99; exec "$2" -B -c "$3" "$1"'
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", mount, "sh", str(disk), sys.executable, program],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if done.returncode == 99:
        pytest.skip("nothing can be mounted here")
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@as_root
def test_a_full_disk_at_the_first_start(tmp_path):
    program = """
import sys
from pathlib import Path
from engram.embedded import EmbeddedPostgres
data_dir = Path(sys.argv[1]) / "data"
try:
    EmbeddedPostgres(data_dir).start()
except Exception as error:
    print(type(error).__name__, str(error).replace("\\n", " "))
print(sorted(path.name for path in data_dir.iterdir()))
"""
    error, left = on_a_small_disk(tmp_path, 12, program)
    assert error.startswith("EmbeddedError initdb failed")
    assert "No space left on device" in error
    assert left == "['postgres.turn', 'postgres.users']"


@as_root
def test_a_full_disk_later_on_and_room_again(tmp_path):
    program = """
import sys
from pathlib import Path
from engram.embedded import EmbeddedPostgres
data_dir = Path(sys.argv[1]) / "data"
with EmbeddedPostgres(data_dir):
    pass
filler = Path(sys.argv[1]) / "filler"
with filler.open("wb", buffering=0) as handle:
    try:
        while True:
            handle.write(b"x" * 4096)
    except OSError:
        pass
try:
    EmbeddedPostgres(data_dir).start()
except Exception as error:
    print(type(error).__name__, str(error).replace("\\n", " "))
filler.unlink()
with EmbeddedPostgres(data_dir) as pg:
    print(pg.is_alive())
"""
    error, alive = on_a_small_disk(tmp_path, 90, program)
    assert error.startswith("EmbeddedError PostgreSQL")
    assert "is full: make room" in error
    assert alive == "True"


def test_its_own_programs_can_reach_it(data_dir):
    with EmbeddedPostgres(data_dir / "a b") as pg:
        done = subprocess.run(
            [str(postgres_binary("psql")), "-XAtc", "select 6 * 7", pg.dsn()],
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.strip() == "42"
