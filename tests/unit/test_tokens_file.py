"""The tokens file: what it may say, how it is followed while it changes, how it is edited."""

from __future__ import annotations

import logging
import os
import stat
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engram.api.tokens import (
    Token,
    checked,
    new_secret,
    parse,
    rendered,
    sha256_of,
    with_table,
    without_table,
)
from engram.api.tokens_file import TokensFile, edit, read
from engram.kernel.clock import ManualClock
from engram.kernel.errors import ConfigError, Unauthenticated
from engram.kernel.logs import redact

HASH = "ab" * 32
ENTRY = f'[[token]]\nsha256 = "{HASH}"\nowner = "ada"\nscopes = ["read"]\n'


def entry(secret: str, owner: str = "ada", **more: object) -> Token:
    return checked({"sha256": sha256_of(secret), "owner": owner, "scopes": ["read"], **more}, "entry")


def write(path: Path, text: str, mode: int = 0o600) -> None:
    path.write_text(text, "utf-8")
    path.chmod(mode)


# What a file may say


def test_a_whole_entry() -> None:
    (token,) = parse(
        ENTRY
        + 'spaces = ["team:payments", "org:acme"]\nexpires_at = 2027-01-01T00:00:00Z\nnote = "laptop"\n',
        "f",
    )
    assert (token.owner, token.scopes, token.note) == ("ada", {"read"}, "laptop")
    assert token.expires_at == datetime(2027, 1, 1, tzinfo=UTC)
    caller = token.caller
    assert (caller.actor, caller.verified) == ("ada", True)
    assert caller.shared_spaces == {"team:payments", "org:acme"}


def test_what_is_left_out_limits_nothing() -> None:
    (token,) = parse(ENTRY, "f")
    assert (token.caller.shared_spaces, token.expires_at, token.note) == (None, None, "")
    assert not token.expired(datetime.max.replace(tzinfo=UTC))


