"""What both servers promise: one server for any number of processes, whoever dies when."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import threading
from pathlib import Path

import pytest

from engram.embedded import logfile, server, waiting
from engram.embedded.processes import Process
from engram.embedded.waiting import wait_for
from engram.kernel.errors import EmbeddedError

PID_FILES = {"postgres": "postmaster.pid", "redis": "redis.pid"}


def test_start_and_release(new_kind, data_dir, running):
    one = new_kind(data_dir)
    assert not one.is_alive()
    assert one.pid is None
    with one:
        assert one.is_alive()
        assert one.pid in running()
    assert not one.is_alive()
    assert not running()
    one.release()


def test_starting_twice_is_starting_once(kind, data_dir):
    with kind(data_dir) as one:
        first = one.pid
        assert one.start() is one
        assert one.pid == first


def test_a_second_user_adopts_and_the_last_one_stops(kind, data_dir, running):
    one, two = kind(data_dir).start(), kind(data_dir).start()
    assert one.pid == two.pid
    one.release()
    assert two.is_alive()
    two.release()
    assert not running()


def test_it_can_be_started_again(kind, data_dir):
    one = kind(data_dir)
    for _ in range(3):
        with one:
            assert one.is_alive()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_user_leaves_the_server_to_the_others(kind, data_dir, another_user, running, number):
    starter = another_user(kind).ready()
    with kind(data_dir) as mine:
        starter.end(number)
        assert mine.pid == starter.server_pid
        assert mine.is_alive()
    assert not running()


def test_a_killed_only_user_leaves_a_server_to_adopt(kind, data_dir, another_user, running):
    starter = another_user(kind).ready()
    starter.end()
    assert starter.server_pid in running()
    with kind(data_dir) as mine:
        assert mine.pid == starter.server_pid
    assert not running()


def test_six_simultaneous_first_starts_give_one_server(new_kind, data_dir, another_user, running):
    users = [another_user(new_kind) for _ in range(6)]
    pids = {user.ready().server_pid for user in users}
    assert len(pids) == 1
    for user in users[:5]:
        user.release()
        assert pids <= running()
    users[5].release()
    assert not running()


def test_all_leave_at_once(new_kind, another_user, running):
    users = [another_user(new_kind) for _ in range(4)]
    for user in users:
        user.ready()
    for user in users:
        user.tell("release")
    assert [user.line() for user in users] == ["released"] * 4
    assert not running()


def test_starting_races_with_stopping(kind, another_user, running):
    users = [another_user(kind, "churn", "6") for _ in range(3)]
    assert [user.line() for user in users] == ["done"] * 3
    assert not running()


def test_a_killed_server_is_dead_though_a_zombie_and_starts_again(kind, data_dir, kill):
    with kind(data_dir) as mine:
        first = mine.pid
        kill(first)
        assert not mine.is_alive()
        assert mine.pid is None
        buried = wait_for(lambda: not mine.is_alive() and not Path(f"/proc/{first}").exists(), 10)
        assert buried, "our own child was not buried"
        mine.start()
        assert mine.is_alive()
        assert mine.pid != first


def test_a_zombie_that_its_parent_never_buries(kind, data_dir, another_user, kill):
    starter = another_user(kind).ready()
    kill(starter.server_pid)
    assert Path(f"/proc/{starter.server_pid}").exists(), "not a zombie: the test shows nothing"
    mine = kind(data_dir)
    assert not mine.is_alive()
    with mine:
        assert mine.pid != starter.server_pid
        starter.release()
        assert mine.is_alive()


def test_another_user_restarts_and_this_one_notices(kind, data_dir, another_user, kill):
    with kind(data_dir) as mine:
        kill(mine.pid)
        other = another_user(kind).ready()
        assert mine.is_alive()
        assert mine.pid == other.server_pid
        mine.start()
        assert mine.pid == other.server_pid
        other.release()


def test_a_recycled_pid_is_not_taken_for_the_server(kind, data_dir, stranger, kill):
    mine = kind(data_dir).start()
    kill(mine.pid)
    pid_file = mine.folder / PID_FILES[mine.name]
    lines = pid_file.read_text().splitlines()
    pid_file.write_text("\n".join([str(stranger.pid), *lines[1:]]) + "\n")
    assert not mine.is_alive()
    with mine.start():
        assert mine.pid != stranger.pid


def test_a_pid_recycled_by_another_folders_server(new_kind, data_dir, tmp_path, kill):
    other = new_kind(tmp_path / "other").start()
    mine = new_kind(data_dir).start()
    kill(mine.pid)
    pid_file = PID_FILES[mine.name]
    shutil.copy(other.folder / pid_file, mine.folder / pid_file)
    assert not mine.is_alive()
    mine.release()
    assert other.is_alive()
    with mine:
        assert mine.pid != other.pid
    assert other.is_alive()
    other.release()


def test_the_server_holds_none_of_our_locks_and_no_environment(kind, data_dir, monkeypatch):
    monkeypatch.setenv("ENGRAM_TEST_SECRET", "not for servers")
    with kind(data_dir) as mine:
        process = Path(f"/proc/{mine.pid}")
        held = {os.readlink(fd) for fd in (process / "fd").iterdir() if fd.is_symlink()}
        assert not [path for path in held if path.endswith((".users", ".turn"))]
        assert b"ENGRAM_TEST_SECRET" not in (process / "environ").read_bytes()
        assert os.getsid(mine.pid) != os.getsid(0)


def test_a_forked_child_cannot_stop_its_parents_server(kind, data_dir):
    with kind(data_dir) as mine:
        child = os.fork()
        if child == 0:
            mine.release()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        with kind(data_dir):
            pass
        assert mine.is_alive(), "the parent was no longer counted as a user"


def test_a_forked_child_that_lingers_keeps_nobody_out(kind, data_dir):
    mine = kind(data_dir).start()
    child = os.fork()
    if child == 0:
        signal.pause()
    mine.release()
    with kind(data_dir) as next_one:
        assert next_one.is_alive()
    assert not next_one.is_alive()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def test_waiting_for_the_turn_is_bounded(kind, data_dir, monkeypatch):
    monkeypatch.setattr(server, "TURN_LIMIT", 0.2)
    data_dir.mkdir(exist_ok=True)
    with (data_dir / f"{kind.name}.turn").open("w") as busy:
        fcntl.flock(busy, fcntl.LOCK_EX)
        with pytest.raises(EmbeddedError, match="another process has been starting or stopping") as caught:
            kind(data_dir).start()
    assert "fuser" in str(caught.value.hint)


def test_a_user_can_leave_while_another_one_is_starting(kind, data_dir, monkeypatch):
    monkeypatch.setattr(server, "LEAVE_LIMIT", 0.2)
    mine = kind(data_dir).start()
    with (data_dir / f"{kind.name}.turn").open("w") as busy:
        fcntl.flock(busy, fcntl.LOCK_EX)
        mine.release()
    assert mine.is_alive()
    with mine:
        pass


def test_progress_is_reported_while_a_server_is_slow(kind, data_dir, another_user, monkeypatch):
    monkeypatch.setattr(waiting, "_FIRST_WORD_AFTER", 0.05)
    monkeypatch.setattr(f"engram.embedded.{kind.name}._ANSWER_LIMIT", 0.1)
    user = another_user(kind).ready()
    slow = user.server_pid
    os.kill(slow, signal.SIGSTOP)
    said: list[str] = []
    told = threading.Event()

    def on_progress(text: str) -> None:
        said.append(text)
        told.set()

    mine = kind(data_dir, on_progress=on_progress)
    starting = threading.Thread(target=mine.start)
    starting.start()
    assert told.wait(20)
    os.kill(slow, signal.SIGCONT)
    starting.join(20)
    assert mine.pid == slow
    assert "waiting for it to be ready" in said[0]
    mine.release()
    user.release()


def test_a_server_that_never_answers_is_given_up(kind, data_dir, another_user, monkeypatch):
    monkeypatch.setattr(server, "START_LIMIT", 0.3)
    monkeypatch.setattr(f"engram.embedded.{kind.name}._ANSWER_LIMIT", 0.1)
    user = another_user(kind).ready()
    os.kill(user.server_pid, signal.SIGSTOP)
    try:
        with pytest.raises(EmbeddedError, match="has not answered"):
            kind(data_dir).start()
    finally:
        os.kill(user.server_pid, signal.SIGCONT)
    user.release()


def test_a_folder_of_somebody_else_is_left_alone(new_kind, data_dir):
    folder = data_dir / new_kind.name
    folder.mkdir(parents=True)
    (folder / "letter.txt").write_text("dear")
    with pytest.raises(EmbeddedError, match="was not made by engram") as caught:
        new_kind(data_dir).start()
    assert "ENGRAM_DATA_DIR" in str(caught.value.hint)
    assert [path.name for path in folder.iterdir()] == ["letter.txt"]


def test_an_empty_folder_is_used(new_kind, data_dir):
    (data_dir / new_kind.name).mkdir(parents=True)
    with new_kind(data_dir) as mine:
        assert mine.is_alive()


def test_what_is_left_of_a_first_start_that_broke_off_is_cleared_away(new_kind, data_dir):
    half = data_dir / f"{new_kind.name}.unfinished-abc"
    half.mkdir(parents=True)
    (half / "something").write_text("half")
    with new_kind(data_dir):
        assert not half.exists()


def test_a_data_folder_that_cannot_be(new_kind, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(EmbeddedError, match="Not a directory") as caught:
        new_kind(tmp_path / "file" / "data").start()
    assert caught.value.hint


def test_everything_is_private(new_kind, data_dir):
    with new_kind(data_dir):
        for path in [data_dir, *data_dir.rglob("*")]:
            if not path.is_socket():
                assert path.lstat().st_mode & 0o077 == 0, path


def test_a_long_log_is_cut(kind, data_dir, monkeypatch):
    with kind(data_dir) as mine:
        monkeypatch.setattr(logfile, "LIMIT_BYTES", 10)
        assert mine.is_alive()
        assert mine.log_file.stat().st_size == 0
        assert mine.log_file.with_suffix(".log.1").stat().st_size > 10


def test_the_next_start_after_a_failed_one_succeeds(new_kind, data_dir, running):
    in_the_way = data_dir / f"{new_kind.name}.log"
    in_the_way.mkdir(parents=True)
    mine = new_kind(data_dir)
    with pytest.raises(EmbeddedError, match="Is a directory"):
        mine.start()
    assert not running()
    in_the_way.rmdir()
    with mine:
        assert mine.is_alive()


def test_releasing_when_the_data_folder_is_gone(new_kind, data_dir):
    mine = new_kind(data_dir).start()
    os.kill(mine.pid, mine.stop_signals[0])
    assert wait_for(lambda: not mine.is_alive(), 20)
    shutil.rmtree(data_dir)
    with pytest.raises(EmbeddedError, match="No such file"):
        mine.release()
    mine.release()


def test_a_dead_pid_is_nobody():
    child = os.fork()
    if child == 0:
        os._exit(0)
    assert wait_for(lambda: Process.of(child) is None, 10), "a zombie counts as dead"
    os.waitpid(child, 0)
