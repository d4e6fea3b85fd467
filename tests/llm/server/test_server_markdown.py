"""Answers as HTML: marks become elements, and nothing in an answer becomes code."""

from __future__ import annotations

import pytest

for needed in ("fastapi", "httpx", "markdown_it"):
    pytest.importorskip(needed)

from fastapi import FastAPI  # noqa: E402
from fastapi.testclient import TestClient  # noqa: E402

from anabranch.llm.server.app import MAX_MARKDOWN_CHARS, page_router  # noqa: E402
from anabranch.llm.server.errors import install_handlers  # noqa: E402
from anabranch.llm.server.gate import Gate  # noqa: E402


def client(api_key: str | None = None) -> TestClient:
    app = FastAPI()
    install_handlers(app)
    app.include_router(page_router)
    app.add_middleware(Gate, api_key=api_key, max_body_bytes=1 << 20)
    return TestClient(app)


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("**a** `b`", "<p><strong>a</strong> <code>b</code></p>\n"),
        ("```py\nx < 1\n```", '<pre><code class="language-py">x &lt; 1\n</code></pre>\n'),
        ("<script>1</script>", "<p>&lt;script&gt;1&lt;/script&gt;</p>\n"),
        ("<b onclick=x>", "<p>&lt;b onclick=x&gt;</p>\n"),
        ("[a](javascript:b)", "<p>[a](javascript:b)</p>\n"),
        ("![a](https://b.c/d.png)", '<p>!<a href="https://b.c/d.png">a</a></p>\n'),
        (
            "|a|\n|-:|",
            "<table>\n<thead>\n<tr>\n<th>a</th>\n</tr>\n</thead>\n</table>\n",
        ),
        ("one\ntwo", "<p>one<br />\ntwo</p>\n"),
        ("", ""),
    ],
)
def test_rendering(text: str, html: str) -> None:
    assert client().post("/markdown", json={"text": text}).text == html


def test_it_takes_the_key_and_no_long_text() -> None:
    guarded = client("secret")
    assert guarded.post("/markdown", json={"text": "a"}).status_code == 401
    headers = {"Authorization": "Bearer secret"}
    for length, status in ((MAX_MARKDOWN_CHARS, 200), (MAX_MARKDOWN_CHARS + 1, 400)):
        body = {"text": "a" * length}
        assert guarded.post("/markdown", json=body, headers=headers).status_code == status
