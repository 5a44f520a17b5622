"""generate_stream as model hosts call it: a params dict in, the text so far out, again and again.

A host that calls `generate_stream(model, tokenizer, params, device, context_len)` of its own calls
one of these instead, with a `Llama` (or, for the async one, an `AsyncLLMEngine`) as the model:
`generate_stream` for FastChat, `async_generate_stream` for DB-GPT in place of vLLM. How a request
is read, and what it leaves open, is in `host_params.py`.
"""

import contextlib
import itertools
import os
from collections.abc import AsyncIterator, Iterator
from typing import Any

from llama.checks import whole_number
from llama.compat.client_tokenizer import ClientTokenizer
from llama.compat.host_params import DB_GPT_TOKENS, HostRequest, read_params
from llama.generation import Llama
from llama.requests.async_engine import AsyncLLMEngine
from llama.requests.llm_engine import LLMEngine
from llama.requests.request import Request, RequestOutput
from llama.server.openai.answers import TextScores
from llama.tokenizer import Tokenizer

_Report = dict[str, Any]

_serials = itertools.count()


class Pace:
    """Which reports a host is told: that of the first token, of every `interval` tokens, the last.

    The last comes twice, as FastChat's own workers send it: why a text has ended is said alone,
    after all text. Its OpenAI server makes a chunk of that, and there are clients that read no text
    beside a reason.
    """

    def __init__(self, interval: int) -> None:
        self._interval = interval
        self._told = 1 - interval  # tokens

    def told(self, report: _Report) -> list[_Report]:
        reasons = report["finish_reason"]
        if None not in (reasons if isinstance(reasons, list) else [reasons]):
            return [{**report, "finish_reason": None}, report]
        count = report["usage"]["completion_tokens"]
        if count - self._told < self._interval:
            return []
        self._told = count
        return [report]


def generate_stream(
    model: Llama,
    tokenizer: Tokenizer | ClientTokenizer,
    params: dict[str, Any],
    device: str,
    context_len: int | None = None,
    stream_interval: int = 2,
    judge_sent_end: bool = False,
) -> Iterator[_Report]:
    """FastChat's: a dict with the first token, every `stream_interval` tokens, and at the end.

    params: llama/compat/README.md has the keys. A dict has "text" (all of it so far), "usage",
    "logprobs" (None if not asked for), "error_code" (0), and "finish_reason" (None but in the last
    one; the one before has the same text, as hosts expect). An answer has at most the tokens that
    the prompt leaves of context_len.
    `device` must be the device that the model was built on. Closing the iterator aborts. ValueError
    for what cannot be done, as judge_sent_end=True; RuntimeError in the loop if the model has no
    token to choose.
    """
    if not isinstance(getattr(model, "llm_engine", None), LLMEngine):
        raise ValueError(f"model must be a Llama, got {type(model).__name__}")
    engine, built_on = model.llm_engine, model.model.norm.weight.device
    checked: list[HostRequest] = []

    def prepared() -> Iterator[Request]:
        """The engine iterates over it where an error on one rank becomes an error on every rank."""
        if getattr(tokenizer, "wrapped", tokenizer) is not engine.tokenizer:
            raise ValueError("tokenizer is not the model's own: pass llama.tokenizer")
        if str(device).split(":")[0] != built_on.type:
            raise ValueError(f"device={device!r}, but the model was built on {built_on}")
        whole_number("stream_interval", stream_interval, 1, 2**31 - 1)
        if judge_sent_end:
            raise ValueError("judge_sent_end=True cannot be done: a stop token ends the answer")
        request = read_params(params, context_len, engine.tokenizer, engine.max_seq_len)
        checked.append(request)
        yield engine.prepare("", request.prompt, request.sampling)

    outputs, pace = engine.stream(prepared()), Pace(stream_interval)

    def reports() -> Iterator[_Report]:
        with contextlib.closing(outputs):
            for output in outputs:
                yield from pace.told(report_of(checked[0], output, engine.tokenizer))

    return reports()


async def async_generate_stream(
    model: AsyncLLMEngine,
    tokenizer: Tokenizer | ClientTokenizer,
    params: dict[str, Any],
    device: str,
    context_len: int,
    *,
    benchmark: bool | None = None,
) -> AsyncIterator[_Report]:
    """DB-GPT's, in place of vLLM: a dict as `generate_stream`'s for every step; many at once.

    An answer has at most the tokens that the prompt leaves. With n above 1, "text"
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
        params,
        context_len,
        engine.tokenizer,
        engine.max_seq_len,
        max_new_tokens=DB_GPT_TOKENS,
        has_raw_echo=True,
        benchmark=benchmark,
    )
    request_id = str(params.get("request_id") or f"worker-{next(_serials)}")
    prepared = await model.prepare(request.prompt, request.sampling, request_id)
    async with contextlib.aclosing(model.stream([prepared])) as outputs:
        async for output in outputs:
            yield report_of(request, output, engine.tokenizer)


def report_of(request: HostRequest, output: RequestOutput, tokenizer: Tokenizer) -> _Report:
    """What a host reads of an output."""
    if output.error is not None:
        raise RuntimeError(output.error)
    ends, first = [answer.finish_reason for answer in output.outputs], output.outputs[0]
    scores = [  # OpenAI's of a completion, which FastChat passes on; with echo, the prompt's too
        *zip(request.prompt, output.prompt_logprobs or (), strict=False),
        *zip(first.token_ids, first.logprobs or (), strict=False),
    ]
    return {
        "text": " ".join(request.echo + answer.text for answer in output.outputs),
        "error_code": 0,
        "logprobs": None
        if first.logprobs is None
        else TextScores(tokenizer, skip_special_tokens=True).push(scores),
        "usage": {
            "prompt_tokens": output.usage.prompt_tokens,
            "completion_tokens": output.usage.completion_tokens,
            "total_tokens": output.usage.total_tokens,
        },
        "finish_reason": ends[0] if len(ends) == 1 else ends,
    }
