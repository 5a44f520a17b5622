"""Llama 3's tokenizer and its chat format.

In: a tokenizer file, and texts or dialogs. Out: token ids, and texts again. Each fault of a file or
a dialog is an error that names where it is and the remedy. Nothing here knows models, devices or
tensors.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Literal, TypedDict, get_args

import tiktoken

from llama.common.checks import errors_in_file
from llama.storage.gguf import Header
from llama.storage.token_files import (
    BEGIN,
    END,
    END_HEADER,
    EOM,
    EOT,
    IMAGE,
    NUM_RESERVED,
    PATTERN,
    PYTHON_TAG,
    START_HEADER,
)
from llama.storage.vocabulary import read_vocabulary

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


@dataclass(frozen=True)
class TokenizerSource:
    """The arguments that a tokenizer was made with, which another process can be sent.

    Attributes:
        path: the path of its file.
        llama_3_0: see `Tokenizer`, as all others.
        vocab_size: the rows of the model.
        config_folder: the folder of configuration files.
    """

    path: str
    llama_3_0: bool = False
    vocab_size: int | None = None
    config_folder: str | None = None

    def make(self) -> "Tokenizer":
        """Return the tokenizer."""
        return Tokenizer(
            self.path,
            llama_3_0=self.llama_3_0,
            vocab_size=self.vocab_size,
            config_folder=None if self.config_folder is None else Path(self.config_folder),
        )


class Tokenizer:
    """Byte-pair encoding with Llama 3's pattern, and the special tokens of one model.

    Args:
        model_path: a `tokenizer.model` (one line per token: base64 and rank), Hugging Face's
            `tokenizer.json`, or a GGUF file or its header. The latter three name their special
            tokens, whatever they are.
        llama_3_0: give a `tokenizer.model` the special tokens of the first release, which had
            neither `<|eom_id|>` nor `<|python_tag|>`.
        vocab_size: the rows of the model. Rows without a token get names such as `<|unused_7|>`,
            and tokens beyond the rows are left out.
        config_folder: a folder with Hugging Face's configuration files. Those alongside a
            `tokenizer.json` are read before them.

    Attributes:
        source: what it was made of.
        n_words: the number of ids.
        ranks: the ids of ordinary text by their bytes, in any places. Of two neighbours, those are
            merged first whose sum has the lowest id.
        bytes_of: the bytes of each token by its id, as `decode_bytes` gives them.
        added_tokens: the added tokens of the files by name.
        special_tokens: the ids of the added tokens and of rows without a token, by name.
        hidden_ids: the ids that decoding leaves out with `skip_special_tokens`. Marks of reasoning
            and of tool calls are not among them.
        roles: the ids of bos_token, eos_token and pad_token, as far as the files name them.
        stop_tokens: the ids that end an answer.
        bos_id: the id before a text.
        eos_id: the id after a text.
        eot_id: the id of Meta's `<|eot_id|>`, as `eom_id` and `python_tag_id` of theirs; None if
            the model has no such token.
        image_id: the id of an image in a prompt, after those of the vocabulary; None if the model
            reads text alone. Loading sets it.
        dialog_format: the format of its model's dialogs, for whoever has the tokenizer alone; a
            `Llama` sets it.

    Raises:
        OSError: a file cannot be read.
        ValueError: a file is damaged, is the tokenizer of another family, or belongs to another
            model.
    """

    num_reserved_special_tokens = NUM_RESERVED
    pat_str = PATTERN

    def __init__(
        self,
        model_path: str | PathLike[str] | Header,
        *,
        llama_3_0: bool = False,
        vocab_size: int | None = None,
        config_folder: Path | None = None,
    ) -> None:
        with errors_in_file(Path(model_path)):
            vocabulary = read_vocabulary(
                model_path, llama_3_0=llama_3_0, vocab_size=vocab_size, config_folder=config_folder
            )
        names = vocabulary.special_tokens
        self.source = TokenizerSource(
            str(Path(model_path)),
            llama_3_0,
            vocab_size,
            None if config_folder is None else str(config_folder),
        )
        self.added_tokens = vocabulary.added
        self.special_tokens = names
        self.hidden_ids = vocabulary.hidden_ids
        self.roles = vocabulary.roles
        self.ranks = vocabulary.ranks
        self.model = tiktoken.Encoding(
            vocabulary.path.name,
            pat_str=self.pat_str,
            mergeable_ranks=self.ranks,
            special_tokens=names,
        )
        self.n_words = vocabulary.num_rows
        self.bytes_of: Mapping[int, bytes] = _BytesOfTokens(self.model, self.n_words)
        self.eot_id = names.get(EOT)
        self.eom_id = names.get(EOM)
        self.python_tag_id = names.get(PYTHON_TAG)
        self.bos_id = self._id_of("bos_token", vocabulary.path, BEGIN)
        self.eos_id = self._id_of("eos_token", vocabulary.path, END)
        if self.eos_id in (self.eot_id, self.eom_id):
            # Meta's Instruct releases name the end of a turn, where Meta's own code names this one.
            self.eos_id = names.get(END, self.eos_id)
        self.dialog_format: object = None
        self.image_id: int | None = None
        self.pad_id = -1  # not a token id; the value of Meta's package
        ends = (self.eos_id, names.get(END), self.eot_id, self.eom_id)
        self.stop_tokens = {i for i in ends if i is not None} | vocabulary.stop_ids

    def _id_of(self, role: str, path: Path, metas_name: str) -> int:
        """Return the id of the token that the files give a role, or else of Meta's token for it."""
        token_id = self.roles.get(role, self.special_tokens.get(metas_name))
        if token_id is None:
            raise ValueError(
                f"{path} has no {metas_name}, and no file says which token is the {role}: put the "
                "model's tokenizer_config.json, which names it, alongside it"
            )
        return token_id

    def add_stop_tokens(self, ids: Iterable[int]) -> None:
        """Add tokens that end an answer, such as the one that a chat template writes after it.

        Requests and grammars that were prepared before do not learn of them.

        Raises:
            ValueError: An id is that of ordinary text.
        """
        new_ids = set(ids)
        ordinary = new_ids - set(self.special_tokens.values())
        if ordinary:
            raise ValueError(
                f"tokens {sorted(ordinary)} are ordinary text and cannot end an answer"
            )
        self.stop_tokens |= new_ids

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

    def encode_rendered(self, text: str) -> list[int]:
        """Encode a text in which special tokens are written, such as a rendered dialog.

        Every name of a special token becomes its id, whoever wrote it.

        Returns:
            The ids. They begin with one begin_of_text, whether or not the text does.
        """
        ids = self.encode(text, bos=False, eos=False, allowed_special="all")
        return ids if ids[:1] == [self.bos_id] else [self.bos_id, *ids]

    def special_start(self, text: str) -> str | None:
        """Return the name of a special token that a text begins with, after begin_of_text."""
        rest = text.removeprefix(self.decode(self.bos_id))
        return next((name for name in self.special_tokens if rest.startswith(name)), None)

    def encode_start(self, text: str, max_ids: int) -> list[int]:
        """Return the leading ids of a text, at most `max_ids`; most of the rest is not encoded."""
        ids: list[int] = []
        # A long text is cut at the same places as in `encode`, so the ids are those of the whole.
        for start in range(0, len(text), MAX_ENCODE_CHARS):
            if len(ids) >= max_ids:
                break
            ids += self.encode(text[start : start + MAX_ENCODE_CHARS], bos=False, eos=False)
        return ids[:max_ids]

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
        texts: list[list[int]] = [[]]  # between images, whose id the vocabulary does not have
        for i in ids:
            if i == self.image_id:
                texts.append([])
                continue
            _check_id(i, self.n_words)
            if not (skip_special_tokens and i in self.hidden_ids):
                texts[-1].append(i)
        image = b"" if skip_special_tokens else IMAGE.encode()
        return image.join(map(self.model.decode_bytes, texts))


