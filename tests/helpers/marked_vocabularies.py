"""Chat templates over the vocabularies of fine-tunes: ours, transformers', and attacks on ours."""

import functools
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers

from helpers.chat_templates import TEMPLATES
from helpers.fine_tunes import KINDS, make_tokenizer, names_of
from helpers.marked_fuzz import (
    Attacker,
    expected_ids,
    moved_back,
    moved_dialog,
    moved_value,
    plain_text,
)
from llama.prompts.jinja.chat_template import ChatTemplate, TemplateError
from llama.prompts.jinja.marked import MarkedEncoder, MarkedText, trusted
from llama.tokenizer import Tokenizer

NAMES = {
    kind: [name for name in names_of(kind).values() if "reserved" not in name] for kind in KINDS
}


@functools.cache
def tokenizers_of(kind: str) -> tuple[Any, Tokenizer]:
    """Return the tokenizer of a fine-tune in transformers and here."""
    with tempfile.TemporaryDirectory() as folder:
        num_rows = make_tokenizer(Path(folder), kind)
        theirs = transformers.AutoTokenizer.from_pretrained(folder)
        return theirs, Tokenizer(Path(folder) / "tokenizer.json", vocab_size=num_rows)


def constants_of(kind: str) -> dict[str, str]:
    theirs, _ = tokenizers_of(kind)
    return {"bos_token": theirs.bos_token, "eos_token": theirs.eos_token}


def rendered(
    template: ChatTemplate, messages: list[dict[str, Any]], **variables: Any
) -> MarkedText | None:
    """Return the marked text of a dialog, or None if the template fails."""
    given = [message | {"role": trusted(message["role"])} for message in messages]
    try:
        return template.render({"messages": given, **variables})
    except TemplateError:
        return None


@dataclass
class Result:
    """What an attack did; dialogs are checked where the oracle renders the same text."""

    strings: int
    dialogs: int
    checked: int


class Target:
    """A template over a vocabulary."""

    def __init__(self, kind: str, name: str) -> None:
        self._constants = constants_of(kind)
        self._kind = kind
        _, self._tokenizer = tokenizers_of(kind)
        self._source = TEMPLATES[name]
        self._template = ChatTemplate(self._source, self._constants)
        self._encoder = MarkedEncoder(self._tokenizer)

    def attack(self, *, seed: int, count: int) -> Result:
        """Compare the ids of attacked dialogs with those of the oracle."""
        attacker = Attacker(seed, NAMES[self._kind], self._source)
        encode = functools.partial(self._tokenizer.encode, bos=False, eos=False)
        checked = 0
        for _ in range(count):
            messages = attacker.dialog()
            options = {"tools": attacker.tools(), "add_generation_prompt": True}
            text = rendered(self._template, messages, **options)
            assert text == plain_text(self._source, messages, **self._constants, **options)
            oracle = plain_text(
                self._source, moved_dialog(messages), **self._constants, **moved_value(options)
            )
            if text is None or oracle is None or moved_back(oracle) != text:
                continue
            wanted = expected_ids(oracle, self._tokenizer.special_tokens, encode)
            assert self._encoder.encode(text) == wanted, text
            checked += 1
        return Result(attacker.count, count, checked)
