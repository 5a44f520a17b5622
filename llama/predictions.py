"""What Meta's calls return, and the pieces of their streams. Nothing is computed here."""

from dataclasses import dataclass
from typing import TypedDict

from llama.tokenizer import Message


class CompletionPrediction(TypedDict, total=False):
    generation: str
    tokens: list[str]  # with logprobs=True only
    logprobs: list[float]  # likewise


class ChatPrediction(TypedDict, total=False):
    generation: Message
    tokens: list[str]
    logprobs: list[float]


class BeamPrediction(TypedDict):
    generation: str
    score: float  # sum of log-probabilities / length ** length_penalty


@dataclass(frozen=True)
class TextDelta:
    """A piece of the answer to prompt `index`; finish_reason ("stop", "length") ends the last."""

    index: int
    text: str
    finish_reason: str | None
