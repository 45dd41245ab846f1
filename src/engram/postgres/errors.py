"""Driver errors become engram's at this edge, and keep their cause.

57014 query_canceled, 55P03 lock_not_available   DatabaseTimeout
40P01 deadlock, 40001 serialisation              DatabaseContention
23xxx integrity                                  ConstraintViolated
42P01, 42703, 3F000, 42883 missing objects       SchemaError
54xxx program limits                             DatabaseError
08xxx, 57P0x, 25006 read-only, no connection     DatabaseUnavailable
text that is no Unicode                          InputError
anything else                                    DatabaseError
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
from psycopg import errors as pg
from psycopg_pool import PoolClosed, PoolTimeout, TooManyRequests

from engram.kernel.errors import (
    ConstraintViolated,
    DatabaseContention,
    DatabaseError,
    DatabaseTimeout,
    DatabaseUnavailable,
    EngramError,
    InputError,
    SchemaError,
)

_TIMEOUTS = (pg.QueryCanceled, pg.LockNotAvailable)
_CONTENTION = (pg.DeadlockDetected, pg.SerializationFailure)
_MISSING = (pg.UndefinedTable, pg.UndefinedColumn, pg.InvalidSchemaName, pg.UndefinedFunction)
# A server that has just become a standby takes no writes; its successor will.
_AWAY = (pg.ReadOnlySqlTransaction,)
_POOL = (PoolTimeout, PoolClosed, TooManyRequests)


@contextmanager
def translated(doing: str) -> Iterator[None]:
    """Run a block of driver calls; `doing` names the statement in the message."""
    try:
        yield
    except (psycopg.Error, *_POOL) as error:
        raise translate(error, doing) from error
    except UnicodeEncodeError as error:
        raise InputError(f"{doing}: text with lone surrogates cannot be stored") from error


def translate(error: Exception, doing: str) -> EngramError:
    said = f"{doing}: {_first_line(error)}"
    if isinstance(error, _TIMEOUTS):
        return DatabaseTimeout(said)
    if isinstance(error, _CONTENTION):
        return DatabaseContention(said)
    if isinstance(error, psycopg.IntegrityError):
        return ConstraintViolated(said, constraint=error.diag.constraint_name)
    if isinstance(error, _MISSING):
        return SchemaError(said, hint="run `engram migrate`")
    if isinstance(error, psycopg.Error) and (error.sqlstate or "").startswith("54"):
        return DatabaseError(said)
    if isinstance(error, (*_POOL, *_AWAY, psycopg.OperationalError, psycopg.InterfaceError)):
        return DatabaseUnavailable(said)
    return DatabaseError(said)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
