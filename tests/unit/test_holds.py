"""Holding a role down from another process: by hand until it is released, or while a caller lives."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from engram.supervisor import held_roles, held_while, hold_role, release_role

HOLDER = """
import sys, time
from pathlib import Path
from engram.supervisor import held_while
with held_while(Path(sys.argv[1]), "memory-server"):
    print("held", flush=True)
    time.sleep(60)
"""


def test_by_hand_it_lasts_until_released(tmp_path: Path) -> None:
    assert held_roles(tmp_path) == set()
    hold_role(tmp_path, "gateway")
    assert held_roles(tmp_path) == {"gateway"}
    release_role(tmp_path, "gateway")
    assert held_roles(tmp_path) == set()


def test_while_a_block_runs_and_no_longer(tmp_path: Path) -> None:
    with held_while(tmp_path, "memory-server"):
        with held_while(tmp_path, "memory-server"), held_while(tmp_path, "outbox-worker"):
            assert held_roles(tmp_path) == {"memory-server", "outbox-worker"}
        assert held_roles(tmp_path) == {"memory-server"}
        release_role(tmp_path, "memory-server")
        assert held_roles(tmp_path) == {"memory-server"}, "somebody else's hold is not released by hand"
    assert held_roles(tmp_path) == set()
    assert list((tmp_path / "hold").iterdir()) == []


def test_a_holder_that_is_killed_lets_go(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout
        assert holder.stdout.readline() == "held\n"
        assert held_roles(tmp_path) == {"memory-server"}
        holder.kill()
        holder.wait()
    assert held_roles(tmp_path) == set()
    assert list((tmp_path / "hold").iterdir()) == [], "and what it left is removed"


def test_one_that_is_just_being_made_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "hold").mkdir()
    unborn = tmp_path / "hold" / ".memory-server~1"
    unborn.touch()
    assert held_roles(tmp_path) == set()
    assert unborn.exists()
