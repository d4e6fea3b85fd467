"""Headless Chromium, driven by its DevTools protocol over a pipe."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import shutil
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from server_models import until


def find_browser() -> str | None:
    """One that runs: Ubuntu's package is a stub where there is no snap."""
    for path in map(shutil.which, ("chromium", "chromium-browser")):
        if path is None:
            continue
        said = subprocess.run([path, "--version"], check=False, capture_output=True)
        if said.returncode == 0:
            return path
    return None


CHROMIUM = find_browser()
SCREENSHOTS = Path(__file__).parents[2] / "build" / "screenshots"  # ignored by git
FLAGS = "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run --mute-audio"


class Chromium:
    """The browser's process, which reads commands at 3 and writes events to 4."""

    def __init__(self) -> None:
        assert CHROMIUM
        theirs, commands = os.pipe()
        events, answers = os.pipe()
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        flags = [*FLAGS.split(), "--remote-debugging-pipe", f"--user-data-dir={self._profile.name}"]
        placed = f'exec "$@" 3<&{theirs} 4>&{answers}'
        self._process = subprocess.Popen(
            ["bash", "-c", placed, "bash", CHROMIUM, *flags],
            pass_fds=(theirs, answers),
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs)
        os.close(answers)
        self._commands = os.fdopen(commands, "wb", buffering=0)
        self._events = os.fdopen(events, "rb", buffering=0)
        self._numbers = itertools.count(1)
        self._unread = b""
        self.heard: dict[str | None, list[dict[str, Any]]] = defaultdict(list)  # by session

    def call(self, method: str, session: str | None = None, **params: Any) -> Any:
        """A command's result; events that come meanwhile are kept."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params}
        if session:
            message["sessionId"] = session
        self._commands.write(json.dumps(message).encode() + b"\0")
        while (heard := self._next()).get("id") != number:
            self.heard[heard.get("sessionId")].append(heard)
        assert "error" not in heard, heard
        return heard["result"]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._unread:
            piece = self._events.read(1 << 16)
            assert piece, "the browser ended"
            self._unread += piece
        message, _, self._unread = self._unread.partition(b"\0")
        return json.loads(message)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._commands.close()
        self._events.close()
        self._profile.cleanup()


class Browser:
    """One page, which shares no storage with others."""

    def __init__(self, chromium: Chromium) -> None:
        self._chromium = chromium
        self._context = chromium.call("Target.createBrowserContext")["browserContextId"]
        context = {"browserContextId": self._context}
        target = chromium.call("Target.createTarget", url="about:blank", **context)["targetId"]
        attached = chromium.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        self._chromium.call("Target.disposeBrowserContext", browserContextId=self._context)

    @property
    def heard(self) -> list[dict[str, Any]]:
        """Events that were not dealt with."""
        return self._chromium.heard[self._session]

    @heard.setter
    def heard(self, events: list[dict[str, Any]]) -> None:
        self._chromium.heard[self._session] = events

    def call(self, method: str, **params: Any) -> Any:
        """A command's result; events that come meanwhile are kept."""
        return self._chromium.call(method, self._session, **params)

    def grant(self, permission: str) -> None:
        """What a user would be asked for."""
        given = {"permissions": [permission], "browserContextId": self._context}
        self._chromium.call("Browser.grantPermissions", **given)

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def resolve(self, script: str) -> Any:
        """The value that a promise in the page resolves to."""
        result = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def resize(self, width: int, height: int, *, mobile: bool = False) -> None:
        """The size of what is seen, in CSS pixels."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=mobile,
        )

    def open(self, url: str) -> None:
        """Go to a page and wait until it is loaded."""
        self.call("Page.navigate", url=url)
        until(
            lambda: (
                self.run("document.readyState") == "complete"
                and self.run("location.href") != "about:blank"
            )
        )

    def press(self, key: str) -> None:
        """One key, as from a keyboard."""
        text = {"text": "\r"} if key == "Enter" else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, code=key, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, code=key)

    def type(self, text: str) -> None:
        """Text into what has the focus."""
        self.call("Input.insertText", text=text)

    def hold(self, pattern: str) -> None:
        """Requests for matching addresses wait until they are answered by `fulfil`."""
        self.call("Fetch.enable", patterns=[{"urlPattern": pattern}])

    def release(self) -> None:
        """Later requests go to the server again."""
        self.call("Fetch.disable")

    def held(self) -> dict[str, Any]:
        """The latest request that was held, once there is one."""
        found: list[dict[str, Any]] = []

        def arrived() -> bool:
            self.run("0")  # events are read along with an answer
            found[:] = [each for each in self.heard if each.get("method") == "Fetch.requestPaused"]
            return bool(found)

        until(arrived)
        self.heard = [each for each in self.heard if each not in found]
        return found[-1]["params"]

    def fulfil(self, request: dict[str, Any], body: str, *, kind: str) -> None:
        """Answer a request that was held."""
        self.call(
            "Fetch.fulfillRequest",
            requestId=request["requestId"],
            responseCode=200,
            responseHeaders=[{"name": "Content-Type", "value": kind}],
            body=base64.b64encode(body.encode()).decode(),
        )

    def screenshot(self, name: str) -> None:
        """What is seen, as PNG, among the tests' artefacts."""
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        seen = base64.b64decode(self.call("Page.captureScreenshot")["data"])
        (SCREENSHOTS / f"{name}.png").write_bytes(seen)

    def complaints(self) -> list[Any]:
        """Errors of scripts, and of what they asked for."""
        wrong = [each for each in self.heard if each.get("method") == "Runtime.exceptionThrown"]
        logged = [each for each in self.heard if each.get("method") == "Log.entryAdded"]
        return wrong + [each for each in logged if each["params"]["entry"]["level"] == "error"]

    def forgive_failed_requests(self) -> None:
        """For tests that make requests fail: the browser logs each of them."""
        self.run("0")
        self.heard = [each for each in self.heard if each.get("method") != "Log.entryAdded"]

    def requested(self) -> list[str]:
        """Addresses that the page asked for."""
        return [request["url"] for request in self._requests()]

    def posted(self, path: str) -> list[Any]:
        """Bodies that the page sent to a path."""
        sent = [request for request in self._requests() if request["url"].endswith(path)]
        return [json.loads(request["postData"]) for request in sent]

    def _requests(self) -> list[dict[str, Any]]:
        self.run("0")
        asked = [each for each in self.heard if each.get("method") == "Network.requestWillBeSent"]
        return [each["params"]["request"] for each in asked]


@cache
def shared_chromium() -> Chromium:
    return Chromium()


def close_chromium() -> None:
    if shared_chromium.cache_info().currsize:
        shared_chromium().close()
        shared_chromium.cache_clear()


@contextlib.contextmanager
def open_browser() -> Iterator[Browser]:
    browser = Browser(shared_chromium())
    try:
        yield browser
    finally:
        browser.close()
