"""The messages of a dialog as the model sees them, in the order that its format wants.

In: turns as the caller's messages had them. Out: turns to encode. It knows no tokens and no text.
"""

from dataclasses import dataclass

from llama.tokenizer import Role


@dataclass
class Turn:
    """A message as the model sees it: texts, after <|python_tag|> or not, and the token that ends
    it. number: of the call that it is the result of. more: further calls of the same message, in a
    format that has one call in each. where: the message's name in errors."""

    role: Role
    texts: list[str]
    has_tag: bool = False
    ends_message: bool = False  # <|eom_id|>: the model waits for a result
    number: int = 0
    more: tuple["Turn", ...] = ()
    where: str = ""


def in_order(turns: list[Turn]) -> list[Turn]:
    """Results in the order of their calls: the format has no ids, so the order tells them apart."""
    ordered: list[Turn] = []
    for turn in turns:
        place = len(ordered)
        while turn.role == "ipython" and place and ordered[place - 1].role == "ipython":
            if ordered[place - 1].number <= turn.number:
                break
            place -= 1
        ordered.insert(place, turn)
    return ordered


def one_call_each(turns: list[Turn]) -> list[Turn]:
    """The calls of one message as messages of their own, each with its result after it, as if the
    model had made one after the other: Llama 3.1 was trained on one call in a message, and Meta's
    template refuses more."""
    apart: list[Turn] = []
    rest = iter(turns)
    for turn in rest:
        if not turn.more:
            apart.append(turn)
            continue
        for call in (turn, *turn.more):
            result = next(rest, None)
            if result is None or result.role != "ipython":
                raise ValueError(
                    f"{turn.where}: tool_calls has {1 + len(turn.more)} calls, and this model's "
                    "format has one in a message: the result of each must follow, with role tool"
                )
            apart += [call, result]
    return apart
