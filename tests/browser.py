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
from collections.abc import Iterator
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
SCREENSHOTS = Path(__file__).parent.parent / "build" / "screenshots"  # ignored by git
FLAGS = "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run --mute-audio"


class Browser:
    """One page."""

    def __init__(self, commands: int, events: int) -> None:
        self._commands = os.fdopen(commands, "wb", buffering=0)
        self._events = os.fdopen(events, "rb", buffering=0)
        self._numbers = itertools.count(1)
        self._unread = b""
        self._session: str | None = None
        self.heard: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> Any:
        """A command's result; events that come meanwhile are kept."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        self._commands.write(json.dumps(message).encode() + b"\0")
        while (heard := self._next()).get("id") != number:
            self.heard.append(heard)
        assert "error" not in heard, heard
        return heard["result"]

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

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._unread:
            piece = self._events.read(1 << 16)
            assert piece, "the browser ended"
            self._unread += piece
        message, _, self._unread = self._unread.partition(b"\0")
        return json.loads(message)


@contextlib.contextmanager
def open_browser() -> Iterator[Browser]:
    """Reads commands at 3 and writes events to 4."""
    assert CHROMIUM
    theirs, commands = os.pipe()
    events, answers = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        flags = [*FLAGS.split(), "--remote-debugging-pipe", f"--user-data-dir={profile}"]
        placed = f'exec "$@" 3<&{theirs} 4>&{answers}'
        process = subprocess.Popen(
            ["bash", "-c", placed, "bash", CHROMIUM, *flags],
            pass_fds=(theirs, answers),
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs)
        os.close(answers)
        try:
            yield Browser(commands, events)
        finally:
            process.kill()
            process.wait()
