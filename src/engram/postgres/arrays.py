"""Many floats into PostgreSQL's binary form of a `real[]`, without a Python object for each.

psycopg would turn a list of 256 floats into as many strings, which costs more
than making the vector did.
"""

from __future__ import annotations

import struct
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


class _RealsDumper(Dumper):
    format = Format.BINARY
    oid = _REAL_ARRAY

    def dump(self, obj: Reals) -> bytes:
        return obj.wire


psycopg.adapters.register_dumper(Reals, _RealsDumper)
