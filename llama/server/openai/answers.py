"""Response bodies of OpenAI's completion APIs: the engine's outputs in, JSON objects out.

A server or a batch file sends them. `response_body` makes a whole response, `Chunks` the parts of
one that streams. This file knows no network, and runs nothing.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llama.prompts.answer import AnswerDeltas, joined
from llama.requests.detokenizer import Detokenizer
from llama.requests.request import CompletionOutput, RequestOutput
from llama.server.openai.request import OpenAIRequest
from llama.tokenizer import Tokenizer

_MIN_LOGPROB = -9999.0  # what OpenAI writes for minus infinity, which JSON does not have

_Scores = list[tuple[int, dict[int, float]]]  # per position: the token, and logprobs by token
# As _Scores; the first token of an echoed prompt has none.
_PromptScores = Sequence[tuple[int, dict[int, float] | None]]


@dataclass(frozen=True)
class ResponseMeta:
    """What every body of one response says: its id, the model's name, and the time (s, 1970)."""

    id: str
    model: str
    created: int

    def of(self, request: OpenAIRequest, *, is_chunk: bool = False) -> dict[str, Any]:
        kind = "chat.completion" if request.chat else "text_completion"
        return {
            "id": f"{'chatcmpl' if request.chat else 'cmpl'}-{self.id}",
            "object": f"{kind}.chunk" if is_chunk and request.chat else kind,
            "created": self.created,
            "model": self.model if request.model is None else request.model,
        }


def response_body(
    request: OpenAIRequest,
    outputs: Sequence[RequestOutput],
    tokenizer: Tokenizer,
    meta: ResponseMeta,
) -> dict[str, Any]:
    """The response to a finished request; outputs: the last one of each of its prompts."""
    choices = [
        _choice(index, answer, output, request, tokenizer, meta)
        for index, (output, answer) in enumerate((o, a) for o in outputs for a in o.outputs)
    ]
    return {**meta.of(request), "choices": choices, "usage": usage(outputs)}


