"""`engram token`: made once, shown once, listed without secrets, taken back by its hash."""

from __future__ import annotations

import re
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from engram.api import tokens_file
from engram.api.tokens import sha256_of
from engram.api.tokens_file import TokensFile
from engram.cli import app
from engram.kernel.errors import ConfigError, InputError
from support.processes import environment, run_engram


@pytest.fixture(autouse=True)
def data_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ENGRAM_TOKENS_FILE", raising=False)
    monkeypatch.setenv("ENGRAM_DATA_DIR", str(tmp_path / "data"))
    return tmp_path / "data"


def engram(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["token", *arguments])


def created(*arguments: str) -> str:
    result = engram("create", *arguments)
    assert result.exit_code == 0, result.output
    return result.stdout.strip()


def test_a_token_is_shown_once_and_kept_as_a_hash(data_dir: Path) -> None:
    result = engram("create", "ada", "--note", 'Ada\'s "laptop" \\ 支付')
    secret = result.stdout.strip()
    assert re.fullmatch(r"engram_[A-Za-z0-9_-]{43}", secret), "standard output is the token alone"
    assert result.output.count(secret) == 1
    for part in ("ENGRAM_TOKEN", "curl -H", "claude mcp add", f"ENGRAM_TOKENS_FILE={data_dir}/tokens.toml"):
        assert part in result.stderr
    path = data_dir / "tokens.toml"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert secret not in path.read_text("utf-8")
    (token,) = tokens_file.read(path)
    assert (token.sha256, token.owner) == (sha256_of(secret), "ada")
    assert (token.scopes, token.spaces, token.expires_at) == ({"read", "write"}, None, None)
    assert token.note == 'Ada\'s "laptop" \\ 支付'
    assert TokensFile(path).recognise(secret).actor == "ada"


def test_what_a_token_may_do_is_said_when_it_is_made(data_dir: Path) -> None:
    created(
        "ada", "--scope", "read", "--space", "team:payments", "--space", "org:acme", "--expires-days", "30"
    )
    created("bob", "--admin")
    ada, bob = tokens_file.read(data_dir / "tokens.toml")
    assert (ada.scopes, ada.spaces) == ({"read"}, {"team:payments", "org:acme"})
    assert ada.expires_at is not None
    assert abs(ada.expires_at - datetime.now(UTC) - timedelta(days=30)) < timedelta(minutes=5)
    assert bob.scopes == {"read", "write", "admin"}


def test_the_file_is_the_named_one_or_the_configured_one(
    tmp_path: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENGRAM_TOKENS_FILE", str(tmp_path / "configured"))
    result = engram("create", "ada")
    assert "is started with ENGRAM_TOKENS_FILE" not in result.stderr, "it is set already"
    created("bob", "--file", "named")
    assert [t.owner for t in tokens_file.read(tmp_path / "configured")] == ["ada"]
    assert [t.owner for t in tokens_file.read(tmp_path / "named")] == ["bob"]
    assert not data_dir.exists()
    assert "bob" in engram("list", "--file", "named").stdout
    assert "ada" in engram("list").stdout


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["a b"], "owner must be 1 to 128 characters"),
        ([""], "owner must be"),
        (["ada", "--scope", "reed"], "scopes must be a list of one or more of read, write, admin"),
        (["ada", "--space", "payments"], "spaces must be a list of shared spaces"),
        (["ada", "--space", "private:bob"], "spaces must be a list of shared spaces"),
        (["ada", "--note", "a\x1b[31m"], "note must not contain control characters"),
        (["ada", "--note", "two\nlines"], "note must not contain control characters"),
        (["\udcff"], "owner must not contain lone surrogates"),
    ],
)
def test_a_token_that_could_not_be_used_is_not_made(data_dir: Path, arguments: list[str], told: str) -> None:
    result = engram("create", *arguments)
    assert isinstance(result.exception, ConfigError)
    assert told in str(result.exception)
    assert not data_dir.exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ["ada", "--admin", "--scope", "read"],
        ["ada", "--expires-days", "0"],
        ["ada", "--expires-days", "99999"],
        [],
    ],
)
def test_options_that_make_no_sense_are_refused(data_dir: Path, arguments: list[str]) -> None:
    assert engram("create", *arguments).exit_code == 2
    assert not data_dir.exists()