def test_no_shared_space_at_all_can_be_said() -> None:
    (token,) = parse(ENTRY + "spaces = []\n", "f")
    assert token.caller.shared_spaces == frozenset()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[[token]", "f: not valid TOML"),
        ("a = " + "[" * 100_000, "f: not valid TOML"),
        ("a = " + "9" * 5000, "f: not valid TOML"),
        ("tokens = []\n", "f: unknown key 'tokens'"),
        ("token = 7\n", "f: token is not a list of tables"),
        ("token = [1]\n", "f: token is not a list of tables"),
        ("[token]\nowner = 'ada'\n", "f: token is not a list of tables"),
        (ENTRY + "expires = 1\n", "f: token 1: unknown key 'expires'"),
        (ENTRY.replace('owner = "ada"\n', ""), "f: token 1: lacks 'owner'"),
        ("[[token]]\n", "f: token 1: lacks 'owner', 'scopes', 'sha256'"),
        (ENTRY + ENTRY, "f: token 2: sha256 is that of token 1"),
        (ENTRY.replace(HASH, HASH[:-1]), "f: token 1: sha256 must be 64"),
        (ENTRY.replace(HASH, HASH.upper()), "f: token 1: sha256 must be 64"),
        (ENTRY.replace(HASH, HASH + "\\n"), "f: token 1: sha256 must be 64"),
        (ENTRY.replace(f'"{HASH}"', "7"), "f: token 1: sha256 must be 64"),
        (ENTRY.replace('"ada"', '""'), "f: token 1: owner must be 1 to 128"),
        (ENTRY.replace('"ada"', '"a b"'), "f: token 1: owner must be 1 to 128"),
        (ENTRY.replace('"ada"', '":a"'), "f: token 1: owner must be 1 to 128"),
        (ENTRY.replace('"ada"', f'"{"a" * 129}"'), "f: token 1: owner must be 1 to 128"),
        (ENTRY.replace('"ada"', '"a\\u009b"'), "f: token 1: owner must not contain control"),
        (ENTRY.replace('"ada"', "['ada']"), "f: token 1: owner must be text"),
        (ENTRY.replace('["read"]', "[]"), "f: token 1: scopes must be a list of one or more"),
        (ENTRY.replace('["read"]', '["reed"]'), "f: token 1: scopes must be a list of one or more"),
        (ENTRY.replace('["read"]', '"read"'), "f: token 1: scopes must be a list"),
        (ENTRY.replace('["read"]', '[["read"]]'), "f: token 1: scopes must be text"),
        (ENTRY + 'spaces = ["private:bob"]\n', "f: token 1: spaces must be a list of shared"),
        (ENTRY + 'spaces = ["team:"]\n', "f: token 1: spaces must be a list of shared"),
        (ENTRY + 'spaces = "team:a"\n', "f: token 1: spaces must be a list"),
        (ENTRY + "expires_at = 2027-01-01T00:00:00\n", "f: token 1: expires_at must be a date and time with"),
        (ENTRY + "expires_at = 2027-01-01\n", "f: token 1: expires_at must be a date and time with"),
        (ENTRY + 'expires_at = "2027-01-01T00:00:00Z"\n', "f: token 1: expires_at must be a date"),
        (ENTRY + 'note = "\\u001b[31m"\n', "f: token 1: note must not contain control"),
        (ENTRY + f'note = "{"x" * 201}"\n', "f: token 1: note may have at most 200"),
    ],
)
def test_what_is_wrong_is_named_with_its_entry(text: str, told: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse(text, "f")
    assert str(refused.value).startswith(told), str(refused.value)


def test_a_token_written_where_its_hash_belongs_is_not_repeated() -> None:
    secret = new_secret()
    for text in (ENTRY.replace(HASH, secret), ENTRY.replace('"ada"', f'"{secret} "')):
        with pytest.raises(ConfigError) as refused:
            parse(text, "f")
        assert secret not in str(refused.value)


def test_tokens_are_long_random_and_hidden_from_logs() -> None:
    secrets = {new_secret() for _ in range(100)}
    assert len(secrets) == 100
    for secret in secrets:
        assert secret.startswith("engram_")
        assert len(secret) == 50
        for said in (secret, f"[(b'authorization', b'{secret}')]", f"x={secret}&y", f"http://h/{secret}/z"):
            assert secret[7:] not in redact(said)


plain = st.text(
    st.characters(exclude_categories=["Cs", "Cc"], include_characters="\"\\#[]='\u2028\u00a0\ufeff𝕫"),
    max_size=60,
)
names = st.text(st.characters(exclude_categories=["Cs", "Cc", "Z"]), min_size=1, max_size=30).filter(
    lambda name: name[0] not in ":/\\"
)


@given(
    owner=names,
    note=plain,
    scopes=st.sets(st.sampled_from(["read", "write", "admin"]), min_size=1),
    spaces=st.none() | st.sets(names.map(lambda name: f"team:{name}"), max_size=3),
    expires_at=st.none() | st.datetimes(timezones=st.just(UTC)),
)
def test_what_is_written_is_read_back(
    owner: str, note: str, scopes: set[str], spaces: set[str] | None, expires_at: datetime | None
) -> None:
    token = Token(
        HASH, owner, frozenset(scopes), None if spaces is None else frozenset(spaces), expires_at, note
    )
    assert parse(rendered(token), "f") == (token,)
    other = Token("cd" * 32, "bob", frozenset({"read"}))
    text = with_table(with_table("# ours", token), other)
    assert parse(text, "f") == (token, other)
    assert parse(without_table(text, token, "f"), "f") == (other,)
    assert parse(without_table(text, other, "f"), "f") == (token,)


@pytest.mark.parametrize("character", ["\x00", "\n", "\x1b", "\x7f", "\x85", "\ud800"])
def test_control_characters_are_refused_before_they_are_written(character: str) -> None:
    for field in ("owner", "note"):
        with pytest.raises(ConfigError):
            entry("secret", **{"owner": "ada", "note": "", field: f"a{character}b"})  # type: ignore[arg-type]


def test_taking_a_table_out_leaves_the_rest_as_it_was_written() -> None:
    first, second, third = (entry(name, note=name) for name in ("first", "second", "third"))
    text = (
        f"# the file\r\n\n  # about first\n{rendered(first)}# about second\n\n{rendered(second)}"
        f"\n# about third\n{rendered(third)}# the end"
    )
    left = without_table(text, second, "f")
    assert parse(left, "f") == (first, third)
    for comment in ("# the file\r\n", "# about first", "# about third", "# the end"):
        assert comment in left
    assert rendered(second) not in left
    assert parse(without_table(text, third, "f"), "f") == (first, second)


def test_a_layout_that_cannot_be_edited_is_said_and_left_alone() -> None:
    inline = f'token = [{{sha256 = "{HASH}", owner = "ada", scopes = ["read"]}}]\n'
    (token,) = parse(inline, "f")
    with pytest.raises(ConfigError, match=r"remove the entry whose sha256 begins with abababab by hand"):
        without_table(inline, token, "f")
    tricky = ENTRY + 'note = """\\\n[[token]]"""\n'
    (token,) = parse(tricky, "f")
    assert token.note == "[[token]]"
    with pytest.raises(ConfigError, match="by hand"):
        without_table(tricky, token, "f")


# A file that changes under a running gateway


class Live:
    def __init__(self, path: Path) -> None:
        self.path, self.clock = path, ManualClock()
        write(path, rendered(entry("a-secret")) + rendered(entry("b-secret", "bob")))
        self.tokens = TokensFile(path, self.clock)

    def knows(self, secret: str) -> bool:
        try:
            self.tokens.recognise(secret)
        except Unauthenticated:
            return False
        return True

    def known(self) -> list[str]:
        """After the next look at the file."""
        self.clock.advance(1.0)
        return [secret for secret in ("a-secret", "b-secret", "c-secret") if self.knows(secret)]


@pytest.fixture
def live(tmp_path: Path) -> Live:
    return Live(tmp_path / "tokens.toml")


def test_a_token_stands_for_its_owner(live: Live) -> None:
    assert live.tokens.recognise("a-secret").actor == "ada"
    assert live.tokens.recognise("b-secret").actor == "bob"
    for secret in ("", "a-secre", "a-secret ", "A-secret", sha256_of("a-secret")):
        with pytest.raises(Unauthenticated, match="not known"):
            live.tokens.recognise(secret)


def test_the_whole_hash_must_agree(tmp_path: Path) -> None:
    whole = sha256_of("a-secret")
    almost = whole[:-1] + ("0" if whole[-1] != "0" else "1")
    write(tmp_path / "t", rendered(Token(almost, "ada", frozenset({"read"}))))
    with pytest.raises(Unauthenticated):
        TokensFile(tmp_path / "t").recognise("a-secret")


def test_a_token_expires_to_the_second(tmp_path: Path) -> None:
    clock = ManualClock()
    write(tmp_path / "t", rendered(entry("a-secret", expires_at=clock.now() + timedelta(seconds=60))))
    tokens = TokensFile(tmp_path / "t", clock)
    clock.advance(59.5)
    assert tokens.recognise("a-secret").actor == "ada"
    clock.advance(0.5)
    with pytest.raises(Unauthenticated, match="token of ada has expired"):
        tokens.recognise("a-secret")


def test_a_revoked_token_is_refused_and_a_new_one_taken(live: Live) -> None:
    write(live.path, rendered(entry("b-secret", "bob")) + rendered(entry("c-secret", "carol")))
    assert live.knows("a-secret"), "the file is not looked at for every call"
    assert live.known() == ["b-secret", "c-secret"]


def test_a_replaced_file_is_followed(live: Live) -> None:
    other = live.path.with_name("other")
    write(other, rendered(entry("c-secret", "bob")) + rendered(entry("b-secret", "ada")))
    kept = live.path.stat()
    os.utime(other, ns=(kept.st_atime_ns, kept.st_mtime_ns))
    assert other.stat().st_size == kept.st_size
    other.rename(live.path)
    assert live.known() == ["b-secret", "c-secret"], "same size, same time, another file"


def test_the_file_is_read_only_when_it_changed(live: Live, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    for _ in range(5):
        assert live.known() == ["a-secret", "b-secret"]
    assert caplog.messages == []


def test_a_slip_of_the_pen_locks_nobody_out_and_lets_nobody_in(
    live: Live, caplog: pytest.LogCaptureFixture
) -> None:
    write(live.path, rendered(entry("c-secret")) + "[[token")
    assert live.known() == ["a-secret", "b-secret"]
    assert live.known() == ["a-secret", "b-secret"]
    assert caplog.messages == ["tokens.not_read"], "said once, not every second"
    write(live.path, rendered(entry("c-secret")))
    assert live.known() == ["c-secret"]


def test_the_last_good_tokens_still_expire(tmp_path: Path) -> None:
    live = Live(tmp_path / "t")
    write(live.path, rendered(entry("a-secret", expires_at=live.clock.now() + timedelta(seconds=5))))
    assert live.known() == ["a-secret"]
    write(live.path, "nonsense")
    live.clock.advance(5)
    assert live.known() == []


def test_a_file_that_others_may_write_is_not_followed(live: Live, caplog: pytest.LogCaptureFixture) -> None:
    write(live.path, rendered(entry("c-secret")), mode=0o620)
    assert live.known() == ["a-secret", "b-secret"]
    assert caplog.messages == ["tokens.not_read"]
    live.path.chmod(0o640)
    assert live.known() == ["c-secret"]


def test_without_the_file_nobody_may_call(live: Live, caplog: pytest.LogCaptureFixture) -> None:
    kept = live.path.read_text("utf-8")
    live.path.unlink()
    assert live.known() == []
    assert live.known() == []
    assert caplog.messages == ["tokens.gone"], "said once"
    write(live.path, kept)
    assert live.known() == ["a-secret", "b-secret"]


def test_a_folder_or_pipe_in_its_place_is_no_file(live: Live) -> None:
    live.path.unlink()
    live.path.mkdir()
    assert live.known() == []
    live.path.rmdir()
    os.mkfifo(live.path)
    assert live.known() == []


def test_with_an_emptied_file_nobody_may_call(live: Live) -> None:
    write(live.path, "")
    assert live.known() == []


def test_a_link_is_followed_when_it_is_pointed_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "v1").mkdir()
    (tmp_path / "v2").mkdir()
    (tmp_path / "now").symlink_to("v1")
    live = Live(tmp_path / "now" / "tokens.toml")
    write(tmp_path / "v2" / "tokens.toml", rendered(entry("c-secret")))
    (tmp_path / "next").symlink_to("v2")
    (tmp_path / "next").rename(tmp_path / "now")
    assert live.known() == ["c-secret"]


# At the start


@pytest.mark.parametrize("text", ["", "# nothing yet\n"])
def test_a_start_without_any_token_is_refused(tmp_path: Path, text: str) -> None:
    write(tmp_path / "t", text)
    with pytest.raises(ConfigError, match=r"has no token.*engram token create"):
        TokensFile(tmp_path / "t")


def test_a_start_without_the_file_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "no" / "such", tmp_path):
        with pytest.raises(ConfigError, match=r"cannot be read.*engram token create"):
            TokensFile(path)


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666, 0o622])
def test_a_start_with_a_file_that_others_may_write_is_refused(tmp_path: Path, mode: int) -> None:
    write(tmp_path / "t", ENTRY, mode)
    with pytest.raises(ConfigError, match="chmod go-w"):
        TokensFile(tmp_path / "t")


