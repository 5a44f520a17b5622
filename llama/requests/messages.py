"""Messages between the process of an engine and the processes that have the text of its requests.

They are JSON, in which floats keep their bits, and are checked by their types on arrival. The
results of steps have a form of their own, see `reports.py`. Sequences have numbers, which the
process that adds them chooses and never uses again.
"""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from llama.engine.request import SequenceSpec

# Why sequences are refused: too many wait; they gave way to others while they waited; no thread
# was free to compile their format, or it took too long; a step failed; a field cannot be used.
Reason = Literal["queue", "gave way", "busy", "slow", "failed", "field"]


@dataclass
class AddedGroup:
    """The sequences of the answers of one request.

    Attributes:
        numbers: The number of each sequence, in the order of the answers.
        spec: The specification of the first one. The others do not score the prompt again.
        seed: The seed of the first one; None: the engine chooses it.
        answer_format: The format of the answers as JSON; empty if they have none.
    """

    numbers: list[int]
    spec: SequenceSpec
    seed: int | None = None
    answer_format: str = ""


@dataclass
class Add:
    """Sequences of one call, which the engine takes all together or refuses."""

    groups: list[AddedGroup]
    kind: Literal["add"] = "add"


@dataclass
class Remove:
    """Numbers of sequences that nobody wants any more."""

    numbers: list[int]
    kind: Literal["remove"] = "remove"


@dataclass
class Refuse:
    """Numbers of sequences that end without a further token, and why."""

    numbers: list[int]
    reason: Reason
    field: str = ""
    text: str = ""
    kind: Literal["refuse"] = "refuse"


@dataclass
class Tell:
    """Something that the other process must know; its name says what.

    Attributes:
        name: What it is.
        values: Its values.
        call: The number of the call, to which the other process must reply; 0: it does not.
    """

    name: str
    values: dict[str, Any] = field(default_factory=dict)
    call: int = 0
    kind: Literal["tell"] = "tell"


@dataclass
class Reply:
    """The reply to a call: a value, or the kind, the field and the text of an error."""

    call: int
    value: Any = None
    error: str = ""
    field: str = ""
    text: str = ""
    kind: Literal["reply"] = "reply"


Message = Add | Remove | Refuse | Tell | Reply
MESSAGE: TypeAdapter[Message] = TypeAdapter(Annotated[Message, Field(discriminator="kind")])


def to_bytes(message: Message) -> bytes:
    """Return a message as JSON."""
    return MESSAGE.dump_json(message)


def from_bytes(data: bytes) -> Message:
    """Return the message of JSON; raise a ValueError if it is none."""
    return MESSAGE.validate_json(data)
