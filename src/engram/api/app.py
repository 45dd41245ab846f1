"""The gateway as an ASGI application.

From outside in: correlation id, guards, authentication, routes. Every route, `/mcp` included,
is behind the same guards, because they wrap the application and not a route.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from fastapi import FastAPI, Security
from fastapi.security import HTTPBearer
from starlette.routing import Route

from engram import __version__
from engram.api import mcp_server
from engram.api.authentication import Authenticated
from engram.api.correlation import Correlated
from engram.api.errors import install_error_handlers, reply_to
from engram.api.mcp_mount import McpMount
from engram.api.openapi import Documented
from engram.api.routes import knowledge, knowledge_search, operations, sandboxes
from engram.api.routes.tools import twins
from engram.api.services import Services
from engram.api.tokens_file import TokensFile
from engram.kernel.settings import Settings
from engram.web.guards import Guards

OpenServices = Callable[[], AbstractAsyncContextManager[Services]]

# Tells /docs to ask for a token. Who calls is decided in `Authenticated`, not here.
_TOKEN_IN_DOCS = Security(HTTPBearer(auto_error=False, description="See `engram token create`."))


def create_app(
    settings: Settings,
    open_services: OpenServices,
    *,
    tokens: TokensFile | None = None,
    serve: mcp_server.Serve = mcp_server.server,
) -> FastAPI:
    app = Documented(
        title="engram",
        version=__version__,
        redoc_url=None,
        swagger_ui_oauth2_redirect_url=None,
        dependencies=[] if tokens is None else [_TOKEN_IN_DOCS],
    )
    mount = McpMount(lambda: app.state.services, max_body_bytes=settings.max_body_bytes, serve=serve)
    app.router.lifespan_context = _lifespan(open_services, mount)
    app.include_router(twins())
    app.include_router(operations.routes)
    app.include_router(knowledge.routes)
    app.include_router(knowledge_search.routes)
    app.include_router(sandboxes.routes)
    app.router.routes.append(Route("/mcp", endpoint=mount))
    install_error_handlers(app)
    app.add_middleware(Authenticated, tokens=tokens)
    app.add_middleware(
        Guards,
        refuse=reply_to,
        max_body_bytes=settings.max_body_bytes,
        allowed_hosts=[*settings.allowed_hosts, _own_host(settings)],
        allowed_origins=settings.allowed_origins,
        multipart_paths={
            knowledge.UPLOAD_PATH: settings.ingest_max_upload_bytes + knowledge.WRAPPING_BYTES,
        },
        file_paths={sandboxes.FILE_PATHS: settings.sandbox_file_mb << 20},
    )
    app.add_middleware(Correlated)
    return app


def _own_host(settings: Settings) -> str:
    """The address it was told to listen on is one it answers to."""
    return f"[{settings.gateway_host}]" if ":" in settings.gateway_host else settings.gateway_host


def _lifespan(
    open_services: OpenServices, mount: McpMount
) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with open_services() as services, mount.run():
            app.state.services = services
            yield
            # Callers may be gone; what they began is finished before the pool closes.
            await services.store.drain()
            await services.forget.drain()
            await services.idempotency.drain()

    return lifespan
