"""Added tokens that Hugging Face's files name alongside a tokenizer.json.

In: a folder with tokenizer_config.json or added_tokens.json. Out: the tokens that these files list,
in their order. What a tokenizer.json holds is not known here.
"""

from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from llama.common.checks import brief
from llama.storage.downloads import read_json

_CONFIG = "tokenizer_config.json"
_OLDER = "added_tokens.json"  # read where the configuration has no added_tokens_decoder
_LISTS = ("additional_special_tokens", "extra_special_tokens")


class FurtherToken(NamedTuple):
    """A token that a file alongside the tokenizer lists.

    Attributes:
        path: The file.
        id: Its id there; None where the file gives none.
        name: Its text.
        flags: The flags that the file gives; empty where it gives none.
    """

    path: Path
    id: int | None
    name: str
    flags: dict[str, bool]


def further_tokens(folder: Path, known_ids: Container[int]) -> list[FurtherToken]:
    """Return the tokens that the files alongside a tokenizer.json list.

    Args:
        folder: The folder.
        known_ids: The ids of the added tokens of the tokenizer.json, which come before those of
            added_tokens.json.

    Raises:
        OSError: A file cannot be read.
        ValueError: A file is damaged, or lists something else.
    """
    path = folder / _CONFIG
    config = read_json(path) if path.is_file() else {}
    listed = config.get("added_tokens_decoder")
    older = folder / _OLDER
    is_older = listed is None and older.is_file()
    ids = read_json(older) if is_older else {}
    try:
        if is_older:
            listed = {i: {"content": name} for name, i in ids.items() if i not in known_ids}
        source = older if is_older else path
        tokens = [_token(source, int(i), entry) for i, entry in (listed or {}).items()]
        tokens.sort(key=lambda token: token.id or 0)
        return [*tokens, *_special_tokens(path, config)]
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise ValueError(
            f"{older if is_older else path}: its added tokens cannot be read "
            f"({type(error).__name__}: {brief(str(error))}): write it with transformers' "
            "save_pretrained"
        ) from None


def _special_tokens(path: Path, config: dict[str, Any]) -> Iterator[FurtherToken]:
    """Yield the tokens of the lists of special tokens, which have no ids."""
    for key in _LISTS:
        given = config.get(key) or []
        for entry in given.values() if isinstance(given, dict) else given:
            fields = {"content": entry} if isinstance(entry, str) else entry
            yield _token(path, None, {**fields, "special": True})


def _token(path: Path, token_id: int | None, entry: dict[str, Any]) -> FurtherToken:
    """Return the token that an object of a file describes."""
    name = entry["content"]
    if not isinstance(name, str):
        raise TypeError(f"{name!r} is no text")
    given = ("lstrip", "rstrip", "special")
    return FurtherToken(path, token_id, name, {x: bool(entry[x]) for x in given if x in entry})
