"""Text to ids and back: Llama 3's tokenizer and its chat format.

Every mistake in a file or a dialog is an error that names the place and the remedy; that is a third
of this file. Nothing here knows of models, devices or tensors.
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

from llama.checkpoint.downloads import read_small, shown
from llama.checkpoint.gguf import Header, is_gguf, read_header
from llama.checks import brief

Role = Literal["system", "user", "assistant", "ipython", "tool"]


class Message(TypedDict):
    """One turn of a dialog."""

    role: Role
    content: str


Dialog = Sequence[Message]

# tiktoken's Rust core fails on very long texts, and its regex on very long runs. Where we cut is
# part of the tokenizer's definition: cut elsewhere, and long texts get other ids.
MAX_ENCODE_CHARS = 400_000
MAX_RUN_CHARS = 25_000

_BEGIN, _END, _EOT = "<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"
_START_HEADER, _END_HEADER = "<|start_header_id|>", "<|end_header_id|>"
_EOM, _PYTHON_TAG = "<|eom_id|>", "<|python_tag|>"
# The first special tokens of each release, in the order of their ids; None is the next reserved
# one, and reserved ones fill up to 256.
_FIRST = {
    "3.0": (_BEGIN, _END, None, None, None, None, _START_HEADER, _END_HEADER, None, _EOT),
    "3.1": (_BEGIN, _END, None, None, "<|finetune_right_pad_id|>", "<|step_id|>", _START_HEADER,
            _END_HEADER, _EOM, _EOT, _PYTHON_TAG, "<|image|>"),
}  # fmt: skip
_GGUF_PRE = ("llama-bpe", "llama3", "llama-v3")  # what a GGUF file calls Llama 3's pattern
_NORMAL = 1  # the type of its tokens that are not special
_USED = (_BEGIN, _END, _START_HEADER, _END_HEADER, _EOT, _EOM, _PYTHON_TAG)  # by the runtime


class Tokenizer:
    """Byte-pair encoding with Llama 3's pattern and special tokens.

    Reads `tokenizer.model` (a line for each token: base64, rank), Hugging Face's `tokenizer.json`,
    or a GGUF file; the special tokens of these two keep the names that they have there. Special ids
    follow the ranks, however many there are. `llama_3_0` takes the special tokens of the first
    release, which had no `<|eom_id|>` and no `<|python_tag|>`. Raises OSError where the file cannot
    be read, ValueError where it is not a sound Llama 3 tokenizer, or of the other release.
    """

    num_reserved_special_tokens = 256
    pat_str = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|"  # English contractions
        r"[^\r\n\p{L}\p{N}]?\p{L}+|"  # a word and the one character before it
        r"\p{N}{1,3}|"  # digits by threes
        r" ?[^\s\p{L}\p{N}]+[\r\n]*|"  # punctuation and the newlines after it
        r"\s*[\r\n]+|"
        r"\s+(?!\S)|"  # spaces, but the last one goes with the next word
        r"\s+"
    )

    def __init__(self, model_path: str | PathLike[str], *, llama_3_0: bool = False) -> None:
        path, release = Path(model_path), "3.0" if llama_3_0 else "3.1"
        ranks, names = _parse(path, model_path)
        if names is None:
            reserved = (f"<|reserved_special_token_{i}|>" for i in count())
            padding = [None] * (self.num_reserved_special_tokens - len(_FIRST[release]))
            names = [name or next(reserved) for name in [*_FIRST[release], *padding]]
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
        self.pad_id = -1  # no id at all: the reference's value
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
        """Encode `s`, with begin_of_text before it (`bos`) and end_of_text after it (`eos`).

        A special token's name in the text becomes its id only if `allowed_special` holds it, is a
        ValueError if `disallowed_special` holds it, and is plain text otherwise.
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
        """Decode ids, or one; what is no UTF-8 becomes U+FFFD. Raises as `decode_bytes` does."""
        many = [ids] if isinstance(ids, int) else ids
        data = self.decode_bytes(many, skip_special_tokens=skip_special_tokens)
        return data.decode("utf-8", errors="replace")

    def decode_bytes(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> bytes:
        """Decode `ids` to bytes, which may end inside a character; ValueError for an unknown id."""
        for i in ids:
            if not 0 <= i < self.n_words:
                raise ValueError(f"id {i} is not in the vocabulary: ids are 0..{self.n_words - 1}")
        if skip_special_tokens:
            first_special = self.n_words - len(self.special_tokens)
            ids = [i for i in ids if i < first_special]
        return self.model.decode_bytes(ids)


def _split_long_runs(s: str, limit: int) -> Iterator[str]:
    """Cut `s` so that no piece holds a run of over `limit` whitespace or other characters: with
    limit 3, "ab cdefghij" becomes "ab cde", "fgh", "ij"."""
    # The lookbehinds let a match begin only where a run does; else the search would be quadratic.
    long_run = rf"(?<!\S)\S{{{limit + 1},}}|(?<!\s)\s{{{limit + 1},}}"
    start = 0
    for run in re.finditer(long_run, s):
        for cut in range(run.start() + limit, run.end(), limit):
            yield s[start:cut]
            start = cut
    yield s[start:]


def _check_special_names(path: Path, names: list[str], release: str) -> None:
    """Hold a file's special tokens to the release; reserved ones may have other numbers."""
    found, wanted = ({name: i for i, name in enumerate(x)} for x in (names, _FIRST[release]))
    wrong = [name for name in _USED if found.get(name) != wanted.get(name)]
    if wrong:
        other = "3.0" if release == "3.1" else "3.1"
        raise ValueError(
            f"{path}: {', '.join(wrong)} not as in Llama {release}: pass llama_3_0="
            f"{other == '3.0'} if the file is of Llama {other}; else it is no Llama 3 tokenizer"
        )


def _parse(path: Path, given: object) -> tuple[dict[bytes, int], list[str] | None]:
    """A file's ranks, and the names of its special tokens in the order of ids, if it has them."""
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
    """Parse tiktoken's format: a line for each token, base64 and rank."""
    if data[:1] == data[2:3] == b"\n":  # protobuf: field 1, length, field 1
        remedy = "give Llama 3's tokenizer.model"
        raise ValueError(f"{path} is a SentencePiece tokenizer, as Llama 2 has: {remedy}")
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
    """Return a tokenizer.json's ranks, and the names of its added tokens in the order of ids."""
    byte_of = byte_alphabet()
    try:
        content: Any = json.loads(data)
        vocab = dict(content["model"]["vocab"])
        ranks = {bytes([byte_of[c] for c in token]): rank for token, rank in vocab.items()}
        added = {token["id"]: token["content"] for token in content["added_tokens"]}
        kinds = {*map(type, [*ranks.values(), *added])}, {*map(type, added.values())}
        if kinds != ({int}, {str}):
            raise TypeError("a rank or an id is no whole number, or a name no text")
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
    """Return a GGUF file's ranks, which are the ids of its tokens, and its special names."""
    path, metadata, byte_of = header.file, header.metadata, byte_alphabet()
    keys = ("model", "pre", "tokens", "token_type", "merges")
    model, pre, tokens, types, merges = (metadata.get(f"tokenizer.ggml.{key}") for key in keys)
    if model != "gpt2" or pre not in _GGUF_PRE or not tokens:
        raise ValueError(
            f"{path} has no tokenizer of Llama 3 (tokenizer.ggml.model is {brief(model)}, .pre is "
            f"{brief(pre)}): give tokenizer_path, such as a tokenizer.model"
        )
    try:
        added = {i: tokens[i] for i, kind in enumerate(types or ()) if kind != _NORMAL}
        normal = {token: i for i, token in enumerate(tokens) if i not in added}
        ranks = {bytes([byte_of[c] for c in token]): i for token, i in normal.items()}
        made = [normal[merge.replace(" ", "", 1)] for merge in merges or ()]
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise ValueError(
            f"{path} is not the file of a byte-level BPE ({type(error).__name__}: "
            f"{brief(str(error))}): download it again"
        ) from None
    if made != sorted(made):
        raise ValueError(f"{path}: its merges are not in the order of ids: no Llama 3 tokenizer")
    metadata.pop(f"tokenizer.ggml.{keys[-1]}", None)  # 280,000 strings, for which nobody asks again
    return ranks, _added_names(path, ranks, added)


def byte_alphabet() -> dict[str, int]:
    """Map byte-level BPE's 256 printable characters to the bytes they stand for (GPT-2's table):
    printable Latin-1 to itself, and U+0100, U+0101, ... to the other bytes in order."""
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
    """Dialogs as Llama 3 was trained on them. No text can open a header or end a turn."""

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
        """The messages after `<|begin_of_text|>`, then a header for the assistant to go on from."""
        validate_dialog(dialog)
        ids = [self.tokenizer.bos_id]
        for message in dialog:
            ids += self.encode_message(message)
        return ids + self.encode_header({"role": "assistant", "content": ""})


def validate_dialog(dialog: object) -> None:
    """TypeError or ValueError, naming the place, unless `dialog` is one that we can encode."""
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
