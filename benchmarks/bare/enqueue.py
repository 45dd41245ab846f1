"""The bare way to put many rows in: COPY into the same two tables."""

from __future__ import annotations

import hashlib

import psycopg


def copy_rows(dsn: str, texts: list[str]) -> None:
    shas = [hashlib.sha256(text.encode()).hexdigest() for text in texts]
    with psycopg.connect(dsn) as connection, connection.cursor() as cursor:
        with cursor.copy(
            "COPY logbook.outbox_memory (target_space, payload_sha, payload_md) FROM STDIN"
        ) as copy:
            for text, sha in zip(texts, shas, strict=True):
                copy.write_row(("team:a", sha, text))
        columns = "target_space, payload_sha, payload_md, state, outbox_id, words"
        with cursor.copy(f"COPY logbook.memories ({columns}) FROM STDIN") as copy:
            for n, (text, sha) in enumerate(zip(texts, shas, strict=True)):
                words = " ".join(f"'{word}':{at}" for at, word in enumerate(text.lower().split(), 1))
                copy.write_row(("team:a", sha, text, "parked", n + 1, words))
