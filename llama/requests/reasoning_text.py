"""The reasoning in the text of one answer, apart from its content.

In: the tokens of an answer and their text, in any pieces. Out: the pieces of the reasoning, and the
text of the content, neither of which has the marks. Which tokens may come is decided elsewhere, by
thinking.py.
"""

from collections.abc import Sequence
from enum import Enum, auto

from llama.requests.detokenizer import open_suffix
from llama.sampling_params import ReasoningRule, SamplingParams
from llama.tokenizer import Tokenizer

_MAX_TAIL = 32  # tokens at the end of a prompt that are searched for the start mark


class _Part(Enum):
    """The part of an answer that its next text belongs to."""

    UNKNOWN = auto()  # There was only white space, or the beginning of a start mark.
    REASONING = auto()
    SPACE = auto()  # white space between reasoning and content
    CONTENT = auto()


class ReasoningReader:
    """Separates the reasoning at the beginning of one answer from its content.

    The reasoning begins with the answer if the prompt ends with the start mark; else it begins with
    a start mark that the answer begins with. It ends at the end mark, or with the answer. White
    space around the reasoning belongs to neither part.

    Attributes:
        pieces: the text of the reasoning, in order.
    """

    def __init__(self, rule: ReasoningRule, *, is_open: bool) -> None:
        """Begin an answer; `is_open` says whether its prompt ends with the start mark."""
        self._rule = rule
        self._part = _Part.REASONING if is_open else _Part.UNKNOWN
        self._pending = ""  # white space, or text that may be the beginning of a mark
        self.pieces: list[str] = []

    @property
    def is_reasoning(self) -> bool:
        """Whether the answer reasons at this point."""
        return self._part is _Part.REASONING

    def is_mark(self, token: int) -> bool:
        """Return whether a token is a mark here, and not a part of the text."""
        if self._part is _Part.REASONING:
            # A model may repeat the start mark that its prompt ends with.
            is_repeated = token == self._rule.start_id and not self.pieces
            return token == self._rule.end_id or is_repeated
        return self._part is _Part.UNKNOWN and token == self._rule.start_id

    def pass_mark(self, token: int) -> None:
        """Take a token that is a mark."""
        self._pending = ""
        self._part = _Part.SPACE if token == self._rule.end_id else _Part.REASONING

    def push(self, text: str) -> str:
        """Take more text, and return the part of it that is content."""
        if self._part is _Part.CONTENT:
            return text
        text = self._pending + text
        self._pending = ""
        if self._part is _Part.UNKNOWN:
            return self._begin(text)
        if self._part is _Part.REASONING:
            return self._reason(text)
        text = text.lstrip()
        if text:
            self._part = _Part.CONTENT
        return text

    def flush(self) -> str:
        """Take the end of the answer, and return the rest of the content."""
        rest = self._pending
        self._pending = ""
        if self._part is _Part.REASONING:
            self._add(rest.rstrip())
            return ""
        return rest

    def _begin(self, text: str) -> str:
        """Look for the start mark, where it is text, at the beginning of an answer."""
        mark = self._rule.start_text
        stripped = text.lstrip()
        if mark and stripped.startswith(mark):
            self._part = _Part.REASONING
            return self._reason(stripped.removeprefix(mark))
        if not stripped or mark.startswith(stripped):
            self._pending = text
            return ""
        self._part = _Part.CONTENT
        return text

    def _reason(self, text: str) -> str:
        """Look for the end mark, where it is text, and keep white space that may precede it."""
        if not self.pieces:
            text = text.lstrip()
        mark = self._rule.end_text
        reasoning, end, behind = text.partition(mark) if mark else (text, "", "")
        if end:
            self._add(reasoning.rstrip())
            self._part = _Part.SPACE
            return self.push(behind)
        num_open = open_suffix(text, [mark])
        complete = text[: len(text) - num_open].rstrip()
        self._pending = text[len(complete) :]
        self._add(complete)
        return ""

    def _add(self, text: str) -> None:
        if text:
            self.pieces.append(text)


def reasoning_is_open(prompt: Sequence[int], rule: ReasoningRule, tokenizer: Tokenizer) -> bool:
    """Return whether a prompt ends with the start mark, and nothing but white space after it."""
    if rule.end_id is None:
        return tokenizer.decode(prompt[-_MAX_TAIL:]).rstrip().endswith(rule.start_text)
    for token in reversed(prompt[-_MAX_TAIL:]):
        if token == rule.start_id:
            return True
        if tokenizer.decode_bytes([token]).strip():
            return False
    return False


def reads_reasoning(params: SamplingParams) -> bool:
    """Return whether answers with these parameters have reasoning apart from their content.

    Where the end mark is plain text, the format of an answer begins with its first token.
    """
    rule = params.reasoning
    if rule is None:
        return False
    return rule.end_id is not None or params.structured_output is None
