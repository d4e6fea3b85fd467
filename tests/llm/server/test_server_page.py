"""The pages in a real browser: they talk, show where tokens came from, and need nothing else.

Every test leaves a screenshot in build/screenshots.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("transformers")
for needed in ("fastapi", "uvicorn", "prometheus_client", "httpx"):
    pytest.importorskip(needed)

from browser import CHROMIUM, Browser, close_chromium, open_browser  # noqa: E402
from forked_engine import forked_engine  # noqa: E402
from server_models import Server, engine_config, is_idle, running_server, until  # noqa: E402

from anabranch.llm.server.engine_process import EngineProcess  # noqa: E402

pytestmark = pytest.mark.skipif(not CHROMIUM, reason="needs Chromium")
DESKTOP = {"width": 1280, "height": 800}
PHONE = {"width": 360, "height": 640, "mobile": True}
VIEWPORTS = pytest.mark.parametrize("viewport", [DESKTOP, PHONE], ids=["desktop", "phone"])
TOKENS = "document.querySelectorAll('.turn .token')"
CHAT = "/v1/chat/completions"
MARKDOWN = """# Sorting

Here is **quick sort**, with <b>HTML</b> and `code`:

```python
def sort(xs):
    return xs and sort([x for x in xs if x < xs[0]])
```

1. It is *short*.
2. It compares 1 &lt; 2.
   ```
   in a list
   ```

| case | cost |
|---|--:|
| best | n log n |