class _BytesOfTokens(dict[int, bytes]):
    """The bytes of single tokens, each of which is decoded when it is first needed.

    tiktoken would release Python's lock for each token.
    """

    def __init__(self, model: tiktoken.Encoding, n_words: int) -> None:
        super().__init__()
        self._model = model
        self._n_words = n_words

    def __missing__(self, token: int) -> bytes:
        _check_id(token, self._n_words)
        data = self[token] = self._model.decode_bytes([token])
        return data


def _check_id(token: int, n_words: int) -> None:
    """Raise a ValueError for an id that is not in the vocabulary."""
    if not 0 <= token < n_words:
        raise ValueError(f"id {token} is not in the vocabulary: ids are 0..{n_words - 1}")


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


class ChatFormat:
    """The format of dialogs that Llama 3 was trained on.

    No text of a message can open a header or end a turn.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    @property
    def eot_id(self) -> int:
        """The token after a message."""
        return self._special(EOT)

    def _special(self, name: str) -> int:
        token_id = self.tokenizer.special_tokens.get(name)
        if token_id is None:
            raise ValueError(
                f"this tokenizer has no {name}: dialogs in Meta's format need that token, and this "
                "model was trained on another format. Complete text instead: text_completion, "
                "/v1/completions"
            )
        return token_id

    def encode_header(self, message: Message) -> list[int]:
        """Encode `<|start_header_id|>role<|end_header_id|>` and two newlines."""
        role = _check_role(message.get("role"), "message")
        special = self._special
        return [
            special(START_HEADER),
            *self.tokenizer.encode("ipython" if role == "tool" else role, bos=False, eos=False),
            special(END_HEADER),
            *self.tokenizer.encode("\n\n", bos=False, eos=False),
        ]

    def encode_message(self, message: Message) -> list[int]:
        """Encode a header, the content without surrounding whitespace, and `<|eot_id|>`."""
        _validate_message(message, "message")
        content = self.tokenizer.encode(message["content"].strip(), bos=False, eos=False)
        return [*self.encode_header(message), *content, self.eot_id]

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
