"""vLLM's `LLM`, `LLMEngine` and `AsyncLLMEngine` on a `Llama`: vLLM's calls in, its outputs out.

They translate: the engine of `llama.requests` computes.
"""

import asyncio
import contextlib
import itertools
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from tqdm import tqdm

from llama.checks import brief
from llama.compat.client_tokenizer import ClientTokenizer
from llama.compat.vllm.engine_args import EngineArgs
from llama.compat.vllm.vllm_params import (
    BeamSearchParams,
    RequestOutputKind,
    SamplingParams,
    refuse,
)
from llama.compat.vllm.vllm_request import BeamSearchOutput, RequestOutput, VllmRequest
from llama.generation import Llama
from llama.prompts import ToolFormat
from llama.requests import async_engine
from llama.requests.beam_search import beam_search

_LABELS = frozenset({"usage_context", "stat_loggers", "start_engine_loop"})  # of from_engine_args


@dataclass(frozen=True)
class ModelConfig:
    """What clients read of a model."""

    model: str  # where it came from
    max_model_len: int
    vocab_size: int
    seed: int

    def get_vocab_size(self) -> int:
        return self.vocab_size


class EngineFrontend:
    """What the three share: a model, its engine, and how requests are made."""

    def __init__(self, llama: Llama, args: EngineArgs | None = None) -> None:
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
        """A checked request, not submitted. index: its place in a list of LLM's."""
        params = self.get_default_sampling_params() if params is None else params
        if not isinstance(params, SamplingParams):
            kind = type(params)
            raise TypeError(f"params must be llama.compat.vllm's SamplingParams, got {kind}")
        kind = params.output_kind if index is None else RequestOutputKind.FINAL_ONLY
        params = replace(params, output_kind=kind)  # checked again: it may have been changed
        vocab_size = self.model_config.vocab_size  # an id beyond it never comes
        stop_token_ids = tuple(x for x in params.stop_token_ids if x < vocab_size)
        params = replace(params, stop_token_ids=stop_token_ids)
        text, ids = self._encoded(prompt)
        own_name = name if index is None else ""
        request = self.llama_engine.prepare(own_name, ids, params, index=index or 0)
        if params.seed is not None:
            request.set_seed(params.seed)  # that very seed, in each place of a list
        request.prompt = text
        return VllmRequest(**vars(request), name=name, tokenizer=self.llama.tokenizer)

    def _encoded(self, prompt: Any) -> tuple[str | None, Any]:
        """A prompt's text, if it has one, and its ids."""
        if isinstance(prompt, Mapping):
            names = {"prompt", "prompt_token_ids", "type"}
            refuse("a prompt", {k: v for k, v in prompt.items() if k not in names})
            text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        else:
            text, ids = (prompt, None) if isinstance(prompt, str) else (None, prompt)
        if ids is not None:
            return text, ids
        if not isinstance(text, str):
            raise TypeError(
                f"the prompt {brief(prompt)} must be a string, a list of token ids, or a dict with "
                "'prompt' or 'prompt_token_ids'"
            )
        return text, self.tokenizer.encode(text)


class LLM(EngineFrontend):
    """vLLM's class for whole batches: prompts or messages in, the outputs in their order. It takes
    the fields of `EngineArgs`. Under torchrun every rank makes the same calls."""

    def __init__(self, model: str, **engine_args: Any) -> None:
        args = EngineArgs(model, **engine_args)
        super().__init__(args.build(), args)
        self.llm_engine = LLMEngine(self.llama, args)
        self._names = map(str, itertools.count())

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, **others: Any) -> Self:
        return cls(**vars(engine_args), **others)

    def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., tqdm] = True,
        **others: Any,
    ) -> list[RequestOutput]:
        """The final output of each prompt: a text, token ids, {"prompt": text},
        {"prompt_token_ids": ids}, or a list of such. sampling_params: for all, or one for each; by
        default those of generation_config.json. TypeError or ValueError names what is wrong."""
        refuse("LLM.generate", others)
        return self._run(lambda: _as_list(prompts), sampling_params, use_tqdm)

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., tqdm] = True,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **others: Any,
    ) -> list[RequestOutput]:
        """The answers to one dialog, or to each of a list; `encode_chat` has the format."""
        refuse("LLM.chat", others, {"chat_template_content_format": ("auto", "string")})

        def prompt(dialog: Sequence[Any]) -> dict[str, Any]:
            ids = self.tokenizer.apply_chat_template(
                dialog,
                tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
            )
            return {"prompt": self.tokenizer.decode(ids), "prompt_token_ids": ids}

        is_one = bool(messages) and isinstance(messages[0], Mapping)
        dialogs = [messages] if is_one else messages
        return self._run(lambda: [prompt(each) for each in dialogs], sampling_params, use_tqdm)

    def beam_search(
        self, prompts: Any, params: BeamSearchParams, **others: Any
    ) -> list[BeamSearchOutput]:
        """The beam_width best continuations of each prompt."""
        refuse("LLM.beam_search", others, {"use_tqdm": (False, True)})
        asked = SamplingParams(
            temperature=0.0,
            max_tokens=params.max_tokens,
            ignore_eos=params.ignore_eos,
            skip_special_tokens=params.skip_special_tokens,
        )
        made: list[VllmRequest] = []
        requests = self._requests(lambda: _as_list(prompts), asked, made)
        width, penalty = params.beam_width, params.length_penalty
        found = beam_search(self.llama_engine, requests, width, penalty, early_stopping=False)
        return [request.of_beams(beams) for request, beams in zip(made, found, strict=True)]

    def _run(
        self,
        encode: Callable[[], list[Any]],
        params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool | Callable[..., tqdm],
    ) -> list[RequestOutput]:
        made: list[VllmRequest] = []
        outputs: Any = self.llama_engine.stream(self._requests(encode, params, made))
        make_bar = use_tqdm if callable(use_tqdm) else tqdm
        shows = bool(use_tqdm and made) and self.llama_engine.parallel.global_rank == 0
        bar = make_bar(outputs, total=len(made), desc="Processed prompts", disable=not shows)
        with contextlib.closing(outputs):
            found = {output.request_id: output for output in bar}
        return [found[request.name] for request in made]

    def _requests(
        self, encode: Callable[[], list[Any]], params: Any, made: list[VllmRequest]
    ) -> Iterator[VllmRequest]:
        """A request for each prompt, in `made` too; iterated where an error is one of all ranks."""
        prompts = encode()
        params = self.get_default_sampling_params() if params is None else params
        each = list(params) if isinstance(params, list | tuple) else [params] * len(prompts)
        if len(each) != len(prompts):
            words = f"{len(prompts)} prompts and {len(each)} sampling_params: give as many"
            raise ValueError(words)
        for i, (prompt, asked) in enumerate(zip(prompts, each, strict=True)):
            made.append(self.make_request(next(self._names), prompt, asked, i))
        yield from made


