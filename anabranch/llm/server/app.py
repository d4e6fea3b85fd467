"""The application: endpoints, errors and the page, around one service."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import FileResponse
from starlette.staticfiles import StaticFiles

from anabranch.llm.server import (
    chat,
    completions,
    error_handlers,
    markdown,
    model_endpoints,
    responses,
    status_endpoints,
)
from anabranch.llm.server.gate import Gate, checked_key
from anabranch.llm.server.host_names import HostNames
from anabranch.llm.server.service import Service

LOCAL_HOSTS = HostNames()
PAGE = Path(__file__).parent / "page"


def make_app(
    service: Service,
    *,
    api_key: str | None = None,
    cors_origins: Sequence[str] = (),
    hosts: HostNames | None = LOCAL_HOSTS,
) -> FastAPI:
    """An ASGI application that serves one model.

    Pages from `cors_origins` may call it from a browser; "*" stands for any origin. It answers
    under `hosts`, this machine's own names unless given; None stands for any host.
    """
    app = FastAPI(
        title="anabranch",
        description="An OpenAI-compatible server with speculative decoding.",
        docs_url=None,  # FastAPI's own pages load scripts from elsewhere
        redoc_url=None,
    )
    app.state.service = service
    error_handlers.install(app)
    for module in (completions, chat, responses, model_endpoints, status_endpoints, markdown):
        app.include_router(module.router)
    app.add_middleware(
        Gate,
        api_key=None if api_key is None else checked_key(api_key),
        max_body_bytes=service.limits.max_body_bytes,
        hosts=hosts,
    )
    _check_origins(cors_origins)
    if cors_origins:  # outside the gate: a browser asks without the key first
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
        )
    _serve_pages(app)
    return app


def _check_origins(origins: Sequence[str]) -> None:
    for origin in origins:
        scheme, _, host = origin.partition("://")
        if origin != "*" and (scheme not in ("http", "https") or not host or "/" in host):
            raise ValueError(
                f"cors_origins must hold '*' or origins like https://page.example, got {origin!r}"
            )


def _serve_pages(app: FastAPI) -> None:
    async def page() -> FileResponse:
        return FileResponse(PAGE / "index.html")

    async def docs() -> FileResponse:
        return FileResponse(PAGE / "docs.html")

    app.add_api_route("/", page, include_in_schema=False)
    app.add_api_route("/docs", docs, include_in_schema=False)
    app.mount("/page", StaticFiles(directory=PAGE), name="page")