@pytest.mark.parametrize(("mode", "warned"), [(0o600, False), (0o640, False), (0o644, True)])
def test_a_file_that_everybody_may_read_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int, warned: bool
) -> None:
    write(tmp_path / "t", ENTRY, mode)
    TokensFile(tmp_path / "t")
    assert ("tokens.readable_by_all" in caplog.messages) is warned


@pytest.mark.parametrize("content", [b"\xff\xfe", b"# " + b"x" * (1 << 20)], ids=["not-utf8", "huge"])
def test_a_start_with_something_else_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "t").write_bytes(content)
    (tmp_path / "t").chmod(0o600)
    with pytest.raises(ConfigError, match=str(tmp_path / "t")):
        TokensFile(tmp_path / "t")


# Editing


def test_an_edit_keeps_who_may_read_the_file(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "er" / "tokens.toml"
    edit(path, lambda text: text + ENTRY)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    path.chmod(0o640)
    edit(path, lambda text: text + "# more\n")
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert len(read(path)) == 1


def test_an_edit_keeps_whose_the_file_is(tmp_path: Path) -> None:
    path = tmp_path / "tokens.toml"
    write(path, ENTRY)
    # Only root may give a file away; others may at least choose among their groups.
    owner = (12345, 23456) if os.geteuid() == 0 else (os.geteuid(), os.getgroups()[-1])
    os.chown(path, *owner)
    edit(path, lambda text: text + "# more\n")
    assert (path.stat().st_uid, path.stat().st_gid) == owner


def test_an_edit_through_a_link_keeps_the_link(tmp_path: Path) -> None:
    write(tmp_path / "real", ENTRY)
    (tmp_path / "link").symlink_to("real")
    edit(tmp_path / "link", lambda text: text + "# more\n")
    assert (tmp_path / "link").is_symlink()
    assert "# more" in (tmp_path / "real").read_text("utf-8")


def test_an_edit_that_would_break_the_file_leaves_it(tmp_path: Path) -> None:
    path = tmp_path / "tokens.toml"
    write(path, ENTRY)
    for broken in ("[[token", ENTRY, "# " + "x" * (1 << 20)):
        with pytest.raises(ConfigError):
            edit(path, lambda text, broken=broken: text + broken)
    assert path.read_text("utf-8") == ENTRY
    assert sorted(p.name for p in tmp_path.iterdir()) == ["tokens.toml", "tokens.toml.lock"]


def test_an_edit_is_whole_or_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tokens.toml"
    write(path, ENTRY)

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        edit(path, lambda text: text + "# more\n")
    assert path.read_text("utf-8") == ENTRY
    assert sorted(p.name for p in tmp_path.iterdir()) == ["tokens.toml", "tokens.toml.lock"]


def test_of_many_edits_at_once_none_is_lost(tmp_path: Path) -> None:
    """Processes, because the lock is between processes."""
    path = tmp_path / "tokens.toml"
    script = (
        "import sys; from pathlib import Path; from engram.api import tokens, tokens_file\n"
        "for n in range(8):\n"
        "    secret = sys.argv[2] + str(n)\n"
        "    entry = {'sha256': tokens.sha256_of(secret), 'owner': secret, 'scopes': ['read']}\n"
        "    token = tokens.checked(entry, 'entry')\n"
        "    tokens_file.edit(Path(sys.argv[1]), lambda text: tokens.with_table(text, token))\n"
    )
    running = [subprocess.Popen([sys.executable, "-c", script, str(path), name]) for name in "abcd"]
    assert [process.wait(60) for process in running] == [0, 0, 0, 0]
    assert {token.owner for token in read(path)} == {f"{name}{n}" for name in "abcd" for n in range(8)}
