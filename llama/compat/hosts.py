"""The function generate_stream as model hosts call it: a params dict becomes a stream of reports.

A host that calls `generate_stream(model, tokenizer, params, device, context_len)` of its own calls
one of these functions instead, and passes a `Llama` as the model (an `AsyncLLMEngine` for the async
one): `generate_stream` for FastChat, `async_generate_stream` for DB-GPT in place of vLLM,
`gorilla_generate_stream` and `guanaco_generate_stream` for gorilla and guanaco.
`read_params` accepts what hosts send, such as numbers as text or as numpy scalars. A value that
cannot be used is a ValueError that names the key, because FastChat does not catch TypeError.
"""

import contextlib
import itertools
import os
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from llama.api import AsyncLLMEngine, Llama, LLMEngine, Request, RequestOutput
from llama.common.checks import brief, errors_in, whole_number
from llama.compat.client_tokenizer import ClientTokenizer
from llama.sampling_params import MAX_COUNT, NUMBER_TYPES, SamplingParams
from llama.server.openai.scores import TextScores
from llama.tokenizer import Tokenizer

# Keys with which hosts describe themselves, the request or the model. None of them changes the
# answer; with is_reasoning_model, the text holds the thinking as the model writes it.
_LABELS = frozenset(
    {
        "model",
        "user",
        "request_id",
        "messages",
        "span_id",
        "context",
        "version",
        "context_len",
        "convert_to_compatible_format",
        "string_prompt",
        "prompt_echo_len_char",
        "is_reasoning_model",
        "think_start_token",
        "think_end_token",
        "use_cache",
    }
)
_NUMERIC_KEYS = NUMBER_TYPES.keys() - {"max_tokens", "min_tokens", "prompt_logprobs"}
_OTHER_KEYS = {"prompt", "max_new_tokens", "stop", "stop_token_ids", "echo", "do_sample"}
# The default of max_new_tokens in FastChat 0.2.36, fastchat/serve/inference.py, and in DB-GPT
# 0.8.2, dbgpt/model/llm/llm_out/vllm_llm.py.
FASTCHAT_TOKENS = 256
DB_GPT_TOKENS = 2048
# The defaults of gorilla and guanaco, from DB-GPT 0.3, pilot/model/llm_out/gorilla_llm.py and
# guanaco_llm.py, which have the functions of these two programs.
_GORILLA: dict[str, Any] = {"max_new_tokens": 1024}
_GORILLA_CONTEXT = 42_048
_GUANACO: dict[str, Any] = {
    "max_new_tokens": 512,
    "stop": "###",
    "top_k": 1,
    "repetition_penalty": 1.7,
}
_GUANACO_CONTEXT = 2048
_SWITCHES = {"true": True, "1": True, "false": False, "0": False, "none": False, "": False}
_Report = dict[str, Any]
_serials = itertools.count()


@dataclass(frozen=True)
class HostRequest:
    """A host's request, checked."""

    prompt: list[int]  # ids, with begin_of_text first
    sampling: SamplingParams
    echo: str  # the text with which each report begins


class Pace:
    """The choice of the outputs that a host gets reports of.

    These are the outputs with the first token, with every `interval` tokens, and the last one.
    """

    def __init__(self, interval: int) -> None:
        """Begin a stream with a report for every `interval` tokens."""
        self._interval = interval
        self._num_reported = 1 - interval  # tokens

    def is_due(self, output: RequestOutput) -> bool:
        """Return whether to report an output, which then counts as reported."""
        count = output.usage.completion_tokens
        is_due = output.finished or count - self._num_reported >= self._interval
        if is_due:
            self._num_reported = count
        return is_due


def generate_stream(
    model: Llama,
    tokenizer: Tokenizer | ClientTokenizer,
    params: dict[str, Any],
    device: str,
    context_len: int | None = None,
    stream_interval: int = 2,
    judge_sent_end: bool = False,
) -> Iterator[_Report]:
    """Generate for FastChat: yield the text so far, again and again.

    docs/guides/hosts.md describes `params` and the reports. Closing the iterator aborts the
    request.

    Args:
        model: The model.
        tokenizer: The model's own tokenizer.
        params: The request.
        device: The device that the model was built on.
        context_len: The maximum number of tokens of prompt and answer.
        stream_interval: Number of tokens between two reports.
        judge_sent_end: Must be false.

    Raises:
        ValueError: The request cannot be satisfied.
        RuntimeError: While iterating: the model has no token to choose.
    """
    if not isinstance(getattr(model, "llm_engine", None), LLMEngine):
        raise ValueError(f"model must be a Llama, got {type(model).__name__}")
    engine = model.llm_engine
    built_on = model.model.norm.weight.device
    checked: list[HostRequest] = []

    def prepared() -> Iterator[Request]:
        """Check the request, within the engine, so that an error of one rank is one of all."""
        if getattr(tokenizer, "wrapped", tokenizer) is not engine.tokenizer:
            raise ValueError("tokenizer is not the model's own: pass llama.tokenizer")
        if str(device).split(":")[0] != built_on.type:
            raise ValueError(f"device={device!r}, but the model was built on {built_on}")
        whole_number("stream_interval", stream_interval, 1, MAX_COUNT)
        if judge_sent_end:
            raise ValueError("judge_sent_end=True cannot be used: a stop token ends the answer")
        request = read_params(params, context_len, engine.tokenizer, engine.max_seq_len)
        checked.append(request)
        yield engine.prepare("", request.prompt, request.sampling)

    outputs = engine.stream(prepared())
    pace = Pace(stream_interval)

    def reports() -> Iterator[_Report]:
        with contextlib.closing(outputs):
            for output in outputs:
                if pace.is_due(output):
                    yield from reports_of(checked[0], output, engine.tokenizer)

    return reports()


