"""Governance settings of a project, and the counts that must always agree."""

from __future__ import annotations

from typing import Any

from psycopg.types.json import Jsonb

from engram.logbook.config import Config
from engram.logbook.connection import run
from engram.postgres.query import Query, Row, any_row, maybe_row, one_row
from engram.postgres.sqlfile import load_sql

SQL = load_sql("engram.logbook", "governance.sql")


def created_settings(project_key: str) -> Query[Row]:
    return Query(SQL["get_or_create_settings"], one_row, {"project_key": project_key})


def read_settings(project_key: str) -> Query[Row | None]:
    return Query(SQL["read_settings"], maybe_row, {"project_key": project_key})


def changed_settings(
    project_key: str,
    team_write_enabled: bool,
    policy_json: dict[str, Any] | None = None,
    updated_by: str | None = None,
) -> Query[bool]:
    params = {
        "project_key": project_key,
        "team_write_enabled": team_write_enabled,
        "policy_json": None if policy_json is None else Jsonb(policy_json),
        "updated_by": updated_by,
    }
    return Query(SQL["upsert_settings"], any_row, params)


def counts() -> Query[Row]:
    return Query(SQL["counts"], one_row)


def get_or_create_settings(project_key: str, config: Config | None = None) -> dict[str, Any]:
    return run(created_settings(project_key), config)


def upsert_settings(
    project_key: str,
    team_write_enabled: bool,
    policy_json: dict[str, Any] | None = None,
    updated_by: str | None = None,
    config: Config | None = None,
) -> bool:
    return run(changed_settings(project_key, team_write_enabled, policy_json, updated_by), config)
