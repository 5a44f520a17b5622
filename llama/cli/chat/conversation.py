"""The state of a chat: its messages and settings. In: a text typed by the user. Out: a `Turn`.

A text that begins with a slash is a command and never reaches the model; every other text is a
question. It knows neither the terminal nor the model, so a chat can be tested text by text.
"""

import json
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from llama.cli.model import BUILD_FLAGS, SAMPLING_FLAGS
from llama.requests.request import Usage
from llama.sampling_params import SamplingParams
from llama.tokenizer import ChatFormat, Message, validate_dialog

# The settings that a user can change: parameters of SamplingParams, but for one name.
SETTINGS = (
    "temperature", "top_p", "top_k", "min_p", "max_gen_len", "min_tokens", "repetition_penalty",
    "presence_penalty", "frequency_penalty", "stop", "bad_words", "seed",
)  # fmt: skip
_FIELDS = {"max_gen_len": "max_tokens"}
_MORE_HELP = '''\
A \\ at the end of a line continues it. A line of """ begins a longer text, and another ends it.
//text asks "/text". Ctrl-C stops an answer and keeps what was shown of it.'''


class TurnStats(NamedTuple):
    """Of one answer."""

    first_seconds: float  # from the question to its first token
    last_seconds: float  # and to its last one
    usage: Usage  # tokens of the prompt are 0 if they are not known
    server_rate: float | None = None  # tokens per second, where a server measured them

    @property
    def rate(self) -> float:
        """Tokens per second after the first token; of an answer of one token, up to that one."""
        tokens, seconds = self.usage.completion_tokens, self.last_seconds - self.first_seconds
        seen = (tokens - 1) / seconds if tokens > 1 else tokens / self.first_seconds
        return self.server_rate or seen

    def describe(self, context: int | None) -> str:
        """One line. `context`: the most tokens that prompt and answer can have, if known."""
        usage = self.usage
        speed = f"first token {1000 * self.first_seconds:.0f} ms | {self.rate:.1f} tokens/s"
        if not usage.prompt_tokens:
            return speed  # a server does not count the tokens of an answer that was stopped
        of_context = "" if context is None else f" of {context}"
        guessed = f" | {usage.accepted_tokens} of {usage.draft_tokens} guessed"
        return (
            f"{speed} | context {usage.total_tokens}{of_context} tokens, "
            f"{usage.cached_tokens} from cache{guessed * bool(usage.draft_tokens)}"
        )


@dataclass(frozen=True)
class Turn:
    """What to do about a text: show a note, have a dialog answered, or end the chat."""

    note: str = ""
    dialog: tuple[Message, ...] = ()
    attempt: int = 0  # how often this dialog was answered before
    leave: bool = False


