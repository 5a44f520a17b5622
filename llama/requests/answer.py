"""One answer of a request: a sequence, and its text as its tokens come.

In: the tokens that the engine appends to the sequence. Out: pieces of the reasoning and of the
content, up to a stop string.
"""

import time
from dataclasses import dataclass, field

from llama.engine.sequence import FinishReason, SequenceState
from llama.requests.detokenizer import Detokenizer, StopStrings
from llama.requests.reasoning_text import ReasoningReader
from llama.sampling_params import SamplingParams


@dataclass(eq=False)
class Answer:
    """A sequence and its text. Text is emitted as soon as it cannot be part of a stop string.

    The text is that of the content alone, where there is a reader of its reasoning.
    """

    sequence: SequenceState
    params: SamplingParams
    detokenizer: Detokenizer
    stops: StopStrings
    reader: ReasoningReader | None = None
    pieces: list[str] = field(default_factory=list)  # emitted text, in order
    num_read: int = 0  # output tokens decoded so far
    num_reasoning: int = 0  # output tokens of the reasoning so far, with its marks
    num_taken: int = 0  # pieces reported by earlier outputs
    num_reasoning_taken: int = 0  # pieces of the reasoning reported by earlier outputs
    first_token_ts: float = 0.0  # time.monotonic() at the first token; 0 before it
    last_token_ts: float = 0.0  # time.monotonic() at the latest token
    cumulative_logprob: float = 0.0
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None  # stop string or stop token id

    def read(self) -> None:
        """Decode the new tokens of the sequence and search their text for stop strings."""
        seq = self.sequence
        num_output = seq.num_output
        if self.num_read < num_output:
            self.last_token_ts = time.monotonic()
            self.first_token_ts = self.first_token_ts or self.last_token_ts
        while self.num_read < num_output and self.stop_reason is None:
            if seq.logprobs:
                self.cumulative_logprob += seq.logprobs[self.num_read]
            token = seq.tokens[seq.num_prompt + self.num_read]
            self.num_read += 1
            text = self._decode(token) if self.reader else self.detokenizer.push([token])
            self._push(text, self.num_read > self.params.min_tokens)
        if seq.finish_reason is not None and self.stop_reason is None:
            rest = ""
            if seq.stop_id is not None and self.params.include_stop_str_in_output:
                rest = self.detokenizer.push([seq.stop_id])
            rest += self.detokenizer.flush()
            if self.reader is not None:
                rest = self.reader.push(rest) + self.reader.flush()
            self._push(rest, True)
            self._push(self.stops.flush(), False)
        if self.stop_reason is not None:
            self.finish_reason = "stop"
        elif seq.finish_reason is not None:
            self.finish_reason = seq.finish_reason
            self.stop_reason = seq.stop_id

    def _decode(self, token: int) -> str:
        """Return the text that a token adds to the content of an answer that may reason."""
        reader = self.reader
        assert reader is not None
        was_reasoning = reader.is_reasoning
        if reader.is_mark(token):
            text = reader.push(self.detokenizer.flush())
            reader.pass_mark(token)
        else:
            text = reader.push(self.detokenizer.push([token]))
        if was_reasoning or reader.is_reasoning:
            self.num_reasoning = self.num_read
        return text

    def _push(self, text: str, may_stop: bool) -> None:
        """Append text; with `may_stop`, search it for stop strings first."""
        if may_stop:
            text, self.stop_reason = self.stops.push(text)
        if text:
            self.pieces.append(text)
