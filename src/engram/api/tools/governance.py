"""Governing: what became of the writes, and who may write where."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pydantic import Field

from engram.api.tools.base import Arguments, Call, Tool, WriteArguments
from engram.gateway.governing import GovernanceReply, GovernanceRequest
from engram.gateway.reliability import ReliabilityReport
from engram.gateway.reliability import reliability_report as report


class ReportArguments(Arguments):
    since: str | None = Field(
        default=None,
        description="Count writes from here on: an ISO 8601 time, or a span such as 24h or 7d."
        " Leave out to count all of them.",
        examples=["24h", "2026-01-30T10:00:00Z"],
        max_length=64,
    )


class GovernanceArguments(WriteArguments):
    project_key: str | None = Field(
        default=None, description="The project. By default this gateway's own.", max_length=128
    )
    team_write_enabled: bool | None = Field(
        default=None, description="Whether shared spaces take writes at all. Leave out to keep it as it is."
    )
    policy_json: dict[str, Any] | None = Field(
        default=None,
        description="The whole new policy, with any of: allowlist_users, allowed_kinds, require_evidence,"
        " max_chars, bulk_enabled, bulk_max_chars. {} has no restrictions. Leave out to keep it as it is.",
        examples=[{"allowed_kinds": ["DECISION", "PITFALL"], "max_chars": 2000}],
    )


async def reliability_report(call: Call[ReportArguments]) -> ReliabilityReport:
    """Show what became of the writes: how many, how many succeeded, why the others did not.

    success_rate is the share of audits with the action allow, null where there are
    none. The outbox is shown as it stands now, and the invariants are sums that must
    agree at any moment: if one does not, tell an operator. Counts only, no contents.
    """
    counted = await call.services.db.run(report.query(call.asked.since))
    return replace(counted, correlation_id=call.correlation_id)


async def governance_update(call: Call[GovernanceArguments]) -> GovernanceReply:
    """Change who may write to a project's shared spaces, and what. For administrators.

    Only what you give changes; give nothing to see the settings. A policy is
    replaced as a whole, so start from the one you see. What a policy does not let
    into a shared space goes to the writer's private one. Every change is kept with
    who made it.
    """
    asked = call.asked
    return await call.services.governing.update(
        GovernanceRequest(
            caller=call.caller,
            correlation_id=call.correlation_id,
            project_key=asked.project_key,
            team_write_enabled=asked.team_write_enabled,
            policy_json=asked.policy_json,
        )
    )


TOOLS = (
    Tool(
        "reliability_report",
        "Reliability report",
        "/reliability/report",
        "read",
        ReportArguments,
        ReliabilityReport,
        reliability_report,
    ),
    Tool(
        "governance_update",
        "Govern a project",
        "/governance/settings/update",
        "admin",
        GovernanceArguments,
        GovernanceReply,
        governance_update,
        destructive=True,
    ),
)
