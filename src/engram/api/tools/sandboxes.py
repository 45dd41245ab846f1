"""Sandboxes, as agents use them: one to work in, and commands in it."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal
from uuid import uuid4

from pydantic import Field, ValidationInfo, field_validator

from engram.api.tools.base import Call, Checked, Prepared, Tool, WriteArguments
from engram.kernel import correlation
from engram.sandboxes.driver import Command, EndedBy
from engram.sandboxes.rows import SandboxRow
from engram.sandboxes.service import Outcome

MAX_ARGUMENTS = 1000
DEFAULT_TIMEOUT_SECONDS = 60.0
Encoding = Literal["utf-8", "base64"]
Status = Literal["creating", "ready", "failed", "stopped", "expired", "deleted"]


class CreateArguments(WriteArguments):
    profile: str = Field(
        default="default",
        max_length=64,
        description="What can be read in it: default (the system's programs and Python) or shell.",
    )
    ttl_seconds: int | None = Field(
        default=None, ge=1, lt=1 << 31, description="How long it lives; by default an hour."
    )
    env: dict[str, str] = Field(default={}, description="Variables that every command in it gets.")


class CommandArguments(Checked):
    argv: list[str] = Field(
        min_length=1, max_length=MAX_ARGUMENTS, description="The program and its arguments; no shell."
    )
    stdin: str | None = Field(default=None, description="What the command reads from its standard input.")
    stdin_encoding: Encoding = Field(default="utf-8", description="How stdin is written: utf-8 or base64.")
    timeout_seconds: float = Field(
        default=DEFAULT_TIMEOUT_SECONDS, gt=0, le=86_400, description="After this it is ended."
    )
    cwd: str = Field(
        default=".", max_length=1024, description="Where in the sandbox it runs: a path below its folder."
    )

    @field_validator("cwd")
    @classmethod
    def _stays_inside(cls, value: str) -> str:
        if value.startswith("/") or ".." in value.split("/") or "\x00" in value:
            raise ValueError("must be a relative path without '..'")
        return value

    @field_validator("argv")
    @classmethod
    def _can_be_run(cls, value: list[str]) -> list[str]:
        if not value[0]:
            raise ValueError("must begin with a program")
        return value

    @field_validator("stdin_encoding")
    @classmethod
    def _can_be_read(cls, value: Encoding, known: ValidationInfo) -> Encoding:
        """Here, where it is refused before a key is spent on it."""
        _decoded(known.data.get("stdin") or "", value)
        return value

    def command(self) -> Command:
        return Command(self.argv, self.timeout_seconds, self._input(), self.cwd)

    def _input(self) -> bytes:
        return _decoded(self.stdin or "", self.stdin_encoding)


def _decoded(text: str, encoding: Encoding) -> bytes:
    if encoding == "utf-8":
        return text.encode()
    try:
        return base64.b64decode(text.encode("ascii"), validate=True)
    except ValueError as error:
        raise ValueError("stdin is not base64") from error


class ExecArguments(WriteArguments, CommandArguments):
    sandbox_id: str = Field(max_length=64, description="The sandbox's id, as sandbox_create gave it.")


@dataclass(frozen=True)
class SandboxReply:
    id: str
    status: Status
    profile: str
    created_at: datetime
    expires_at: datetime
    reason: str | None
    correlation_id: str


@dataclass(frozen=True)
class ExecReply:
    """`ended_by`: what ended it before it ended by itself, if anything did."""

    exit_code: int
    stdout: str
    stderr: str
    truncated: bool
    timed_out: bool
    ended_by: EndedBy | None
    correlation_id: str


def sandbox_reply(row: SandboxRow) -> SandboxReply:
    status: Any = row.status
    about = correlation.current_or_new()
    return SandboxReply(row.id, status, row.profile, row.created_at, row.expires_at, row.reason, about)


def exec_reply(outcome: Outcome) -> ExecReply:
    return ExecReply(
        outcome.exit_code,
        readable(outcome.stdout),
        readable(outcome.stderr),
        outcome.truncated,
        outcome.timed_out,
        outcome.ended_by,
        correlation.current_or_new(),
    )


def readable(data: bytes) -> str:
    """As text that can be kept: what is none is replaced."""
    return data.decode("utf-8", "replace").replace("\x00", "\ufffd")


async def sandbox_create(call: Call[CreateArguments]) -> SandboxReply | Prepared:
    """Make a sandbox: a folder of its own in which commands run without network or access to the host.

    Pass an idempotency_key and repeat it when you retry: you get one sandbox, not
    two. It is removed with its files when its time is over. Run commands in it
    with sandbox_exec.
    """
    asked, sandboxes, owner = call.asked, call.services.sandboxes, call.caller.actor
    wanted = (asked.profile, asked.ttl_seconds, asked.env)
    if (sandbox_id := call.request_id) is None:
        return sandbox_reply(await sandboxes.create(owner, str(uuid4()), *wanted))
    found = await sandboxes.prepare(owner, sandbox_id, *wanted)
    if isinstance(found, SandboxRow):
        return sandbox_reply(found)

    async def otherwise() -> SandboxReply:
        return sandbox_reply(await sandboxes.made(owner, sandbox_id))

    return Prepared(sandbox_reply(found.row), found.step, otherwise)


async def sandbox_exec(call: Call[ExecArguments]) -> ExecReply:
    """Run one command in a sandbox and wait for its end. Files that it writes stay for the next one.

    argv is run as it is: for pipes and variables use ["sh", "-c", "..."]. There is
    no network. Processes that it leaves behind are ended with it. Long output is
    cut, and truncated is true. With an idempotency_key it is never run twice.
    """
    asked = call.asked
    outcome = await call.services.sandboxes.run(call.caller.actor, asked.sandbox_id, asked.command())
    return exec_reply(outcome)


TOOLS = (
    Tool(
        "sandbox_create",
        "Make a sandbox",
        "/v1/sandboxes",
        "write",
        CreateArguments,
        SandboxReply,
        sandbox_create,
        repeatable=False,
        status_code=201,
    ),
    Tool(
        "sandbox_exec",
        "Run a command in a sandbox",
        "/v1/sandboxes/{sandbox_id}/exec",
        "write",
        ExecArguments,
        ExecReply,
        sandbox_exec,
        repeatable=False,
        resumable=False,
        twin=False,
    ),
)
