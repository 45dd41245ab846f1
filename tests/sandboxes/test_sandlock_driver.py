"""sandlock's driver passes the contract; and what is its own: the helper process, and hosts that cannot."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import pytest

from engram.kernel.errors import ArtifactTooLarge, EngramError, NotFound, SandboxUnavailable
from engram.sandboxes import sandlock_driver
from engram.sandboxes.driver import Command, Ended, Limits
from engram.sandboxes.folders import PROBE_SECONDS, Folders, probe_name
from engram.sandboxes.sandlock_driver import SandlockDriver
from sandboxes.conftest import LIMITS
from sandboxes.driver_contract import DriverContract, a_marker, box, is_running, listening, parts, run, until

__all__ = ["box", "listening"]

pytestmark = pytest.mark.anyio


class TestSandlock(DriverContract):
    """Every test of the contract."""


def helper_pid(driver: SandlockDriver) -> int:
    assert driver._helper is not None
    return driver._helper.process.pid


async def test_commands_run_as_nobody_when_the_server_is_root(driver: SandlockDriver, box: str) -> None:
    told = (await run(driver, box, "sh", "-c", "id -u; id -G; echo x > made; stat -c %u made")).stdout.split()
    if os.geteuid() == 0:
        assert told == [b"65534"] * 3
        status = Path(f"/proc/{helper_pid(driver)}/status").read_text()
        assert "Uid:\t65534\t65534\t65534\t65534" in status
        assert "CapEff:\t0000000000000000" in status
        assert "Groups:\t \n" in status
    else:
        assert told[0] == str(os.geteuid()).encode()


async def test_the_helper_has_nothing_of_ours(driver: SandlockDriver, box: str) -> None:
    await run(driver, box, "true")
    pid = helper_pid(driver)
    assert Path(f"/proc/{pid}/environ").read_bytes() == b"HOME=/\0"
    assert (await run(driver, box, "sh", "-c", "echo $HOME")).stdout.strip().endswith(f"{box}/work".encode())
    opened = {os.readlink(f"/proc/{pid}/fd/{fd}").partition(":")[0] for fd in os.listdir(f"/proc/{pid}/fd")}
    assert opened <= {"socket", "/dev/null", "pipe"}


async def test_a_helper_that_died_is_replaced_and_takes_its_commands_along(
    driver: SandlockDriver, box: str
) -> None:
    marker = a_marker()
    running = asyncio.create_task(run(driver, box, "sleep", marker, seconds=60))
    await until(marker, running=True)
    first = helper_pid(driver)
    os.kill(first, signal.SIGKILL)
    driver._helper.process.wait()
    assert (await run(driver, box, "echo", "again")).stdout == b"again\n"
    assert helper_pid(driver) != first
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await until(marker, running=False)


async def test_a_supervisor_that_is_killed_leaves_nothing_running(driver: SandlockDriver, box: str) -> None:
    marker = a_marker()
    program = f"setsid sleep {marker} & sleep {marker}"
    running = asyncio.create_task(run(driver, box, "sh", "-c", program, seconds=60))
    await until(marker, running=True)
    for folder in Path("/proc").iterdir():
        if _is_child_of_the_helper(driver, folder):
            os.kill(int(folder.name), signal.SIGKILL)
    with pytest.raises(EngramError, match="supervisor died"):
        await running
    await until(marker, running=False)
    assert (await run(driver, box, "true")).code == 0


def _parent(folder: Path) -> int:
    try:
        return int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return -1


async def test_a_gateway_that_ends_takes_its_commands_along(driver: SandlockDriver, box: str) -> None:
    marker = a_marker()
    running = asyncio.create_task(run(driver, box, "sh", "-c", f"setsid sleep {marker} & wait", seconds=60))
    await until(marker, running=True)
    helper = driver._helper.process
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await driver.close()
    assert helper.returncode == 0
    assert not is_running(marker)


async def test_where_it_cannot_work_it_says_why(
    sandbox_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if os.geteuid() == 0:
        hidden = tmp_path / "hidden"
        hidden.mkdir(mode=0o700)
        driver = SandlockDriver(hidden / "db", limits=Limits(), uid=65534)
        assert "cannot be reached by the user 65534" in (await driver.why_not() or "")
    broken = sandbox_dir / "broken.py"
    broken.write_text("raise SystemExit('no Landlock today')")
    monkeypatch.setattr(sandlock_driver, "HELPER", broken)
    driver = SandlockDriver(sandbox_dir / "db", limits=Limits(), uid=None)
    assert "no Landlock today" in (await driver.why_not() or "")
    broken.write_text(
        "import os, socket, time\n"
        'socket.socket(fileno=0).sendall(b\'{"landlock": -1, "needed": 6}\')\ntime.sleep(60)'
    )
    assert "this kernel has Landlock 0, and 6 is needed" in (await driver.why_not() or "")
    driver._helper.process.kill()
    await driver.close()


class Disturbed(SandlockDriver):
    """Whatever is made, somebody does something to it at once."""

    def __init__(self, root: Path, how: str) -> None:
        super().__init__(root, limits=LIMITS, uid=65534 if os.geteuid() == 0 else None)
        self._how = how

    async def create(self, sandbox_id: str) -> None:
        await super().create(sandbox_id)
        if self._how == "stop":
            await self.stop(sandbox_id)
        for known in await self.known():
            await self.destroy(known)


async def test_a_reaper_leaves_alone_what_only_sees_whether_sandboxes_work(sandbox_dir: Path) -> None:
    driver = Disturbed(sandbox_dir / "db", "reap")
    assert await driver.why_not() is None
    assert not [path for path in (sandbox_dir / "db").iterdir() if "probe" in path.name]
    await driver.close()


async def test_whatever_goes_wrong_when_that_is_seen_is_told(sandbox_dir: Path) -> None:
    driver = Disturbed(sandbox_dir / "db", "stop")
    assert "runs no commands any more" in (await driver.why_not() or "")
    await driver.close()


async def test_what_a_look_that_was_killed_left_is_removed_after_a_while(driver: SandlockDriver) -> None:
    probe = probe_name()
    await driver.create(probe)
    folder = driver._folders.work(probe).parent
    assert await driver.known() == []
    assert folder.exists(), "it may be looking this moment"
    os.utime(folder, (0, time.time() - PROBE_SECONDS - 1))
    assert await driver.known() == []
    assert not folder.exists()


@pytest.mark.parametrize("path", ["file", "folder/file"])
def test_a_folder_that_is_removed_while_a_file_is_put_there_is_said_to_be_gone(
    tmp_path: Path, path: str
) -> None:
    class Removed(Folders):
        @contextmanager
        def _opened(self, sandbox_id: str) -> Iterator[int]:
            with super()._opened(sandbox_id) as work:
                shutil.rmtree(self.work(sandbox_id))
                yield work

    folders, sandbox_id = Removed(tmp_path / "db", None), str(uuid4())
    folders.make(sandbox_id)
    with pytest.raises(NotFound), folders.writing(sandbox_id, path):
        pass


async def test_a_full_file_system_is_said_to_be_full() -> None:
    with pytest.raises(SandboxUnavailable, match="No space left"), open("/dev/full", "wb") as full:
        sandlock_driver._write(full.fileno(), b"x", "path")


async def test_a_folder_of_somebody_elses_is_not_taken(sandbox_dir: Path) -> None:
    (sandbox_dir / "elsewhere").mkdir()
    (sandbox_dir / "db").symlink_to(sandbox_dir / "elsewhere")
    driver = SandlockDriver(sandbox_dir / "db", limits=Limits(), uid=None)
    assert "not a folder of ours" in (await driver.why_not() or "")


def descriptors() -> set[str]:
    """Those of this process, by number and what they are: a pipe's number is never given out twice."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.add(f"{fd} {os.readlink(f'/proc/self/fd/{fd}')}")
        except OSError:
            continue
    return {name for name in found if "pipe:" in name or "socket:" in name}


