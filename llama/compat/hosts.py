"""generate_stream as model hosts call it: a params dict in, the text so far out, again and again.

A host that calls `generate_stream(model, tokenizer, params, device, context_len)` of its own calls
one of these instead, with a `Llama` (or, for the async one, an `AsyncLLMEngine`) as the model:
`generate_stream` for FastChat, `async_generate_stream` for DB-GPT in place of vLLM,
`gorilla_generate_stream` and `guanaco_generate_stream`. What a request leaves open is in
`host_defaults.py`, how it is read in `host_params.py`.
"""

import contextlib
import itertools
import os
from collections.abc import AsyncIterator, Generator, Iterator, Sequence
from dataclasses import replace
from typing import Any

from llama.compat.client_tokenizer import ClientTokenizer
from llama.compat.host_defaults import DB_GPT, FASTCHAT, GORILLA, GUANACO, Dialect
from llama.compat.host_params import WorkerRequest, read_params
from llama.generation import Llama
from llama.requests.async_engine import AsyncLLMEngine
from llama.requests.llm_engine import LLMEngine
from llama.requests.request import Request, RequestOutput
from llama.server.openai.answers import TextScores
from llama.tokenizer import Tokenizer

# FastChat's judge_sent_end: an answer that ends otherwise goes on.
_SENTENCE_ENDS = (".", "?", "!", "。", "？", "！", "…", '"', "'", "”")

_serials = itertools.count()


class Pace:
    """Which reports are due: that of the first token, of every `interval` tokens, the last one."""

    def __init__(self, interval: int) -> None:
        self._interval = interval
        self._reported = 1 - interval

    def is_due(self, report: dict[str, Any]) -> bool:
        count = report["usage"]["completion_tokens"]
        if not is_last(report) and count - self._reported < self._interval:
            return False
        self._reported = count
        return True


def generate_stream(
    model: Llama,
    tokenizer: Tokenizer | ClientTokenizer,
    params: dict[str, Any],
    device: str,
    context_len: int,
    stream_interval: int = 2,
    judge_sent_end: bool = False,
    *,
    dialect: Dialect = FASTCHAT,
) -> Iterator[dict[str, Any]]:
    """FastChat's: a dict with the first token, every `stream_interval` tokens, and at the end.

    params: llama/compat/README.md has the keys. A dict has "text" (all of it so far), "usage",
    "logprobs" (None if not asked for), "error_code" (0), and "finish_reason" (None but in the last
    one; the one before has the same text, as hosts expect). A prompt too long for context_len loses
    its beginning: usage["dropped_prompt_tokens"] counts that, and a UserWarning says it.
    judge_sent_end: a stop token does not end the answer inside a sentence. `device` must be the
    device that the model was built on. Closing the iterator aborts. ValueError for what cannot be
    done; RuntimeError in the loop if the model has no token to choose.
    """
    return _ending_twice(
        _start(
            model, tokenizer, params, device, context_len, stream_interval, dialect, judge_sent_end
        )
    )


def gorilla_generate_stream(
    model: Llama,
    tokenizer: Tokenizer | ClientTokenizer,
    params: dict[str, Any],
    device: str,
    context_len: int = 42048,
    stream_interval: int = 2,
) -> Iterator[str]:
    """gorilla's: as `generate_stream`, but it yields only the text so far, without the prompt."""
    return _texts(_start(model, tokenizer, params, device, context_len, stream_interval, GORILLA))


def guanaco_generate_stream(
    model: Llama,
    tokenizer: Tokenizer | ClientTokenizer,
    params: dict[str, Any],
    device: str,
    context_len: int = 2048,
) -> Iterator[str]:
    """guanaco's: as gorilla's, for each token; top_k 1, repetition_penalty 1.7, stop "###"."""
    return _texts(_start(model, tokenizer, params, device, context_len, 1, GUANACO))


async def async_generate_stream(
    model: AsyncLLMEngine,
    tokenizer: Tokenizer | ClientTokenizer,
    params: dict[str, Any],
    device: str,
    context_len: int,
    *,
    benchmark: bool | None = None,
    dialect: Dialect = DB_GPT,
) -> AsyncIterator[dict[str, Any]]:
    """DB-GPT's, in place of vLLM: a dict as `generate_stream`'s for every step; many at once.

    A prompt too long for max_new_tokens is kept, and the answer is shorter. With n above 1, "text"
    has the answers joined by " ", and "finish_reason" is a list. benchmark=True ignores stop tokens
    and strings, so that every request makes max_new_tokens; None looks at the environment variable
    DB_GPT_MODEL_BENCHMARK. params["request_id"], if given, is the request's name. `device` is where
    the engine's model is, whatever is given, as with vLLM.
    """
    if not isinstance(getattr(model, "engine", None), LLMEngine):
        kind = type(model)
        raise ValueError(
            f"model must be a llama.AsyncLLMEngine, got {kind.__module__}.{kind.__name__}"
        )
    engine = model.engine
    if benchmark is None:
        benchmark = os.getenv("DB_GPT_MODEL_BENCHMARK", "").lower() == "true"
    request = read_params(
        params, context_len, dialect, engine.tokenizer, engine.max_seq_len, benchmark=benchmark
    )
    if request.judge_sent_end:
        raise ValueError("judge_sent_end is for generate_stream: leave it out here")
    request_id = str(params.get("request_id") or f"worker-{next(_serials)}")
    async for output in model.generate(request.prompt, request.sampling, request_id):
        yield _report(request, request.echo, [output], engine.tokenizer)


