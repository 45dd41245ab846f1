"""The `engram` command, run as an operator types it, in this process; a gateway and a database for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from typer.testing import CliRunner, Result

from engram.assembly.gateway import build_app
from engram.cli import app
from engram.kernel.errors import EngramError
from engram.kernel.settings import Settings, described
from engram.logbook.config import Config
from support.serving import serving

Engram = Callable[..., Result]


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No variable or file of this machine speaks in."""
    for _, setting in described():
        monkeypatch.delenv(setting.env, raising=False)
    monkeypatch.setenv("ENGRAM_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def gateway(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with serving(build_app(settings)) as url:
        monkeypatch.setenv("GATEWAY_PORT", str(urlsplit(url).port))
        yield url


@pytest.fixture
def database(dsn: str, config: Config, monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.setenv("POSTGRES_DSN", dsn)
    return config


@pytest.fixture
def engram() -> Engram:
    """The command; it must end well, or as `code` says."""

    def run(*arguments: str, code: int = 0, **more: object) -> Result:
        result = CliRunner().invoke(app, list(arguments), **more)
        if isinstance(result.exception, EngramError):
            raise result.exception
        assert result.exit_code == code, result.output
        return result

    return run
