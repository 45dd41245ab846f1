"""Where the logbook's database is, for scripts that call it directly."""

from __future__ import annotations

from dataclasses import dataclass, field

from engram.kernel.errors import ConfigError
from engram.kernel.settings import Settings


@dataclass(frozen=True)
class Config:
    postgres_dsn: str = field(repr=False)

    @classmethod
    def from_env(cls) -> Config:
        dsn = Settings.load().postgres_dsn
        if dsn is None:
            raise ConfigError(
                "POSTGRES_DSN is not set",
                hint="set it, or take the running stack's from `engram psql --dsn`",
            )
        return cls(postgres_dsn=dsn)
