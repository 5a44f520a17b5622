"""Ranks: the groups that they form, what they do together, and which of them may print."""

from llama.parallel.errors import NotMetError, RankError
from llama.parallel.groups import (
    ModelParallel,
    SharedCounter,
    connect,
    disconnect,
    started_processes,
)
from llama.parallel.watch import current_watch
from llama.signals import drain, stop_requested

__all__ = [
    "ModelParallel",
    "NotMetError",
    "RankError",
    "SharedCounter",
    "connect",
    "current_watch",
    "disconnect",
    "drain",
    "started_processes",
    "stop_requested",
]
