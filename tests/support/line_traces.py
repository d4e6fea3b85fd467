"""Which lines of the package each passing test runs, and how long it takes: a plugin of pytest."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest


class LineTraces:
    """Traces this process, its threads included; what other processes run is not seen."""

    def __init__(self, package: Path, out: Path) -> None:
        self._package, self._out = f"{package}/", out
        self._lines: set[tuple[str, int]] = set()
        self._rows: list[dict[str, Any]] = []
        self._passed: set[str] = set()

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        del event, argument
        if not frame.f_code.co_filename.startswith(self._package):
            return None
        return self._step

    def _step(self, frame: FrameType, event: str, argument: Any) -> Any:
        del argument
        if event == "line":
            self._lines.add((frame.f_code.co_filename, frame.f_lineno))
        return self._step

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._lines = set()
        start = time.perf_counter()
        threading.settrace(self._enter)
        sys.settrace(self._enter)
        yield
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]
        seconds = time.perf_counter() - start
        files: dict[str, list[int]] = {}
        for name, line in sorted(self._lines):
            files.setdefault(name.removeprefix(self._package), []).append(line)
        if item.nodeid in self._passed:
            self._rows.append({"test": item.nodeid, "seconds": seconds, "files": files})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._passed.discard(report.nodeid)
        elif report.when == "call" and report.passed:
            self._passed.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        self._out.write_text(json.dumps(self._rows))