def _start(
    model: Llama,
    tokenizer: Tokenizer | ClientTokenizer,
    params: dict[str, Any],
    device: str,
    context_len: int,
    interval: int,
    dialect: Dialect,
    judge_sent_end: bool = False,
) -> Generator[dict[str, Any], None, None]:
    """Check everything now; the reports that are due from the first `next` on."""
    if not isinstance(getattr(model, "llm_engine", None), LLMEngine):
        raise ValueError(f"model must be a Llama, got {type(model).__name__}")
    engine, built_on = model.llm_engine, model.model.norm.weight.device
    checked: list[WorkerRequest] = []

    def prepared() -> Iterator[Request]:
        """The engine iterates over it where an error on one rank becomes an error on every rank."""
        if getattr(tokenizer, "wrapped", tokenizer) is not engine.tokenizer:
            raise ValueError("tokenizer is not the model's own: pass llama.tokenizer")
        if str(device).split(":")[0] != built_on.type:
            raise ValueError(f"device={device!r}, but the model was built on {built_on}")
        if isinstance(interval, bool) or not isinstance(interval, int) or interval < 1:
            raise ValueError(f"stream_interval={interval!r} must be a whole number, 1 or more")
        request = read_params(params, context_len, dialect, engine.tokenizer, engine.max_seq_len)
        if judge_sent_end:
            request = replace(request, judge_sent_end=True)
        checked.append(request)
        yield engine.prepare("", request.prompt, request.sampling)

    outputs = engine.stream(prepared())
    return _reports(engine, checked[0], outputs, Pace(interval))


def _reports(
    engine: LLMEngine,
    request: WorkerRequest,
    outputs: Generator[RequestOutput, None, None],
    pace: Pace,
) -> Generator[dict[str, Any], None, None]:
    """The reports that are due. An answer that breaks off in a sentence goes on as a new request,
    whose prompt is all so far (in the KV cache already) and whose first token is no stop token.
    A stop string that begins in the one and ends in the other is not found."""
    parts: list[RequestOutput] = []  # ended, but gone on from
    head = request.echo
    while True:
        with contextlib.closing(outputs):
            for output in outputs:
                report = _report(request, head, [*parts, output], engine.tokenizer)
                left = _tokens_to_go_on_with(request, output, report)
                if not left and pace.is_due(report):
                    yield report
        if not left:
            return
        parts.append(output)
        prompt = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        sampling = replace(request.sampling, max_tokens=left, min_tokens=1, prompt_logprobs=None)
        rest = engine.prepare("", prompt, sampling)
        # Whole characters only: the bytes of a half one wait for the others.
        head = request.echo + rest.answers[0].detokenizer.push(prompt[len(request.prompt) :])
        outputs = engine.stream([rest])


def _tokens_to_go_on_with(
    request: WorkerRequest, output: RequestOutput, report: dict[str, Any]
) -> int:
    """How many tokens may follow an answer that a stop token has ended inside a sentence."""
    answer = output.outputs[0]
    was_token = answer.finish_reason == "stop" and isinstance(answer.stop_reason, int)
    if not (request.judge_sent_end and was_token) or report["text"].endswith(_SENTENCE_ENDS):
        return 0
    return (request.sampling.max_tokens or 0) - report["usage"]["completion_tokens"]


def _report(
    request: WorkerRequest, head: str, parts: Sequence[RequestOutput], tokenizer: Tokenizer
) -> dict[str, Any]:
    """The dict for the last of `parts`, which follow one another; `head` comes before its text."""
    last = parts[-1]
    if last.error is not None:
        raise RuntimeError(last.error)
    reasons = [answer.finish_reason for answer in last.outputs]
    completion_tokens = sum(part.usage.completion_tokens for part in parts)
    return {
        "text": " ".join(head + answer.text for answer in last.outputs),
        "error_code": 0,
        "logprobs": _logprobs(request, parts, tokenizer),
        "usage": {
            "prompt_tokens": len(request.prompt),
            "completion_tokens": completion_tokens,
            "total_tokens": len(request.prompt) + completion_tokens,
            "dropped_prompt_tokens": request.num_dropped,
        },
        "finish_reason": reasons[0] if len(reasons) == 1 else reasons,
    }


def _logprobs(
    request: WorkerRequest, parts: Sequence[RequestOutput], tokenizer: Tokenizer
) -> dict[str, Any] | None:
    """OpenAI's logprobs of a completion, which FastChat passes on; with echo, the prompt's too."""
    if request.sampling.logprobs is None:
        return None
    scores = list(zip(request.prompt, parts[0].prompt_logprobs or (), strict=False))
    for answer in (part.outputs[0] for part in parts):
        scores += zip(answer.token_ids, answer.logprobs or (), strict=False)
    return TextScores(tokenizer, skip_special_tokens=True).push(scores)


def twice_at_the_end(report: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """As FastChat's own workers: why a text has ended is said alone, after all text. Its OpenAI
    server makes a chunk of that, and there are clients that read no text beside a reason."""
    if is_last(report):
        yield {**report, "finish_reason": None}
    yield report


def is_last(report: dict[str, Any]) -> bool:
    reason = report.get("finish_reason")  # FastChat's errors have none
    return None not in reason if isinstance(reason, list) else reason is not None


def _ending_twice(
    reports: Generator[dict[str, Any], None, None],
) -> Generator[dict[str, Any], None, None]:
    with contextlib.closing(reports):
        for report in reports:
            yield from twice_at_the_end(report)


def _texts(reports: Generator[dict[str, Any], None, None]) -> Generator[str, None, None]:
    with contextlib.closing(reports):
        for report in reports:
            yield report["text"]