async def test_who_follows_slowly_is_given_everything(
    driver: SandlockDriver, box: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command's time is over long before its output is read; the reader's is not."""
    monkeypatch.setattr(sandlock_driver, "PATIENCE_SECONDS", 0.5)
    written = "head -c 30000 /dev/zero; echo there >&2"
    seen = []
    async with driver.exec(box, Command(["sh", "-c", written], timeout_seconds=0.5)) as events:
        async for event in events:
            seen.append(event)
            await asyncio.sleep(1.2 if len(seen) == 1 else 0)
    assert seen[-1] == Ended(0)
    assert sum(len(event.data) for event in seen[:-1]) == 30_006


async def test_a_supervisor_that_does_not_answer_is_not_waited_for_longer(
    driver: SandlockDriver, box: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However much its command has to say."""
    monkeypatch.setattr(sandlock_driver, "PATIENCE_SECONDS", 0.3)
    program = "import time\nwhile True: print(time.time(), flush=True); time.sleep(0.05)"
    command = Command(["python", "-c", program], timeout_seconds=0.5)
    async with driver.exec(box, command) as events:
        await anext(events)
        supervisors = [
            int(pid.name) for pid in Path("/proc").iterdir() if _is_child_of_the_helper(driver, pid)
        ]
        for pid in supervisors:
            os.kill(pid, signal.SIGSTOP)
        try:
            async with asyncio.timeout(10):
                with pytest.raises(EngramError, match="does not answer"):
                    [event async for event in events]
        finally:
            for pid in supervisors:
                os.kill(pid, signal.SIGCONT)


def _is_child_of_the_helper(driver: SandlockDriver, folder: Path) -> bool:
    return folder.name.isdigit() and _parent(folder) == helper_pid(driver)


async def test_a_follower_that_is_cancelled_again_and_again_leaves_no_descriptor(
    driver: SandlockDriver, box: str
) -> None:
    await run(driver, box, "true")
    before = descriptors()

    async def followed(begun: asyncio.Event) -> None:
        async with driver.exec(box, Command(["sh", "-c", "echo x; sleep 60"], timeout_seconds=60)) as events:
            async for _ in events:
                begun.set()

    for _ in range(10):
        begun = asyncio.Event()
        task = asyncio.create_task(followed(begun))
        await begun.wait()
        task.cancel()
        await asyncio.sleep(0)  # it is hanging up now
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert descriptors() - before == set()


async def halves(first: bytes, waiting: asyncio.Barrier, second: bytes) -> AsyncIterator[bytes]:
    yield first
    await waiting.wait()
    yield second


async def test_files_put_at_once_share_the_room_on_the_disk(driver: SandlockDriver, box: str) -> None:
    """Eight of three megabytes, where there are eight: each began when there was room for it."""
    waiting = asyncio.Barrier(8)
    half = os.urandom(100_000), os.urandom((3 << 20) - 100_000)
    puts = [driver.put_file(box, f"file{n}", halves(half[0], waiting, half[1])) for n in range(8)]
    found = await asyncio.gather(*puts, return_exceptions=True)
    assert sum(size for size in found if isinstance(size, int)) in (3 << 20, 6 << 20)
    refused = [error for error in found if not isinstance(error, int)]
    assert {type(error) for error in refused} == {ArtifactTooLarge}
    assert (await run(driver, box, "sh", "-c", "ls -A | wc -l")).stdout.strip() == str(
        8 - len(refused)
    ).encode()
    await driver.put_file(box, "another", parts(b"x" * 1_000_000))


async def test_what_was_given_up_leaves_its_room_to_the_others(driver: SandlockDriver, box: str) -> None:
    begun, given_up = asyncio.Barrier(3), asyncio.Event()
    part = os.urandom(3 << 20)

    async def broken() -> AsyncIterator[bytes]:
        yield part
        await begun.wait()
        raise ConnectionError("gone")

    async def patient() -> AsyncIterator[bytes]:
        yield b"x"
        await begun.wait()
        await given_up.wait()
        yield part

    last = [asyncio.create_task(driver.put_file(box, f"file{n}", patient())) for n in range(2)]
    with pytest.raises(ConnectionError):
        await driver.put_file(box, "broken", broken())
    given_up.set()
    assert await asyncio.gather(*last) == [(3 << 20) + 1] * 2
