"""The page in a real browser: it talks, shows where tokens came from, and needs nothing else."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("transformers")
for needed in ("fastapi", "uvicorn", "prometheus_client", "httpx"):
    pytest.importorskip(needed)

from browser import CHROMIUM, Browser, open_browser  # noqa: E402
from server_models import Server, engine_config, is_idle, running_server, until  # noqa: E402

from anabranch.server.engine_process import EngineProcess  # noqa: E402

pytestmark = pytest.mark.skipif(not CHROMIUM, reason="needs Chromium")
TOKENS = "document.querySelectorAll('.turn .token')"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    engine = EngineProcess(engine_config())
    with running_server(engine) as running:
        yield running
    engine.close()


@pytest.fixture
def page(server: Server) -> Iterator[Browser]:
    with open_browser() as browser:
        browser.open(f"{server.url}/")
        until(lambda: "tiny" in browser.run("document.getElementById('model').textContent"))
        yield browser
        assert not browser.complaints()
        asked = browser.requested()
        assert asked
        assert all(url.startswith(server.url) for url in asked)


def say(page: Browser, text: str, max_tokens: int) -> None:
    page.run(f"document.getElementById('max-tokens').value = {max_tokens}")
    page.run("document.getElementById('temperature').value = 0")
    page.run("document.getElementById('prompt').focus()")
    page.call("Input.insertText", text=text)
    page.press("Enter")


def done(page: Browser) -> bool:
    return not page.run("document.getElementById('send').disabled")


def test_a_conversation(page: Browser) -> None:
    say(page, "hello <b>the</b> hello", 200)
    until(lambda: page.run(f"{TOKENS}.length") and done(page))
    origins = page.run(f"[...new Set([...{TOKENS}].map(each => each.className))].sort()")
    assert origins == ["token accepted", "token corrected", "token sampled"]
    assert page.run("document.querySelector('.turn .text').textContent") == "hello <b>the</b> hello"
    page.run("document.querySelectorAll('.turn .text')[1].focus()")
    page.press("ArrowRight")
    first = page.run("document.getElementById('token').textContent")
    page.press("ArrowRight")
    second = page.run("document.getElementById('token').textContent")
    assert first != second
    for told in (first, second):
        assert "logprob -" in told
        assert "in step" in told
    say(page, "the", 8)
    until(lambda: page.run("document.querySelectorAll('.turn').length") == 4 and done(page))


def test_escape_stops_an_answer(page: Browser, server: Server) -> None:
    say(page, "hello", 900)
    until(lambda: page.run(f"{TOKENS}.length"))
    page.press("Escape")
    until(lambda: done(page) and is_idle(server))
    assert page.run("document.querySelector('.turn .error').textContent") == "Stopped."
    assert page.run(f"{TOKENS}.length") < 900


def test_an_error_is_told(page: Browser) -> None:
    say(page, "hello", 10_000)
    until(lambda: page.run("document.querySelector('.turn .error')?.textContent ?? ''"))
    assert "ask for at most" in page.run("document.querySelector('.turn .error').textContent")
    page.heard = [each for each in page.heard if each.get("method") != "Log.entryAdded"]  # the 400


def test_charts_are_drawn_and_said(page: Browser) -> None:
    say(page, "hello the hello the", 100)
    figures = "[...document.querySelectorAll('figure svg')].map(each => each.ariaLabel)"
    until(lambda: "% of all" in str(page.run(figures)) and " ms" in str(page.run(figures)))
    assert len(page.run(figures)) == 4
    until(lambda: done(page))


def test_it_fits_a_phone_and_everything_has_a_name(page: Browser) -> None:
    page.call(
        "Emulation.setDeviceMetricsOverride",
        width=360,
        height=700,
        deviceScaleFactor=1,
        mobile=True,
    )
    say(page, "hello" * 40, 60)
    until(lambda: page.run(f"{TOKENS}.length") and done(page))
    assert page.run("document.documentElement.scrollWidth") <= 360
    nameless = "[...document.querySelectorAll('input, textarea')].filter(e => !e.labels.length)"
    assert page.run(f"{nameless}.length") == 0
    assert page.run("document.querySelectorAll('img:not([alt])').length") == 0
    assert page.run("document.documentElement.lang") == "en"


def test_the_documents_list_every_path(server: Server) -> None:
    with open_browser() as browser:
        browser.open(f"{server.url}/docs")
        until(lambda: browser.run("document.querySelectorAll('article').length") >= 10)
        text = browser.run("document.body.textContent")
        assert "/v1/chat/completions" in text
        assert "repetition_penalty" in text
        assert not browser.complaints()
