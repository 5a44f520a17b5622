"""The desk of an engine in another process: each question is a call of that process."""

import base64

from llama.api import TextSide
from llama.server.desk import Desk

_ANSWER_S = 5.0  # time for an answer that the other process has at once
_LOAD_S = 600.0  # time for an adapter to be loaded, as for other ranks


class RemoteDesk(Desk):
    """The engine at the other end of a stream."""

    def __init__(self, side: TextSide) -> None:
        """Ask the other end of a stream."""
        self._side = side

    async def load_adapter(self, name: str, path: str, *, replace: bool) -> None:
        """Load an adapter; see `Desk.load_adapter`."""
        await self._side.ask("load_adapter", _LOAD_S, name=name, path=path, replace=replace)

    async def drop_adapter(self, name: str) -> None:
        """Free an adapter; see `Desk.drop_adapter`."""
        await self._side.ask("drop_adapter", _LOAD_S, name=name)

    async def num_unfinished(self) -> int:
        """Return the number of sequences that run or wait, of the whole server."""
        return int(await self._side.ask("num_unfinished", _ANSWER_S))

    async def ranks_alive(self) -> bool:
        """Return whether all ranks of the model work, and the engine's process answers."""
        try:
            return bool(await self._side.ask("ranks_alive", _ANSWER_S))
        except (TimeoutError, ConnectionError):
            return False

    async def metrics(self) -> bytes:
        """Return the metrics of the whole server."""
        return base64.b64decode(await self._side.ask("metrics", _ANSWER_S))