def usage(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """Tokens of all prompts and their answers; of the prompts', those found in the cache."""
    prompt = sum(output.usage.prompt_tokens for output in outputs)
    completion = sum(output.usage.completion_tokens for output in outputs)
    cached = sum(output.usage.cached_tokens for output in outputs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def _choice(
    index: int,
    answer: CompletionOutput,
    output: RequestOutput,
    request: OpenAIRequest,
    tokenizer: Tokenizer,
    meta: ResponseMeta,
) -> dict[str, Any]:
    logprobs, reason = None, answer.finish_reason
    if request.chat:
        content: dict[str, Any] = {"message": {"role": "assistant", "content": answer.text}}
        deltas = request.deltas(tokenizer, meta.id, output, answer)
        if deltas is not None:
            parts = deltas.push(answer.token_ids, answer.text, is_last=True)
            content = {"message": joined(parts)}
            reason = deltas.finish_reason(reason)
        if answer.logprobs is not None:
            logprobs = _chat_scores(_scores(answer), request.params.logprobs or 0, tokenizer)
    else:
        content = {"text": _echoed(request, output, tokenizer) + answer.text}
        if answer.logprobs is not None:
            scores = TextScores(tokenizer, skip_special_tokens=request.params.skip_special_tokens)
            logprobs = scores.push([*_echoed_scores(request, output), *_scores(answer)])
    return {
        "index": index,
        **content,
        "logprobs": logprobs,
        "finish_reason": reason,
        "stop_reason": answer.stop_reason,
    }


class Chunks:
    """The bodies of a response that streams, for outputs as they come.

    A choice's text comes in pieces that, joined, are the text of `response_body`; its finish_reason
    comes in its last one. Of a chat, a choice's first chunk alone has the role.
    """

    def __init__(self, request: OpenAIRequest, tokenizer: Tokenizer, meta: ResponseMeta) -> None:
        self._request = request
        self._tokenizer = tokenizer
        self._id = meta.id
        self._head = meta.of(request, is_chunk=True)
        self._choices: dict[int, _ChoiceState] = {}
        self._latest: dict[int, RequestOutput] = {}  # by prompt

    def of(self, output: RequestOutput) -> Iterator[dict[str, Any]]:
        """The chunks that an output brings: none, where no choice has anything new."""
        self._latest[output.index] = output
        for answer in output.outputs:
            index = output.index * self._request.params.n + answer.index
            state = self._choices.get(index)
            if state is None:
                state = self._choices[index] = _ChoiceState(
                    TextScores(
                        self._tokenizer,
                        skip_special_tokens=self._request.params.skip_special_tokens,
                    )
                )
                yield from self._first(index, output, answer, state)
            if not state.is_finished:
                yield from self._next(index, output, answer, state)

    def last(self) -> Iterator[dict[str, Any]]:
        """After all outputs: the counts of tokens, if they were asked for."""
        if self._request.has_usage:
            outputs = list(self._latest.values())
            yield {**self._head, "choices": [], "usage": usage(outputs)}

    def _first(
        self, index: int, output: RequestOutput, answer: CompletionOutput, state: "_ChoiceState"
    ) -> Iterator[dict[str, Any]]:
        request = self._request
        if request.chat:
            state.deltas = request.deltas(self._tokenizer, self._id, output, answer)
            yield self._chunk(index, {"delta": {"role": "assistant", "content": ""}})
        elif request.echo:
            scores = _echoed_scores(request, output)
            logprobs = state.scores.push(scores) if scores else None
            text = _echoed(request, output, self._tokenizer)
            yield self._chunk(index, {"text": text}, logprobs)

    def _next(
        self, index: int, output: RequestOutput, answer: CompletionOutput, state: "_ChoiceState"
    ) -> Iterator[dict[str, Any]]:
        text, logprobs, reason = answer.new_text, None, answer.finish_reason
        if self._request.params.logprobs is not None:
            new = _scores(answer)[state.num_scored :]
            state.num_scored += len(new)
            if new and self._request.chat:
                logprobs = _chat_scores(new, self._request.params.logprobs, self._tokenizer)
            elif new:
                logprobs = state.scores.push(new)
        state.is_finished = reason is not None
        if state.deltas is not None:
            deltas = state.deltas.push(answer.token_ids, text, is_last=state.is_finished)
            reason = state.deltas.finish_reason(reason)
        else:
            deltas = [{"content": text}] if text else []
        if not deltas and (logprobs or reason):
            deltas = [{"content": ""} if logprobs else {}]
        for delta in deltas:
            content: dict[str, Any] = {"delta": delta} if self._request.chat else {"text": text}
            is_last = delta is deltas[-1]
            yield self._chunk(
                index, content, logprobs, reason if is_last else None, answer.stop_reason
            )
            logprobs = None  # those of all the tokens came with the first

    def _chunk(
        self,
        index: int,
        content: Mapping[str, Any],
        logprobs: dict[str, Any] | None = None,
        reason: str | None = None,
        stop_reason: str | int | None = None,
    ) -> dict[str, Any]:
        choice = {"index": index, **content, "logprobs": logprobs, "finish_reason": reason}
        if reason is not None:
            choice["stop_reason"] = stop_reason
        chunk = {**self._head, "choices": [choice]}
        if self._request.has_usage:
            chunk["usage"] = None
        return chunk


@dataclass
class _ChoiceState:
    scores: "TextScores"
    num_scored: int = 0  # tokens whose log-probabilities were sent
    is_finished: bool = False
    deltas: AnswerDeltas | None = None  # of a chat that may call tools


def _echoed(request: OpenAIRequest, output: RequestOutput, tokenizer: Tokenizer) -> str:
    """The prompt, where the request wants it in front of the answer."""
    if not request.echo:
        return ""
    if output.prompt is not None:
        return output.prompt
    skip = request.params.skip_special_tokens
    return tokenizer.decode(output.prompt_token_ids, skip_special_tokens=skip)


def _echoed_scores(request: OpenAIRequest, output: RequestOutput) -> _PromptScores:
    if not request.echo or output.prompt_logprobs is None:
        return []
    return list(zip(output.prompt_token_ids, output.prompt_logprobs, strict=True))


def _scores(answer: CompletionOutput) -> _Scores:
    return list(zip(answer.token_ids, answer.logprobs or [], strict=True))


def _chat_scores(scores: _Scores, num_top: int, tokenizer: Tokenizer) -> dict[str, Any]:
    def entry(token: int, logprob: float) -> dict[str, Any]:
        raw = tokenizer.decode_bytes([token])
        return {
            "token": raw.decode(errors="replace"),
            "logprob": max(logprob, _MIN_LOGPROB),
            "bytes": list(raw),
        }

    content = []
    for token, logprobs in scores:
        top = [entry(*pair) for pair in _best_first(logprobs)[:num_top]]
        content.append({**entry(token, logprobs[token]), "top_logprobs": top})
    return {"content": content, "refusal": None}


class TextScores:
    """The logprobs of a completion: tokens, token_logprobs, top_logprobs and text_offset.

    Each `push` has those of more tokens; the offsets go on from the tokens before.
    skip_special_tokens: as in the text that the offsets are of.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = False) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
        self._length = 0

    def push(self, scores: _PromptScores) -> dict[str, Any]:
        offsets = []
        for token, _ in scores:
            offsets.append(self._length)
            self._length += len(self._detokenizer.push([token]))
        return {
            "tokens": [self._text(token) for token, _ in scores],
            "token_logprobs": [
                None if logprobs is None else max(logprobs[token], _MIN_LOGPROB)
                for token, logprobs in scores
            ],
            "top_logprobs": [
                None
                if logprobs is None
                else {self._text(t): max(value, _MIN_LOGPROB) for t, value in _best_first(logprobs)}
                for _, logprobs in scores
            ],
            "text_offset": offsets,
        }

    def _text(self, token: int) -> str:
        """A token's text; its bytes, as OpenAI writes them, where they are no whole characters:
        as text, several tokens would be the same key."""
        raw = self._tokenizer.decode_bytes([token])
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _best_first(logprobs: dict[int, float]) -> list[tuple[int, float]]:
    return sorted(logprobs.items(), key=lambda pair: -pair[1])
