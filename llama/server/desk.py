"""The questions of the routes of a server to its engine, besides sequences.

In: names of adapters, and questions. Out: adapters that are loaded, and numbers of the whole
server. `LocalDesk` has an engine in this process; this file needs none.
"""

from abc import ABC, abstractmethod


class Desk(ABC):
    """The engine of one model, as routes ask it; everything is called in the event loop."""

    @abstractmethod
    async def load_adapter(self, name: str, path: str, *, replace: bool) -> None:
        """Load an adapter; see `Llama.load_adapter`.

        Raises:
            FieldError: The name cannot be used, or too many adapters are loaded.
            AdapterInUseError: Requests are using the adapter that would be replaced.
            OSError, ValueError: The adapter cannot be used.
        """

    @abstractmethod
    async def drop_adapter(self, name: str) -> None:
        """Free an adapter.

        Raises:
            ValueError: No adapter has this name.
            AdapterInUseError: Requests are using it.
        """

    @abstractmethod
    async def num_unfinished(self) -> int:
        """Return the number of sequences that run or wait, of the whole server."""

    @abstractmethod
    async def ranks_alive(self) -> bool:
        """Return whether all ranks of the model work."""

    @abstractmethod
    async def metrics(self) -> bytes:
        """Return the metrics of the whole server in Prometheus's text format."""
