"""Tokenizer files of Llama 3: the ranks of BPE tokens, added tokens, and settings of special ones.

In: a tokenizer.model, a tokenizer.json with the configuration files alongside it, or a GGUF file.
Out: what the file holds, if pattern and byte alphabet are those of Llama 3. Names and ids of added
tokens are data. Each fault is an error that names the file and the remedy. The sizes of models are
not known here. The file has over 400 lines because the formats share the checks of one vocabulary.
"""

import binascii
import logging
from collections.abc import Container, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count, pairwise
from math import inf
from os import PathLike
from pathlib import Path
from typing import Any

from llama.common.checks import FieldPathError, brief
from llama.storage.downloads import AGAIN, parse_json, read_json, read_small, shown
from llama.storage.further_tokens import FurtherToken, further_tokens
from llama.storage.gguf import Header, is_gguf, read_header

_LOGGER = logging.getLogger(__name__)

PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|"  # English contractions
    r"[^\r\n\p{L}\p{N}]?\p{L}+|"  # a word, and one character before it
    r"\p{N}{1,3}|"  # up to three digits
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|"  # punctuation, and newlines after it
    r"\s*[\r\n]+|"
    r"\s+(?!\S)|"  # spaces, except for the last one before a word
    r"\s+"
)
BEGIN = "<|begin_of_text|>"
END = "<|end_of_text|>"
EOT = "<|eot_id|>"
EOM = "<|eom_id|>"
START_HEADER = "<|start_header_id|>"
END_HEADER = "<|end_header_id|>"
PYTHON_TAG = "<|python_tag|>"
IMAGE = "<|image|>"
NUM_RESERVED = 256  # special tokens of Meta's vocabularies
# The first special tokens of each release, in the order of their ids. None stands for the next
# reserved token, and further reserved tokens follow, up to 256 in all.
_FIRST_SPECIAL = {
    "3.0": (BEGIN, END, None, None, None, None, START_HEADER, END_HEADER, None, EOT),
    "3.1": (
        BEGIN,
        END,
        None,
        None,
        "<|finetune_right_pad_id|>",
        "<|step_id|>",
        START_HEADER,
        END_HEADER,
        EOM,
        EOT,
        PYTHON_TAG,
        IMAGE,
    ),
}
_GGUF_PRE = ("llama-bpe", "llama3", "llama-v3", "smaug-bpe")  # names of Llama 3's pattern
# Types of tokens in GGUF files.
_NORMAL = 1
_USER_DEFINED = 4
_UNUSED = 5

# Families by a part of their patterns; the first part that a pattern contains counts.
_FAMILY_OF_PATTERN = {
    r"\p{Han}": "Kimi",
    r"一-龥": "DeepSeek V3",
    r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}": "GPT-4o or Llama 4",
    r"?\p{L}+|\p{N}| ?[^\s": "Qwen 2",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+": "GPT-2",
}
_FAMILY_OF_TYPE = {"Unigram": "T5 (SentencePiece)", "WordPiece": "BERT"}
# The keys of GGUF files by the role of a token.
_GGUF_ROLES = {
    "bos_token": "bos",
    "eos_token": "eos",
    "pad_token": "padding",
    "eot_token": "eot",
    "eom_token": "eom",
}
_GGUF_STOPS = ("eos_token", "eot_token", "eom_token")
# Names come before ids, and what generates before what trains.
_CONFIG_FILES = ("tokenizer_config.json", "generation_config.json", "config.json")
_ROLES = ("bos_token", "eos_token", "pad_token")
_CHECKED_MERGES = 3000  # Of a vocabulary in the order of a tokenizer.model.
_Merge = str | list[str]
_REMEDY = "this runtime runs models with the vocabulary of Llama 3"


@dataclass(frozen=True)
class AddedToken:
    """A token that is no result of BPE, and that stands in no user's text.

    Attributes:
        id: Its id.
        lstrip: Whether it takes the white space before it in a chat template's text.
        rstrip: Whether it takes the white space after it.
        special: Whether Hugging Face's decoders leave it out with skip_special_tokens.
    """

    id: int
    lstrip: bool = False
    rstrip: bool = False
    special: bool = True