def gorilla_generate_stream(
    model: Llama,
    tokenizer: Tokenizer | ClientTokenizer,
    params: dict[str, Any],
    device: str,
    context_len: int | None = _GORILLA_CONTEXT,
    stream_interval: int = 2,
) -> Iterator[str]:
    """Generate for gorilla: yield the text so far, without the prompt, again and again.

    See `generate_stream` for the arguments and errors.
    """
    given = _with_defaults(params, _GORILLA)
    return _texts(generate_stream(model, tokenizer, given, device, context_len, stream_interval))


def guanaco_generate_stream(
    model: Llama,
    tokenizer: Tokenizer | ClientTokenizer,
    params: dict[str, Any],
    device: str,
    context_len: int | None = _GUANACO_CONTEXT,
) -> Iterator[str]:
    """Generate for guanaco: yield the text so far, without the prompt, after each token.

    See `generate_stream` for the arguments and errors.
    """
    given = _with_defaults(params, _GUANACO)
    return _texts(generate_stream(model, tokenizer, given, device, context_len, 1))


def _with_defaults(params: Any, defaults: dict[str, Any]) -> Any:
    """Return the params of a request without echo; `generate_stream` refuses what is no dict."""
    if not isinstance(params, Mapping):
        return params
    given = {key: value for key, value in params.items() if value is not None}
    return {**defaults, **given, "echo": False}


def _texts(reports: Iterator[_Report]) -> Iterator[str]:
    """Yield the texts of reports, the last one only once."""
    with contextlib.closing(reports):  # type: ignore[type-var]  # It is a generator.
        for report in reports:
            reasons = report["finish_reason"]
            if None in (reasons if isinstance(reasons, list) else [reasons]):
                yield report["text"]


async def async_generate_stream(
    model: AsyncLLMEngine,
    tokenizer: Tokenizer | ClientTokenizer,
    params: dict[str, Any],
    device: str,
    context_len: int,
    *,
    benchmark: bool | None = None,
) -> AsyncIterator[_Report]:
    """Generate for DB-GPT, in place of vLLM: yield a report for every step, as `generate_stream`.

    Any number of requests can run at once.

    Args:
        model: The engine.
        tokenizer: Has no effect.
        params: The request; its request_id is the name of the request.
        device: Has no effect, as with vLLM.
        context_len: The maximum number of tokens of prompt and answer.
        benchmark: Whether to ignore stop tokens and strings, so that every answer has
            max_new_tokens tokens. None reads the environment variable DB_GPT_MODEL_BENCHMARK.
    """
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


def reports_of(request: HostRequest, output: RequestOutput, tokenizer: Tokenizer) -> list[_Report]:
    """Return the report of an output, or two of the last one, for the clients of FastChat."""
    report = report_of(request, output, tokenizer)
    # Some clients read no text that comes with a finish_reason.
    return [{**report, "finish_reason": None}, report] if output.finished else [report]


