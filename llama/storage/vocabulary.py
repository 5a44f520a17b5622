"""The vocabulary of a model: its BPE tokens, the tokens added to them, and rows without a token.

In: a tokenizer file and the number of a model's rows. Out: a `Vocabulary` whose ids have no gap, or
an error if file and model do not belong together. No text is encoded here, and no file format is
known.
"""

import logging
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

from llama.common.checks import torchrun_number
from llama.storage.gguf import Header
from llama.storage.token_files import IMAGE, AddedToken, Parsed, check_ranks, parse

_LOGGER = logging.getLogger(__name__)

# Added tokens that say what a text is: without them, reasoning and calls would look like content.
_MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
_MAX_ADDED = 65_536  # ids without a word of the BPE
_MAX_PADDING = 4096  # rows of a model after the last token; embeddings are padded to 2**17, too


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a model, by id without a gap.

    Attributes:
        path: The tokenizer file.
        ranks: The id of each BPE token, in any places. Tokens that merge first have the lower ids.
        added: The added tokens by name.
        special_tokens: The ids of the added tokens by name, and of fillers for the rows of the
            model that have no token.
        num_rows: The number of ids.
        hidden_ids: The ids that skip_special_tokens leaves out.
        roles: The ids of bos_token, eos_token and pad_token, as far as the files name them.
        stop_ids: The ids that end an answer by the files.
    """

    path: Path
    ranks: dict[bytes, int]
    added: dict[str, AddedToken]
    special_tokens: dict[str, int]
    num_rows: int
    hidden_ids: frozenset[int]
    roles: dict[str, int]
    stop_ids: frozenset[int]


def read_vocabulary(
    given: str | PathLike[str] | Header,
    *,
    llama_3_0: bool = False,
    vocab_size: int | None = None,
    config_folder: Path | None = None,
) -> Vocabulary:
    """Read the vocabulary of a tokenizer file.

    Args:
        given: The path of a tokenizer.model, a tokenizer.json or a GGUF file, or the header of a
            GGUF file.
        llama_3_0: Use the special tokens of the first release; a tokenizer.model names none.
        vocab_size: The rows of the model; None for as many as the tokens need.
        config_folder: A folder with Hugging Face's configuration files, which are read after those
            alongside a tokenizer.json.

    Raises:
        OSError: A file cannot be read.
        ValueError: A file is damaged, is the tokenizer of another family, or belongs to another
            model.
    """
    parsed = parse(given, "3.0" if llama_3_0 else "3.1")
    check_ranks(parsed.path, parsed.ranks)
    is_read = config_folder == parsed.path.parent and not parsed.is_whole
    if config_folder is not None and not is_read:
        parsed.read_settings(config_folder)
    num_rows = _fit(parsed, vocab_size)
    special_tokens = _with_fillers(parsed, num_rows)
    ids = set(special_tokens.values())
    roles: dict[str, int] = {}
    for role, token in parsed.roles:
        token_id = special_tokens.get(token) if isinstance(token, str) else token
        if token_id in ids:
            roles.setdefault(role, token_id)
    stop_ids = set()
    for source, token in parsed.stops:
        token_id = special_tokens.get(token) if isinstance(token, str) else token
        if token_id in ids:
            stop_ids.add(token_id)
        else:
            _log(f"{source} is {token!r}, which is no special token of this model: it is ignored")
    hidden_ids = ids.copy()
    for name, added in parsed.added.items():
        if name in _MARKS or not (added.special or added.id in roles.values()):
            hidden_ids.discard(added.id)
    return Vocabulary(
        path=parsed.path,
        ranks=parsed.ranks,
        added=parsed.added,
        special_tokens=special_tokens,
        num_rows=num_rows,
        hidden_ids=frozenset(hidden_ids),
        roles=roles,
        stop_ids=frozenset(stop_ids),
    )


def _fit(parsed: Parsed, vocab_size: int | None) -> int:
    """Return the rows of the model, after tokens beyond them have been left out.

    Raises:
        ValueError: The tokenizer belongs to another model.
    """
    num_words = len(parsed.ranks)
    num_tokens = parsed.last_id + 1
    if vocab_size is None:
        if num_tokens > num_words + _MAX_ADDED:
            raise ValueError(
                f"{parsed.path}: a token has the id {parsed.last_id}, far beyond the {num_words} "
                "words of the vocabulary: give it the next free id"
            )
        return num_tokens
    too_few = num_tokens + (0 if parsed.is_whole else _MAX_PADDING) < vocab_size
    too_many = vocab_size < (num_tokens if parsed.is_whole else parsed.last_word + 1)
    if too_few or too_many:
        raise ValueError(
            f"{parsed.path} has {num_tokens} tokens, but the model has vocab_size={vocab_size}: "
            "they do not belong together"
        )
    beyond = [name for token_id, name in parsed.names.items() if token_id >= vocab_size]
    for name in beyond:
        token_id = parsed.remove(name)
        if (name, token_id) != (IMAGE, vocab_size):  # That one stands for images in prompts.
            _log(
                f"{parsed.path}: {name!r} has the id {token_id}, but the model has "
                f"{vocab_size} rows: the token is left out"
            )
    return vocab_size


def _with_fillers(parsed: Parsed, num_rows: int) -> dict[str, int]:
    """Return the ids of the added tokens by name, and of fillers for ids without a token."""
    names = dict(parsed.names)
    for token_id in sorted(set(range(num_rows)).difference(parsed.ranks.values())):
        filler = f"<|unused_{token_id}|>"
        while filler in parsed.added:
            filler = f"<{filler}>"
        names.setdefault(token_id, filler)
    return {names[token_id]: token_id for token_id in sorted(names)}


def _log(message: str) -> None:
    """Log a warning, once for all ranks."""
    if torchrun_number("RANK") == 0:
        _LOGGER.warning(message)
