"""The state of a chat: its messages and its settings.

The input is a text that the user has typed; the result is a `Turn`, which says what to do about it.
A text that begins with a slash is a command and never reaches the model; every other text is a
question. This module must know neither the terminal nor the model, so that a chat can be tested
text by text.
"""

import json
import os
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from llama.cli.chat.stats import TurnStats
from llama.cli.chat.window import ContextWindow, Dialog, num_system
from llama.cli.flags import SAMPLING_FIELDS, SAMPLING_FLAGS
from llama.cli.image_files import data_url
from llama.cli.model import BUILD_FLAGS
from llama.prompts.messages import read_messages, text_of
from llama.sampling_params import SamplingParams

_LISTED = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "max_gen_len",
    "min_tokens",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "stop",
    "bad_words",
    "seed",
)
# The settings that a user can change: those of this list, and every flag of sampling. They are
# fields of SamplingParams, except for the names in SAMPLING_FIELDS.
SETTINGS = tuple(dict.fromkeys((*_LISTED, *SAMPLING_FLAGS)))
_SPECIAL = re.compile(r"<\|\w+\|>")  # like the name of a special token
_KEYWORDS = {"none": "null", "true": "true", "false": "false"}  # written in any case -> JSON
_MORE_HELP = '''\
A \\ at the end of a line continues the text on the next line. A line of """ begins a text of
several lines, and another one ends it. //text sends "/text" to the model. Ctrl-C stops an answer
and keeps the part that was shown.'''


class DialogEncoder(Protocol):
    """A function that encodes a dialog as token ids, in the format of one model."""

    def __call__(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True
    ) -> list[int]:
        """Return the ids of the messages, and of a header for the assistant's answer.

        Raises:
            TypeError, ValueError: A message cannot be encoded; the error names it.
        """


@dataclass(frozen=True)
class Turn:
    """The action that follows a text: show a note, have a dialog answered, or end the chat."""

    note: str = ""
    dialog: Dialog = ()
    attempt: int = 0  # number of earlier answers to this dialog
    leave: bool = False


