"""`engram why`: what became of a write, what it waits for, since when, and what to do next. Pure.

A fact is what the database had at one moment (`logbook.trace`); an explanation
is one sentence and the next commands, each of which can be typed as it stands.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from engram.gateway.capabilities import WORKER_FRESH_SECONDS
from engram.gateway.placement import governing_project
from engram.gateway.timeline import Event, decision, excerpt, extra, timeline
from engram.logbook.trace import Audit, Found, MemoryRecord, OutboxRow, Story

# A worker that runs takes a due row within its polling time, unless the memory server is down.
TAKEN_WITHIN_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Step:
    command: str
    why: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """`said` goes on where "<state> since <since>" ends. Without `steps` there is nothing to do."""

    state: str
    said: str
    since: datetime | None = None
    steps: tuple[Step, ...] = ()


@dataclass(frozen=True, slots=True)
class Explanation:
    """`asked` is what an audit decided, where an audit or a request was asked about.

    `excerpt` is empty where nothing was kept, and where it was forgotten.
    """

    subject: str
    space: str
    excerpt: str
    state: str
    said: str
    since: datetime | None
    now: datetime
    asked: str | None = None
    next: tuple[Step, ...] = ()
    timeline: list[Event] = field(default_factory=list)
    audits_left_out: int = 0


def explain(found: Found, story: Story, *, max_retries: int) -> Explanation:
    """`max_retries` tells a row whose tries were used up from one that was refused."""
    judge = _Judge(story, max_retries)
    audit = judge.audit(found.id) if found.kind in ("audit", "correlation") else None
    verdict = _diverted(judge.of(found), story)
    return Explanation(
        subject=f"{_NAMES[found.kind]}:{found.id}",
        space=excerpt(found.target_space),
        excerpt=judge.excerpt,
        state=verdict.state,
        said=verdict.said,
        since=verdict.since,
        now=story.now,
        asked=decision(audit) if audit else None,
        next=verdict.steps,
        timeline=timeline(story),
        audits_left_out=story.audits_in_all - len(story.audits),
    )


_NAMES = {
    "outbox": "outbox",
    "memory": "memory",
    "memory_id": "memory",
    "audit": "audit",
    "correlation": "audit",
}


@dataclass(frozen=True, slots=True)
class _Judge:
    story: Story
    max_retries: int

    def of(self, found: Found) -> Verdict:
        if found.kind == "outbox":
            return self.row(next(row for row in self.story.rows if row.outbox_id == found.id))
        if found.kind in ("memory", "memory_id"):
            return self.memory(next(m for m in self.story.memories if m.memory_record_id == found.id))
        return self.decided(self.audit(found.id))

    def audit(self, audit_id: int) -> Audit:
        return next(audit for audit in self.story.audits if audit.audit_id == audit_id)

    def decided(self, audit: Audit) -> Verdict:
        """What became of the content that an audit is about."""
        if (audit.reason or "").startswith("policy_reject:"):
            return _refused(audit)
        if audit.action == "pending":
            return self._begun(audit)
        row = next((row for row in self.story.rows if str(row.outbox_id) == audit.outbox_id), None)
        if row is not None:
            return self.row(row)
        if audit.action == "redirect":
            return _row_is_gone(audit.outbox_id)
        if self.story.memories:
            return self.memory(self.live or self.story.memories[-1])
        return Verdict(audit.action, decision(audit), audit.finalized_at)

    def _begun(self, audit: Audit) -> Verdict:
        for memory in self.story.memories:
            if memory.state == "intent" and memory.audit_id == audit.audit_id:
                return self.memory(memory)
        said = "an audit that a script began: only that script can finish it, reconcile leaves it alone"
        return Verdict("pending", said, audit.created_at)

    @property
    def excerpt(self) -> str:
        if self.live is None and any(memory.state == "forgotten" for memory in self.story.memories):
            return ""
        kept: list[MemoryRecord | OutboxRow] = [*self.story.memories, *self.story.rows]
        return excerpt(kept[0].excerpt) if kept else ""

    @property
    def live(self) -> MemoryRecord | None:
        return next((memory for memory in self.story.memories if memory.state != "forgotten"), None)

    def memory(self, memory: MemoryRecord) -> Verdict:
        match memory.state:
            case "intent":
                return self._intent(memory)
            case "stored":
                since = self._settled_at(memory.audit_id, memory.outbox_id) or memory.updated_at
                return Verdict("stored", _has_it(memory.memory_id), since)
            case "forgotten":
                return self._forgotten(memory)
        row = next((row for row in self.story.rows if row.outbox_id == memory.outbox_id), None)
        return _row_is_gone(str(memory.outbox_id)) if row is None else self.row(row)

    def row(self, row: OutboxRow) -> Verdict:
        if row.forgotten_at is not None:
            return self._forgotten_row(row)
        if row.status == "sent":
            since = self._settled_at(None, row.outbox_id) or row.updated_at
            return Verdict("sent", _has_it(row.memory_id), since)
        return self._dead(row) if row.status == "dead" else self._pending(row)

    def _settled_at(self, audit_id: int | None, outbox_id: int | None) -> datetime | None:
        """When an audit says that it was settled; a row's own time moves when reconcile touches it."""
        for audit in reversed(self.story.audits):
            of_row = audit.outbox_id == str(outbox_id) and (audit.reason or "").startswith("outbox_flush_")
            if audit.action in ("allow", "reject") and (of_row or audit.audit_id == audit_id):
                return audit.finalized_at
        return None

    def _pending(self, row: OutboxRow) -> Verdict:
        now, ends_at = self.story.now, row.lease_ends_at
        if ends_at is not None and ends_at > now:
            said = f"by {excerpt(row.locked_by)} until {at(ends_at, now)}; it is being delivered"
            return Verdict("leased", said, row.locked_at)
        tried = _tried(row)
        if self.live is not None and self.live.state == "stored":
            tried = [
                f"another write stored its content as memory:{self.live.memory_record_id}, so it is settled unsent"
            ]
        if row.next_attempt_at > now:
            said = "; ".join([f"not due before {at(row.next_attempt_at, now)}", *tried])
            steps = () if self._worker_runs else (self._no_worker("engram worker outbox"),)
            return Verdict("waiting", said, row.created_at, steps)
        if ends_at is not None:
            tried = [f"the lease of {excerpt(row.locked_by)} ran out", *tried]
            return self._due("lease over", tried, max(ends_at, row.next_attempt_at))
        return self._due("due", tried, row.next_attempt_at)

    def _due(self, state: str, tried: list[str], since: datetime) -> Verdict:
        if not self._worker_runs:
            step = self._no_worker("engram worker outbox --once")
            return Verdict(state, "; ".join([*tried, "no worker runs"]), since, (step,))
        if (self.story.now - since).total_seconds() < TAKEN_WITHIN_SECONDS:
            return Verdict(state, "; ".join([*tried, "a worker takes it in a moment"]), since)
        waits = "workers run, and take nothing while the memory server is down"
        step = Step("engram doctor", "says whether the memory server is well")
        return Verdict(state, "; ".join([*tried, waits]), since, (step,))

    @property
    def _worker_runs(self) -> bool:
        seen = self.story.worker_seen_at
        return seen is not None and (self.story.now - seen).total_seconds() < WORKER_FRESH_SECONDS

    def _no_worker(self, command: str) -> Step:
        seen = self.story.worker_seen_at
        ago = "was ever seen" if seen is None else f"has been seen since {at(seen, self.story.now)}"
        return Step(command, f"no worker {ago}; this runs one (`engram up` runs everything)")

    def _dead(self, row: OutboxRow) -> Verdict:
        since = self._settled_at(None, row.outbox_id) or row.updated_at
        return self._overtaken(row, since) or self._given_up(row, since)

    def _overtaken(self, row: OutboxRow, since: datetime) -> Verdict | None:
        """The row is dead, and its content went on without it."""
        if self.live is not None and self.live.state == "stored":
            return Verdict("dead", f"another write stored its content: {_has_it(self.live.memory_id)}", since)
        if self.live is not None and self.live.state == "intent":
            return replace(self._intent(self.live), since=since)
        later = [other for other in self.story.rows if other.outbox_id > row.outbox_id]
        if later:
            newest = later[-1]
            now_is = "forgotten" if newest.forgotten_at else newest.status
            said = f"tried anew as outbox:{newest.outbox_id}, which is {now_is}"
            step = Step(f"engram why outbox:{newest.outbox_id}", "says how that one is")
            return Verdict("dead", said, since, (step,))
        return None

    def _given_up(self, row: OutboxRow, since: datetime) -> Verdict:
        tries, error = row.retry_count + 1, excerpt(row.last_error)
        again = f"engram outbox requeue {row.outbox_id}"
        if tries >= self.max_retries:
            well = Step("engram doctor", "says whether the memory server is well")
            said = f"given up after {_times(tries)}; last: {error}"
            return Verdict("dead", said, since, (Step(again, "tries it again"), well))
        return Verdict(
            "dead",
            f"refused for good at try {tries}: {error}",
            since,
            (
                Step(f"engram outbox show {row.outbox_id}", "shows it whole; as it is it is refused again"),
                Step(again, "once the memory server would take it"),
                Step(f"engram forget --outbox-id {row.outbox_id}", "if it is not wanted any more"),
            ),
        )

    def _intent(self, memory: MemoryRecord) -> Verdict:
        now, ends_at, park_at = self.story.now, memory.intent_ends_at, memory.park_due_at
        if ends_at is None or park_at is None or ends_at > now:
            until = f"; its gateway has until {at(ends_at, now)}" if ends_at else ""
            return Verdict("intent", f"being written{until}", memory.intent_at)
        late = f"the intent of a gateway that is {_span((now - ends_at).total_seconds())} late"
        if park_at > now:
            return Verdict("overdue", f"{late}; reconcile parks it {at(park_at, now)}", ends_at)
        why = "parks it now; a worker then looks whether it arrived, and delivers it if not"
        said = f"{late}; reconcile parks it with its next pass"
        return Verdict("overdue", said, ends_at, (Step("engram reconcile", why),))

    def _forgotten_row(self, row: OutboxRow) -> Verdict:
        for memory in reversed(self.story.memories):
            if memory.state == "forgotten" and memory.outbox_id == row.outbox_id:
                return self._forgotten(memory)
        return Verdict("forgotten", "it is never delivered", row.forgotten_at)

    def _forgotten(self, memory: MemoryRecord) -> Verdict:
        said, steps = self._copy(memory)
        if self.live is not None:
            said += f"; the same content was stored anew as memory:{self.live.memory_record_id}"
        return Verdict("forgotten", f"nobody can read it, and {said}", memory.forgotten_at, steps)

    def _copy(self, memory: MemoryRecord) -> tuple[str, tuple[Step, ...]]:
        """What is left of it in the memory server."""
        now = self.story.now
        if memory.erase_due_at is None:
            return "the memory server has no copy of it", ()
        if memory.erase_ends_at is not None and memory.erase_ends_at > now:
            return (
                f"its copy is being deleted, and not tried again before {at(memory.erase_ends_at, now)}",
                (),
            )
        tried = f" ({_times(memory.erase_tries)} so far)" if memory.erase_tries else ""
        if memory.erase_due_at > now:
            return f"its copy is deleted {at(memory.erase_due_at, now)}{tried}", ()
        why = "deletes it now; a worker does so by itself"
        return f"its copy is to be deleted by the next reconcile{tried}", (Step("engram reconcile", why),)


