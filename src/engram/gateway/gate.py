"""The gate: what must be there for engram to call itself ready.

FULL: every capability. One that failed, one that nobody looked at, and one that
was skipped without somebody saying so fail the gate. DEGRADED: the database and
its schema; engram goes on without the others, and says which.

Somebody says so in three places and in no other: `skip_<capability>` in the
configuration, `GATEWAY_SKIP_<CAPABILITY>=1` in the environment, and
`{"skip": [...]}` in a `POST /verify`.

The gate decides `/readyz` and `verify`. It never refuses a store.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from engram.kernel.errors import InputError

OK, FAILED, SKIPPED = "ok", "failed", "skipped"

CAPABILITIES = (
    "database",
    "migrations",
    "openmemory",
    "outbox_worker",
    "reconcile",
    "evidence_store",
    "redis",
)
# What engram cannot go on without, whatever the mode.
INDISPENSABLE = ("database", "migrations")


@dataclass(frozen=True, slots=True)
class GateResult:
    passed: bool
    reason: str = ""


def gate_check_full_mode(capabilities: Mapping[str, str], config: Mapping[str, Any]) -> GateResult:
    """`capabilities`: the status of each. `config`: `skip_<capability>`, true where somebody said so."""
    for name, status in _complete(capabilities).items():
        if status == SKIPPED:
            if not config.get(f"skip_{name}", False):
                return GateResult(False, f"FULL mode: {name} skipped without explicit config")
        elif status != OK:
            return GateResult(False, f"FULL mode: required capability {name} failed")
    return GateResult(True)


def gate_check_degraded_mode(capabilities: Mapping[str, str]) -> GateResult:
    """Passes while the indispensable is there; the reason names what is missing."""
    missing = [name for name, status in _complete(capabilities).items() if status not in (OK, SKIPPED)]
    for name in INDISPENSABLE:
        if name in missing:
            return GateResult(False, f"DEGRADED mode: required capability {name} failed")
    return GateResult(True, f"DEGRADED mode: going on without {', '.join(missing)}" if missing else "")


def gate_check(mode: str, capabilities: Mapping[str, str], config: Mapping[str, Any]) -> GateResult:
    if mode == "FULL":
        return gate_check_full_mode(capabilities, config)
    return gate_check_degraded_mode(capabilities)


def checked_skips(names: Iterable[str]) -> frozenset[str]:
    """The capabilities that a request wants skipped; a name that is none is refused."""
    asked = frozenset(names)
    if unknown := sorted(asked - set(CAPABILITIES)):
        raise InputError(
            f"there is no capability {', '.join(repr(name[:64]) for name in unknown[:10])} to skip",
            fields={"skip": f"may name {', '.join(CAPABILITIES)}"},
            hint=f"one of {', '.join(CAPABILITIES)}",
        )
    return asked


def _complete(capabilities: Mapping[str, str]) -> dict[str, str]:
    """With those that nobody looked at: that is no reason to believe they are there."""
    absent = {name: FAILED for name in CAPABILITIES if name not in capabilities}
    return {**capabilities, **absent}
