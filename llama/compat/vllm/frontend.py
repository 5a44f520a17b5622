"""What vLLM's `LLM`, `LLMEngine` and `AsyncLLMEngine` share: from its prompts to our requests.

In: one prompt in any of vLLM's forms, and its parameters. Out: a checked `VllmRequest`, which is
submitted by others.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from llama.checks import brief, whole_number
from llama.compat.client_tokenizer import ClientTokenizer
from llama.compat.vllm.engine_args import EngineArgs
from llama.compat.vllm.vllm_params import RequestOutputKind, SamplingParams, refuse
from llama.compat.vllm.vllm_request import VllmRequest
from llama.generation import Llama
from llama.prompts import ToolFormat

_LABELS = frozenset({"usage_context", "stat_loggers", "start_engine_loop"})  # of from_engine_args


@dataclass(frozen=True)
class ModelConfig:
    """What clients read of a model: where it came from, its longest sequence, its vocabulary."""

    model: str
    max_model_len: int
    vocab_size: int
    seed: int

    def get_vocab_size(self) -> int:
        return self.vocab_size


class EngineFrontend:
    """What the three share: a model, its engine, and how requests are made."""

    def __init__(self, llama: Llama, args: EngineArgs | None = None) -> None:
        """args: where the model came from, if it was built from them."""
        self.llama = llama
        self.llama_engine = llama.llm_engine
        own = llama.tool_format  # a 3.0 model has none; vLLM gives it 3.1's all the same
        tool_format = ToolFormat.LLAMA_3_1 if own is ToolFormat.NONE else own
        self.tokenizer = ClientTokenizer(llama.tokenizer, tool_format)
        self._args = args
        model, longest = "" if args is None else args.model, self.llama_engine.max_seq_len
        self.model_config = ModelConfig(model, longest, llama.tokenizer.n_words, llama.seed)

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, **others: Any) -> Self:
        asked = {name: value for name, value in others.items() if name not in _LABELS}
        refuse(f"{cls.__name__}.from_engine_args", asked)
        return cls(engine_args.build(), engine_args)

    def get_tokenizer(self) -> ClientTokenizer:
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        return SamplingParams() if self._args is None else self._args.default_params()

    def make_request(
        self, name: str, prompt: Any, params: SamplingParams | None, index: int | None = None
    ) -> VllmRequest:
        """A checked request, not submitted. index: its place in a list of LLM's, which the engine
        knows it by. TypeError or ValueError names what is wrong."""
        params = self.get_default_sampling_params() if params is None else params
        if not isinstance(params, SamplingParams):
            raise TypeError(
                f"params must be llama.compat.vllm's SamplingParams, got {type(params).__name__}"
            )
        kind = params.output_kind if index is None else RequestOutputKind.FINAL_ONLY
        params = replace(params, output_kind=kind)  # checked again: it may have been changed
        text, ids = self._encoded(prompt, params.truncate_prompt_tokens)
        own_name = name if index is None else ""
        request = self.llama_engine.prepare(own_name, ids, params, index=index or 0)
        if params.seed is not None:
            request.set_seed(params.seed)  # that very seed, in each place of a list
        request.prompt = text
        return VllmRequest(**vars(request), name=name, tokenizer=self.llama.tokenizer)

    def _encoded(self, prompt: Any, most: int | None) -> tuple[str | None, list[int]]:
        """A prompt's text, if it has one, and its last `most` ids."""
        most = whole_number("truncate_prompt_tokens", most, 1, 2**31 - 1, optional=True)
        if isinstance(prompt, Mapping):
            names = {"prompt", "prompt_token_ids", "type"}
            refuse("a prompt", {k: v for k, v in prompt.items() if k not in names})
            text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        else:
            text, ids = (prompt, None) if isinstance(prompt, str) else (None, prompt)
        if ids is not None:
            ids = ids.tolist() if hasattr(ids, "tolist") else ids
            return text, ids if most is None else ids[-most:]
        if not isinstance(text, str):
            raise TypeError(
                f"the prompt {brief(prompt)} must be a string, a list of token ids, or a dict with "
                "'prompt' or 'prompt_token_ids'"
            )
        ids = self.tokenizer.encode(text)
        if most is not None and len(ids) > most:
            ids = ids[:1] + ids[len(ids) - most + 1 :]
        return text, ids


def one_of(name: str, value: Any, old_name: str, old_value: Any) -> Any:
    if value is not None and old_value is not None:
        raise TypeError(f"{name} and {old_name} are the same: give one")
    return old_value if value is None else value


def one_prompt(prompt: Any, token_ids: Any) -> Any:
    """vLLM before 0.6 took ids beside the text; they count, and the text is only its label."""
    if isinstance(prompt, str) and token_ids is not None:
        return {"prompt": prompt, "prompt_token_ids": token_ids}
    return one_of("prompts", prompt, "prompt_token_ids", token_ids)