class Conversation:
    """Messages and settings: `handle` a text, have its dialog answered, `commit` the answer.
    formatter: None where a server makes the prompt. context: the most tokens that prompt and answer
    can have, None if the server does not say. ValueError for a bad setting."""

    def __init__(
        self,
        formatter: ChatFormat | None,
        context: int | None,
        *,
        system: str | None = None,
        **settings: Any,
    ) -> None:
        self.formatter = formatter
        self.context = context
        self.messages: list[Message] = []
        self.params = SamplingParams(max_tokens=None)
        self.stats: list[TurnStats] = []  # one per answer
        self._attempt = 0  # of the last answer
        self._files: set[Path] = set()  # this chat wrote or read them, so /save can replace them
        if system is not None:
            self._system(system)
        for name, value in {**SAMPLING_FLAGS, "seed": BUILD_FLAGS["seed"], **settings}.items():
            self._change(name, value)

    def handle(self, text: str) -> Turn:
        """Run a command, or take a question. A question changes nothing until `commit`."""
        text = text.strip()
        if not text.startswith("/"):
            return self._ask(text) if text else Turn()
        if text.startswith("//"):
            return self._ask(text[1:])
        name, *rest = text[1:].split(maxsplit=1) or [""]
        argument = rest[0] if rest else ""
        if name not in COMMANDS:
            words = f"/help lists them, and //{name} asks the model"
            return Turn(f"there is no command /{name}: {words}")
        allowed, _, run = COMMANDS[name]
        if argument and not allowed:
            return Turn(f"/{name} takes nothing after it")
        if not argument and allowed and not allowed.startswith("["):
            return Turn(f"/{name} needs more: write /{name} {allowed}")
        try:
            result = run(self, argument)
        except (OSError, RecursionError, TypeError, ValueError) as error:
            return Turn(f"error: {error}")
        return result if isinstance(result, Turn) else Turn(result)

    def commit(self, turn: Turn, answer: str, stats: TurnStats) -> None:
        """Make the dialog of the turn, and its answer, the conversation."""
        self.messages = [*turn.dialog, {"role": "assistant", "content": answer}]
        self._attempt = turn.attempt
        self.stats.append(stats)

    def sampling(self, attempt: int = 0) -> SamplingParams:
        """Those of the settings. Each attempt has its own seed."""
        seed = self.params.seed
        seed = secrets.randbits(63) if seed is None else (seed + attempt) % 2**63
        return replace(self.params, seed=seed)

    def prompt(self, turn: Turn) -> list[int]:
        """The token ids of the dialog. ValueError if there is no room for an answer."""
        assert self.formatter is not None and self.context is not None
        ids = self.formatter.encode_dialog_prompt(turn.dialog)
        if len(ids) >= self.context:
            raise ValueError(
                f"the dialog has {len(ids)} tokens, and with an answer it must fit "
                f"{self.context}: /undo forgets the last turn, /clear all of them; or start with "
                "a larger --max_seq_len"
            )
        return ids

    def _ask(self, question: str) -> Turn:
        return Turn(dialog=(*self.messages, {"role": "user", "content": question}))

    @property
    def _start(self) -> int:
        """The index of the first message after the system message."""
        return 1 if self.messages and self.messages[0]["role"] == "system" else 0

    def _last_question(self) -> int:
        roles = [message["role"] for message in self.messages]
        if "user" not in roles:
            raise ValueError("no question has been asked yet")
        return len(roles) - 1 - roles[::-1].index("user")

    def _system(self, text: str) -> str:
        if text:
            self.messages[: self._start] = [{"role": "system", "content": text}]
            return "the system message is set"
        return self.messages[0]["content"] if self._start else "there is no system message"

    def _clear(self, what: str) -> str:
        if what not in ("", "all"):
            raise ValueError("write /clear, or /clear all to forget the system message too")
        del self.messages[0 if what else self._start :]
        return "the dialog is forgotten" + ", but for the system message" * self._start

    def _undo(self, _: str) -> str:
        last = self._last_question()
        question = self.messages[last]["content"]
        del self.messages[last:]
        self._attempt = 0
        return f"forgotten: {question}"

    def _retry(self, _: str) -> Turn:
        dialog = tuple(self.messages[: self._last_question() + 1])
        return Turn(dialog=dialog, attempt=self._attempt + 1)

    def _save(self, name: str) -> str:
        path = Path(name).expanduser().resolve()  # of a link, the file that it names
        if not self.messages:
            raise ValueError("there is nothing to save yet")
        if path.exists() and path not in self._files:
            raise ValueError(f"{path} exists already, and is not from this chat: give another name")
        text = json.dumps(self.messages, ensure_ascii=False, indent=2)
        part = path.with_name(f"{path.name}.{os.getpid()}.part")
        try:  # so that `path` is never half a file
            part.write_text(text + "\n", encoding="utf-8")
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
        self._files.add(path)
        return f"{len(self.messages)} messages written to {path}"

    def _load(self, name: str) -> str:
        path = Path(name).expanduser().resolve()
        if not path.is_file():  # reading a device or a pipe might never end
            raise ValueError(f"{path} is not a file: give the name of one that /save wrote")
        try:
            messages = json.loads(path.read_text(encoding="utf-8"))
            validate_dialog(messages)
        except (RecursionError, TypeError, ValueError) as error:
            raise ValueError(f"{path} does not hold a JSON list of messages: {error}") from None
        self.messages, self._attempt = messages, 0
        self._files.add(path)
        return f"{len(messages)} messages read from {path}"

    def _set(self, text: str) -> str:
        if not text:
            values = {name: getattr(self.params, _FIELDS.get(name, name)) for name in SETTINGS}
            return "\n".join(f"{name} {_format(value)}" for name, value in values.items())
        name, *rest = text.split(maxsplit=1)
        if not rest:
            raise ValueError(f"give a value too: /set {name} VALUE; /set alone shows all settings")
        value = _parse(rest[0])
        self._change(name, value)
        return f"{name} {_format(value)}"

    def _change(self, name: str, value: Any) -> None:
        if name not in SETTINGS:
            raise ValueError(f"there is no setting {name}: there are {', '.join(SETTINGS)}")
        if name in ("stop", "bad_words") and value is None:
            value = ()
        try:
            self.params = replace(self.params, **{_FIELDS.get(name, name): value})
        except (TypeError, ValueError) as error:
            raise ValueError(str(error).replace("max_tokens", "max_gen_len")) from None

    def _stats(self, _: str) -> str:
        turns = sum(message["role"] == "user" for message in self.messages)
        lines = [f"turns {turns}"]
        if self.formatter is not None:
            used = sum(len(self.formatter.encode_message(message)) for message in self.messages)
            used += 1 if used else 0  # begin_of_text
            lines = [f"context {used} of {self.context} tokens | turns {turns}"]
        if self.stats:
            tokens = sum(stats.usage.completion_tokens for stats in self.stats)
            seconds = sum(stats.last_seconds for stats in self.stats)
            lines.append(f"last answer: {self.stats[-1].describe(self.context)}")
            lines.append(f"all answers: {len(self.stats)}, {tokens} tokens in {seconds:.1f} s")
        return "\n".join(lines)

    def _help(self, _: str) -> str:
        usages = {f"/{name} {c.argument}": c.description for name, c in COMMANDS.items()}
        width = max(map(len, usages))
        lines = [f"{usage:{width}}  {what}" for usage, what in usages.items()]
        return "\n".join([*lines, _MORE_HELP])


