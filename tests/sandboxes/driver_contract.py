"""What any sandbox driver must pass: what it does, and what nobody inside may do.

A driver's own test module subclasses `DriverContract` and gives a fixture
`driver` with the limits of `conftest.LIMITS`.
"""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from engram.kernel import seccomp
from engram.kernel.errors import ArtifactTooLarge, EngramError, InputError, NotFound, StateConflict
from engram.sandboxes.driver import Command, Driver, Ended, Output

PATIENCE = 20.0
REACHING_OUT = [
    "resource.prlimit(pid, resource.RLIMIT_NOFILE, (200, 200))",
    "resource.prlimit(pid, resource.RLIMIT_CPU)",
    "os.sched_setaffinity(pid, os.sched_getaffinity(0))",
    "os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0))",
    "os.sched_setparam(pid, os.sched_param(0))",
    "os.setpriority(os.PRIO_PROCESS, pid, 19)",
    "ioprio_set(1, pid)",
]


@dataclass
class Ran:
    ended: Ended
    stdout: bytes
    stderr: bytes

    @property
    def code(self) -> int:
        return self.ended.exit_code


async def run(driver: Driver, box: str, *argv: str, seconds: float = 10, **more: Any) -> Ran:
    out = {"stdout": b"", "stderr": b""}
    async with driver.exec(box, Command(argv, timeout_seconds=seconds, **more)) as events:
        async for event in events:
            if isinstance(event, Output):
                out[event.stream] += event.data
            else:
                ended = event
    return Ran(ended, out["stdout"], out["stderr"])


async def python(driver: Driver, box: str, program: str, **more: Any) -> Ran:
    return await run(driver, box, "python", "-c", program, **more)


async def parts(*chunks: bytes) -> AsyncIterator[bytes]:
    for chunk in chunks:
        yield chunk


async def read(driver: Driver, box: str, path: str) -> bytes:
    size, content = await driver.get_file(box, path)
    found = b"".join([part async for part in content])
    assert len(found) == size
    return found


