"""Log lines: readable by people, parsable by machines, and never with a secret."""

from __future__ import annotations

import io
import json
import logging
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from engram.kernel import correlation, logs
from engram.kernel.logs import HumanFormatter, JsonFormatter, configure, fields, hide, redact

Formatted = Callable[..., str]


@pytest.fixture(autouse=True)
def _nothing_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "_hidden", set())


@pytest.fixture
def _root_kept() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def record(message: str, *args: object, level: int = logging.INFO, **extra: Any) -> logging.LogRecord:
    made = logging.LogRecord("engram.demo", level, __file__, 1, message, args, extra.pop("exc_info", None))
    if extra:
        made.fields = extra
    return made


def as_json(message: str, *args: object, **extra: Any) -> dict[str, Any]:
    line: dict[str, Any] = json.loads(JsonFormatter().format(record(message, *args, **extra)))
    return line


def as_human(message: str, *args: object, **extra: Any) -> str:
    return HumanFormatter().format(record(message, *args, **extra))


def failure() -> Any:
    try:
        raise ValueError("postgresql://u:hunter2@db/x is away")
    except ValueError:
        return sys.exc_info()


def test_a_json_line_is_one_object_with_its_fields() -> None:
    line = as_json("outbox.%s", "delivered", outbox_id=7, space="team:支付", level=logging.WARNING)
    assert line["event"] == "outbox.delivered"
    assert (line["level"], line["logger"]) == ("warning", "engram.demo")
    assert (line["outbox_id"], line["space"]) == (7, "team:支付")
    assert line["time"].endswith("+00:00")
    assert "correlation_id" not in line


def test_a_json_line_is_one_line() -> None:
    text = JsonFormatter().format(record("two\nlines", note="a\nb", exc_info=failure()))
    assert "\n" not in text


def test_what_json_does_not_know_is_written_as_text() -> None:
    line = as_json("x", error=ValueError("no"), kinds={"a"})
    assert (line["error"], line["kinds"]) == ("no", "{'a'}")


def test_a_human_line_reads_from_left_to_right() -> None:
    line = as_human("outbox.dead", outbox_id=7, error="refused", level=logging.ERROR)
    clock, level, event, *rest = line.split()
    assert clock.count(":") == 2
    assert (level, event, rest) == ("error", "outbox.dead", ["outbox_id=7", "error=refused"])
    assert as_human("alone").endswith("alone")


def test_the_correlation_id_is_added_by_itself() -> None:
    token = correlation.current.set("corr-0123456789abcdef")
    try:
        assert as_json("x")["correlation_id"] == "corr-0123456789abcdef"
        assert as_human("x").endswith("correlation_id=corr-0123456789abcdef")
        assert as_json("x", correlation_id="corr-other")["correlation_id"] == "corr-other"
    finally:
        correlation.current.reset(token)


def test_exceptions_are_told_and_masked() -> None:
    told = as_json("x", exc_info=failure())["exception"]
    assert told.startswith("Traceback")
    assert "ValueError: postgresql://u:***@db/x is away" in told
    assert "hunter2" not in as_human("x", exc_info=failure())


CREDENTIALS = [
    "postgresql://engram:hunter2@db.internal/engram",
    "redis://:hunter2@cache:6379/0",
    "https://user:hunter2@memory.internal/path",
    "host=db user=engram password=hunter2 dbname=engram",
    "PGPASSWORD=hunter2",
    "Authorization: Bearer hunter2",
    "authorization=Bearer hunter2",
    "bearer hunter2",
    "x-api-key: hunter2",
    "{'x-api-key': 'hunter2'}",
    "{'Authorization': 'Bearer hunter2'}",
    "api_key=hunter2",
    "apikey: hunter2",
    "https://memory.internal/?token=hunter2&k=5",
    "secret = 'hunter2'",
]


@pytest.mark.parametrize("text", CREDENTIALS)
def test_what_looks_like_a_credential_is_masked(text: str) -> None:
    assert "hunter2" not in redact(text)
    assert "***" in redact(text)
    for line in (
        as_json(text)["event"],
        as_json("x", said=text)["said"],
        as_human(text),
        as_human("x", s=text),
    ):
        assert "hunter2" not in line