class Command(NamedTuple):
    """What follows the name of a command ([ ]: can be left out), what it does, and its method."""

    argument: str
    description: str
    run: Callable[[Conversation, str], str | Turn]


COMMANDS = {
    "system": Command("[TEXT]", "set the system message; alone, show it", Conversation._system),
    "clear": Command(
        "[all]", "forget all messages but the system message; with all, that too",
        Conversation._clear,
    ),
    "undo": Command("", "forget the last question and its answer", Conversation._undo),
    "retry": Command("", "answer the last question again, with another seed", Conversation._retry),
    "save": Command("FILE", "write the dialog to a file, as JSON", Conversation._save),
    "load": Command("FILE", "go on with the dialog in a file", Conversation._load),
    "set": Command(
        "[NAME VALUE]", "change how answers are sampled; alone, show the settings",
        Conversation._set,
    ),
    "stats": Command("", "tokens in the context, turns and speeds", Conversation._stats),
    "help": Command("", "this list", Conversation._help),
    "bye": Command("", "leave; so does Ctrl-D", lambda chat, _: Turn(leave=True)),
}  # fmt: skip


def _parse(text: str) -> Any:
    """The value of a setting: none, true, false, or JSON; any other text is itself."""
    words = {"none": "null", "true": "true", "false": "false"}
    try:
        return json.loads(words.get(text.lower(), text))
    except (RecursionError, ValueError):
        return text


def _format(value: Any) -> str:
    """A value as `_parse` reads it. An empty list is none."""
    return "none" if value in (None, ()) else json.dumps(value, ensure_ascii=False)
