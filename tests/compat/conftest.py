"""A server with the demo model, for hosts that send requests to one."""

from collections.abc import Iterator

import pytest

from helpers.server import RunningServer, run_server


@pytest.fixture(scope="session")
def server() -> Iterator[RunningServer]:
    with run_server("--max_seq_len", "512", "--dtype", "fp32") as running:
        yield running