class Conversation:
    """The messages and settings of a chat.

    Call `handle` with a text, have the dialog of the returned turn answered, and `commit` the
    answer.
    """

    def __init__(
        self,
        encode: DialogEncoder | None,
        context: int | None,
        *,
        system: str | None = None,
        **settings: Any,
    ) -> None:
        """Begin an empty conversation.

        Args:
            encode: Encodes a dialog; None if a server does so.
            context: The maximum number of tokens of prompt and answer; None if it is unknown.
            system: The system message.
            settings: Initial values of the settings in `SETTINGS`.

        Raises:
            ValueError: A setting has a value that is not allowed.
        """
        self.encode = encode
        self.window = ContextWindow(context)
        self.messages: list[Mapping[str, Any]] = []
        self.params = SamplingParams(max_tokens=None)
        self.reasoning = ""  # reasoning before the last answer
        self.stats: list[TurnStats] = []  # one entry per answer
        self._attempt = 0  # attempt number of the last answer
        self._files: set[Path] = set()  # files of this chat, which /save may replace
        self._images: list[dict[str, Any]] = []  # parts of the next question
        self._has_told = False  # Whether the chat has said that such a name stays text.
        if system is not None:
            self._system(system)
        defaults = {**SAMPLING_FLAGS, "seed": BUILD_FLAGS["seed"]}
        for name, value in {**defaults, **settings}.items():
            self._change(name, value)

    def handle(self, text: str) -> Turn:
        """Run a command, or take a question. A question changes nothing until `commit`."""
        text = text.strip()
        if not text:
            return Turn()
        if text.startswith("//"):
            return self._ask(text[1:])
        if text.startswith("/"):
            return self._run_command(text[1:])
        return self._ask(text)

    def commit(self, turn: Turn, answer: str, stats: TurnStats, reasoning: str = "") -> None:
        """Replace the conversation by the dialog of the turn and its answer.

        The reasoning before the answer is shown by /think, and is not part of the dialog.
        """
        self.reasoning = reasoning
        self.messages = [*turn.dialog, {"role": "assistant", "content": answer}]
        self._attempt = turn.attempt
        self.stats.append(stats)

    def sampling(self, attempt: int = 0) -> SamplingParams:
        """Return the sampling parameters, with a seed of its own for each attempt."""
        seed = self.params.seed
        if seed is None:
            return replace(self.params, seed=secrets.randbits(63))
        return replace(self.params, seed=(seed + attempt) % 2**63)

    def prompt(self, turn: Turn) -> list[int]:
        """Return the token ids of the messages of a turn that fit the context.

        Raises:
            ValueError: The dialog cannot be encoded, or its last question leaves no space for an
                answer.
        """
        encode = self.encode
        context = self.window.context
        assert encode is not None and context is not None
        answer_tokens = self.params.max_tokens or 0
        ids = encode(self.window.fit(turn.dialog, answer_tokens, lambda sent: len(encode(sent))))
        if len(ids) >= context:
            raise ValueError(
                f"the question has {len(ids)} tokens, with the system message if there is one, but "
                f"question and answer must fit into the context of {context} tokens: shorten "
                "it, or start with a larger --max_seq_len"
            )
        return ids

    def _run_command(self, text: str) -> Turn:
        parts = text.split(maxsplit=1)
        name = parts[0] if parts else ""
        argument = parts[1] if len(parts) == 2 else ""
        if name not in COMMANDS:
            remedy = f"/help lists the commands, and //{name} sends /{name} to the model"
            return Turn(f"there is no command /{name}: {remedy}")
        command = COMMANDS[name]
        if argument and not command.argument:
            return Turn(f"/{name} takes no argument: leave out {argument!r}")
        is_required = command.argument and not command.argument.startswith("[")
        if not argument and is_required:
            return Turn(f"/{name} needs an argument: write /{name} {command.argument}")
        try:
            result = command.run(self, argument)
        except (OSError, RecursionError, TypeError, ValueError) as error:
            return Turn(f"error: {error}")
        return result if isinstance(result, Turn) else Turn(result)

    def _ask(self, question: str) -> Turn:
        content: Any = question
        if self._images:
            content = [*self._images, {"type": "text", "text": question}]
            self._images = []
        dialog = (*self.messages, {"role": "user", "content": content})
        special = _SPECIAL.search(question)
        if special is None or self._has_told or self.encode is None:
            return Turn(dialog=dialog)
        self._has_told = True
        return Turn(f"{special[0]} stays text: no text becomes a special token", dialog)

    def _last_question(self) -> int:
        """Return the index of the last message of the user."""
        for i in reversed(range(len(self.messages))):
            if self.messages[i]["role"] == "user":
                return i
        raise ValueError("no question has been asked yet")

    def _system(self, text: str) -> str:
        if text:
            self.messages[: num_system(self.messages)] = [{"role": "system", "content": text}]
            return "the system message is set"
        if num_system(self.messages):
            return _shown(self.messages[0])
        return "there is no system message"

    def _clear(self, argument: str) -> str:
        if argument not in ("", "all"):
            raise ValueError(f"/clear {argument} is unknown: write /clear or /clear all")
        self.window.reset()
        if argument == "all" or not num_system(self.messages):
            self.messages.clear()
            return "all messages are removed"
        del self.messages[num_system(self.messages) :]
        return "all messages are removed except the system message"

    def _undo(self, _: str) -> str:
        last = self._last_question()
        question = _shown(self.messages[last])
        del self.messages[last:]
        self._attempt = 0
        self.window.reset()
        return f"removed: {question}"

    def _retry(self, _: str) -> Turn:
        dialog = tuple(self.messages[: self._last_question() + 1])
        return Turn(dialog=dialog, attempt=self._attempt + 1)

    def _image(self, name: str) -> str:
        path = Path(name).expanduser()
        self._images.append({"type": "image_url", "image_url": {"url": data_url(path)}})
        return f"{path} is sent with the next question"

    def _save(self, name: str) -> str:
        path = Path(name).expanduser().resolve()  # A link stands for the file that it names.
        if not self.messages:
            raise ValueError("there is nothing to save yet")
        if path.exists() and path not in self._files:
            raise ValueError(
                f"{path} exists already and does not belong to this chat: give another name"
            )
        text = json.dumps(self.messages, ensure_ascii=False, indent=2)
        part = path.with_name(f"{path.name}.{os.getpid()}.part")
        try:  # The file appears at its path only once it is complete.
            part.write_text(text + "\n", encoding="utf-8")
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
        self._files.add(path)
        return f"{len(self.messages)} messages written to {path}"

    def _load(self, name: str) -> str:
        path = Path(name).expanduser().resolve()
        if not path.is_file():  # Reading a device or a pipe might never end.
            raise ValueError(f"{path} is not a file: give the name of a file that /save wrote")
        try:
            messages = json.loads(path.read_text(encoding="utf-8"))
            read_messages(messages, takes_images=True)
        except (RecursionError, TypeError, ValueError) as error:
            raise ValueError(f"{path} does not hold a JSON list of messages: {error}") from None
        if self.encode is not None:
            try:
                self.encode(messages, add_generation_prompt=False)
            except (TypeError, ValueError) as error:
                raise ValueError(f"{path} cannot be continued with this model: {error}") from None
        self.messages = messages
        self._attempt = 0
        self.window.reset()
        self._files.add(path)
        return f"{len(messages)} messages read from {path}"

    def _set(self, text: str) -> str:
        if not text:
            return "\n".join(f"{name} {_format(self._value_of(name))}" for name in SETTINGS)
        name, *rest = text.split(maxsplit=1)
        if not rest:
            raise ValueError(
                f"/set {name} needs a value: write /set {name} VALUE; /set alone shows all settings"
            )
        value = _parse(rest[0])
        self._change(name, value)
        return f"{name} {_format(value)}"

    def _value_of(self, setting: str) -> Any:
        return getattr(self.params, SAMPLING_FIELDS.get(setting, setting))

    def _change(self, name: str, value: Any) -> None:
        if name not in SETTINGS:
            known = ", ".join(SETTINGS)
            raise ValueError(f"there is no setting {name}: the settings are {known}")
        if name in ("stop", "bad_words") and value is None:
            value = ()
        try:
            self.params = replace(self.params, **{SAMPLING_FIELDS.get(name, name): value})
        except (TypeError, ValueError) as error:
            raise ValueError(str(error).replace("max_tokens", "max_gen_len")) from None

    def _stats(self, _: str) -> str:
        turns = sum(message["role"] == "user" for message in self.messages)
        lines = [f"turns {turns}"]
        if self.encode is not None:
            used = 0
            if self.messages:
                sent = self.window.of(self.messages)
                used = len(self.encode(sent, add_generation_prompt=False))
            lines = [f"context {used} of {self.window.context} tokens | turns {turns}"]
        if self.window.num_left_out:
            lines[0] += f" | oldest turns left out: {self.window.num_left_out}"
        if self.stats:
            tokens = sum(stats.usage.completion_tokens for stats in self.stats)
            seconds = sum(stats.last_seconds for stats in self.stats)
            lines.append(f"last answer: {self.stats[-1].describe(self.window.context)}")
            lines.append(f"all answers: {len(self.stats)}, {tokens} tokens in {seconds:.1f} s")
        return "\n".join(lines)

    def _think(self, _: str) -> str:
        return self.reasoning or "there was no reasoning before the last answer"

    def _help(self, _: str) -> str:
        usages = {f"/{name} {c.argument}": c.description for name, c in COMMANDS.items()}
        width = max(map(len, usages))
        lines = [f"{usage:{width}}  {description}" for usage, description in usages.items()]
        return "\n".join([*lines, _MORE_HELP])

    def _leave(self, _: str) -> Turn:
        return Turn(leave=True)