@dataclass
class Parsed:
    """The content of the files, before it is compared with the rows of a model.

    A token of a setting is given by its id or its name.

    Attributes:
        path: The tokenizer file.
        ranks: The id of each BPE token, in any places. Tokens that merge first have the lower ids.
        added: The added tokens by name.
        names: The names of the added tokens by id.
        is_whole: Whether the model must have exactly these tokens, as with a tokenizer.model.
        roles: Roles and tokens; the first token of a role that is in the vocabulary counts.
        stops: Where a token that ends answers is named, and the token.
    """

    path: Path
    ranks: dict[bytes, int]
    added: dict[str, AddedToken] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    is_whole: bool = False
    roles: list[tuple[str, int | str]] = field(default_factory=list)
    stops: list[tuple[str, int | str]] = field(default_factory=list)

    @cached_property
    def last_word(self) -> int:
        """The highest id of a BPE token; -1 if there are none."""
        return max(self.ranks.values(), default=-1)

    @property
    def last_id(self) -> int:
        """The highest id of a token."""
        return max(self.last_word, *self.names, -1)

    def add(self, name: str, token: AddedToken) -> None:
        """Add a token, unless it has no name, or another one has the same name or id."""
        if name and name not in self.added and token.id not in self.names:
            self.added[name] = token
            self.names[token.id] = name

    def remove(self, name: str) -> int:
        """Remove a token, and return its id."""
        token_id = self.added.pop(name).id
        del self.names[token_id]
        return token_id

    def add_further(self, further: FurtherToken) -> None:
        """Add a token of another file, or change the flags of the one with its name.

        As in transformers the token gets the next free id, whatever the file says.
        """
        known = self.added.get(further.name)
        if known is not None:
            flags = {**further.flags, "special": further.flags.get("special") or known.special}
            self.added[further.name] = replace(known, **flags)
            return
        free_id = self.last_id + 1
        self.add(further.name, AddedToken(free_id, **{"special": False, **further.flags}))
        if further.id not in (None, free_id):
            _LOGGER.warning(
                "%s: %r has the id %d there and %d here, the next after those of tokenizer.json",
                further.path,
                further.name,
                further.id,
                free_id,
            )

    def read_settings(self, folder: Path) -> None:
        """Read which tokens begin and end texts from Hugging Face's files in a folder."""
        for file_name in _CONFIG_FILES:
            path = folder / file_name
            if not path.is_file():
                continue
            content = read_json(path)
            for role in _ROLES:
                for key in (role, f"{role}_id"):
                    for token in _tokens(path, key, content.get(key)):
                        self.roles.append((role, token))
                        if role == "eos_token":
                            self.stops.append((f"{path}: {key}", token))


def _tokens(path: Path, key: str, value: Any) -> list[int | str]:
    """Return the tokens that a setting names: one, several or none."""
    tokens = value if isinstance(value, list) else [] if value is None else [value]
    if not key.endswith("_id"):  # a name, or an object with name and flags
        tokens = [token.get("content") if isinstance(token, dict) else token for token in tokens]
    expected = int if key.endswith("_id") else str
    if any(type(token) is not expected for token in tokens):
        raise ValueError(
            f"{path}: {key} must be {'an id or a list of ids' if expected is int else 'a name'}, "
            f"not {brief(value)}"
        )
    return tokens


