"""Which lines of the package each passing test runs, and how long it takes: a plugin of pytest."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from process_traces import LineTracer, ProcessTraces


class LineTraces:
    """Traces this process with its threads, and what `process_traces` sees of the others."""

    def __init__(self, package: Path, out: Path) -> None:
        self._package, self._out = f"{package}/", out
        self._lines: set[tuple[str, int]] = set()
        self._rows: list[dict[str, Any]] = []
        self._passed: set[str] = set()
        self._number = 0
        self._folder = tempfile.TemporaryDirectory()
        self._others = ProcessTraces.make(Path(self._folder.name), package)
        self._tracer = LineTracer(self._package, lambda: self._number, self._report)

    def _report(self, name: str, line: int) -> None:
        self._lines.add((name, line))

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._lines, self._number = set(), self._others.begin()
        start = time.perf_counter()
        self._tracer.start()
        yield
        self._tracer.stop()
        seconds = time.perf_counter() - start
        files: dict[str, list[int]] = {}
        for name, line in sorted(self._lines | self._others.lines(self._number)):
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
        self._folder.cleanup()
