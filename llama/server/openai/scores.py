"""The logprobs objects of OpenAI's completions and chats: tokens with their scores in, objects out.

This file knows no requests and no network.
"""

import copy
from collections.abc import Sequence
from typing import Any

from llama.api import Detokenizer
from llama.tokenizer import Tokenizer

_MIN_LOGPROB = -9999.0  # what OpenAI writes for minus infinity, which JSON does not have

# For each position the token, and the logprobs by token id. The first token of an echoed prompt has
# no logprobs.
Scores = Sequence[tuple[int, dict[int, float] | None]]


def chat_scores(scores: Scores, num_top: int, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the logprobs object of a chat."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        raw = tokenizer.decode_bytes([token])
        return {"token": raw.decode(errors="replace"), "logprob": logprob, "bytes": list(raw)}

    content = []
    for token, logprobs in scores:
        best = _best_first(logprobs or {})
        top = [entry(*pair) for pair in best[:num_top]]
        content.append({**entry(token, dict(best)[token]), "top_logprobs": top})
    return {"content": content, "refusal": None}


class TextScores:
    """The logprobs objects of a completion, one after the other.

    Each has the lists tokens, token_logprobs, top_logprobs and text_offset.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        """Start at the beginning of a text.

        Args:
            tokenizer: the tokenizer of the model.
            skip_special_tokens: whether the text that the offsets point into has none.
        """
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
        self._length = 0

    def fork(self) -> "TextScores":
        """Return a copy, for one of several texts that continue this one."""
        twin = copy.copy(self)
        twin._detokenizer = self._detokenizer.fork()
        return twin

    def push(self, scores: Scores) -> dict[str, Any]:
        """Return the logprobs object of the next tokens."""
        tokens: list[str] = []
        token_logprobs: list[float | None] = []
        top_logprobs: list[dict[str, float] | None] = []
        text_offset: list[int] = []
        for token, logprobs in scores:
            best = dict(_best_first(logprobs or {}))  # empty for the first token of a prompt
            by_text = {self._text(other): logprob for other, logprob in best.items()}
            tokens.append(self._text(token))
            token_logprobs.append(best.get(token))
            top_logprobs.append(by_text or None)
            text_offset.append(self._length)
            self._length += len(self._detokenizer.push([token]))
        return {
            "tokens": tokens,
            "token_logprobs": token_logprobs,
            "top_logprobs": top_logprobs,
            "text_offset": text_offset,
        }

    def _text(self, token: int) -> str:
        """Return a token's text, or its bytes as OpenAI writes them where it is no valid UTF-8."""
        raw = self._tokenizer.decode_bytes([token])
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _best_first(logprobs: dict[int, float]) -> list[tuple[int, float]]:
    """Return tokens and their logprobs, which JSON can have, in descending order."""
    ordered = sorted(logprobs.items(), key=lambda pair: -pair[1])
    return [(token, max(logprob, _MIN_LOGPROB)) for token, logprob in ordered]
