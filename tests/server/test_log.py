"""The log of a server where nobody reads it, such as a parent that Ctrl-Z has stopped."""

import logging
import os
import threading
from collections.abc import Iterator
from typing import TextIO

import pytest

from llama.server import log as log_module
from llama.server.log import QueuedHandler

Pipe = tuple[int, TextIO]


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    """A pipe: the end that is read, and a text file of the end that is written."""
    reader, writer = os.pipe()
    with open(writer, "w") as file:
        yield reader, file
        os.set_blocking(reader, False)
        while _read(reader):  # The thread of the handler ends its write.
            pass
    os.close(reader)


def _read(reader: int) -> bytes:
    try:
        return os.read(reader, 1 << 20)
    except BlockingIOError:
        return b""


def _log(handler: logging.Handler, level: int, message: str) -> None:
    handler.handle(logging.LogRecord("x", level, "", 0, message, (), None))


@pytest.mark.parametrize(
    ("level", "size", "count"),
    [(logging.INFO, 90, 3000), (logging.WARNING, 300_000, 3), (logging.ERROR, 70_000, 4)],
)
def test_a_line_that_nobody_reads_blocks_nobody(pipe, level, size, count):
    reader, file = pipe
    handler = QueuedHandler(file)

    def write() -> None:
        for i in range(count):
            _log(handler, level, f"{i} {'x' * size}")

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    writer.join(60)
    assert not writer.is_alive()
    text = b""
    while text.count(b"\n") < count:
        text += os.read(reader, 1 << 16)
    assert [int(line.split()[0]) for line in text.splitlines()] == [*range(count)]


def test_lines_beyond_the_limit_are_counted(pipe, monkeypatch):
    monkeypatch.setattr(log_module, "_MAX_WAITING", 5)
    reader, file = pipe
    handler = QueuedHandler(file)
    for i in range(20):
        _log(handler, logging.INFO, f"{i} {'x' * 70_000}")
    text = b""
    while b"lines of the log were lost" not in text:
        text += os.read(reader, 1 << 16)
    _log(handler, logging.INFO, "the last one")
    while not text.endswith(b"the last one\n"):
        text += os.read(reader, 1 << 16)
    lost = int(text.split(b" lines of the log")[0].rpartition(b"\n")[2])
    assert lost + text.count(b"xxx\n") == 20


def test_all_lines_are_written_before_the_process_ends(pipe):
    reader, file = pipe
    handler = QueuedHandler(file)
    for i in range(200):
        _log(handler, logging.INFO, str(i))
    handler.flush()
    assert os.read(reader, 1 << 16).split() == [b"%d" % i for i in range(200)]
