"""sandlock's driver passes the contract; and what is its own: the helper process, and hosts that cannot."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from engram.kernel.errors import EngramError
from engram.sandboxes import sandlock_driver
from engram.sandboxes.driver import Limits
from engram.sandboxes.sandlock_driver import SandlockDriver
from sandboxes.driver_contract import DriverContract, a_marker, box, is_running, listening, run, until

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
    assert Path(f"/proc/{pid}/environ").read_bytes() == b""
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
        if folder.name.isdigit() and _parent(folder) == helper_pid(driver):
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


async def test_a_folder_of_somebody_elses_is_not_taken(sandbox_dir: Path) -> None:
    (sandbox_dir / "elsewhere").mkdir()
    (sandbox_dir / "db").symlink_to(sandbox_dir / "elsewhere")
    driver = SandlockDriver(sandbox_dir / "db", limits=Limits(), uid=None)
    assert "not a folder of ours" in (await driver.why_not() or "")
