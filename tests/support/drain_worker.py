"""A worker that drains the outbox and writes down, outside engram, what it was told.

    python -m support.drain_worker DSN LEDGER LEASE_SECONDS

It takes a moment to "deliver" each batch, which is when it is most likely to
be killed, and survives a database that goes away. Each line of
the ledger is one answer of the database: `claimed` or `settled`, with the row
and the token.
"""

from __future__ import annotations

import json
import sys
import time

from engram.gateway.outbox_worker import new_worker_id
from engram.kernel.errors import DatabaseError
from engram.logbook import outbox
from engram.logbook.config import Config
from engram.logbook.outbox import Sent

BATCH = 5
DELIVERY_SECONDS = 0.1


def main(dsn: str, ledger: str, lease_seconds: int) -> None:
    config, worker = Config(postgres_dsn=dsn), new_worker_id()
    with open(ledger, "a", buffering=1, encoding="utf-8") as file:
        while True:
            try:
                if not _batch(config, worker, lease_seconds, file):
                    time.sleep(0.05)
            except DatabaseError:
                time.sleep(0.1)


def _batch(config, worker, lease_seconds, file) -> int:
    rows = outbox.claim_outbox(worker, BATCH, lease_seconds, config)
    for row in rows:
        file.write(json.dumps(["claimed", row["outbox_id"], row["lease_token"]]) + "\n")
    time.sleep(DELIVERY_SECONDS)
    sent = [Sent(row["outbox_id"], row["lease_token"], f"mem-{row['lease_token']}") for row in rows]
    for outbox_id in outbox.ack_many(worker, sent, config) if sent else ():
        token = next(s.lease_token for s in sent if s.outbox_id == outbox_id)
        file.write(json.dumps(["settled", outbox_id, token]) + "\n")
    return len(rows)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