def is_running(marker: str) -> bool:
    """Whether a process has this word on its command line."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            with suppress(OSError):
                if marker.encode() in (folder / "cmdline").read_bytes().split(b"\x00"):
                    return True
    return False


async def until(marker: str, running: bool) -> None:
    give_up = time.monotonic() + PATIENCE
    while is_running(marker) is not running:
        assert time.monotonic() < give_up, f"{marker} should {'' if running else 'not '}be running"
        await asyncio.sleep(0.02)


def a_marker() -> str:
    """A length of sleep that nobody else sleeps."""
    return f"{600 + uuid4().int % 10**6}.{uuid4().int % 10**6}"


@pytest.fixture
async def box(driver: Driver) -> AsyncIterator[str]:
    sandbox_id = str(uuid4())
    await driver.create(sandbox_id)
    yield sandbox_id
    await driver.destroy(sandbox_id)


@pytest.fixture
def listening(tmp_path: Path) -> Iterator[dict[str, Any]]:
    """What somebody on the host listens on; nobody may get through."""
    name = f"engram-{uuid4().hex}"
    tcp, udp = socket.create_server(("127.0.0.1", 0)), socket.socket(type=socket.SOCK_DGRAM)
    udp.bind(("127.0.0.1", 0))
    abstract, named = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
    abstract.bind(f"\0{name}")
    path = f"{tempfile.gettempdir()}/{name}.sock"
    named.bind(path)
    Path(path).chmod(0o666)
    for sock in (abstract, named):
        sock.listen()
    heard: list[str] = []

    def accept(sock: socket.socket, kind: str) -> None:
        with suppress(OSError):
            sock.accept()
            heard.append(kind)

    for sock, kind in ((tcp, "tcp"), (abstract, "abstract"), (named, "named")):
        threading.Thread(target=accept, args=(sock, kind), daemon=True).start()
    ports = {"tcp": tcp.getsockname()[1], "udp": udp.getsockname()[1]}
    yield {**ports, "abstract": name, "named": path, "heard": heard}
    for sock in (tcp, udp, abstract, named):
        with suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
        sock.close()
    os.unlink(path)


@pytest.mark.anyio
class DriverContract:
    async def test_what_is_made_twice_is_one_and_what_is_destroyed_twice_is_gone(
        self, driver: Driver
    ) -> None:
        box = str(uuid4())
        assert not await driver.has(box)
        await driver.create(box)
        await run(driver, box, "touch", "kept")
        await driver.create(box)
        assert (await run(driver, box, "ls")).stdout == b"kept\n"
        assert await driver.has(box)
        assert box in await driver.known()
        await driver.destroy(box)
        await driver.destroy(box)
        assert not await driver.has(box)
        assert box not in await driver.known()
        with pytest.raises(NotFound):
            await run(driver, box, "true")

    async def test_a_command_gets_input_and_gives_output_and_its_exit_code(
        self, driver: Driver, box: str
    ) -> None:
        large = os.urandom(30_000)
        said = await run(driver, box, "sh", "-c", "cat; echo oops >&2; exit 7", stdin=large)
        assert (said.stdout, said.stderr, said.code) == (large, b"oops\n", 7)
        assert (await run(driver, box, "true", stdin=b"x" * 10**6)).code == 0, "input that nobody reads"
        assert (await run(driver, box, "sh", "-c", "kill -TERM $$")).code == 143
        missing = await run(driver, box, "no-such-program")
        assert missing.code == 127
        assert b"no-such-program" in missing.stderr

    async def test_output_comes_as_it_is_written(self, driver: Driver, box: str) -> None:
        async with driver.exec(box, Command(["sh", "-c", "echo one; sleep 600"], 60)) as events:
            first = await anext(aiter(events))
        assert first == Output("stdout", b"one\n"), "while the command still runs"

    async def test_commands_share_a_folder_and_start_where_they_are_told(
        self, driver: Driver, box: str
    ) -> None:
        await run(driver, box, "sh", "-c", "mkdir -p a/b; echo here > a/b/file")
        assert (await run(driver, box, "cat", "file", cwd="a/b")).stdout == b"here\n"

    async def test_sandboxes_see_nothing_of_each_other(self, driver: Driver, box: str) -> None:
        other = str(uuid4())
        await driver.create(other)
        await run(driver, other, "sh", "-c", "echo secret > mine; chmod -R 777 .")
        where = (await run(driver, other, "pwd")).stdout.decode().strip()
        assert (await run(driver, box, "cat", f"{where}/mine")).code != 0
        assert (await run(driver, box, "sh", "-c", f"echo x > {where}/mine")).code != 0
        assert (await run(driver, other, "cat", "mine")).stdout == b"secret\n"
        await driver.destroy(other)

    async def test_python_is_there(self, driver: Driver, box: str) -> None:
        assert (await python(driver, box, "import json, ssl; print(6 * 7)")).stdout == b"42\n"

    async def test_files_outside_can_be_neither_read_nor_written(
        self, driver: Driver, box: str, tmp_path: Path
    ) -> None:
        outside = Path(tempfile.mkdtemp(prefix="engram-outside-"))
        outside.chmod(0o777)
        secret = outside / "secret"
        secret.write_text("secret")
        secret.chmod(0o666)
        try:
            for program in (
                f"cat {secret}",
                f"ln -s {secret} link && cat link",
                f"ln {secret} hard && cat hard",
                f"mv {secret} here && cat here",
                f"ls {outside}",
                f"echo x > {secret}",
                f"touch {outside}/new",
                f"rm -f {secret} && test ! -e {secret}",
                f"chmod 700 {secret} && test ! -r {secret}",
                "cat /etc/passwd",
                "cat /etc/shadow",
                "ls /",
                "ls /root /home",
            ):
                done = await run(driver, box, "sh", "-c", program)
                assert done.code != 0, program
                assert b"secret" not in done.stdout, program
            assert secret.read_text() == "secret"
            assert [path.name for path in outside.iterdir()] == ["secret"]
        finally:
            secret.unlink(missing_ok=True)
            outside.rmdir()

    async def test_nothing_of_the_servers_is_in_the_environment(
        self, driver: Driver, box: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("POSTGRES_DSN", "postgresql://hunter2")
        told = await run(driver, box, "env", env={"OWN": "value"})
        names = {line.partition(b"=")[0] for line in told.stdout.splitlines()}
        assert names <= {
            b"PATH",
            b"HOME",
            b"TMPDIR",
            b"LANG",
            b"OWN",
            b"PWD",
            b"SHLVL",
            b"_",
            b"USER",
            b"TERM",
        }
        assert b"OWN=value" in told.stdout
        looked = await python(
            driver,
            box,
            f"import os\nserver = {str(os.getpid())!r}\n"
            "for pid in ('self', '1', server, *map(str, range(os.getppid() - 5, os.getpid() + 5))):\n"
            "    for name in ('environ', 'cmdline', 'mem', 'maps', 'fd/0'):\n"
            "        try:\n"
            "            print(pid, name, open(f'/proc/{pid}/{name}', 'rb').read(100))\n"
            "        except OSError:\n"
            "            pass\n",
        )
        assert looked.code == 0
        assert b"hunter2" not in looked.stdout
        assert f"{os.getpid()} environ".encode() not in looked.stdout
        assert f"{os.getpid()} mem".encode() not in looked.stdout

    async def test_no_descriptor_of_the_servers_is_open(self, driver: Driver, box: str) -> None:
        program = (
            "import os\n"
            "for fd in range(3, 200):\n"
            "    try:\n"
            "        os.fstat(fd); print(fd)\n"
            "    except OSError:\n"
            "        pass\n"
        )
        assert (await python(driver, box, program)).stdout == b""

    async def test_there_is_no_network(self, driver: Driver, box: str, listening: dict[str, Any]) -> None:
        program = (
            "import socket, sys\n"
            "def tried(what, family, kind, address, send=False):\n"
            "    try:\n"
            "        s = socket.socket(family, kind)\n"
            "        s.settimeout(2)\n"
            "        s.sendto(b'x', address) if send else s.connect(address)\n"
            "        print(what)\n"
            "    except OSError:\n"
            "        pass\n"
            "i, u = socket.AF_INET, socket.AF_UNIX\n"
            f"tried('tcp', i, socket.SOCK_STREAM, ('127.0.0.1', {listening['tcp']}))\n"
            f"tried('udp', i, socket.SOCK_DGRAM, ('127.0.0.1', {listening['udp']}), True)\n"
            f"tried('abstract', u, socket.SOCK_STREAM, chr(0) + {listening['abstract']!r})\n"
            f"tried('named', u, socket.SOCK_STREAM, {listening['named']!r})\n"
            "tried('raw', i, socket.SOCK_RAW, ('127.0.0.1', 1), True)\n"
            "try:\n"
            "    s = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen(); print('listens')\n"
            "except OSError:\n"
            "    pass\n"
        )
        done = await python(driver, box, program)
        assert (done.code, done.stdout) == (0, b""), done.stderr
        assert listening["heard"] == []

    async def test_others_cannot_be_signalled(self, driver: Driver, box: str) -> None:
        sleeper = await asyncio.create_subprocess_exec("sleep", "600")
        try:
            for pid in (sleeper.pid, os.getpid(), 1):
                assert (await run(driver, box, "sh", "-c", f"kill -0 {pid} || kill -9 {pid}")).code != 0
            assert sleeper.returncode is None
        finally:
            sleeper.kill()
            await sleeper.wait()

    @pytest.mark.parametrize("what", REACHING_OUT)
    async def test_others_can_be_neither_limited_nor_slowed(
        self, driver: Driver, box: str, what: str
    ) -> None:
        """Those that run the command, and with them every other; of itself it may ask it all."""
        program = (
            "import ctypes, os, resource, sys\n"
            "def ioprio_set(which, who):\n"
            f"    if ctypes.CDLL(None).syscall({seccomp.number('ioprio_set')}, which, who, 0x4007) < 0:\n"
            "        raise PermissionError\n"
            "def parent(pid):\n"
            "    return int(open(f'/proc/{pid}/stat').read().rpartition(')')[2].split()[1])\n"
            "def attempt(pid):\n"
            f"    {what}\n"
            "attempt(0)\n"
            "above = os.getppid()\n"
            "for pid in (above, os.getpgid(above), *map(int, sys.argv[1:])):\n"
            "    try:\n"
            "        attempt(pid)\n"
            "    except PermissionError:\n"
            "        continue\n"
            "    sys.exit(f'{pid} was reached')\n"
        )
        done = await run(driver, box, "python", "-c", program, str(os.getpid()))
        assert done.code == 0, done.stderr
        assert (await run(driver, box, "true")).code == 0

    @pytest.mark.parametrize("kind", ["os.PRIO_PGRP", "os.PRIO_USER"])
    async def test_a_group_or_a_user_cannot_be_slowed(self, driver: Driver, box: str, kind: str) -> None:
        done = await python(driver, box, f"import os; os.setpriority({kind}, 0, 19)")
        assert b"PermissionError" in done.stderr

    async def test_a_fork_bomb_stops_at_the_limit_and_ends_with_its_time(
        self, driver: Driver, box: str
    ) -> None:
        program = (
            "import os, sys\n"
            "while True:\n"
            "    try:\n"
            "        if os.fork() == 0:\n"
            "            os.setsid()\n"
            "    except OSError:\n"
            "        pass\n"
        )
        marker = a_marker()
        began = time.monotonic()
        done = await run(driver, box, "python", "-c", program, marker, seconds=0.7)
        assert done.ended.ended_by in ("time", "cpu")
        assert time.monotonic() - began < PATIENCE
        assert not is_running(marker)
        counted = await python(
            driver,
            box,
            "import os, time\n"
            "made = 0\n"
            "for _ in range(50):\n"
            "    try:\n"
            "        if os.fork() == 0:\n"
            "            time.sleep(5); os._exit(0)\n"
            "        made += 1\n"
            "    except OSError:\n"
            "        pass\n"
            "print(made)\n",
        )
        assert 0 < int(counted.stdout) <= 12

    async def test_memory_is_limited(self, driver: Driver, box: str) -> None:
        assert (await python(driver, box, "len(bytearray(30 << 20))")).code == 0
        assert (await python(driver, box, "print(len(bytearray(400 << 20)))")).code != 0

    async def test_memory_that_is_shared_is_limited_too_and_is_not_taken_for_disk(
        self, driver: Driver, box: str
    ) -> None:
        program = (
            "import mmap\n"
            "held = [mmap.mmap(-1, 30 << 20) for _ in range(9)]\n"
            "for each in held:\n"
            "    for at in range(0, 30 << 20, 4096):\n"
            "        each[at] = 1\n"
            "print('all of it')\n"
        )
        for _ in range(4):
            done = await python(driver, box, program)
            assert (done.stdout, done.ended.ended_by) == (b"", None)
            assert done.code != 0

    async def test_processor_time_is_limited_for_all_processes_together(
        self, driver: Driver, box: str
    ) -> None:
        program = "import os\nos.fork(); os.fork()\nwhile True: pass"
        done = await python(driver, box, program, seconds=30)
        assert (done.ended.ended_by, done.code) == ("cpu", 137)

    @pytest.mark.parametrize(
        "program",
        [
            "i=0; while :; do head -c 1000000 /dev/zero > f$i; i=$((i+1)); done",
            "exec python -c 'import itertools, os\nfor n in itertools.count(): os.makedirs(f\"{n}/a/b\")'",
            # Files without a name, which no folder shows.
            "exec python -c 'import os, time\nkept = []\nwhile True:\n"
            '    f = open("x", "wb"); os.unlink("x"); f.write(bytes(1 << 20)); f.flush(); kept.append(f); '
            "time.sleep(0.02)'",
        ],
        ids=["files", "folders", "unlinked"],
    )
    async def test_disk_is_limited(self, driver: Driver, box: str, program: str) -> None:
        done = await run(driver, box, "sh", "-c", program, seconds=30)
        assert (done.ended.ended_by in ("disk", "cpu"), done.code != 0) == (True, True), done

    async def test_no_process_can_keep_itself_from_being_measured(self, driver: Driver, box: str) -> None:
        """One that is not dumpable does not show what it has open."""
        program = "import ctypes, time\nif ctypes.CDLL(None).prctl(4, 0, 0, 0, 0): raise SystemExit(1)\ntime.sleep(60)"
        assert (await python(driver, box, program, seconds=30)).code in (1, 137)

    async def test_a_full_disk_runs_nothing_until_there_is_room(self, driver: Driver, box: str) -> None:
        await run(driver, box, "sh", "-c", "head -c 4000000 /dev/zero > a; head -c 5000000 /dev/zero > b")
        with pytest.raises(StateConflict, match="full"):
            await run(driver, box, "true")
        with pytest.raises(StateConflict, match="full"):
            await driver.put_file(box, "c", parts(b"x"))
        await driver.delete_file(box, "b")
        assert (await run(driver, box, "true")).code == 0

    async def test_one_file_cannot_be_larger_than_the_disk(self, driver: Driver, box: str) -> None:
        done = await run(driver, box, "sh", "-c", "head -c 100000000 /dev/zero > large; stat -c %s large")
        assert done.stdout == b"" or int(done.stdout) <= 8 << 20

    async def test_a_flood_of_output_is_cut_and_ended(self, driver: Driver, box: str) -> None:
        some = await run(driver, box, "sh", "-c", "head -c 100000 /dev/zero; echo end >&2")
        assert (len(some.stdout) + len(some.stderr), some.code) == (64 << 10, 0)
        assert (some.ended.truncated, some.ended.ended_by) == (True, None)
        flood = await run(driver, box, "yes", seconds=30)
        assert (flood.ended.ended_by, flood.ended.truncated, len(flood.stdout)) == ("output", True, 64 << 10)

    async def test_time_is_limited(self, driver: Driver, box: str) -> None:
        began = time.monotonic()
        done = await run(driver, box, "sh", "-c", "trap '' TERM INT HUP; sleep 600", seconds=0.3)
        assert (done.ended.ended_by, done.code) == ("time", 137)
        assert time.monotonic() - began < PATIENCE

    async def test_what_outlives_its_command_is_ended(self, driver: Driver, box: str) -> None:
        marker = a_marker()
        program = f"setsid nohup sleep {marker} > /dev/null 2>&1 & (sleep {marker} &) & echo started"
        done = await run(driver, box, "sh", "-c", program)
        assert (done.stdout, done.code) == (b"started\n", 0)
        assert not is_running(marker)

    async def test_leaving_ends_the_command(self, driver: Driver, box: str) -> None:
        marker = a_marker()
        async with driver.exec(box, Command(["sh", "-c", f"setsid sleep {marker}; :"], 60)) as events:
            following = asyncio.ensure_future(anext(aiter(events)))
            await until(marker, running=True)
            following.cancel()
            with suppress(asyncio.CancelledError):
                await following
        await until(marker, running=False)

    @pytest.mark.parametrize("how", ["stop", "destroy"])
    async def test_stopping_ends_what_runs(self, driver: Driver, box: str, how: str) -> None:
        marker = a_marker()
        running = asyncio.create_task(run(driver, box, "sleep", marker, seconds=60))
        await until(marker, running=True)
        await getattr(driver, how)(box)
        assert (await running).ended.ended_by == "stop"
        assert not is_running(marker)
        with pytest.raises(EngramError):
            await run(driver, box, "true")

    async def test_files_go_in_and_come_out_whole(self, driver: Driver, box: str) -> None:
        content = os.urandom(300_000)
        assert await driver.put_file(box, "a/b/c.bin", parts(content[:100], content[100:])) == len(content)
        assert await read(driver, box, "a/b/c.bin") == content
        assert (
            await run(driver, box, "sh", "-c", "wc -c < a/b/c.bin; echo x >> a/b/c.bin")
        ).stdout == b"300000\n"
        await driver.put_file(box, "a/b/c.bin", parts(b"new"))
        assert await read(driver, box, "a/b/c.bin") == b"new"
        await driver.put_file(box, "empty", parts())
        assert await read(driver, box, "empty") == b""

        async def broken() -> AsyncIterator[bytes]:
            yield b"half"
            raise ConnectionError("gone")

        with pytest.raises(ConnectionError):
            await driver.put_file(box, "a/b/c.bin", broken())
        with pytest.raises(ArtifactTooLarge):
            await driver.put_file(box, "a/b/c.bin", parts(b"x" * (5 << 20)))
        assert await read(driver, box, "a/b/c.bin") == b"new"
        assert (await run(driver, box, "ls", "-A", "a/b")).stdout == b"c.bin\n"
        with pytest.raises(NotFound):
            await driver.get_file(box, "a/missing")

    @pytest.mark.parametrize(
        "path",
        ["", "/etc/passwd", "..", "../x", "a/../../x", "a//b", "./a", "a/.", "x" * 300, "a\x00b", "a/" * 70],
    )
    async def test_a_path_stays_inside(self, driver: Driver, box: str, path: str) -> None:
        with pytest.raises(InputError):
            await driver.get_file(box, path)
        with pytest.raises(InputError):
            await driver.put_file(box, path, parts(b"x"))
        with pytest.raises(InputError):
            await driver.delete_file(box, path)

    async def test_no_link_is_followed(self, driver: Driver, box: str, tmp_path: Path) -> None:
        outside = tmp_path / "outside"
        outside.mkdir()
        (outside / "secret").write_text("secret")
        await run(
            driver,
            box,
            "sh",
            "-c",
            f"ln -s {outside} out; ln -s {outside}/secret link; ln -s .. up; ln -s /proc/self/root root;"
            " ln -s inner same; echo in > inner; mkfifo fifo; mkdir folder",
        )
        paths = ("out/secret", "link", "up/x", "root/etc/passwd", "same", "fifo", "folder")
        for path in paths:
            with pytest.raises(InputError):
                await driver.get_file(box, path)
        for path in ("out/secret", "out/new", "out/deep/new", "up/x", "root/tmp/x", "folder"):
            with pytest.raises(InputError):
                await driver.put_file(box, path, parts(b"changed"))
            with pytest.raises(InputError):
                await driver.delete_file(box, path)
        await driver.put_file(box, "link", parts(b"own"))
        assert await read(driver, box, "link") == b"own", "the link is replaced, not followed"
        await driver.delete_file(box, "same")
        assert await read(driver, box, "inner") == b"in\n"
        assert [(p.name, p.read_text()) for p in outside.iterdir()] == [("secret", "secret")]

    async def test_what_is_made_to_resist_is_removed(self, driver: Driver, box: str) -> None:
        await python(
            driver,
            box,
            "import os\n"
            "os.mkdir('dark'); open('dark/x', 'w').close(); os.chmod('dark', 0)\n"
            "for _ in range(1500):\n"
            "    os.mkdir('d'); os.chdir('d')\n",
        )
        await driver.destroy(box)
        assert not await driver.has(box)
        assert box not in await driver.known()

    async def test_many_at_once(self, driver: Driver, box: str) -> None:
        said = await asyncio.gather(*(run(driver, box, "echo", str(n)) for n in range(8)))
        assert [one.stdout for one in said] == [f"{n}\n".encode() for n in range(8)]
