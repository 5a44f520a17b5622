"""The desk of an engine in this process: adapters, and numbers of the whole server."""

import asyncio
from collections.abc import Callable

from llama.api import Llama
from llama.common.checks import FieldError
from llama.server.desk import Desk


class LocalDesk(Desk):
    """The engine of a `Llama`."""

    def __init__(
        self,
        llama: Llama,
        max_loras: int,
        num_unfinished: Callable[[], int],
        metrics: Callable[[], bytes],
    ) -> None:
        """Answer for a model.

        Args:
            llama: the model.
            max_loras: adapters that may be loaded at once.
            num_unfinished: returns the number of sequences that run or wait.
            metrics: returns the metrics of the server.
        """
        self._llama = llama
        self._max_loras = max_loras
        self._num_unfinished = num_unfinished
        self._metrics = metrics
        self._is_changing = asyncio.Lock()

    async def load_adapter(self, name: str, path: str, *, replace: bool) -> None:
        """Load an adapter in a thread; see `Desk.load_adapter`."""
        llama = self._llama
        async with self._is_changing:
            if name not in llama.adapters and len(llama.adapters) >= self._max_loras:
                raise FieldError(
                    "lora_name",
                    f"{self._max_loras} adapters are loaded, the limit of --max_loras: unload one",
                )
            await asyncio.to_thread(llama.load_adapter, name, path, replace=replace)

    async def drop_adapter(self, name: str) -> None:
        """Free an adapter in a thread; see `Desk.drop_adapter`."""
        async with self._is_changing:
            await asyncio.to_thread(self._llama.drop_adapter, name)

    async def num_unfinished(self) -> int:
        """Return the number of sequences that run or wait."""
        return self._num_unfinished()

    async def ranks_alive(self) -> bool:
        """Return whether all ranks of the model work."""
        return all(self._llama.model.parallel.ranks_alive())

    async def metrics(self) -> bytes:
        """Return the metrics."""
        return self._metrics()
