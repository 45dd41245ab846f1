"""The logbook as a gateway calls it from a plain, synchronous script.

    from engram.gateway.logbook_adapter import get_adapter

    adapter = get_adapter()                                  # POSTGRES_DSN says where
    settings = adapter.get_or_create_settings("payments")
    outbox_id = adapter.enqueue_outbox("a fact", "private:ada")

Each verb is one of the logbook's primitives with the database filled in: same
arguments, same answer, same errors. There is no policy here, and nothing that
a primitive does not do; `memory_store` is where a write is governed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, update_wrapper
from threading import Lock
from typing import Generic, ParamSpec, TypeVar, overload

from engram.logbook import connection, governance, items, kv, memories, outbox
from engram.logbook.config import Config
from engram.logbook.primitive import Primitive

P = ParamSpec("P")
T = TypeVar("T")


class _Verb(Generic[P, T]):
    """A primitive that, asked of an adapter, runs on the adapter's database."""

    def __init__(self, primitive: Primitive[P, T]) -> None:
        self._primitive = primitive

    @overload
    def __get__(self, adapter: None, owner: type[LogbookAdapter]) -> Primitive[P, T]: ...
    @overload
    def __get__(self, adapter: LogbookAdapter, owner: type[LogbookAdapter]) -> Callable[P, T]: ...
    def __get__(
        self, adapter: LogbookAdapter | None, owner: type[LogbookAdapter]
    ) -> Primitive[P, T] | Callable[P, T]:
        if adapter is None:
            return self._primitive
        run: Callable[..., T] = self._primitive
        return update_wrapper(partial(run, config=adapter.config), self._primitive)


class LogbookAdapter:
    """`config` None: from the environment, when it is first needed."""

    def __init__(self, config: Config | None = None) -> None:
        self._config = config

    @property
    def config(self) -> Config:
        if self._config is None:
            self._config = Config.from_env()
        return self._config

    def close(self) -> None:
        """Close this database's connections; the next call opens new ones."""
        connection.close(self.config)

    # Governance
    get_or_create_settings = _Verb(governance.get_or_create_settings)
    upsert_settings = _Verb(governance.upsert_settings)
    settings_history = _Verb(governance.settings_history)
    insert_audit = _Verb(governance.insert_write_audit)
    finalize_audit = _Verb(governance.finalize_write_audit)
    query_audit = _Verb(governance.query_write_audit)
    invariants = _Verb(governance.invariants)

    # Outbox
    enqueue_outbox = _Verb(outbox.enqueue_memory)
    check_dedup = _Verb(outbox.check_dedup)
    claim = _Verb(outbox.claim_outbox)
    ack_sent = _Verb(outbox.ack_sent)
    fail_retry = _Verb(outbox.fail_retry)
    mark_dead = _Verb(outbox.mark_dead_by_worker)
    renew_lease = _Verb(outbox.renew_lease)
    release_lease = _Verb(outbox.release_lease)
    requeue = _Verb(outbox.requeue)
    get_outbox = _Verb(outbox.get)
    list_outbox = _Verb(outbox.list_rows)
    outbox_stats = _Verb(outbox.stats)

    # Reading while the memory server is away, and how far something was read
    search_memories = _Verb(memories.search)
    list_events = _Verb(items.list_events)
    add_event = _Verb(items.add_event)
    get_value = _Verb(kv.get_value)
    compare_and_set = _Verb(kv.compare_and_set)


_adapters: dict[Config, LogbookAdapter] = {}
_lock = Lock()


def get_adapter(config: Config | None = None) -> LogbookAdapter:
    """One adapter per process and configuration. An adapter holds no connection of its
    own, so one inherited through a fork is as good as new."""
    asked = config or Config.from_env()
    with _lock:
        return _adapters.setdefault(asked, LogbookAdapter(asked))