class Command(NamedTuple):
    """A command of the chat."""

    argument: str  # what follows the name; in brackets if it is optional
    description: str
    run: Callable[[Conversation, str], str | Turn]  # takes the argument


COMMANDS = {
    "system": Command(
        "[TEXT]", "Set the system message; without TEXT, show it.", Conversation._system
    ),
    "clear": Command(
        "[all]",
        "Remove all messages except the system message; with all, remove that too.",
        Conversation._clear,
    ),
    "undo": Command("", "Remove the last question and its answer.", Conversation._undo),
    "retry": Command("", "Answer the last question again, with another seed.", Conversation._retry),
    "save": Command("FILE", "Write the dialog to a file, as JSON.", Conversation._save),
    "load": Command("FILE", "Continue the dialog in a file.", Conversation._load),
    "image": Command("FILE", "Send an image with the next question.", Conversation._image),
    "set": Command(
        "[NAME VALUE]",
        "Change how answers are sampled; without NAME, show the settings.",
        Conversation._set,
    ),
    "stats": Command("", "Show the tokens in the context, turns and speeds.", Conversation._stats),
    "think": Command("", "Show the reasoning before the last answer.", Conversation._think),
    "help": Command("", "Show this list.", Conversation._help),
    "bye": Command("", "Leave the chat; Ctrl-D does so too.", Conversation._leave),
}


def _shown(message: Mapping[str, Any]) -> str:
    """Return the text of a message for the screen."""
    return text_of(read_messages([message], takes_images=True)[0].content)


def _parse(text: str) -> Any:
    """Read the value of a setting: none, true, false or JSON; any other text is a string."""
    try:
        return json.loads(_KEYWORDS.get(text.lower(), text))
    except (RecursionError, ValueError):
        return text


def _format(value: Any) -> str:
    """Write a value as `_parse` reads it. An empty list is none."""
    return "none" if value in (None, ()) else json.dumps(value, ensure_ascii=False)
