"""Llama 3's tokenizer and its chat format.

In: a tokenizer file, and texts or dialogs. Out: token ids, and texts again. Each fault of a file or
a dialog is an error that names where it is and the remedy. Nothing here knows models, devices or
tensors.
"""

import binascii
import json
import re
from collections.abc import Collection, Iterator, Sequence
from collections.abc import Set as AbstractSet
from itertools import count
from os import PathLike
from pathlib import Path
from typing import Any, Literal, TypedDict, get_args

import tiktoken

from llama.checks import brief
from llama.storage.downloads import read_small, shown
from llama.storage.gguf import Header, is_gguf, read_header

Role = Literal["system", "user", "assistant", "ipython", "tool"]


class Message(TypedDict):
    """One turn of a dialog."""

    role: Role
    content: str


Dialog = Sequence[Message]

# tiktoken's Rust core fails on very long texts, and its regex on very long runs. Where a text is
# cut is part of the tokenizer's definition: cut elsewhere, a long text has other ids.
MAX_ENCODE_CHARS = 400_000
MAX_RUN_CHARS = 25_000

_BEGIN = "<|begin_of_text|>"
_END = "<|end_of_text|>"
_EOT = "<|eot_id|>"
_START_HEADER = "<|start_header_id|>"
_END_HEADER = "<|end_header_id|>"
_EOM = "<|eom_id|>"
_PYTHON_TAG = "<|python_tag|>"
# The first special tokens of each release, in the order of their ids. None stands for the next
# reserved token, and further reserved tokens follow, up to 256 in all.
_FIRST_SPECIAL = {
    "3.0": (_BEGIN, _END, None, None, None, None, _START_HEADER, _END_HEADER, None, _EOT),
    "3.1": (
        _BEGIN,
        _END,
        None,
        None,
        "<|finetune_right_pad_id|>",
        "<|step_id|>",
        _START_HEADER,
        _END_HEADER,
        _EOM,
        _EOT,
        _PYTHON_TAG,
        "<|image|>",
    ),
}
_GGUF_PRE = ("llama-bpe", "llama3", "llama-v3")  # names of Llama 3's pattern in GGUF files
_NORMAL = 1  # the type of normal tokens in GGUF files
# The special tokens that the runtime needs.
_REQUIRED = (_BEGIN, _END, _START_HEADER, _END_HEADER, _EOT, _EOM, _PYTHON_TAG)


