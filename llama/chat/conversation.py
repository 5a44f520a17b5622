"""The state of a chat: its messages and settings. A line of input in, the `Turn` it comes to out.

A line that begins with a slash is a command and never reaches the model; all else is a question.
Here the files of /save and /load are read and written. It knows neither terminal nor model, and
so a chat can be tested line by line.
"""

import json
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llama.sampling_params import SamplingParams
from llama.tokenizer import ChatFormat, Message, validate_dialog

# What a person may set, with SamplingParams' names and checks; one has the flag's name instead.
SETTINGS = (
    "temperature", "top_p", "top_k", "min_p", "max_gen_len", "min_tokens", "repetition_penalty",
    "presence_penalty", "frequency_penalty", "stop", "bad_words", "seed",
)  # fmt: skip
_FIELDS = {"max_gen_len": "max_tokens"}
# Those of Llama's own calls.
_DEFAULTS = {"temperature": 0.6, "top_p": 0.9, "max_gen_len": None, "seed": 1}

# name: (what follows it, what it does); [ ] may be left out
COMMANDS = {
    "system": ("[TEXT]", "set the system message; alone, show it"),
    "clear": ("[all]", "forget the dialog but for the system message; with all, that too"),
    "undo": ("", "forget the last question and its answer"),
    "retry": ("", "answer the last question again, with another seed"),
    "save": ("FILE", "write the dialog to a file, as JSON"),
    "load": ("FILE", "go on with the dialog in a file"),
    "set": ("[NAME VALUE]", "change how answers are sampled; alone, show the settings"),
    "stats": ("", "tokens in the context, turns and speeds"),
    "help": ("", "this list"),
    "bye": ("", "leave; so does Ctrl-D"),
}
_MORE_HELP = '''\
A \\ at the end of a line continues it. A line of """ begins a longer text, and another ends it.
//text asks "/text". Ctrl-C stops an answer; what was said of it stays.'''


@dataclass(frozen=True)
class Figures:
    """What one answer took: seconds from the question to its first and its last token, tokens."""

    first_seconds: float
    last_seconds: float
    prompt_tokens: int
    cached_tokens: int  # of the prompt: computed for an earlier turn
    tokens: int

    @property
    def rate(self) -> float:
        """Tokens a second after the first; of an answer of one token, that one's."""
        if self.tokens > 1:
            return (self.tokens - 1) / (self.last_seconds - self.first_seconds)
        return self.tokens / self.first_seconds

    def describe(self, context: int) -> str:
        """One line; `context` is the most tokens that prompt and answer may have."""
        return (
            f"first token {1000 * self.first_seconds:.0f} ms | {self.rate:.1f} tokens/s | "
            f"context {self.prompt_tokens + self.tokens} of {context} tokens, "
            f"{self.cached_tokens} from cache"
        )


@dataclass(frozen=True)
class Turn:
    """What an input comes to: a note to show, a dialog to be answered, or the end of the chat."""

    note: str = ""
    dialog: tuple[Message, ...] = ()
    attempt: int = 0  # 1 and up: this dialog was answered before
    leave: bool = False