def _refused(audit: Audit) -> Verdict:
    said = f"refused by policy and not kept: {excerpt(audit.target_space)} ({excerpt(audit.reason)})"
    space = f"private:{audit.actor_user_id}" if audit.actor_user_id else "private:local"
    command = shlex.join(["engram", "store", "--space", space, "-"])
    step = Step(command, "stores it in the writer's own space; the text comes from standard input")
    return Verdict("rejected", said, audit.finalized_at, (step,))


def _row_is_gone(outbox_id: str | None) -> Verdict:
    said = f"parked as outbox:{excerpt(outbox_id)}, and that row is gone: somebody removed it"
    return Verdict("gone", said, None, (Step("engram reconcile --report", "lists every such loss"),))


def _diverted(verdict: Verdict, story: Story) -> Verdict:
    """With what policy did to it, where it is not where it was asked to go."""
    for audit in reversed(story.audits):
        wanted = audit.requested_space
        if wanted in (None, audit.target_space) or verdict.state == "rejected":
            continue
        rule = extra(audit, "policy_rule")
        said = (
            f"{verdict.said}; asked for {excerpt(wanted)}, and policy put it in {audit.target_space} ({rule})"
        )
        project = governing_project(wanted, "")
        command = ["engram", "governance", "show", *([project] if project else [])]
        step = Step(shlex.join(command), "shows the policy that decided")
        return replace(verdict, said=said, steps=(*verdict.steps, step))
    return verdict


def _has_it(memory_id: str | None) -> str:
    return "the memory server has it" + (f" as {excerpt(memory_id)}" if memory_id else "")


def _tried(row: OutboxRow) -> list[str]:
    told = []
    if row.retry_count:
        told.append(f"{_times(row.retry_count)} failed")
    if row.last_error:
        told.append(f"last: {excerpt(row.last_error)}")
    if row.ambiguous:
        told.append("an earlier try may have arrived, so it is looked for first")
    return told


def _times(count: int) -> str:
    return "1 try" if count == 1 else f"{count} tries"


def at(moment: datetime, now: datetime) -> str:
    seconds = (moment - now).total_seconds()
    distance = f"in {_span(seconds)}" if seconds > 0 else f"{_span(-seconds)} ago"
    return f"{clock(moment)} ({distance})"


def clock(moment: datetime) -> str:
    return f"{moment.astimezone(UTC):%Y-%m-%d %H:%M:%S}Z"


def _span(seconds: float) -> str:
    """
    >>> _span(0.4), _span(119), _span(7200), _span(400_000)
    ('0 s', '119 s', '2 h', '5 days')
    """
    for unit, length in (("days", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