def parse(given: str | PathLike[str] | Header, release: str) -> Parsed:
    """Return what a tokenizer file, and the configuration alongside a tokenizer.json, hold.

    Args:
        given: The path of the file, or the header of a GGUF file.
        release: "3.0" or "3.1", whose special tokens a tokenizer.model has; it names none.

    Raises:
        OSError: A file cannot be read.
        ValueError: A file is damaged, or is the tokenizer of another family.
    """
    if isinstance(given, Header):
        return _parse_gguf(given)
    path = Path(given)
    if is_gguf(path):
        return _parse_gguf(read_header(path))
    if not path.exists():
        remedy = "give the path of Llama 3's tokenizer"
        raise FieldPathError("tokenizer_path", f"no tokenizer at {shown(path)}: {remedy}")
    data = read_small(path)
    if path.suffix == ".json" or data.startswith(b"{"):
        return _parse_tokenizer_json(path, data)
    ranks = _parse_ranks(path, data)
    first = _FIRST_SPECIAL[release]
    reserved = (f"<|reserved_special_token_{i}|>" for i in count())
    padding = [None] * (NUM_RESERVED - len(first))
    names = [name or next(reserved) for name in [*first, *padding]]
    parsed = Parsed(path, ranks, is_whole=True)
    for token_id, name in enumerate(names, start=len(ranks)):
        parsed.add(name, AddedToken(token_id))
    return parsed


def _parse_ranks(path: Path, data: bytes) -> dict[bytes, int]:
    """Parse tiktoken's format: one line per token, with base64 and rank."""
    if data[:1] == data[2:3] == b"\n":  # protobuf: field 1, length, field 1
        remedy = "give Llama 3's tokenizer.model"
        raise ValueError(f"{path} is a SentencePiece tokenizer, like that of Llama 2: {remedy}")
    ranks: dict[bytes, int] = {}
    lines = data.split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            text, rank = line.split()
            token = binascii.a2b_base64(text, strict_mode=True)
            if token in ranks:
                raise ValueError("this token was given before")
            ranks[token] = int(rank)
        except ValueError as error:
            remedy = AGAIN if number == len(lines) else "give Llama 3's tokenizer.model"
            raise ValueError(
                f"{path}, line {number}: expected a base64 token and its rank, got {line[:60]!r}"
                f" ({error}): {remedy}"
            ) from None
    for expected, token in enumerate(sorted(ranks, key=ranks.__getitem__)):
        if ranks[token] != expected:
            raise ValueError(
                f"{path}: ranks must be 0..{len(ranks) - 1}, each once; found {ranks[token]} where"
                f" {expected} was expected, for {brief(token.decode(errors='replace'))}: give "
                "Llama 3's tokenizer.model"
            )
    return ranks


def _parse_tokenizer_json(path: Path, data: bytes) -> Parsed:
    """Return what a tokenizer.json and the configuration files alongside it hold."""
    content: Any = parse_json(path, data)
    try:
        tokens: list[dict[str, Any]] = content["added_tokens"]
        for token in tokens:
            if type(token["id"]) is not int or type(token["content"]) is not str:
                raise TypeError("an id is no whole number, or a name is no text")
            if token["id"] < 0:
                raise ValueError(f"an added token has the id {token['id']}")
        vocab: dict[str, int] = content["model"]["vocab"]
        if {type(word_id) for word_id in vocab.values()} != {int}:
            raise TypeError("the id of a word is no whole number")
        if min(vocab.values()) < 0 or len(set(vocab.values())) < len(vocab):
            raise ValueError("the id of a word is negative, or that of another word")
        family = _family(content)
        merges = [] if family else content["model"].get("merges") or []
        words = {} if family else _words(vocab, {token["content"] for token in tokens}, merges)
        ranks = {_bytes_of(word): word_id for word, word_id in words.items()}
        fault = _fault_of_merges(words, merges)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{path} is not the tokenizer.json of a byte-level BPE ({type(error).__name__}:"
            f" {brief(str(error))}): {_REMEDY}"
        ) from None
    if family:
        raise ValueError(f"{path} is the tokenizer of {family}: {_REMEDY}")
    if fault:
        raise ValueError(f"{path}: {fault}")
    parsed = Parsed(path, ranks)
    for token in tokens:
        name = token["content"]
        if token.get("single_word"):
            raise ValueError(
                f"{path}: the added token {brief(name)} has single_word=true, which is not "
                "supported: set it to false if the chat template writes it as a word of its own"
            )
        flags = {flag: bool(token.get(flag)) for flag in ("lstrip", "rstrip")}
        parsed.add(
            name, AddedToken(token["id"], **flags, special=token.get("special") is not False)
        )
    for further in further_tokens(path.parent, parsed.names):
        parsed.add_further(further)
    parsed.read_settings(path.parent)
    return parsed


