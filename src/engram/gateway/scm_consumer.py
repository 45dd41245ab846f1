"""Facts of source control become memories, by the ordinary path.

The consumer reads facts through the logbook and knows nothing of how they came
there. Each fact that is worth a card is kept as a candidate first, then stored
like any memory: a dead memory server parks it. The cursor moves on every final
answer (stored, parked, rejected, not worth a card) and never on an error, so a
fact is looked at again until it has one. Repeats are recognised by content,
hence it may be set back to any point.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from engram.gateway.cards import Card
from engram.gateway.memory_store import MemoryStore
from engram.gateway.scm_cards import Rules, card_of, source_of, why_not
from engram.gateway.spaces import team_space
from engram.gateway.store_reply import StoreReply, StoreRequest
from engram.kernel.correlation import new_correlation_id
from engram.kernel.errors import InputError, StateConflict
from engram.kernel.failpoints import failpoint
from engram.kernel.logs import fields
from engram.logbook import facts, kv, recall
from engram.logbook.uri import build_evidence_refs_json, split_evidence_refs
from engram.postgres.executors import AsyncExecutor
from engram.postgres.query import Row

log = logging.getLogger(__name__)

ACTOR = "scm"
NAMESPACE = "gateway.consume"
PAGE = 200
CONFIDENCE = 0.6


@dataclass
class Consumed:
    """What became of the facts. `unworthy` counts those that made no card, by the reason."""

    stored: int = 0
    repeated: int = 0
    parked: int = 0
    diverted: int = 0
    rejected: int = 0
    unworthy: dict[str, int] = field(default_factory=dict)

    @property
    def facts(self) -> int:
        cards = self.stored + self.repeated + self.parked + self.diverted + self.rejected
        return cards + sum(self.unworthy.values())

    def count_unworthy(self, reason: str) -> None:
        self.unworthy[reason] = self.unworthy.get(reason, 0) + 1


@dataclass(frozen=True, slots=True)
class ScmConsumer:
    db: AsyncExecutor
    store: MemoryStore
    on_fact: Callable[[Consumed], None] = lambda consumed: None

    async def run_once(self, repo_id: int, project_key: str) -> Consumed:
        """Everything that changed since the cursor; answers what became of it."""
        run = _Run(self, repo_id, project_key, await self._rules(project_key), await self._cursor(repo_id))
        await run.whole()
        return run.consumed

    async def replay(self, repo_id: int, after_seq: int = 0) -> None:
        """Set the cursor back; the next run looks at everything after that point again."""
        await self.db.run(kv.put_value.query(NAMESPACE, cursor_key(repo_id), {"changed_seq": after_seq}))

    async def set_rules(self, project_key: str, rules: dict[str, Any]) -> None:
        Rules.parse(rules)
        await self.db.run(kv.put_value.query(NAMESPACE, rules_key(project_key), rules))

    async def _rules(self, project_key: str) -> Rules:
        return Rules.parse(await self.db.run(kv.get_value.query(NAMESPACE, rules_key(project_key), {})))

    async def _cursor(self, repo_id: int) -> Any:
        return await self.db.run(kv.get_value.query(NAMESPACE, cursor_key(repo_id), kv.ABSENT))


@dataclass
class _Run:
    """One run over one repository; `cursor` is what the key holds, and only this run has moved it."""

    consumer: ScmConsumer
    repo_id: int
    project_key: str
    rules: Rules
    cursor: Any
    consumed: Consumed = field(default_factory=Consumed)

    async def whole(self) -> None:
        after = await self._start()
        while page := await self.consumer.db.run(facts.changes.query(self.repo_id, after, PAGE)):
            for fact in page:
                if await self._consume(fact):
                    await self._move(fact)
                self.consumer.on_fact(self.consumed)
            await self._move(page[-1])
            after = page[-1]["changed_seq"]

    async def _start(self) -> int:
        if self.cursor is kv.ABSENT:
            return 0
        if "changed_seq" in self.cursor:
            return int(self.cursor["changed_seq"])
        # A cursor that a person wrote, by revision.
        revision = int(self.cursor.get("last_processed_rev", 0))
        return await self.consumer.db.run(facts.before_revision.query(self.repo_id, revision))

    async def _consume(self, fact: Row) -> bool:
        """Whether a card was made. What makes none is passed over together with its page."""
        if reason := why_not(fact, self.rules):
            self.consumed.count_unworthy(reason)
            return False
        card = card_of(fact)
        await self._candidate(fact, card)
        failpoint("scm_consumer.after_candidate")
        try:
            self._count(await self.consumer.store.store(self._request(fact, card)))
        except InputError as refused:
            log.warning("scm.card_refused", extra=fields(source=source_of(fact), error=str(refused)))
            self.consumed.rejected += 1
        failpoint("scm_consumer.after_store")
        return True

    async def _candidate(self, fact: Row, card: Card) -> None:
        query = recall.add_candidate.query(
            self._space,
            card.kind,
            card.meta_json["title"],
            card.payload_md,
            CONFIDENCE,
            build_evidence_refs_json(**split_evidence_refs(card.evidence_refs)),
            source_ref=f"scm:{self.repo_id}:{fact['source_type']}:{fact['source_id']}",
        )
        await self.consumer.db.run(query)

    def _request(self, fact: Row, card: Card) -> StoreRequest:
        return StoreRequest(
            payload_md=card.payload_md,
            actor_user_id=ACTOR,
            correlation_id=new_correlation_id(),
            target_space=self._space,
            kind=card.kind,
            meta_json={**card.meta_json, "repo_id": self.repo_id, "source": source_of(fact)},
            evidence_refs=card.evidence_refs,
            is_bulk=fact["bulk_reason"] is not None,
        )

    def _count(self, reply: StoreReply) -> None:
        if reply.action == "deferred":
            self.consumed.parked += 1
        elif reply.action == "reject":
            self.consumed.rejected += 1
        elif reply.deduplicated:
            self.consumed.repeated += 1
        elif reply.action == "redirect":
            self.consumed.diverted += 1
        else:
            self.consumed.stored += 1

    async def _move(self, fact: Row) -> None:
        value: dict[str, Any] = {"changed_seq": fact["changed_seq"]}
        if fact["rev_num"] is not None:
            value["last_processed_rev"] = fact["rev_num"]
        if value == self.cursor:
            return
        query = kv.compare_and_set.query(NAMESPACE, cursor_key(self.repo_id), self.cursor, value)
        if not await self.consumer.db.run(query):
            raise StateConflict(
                f"repository {self.repo_id} is being consumed by somebody else, or its cursor was moved",
                hint="consume again; what was stored twice is recognised",
            )
        self.cursor = value

    @property
    def _space(self) -> str:
        return str(team_space(self.project_key))


def cursor_key(repo_id: int) -> str:
    return f"scm_consume:{repo_id}"


def rules_key(project_key: str) -> str:
    return f"scm_rules:{project_key}"