def report_of(request: HostRequest, output: RequestOutput, tokenizer: Tokenizer) -> _Report:
    """Return the report of an output, as hosts read it."""
    if output.error is not None:
        raise RuntimeError(output.error)
    reasons = [answer.finish_reason for answer in output.outputs]
    first = output.outputs[0]
    token_logprobs = first.logprobs
    logprobs = None
    if token_logprobs is not None:
        # These are the logprobs of OpenAI's completions. With echo, they include the prompt's.
        scores = [
            *zip(request.prompt, output.prompt_logprobs or (), strict=False),
            *zip(first.token_ids, token_logprobs, strict=False),
        ]
        logprobs = TextScores(tokenizer, skip_special_tokens=True).push(scores)
    return {
        "text": " ".join(request.echo + answer.text for answer in output.outputs),
        "error_code": 0,
        "logprobs": logprobs,
        "usage": output.usage.counts,
        "finish_reason": reasons[0] if len(reasons) == 1 else reasons,
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
    encode: Callable[[str], list[int]] | None = None,
) -> HostRequest:
    """Check the request of a host.

    Args:
        params: The request.
        context_len: A further limit of the tokens of prompt and answer, or None.
        tokenizer: The model's tokenizer.
        max_seq_len: The maximum number of tokens of prompt and answer.
        max_new_tokens: The default of the request's max_new_tokens.
        has_raw_echo: Whether the echo has the special tokens of the prompt.
        benchmark: Whether no stop token and no stop string ends the answer.
        encode: Returns the ids of the prompt; by default those of a `ClientTokenizer`.

    Raises:
        ValueError: A value cannot be used; the message names its key.
    """
    if not isinstance(params, Mapping):
        raise ValueError(f"params must be a dict, got {type(params).__name__}")
    for key in sorted(params.keys() - (_OTHER_KEYS | _LABELS | _NUMERIC_KEYS), key=str):
        value = params[key]
        if value:
            raise ValueError(
                f"params has {key}={brief(value)}, which this worker does not support: leave it out"
            )
    prompt = params.get("prompt")
    if not isinstance(prompt, str):
        raise ValueError("params has no 'prompt' that is a string")
    tokens = (encode or ClientTokenizer(tokenizer).encode)(prompt)
    with errors_in("params"):
        context = whole_number("context_len", _number(context_len), 2, 2**63, optional=True)
        context = min(context or max_seq_len, max_seq_len)
        wanted = whole_number(
            "max_new_tokens", _number(params.get("max_new_tokens")), 0, MAX_COUNT, optional=True
        )
        if len(tokens) >= context:
            raise ValueError(
                f"the prompt has {len(tokens)} tokens, which leaves no space for an answer in the "
                f"context of {context} tokens: shorten it"
            )
        max_tokens = max_new_tokens if wanted is None else wanted
        has_echo = _switch(params, "echo", True)
        sampling = _sampling(
            params, min(max_tokens, context - len(tokens)), has_echo=has_echo, benchmark=benchmark
        )
    echo = ""
    if has_echo:
        echo = prompt if has_raw_echo else tokenizer.decode(tokens, skip_special_tokens=True)
    return HostRequest(tokens, sampling, echo)


def _sampling(
    params: Mapping[str, Any], max_tokens: int, *, has_echo: bool, benchmark: bool
) -> SamplingParams:
    fields = {key: _number(params[key]) for key in _NUMERIC_KEYS if params.get(key) is not None}
    if fields.get("n", 1) != 1 and params.get("logprobs") not in (None, False):
        raise ValueError(f"logprobs needs n=1, not n={brief(fields['n'])}")
    if fields.get("best_of") == 1:
        del fields["best_of"]  # There is nothing to choose, as if it were not given.
    if params.get("do_sample") is not None and not _switch(params, "do_sample", True):
        fields["temperature"] = 0
    if has_echo and "logprobs" in fields:
        fields["prompt_logprobs"] = fields["logprobs"]
    stop = [text for text in _entries(params, "stop") if text != ""]
    stop_ids = [_number(token) for token in _entries(params, "stop_token_ids")]
    return SamplingParams(
        max_tokens=max_tokens,
        stop=() if benchmark else stop,
        stop_token_ids=() if benchmark else stop_ids,
        ignore_eos=benchmark,
        skip_special_tokens=True,
        **fields,
    )


def _number(value: Any) -> Any:
    """Return "8", 8.0 or a numpy scalar as an int or a float, and any other value as it is."""
    with contextlib.suppress(TypeError, ValueError, RuntimeError):
        if hasattr(value, "item"):
            value = value.item()
        if isinstance(value, str):
            value = int(value) if value.strip("+- ").isdigit() else float(value)
        if isinstance(value, float) and value.is_integer():
            return int(value)
    return value


def _switch(params: Mapping[str, Any], key: str, default: bool) -> bool:
    """Return the value of a switch. None is off, as bool(None) is in the code of hosts."""
    value = _number(params.get(key, default))
    text = str(value).strip().lower()
    if text not in _SWITCHES:
        raise ValueError(f"{key}={brief(value)} must be True or False")
    return _SWITCHES[text]


def _entries(params: Mapping[str, Any], key: str) -> list[Any]:
    """Return the entries of a list, or a single value, without None.

    Hosts append None to such lists.
    """
    value: Any = params.get(key)
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, set | frozenset):
        value = sorted(value, key=str)  # The order must be the same on every rank.
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        value = [value]
    return [entry for entry in value if entry is not None]