class Conversation:
    """Messages and settings; `take` an input, let its dialog be answered, `keep` the answer.

    `context` is the most tokens that the model holds. ValueError or TypeError for a bad setting.
    """

    def __init__(
        self, formatter: ChatFormat, context: int, *, system: str | None = None, **settings: Any
    ) -> None:
        self.formatter = formatter
        self.context = context
        self.messages: list[Message] = []
        self.settings: dict[str, Any] = dict(_DEFAULTS)
        self.figures: list[Figures] = []
        self._attempt = 0  # of the last answer
        self._files: set[Path] = set()  # written or read by this chat, which /save may replace
        if system is not None:
            self._system(system)
        for name, value in settings.items():
            self._change(name, value)

    def take(self, text: str) -> Turn:
        """What an input comes to. A question changes nothing yet: its answer may fail."""
        text = text.strip()
        if not text.startswith("/"):
            return self._ask(text) if text else Turn()
        if text.startswith("//"):
            return self._ask(text[1:])
        name, *rest = text[1:].split(maxsplit=1) or [""]
        argument = rest[0] if rest else ""
        wrong = _misuse(name, argument)
        if wrong:
            return Turn(wrong)
        command = getattr(self, f"_{name}")
        try:
            done = command(argument) if COMMANDS[name][0] else command()
        except (OSError, RecursionError, TypeError, ValueError) as error:
            return Turn(f"error: {error}")
        return done if isinstance(done, Turn) else Turn(done)

    def keep(self, turn: Turn, answer: str, figures: Figures) -> None:
        """Make the turn's dialog and its answer the conversation."""
        self.messages = [*turn.dialog, {"role": "assistant", "content": answer}]
        self._attempt = turn.attempt
        self.figures.append(figures)

    def sampling(self, attempt: int = 0) -> dict[str, Any]:
        """The settings as arguments of SamplingParams; each attempt has a seed of its own."""
        seed = self.settings["seed"]
        seed = secrets.randbits(63) if seed is None else (seed + attempt) % 2**63
        return _arguments(self.settings) | {"seed": seed}

    def prompt(self, turn: Turn) -> list[int]:
        """The dialog's ids. ValueError if no token of an answer would fit behind them."""
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
        """Where the dialog begins, after the system message."""
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

    def _undo(self) -> str:
        last = self._last_question()
        question = self.messages[last]["content"]
        del self.messages[last:]
        self._attempt = 0
        return f"forgotten: {question}"

    def _retry(self) -> Turn:
        dialog = tuple(self.messages[: self._last_question() + 1])
        return Turn(dialog=dialog, attempt=self._attempt + 1)

    def _save(self, name: str) -> str:
        path = Path(name).expanduser().resolve()  # of a link, what it stands for
        if not self.messages:
            raise ValueError("there is nothing to save yet")
        if path.exists() and path not in self._files:
            raise ValueError(f"{path} is there already, and not from this chat: give another name")
        text = json.dumps(self.messages, ensure_ascii=False, indent=2)
        part = path.with_name(f"{path.name}.{os.getpid()}.part")  # never half a file under the name
        try:
            part.write_text(text + "\n", encoding="utf-8")
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
        self._files.add(path)
        return f"{len(self.messages)} messages written to {path}"

    def _load(self, name: str) -> str:
        path = Path(name).expanduser().resolve()
        if not path.is_file():  # a device or pipe might never end
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
            params = SamplingParams(**_arguments(self.settings))
            shown = {name: getattr(params, _FIELDS.get(name, name)) for name in SETTINGS}
            return "\n".join(f"{name} {_written(value)}" for name, value in shown.items())
        name, *rest = text.split(maxsplit=1)
        if not rest:
            raise ValueError(f"give a value too: /set {name} VALUE; /set alone shows all")
        self._change(name, _value(rest[0]))
        return f"{name} {_written(self.settings[name])}"

    def _change(self, name: str, value: Any) -> None:
        if name not in SETTINGS:
            raise ValueError(f"there is no setting {name}: there are {', '.join(SETTINGS)}")
        if name in ("stop", "bad_words") and value is None:
            value = ()
        changed = {**self.settings, name: value}
        try:
            SamplingParams(**_arguments(changed))
        except (TypeError, ValueError) as error:
            raise ValueError(str(error).replace("max_tokens", "max_gen_len")) from None
        self.settings = changed

    def _stats(self) -> str:
        used = sum(len(self.formatter.encode_message(message)) for message in self.messages)
        used += 1 if used else 0  # begin_of_text
        turns = sum(message["role"] == "user" for message in self.messages)
        lines = [f"context {used} of {self.context} tokens | turns {turns}"]
        if self.figures:
            tokens = sum(figures.tokens for figures in self.figures)
            seconds = sum(figures.last_seconds for figures in self.figures)
            lines.append(f"last answer: {self.figures[-1].describe(self.context)}")
            lines.append(f"all answers: {len(self.figures)}, {tokens} tokens in {seconds:.1f} s")
        return "\n".join(lines)

    def _help(self) -> str:
        forms = {f"/{name} {form}": what for name, (form, what) in COMMANDS.items()}
        width = max(map(len, forms))
        lines = [f"{form:{width}}  {what}" for form, what in forms.items()]
        return "\n".join([*lines, _MORE_HELP])

    def _bye(self) -> Turn:
        return Turn(leave=True)


def _misuse(name: str, argument: str) -> str:
    """What is wrong with a command's name, or with what follows it; nothing, mostly."""
    if name not in COMMANDS:
        return f"there is no command /{name}: /help lists them, and //{name} asks the model"
    form = COMMANDS[name][0]
    if argument and not form:
        return f"/{name} takes nothing after it"
    if not argument and form and not form.startswith("["):
        return f"/{name} needs more: write /{name} {form}"
    return ""


def _arguments(settings: dict[str, Any]) -> dict[str, Any]:
    return {_FIELDS.get(name, name): value for name, value in settings.items()}


def _value(text: str) -> Any:
    """A setting as typed: none, true and false, JSON where it is any, else the text itself."""
    words = {"none": None, "true": True, "false": False}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return json.loads(text)
    except (RecursionError, ValueError):
        return text


def _written(value: Any) -> str:
    """A setting as it is typed; an empty list is none."""
    if value is None or value == ():
        return "none"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return json.dumps(list(value), ensure_ascii=False)
    return json.dumps(value, ensure_ascii=False)
