"""Lines of the package that processes run which tests start: engines, ranks, servers.

Each begins with a `sitecustomize` that traces it, found through PYTHONPATH. It reads the number of
the current test from a file they share, and appends a line to another as soon as it is run, so that
one which is killed loses nothing.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Self

PATIENCE = 300  # calls of a function in which it runs no new line until it is traced no more
PLACE = "ANABRANCH_TRACED_INTO"  # the folder of a ProcessTraces, then the package's


class LineTracer:
    """Reports each line of the package once a test, from whatever thread.

    A function whose lines are all known is not traced: most calls cost a look into a table.
    """

    def __init__(
        self, package: str, test: Callable[[], int], report: Callable[[str, int], None]
    ) -> None:
        self._package, self._test, self._report = package, test, report
        self._outside: set[CodeType] = set()
        self._of = -1  # the test of the two tables
        self._left: dict[CodeType, set[int]] = {}  # lines that were not run yet
        self._tries: dict[CodeType, int] = {}

    def start(self) -> None:
        threading.settrace(self._enter)
        sys.settrace(self._enter)

    def stop(self) -> None:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]

    def _lines_left(self, code: CodeType) -> set[int]:
        if self._of != (test := self._test()):
            self._of, self._left, self._tries = test, {}, {}
        if (left := self._left.get(code)) is None:
            left = self._left[code] = {line for *_, line in code.co_lines() if line is not None}
        return left

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        del event, argument
        code = frame.f_code
        if code in self._outside:
            return None
        if not code.co_filename.startswith(self._package):
            self._outside.add(code)
            return None
        if not self._lines_left(code) or (tries := self._tries.get(code, 0)) > PATIENCE:
            return None
        self._tries[code] = tries + 1
        return self._step

    def _step(self, frame: FrameType, event: str, argument: Any) -> Any:
        del argument
        if event == "line":
            code, line = frame.f_code, frame.f_lineno
            left = self._lines_left(code)
            if line in left:
                left.discard(line)
                self._tries[code] = 0
                self._report(code.co_filename, line)
        return self._step


class ProcessTraces:
    """A folder with the number of the current test and the lines that were run."""

    def __init__(self, folder: Path) -> None:
        self._written = os.open(folder / "lines", os.O_RDWR | os.O_CREAT | os.O_APPEND)
        with (folder / "number").open("r+b") as file:
            self._number = mmap.mmap(file.fileno(), 4)
        self._read = 0

    @classmethod
    def make(cls, folder: Path, package: Path) -> Self:
        """Trace the processes that this one starts from now on."""
        (folder / "number").write_bytes(bytes(4))
        code = "from process_traces import ProcessTraces\nProcessTraces.trace_this_process()\n"
        (folder / "sitecustomize.py").write_text(code)
        os.environ[PLACE] = f"{folder}:{package}/"
        paths = [str(folder), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        os.environ["PYTHONPATH"] = ":".join(filter(None, paths))
        return cls(folder)

    @classmethod
    def trace_this_process(cls) -> None:
        folder, package = os.environ[PLACE].split(":")
        traces = cls(Path(folder))
        LineTracer(package, lambda: traces._test, traces._write).start()

    def _write(self, name: str, line: int) -> None:
        os.write(self._written, f"{self._test} {name} {line}\n".encode())

    @property
    def _test(self) -> int:
        return int.from_bytes(self._number[:], "little")

    def begin(self) -> int:
        """The number of the next test."""
        number = self._test + 1
        self._number[:] = number.to_bytes(4, "little")
        return number

    def lines(self, number: int) -> set[tuple[str, int]]:
        """Those of a test that were written since the last call."""
        text = os.pread(self._written, os.fstat(self._written).st_size - self._read, self._read)
        self._read += len(text)
        rows = [row.split(" ") for row in text.decode().splitlines()]
        return {(name, int(line)) for test, name, line in rows if int(test) == number}
