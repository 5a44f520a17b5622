"""From a host's params dict to a prompt's ids and SamplingParams.

In: the dict as hosts send it: numbers as text or as numpy's scalars, None for what is not given.
Out: a `HostRequest`, or a ValueError that names the key: FastChat catches no TypeError. It knows
the tokenizer, and neither the engine nor outputs.
"""

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from llama.checks import brief, errors_in, whole_number
from llama.compat.client_tokenizer import ClientTokenizer
from llama.sampling_params import LIMITS, SamplingParams
from llama.tokenizer import Tokenizer

# Keys in which hosts describe themselves, the request or the model. None changes the answer:
# with is_reasoning_model, the text holds the thinking as the model writes it.
_LABELS = frozenset({
    "model", "user", "request_id", "messages", "span_id", "context", "version", "context_len",
    "convert_to_compatible_format", "string_prompt", "prompt_echo_len_char", "is_reasoning_model",
    "think_start_token", "think_end_token", "use_cache",
})  # fmt: skip
_NUMBERS = LIMITS.keys() - {"max_tokens", "min_tokens", "prompt_logprobs"}
_OTHERS = {"prompt", "max_new_tokens", "stop", "stop_token_ids", "echo", "do_sample"}
_GREEDY_UP_TO = 1e-5  # a temperature; so do FastChat and DB-GPT
_MOST_TOKENS = 2**31 - 1
# Of an answer, where a request does not say: FastChat 0.2.36, fastchat/serve/inference.py; and
# DB-GPT 0.8.2, dbgpt/model/llm/llm_out/vllm_llm.py.
FASTCHAT_TOKENS, DB_GPT_TOKENS = 256, 2048


@dataclass(frozen=True)
class HostRequest:
    """What a host asks for, checked.

    prompt: ids, begin_of_text first. echo: what each text begins with.
    """

    prompt: list[int]
    sampling: SamplingParams
    echo: str


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
    """Check `params`. The context is the smaller of context_len, if it is given, and max_seq_len.

    max_new_tokens: of an answer, where the request does not say. has_raw_echo: the echo has the
    prompt's special tokens, as in vLLM; else it is without them. benchmark: no stop token or string
    ends the answer. ValueError names what is wrong.
    """
    if not isinstance(params, Mapping):
        raise ValueError(f"params must be a dict, got {type(params).__name__}")
    for key in sorted(params.keys() - (_OTHERS | _LABELS | _NUMBERS), key=str):
        if params[key]:
            raise ValueError(
                f"params has {key}={brief(params[key])}, which this worker cannot do: leave it out"
            )
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
    text = params["prompt"]
    if not has_raw_echo:
        text = tokenizer.decode(tokens, skip_special_tokens=True)
    return HostRequest(tokens, sampling, text if echo else "")


def _sampling(params: Mapping[str, Any], count: int, echo: bool, benchmark: bool) -> SamplingParams:
    fields = {name: _number(params[name]) for name in _NUMBERS if params.get(name) is not None}
    if fields.get("n", 1) != 1 and params.get("logprobs") not in (None, False):
        raise ValueError(f"logprobs needs n=1, not n={brief(fields['n'])}")
    if fields.get("best_of") == 1:
        del fields["best_of"]  # as if it were not given: there is nothing to choose
    temperature = fields.get("temperature")
    if isinstance(temperature, int | float) and 0 <= temperature <= _GREEDY_UP_TO:
        fields["temperature"] = 0
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
