"""The model-worker protocol of FastChat and DB-GPT: a params dict in, dicts of text so far out.

A host that calls `generate_stream(model, tokenizer, params, device, context_len)` of its own can
call this one instead, with a `Llama` (or, for the async one, an `AsyncLLMEngine`) as the model.
"""

import contextlib
import itertools
from collections.abc import AsyncIterator, Generator, Iterator
from typing import Any

from llama.generation import Llama
from llama.requests.async_engine import AsyncLLMEngine
from llama.requests.llm_engine import LLMEngine
from llama.requests.request import RequestOutput
from llama.sampling_params import SamplingParams
from llama.tokenizer import Tokenizer

# Fields in which hosts describe themselves and the request. None changes the answer.
_LABELS = frozenset({
    "model", "user", "request_id", "messages", "span_id", "context", "version", "context_len",
    "convert_to_compatible_format", "string_prompt", "prompt_echo_len_char",
})  # fmt: skip
_SAMPLING = (
    "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "seed",
)  # fmt: skip
_OTHERS = frozenset({"prompt", "max_new_tokens", "temperature", "stop", "stop_token_ids", "echo"})
_GREEDY_BELOW = 1e-5  # temperatures at or below it are greedy, as in FastChat

_serials = itertools.count()


def generate_stream(
    model: Llama,
    tokenizer: Tokenizer,
    params: dict[str, Any],
    device: str,
    context_len: int,
    stream_interval: int = 2,
) -> Iterator[dict[str, Any]]:
    """FastChat's: {"text", "usage", "finish_reason"} every `stream_interval` tokens and at the end.

    params: prompt, max_new_tokens (256), temperature (1.0; up to 1e-5 is greedy), top_p, top_k,
    repetition_penalty, stop, stop_token_ids, echo (True: the text begins with the prompt), and the
    other numbers of SamplingParams. "text" is all of the text so far. A prompt too long for
    context_len tokens loses its beginning, so that the answer has room. `device` must be the device
    that the model was built on. Closing the iterator aborts. ValueError for what cannot be done.
    """
    _check(tokenizer is model.tokenizer, "tokenizer is not the model's own: pass llama.tokenizer")
    _check(
        str(device).split(":")[0] == model.model.norm.weight.device.type,
        f"device={device!r}, but the model was built on {model.model.norm.weight.device}",
    )
    _check(stream_interval >= 1, f"stream_interval={stream_interval} must be 1 or more")
    prompt, sampling = _request(model.llm_engine, params, context_len)
    request = model.llm_engine.prepare("", prompt, sampling)
    return _reports(model.llm_engine.stream([request]), params, stream_interval)


def _reports(
    outputs: Generator[RequestOutput, None, None], params: dict[str, Any], interval: int
) -> Iterator[dict[str, Any]]:
    reported = 0
    with contextlib.closing(outputs):
        for output in outputs:
            count = output.usage.completion_tokens
            if output.finished or count - reported >= interval:
                reported = count
                yield _report(output, params)


async def async_generate_stream(
    model: AsyncLLMEngine,
    tokenizer: Tokenizer,
    params: dict[str, Any],
    device: str,
    context_len: int,
    *,
    benchmark: bool = False,
) -> AsyncIterator[dict[str, Any]]:
    """DB-GPT's: {"text", "error_code", "usage", "finish_reason"} for every step; many at once.

    As `generate_stream`; benchmark=True ignores stop tokens and strings, so that every request
    makes max_new_tokens. params["request_id"], if given, is the request's name.
    """
    prompt, sampling = _request(model.engine, params, context_len, benchmark=benchmark)
    request_id = str(params.get("request_id") or f"worker-{next(_serials)}")
    async for output in model.generate(prompt, sampling, request_id):
        yield _report(output, params)


def _request(
    engine: LLMEngine, params: dict[str, Any], context_len: int, *, benchmark: bool = False
) -> tuple[list[int], SamplingParams]:
    """The prompt's ids, cut on the left to leave room for the answer, and how to sample."""
    known = _OTHERS | _LABELS | set(_SAMPLING)
    for key in sorted(key for key in params.keys() - known if params[key]):
        raise ValueError(
            f"params has {key}={params[key]!r}, which this worker cannot do: leave it out"
        )
    _check(isinstance(params.get("prompt"), str), "params has no 'prompt' that is a string")
    context = min(context_len, engine.max_seq_len)
    count, temperature = params.get("max_new_tokens", 256), params.get("temperature", 1.0)
    sampling = SamplingParams(
        max_tokens=count,
        temperature=0.0 if 0 <= temperature <= _GREEDY_BELOW else temperature,
        stop=() if benchmark else params.get("stop") or (),
        stop_token_ids=() if benchmark else params.get("stop_token_ids") or (),
        ignore_eos=benchmark,
        **{name: params[name] for name in _SAMPLING if params.get(name) is not None},
    )
    _check(count < context, f"max_new_tokens={count} leaves no room in a context of {context}")
    tokens = _encode(engine.tokenizer, params["prompt"])
    room = context - count
    if len(tokens) > room:
        tokens = tokens[:1] + tokens[len(tokens) - room + 1 :]
    return tokens, sampling


def _encode(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """Ids that begin with begin_of_text, once, whether the host's template wrote it or not.

    Special tokens count as such: the host's template writes them as text, and so the host is
    answerable for what its users can write into it.
    """
    tokens = tokenizer.encode(prompt, bos=False, eos=False, allowed_special="all")
    return tokens if tokens[:1] == [tokenizer.bos_id] else [tokenizer.bos_id, *tokens]


def _report(output: RequestOutput, params: dict[str, Any]) -> dict[str, Any]:
    answer, usage = output.outputs[0], output.usage
    return {
        "text": (params["prompt"] if params.get("echo", True) else "") + answer.text,
        "error_code": 0,
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.total_tokens,
        },
        "finish_reason": answer.finish_reason,
    }


def _check(right: bool, message: str) -> None:
    if not right:
        raise ValueError(message)
