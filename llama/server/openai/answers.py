"""Response bodies of OpenAI's completion APIs: the engine's outputs in, JSON objects out.

A server or a batch file sends them. This file knows no network, and runs nothing.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llama.prompts.answer import AnswerDeltas
from llama.requests.detokenizer import Detokenizer
from llama.requests.request import CompletionOutput, RequestOutput
from llama.server.encoding import DONE
from llama.server.errors import ApiError
from llama.server.openai.request import OpenAIRequest
from llama.tokenizer import Tokenizer

COUNTS = ("prompt_tokens", "completion_tokens", "total_tokens")  # of a usage
_MIN_LOGPROB = -9999.0  # what OpenAI writes for minus infinity, which JSON does not have

# Per position: the token, and logprobs by token; the first token of an echoed prompt has none.
_Scores = Sequence[tuple[int, dict[int, float] | None]]


@dataclass(frozen=True)
class ResponseMeta:
    """What every body of one response says: its id, the model's name, and the time (s, 1970)."""

    id: str
    model: str
    created: int


def _usage(request: OpenAIRequest, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    details = {}
    if request.params.prediction:
        predicted = [answer.num_predicted() for output in outputs for answer in output.outputs]
        names = ("accepted_prediction_tokens", "rejected_prediction_tokens")
        sums = map(sum, zip(*predicted, strict=True))
        details["completion_tokens_details"] = dict(zip(names, sums, strict=True))
    return {
        **{name: sum(getattr(x.usage, name) for x in outputs) for name in COUNTS},
        "prompt_tokens_details": {"cached_tokens": sum(x.usage.cached_tokens for x in outputs)},
        **details,
    }


class Completion:
    """The response to a request: whole, or the chunks of one that streams, as its outputs come. A
    choice's last chunk has its finish_reason, and the first one of a chat has the role."""

    end = DONE  # follows the last event of a stream
    idle_event = None  # sent while nothing else comes

    def __init__(self, request: OpenAIRequest, tokenizer: Tokenizer, meta: ResponseMeta) -> None:
        self._request, self._tokenizer, self._id = request, tokenizer, meta.id
        self._kind = "chat.completion" if request.chat else "text_completion"
        self._head = {
            "id": f"{'chatcmpl' if request.chat else 'cmpl'}-{meta.id}",
            "object": f"{self._kind}.chunk" if request.chat else self._kind,
            "created": meta.created,
            "model": meta.model,
        }
        self._choices: dict[int, _Choice] = {}
        self._latest: dict[int, RequestOutput] = {}  # by prompt

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The response to a finished request; outputs: the last one of each of its prompts."""
        choices = [self._whole(output, answer) for output in outputs for answer in output.outputs]
        return {
            **self._head,
            "object": self._kind,
            "choices": choices,
            "usage": _usage(self._request, outputs),
        }

    def of(self, output: RequestOutput) -> Iterator[dict[str, Any]]:
        """The chunks that an output brings: none, where no choice has anything new."""
        self._latest[output.index] = output
        for answer in output.outputs:
            choice = self._choice(output, answer)
            if not choice.has_begun:
                choice.has_begun = True
                yield from self._first(choice)
            if not choice.is_finished:
                yield from self._next(choice, answer)

    def last(self) -> Iterator[dict[str, Any]]:
        """After all outputs: the counts of tokens and their speed, if they were asked for."""
        if self._request.has_usage:
            outputs = list(self._latest.values())
            chunk = {**self._head, "choices": [], "usage": _usage(self._request, outputs)}
            if self._request.num_answers == 1:
                # The words of llama.cpp's server. The first token ends the reading of the prompt.
                answer = outputs[0].outputs[0]
                count, seconds = len(answer.token_ids), answer.decode_s
                chunk["timings"] = {
                    "predicted_n": count,
                    "predicted_ms": 1000 * seconds,
                    "predicted_per_second": (count - 1) / seconds if seconds else None,
                }
            yield chunk

    def failed(self, error: ApiError) -> dict[str, Any]:
        return error.body()

    def _choice(self, output: RequestOutput, answer: CompletionOutput) -> "_Choice":
        index = output.index * self._request.params.n + answer.index
        if index not in self._choices:
            deltas = self._request.deltas(self._tokenizer, self._id, output, answer)
            self._choices[index] = _Choice(index, deltas, self._request, output)
        return self._choices[index]

    def _whole(self, output: RequestOutput, answer: CompletionOutput) -> dict[str, Any]:
        choice = self._choice(output, answer)
        if self._request.chat:
            content: dict[str, Any] = {"message": choice.deltas.message(answer)}
        else:
            content = {"text": choice.echoed + answer.text}
        scores = [*choice.echoed_scores, *choice.new_scores(answer)]
        return {
            "index": choice.index,
            **content,
            "logprobs": None if answer.logprobs is None else choice.logprobs(scores),
            "finish_reason": choice.deltas.finish_reason(answer.finish_reason),
            "stop_reason": answer.stop_reason,
        }

    def _first(self, choice: "_Choice") -> Iterator[dict[str, Any]]:
        if self._request.chat:
            yield self._chunk(choice, {"delta": {"role": "assistant", "content": ""}})
        elif self._request.echo:
            yield self._chunk(choice, {"text": choice.echoed}, choice.echoed_scores)

    def _next(self, choice: "_Choice", answer: CompletionOutput) -> Iterator[dict[str, Any]]:
        scores = choice.new_scores(answer)
        deltas = choice.deltas.push(answer)
        choice.is_finished = answer.finish_reason is not None
        if not deltas and (scores or choice.is_finished):
            deltas = [{"content": ""}] if scores or not self._request.chat else [{}]
        for delta in deltas:
            content = {"delta": delta} if self._request.chat else {"text": delta["content"]}
            chunk = self._chunk(choice, content, scores)
            if choice.is_finished and delta is deltas[-1]:
                reason = choice.deltas.finish_reason(answer.finish_reason)
                chunk["choices"][0] |= {"finish_reason": reason, "stop_reason": answer.stop_reason}
            yield chunk
            scores = []  # those of all the tokens came with the first

    def _chunk(
        self, choice: "_Choice", content: Mapping[str, Any], scores: _Scores = ()
    ) -> dict[str, Any]:
        logprobs = choice.logprobs(scores) if scores else None
        part = {"index": choice.index, **content, "logprobs": logprobs, "finish_reason": None}
        chunk = {**self._head, "choices": [part]}
        if self._request.has_usage:
            chunk["usage"] = None
        return chunk


class _Choice:
    """One answer to one prompt; with echo, the prompt and its scores come in front of it."""

    def __init__(
        self, index: int, deltas: AnswerDeltas, request: OpenAIRequest, output: RequestOutput
    ) -> None:
        self.index, self.deltas = index, deltas
        self.has_begun = self.is_finished = False
        self.echoed = ""
        self.echoed_scores: _Scores = []
        skip, tokenizer = request.params.skip_special_tokens, deltas.tokenizer
        if request.echo:
            ids, scores, text = output.prompt_token_ids, output.prompt_logprobs, output.prompt
            self.echoed = tokenizer.decode(ids, skip_special_tokens=skip) if text is None else text
            self.echoed_scores = [] if scores is None else list(zip(ids, scores, strict=True))
        self._num_top = request.params.logprobs
        self._scores = None if request.chat else TextScores(tokenizer, skip_special_tokens=skip)
        self._num_scored = 0  # tokens whose log-probabilities were read

    def new_scores(self, answer: CompletionOutput) -> _Scores:
        """Those of the tokens that came since the last call, where they are asked for."""
        if self._num_top is None:
            return []
        scores = list(zip(answer.token_ids, answer.logprobs or [], strict=True))[self._num_scored :]
        self._num_scored += len(scores)
        return scores

    def logprobs(self, scores: _Scores) -> dict[str, Any]:
        if self._scores is None:
            return _chat_scores(scores, self._num_top or 0, self.deltas.tokenizer)
        return self._scores.push(scores)


def _chat_scores(scores: _Scores, num_top: int, tokenizer: Tokenizer) -> dict[str, Any]:
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
    """The logprobs of a completion: tokens, token_logprobs, top_logprobs and text_offset. Each
    `push` has those of more tokens. skip_special_tokens: as in the text that the offsets are of."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
        self._length = 0

    def push(self, scores: _Scores) -> dict[str, Any]:
        rows: list[tuple[Any, ...]] = []
        for token, logprobs in scores:
            best = dict(_best_first(logprobs or {}))  # the first token of a prompt has none
            named = {self._text(each): logprob for each, logprob in best.items()}
            rows.append((self._text(token), best.get(token), named or None, self._length))
            self._length += len(self._detokenizer.push([token]))
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        return {name: [row[i] for row in rows] for i, name in enumerate(names)}

    def _text(self, token: int) -> str:
        """A token's text; its bytes, as OpenAI writes them, where they are no whole characters."""
        raw = self._tokenizer.decode_bytes([token])
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _best_first(logprobs: dict[int, float]) -> list[tuple[int, float]]:
    ordered = sorted(logprobs.items(), key=lambda pair: -pair[1])
    return [(token, max(logprob, _MIN_LOGPROB)) for token, logprob in ordered]
