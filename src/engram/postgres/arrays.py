"""Many values into one parameter, without what psycopg does for each of them.

It would turn a list of 256 floats into as many strings, which costs more than
making the vector did; and a list of ids or texts costs five times what writing
it as PostgreSQL does costs.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import TYPE_CHECKING

import psycopg
from psycopg.adapt import Dumper
from psycopg.pq import Format

if TYPE_CHECKING:
    import numpy
    from numpy.typing import NDArray

_REAL, _REAL_ARRAY = 700, 1021  # their numbers in pg_type, the same in every PostgreSQL


class Reals:
    """A `real[]` parameter, from a vector or from the rows of a matrix one after the other."""

    __slots__ = ("wire",)

    def __init__(self, numbers: NDArray[numpy.float32]) -> None:
        import numpy as np

        flat = np.ravel(numbers)
        elements = np.empty(flat.size, dtype=[("size", ">i4"), ("value", ">f4")])
        elements["size"] = 4
        elements["value"] = flat
        # One dimension, no NULLs, elements of type real, so many of them, counted from 1.
        self.wire = struct.pack(">5i", 1, 0, _REAL, flat.size, 1) + elements.tobytes()


class RealsDumper(Dumper):
    format = Format.BINARY
    oid = _REAL_ARRAY

    def dump(self, obj: Reals) -> bytes:
        return obj.wire


psycopg.adapters.register_dumper(Reals, RealsDumper)


def numbers(given: Iterable[int | None]) -> str:
    """Whole numbers as PostgreSQL writes an array of them."""
    return "{" + ",".join("NULL" if number is None else f"{number:d}" for number in given) + "}"


def texts(given: Iterable[str | None]) -> str:
    """Texts as PostgreSQL writes an array of them."""
    return "{" + ",".join("NULL" if text is None else _quoted(text) for text in given) + "}"


def _quoted(text: str) -> str:
    if "\\" in text or '"' in text:
        text = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{text}"'
