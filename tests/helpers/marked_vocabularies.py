"""Chat templates over the vocabularies of fine-tunes: ours, transformers', and attacks on ours."""

import functools
import json
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import tokenizers
import transformers

from helpers.chat_templates import TEMPLATES
from helpers.launch import DEMO
from helpers.marked_fuzz import (
    NAMES,
    Attacker,
    expected_ids,
    moved_back,
    moved_dialog,
    moved_value,
    plain_text,
)
from llama.checkpoint.hf_tokenizer import tokenizer_json
from llama.prompts.marked import MarkedEncoder, MarkedText, trusted
from llama.prompts.sandbox import ChatTemplate, TemplateError
from llama.tokenizer import Tokenizer


@functools.cache
def demo() -> Tokenizer:
    return Tokenizer(DEMO / "tokenizer.model")


@functools.cache
def special_of(kind: str) -> dict[str, int]:
    """Return the added tokens of a kind of model, over the demo model's ranks."""
    num_ranks = demo().n_words - len(demo().special_tokens)
    names = {i: f"<|reserved_{i}|>" for i in range(256)} | NAMES[kind]
    return {name: num_ranks + i for i, name in sorted(names.items())}


def stand_in(special: dict[str, int], **added: Any) -> Any:
    """Return a tokenizer with the demo model's ranks and the special tokens of a fine-tune."""
    return SimpleNamespace(special_tokens=special, encode=demo().encode, added_tokens=added)


@functools.cache
def theirs_of(kind: str) -> Any:
    """Return the same as a tokenizer of transformers."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [
        {"id": i, "content": name, **flags, "special": True} for name, i in special_of(kind).items()
    ]
    content = tokenizer_json(demo()) | {"post_processor": None, "added_tokens": added}
    fast = tokenizers.Tokenizer.from_str(json.dumps(content))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=fast)


def constants_of(kind: str) -> dict[str, str]:
    return {"bos_token": NAMES[kind][0], "eos_token": NAMES[kind][1]}


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
        self._names = list(NAMES[kind].values())
        self._special = special_of(kind)
        self._source = TEMPLATES[name]
        self._template = ChatTemplate(self._source, self._constants)
        self._encoder = MarkedEncoder(stand_in(self._special))

    def attack(self, *, seed: int, count: int) -> Result:
        """Compare the ids of attacked dialogs with those of the oracle."""
        attacker = Attacker(seed, self._names, self._source)
        encode = functools.partial(demo().encode, bos=False, eos=False)
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
            assert self._encoder.encode(text) == expected_ids(oracle, self._special, encode), text
            checked += 1
        return Result(attacker.count, count, checked)
