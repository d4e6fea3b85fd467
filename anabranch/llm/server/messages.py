"""Messages between the server and the engine's process, and the channel that carries them."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import traceback
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol

from anabranch.llm.engine.stats import EngineStats
from anabranch.llm.sampling.params import SamplingParams
from anabranch.llm.server.deltas import RequestDelta, pack, unpack


class Channel:
    """A duplex pipe with a thread that writes and one that reads.

    `receive` is called with every message and `closed`, once, when the other side is gone; both
    from the reading thread.
    """

    def __init__(
        self,
        connection: Connection[Any, Any],
        receive: Callable[[Any], None],
        closed: Callable[[], None],
    ) -> None:
        self._connection = connection
        self._receive, self._closed = receive, closed
        self._outbox: SimpleQueue[Any] = SimpleQueue()
        self._writer = threading.Thread(target=self._write, name="channel-writer", daemon=True)
        self._reader = threading.Thread(target=self._read, name="channel-reader", daemon=True)
        self._writer.start()
        self._reader.start()

    def send(self, message: Any) -> None:
        """Queue a message. It must not change any more: another thread pickles it."""
        self._outbox.put((message,))

    def flush(self, seconds: float) -> None:
        """Wait until all is written, but no longer; nothing can be sent after it."""
        self._outbox.put(None)
        self._writer.join(seconds)

    def close(self) -> None:
        """Hang up, on both sides; what is not written yet is lost. Not from `receive`."""
        self._hang_up()  # first: the writer may wait for another side that does not read
        self._outbox.put(None)
        self._writer.join()
        self._reader.join()
        self._connection.close()

    def _hang_up(self) -> None:
        with (
            contextlib.suppress(OSError),  # the other side was faster
            socket.socket(fileno=os.dup(self._connection.fileno())) as end,
        ):
            end.shutdown(socket.SHUT_RDWR)  # closing alone would not wake threads that wait

    def _write(self) -> None:
        try:
            while (item := self._outbox.get()) is not None:
                self._connection.send(item[0])
        except OSError:
            pass  # the reader sees the end, too
        except Exception:  # a message that cannot be pickled: an end is better than silence
            traceback.print_exc()
            self._hang_up()

    def _read(self) -> None:
        try:
            while True:
                self._receive(self._connection.recv())
        except (EOFError, OSError):
            pass
        except Exception:  # a message that cannot be read: an end is better than silence
            traceback.print_exc()
            self._hang_up()
        self._closed()


class Add(NamedTuple):
    """Run a request."""

    request_id: str
    prompt: list[int]
    params: SamplingParams


class Abort(NamedTuple):
    """End a request whose client is gone."""

    request_id: str


class Loading(NamedTuple):
    """A step of the start, with how much of it is done."""

    what: str
    done: int
    of: int


@dataclass(frozen=True, slots=True)
class Ready:
    """The engine takes requests; what the server has to know of it."""

    model_name: str
    tokenizer: Any | None
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    num_pages: int
    page_size: int
    max_drafts: int
    device: str
    sampling_defaults: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def cache_tokens(self) -> int:
        return self.num_pages * self.page_size


@dataclass(frozen=True, slots=True)
class Outputs:
    """Deltas of one step, packed and unpacked by the threads that write and read them."""

    deltas: list[RequestDelta]

    def __reduce__(self) -> tuple[Any, ...]:
        return _outputs, (pack(self.deltas),)


def _outputs(packed: list[tuple[Any, ...]]) -> Outputs:
    return Outputs(unpack(packed))


class Refused(NamedTuple):
    """A request that the engine does not run, for a reason the client can change."""

    request_id: str
    reason: str


class Broken(NamedTuple):
    """A request that ended with an error of the engine; the others continue."""

    request_id: str
    reason: str


class Failed(NamedTuple):
    """Why the engine's process is about to end."""

    reason: str
    trace: str


class Beat(NamedTuple):
    """The engine's process lives; how long the step under way has taken."""

    step_seconds: float  # 0 when there is none


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Counts of the engine at one moment."""

    stats: EngineStats
    num_running: int
    num_waiting: int
    cache_usage: float  # share of the pages that sequences hold


class ServedEngine(Protocol):
    """What endpoints see of an engine, whether it restarts or not."""

    info: Ready
    num_restarts: int

    @property
    def snapshot(self) -> Snapshot | None:
        """The newest counts; None while the engine does not answer."""

    @property
    def trouble(self) -> str | None:
        """Why no request can be answered now, if so."""

    def generate(
        self, prompts: Mapping[str, list[int]], params: SamplingParams
    ) -> AsyncGenerator[RequestDelta]:
        """What is new of requests, by id, until all are finished; closing it aborts them."""
        ...
