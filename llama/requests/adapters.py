"""The LoRA adapters that requests can choose, by name.

In: names and paths. Out: an `AdapterInfo` for each name, and the hash by which the engine knows the
adapter. Ranks, threads and the requests that use an adapter are in `adapter_loading.py`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from llama.common.checks import FieldError, FieldTypeError, brief

_MAX_NAME = 256  # characters


@dataclass(frozen=True)
class AdapterInfo:
    """An adapter that is loaded under a name.

    Attributes:
        name: The name by which requests choose it.
        path: The path that it was loaded from.
        digest: The SHA-256 of its configuration and tensors.
        rank: The largest rank of its updates.
        base_model: The name of the base model in its configuration, which is often a path of
            another machine.
        nbytes: The bytes that it takes on this rank.
    """

    name: str
    path: str
    digest: bytes
    rank: int
    base_model: str
    nbytes: int


class AdapterInUseError(RuntimeError):
    """An adapter that requests are using cannot be dropped or replaced."""


class AdapterNames(Mapping[str, AdapterInfo]):
    """The adapters that are loaded, by name, in the order in which they were loaded."""

    def __init__(self) -> None:
        self._infos: dict[str, AdapterInfo] = {}

    def __getitem__(self, name: str) -> AdapterInfo:
        return self._infos[name]

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._infos))

    def __len__(self) -> int:
        return len(self._infos)

    def digest_of(self, name: object) -> bytes:
        """Return the hash of an adapter; an empty one for None, which is the base model.

        Raises:
            TypeError: It is no name.
            ValueError: No adapter has this name.
        """
        if name is None:
            return b""
        if not isinstance(name, str):
            raise FieldTypeError("adapter", f"adapter={brief(name)} must be the name of an adapter")
        info = self._infos.get(name)
        if info is None:
            known = ", ".join(map(repr, self)) or "none"
            raise FieldError(
                "adapter",
                f"adapter={brief(name)} is not loaded: these adapters are: {known}; load it with "
                "load_adapter first",
            )
        return info.digest

    def check_new(self, name: object, *, replace: bool) -> str:
        """Return a name for a new adapter.

        Raises:
            TypeError: It is no text.
            ValueError: It cannot be used, or is in use and must not be replaced.
        """
        if not isinstance(name, str):
            raise FieldTypeError("name", f"name={brief(name)} must be a text")
        if not 0 < len(name) <= _MAX_NAME or not name.isprintable():
            raise FieldError(
                "name", f"name={brief(name)} must have 1 to {_MAX_NAME} printable characters"
            )
        if name in self._infos and not replace:
            raise FieldError(
                "name",
                f"name={brief(name)} is the name of a loaded adapter: drop it first, or replace it",
            )
        return name

    def check_known(self, name: object) -> AdapterInfo:
        """Return the adapter of a name.

        Raises:
            TypeError: It is no text.
            ValueError: No adapter has this name.
        """
        if not isinstance(name, str):
            raise FieldTypeError("name", f"name={brief(name)} must be a text")
        if name not in self._infos:
            raise FieldError("name", f"name={brief(name)}: no adapter of this name is loaded")
        return self._infos[name]

    def is_shared(self, info: AdapterInfo) -> bool:
        """Return whether another name has the same content."""
        others = (other for name, other in self._infos.items() if name != info.name)
        return any(other.digest == info.digest for other in others)

    def has_digest(self, digest: bytes) -> bool:
        """Return whether a hash is that of a loaded adapter."""
        return any(info.digest == digest for info in self._infos.values())

    def set(self, info: AdapterInfo) -> None:
        """Let requests choose an adapter; one of the same name is replaced."""
        self._infos[info.name] = info

    def remove(self, name: str) -> None:
        """Forget a name."""
        del self._infos[name]
