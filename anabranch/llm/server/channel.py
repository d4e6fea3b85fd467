"""Messages to and from another process, without ever waiting for it."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any


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
