"""Ranks: the groups that they form, what they do together, and which of them may print."""

from llama.ranks.errors import NotMetError, RankError
from llama.ranks.groups import (
    ModelParallel,
    SharedCounter,
    connect,
    disconnect,
    started_processes,
)
from llama.ranks.watch import current_watch
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
