"""Markdown of answers as HTML, for the page. HTML within an answer stays text."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import HTMLResponse
from markdown_it import MarkdownIt
from markdown_it.rules_core import StateCore
from pydantic import Field

from anabranch.llm.server.protocol import StrictModel, Text

MAX_CHARS = 1 << 16  # prose of this length takes 0.13 s to render, the worst input found 1 s

router = APIRouter(include_in_schema=False)


class MarkdownRequest(StrictModel):
    """An answer, or its beginning."""

    text: Text = Field(max_length=MAX_CHARS)


def make_renderer() -> MarkdownIt:
    """CommonMark and tables. Images are left out: they would be loaded from elsewhere."""
    renderer = MarkdownIt("commonmark", {"html": False, "breaks": True})
    renderer.core.ruler.push("drop_styles", _drop_styles)
    return renderer.enable(["table", "strikethrough"]).disable("image")


def _drop_styles(state: StateCore) -> None:
    """Aligned columns have inline styles, which the page's security policy forbids."""
    for token in state.tokens:
        token.attrs.pop("style", None)


_renderer = make_renderer()


# not async: a long text is rendered in a thread, beside the event loop
@router.post("/markdown")
def render_markdown(body: MarkdownRequest) -> HTMLResponse:
    """The text as HTML."""
    return HTMLResponse(_renderer.render(body.text))
