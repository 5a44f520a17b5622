"""Ranks: the groups that they form, what they do together, and which of them may print."""

from llama.parallel.errors import RankError
from llama.parallel.groups import (
    ModelParallel,
    SharedCounter,
    connect,
    disconnect,
    started_processes,
)

__all__ = [
    "ModelParallel",
    "RankError",
    "SharedCounter",
    "connect",
    "disconnect",
    "started_processes",
]