class LLMEngine(EngineFrontend):
    """vLLM's engine that its client steps. Under torchrun every rank makes the same calls."""

    def add_request(
        self, request_id: str, prompt: Any, params: SamplingParams | None = None, **others: Any
    ) -> str:
        """Queue a request; its id."""
        refuse("add_request", others, {"priority": (0,)})
        if request_id == "":
            raise ValueError("request_id is empty: give each request a name")

        def prepared() -> Iterator[VllmRequest]:
            yield self.make_request(request_id, prompt, params)

        self.llama_engine.submit(prepared())  # which checks it where all ranks see an error
        return request_id

    def step(self) -> list[RequestOutput]:
        """The outputs that came since the last step; the model runs once for them."""
        found: Any = self.llama_engine.step()
        return found

    def abort_request(self, request_id: str | Iterable[str]) -> None:
        """End requests; they have no further output. Nothing, for one that is not there."""
        for name in [request_id] if isinstance(request_id, str) else list(request_id):
            self.llama_engine.abort_request(name)

    def has_unfinished_requests(self) -> bool:
        return self.llama_engine.has_unfinished_requests()

    def get_num_unfinished_requests(self) -> int:
        return self.llama_engine.num_unfinished_requests


class AsyncLLMEngine(EngineFrontend):
    """vLLM's engine for asyncio: an iterator per request, any number at once, in one process."""

    errored = False  # always: an error of the model ends the requests in that step, and no more

    def __init__(self, llama: Llama, args: EngineArgs | None = None) -> None:
        super().__init__(llama, args)
        self._engine = async_engine.AsyncLLMEngine(llama)
        self.is_running = True

    async def generate(
        self,
        prompt: Any = None,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        inputs: Any = None,
        **others: Any,
    ) -> AsyncIterator[RequestOutput]:
        """The outputs of a request as they come; leaving the loop aborts it. inputs: prompt, as
        ChatGLM's server names it. Errors come with the first output that is asked for."""
        refuse("generate", others, {"priority": (0,)})
        prompt = inputs if prompt is None else prompt
        if not isinstance(request_id, str) or not request_id:
            raise TypeError(f"request_id={brief(request_id)} must be a string that is not empty")
        await self.check_health()
        # In a thread: a long text, or a grammar, would hold the event loop up.
        request = await asyncio.to_thread(self.make_request, request_id, prompt, sampling_params)
        outputs: Any = self._engine.stream([request])
        async with contextlib.aclosing(outputs):
            async for output in outputs:
                yield output

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests: their iterators get a last output with finish_reason "abort"."""
        for name in [request_id] if isinstance(request_id, str) else list(request_id):
            await self._engine.abort(name)

    async def check_health(self) -> None:
        if not self.is_running:
            raise RuntimeError("this AsyncLLMEngine was shut down: make another one")

    @property
    def is_stopped(self) -> bool:
        return not self.is_running

    def shutdown(self) -> None:
        """Abort what is not finished; what is asked for later is a RuntimeError."""
        self.is_running = False
        self._engine.close()


AsyncLLM = AsyncLLMEngine  # its name in vLLM 1


def random_uuid() -> str:
    """A request_id that nobody else has: 32 hexadecimal digits."""
    return uuid.uuid4().hex


def _as_list(prompts: Any) -> list[Any]:
    """One prompt, of any form, or a list of them, as a list."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    prompts = prompts.tolist() if hasattr(prompts, "tolist") else prompts
    if not isinstance(prompts, list | tuple):
        raise TypeError(f"prompts must be a prompt or a list of them, got {type(prompts).__name__}")
    is_one = bool(prompts) and not isinstance(prompts[0], str | Mapping | list | tuple)
    return [prompts] if is_one and not hasattr(prompts[0], "tolist") else list(prompts)
