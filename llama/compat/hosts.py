"""generate_stream as model hosts call it: a params dict in, the text so far out, again and again.

A host that calls `generate_stream(model, tokenizer, params, device, context_len)` of its own calls
one of these instead, with a `Llama` (or, for the async one, an `AsyncLLMEngine`) as the model:
`generate_stream` for FastChat, `async_generate_stream` for DB-GPT in place of vLLM. `read_params`
takes what hosts send, numbers as text or as numpy's scalars; what cannot be used is a ValueError
that names the key, as FastChat catches no TypeError.
"""

import contextlib
import itertools
import os
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from llama.checks import brief, errors_in, whole_number
from llama.compat.client_tokenizer import ClientTokenizer
from llama.generation import Llama
from llama.requests.async_engine import AsyncLLMEngine
from llama.requests.llm_engine import LLMEngine
from llama.requests.request import Request, RequestOutput
from llama.sampling_params import NUMBER_TYPES, SamplingParams
from llama.server.openai.answers import COUNTS, TextScores
from llama.tokenizer import Tokenizer

# Keys in which hosts describe themselves, the request or the model. None changes the answer:
# with is_reasoning_model, the text holds the thinking as the model writes it.
_LABELS = frozenset({
    "model", "user", "request_id", "messages", "span_id", "context", "version", "context_len",
    "convert_to_compatible_format", "string_prompt", "prompt_echo_len_char", "is_reasoning_model",
    "think_start_token", "think_end_token", "use_cache",
})  # fmt: skip
_NUMBERS = NUMBER_TYPES.keys() - {"max_tokens", "min_tokens", "prompt_logprobs"}
_OTHERS = {"prompt", "max_new_tokens", "stop", "stop_token_ids", "echo", "do_sample"}
_MOST_TOKENS = 2**31 - 1
# Of an answer, where a request does not say: FastChat 0.2.36, fastchat/serve/inference.py; and
# DB-GPT 0.8.2, dbgpt/model/llm/llm_out/vllm_llm.py.
FASTCHAT_TOKENS, DB_GPT_TOKENS = 256, 2048
_Report = dict[str, Any]
_serials = itertools.count()


@dataclass(frozen=True)
class HostRequest:
    """What a host asks for, checked."""

    prompt: list[int]  # ids, begin_of_text first
    sampling: SamplingParams
    echo: str  # what each text begins with


class Pace:
    """Which reports a host is told: that of the first token, of every `interval` tokens, and the
    last, twice: there are clients that read no text beside a reason."""

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
    params, and what a dict has: see docs/guides/hosts.md. device: where the model was built.
    Closing the iterator aborts. ValueError for what cannot be done, as judge_sent_end=True;
    RuntimeError in the loop if the model has no token to choose."""
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
    benchmark=True ignores stop tokens and strings, so that every request makes max_new_tokens; None
    looks at the environment variable DB_GPT_MODEL_BENCHMARK. params["request_id"]: its name.
    device: without effect, as with vLLM."""
    if not isinstance(getattr(model, "engine", None), LLMEngine):
        kind = f"{type(model).__module__}.{type(model).__name__}"
        raise ValueError(f"model must be a llama.AsyncLLMEngine, got {kind}")
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
        "usage": {name: getattr(output.usage, name) for name in COUNTS},
        "finish_reason": ends[0] if len(ends) == 1 else ends,
    }


def read_params(
    params: Mapping[str, Any],
    context_len: Any,
    tokenizer: Tokenizer,
    max_seq_len: int,
    *,
    max_new_tokens: int = FASTCHAT_TOKENS,
    has_raw_echo: bool = False,
    benchmark: bool = False,
) -> HostRequest:
    """Check `params`; ValueError names what is wrong. The context is the smaller of context_len, if
    it is given, and max_seq_len. max_new_tokens: where the request does not say. has_raw_echo: the
    echo has the prompt's special tokens. benchmark: no stop token or string ends the answer."""
    if not isinstance(params, Mapping):
        raise ValueError(f"params must be a dict, got {type(params).__name__}")
    for key in sorted(params.keys() - (_OTHERS | _LABELS | _NUMBERS), key=str):
        if value := params[key]:
            words = "which this worker cannot do: leave it out"
            raise ValueError(f"params has {key}={brief(value)}, {words}")
    if not isinstance(params.get("prompt"), str):
        raise ValueError("params has no 'prompt' that is a string")
    tokens = ClientTokenizer(tokenizer).encode(params["prompt"])
    with errors_in("params"):
        context = whole_number("context_len", _number(context_len), 2, 2**63, optional=True)
        context = min(context or max_seq_len, max_seq_len)
        wish = _number(params.get("max_new_tokens"))
        wish = whole_number("max_new_tokens", wish, 0, _MOST_TOKENS, optional=True)
        if len(tokens) >= context:
            raise ValueError(
                f"the prompt has {len(tokens)} tokens and leaves no room in a context of {context}:"
                " shorten it"
            )
        count = min(max_new_tokens if wish is None else wish, context - len(tokens))
        echo = _flag(params, "echo", True)
        sampling = _sampling(params, count, echo, benchmark)
    text = params["prompt"] if has_raw_echo else tokenizer.decode(tokens, skip_special_tokens=True)
    return HostRequest(tokens, sampling, text if echo else "")


def _sampling(params: Mapping[str, Any], count: int, echo: bool, benchmark: bool) -> SamplingParams:
    fields = {name: _number(params[name]) for name in _NUMBERS if params.get(name) is not None}
    if fields.get("n", 1) != 1 and params.get("logprobs") not in (None, False):
        raise ValueError(f"logprobs needs n=1, not n={brief(fields['n'])}")
    if fields.get("best_of") == 1:
        del fields["best_of"]  # as if it were not given: there is nothing to choose
    if params.get("do_sample") is not None and not _flag(params, "do_sample", True):
        fields["temperature"] = 0
    if echo and "logprobs" in fields:
        fields["prompt_logprobs"] = fields["logprobs"]
    stop = [text for text in _entries(params, "stop") if text != ""]
    stop_ids = [_number(token) for token in _entries(params, "stop_token_ids")]
    return SamplingParams(
        max_tokens=count,
        stop=() if benchmark else stop,
        stop_token_ids=() if benchmark else stop_ids,
        ignore_eos=benchmark,
        skip_special_tokens=True,
        **fields,
    )


def _number(value: Any) -> Any:
    """A number as hosts send it, "8", 8.0 or numpy's, as int or float; else the value as it is."""
    with contextlib.suppress(TypeError, ValueError, RuntimeError):
        if hasattr(value, "item"):
            value = value.item()
        if isinstance(value, str):
            value = int(value) if value.strip("+- ").isdigit() else float(value)
        if isinstance(value, float) and value.is_integer():
            return int(value)
    return value


def _flag(params: Mapping[str, Any], key: str, default: bool) -> bool:
    """A switch as hosts send it; None is off, as bool(None) is in their code."""
    value = _number(params.get(key, default))
    words = {"true": True, "false": False, "1": True, "0": False, "none": False, "": False}
    word = str(value).strip().lower()
    if word not in words:
        raise ValueError(f"{key}={brief(value)} must be True or False")
    return words[word]


def _entries(params: Mapping[str, Any], key: str) -> list[Any]:
    """The entries of a list, or a value alone, without None, which hosts append to such lists."""
    value: Any = params.get(key)
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, set | frozenset):
        value = sorted(value, key=str)  # the same order on every rank
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        value = [value]
    return [entry for entry in value if entry is not None]
