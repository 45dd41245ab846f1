"""Where sandboxes are: one folder for each database, whoever says that it is the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from engram.assembly.sandboxes import sandbox_driver
from engram.kernel.settings import Settings
from engram.sandboxes.sandlock_driver import SandlockDriver


def place(dsn: str | None, folder: Path) -> Path:
    driver = sandbox_driver(replace(Settings.load({}), postgres_dsn=dsn, sandbox_dir=folder), "7-5")
    assert isinstance(driver, SandlockDriver)
    return driver._folders.root


def test_a_copy_of_a_cluster_beside_it_has_another_folder(tmp_path: Path) -> None:
    """The reaper removes what its database does not know; a copy knows nothing of what came later."""
    original = place("host=/srv/data/postgres.socket dbname=engram", tmp_path)
    assert place("host=/srv/copy/postgres.socket dbname=engram", tmp_path) != original
    assert place("postgresql://engram@%2Fsrv%2Fdata%2Fpostgres.socket/engram", tmp_path) == original
    (tmp_path / "link").symlink_to("/srv/data")
    assert place(f"host={tmp_path / 'link'}/postgres.socket", tmp_path) == original


@pytest.mark.parametrize(
    "dsn", [None, "postgresql://db.internal/engram", "host=10.0.0.1", "no = dsn = at all"]
)
def test_a_server_elsewhere_is_named_by_itself(tmp_path: Path, dsn: str | None) -> None:
    assert place(dsn, tmp_path) == tmp_path / "7-5"
