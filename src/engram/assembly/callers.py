"""Who may call the gateway."""

from __future__ import annotations

from engram.api.tokens_file import TokensFile
from engram.kernel.errors import ConfigError
from engram.kernel.settings import Settings
from engram.web.guards import is_loopback


def require_loopback(settings: Settings) -> None:
    """Refuse what `build_app` would refuse, before anything is started."""
    tokens_of(settings)


def tokens_of(settings: Settings) -> TokensFile | None:
    """Who may call. None: everybody on this machine, and nobody else can reach the gateway."""
    if settings.tokens_file is not None:
        return TokensFile(settings.tokens_file)
    if is_loopback(settings.gateway_host):
        return None
    raise ConfigError(
        f"GATEWAY_HOST: will not listen on {settings.gateway_host} without tokens,"
        " because anybody who reaches it could read and write everything",
        hint="make one with `engram token create OWNER` and set ENGRAM_TOKENS_FILE, or listen on 127.0.0.1",
    )
