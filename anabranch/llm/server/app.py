"""The application: endpoints, errors and the page, around one service."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from fastapi import APIRouter, FastAPI
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import FileResponse, HTMLResponse
from markdown_it import MarkdownIt
from markdown_it.rules_core import StateCore
from pydantic import Field
from starlette.staticfiles import StaticFiles

from anabranch.llm.server import (
    chat,
    completions,
    errors,
    model_endpoints,
    responses,
)
from anabranch.llm.server.gate import Gate, HostNames, checked_key
from anabranch.llm.server.openai_fields import StrictModel, Text
from anabranch.llm.server.service import Service

LOCAL_HOSTS = HostNames()
PAGE = Path(__file__).parent / "page"
MAX_MARKDOWN_CHARS = 1 << 16  # prose of this length takes 0.13 s, the worst input found 1 s
page_router = APIRouter(include_in_schema=False)


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
    errors.install_handlers(app)
    for module in (completions, chat, responses, model_endpoints):
        app.include_router(module.router)
    app.include_router(page_router)
    for path in ("/", "/docs"):
        app.add_api_route(path, _page_at(path), include_in_schema=False)
    app.mount("/page", StaticFiles(directory=PAGE), name="page")
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
    return app


def _check_origins(origins: Sequence[str]) -> None:
    for origin in origins:
        scheme, _, host = origin.partition("://")
        if origin != "*" and (scheme not in ("http", "https") or not host or "/" in host):
            raise ValueError(
                f"cors_origins must hold '*' or origins like https://page.example, got {origin!r}"
            )


def _page_at(path: str) -> Callable[[], Awaitable[FileResponse]]:
    async def page() -> FileResponse:
        return FileResponse(PAGE / f"{path.strip('/') or 'index'}.html")

    return page


class MarkdownRequest(StrictModel):
    """An answer, or its beginning."""

    text: Text = Field(max_length=MAX_MARKDOWN_CHARS)


def make_renderer() -> MarkdownIt:
    """CommonMark and tables; HTML stays text. Images would be loaded from elsewhere: left out."""
    renderer = MarkdownIt("commonmark", {"html": False, "breaks": True})
    renderer.core.ruler.push("drop_styles", _drop_styles)
    return renderer.enable(["table", "strikethrough"]).disable("image")


def _drop_styles(state: StateCore) -> None:
    """Aligned columns have inline styles, which the page's security policy forbids."""
    for token in state.tokens:
        token.attrs.pop("style", None)


_renderer = make_renderer()


# not async: a long text is rendered in a thread, beside the event loop
@page_router.post("/markdown")
def render_markdown(body: MarkdownRequest) -> HTMLResponse:
    return HTMLResponse(_renderer.render(body.text))