@pytest.mark.parametrize("name", ["password", "api_key", "x-api-key", "token", "secret", "authorization"])
def test_a_field_named_like_a_credential_is_masked(name: str) -> None:
    assert as_json("x", **{name: "hunter2"})[name] == "***"
    assert as_json("x", headers={name: "hunter2"})["headers"] == {name: "***"}
    assert "hunter2" not in as_human("x", **{name: "hunter2"})


@pytest.mark.parametrize(
    "text",
    [
        "http://127.0.0.1:8787/memory/store",
        "postgresql://engram@db.internal:5432/engram",
        "the lease was lost",
        "outbox.batch sent=3 dead=0",
        "host=db dbname=engram",
    ],
)
def test_what_does_not_is_left_alone(text: str) -> None:
    assert redact(text) == text


def test_a_registered_secret_is_masked_wherever_it_turns_up() -> None:
    hide("s3cr3t-value")
    assert "s3cr3t-value" not in as_human("got s3cr3t-value", where="/a/s3cr3t-value/b")
    line = as_json("got s3cr3t-value", where={"deep": ["s3cr3t-value"]})
    assert line["event"] == "got ***"
    assert line["where"] == {"deep": ["***"]}


def test_nothing_and_very_short_values_are_not_registered() -> None:
    for value in (None, "", "abc"):
        hide(value)
    assert redact("abc") == "abc"


@pytest.mark.usefixtures("_root_kept")
@pytest.mark.parametrize(("style", "is_json"), [("json", True), ("human", False), ("auto", True)])
def test_configured_lines_go_to_the_stream(style: str, is_json: bool) -> None:
    stream = io.StringIO()
    configure("info", style, stream)
    logging.getLogger("engram.demo").info("started", extra=fields(port=8787))
    logging.getLogger("engram.demo").debug("unseen")
    (line,) = stream.getvalue().splitlines()
    assert line.startswith("{") == is_json
    assert "8787" in line


@pytest.mark.usefixtures("_root_kept")
def test_a_terminal_gets_lines_for_people() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    configure("warning", "auto", stream)
    logging.getLogger("engram.demo").warning("careful")
    assert stream.getvalue().rstrip().endswith("warning careful")


@pytest.mark.usefixtures("_root_kept")
def test_configuring_twice_does_not_double_the_lines() -> None:
    stream = io.StringIO()
    configure("info", "json", stream)
    configure("info", "json", stream)
    logging.getLogger("engram.demo").info("once")
    assert len(stream.getvalue().splitlines()) == 1


@pytest.mark.usefixtures("_root_kept")
def test_chatty_libraries_are_quiet() -> None:
    stream = io.StringIO()
    configure("debug", "json", stream)
    for name in ("httpx2", "uvicorn.access", "psycopg.pool"):
        logging.getLogger(name).info("GET / 200")
    assert stream.getvalue() == ""


@pytest.mark.parametrize("value", [7, None, True, [1, 2], {"a": 1}])
def test_a_field_named_like_a_credential_leaves_json_whole(value: object) -> None:
    assert as_json("x", lease_token=value)["lease_token"] == value


@pytest.mark.parametrize(
    "text", ['password="hunter2"', '{"x-api-key": "hunter2"}', '{"password": "hunter2"}']
)
def test_quoted_credentials_are_masked_in_json_too(text: str) -> None:
    line = JsonFormatter().format(record(text))
    json.loads(line)
    assert "hunter2" not in line


def test_a_registered_secret_with_a_quote_is_masked_in_json_too() -> None:
    hide('hunter"2\\x')
    assert as_json('got hunter"2\\x')["event"] == "got ***"


@pytest.mark.parametrize(
    "text",
    [
        "Authorization: Basic aHVudGVyMjpodW50ZXIy",
        "password='correct hunter2'",
        "redis://:p@hunter2@cache:6379",
    ],
)
def test_a_credential_is_masked_to_its_end(text: str) -> None:
    assert "hunter2" not in redact(text)
    assert "aHVudGVyMjpodW50ZXIy" not in redact(text)


def test_a_secret_within_another_does_not_uncover_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "_hidden", ["hunter2", "hunter2-and-more"])
    assert redact("hunter2-and-more") == "***"


@pytest.mark.parametrize(
    "text", ["://" * 50_000, "://u:" * 30_000, "://u:p@" * 20_000, "password='" * 20_000]
)
def test_what_somebody_wrote_to_slow_it_down_does_not(text: str) -> None:
    """Each took minutes when a pattern looked for the password of an address."""
    began = time.process_time()
    redact(text)
    assert time.process_time() - began < 5
