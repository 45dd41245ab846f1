"""What of the embedded broker can be seen without starting one."""

from __future__ import annotations

import uuid
from itertools import chain, repeat

import pytest

from engram.embedded import kafka


def test_a_clusters_id_is_never_taken_for_an_option(monkeypatch: pytest.MonkeyPatch) -> None:
    dashes, good = b"\xf8" + bytes(15), b"\xf4" + bytes(15)
    drawn = chain([dashes, dashes], repeat(good))
    monkeypatch.setattr(kafka.uuid, "uuid4", lambda: uuid.UUID(bytes=next(drawn)))
    assert kafka._cluster_id() == "9" + "A" * 21