[docs](https://example.org/) [bad](javascript:alert(1)) ![far](https://example.org/far.png)
"""


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineProcess]:
    running = forked_engine(engine_config())
    yield running
    running.close()


@pytest.fixture(scope="module")
def server(engine: EngineProcess) -> Iterator[Server]:
    with running_server(engine) as running:
        yield running


@pytest.fixture(scope="module", autouse=True)
def _one_browser() -> Iterator[None]:
    yield
    close_chromium()


@pytest.fixture
def viewport() -> dict[str, Any]:
    return DESKTOP


@contextlib.contextmanager
def open_page(server: Server, viewport: dict[str, Any], name: str) -> Iterator[Browser]:
    with open_browser() as browser:
        browser.resize(**viewport)
        browser.open(f"{server.url}/")
        until(lambda: "tiny" in browser.run("document.getElementById('model').textContent"))
        yield browser
        browser.screenshot(name)
        assert not browser.complaints()
        asked = browser.requested()
        assert asked
        assert all(url.startswith(server.url) for url in asked)


@pytest.fixture
def page(
    server: Server, viewport: dict[str, Any], request: pytest.FixtureRequest
) -> Iterator[Browser]:
    with open_page(server, viewport, request.node.name) as opened:
        yield opened


def say(page: Browser, text: str, max_tokens: int) -> None:
    page.run(f"document.getElementById('max-tokens').value = {max_tokens}")
    page.run("document.getElementById('temperature').value = 0")
    page.run("document.getElementById('prompt').focus()")
    page.type(text)
    page.press("Enter")


def texts(page: Browser, selector: str) -> list[str]:
    return page.run(f"[...document.querySelectorAll({selector!r})].map(each => each.textContent)")


def typed(page: Browser) -> str:
    return page.run("document.getElementById('prompt').value")


def done(page: Browser) -> bool:
    return page.run("!document.getElementById('log').hasAttribute('aria-busy')")


def answered(page: Browser, count: int) -> bool:
    return len(texts(page, ".bar .figures")) == count and done(page)


def in_view(page: Browser, selector: str) -> bool:
    """Whether all of an element can be seen, with nothing over it or cutting it off."""
    box = f"document.querySelector({selector!r}).getBoundingClientRect()"
    return page.run(
        f"(b => [[b.left, b.top], [b.right, b.top], [b.left, b.bottom], [b.right, b.bottom]]"
        f".every(([x, y]) => {{"
        f"const inward = (at, low, high) => at === low ? at + 8 : at === high ? at - 8 : at;"
        f"const seen = document.elementFromPoint("
        f"inward(x, b.left, b.right), inward(y, b.top, b.bottom));"
        f"return seen && document.querySelector({selector!r}).contains(seen); }}))({box})"
    )


def events(text: str, *, ends: bool = True) -> str:
    """A stream of a text in tokens of three letters, of all origins in turn."""
    origins = ("sampled", "accepted", "corrected")
    chunks: list[str] = []
    for number, start in enumerate(range(0, len(text), 3)):
        piece, origin = text[start : start + 3], origins[number % 3]
        token = {"id": 0, "text": piece, "origin": origin, "step": number, "logprob": -1.0}
        choice = {"delta": {"content": piece}, "finish_reason": None, "token_origins": [token]}
        chunks.append(f"data: {json.dumps({'choices': [choice]})}\n\n")
    return "".join(chunks) + ("data: [DONE]\n\n" if ends else "")


def answer(page: Browser, text: str, *, ends: bool = True) -> None:
    page.fulfil(page.held(), events(text, ends=ends), kind="text/event-stream")


def test_a_conversation(page: Browser) -> None:
    say(page, "hello <b>the</b> hello", 200)
    until(lambda: answered(page, 1))
    origins = page.run(f"[...new Set([...{TOKENS}].map(each => each.className))].sort()")
    assert origins == ["token accepted", "token corrected", "token sampled"]
    assert texts(page, ".turn .text")[0] == "hello <b>the</b> hello"
    page.run("document.querySelectorAll('.turn .text')[1].focus()")
    page.press("ArrowRight")
    first = page.run("document.getElementById('token').textContent")
    page.press("ArrowRight")
    second = page.run("document.getElementById('token').textContent")
    assert first != second
    for told in (first, second):
        assert "logprob -" in told
        assert "step" in told
    say(page, "the", 8)
    until(lambda: answered(page, 2))
    sent = page.posted(CHAT)[-1]["messages"]
    assert [message["role"] for message in sent] == ["user", "assistant", "user"]


def test_escape_stops_an_answer(page: Browser, server: Server) -> None:
    say(page, "hello", 900)
    until(lambda: page.run(f"{TOKENS}.length"))
    page.press("Escape")
    until(lambda: done(page) and is_idle(server))
    assert texts(page, ".note p") == ["Stopped. The conversation goes on from here."]
    assert not texts(page, ".error")  # which is red
    assert page.run(f"new Set([...{TOKENS}].map(each => each.known)).size") < 900
    say(page, "the", 4)
    until(lambda: answered(page, 2))
    assert page.posted(CHAT)[-1]["messages"][1]["content"]


@VIEWPORTS
def test_a_failed_turn_is_not_sent_and_can_be_tried_again(page: Browser) -> None:
    say(page, "hello", 10_000)
    until(lambda: texts(page, ".note.error p"))
    assert "ask for at most" in texts(page, ".note.error p")[0]
    assert in_view(page, ".note.error")
    assert page.run("document.querySelector('.note.error').getAttribute('role')") == "alert"
    assert typed(page) == "hello"
    page.run("document.getElementById('max-tokens').value = 8")
    page.screenshot(f"failed-turn-{page.run('innerWidth')}")
    page.run("document.querySelector('.note.error button').click()")
    until(lambda: answered(page, 1))
    assert typed(page) == ""
    assert len(texts(page, ".turn")) == 2
    say(page, " the", 8)
    until(lambda: answered(page, 2))
    sent = [body["messages"] for body in page.posted(CHAT)]
    assert sent[1] == [{"role": "user", "content": "hello"}]
    assert [message["role"] for message in sent[2]] == ["user", "assistant", "user"]
    assert all(message["content"] for message in sent[2])
    page.forgive_failed_requests()


def test_what_was_typed_meanwhile_stays_when_a_turn_fails(page: Browser) -> None:
    page.hold(f"*{CHAT}")
    say(page, "hello", 8)
    held = page.held()
    page.type("something else")
    page.fulfil(held, "{}", kind="text/event-stream")
    until(lambda: texts(page, ".note.error"))
    assert typed(page) == "something else"


def test_stopping_before_the_first_token_leaves_nothing_to_send(page: Browser) -> None:
    page.hold(f"*{CHAT}")
    say(page, "hello", 8)
    page.held()
    page.press("Escape")
    until(lambda: done(page))
    assert typed(page) == "hello"
    assert not texts(page, ".error")
    page.release()
    page.press("Enter")
    until(lambda: answered(page, 1))
    assert len(page.posted(CHAT)[-1]["messages"]) == 1


def test_a_stream_that_breaks_off_is_an_error(page: Browser) -> None:
    page.hold(f"*{CHAT}")
    say(page, "hello", 8)
    answer(page, "half an ans", ends=False)
    until(lambda: texts(page, ".note.error p"))
    assert "connection to the server was lost" in texts(page, ".note.error p")[0]
    assert typed(page) == "hello"


@VIEWPORTS
def test_an_unreachable_server_is_said_with_what_to_do(
    engine: EngineProcess, viewport: dict[str, Any]
) -> None:
    with contextlib.ExitStack() as stack:
        serving = stack.enter_context(contextlib.ExitStack())
        server = serving.enter_context(running_server(engine))
        page = stack.enter_context(open_page(server, viewport, "unreachable"))
        serving.close()
        say(page, "hello", 8)
        until(lambda: texts(page, ".note.error p"))
        said = texts(page, ".note.error p")[0]
        until(lambda: "cannot be reached" in texts(page, "#health")[0])
        assert server.url in said
        assert "anabranch serve" in said
        assert in_view(page, ".note.error")
        assert in_view(page, "#health")
        page.screenshot(f"unreachable-{viewport['width']}")
        page.forgive_failed_requests()


@VIEWPORTS
def test_a_missing_key_is_asked_for(engine: EngineProcess, viewport: dict[str, Any]) -> None:
    with (
        running_server(engine, api_key="secret") as server,
        open_page(server, viewport, "with-key") as page,
    ):
        say(page, "hello", 8)
        until(lambda: texts(page, ".note.error p"))
        assert "needs an API key. Enter it under Options" in texts(page, ".note.error p")[0]
        assert page.run("document.activeElement.id") == "key"
        assert in_view(page, "#key")
        page.screenshot(f"missing-key-{viewport['width']}")
        page.type("wrong")
        page.press("Enter")
        until(lambda: "refused the API key" in str(texts(page, ".note.error p")))
        page.run("document.getElementById('key').value = ''")
        page.type("secret")
        page.press("Enter")
        until(lambda: answered(page, 1))
        assert texts(page, ".markdown")
        assert not texts(page, ".note")
        page.forgive_failed_requests()


@VIEWPORTS
def test_markdown_is_shown_and_keeps_the_colours(page: Browser) -> None:
    page.hold(f"*{CHAT}")
    say(page, "How are lists sorted?", 8)
    answer(page, MARKDOWN)
    until(lambda: answered(page, 1))
    assert texts(page, ".markdown h1") == ["Sorting"]
    assert texts(page, ".markdown strong") == ["quick sort"]
    assert texts(page, ".markdown p code") == ["code"]
    code = ["def sort(xs):\n    return xs and sort([x for x in xs if x < xs[0]])\n", "in a list\n"]
    assert texts(page, ".markdown pre") == code
    family = "getComputedStyle(document.querySelector('.markdown pre .token')).fontFamily"
    assert "monospace" in page.run(family)
    assert texts(page, ".markdown td") == ["best", "n log n"]
    assert "`" not in texts(page, ".markdown")[0]
    assert "with <b>HTML</b> and" in texts(page, ".markdown")[0]
    assert "1 < 2" in texts(page, ".markdown")[0]
    links = page.run("[...document.querySelectorAll('.markdown a')].map(each => each.href)")
    assert links[0] == "https://example.org/"
    assert not any(link.startswith("javascript:") for link in links)
    assert page.run("document.querySelectorAll('.markdown :is(b, img, script, style)').length") == 0
    words = "Here is quick sort, with <b>HTML</b> and "
    spans = page.run(
        "[...document.querySelectorAll('.markdown p')[0].querySelectorAll('.token')]"
        ".map(each => [each.textContent, each.known.text])"
    )
    assert "".join(shown for shown, _ in spans).startswith(words)
    assert all(shown in known for shown, known in spans)
    assert not page.run("document.querySelectorAll('.reply .text > .token').length")
    assert page.run("document.documentElement.scrollWidth <= innerWidth")


def begin_answer(page: Browser) -> None:
    """An answer in the log, without a request for it."""
    page.resolve(
        "import('/page/answer.js').then(({ Answer }) => { globalThis.answer = new Answer('');"
        "document.getElementById('log').append(answer.element); })"
    )


def add_token(page: Browser, text: str) -> None:
    token = {"text": text, "origin": "accepted", "step": 1, "logprob": None}
    choice = {"delta": {"content": text}, "token_origins": [token]}
    page.run(f"answer.add({json.dumps(choice)})")


def test_an_unfinished_answer_is_rendered_too(page: Browser) -> None:
    begin_answer(page)
    add_token(page, "`one`\n\n")
    until(lambda: texts(page, ".markdown code") == ["one"])
    page.run("globalThis.block = document.querySelector('.markdown p')")
    add_token(page, "```\ntwo")
    until(lambda: texts(page, ".markdown pre code") == ["two"])
    assert page.run("block.isConnected")  # so what is selected in it stays so
    page.hold("*/markdown")
    add_token(page, " three")
    page.call("Fetch.failRequest", requestId=page.held()["requestId"], errorReason="Failed")
    until(lambda: not texts(page, ".markdown"))
    assert "".join(texts(page, "#log .token")) == "`one`\n\n```\ntwo three"
    page.forgive_failed_requests()


def test_only_plain_elements_are_taken_from_rendered_text(page: Browser) -> None:
    page.hold("*/markdown")
    begin_answer(page)
    add_token(page, "hello")
    assert texts(page, "#log .token.accepted") == ["hello"]  # before it is rendered
    rendered = "<p id='x'>a<script>b</script><img src='/c'></p>"
    page.fulfil(page.held(), rendered, kind="text/html")
    until(lambda: texts(page, ".markdown p") == ["ab"])
    assert page.run("document.querySelectorAll('.markdown :is(script, img, [id])').length") == 0


def test_an_answer_has_figures_and_can_be_copied_and_tried_again(page: Browser) -> None:
    page.grant("clipboardReadWrite")
    page.hold(f"*{CHAT}")
    say(page, "hello", 8)
    answer(page, "**one** `two`")
    until(lambda: answered(page, 1))
    figures = texts(page, ".figures")[0]
    assert re.match(r"5 tokens · ([\d.]+ tokens/s · )?first token after [\d.]+ s", figures)
    page.run("[...document.querySelectorAll('.bar button')][0].click()")
    until(lambda: "Copied" in texts(page, ".bar button"))
    assert page.resolve("navigator.clipboard.readText()") == "**one** `two`"
    page.run("document.querySelector('.retry').click()")
    answer(page, "another")
    until(lambda: texts(page, ".markdown") == ["another"] and done(page))
    assert len(texts(page, ".turn")) == 2
    sent = [body["messages"] for body in page.posted(CHAT)]
    assert sent == [[{"role": "user", "content": "hello"}]] * 2


def test_a_retry_that_fails_keeps_the_former_answer(page: Browser) -> None:
    page.hold(f"*{CHAT}")
    say(page, "hello", 8)
    answer(page, "the first answer")
    until(lambda: answered(page, 1))
    page.run("document.querySelector('.retry').click()")
    answer(page, "", ends=False)
    until(lambda: texts(page, ".note.error"))
    assert page.run("document.querySelector('.markdown').checkVisibility()")
    say(page, "the", 8)
    answer(page, "more")
    until(lambda: answered(page, 2))
    sent = [message["content"] for message in page.posted(CHAT)[-1]["messages"]]
    assert sent == ["hello", "the first answer", "the"]


def chunk(delta: dict[str, Any], text: str, *, finish: str | None = None) -> str:
    token = {"id": 0, "text": text, "origin": "accepted", "step": 1, "logprob": -1.0}
    choice = {"delta": delta, "finish_reason": finish, "token_origins": [token]}
    return f"data: {json.dumps({'choices': [choice]})}\n\n"


def test_reasoning_is_folded_and_calls_are_shown(page: Browser) -> None:
    page.hold(f"*{CHAT}")
    page.run("document.getElementById('system').value = 'Be brief.'")
    page.run("document.getElementById('tools').value = '[]'")
    say(page, "hello", 8)
    held = page.held()
    body = (
        chunk({}, "<think>")
        + chunk({"reasoning_content": "Hm."}, "Hm.")
        + chunk({}, "</think>")
        + chunk({"content": "Yes."}, "Yes.", finish="stop")
        + "data: [DONE]\n\n"
    )
    page.fulfil(held, body, kind="text/event-stream")
    until(lambda: answered(page, 1))
    assert texts(page, ".thought > div") == ["Hm."]
    assert not page.run("document.querySelector('.thought').open")
    assert texts(page, ".markdown p") == ["Yes."]
    say(page, "again", 8)
    call = {"index": 0, "id": "1", "function": {"name": "now", "arguments": '{"a": 1}'}}
    body = chunk({"content": "", "tool_calls": [call]}, "x", finish="tool_calls")
    page.fulfil(page.held(), body + "data: [DONE]\n\n", kind="text/event-stream")
    until(lambda: texts(page, ".call h4") == ["Calls now"])
    until(lambda: answered(page, 2))
    assert "tool's answer" in texts(page, ".note p")[0] and not typed(page)
    say(page, "12", 8)
    held = page.held()
    sent = page.posted(CHAT)[-1]["messages"]
    made = {"id": "1", "type": "function", "function": {"name": "now", "arguments": '{"a": 1}'}}
    assert sent[-2:] == [
        {"role": "assistant", "content": None, "tool_calls": [made]},
        {"role": "tool", "tool_call_id": "1", "content": "12"},
    ]
    page.fulfil(held, events("It is 12."), kind="text/event-stream")
    until(lambda: answered(page, 3))


def test_json_is_shown_as_code(page: Browser) -> None:
    page.hold(f"*{CHAT}")
    say(page, "hello", 8)
    answer(page, '{"a": [1, "b"]}')
    until(lambda: answered(page, 1))
    assert texts(page, "pre.json") == ['{"a": [1, "b"]}']
    assert page.run(f"{TOKENS}.length") > 3  # still coloured
    assert page.run("!CSS.highlights || CSS.highlights.get('code-string').size > 0")


def test_a_question_is_edited_and_conversations_are_kept(page: Browser) -> None:
    page.hold(f"*{CHAT}")
    for number, asked in enumerate(("first", "second")):
        say(page, asked, 8)
        answer(page, f"answer to {asked}")
        until(lambda count=number + 1: answered(page, count))
    page.run("document.querySelector('.question button').click()")
    assert typed(page) == "first"
    page.run("document.getElementById('prompt').value = ''")
    say(page, "other", 8)
    answer(page, "another answer")
    until(lambda: texts(page, ".markdown") == ["another answer"] and done(page))
    page.run("document.querySelector('.onward').click()")
    answer(page, " goes on")
    until(lambda: texts(page, ".markdown") == ["another answer goes on"] and done(page))
    page.run("document.getElementById('clear').click()")
    assert not texts(page, ".markdown")
    page.run("document.querySelector('#kept button').click()")
    until(lambda: texts(page, ".markdown") == ["another answer goes on"])
    page.run("document.querySelectorAll('#kept button')[1].click()")
    assert not texts(page, "#kept li")


def test_charts_are_drawn_and_said(page: Browser) -> None:
    say(page, "hello the hello the", 100)
    figures = "[...document.querySelectorAll('figure svg')].map(each => each.ariaLabel)"
    until(lambda: "% of all" in str(page.run(figures)) and " ms" in str(page.run(figures)))
    assert len(page.run(figures)) == 4
    until(lambda: done(page))
    stages = texts(page, "#stages svg text")
    assert stages[0] == "Model"
    assert not {"scoring", "verification", "proposal"} & set(stages)


@VIEWPORTS
def test_the_message_field_is_always_in_view(page: Browser, viewport: dict[str, Any]) -> None:
    def usable() -> bool:
        return in_view(page, "#prompt") and in_view(page, "#send")

    assert usable()
    is_phone = viewport is PHONE
    for panel in ("legend", "engine"):
        assert page.run(f"document.getElementById('{panel}').open") == (not is_phone)
    page.hold(f"*{CHAT}")
    say(page, "hello " * 60, 60)
    answer(page, "a line of an answer\n\n" * 40)
    until(lambda: answered(page, 1))
    assert usable()
    assert in_view(page, ".bar")
    for panel in ("legend", "engine", "options"):
        page.run(f"document.getElementById('{panel}').open = true")
        assert usable()
        page.screenshot(f"{panel}-{viewport['width']}")
        page.run(f"document.getElementById('{panel}').open = false")
    assert page.run("document.documentElement.scrollWidth <= innerWidth")


@VIEWPORTS
def test_everything_has_a_name(page: Browser) -> None:
    nameless = "[...document.querySelectorAll('input, textarea')].filter(e => !e.labels.length)"
    assert page.run(f"{nameless}.length") == 0
    assert page.run("document.querySelectorAll('img:not([alt])').length") == 0
    assert page.run("document.documentElement.lang") == "en"
    assert page.run("document.getElementById('log').role") == "log"


def test_dark_colours_follow_the_system(page: Browser) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    light = page.run(ground)
    page.call(
        "Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}]
    )
    assert page.run(ground) != light


@VIEWPORTS
def test_the_documents_explain_every_field(server: Server, viewport: dict[str, Any]) -> None:
    with open_browser() as browser:
        browser.resize(**viewport)
        browser.open(f"{server.url}/docs")
        until(lambda: browser.run("document.querySelectorAll('article').length") >= 10)
        fields: dict[str, str] = {}  # the first of a name, which is a completion's or a chat's
        for name, text in zip(texts(browser, ".name code"), texts(browser, ".field"), strict=True):
            fields.setdefault(name, text)
        assert "Range0 to 100" in fields["temperature"]
        assert "Default1" in fields["temperature"]
        assert "Rangeabove 0, at most 1" in fields["top_p"]
        unexplained = [
            name
            for name, text in fields.items()
            if "Example" not in text or ("required" not in text and "Default" not in text)
        ]
        # not supported, so no example would be accepted
        assert sorted(unexplained) == ["previous_response_id", "suffix"]
        assert CHAT in browser.run("document.body.textContent")
        assert browser.run("document.documentElement.scrollWidth <= innerWidth")
        browser.run(f"document.getElementById('post{CHAT}').scrollIntoView()")
        browser.screenshot(f"docs-{viewport['width']}")
        assert not browser.complaints()