def test_the_list_shows_everything_but_the_token(data_dir: Path) -> None:
    secret = created("ada", "--space", "team:payments", "--note", "laptop")
    created("bob", "--admin", "--expires-days", "1")
    listed = engram("list").stdout
    header, ada, bob = listed.splitlines()
    assert header.split() == ["HASH", "OWNER", "SCOPES", "SHARED", "SPACES", "EXPIRES", "NOTE"]
    assert ada.split() == [sha256_of(secret)[:8], "ada", "read,write", "team:payments", "never", "laptop"]
    assert bob.split()[1:4] == ["bob", "admin,read,write", "all"]
    assert secret not in listed
    assert sha256_of(secret) not in listed


def test_the_list_says_what_is_over(data_dir: Path) -> None:
    created("ada", "--expires-days", "1")
    path = data_dir / "tokens.toml"
    path.write_text(re.sub(r"expires_at = .*", "expires_at = 2020-01-01T00:00:00Z", path.read_text("utf-8")))
    assert "2020-01-01 00:00 UTC (over)" in engram("list").stdout


def test_an_empty_list_says_what_to_do() -> None:
    result = engram("list")
    assert (result.exit_code, result.stdout) == (0, "")
    assert "engram token create OWNER" in result.stderr


def test_a_token_is_revoked_by_the_start_of_its_hash(data_dir: Path) -> None:
    first, second = created("ada"), created("ada")
    result = engram("revoke", sha256_of(first)[:8].upper())
    assert result.stdout.strip() == f"revoked {sha256_of(first)[:8]} of ada"
    assert [t.sha256 for t in tokens_file.read(data_dir / "tokens.toml")] == [sha256_of(second)]
    again = engram("revoke", sha256_of(first)[:8])
    assert isinstance(again.exception, InputError)
    last = engram("revoke", sha256_of(second))
    assert "nobody can call" in last.stderr
    assert tokens_file.read(data_dir / "tokens.toml") == ()


def test_a_prefix_that_could_mean_two_revokes_none(data_dir: Path) -> None:
    path = data_dir / "tokens.toml"
    data_dir.mkdir()
    entry = '[[token]]\nsha256 = "{}"\nowner = "{}"\nscopes = ["read"]\n'
    path.write_text(entry.format("abcd" + "0" * 60, "ada") + entry.format("abcd" + "1" * 60, "bob"))
    for prefix, told in (
        ("abcd", "abcd00000000 \\(ada\\)"),
        ("abc", "at least 4"),
        ("", "at least 4"),
        ("ffff", "no"),
    ):
        result = engram("revoke", prefix)
        with pytest.raises(InputError, match=told):
            raise result.exception or AssertionError("revoked")
    assert len(tokens_file.read(path)) == 2
    assert engram("revoke", "abcd1").exit_code == 0
    assert [t.owner for t in tokens_file.read(path)] == ["ada"]


def test_a_file_that_is_wrong_is_left_as_it_is(data_dir: Path) -> None:
    data_dir.mkdir()
    (data_dir / "tokens.toml").write_text("nonsense")
    for arguments in (["create", "ada"], ["list"], ["revoke", "abcd"]):
        assert isinstance(engram(*arguments).exception, ConfigError)
    assert (data_dir / "tokens.toml").read_text() == "nonsense"


def test_the_real_command_ends_with_one_line_and_a_next_step(tmp_path: Path) -> None:
    env = environment(ENGRAM_DATA_DIR=str(tmp_path / "data"))
    made = run_engram("token", "create", "ada", env=env)
    assert (made.returncode, len(made.stdout.split())) == (0, 1)
    wrong = run_engram("token", "create", "a b", env=env)
    assert (wrong.returncode, wrong.stdout) == (1, "")
    assert wrong.stderr.startswith("engram: the new entry: owner must be")
    assert "Traceback" not in wrong.stderr