class Tokenizer:
    """Byte-pair encoding with Llama 3's pattern and special tokens.

    The ids of the special tokens follow the ranks, whatever their number is.

    Args:
        model_path: a `tokenizer.model` (one line per token: base64 and rank), Hugging Face's
            `tokenizer.json` or a GGUF file. The latter two name their special tokens.
        llama_3_0: use the special tokens of the first release, which had neither `<|eom_id|>` nor
            `<|python_tag|>`.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is no valid Llama 3 tokenizer, or belongs to the other release.
    """

    num_reserved_special_tokens = 256
    pat_str = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|"  # English contractions
        r"[^\r\n\p{L}\p{N}]?\p{L}+|"  # a word, and one character before it
        r"\p{N}{1,3}|"  # up to three digits
        r" ?[^\s\p{L}\p{N}]+[\r\n]*|"  # punctuation, and newlines after it
        r"\s*[\r\n]+|"
        r"\s+(?!\S)|"  # spaces, except for the last one before a word
        r"\s+"
    )

    def __init__(self, model_path: str | PathLike[str], *, llama_3_0: bool = False) -> None:
        path = Path(model_path)
        release = "3.0" if llama_3_0 else "3.1"
        ranks, names = _parse(path, model_path)
        if names is None:
            first = _FIRST_SPECIAL[release]
            reserved = (f"<|reserved_special_token_{i}|>" for i in count())
            padding = [None] * (self.num_reserved_special_tokens - len(first))
            names = [name or next(reserved) for name in [*first, *padding]]
        else:
            _check_special_names(path, names, release)
        _check_ranks(path, ranks)
        self.special_tokens = {name: len(ranks) + i for i, name in enumerate(names)}
        self.model = tiktoken.Encoding(
            path.name,
            pat_str=self.pat_str,
            mergeable_ranks=ranks,
            special_tokens=self.special_tokens,
        )
        self.n_words = len(ranks) + len(names)
        self.bos_id = self.special_tokens[_BEGIN]
        self.eos_id = self.special_tokens[_END]
        self.eot_id = self.special_tokens[_EOT]
        self.eom_id = self.special_tokens.get(_EOM)
        self.python_tag_id = self.special_tokens.get(_PYTHON_TAG)
        self.pad_id = -1  # not a token id; the value of Meta's package
        self.stop_tokens = {self.eos_id, self.eot_id}
        if self.eom_id is not None:
            self.stop_tokens.add(self.eom_id)

    def encode(
        self,
        s: str,
        *,
        bos: bool,
        eos: bool,
        allowed_special: Literal["all"] | AbstractSet[str] | None = None,
        disallowed_special: Literal["all"] | Collection[str] = (),
    ) -> list[int]:
        """Encode a text.

        Args:
            s: the text.
            bos: put begin_of_text before it.
            eos: put end_of_text after it.
            allowed_special: names of special tokens that become their ids if the text has them.
            disallowed_special: names of special tokens that are a ValueError if the text has them.
                All other names are encoded as plain text.
        """
        if not isinstance(s, str):
            raise TypeError(f"the text to encode must be a str, got {type(s).__name__}: {s!r:.60}")
        ids = [self.bos_id] if bos else []
        for start in range(0, len(s), MAX_ENCODE_CHARS):
            for piece in _split_long_runs(s[start : start + MAX_ENCODE_CHARS], MAX_RUN_CHARS):
                ids += self.model.encode(
                    piece,
                    allowed_special=allowed_special or set(),
                    disallowed_special=disallowed_special,
                )
        if eos:
            ids.append(self.eos_id)
        return ids

    def decode(self, ids: Sequence[int] | int, *, skip_special_tokens: bool = False) -> str:
        """Decode one or more ids; bytes that are no UTF-8 become U+FFFD.

        Raises:
            ValueError: an id is not in the vocabulary.
        """
        ids = [ids] if isinstance(ids, int) else ids
        data = self.decode_bytes(ids, skip_special_tokens=skip_special_tokens)
        return data.decode("utf-8", errors="replace")

    def decode_bytes(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> bytes:
        """Decode ids to bytes, which may end inside of a character.

        Raises:
            ValueError: an id is not in the vocabulary.
        """
        for i in ids:
            if not 0 <= i < self.n_words:
                raise ValueError(f"id {i} is not in the vocabulary: ids are 0..{self.n_words - 1}")
        if skip_special_tokens:
            first_special = self.n_words - len(self.special_tokens)
            ids = [i for i in ids if i < first_special]
        return self.model.decode_bytes(ids)


def _split_long_runs(s: str, limit: int) -> Iterator[str]:
    """Cut a text so that no piece has a run of more than `limit` spaces or other characters.

    With limit 3, "ab cdefghij" becomes "ab cde", "fgh", "ij".
    """
    # A match begins at the beginning of a run only, as the search would be quadratic otherwise.
    long_run = rf"(?<!\S)\S{{{limit + 1},}}|(?<!\s)\s{{{limit + 1},}}"
    start = 0
    for run in re.finditer(long_run, s):
        for cut in range(run.start() + limit, run.end(), limit):
            yield s[start:cut]
            start = cut
    yield s[start:]


def _check_special_names(path: Path, names: list[str], release: str) -> None:
    """Compare the special tokens of a file with those of the release, except for reserved ones."""
    given = {name: i for i, name in enumerate(names)}
    expected = {name: i for i, name in enumerate(_FIRST_SPECIAL[release])}
    wrong = [name for name in _REQUIRED if given.get(name) != expected.get(name)]
    if wrong:
        other = "3.0" if release == "3.1" else "3.1"
        raise ValueError(
            f"{path}: {', '.join(wrong)} not as in Llama {release}: pass llama_3_0="
            f"{other == '3.0'} if the file is of Llama {other}; else it is no Llama 3 tokenizer"
        )


def _parse(path: Path, given: object) -> tuple[dict[bytes, int], list[str] | None]:
    """Return the ranks of a file, and the names of its special tokens by id, if it has them."""
    if isinstance(given, Header) or is_gguf(path):
        return _parse_gguf(given if isinstance(given, Header) else read_header(path))
    if not path.exists():
        remedy = "give the path of Llama 3's tokenizer"
        raise FileNotFoundError(f"no tokenizer at {shown(path)}: {remedy}")
    data = read_small(path)
    if path.suffix == ".json" or data.startswith(b"{"):
        return _parse_tokenizer_json(path, data)
    return _parse_ranks(path, data), None


def _parse_ranks(path: Path, data: bytes) -> dict[bytes, int]:
    """Parse tiktoken's format: one line per token, with base64 and rank."""
    if data[:1] == data[2:3] == b"\n":  # protobuf: field 1, length, field 1
        remedy = "give Llama 3's tokenizer.model"
        raise ValueError(f"{path} is a SentencePiece tokenizer, like that of Llama 2: {remedy}")
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(data.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            text, rank = line.split()
            token = binascii.a2b_base64(text, strict_mode=True)
            if token in ranks:
                raise ValueError("this token was given before")
            ranks[token] = int(rank)
        except ValueError as error:
            raise ValueError(
                f"{path}, line {number}: expected a base64 token and its rank, got {line[:60]!r}"
                f" ({error}): download the file again"
            ) from None
    return ranks


def _parse_tokenizer_json(path: Path, data: bytes) -> tuple[dict[bytes, int], list[str]]:
    """Return the ranks of a tokenizer.json, and the names of its added tokens by id."""
    byte_of = byte_alphabet()
    try:
        content: Any = json.loads(data)
        vocab = dict(content["model"]["vocab"])
        ranks = {bytes([byte_of[c] for c in token]): rank for token, rank in vocab.items()}
        added = {token["id"]: token["content"] for token in content["added_tokens"]}
        number_types = {type(number) for number in [*ranks.values(), *added]}
        name_types = {type(name) for name in added.values()}
        if number_types != {int} or name_types != {str}:
            raise TypeError("a rank or an id is no whole number, or a name is no text")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(
            f"{path} is not the tokenizer.json of a byte-level BPE ({type(error).__name__}:"
            f" {error}): download it again"
        ) from None
    return ranks, _added_names(path, ranks, added)


def _added_names(path: Path, ranks: dict[bytes, int], added: dict[int, str]) -> list[str]:
    ids = sorted(added)
    if ids != list(range(len(ranks), len(ranks) + len(ids))):
        raise ValueError(
            f"{path}: the added tokens' ids must be {len(ranks)} and up without a gap, after the"
            f" vocabulary's; got {ids[:5]} ... {ids[-1:]}: not a Llama 3 tokenizer"
        )
    return [added[i] for i in ids]


def _parse_gguf(header: Header) -> tuple[dict[bytes, int], list[str]]:
    """Return the ranks of a GGUF file, which are the ids of its tokens, and its special tokens."""
    path = header.file
    metadata = header.metadata
    byte_of = byte_alphabet()
    keys = ("model", "pre", "tokens", "token_type", "merges")
    model, pre, tokens, types, merges = (metadata.get(f"tokenizer.ggml.{key}") for key in keys)
    if model != "gpt2" or pre not in _GGUF_PRE or not tokens:
        raise ValueError(
            f"{path} has no tokenizer of Llama 3 (tokenizer.ggml.model is {brief(model)}, .pre is "
            f"{brief(pre)}): give tokenizer_path, such as a tokenizer.model"
        )
    try:
        added = {i: tokens[i] for i, token_type in enumerate(types or ()) if token_type != _NORMAL}
        normal = {token: i for i, token in enumerate(tokens) if i not in added}
        ranks = {bytes([byte_of[c] for c in token]): i for token, i in normal.items()}
        merged_ids = [normal[merge.replace(" ", "", 1)] for merge in merges or ()]
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise ValueError(
            f"{path} is not the file of a byte-level BPE ({type(error).__name__}: "
            f"{brief(str(error))}): download it again"
        ) from None
    if merged_ids != sorted(merged_ids):
        raise ValueError(f"{path}: its merges are not in the order of ids: no Llama 3 tokenizer")
    metadata.pop("tokenizer.ggml.merges", None)  # 280,000 strings that are not needed again
    return ranks, _added_names(path, ranks, added)


def byte_alphabet() -> dict[str, int]:
    """Return GPT-2's table of the 256 characters of byte-level BPE, and the byte of each.

    Printable Latin-1 characters stand for themselves, and U+0100, U+0101, ... for the other bytes
    in order.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


def _check_ranks(path: Path, ranks: dict[bytes, int]) -> None:
    for expected, rank in enumerate(sorted(ranks.values())):
        if rank != expected:
            raise ValueError(
                f"{path}: ranks must be 0..{len(ranks) - 1}, each once; found {rank} where"
                f" {expected} was expected: download the file again"
            )
    missing = [b for b in range(256) if bytes([b]) not in ranks]
    if missing:
        raise ValueError(
            f"{path}: {len(missing)} of the 256 single-byte tokens are missing, the first"
            f" {missing[0]:#04x}, so not every text can be encoded: download the file again"
        )


class ChatFormat:
    """The format of dialogs that Llama 3 was trained on.

    No text of a message can open a header or end a turn.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def encode_header(self, message: Message) -> list[int]:
        """Encode `<|start_header_id|>role<|end_header_id|>` and two newlines."""
        role = _check_role(message.get("role"), "message")
        special = self.tokenizer.special_tokens
        return [
            special[_START_HEADER],
            *self.tokenizer.encode("ipython" if role == "tool" else role, bos=False, eos=False),
            special[_END_HEADER],
            *self.tokenizer.encode("\n\n", bos=False, eos=False),
        ]

    def encode_message(self, message: Message) -> list[int]:
        """Encode a header, the content without surrounding whitespace, and `<|eot_id|>`."""
        _validate_message(message, "message")
        content = self.tokenizer.encode(message["content"].strip(), bos=False, eos=False)
        return [*self.encode_header(message), *content, self.tokenizer.eot_id]

    def encode_dialog_prompt(self, dialog: Dialog) -> list[int]:
        """Encode `<|begin_of_text|>`, the messages, and a header for the assistant's answer."""
        validate_dialog(dialog)
        ids = [self.tokenizer.bos_id]
        for message in dialog:
            ids += self.encode_message(message)
        return ids + self.encode_header({"role": "assistant", "content": ""})


def validate_dialog(dialog: object) -> None:
    """Raise a TypeError or ValueError that names the message if a dialog cannot be encoded."""
    if not isinstance(dialog, list | tuple):
        raise TypeError(f"dialog must be a list of messages, got {type(dialog).__name__}")
    if not dialog:
        raise ValueError("dialog is empty: give at least one message")
    for i, message in enumerate(dialog):
        _validate_message(message, f"dialog, message {i}")


def _validate_message(message: object, where: str) -> None:
    if not isinstance(message, dict):
        raise TypeError(f"{where} must be a dict of role and content, got {type(message).__name__}")
    for key in ("role", "content"):
        if key not in message:
            raise ValueError(f"{where} has no {key!r}: a message has a role and a content")
    if unknown := [key for key in message if key not in ("role", "content")]:
        raise ValueError(f"{where} has unknown keys {unknown}: allowed are role and content")
    _check_role(message["role"], where)
    content = message["content"]
    if not isinstance(content, str):
        raise TypeError(f"{where}: content must be a str, got {type(content).__name__}")


def _check_role(role: object, where: str) -> str:
    if not isinstance(role, str) or role not in get_args(Role):
        raise ValueError(f"{where}: unknown role {role!r}: allowed are {', '.join(get_args(Role))}")
    return role
