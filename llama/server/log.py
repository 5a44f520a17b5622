"""The log of a server on stderr, which never blocks whoever writes a line.

In: records of the loggers of the server. Out: lines with their time, written by a thread. Where
nobody reads stderr, such as a launcher that Ctrl-Z has stopped, lines wait, and further ones are
counted instead of written.
"""

import logging
import queue
import sys
import threading
import time
from typing import TextIO

_MAX_WAITING = 10_000  # lines
_FLUSH_S = 1.0  # time limit for the lines that wait when the process ends
_ERROR_S = 0.2  # the same for an error, after which the process may end at once


class QueuedHandler(logging.Handler):
    """A handler that passes lines to a thread, which writes them."""

    def __init__(self, stream: TextIO) -> None:
        """Start the thread that writes into a stream."""
        super().__init__()
        self._stream = stream
        self._lines: queue.Queue[str] = queue.Queue(_MAX_WAITING)
        self._num_lost = 0
        threading.Thread(target=self._write, name="llama-log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        """Take the line of a record."""
        try:
            self._lines.put_nowait(self.format(record))
        except queue.Full:
            self._num_lost += 1
        except Exception:  # a message that does not fit its arguments
            self.handleError(record)
        if record.levelno >= logging.ERROR:
            self._wait(_ERROR_S)

    def flush(self) -> None:
        """Wait until all lines are written, for a limited time."""
        self._wait(_FLUSH_S)

    def _wait(self, limit_s: float) -> None:
        end = time.monotonic() + limit_s
        while self._lines.unfinished_tasks and time.monotonic() < end:
            time.sleep(0.005)

    def _write(self) -> None:
        while True:
            line = self._lines.get()
            num_lost, self._num_lost = self._num_lost, 0
            if num_lost:
                line = f"{num_lost} lines of the log were lost, as nobody read it\n{line}"
            try:
                self._stream.write(line + "\n")
                self._stream.flush()
            except (OSError, ValueError):  # stderr was closed
                pass
            finally:
                self._lines.task_done()


def log_to_stderr() -> None:
    """Write the lines of the server and of uvicorn to stderr, with their time."""
    handler = QueuedHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    for name, level in (("llama.server", logging.INFO), ("uvicorn.error", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(level)
