"""`engram sandbox …`: as near to `docker exec` as it gets."""

from __future__ import annotations

import subprocess
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from cli.conftest import Engram
from engram.embedded import EmbeddedPostgres
from engram.kernel.errors import EngramError
from support.processes import command, environment, run_engram


def test_make_one_work_in_it_remove_it(gateway: str, engram: Engram) -> None:
    made = engram("sandbox", "create", "--env", "WHO=ada", "--ttl", "600", "--key", "key-1").stdout.strip()
    again = engram("sandbox", "create", "--env", "WHO=ada", "--ttl", "600", "--key", "key-1").stdout.strip()
    assert made == again
    env = environment(GATEWAY_PORT=str(urlsplit(gateway).port))

    def ran(*argv: str, stdin: bytes | None = None) -> subprocess.CompletedProcess[bytes]:
        """As a real process: bytes in, bytes out, the command's exit code."""
        words = command("sandbox", "exec", made, "--", *argv)
        given = {"stdin": subprocess.DEVNULL} if stdin is None else {"input": stdin}
        return subprocess.run(words, env=env, capture_output=True, timeout=60, check=False, **given)

    done = ran("sh", "-c", "echo $WHO; cat; echo oops >&2; exit 3", stdin=b"\xff\x00piped")
    assert (done.returncode, done.stdout, done.stderr) == (3, b"ada\n\xff\x00piped", b"oops\n")
    said = ran("python", "-c", "import sys; print(sys.argv)", "--help", "-x")
    assert (said.returncode, said.stdout) == (0, b"['-c', '--help', '-x']\n")
    slow = engram("sandbox", "exec", "--timeout", "0.3", made, "--", "sleep", "60", code=137)
    assert "ran longer than --timeout" in slow.stderr
    listed = engram("sandbox", "ls").stdout.splitlines()
    assert listed[0].split() == ["ID", "STATUS", "PROFILE", "CREATED", "EXPIRES"]
    assert [line.split()[:3] for line in listed[1:]] == [[made, "ready", "default"]]
    assert engram("sandbox", "rm", made, made).stdout.split() == [made, made]
    assert engram("sandbox", "ls", "--status", "deleted").stdout.count(made) == 1
    with pytest.raises(EngramError, match="is deleted: it cannot run commands"):
        engram("sandbox", "exec", made, "--", "true")


def test_what_is_wrong_is_said(gateway: str, engram: Engram, monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments, said in (
        (("create", "--env", "novalue"), "is not NAME=VALUE"),
        (("create", "--profile", "none"), "there is no profile 'none'"),
        (("exec", "no-such", "--", "true"), "there is no sandbox 'no-such'"),
        (("rm", "no/such"), "Not Found"),
        (("ls", "--status", "odd"), "there is no status 'odd'"),
    ):
        with pytest.raises(EngramError, match=said):
            engram("sandbox", *arguments)
    monkeypatch.setenv("GATEWAY_PORT", "1")
    with pytest.raises(EngramError, match="no gateway answers"):
        engram("sandbox", "ls")
    ran = run_engram("sandbox", "ls", env=environment(GATEWAY_PORT="1"))
    assert (ran.returncode, ran.stdout) == (1, ""), "no table without what would be in it"


def test_a_pass_of_the_reaper_and_of_reconcile_says_only_what_it_did(
    postgres_server: EmbeddedPostgres, sandbox_root: Path
) -> None:
    """On an embedded PostgreSQL that runs already; how it came by that is nobody's concern."""
    env = environment(ENGRAM_DATA_DIR=str(postgres_server.data_dir), ENGRAM_SANDBOX_DIR=str(sandbox_root))
    reaped = run_engram("sandbox", "reap", env=env)
    assert (reaped.stdout, reaped.stderr) == ("0 sandbox(es) ended or removed\n", "")
    assert run_engram("reconcile", env=env).stderr == ""