def _words(vocab: dict[str, int], added: AbstractSet[str], merges: list[_Merge]) -> dict[str, int]:
    """Return the words of a vocabulary: the entries that are not added, or that BPE makes."""
    listed = vocab.keys() & added
    can_be_made = any(True for word in listed for _ in _cuts(word, vocab))
    made = {"".join(_halves(merge)) for merge in merges} if can_be_made else set()
    others = listed - made - byte_alphabet().keys()
    return {word: word_id for word, word_id in vocab.items() if word not in others}


def _cuts(word: str, words: Container[str]) -> Iterator[tuple[str, str]]:
    """Yield every two words that make up a word."""
    for cut in range(1, len(word)):
        if word[:cut] in words and word[cut:] in words:
            yield word[:cut], word[cut:]


def _bytes_of(word: str) -> bytes:
    """Return the bytes of a word in GPT-2's alphabet."""
    try:
        return word.translate(_BYTES).encode("latin-1")
    except UnicodeEncodeError:
        raise ValueError(f"{brief(word)} does not stand for bytes") from None


def _halves(merge: _Merge) -> tuple[str, str]:
    """Return the two words of a merge, as newer and older files write it."""
    first, second = merge.split(" ", 1) if isinstance(merge, str) else merge
    return first, second


def _fault_of_merges(words: dict[str, int], merges: list[_Merge]) -> str | None:
    """Return how merges differ from those of tiktoken, or None.

    tiktoken joins the two neighbours whose sum has the lowest id, whichever they are. So merges
    must be in the order of ids. A tokenizer.model has words 0..n-1, and a file that was made from
    it lists every pair that makes a word. Others list one pair. That is the same if BPE comes to
    that pair in the word alone: inside of a longer text, the neighbours that make up the word have
    been merged in the same way.

    Raises:
        KeyError: A merge makes no word.
    """
    is_plain = max(words.values(), default=-1) < len(words)
    sample = merges[:: max(1, len(merges) // _CHECKED_MERGES)] if is_plain else merges
    merged_ids = [words["".join(_halves(merge))] for merge in sample]
    if merged_ids != sorted(merged_ids):
        return "its merges are not in the order of ids: no Llama 3 tokenizer"
    if is_plain:
        return None
    pairs = set(map(_halves, merges))
    for word in words:
        if pairs.issuperset(_cuts(word, words)):
            continue
        parts = _parts(word, words)
        if len(parts) == 2 and tuple(parts) not in pairs:
            return (
                f"its merges do not join {brief(parts[0])} and {brief(parts[1])} to its word "
                f"{brief(word)}: add the merge, or make the word an added token"
            )
    return None


def _parts(word: str, words: dict[str, int]) -> list[str]:
    """Return the parts that BPE makes of a word before the last merge."""
    parts = list(word)
    while len(parts) > 2:
        joined = [words.get(first + second, inf) for first, second in pairwise(parts)]
        at = joined.index(min(joined))
        if joined[at] == inf:
            break
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts


def _family(content: dict[str, Any]) -> str | None:
    """Return the family of a tokenizer.json, or None for Llama 3's."""
    model = content["model"]
    model_type = model.get("type", "BPE")
    if model_type != "BPE":
        return _FAMILY_OF_TYPE.get(model_type, f"another family (model.type {brief(model_type)})")
    if model.get("byte_fallback"):
        return "Llama 2 (SentencePiece)"
    steps = list(_steps(content.get("pre_tokenizer")))
    patterns = [step["pattern"].get("Regex") for step in steps if step["type"] == "Split"]
    byte_level = [step for step in steps if step["type"] == "ByteLevel"]
    if not patterns and any(step.get("use_regex", True) for step in byte_level):
        return "GPT-2"
    if patterns != [PATTERN]:
        text = " ".join(map(str, patterns))
        names = (name for part, name in _FAMILY_OF_PATTERN.items() if part in text)
        return next(names, "another family (it splits texts by another pattern)")
    normalizer = content.get("normalizer")
    if normalizer and normalizer.get("normalizers") != []:
        return f"another family (it changes texts by {brief(normalizer.get('type'))})"
    is_isolated = steps[0].get("behavior") == "Isolated" and not steps[0].get("invert")
    is_plain = not any(x.get("add_prefix_space") or x.get("use_regex", True) for x in byte_level)
    if len(steps) != 2 or len(byte_level) != 1 or not is_isolated or not is_plain:
        return "another family (it splits texts in another way)"
    return None


def _steps(pre_tokenizer: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """Yield the parts of a pre-tokenizer in order."""
    if pre_tokenizer is None:
        return
    if pre_tokenizer["type"] != "Sequence":
        yield pre_tokenizer
        return
    for step in pre_tokenizer["pretokenizers"]:
        yield from _steps(step)


def _parse_gguf(header: Header) -> Parsed:
    """Return what a GGUF file holds; the ids of its tokens are their ranks."""
    path = header.file
    metadata = header.metadata
    keys = ("model", "pre", "tokens", "token_type", "merges")
    model, pre, tokens, types, merges = (metadata.get(f"tokenizer.ggml.{key}") for key in keys)
    if model != "gpt2" or pre not in _GGUF_PRE or not tokens:
        raise ValueError(
            f"{path} has no tokenizer of Llama 3 (tokenizer.ggml.model is {brief(model)}, .pre is "
            f"{brief(pre)}): give tokenizer_path, such as a tokenizer.model"
        )
    try:
        types = types or [_NORMAL] * len(tokens)
        added = {i: token_type for i, token_type in enumerate(types) if token_type != _NORMAL}
        vocab = {token: i for i, token in enumerate(tokens)}
        words = _words(vocab, {tokens[i] for i in added}, merges or [])
        ranks = {_bytes_of(word): word_id for word, word_id in words.items()}
        if len(words) < types.count(_NORMAL):
            raise ValueError("two of its tokens are alike")
        fault = _fault_of_merges(words, merges or [])
        parsed = Parsed(path, ranks)
        for token_id, token_type in added.items():
            if token_type != _UNUSED:
                special = token_type != _USER_DEFINED
                parsed.add(tokens[token_id], AddedToken(token_id, special=special))
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise ValueError(
            f"{path} is not the file of a byte-level BPE ({type(error).__name__}: "
            f"{brief(str(error))}): give tokenizer_path, such as a tokenizer.model"
        ) from None
    if fault:
        raise ValueError(f"{path}: {fault}")
    metadata.pop("tokenizer.ggml.merges", None)  # 280,000 strings that are not needed again
    for role, name in _GGUF_ROLES.items():
        key = f"tokenizer.ggml.{name}_token_id"
        value = metadata.get(key)
        if not isinstance(value, int):
            continue
        if role in _ROLES:
            parsed.roles.append((role, value))
        if role in _GGUF_STOPS:
            parsed.stops.append((f"{path}: {key}", value))
    return parsed


def check_ranks(path: Path, ranks: dict[bytes, int]) -> None:
    """Raise ValueError unless each byte has a token."""
    missing = [b for b in range(256) if bytes([b]) not in ranks]
    if missing:
        raise ValueError(
            f"{path}: {len(missing)} of the 256 single-byte tokens are missing, the first"
            f" {missing[0]:#04x}, so not every text can be encoded: {_REMEDY}"
        )


def byte_alphabet() -> dict[str, int]:
    """Return GPT-2's table of the 256 characters of byte-level BPE, and the byte of each.

    Printable Latin-1 characters stand for themselves, and U+0100, U+0101, ... for the other bytes
    in order.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_NO_BYTES = dict.fromkeys(range(256), "\uffff")
_BYTES = str.maketrans(_NO_BYTES | {ord(c): chr(b) for c, b in byte_alphabet().items()})
