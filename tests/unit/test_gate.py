"""The gate by itself: what FULL and DEGRADED ask for, and who may say that something is skipped."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from engram.gateway.capabilities import Finding, Gatekeeper, Looks
from engram.gateway.gate import (
    CAPABILITIES,
    GateResult,
    checked_skips,
    gate_check,
    gate_check_degraded_mode,
    gate_check_full_mode,
)
from engram.kernel.errors import BackendError, DatabaseUnavailable, InputError
from engram.kernel.settings import Settings, described

ALL_OK = dict.fromkeys(CAPABILITIES, "ok")
OPTIONAL = [name for name in CAPABILITIES if name not in ("database", "migrations")]


def test_the_capabilities_are_these() -> None:
    """Spelled out: whoever changes the list has to say so here as well."""
    assert set(CAPABILITIES) == {
        "database", "migrations", "openmemory", "outbox_worker", "reconcile", "evidence_store", "redis",
    }  # fmt: skip
    assert all(callable(getattr(Looks, name)) for name in CAPABILITIES)


class TestFull:
    def test_it_passes_when_everything_is_there(self) -> None:
        assert gate_check_full_mode(ALL_OK, {}) == GateResult(passed=True)

    @pytest.mark.parametrize("name", CAPABILITIES)
    def test_each_failure_fails_it_by_name(self, name: str) -> None:
        result = gate_check_full_mode({**ALL_OK, name: "failed"}, {})
        assert result == GateResult(False, f"FULL mode: required capability {name} failed")

    @pytest.mark.parametrize("name", CAPABILITIES)
    def test_a_skip_that_nobody_asked_for_fails_it(self, name: str) -> None:
        for config in ({}, {f"skip_{name}": False}, {name: True}, {"skip": [name]}, {f"skip-{name}": True}):
            result = gate_check_full_mode({**ALL_OK, name: "skipped"}, config)
            assert result == GateResult(False, f"FULL mode: {name} skipped without explicit config")

    @pytest.mark.parametrize("name", CAPABILITIES)
    def test_a_skip_that_somebody_asked_for_passes(self, name: str) -> None:
        assert gate_check_full_mode({**ALL_OK, name: "skipped"}, {f"skip_{name}": True}).passed

    @pytest.mark.parametrize("name", CAPABILITIES)
    def test_what_is_absent_has_failed(self, name: str) -> None:
        seen = {other: status for other, status in ALL_OK.items() if other != name}
        failed = GateResult(False, f"FULL mode: required capability {name} failed")
        assert gate_check_full_mode(seen, {}) == failed
        assert gate_check_full_mode(seen, {f"skip_{name}": True}) == failed, "nobody looked, nobody skipped"

    def test_nothing_at_all_fails(self) -> None:
        assert not gate_check_full_mode({}, {}).passed

    @pytest.mark.parametrize("name", CAPABILITIES)
    def test_asking_for_a_skip_does_not_excuse_a_failure(self, name: str) -> None:
        assert not gate_check_full_mode({**ALL_OK, name: "failed"}, {f"skip_{name}": True}).passed

    @pytest.mark.parametrize("odd", ["", "OK", "unknown", "degraded", None])
    def test_a_status_that_is_none_is_a_failure(self, odd: str) -> None:
        assert gate_check_full_mode({**ALL_OK, "redis": odd}, {"skip_redis": True}).reason == (
            "FULL mode: required capability redis failed"
        )

    def test_another_capability_counts_as_well(self) -> None:
        assert gate_check_full_mode({**ALL_OK, "kafka": "failed"}, {}).reason.endswith("kafka failed")

    def test_the_first_one_given_is_named(self) -> None:
        seen = {"reconcile": "skipped", "redis": "failed"}
        assert gate_check_full_mode(seen, {}).reason == (
            "FULL mode: reconcile skipped without explicit config"
        )


class TestDegraded:
    def test_it_goes_on_and_says_what_is_missing(self) -> None:
        seen = {**ALL_OK, "redis": "failed", "openmemory": "failed", "reconcile": "skipped"}
        result = gate_check_degraded_mode(seen)
        assert result == GateResult(True, "DEGRADED mode: going on without openmemory, redis")

    def test_it_has_nothing_to_say_when_everything_is_there(self) -> None:
        assert gate_check_degraded_mode(ALL_OK) == GateResult(True)

    @pytest.mark.parametrize("name", ["database", "migrations"])
    def test_it_does_not_go_on_without_the_database_or_its_schema(self, name: str) -> None:
        failed = GateResult(False, f"DEGRADED mode: required capability {name} failed")
        assert gate_check_degraded_mode({**ALL_OK, name: "failed"}) == failed
        assert gate_check_degraded_mode({k: v for k, v in ALL_OK.items() if k != name}) == failed

    def test_the_mode_decides(self) -> None:
        seen = {**ALL_OK, "redis": "failed"}
        assert not gate_check("FULL", seen, {}).passed
        assert gate_check("DEGRADED", seen, {}).passed


def test_a_skip_of_nothing_known_is_refused_by_name() -> None:
    assert checked_skips(["redis", "redis", "reconcile"]) == {"redis", "reconcile"}
    with pytest.raises(InputError, match="'kafka', 'tea'") as refused:
        checked_skips(["redis", "tea", "kafka"])
    assert "outbox_worker" in refused.value.context["fields"]["skip"]


class TestSkipsInTheSettings:
    def test_there_is_one_for_each_capability(self) -> None:
        skips = {name for name, setting in described() if setting.env.startswith("GATEWAY_SKIP_")}
        assert skips == {f"skip_{name}" for name in CAPABILITIES}

    @pytest.mark.parametrize("name", CAPABILITIES)
    def test_by_the_environment(self, name: str) -> None:
        variable = f"GATEWAY_SKIP_{name.upper()}"
        assert getattr(Settings.load({variable: "1"}), f"skip_{name}") is True
        assert getattr(Settings.load({variable: "0"}), f"skip_{name}") is False
        assert getattr(Settings.load({}), f"skip_{name}") is False

    @pytest.mark.parametrize("name", CAPABILITIES)
    def test_by_the_file(self, name: str, tmp_path: Path) -> None:
        path = tmp_path / "engram.toml"
        path.write_text(f"[gateway]\nskip_{name} = true\n")
        assert getattr(Settings.load({}, file=path), f"skip_{name}") is True
        beaten = Settings.load({f"GATEWAY_SKIP_{name.upper()}": "0"}, file=path)
        assert getattr(beaten, f"skip_{name}") is False


Look = Callable[[], Awaitable[Finding]]


async def fine() -> Finding:
    return Finding("ok", "fine")


def looks(**others: Look) -> dict[str, Look]:
    return {**dict.fromkeys(CAPABILITIES, fine), **others}


def raising(error: BaseException) -> Look:
    async def look() -> Finding:
        raise error

    return look


async def never() -> Finding:
    await asyncio.Event().wait()
    raise AssertionError


@pytest.mark.anyio
class TestLooking:
    async def test_everything_is_looked_at(self) -> None:
        verdict = await Gatekeeper(looks(), mode="FULL").verify()
        assert (verdict.passed, verdict.reason, verdict.mode) == (True, "", "FULL")
        assert list(verdict.capabilities) == list(CAPABILITIES)
        assert all(finding.milliseconds >= 0 for finding in verdict.capabilities.values())

    @pytest.mark.parametrize(
        ("error", "public"),
        [
            (DatabaseUnavailable("no connection to db.internal"), "failed: DATABASE_UNAVAILABLE"),
            (BackendError("no", reason="unauthorized", retryable=True), "failed: unauthorized"),
            (RuntimeError("secret inside"), "failed: INTERNAL"),
            (TimeoutError(), "failed: INTERNAL"),
            (KeyError("skipped"), "failed: INTERNAL"),
        ],
        ids=lambda value: type(value).__name__,
    )
    @pytest.mark.parametrize("mode", ["FULL", "DEGRADED"])
    async def test_an_exception_is_a_failure_and_never_a_skip(
        self, error: Exception, public: str, mode: str
    ) -> None:
        verdict = await Gatekeeper(looks(redis=raising(error)), mode=mode).verify()
        assert verdict.capabilities["redis"].status == "failed"
        assert verdict.capabilities["redis"].public == public
        assert "secret inside" not in verdict.capabilities["redis"].reason
        assert verdict.passed == (mode == "DEGRADED")

    async def test_a_look_that_hangs_is_given_up_and_holds_up_no_other(self) -> None:
        keeper = Gatekeeper(looks(openmemory=never, redis=never), mode="FULL", look_seconds=0.05)
        verdict = await keeper.verify()
        states = {name: finding.public for name, finding in verdict.capabilities.items()}
        assert states == {**ALL_OK, "openmemory": "failed: timeout", "redis": "failed: timeout"}
        assert verdict.reason == "FULL mode: required capability openmemory failed"

    async def test_of_each_capability_one_look_is_under_way_at_a_time(self) -> None:
        begun, answer = [], asyncio.Event()

        async def slow() -> Finding:
            begun.append(1)
            await answer.wait()
            return Finding("ok", "at last")

        keeper = Gatekeeper(looks(redis=slow), mode="FULL", look_seconds=0.05)
        hung = await asyncio.gather(*(keeper.verify() for _ in range(20)), keeper.verify())
        assert {verdict.capabilities["redis"].public for verdict in hung} == {"failed: timeout"}
        assert len(begun) == 1
        answer.set()
        assert (await keeper.verify()).passed
        looked = len(begun)
        assert (await keeper.verify()).passed
        assert len(begun) == looked + 1, "whoever asks when none is under way gets a look of its own"

    async def test_what_is_skipped_is_not_looked_at(self) -> None:
        touched = raising(AssertionError("looked at"))
        keeper = Gatekeeper(looks(redis=touched, reconcile=touched), mode="FULL", skipped=["reconcile"])
        assert not (await keeper.verify()).passed
        verdict = await keeper.verify(["redis"])
        assert verdict.passed
        assert verdict.capabilities["redis"] == Finding("skipped", "this request skips it")
        assert "GATEWAY_SKIP_RECONCILE" in verdict.capabilities["reconcile"].reason
        assert not (await keeper.verify()).passed, "a request's skip is for that request"

    async def test_a_look_that_calls_itself_skipped_does_not_pass(self) -> None:
        async def lazy() -> Finding:
            return Finding("skipped", "did not feel like it")

        verdict = await Gatekeeper(looks(redis=lazy), mode="FULL").verify()
        assert verdict.reason == "FULL mode: redis skipped without explicit config"

    async def test_a_capability_without_a_look_has_failed(self) -> None:
        partial = {name: look for name, look in looks().items() if name != "redis"}
        verdict = await Gatekeeper(partial, mode="FULL").verify()
        assert verdict.reason == "FULL mode: required capability redis failed"

    async def test_a_request_may_ask_by_the_other_mode(self) -> None:
        keeper = Gatekeeper(looks(redis=raising(RuntimeError())), mode="DEGRADED")
        assert (await keeper.verify()).passed
        asked = await keeper.verify(mode="FULL")
        assert (asked.passed, asked.mode) == (False, "FULL")

    async def test_an_unknown_skip_is_refused_before_anything_is_looked_at(self) -> None:
        touched = raising(AssertionError("looked at"))
        with pytest.raises(InputError, match="tea"):
            await Gatekeeper(dict.fromkeys(CAPABILITIES, touched), mode="FULL").verify(["tea"])
