"""vLLM's `LLM`, `LLMEngine` and `AsyncLLMEngine` on a `Llama`.

These classes translate vLLM's calls and outputs; the engine of `llama.requests` computes. The file
has over 400 lines because the three classes share their base and are one API of vLLM, whose
arguments are documented here.
"""

import asyncio
import contextlib
import itertools
import uuid
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, replace
from typing import Any, Self, cast

from tqdm import tqdm

from llama import api
from llama.api import Llama, Request, beam_search
from llama.common.checks import brief
from llama.compat.client_tokenizer import ClientTokenizer, template_options
from llama.compat.vllm.engine_args import EngineArgs
from llama.compat.vllm.vllm_lora import adapters_of
from llama.compat.vllm.vllm_params import (
    BeamSearchParams,
    RequestOutputKind,
    SamplingParams,
    refuse,
)
from llama.compat.vllm.vllm_pooling import PoolingMethods
from llama.compat.vllm.vllm_request import BeamSearchOutput, RequestOutput, VllmRequest
from llama.prompts.dialog_format import PromptOptions
from llama.prompts.pictures import Picture, PictureReader, pictures_of, with_pictures

# Arguments of from_engine_args that have no effect.
_IGNORED = frozenset({"usage_context", "stat_loggers", "start_engine_loop"})
_PROMPT_FIELDS = frozenset({"prompt", "prompt_token_ids", "type", "cache_salt", "multi_modal_data"})

_Params = SamplingParams | Sequence[SamplingParams] | None
_MakeBar = bool | Callable[..., tqdm]


@dataclass(frozen=True)
class ModelConfig:
    """The properties of a model that clients read."""

    model: str  # path or name of the model
    max_model_len: int
    vocab_size: int
    seed: int

    def get_vocab_size(self) -> int:
        """Return the number of token ids."""
        return self.vocab_size


class EngineFrontend:
    """The common part of the three classes: a model, its engine, and how requests are made."""

    def __init__(self, llama: Llama, args: EngineArgs | None = None) -> None:
        """Wrap a model.

        Args:
            llama: The model.
            args: The arguments that it was built from, if they are known.
        """
        self.llama = llama
        self.llama_engine = llama.llm_engine
        # vLLM gives tools to Llama 3.0 in the format of 3.1.
        self.tokenizer = ClientTokenizer(llama.tokenizer, llama.dialog_format)
        self._args = args
        self.model_config = ModelConfig(
            model="" if args is None else args.model,
            max_model_len=self.llama_engine.max_seq_len,
            vocab_size=llama.tokenizer.n_words,
            seed=llama.seed,
        )

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, **others: Any) -> Self:
        """Load a model and wrap it."""
        refuse(f"{cls.__name__}.from_engine_args", _without(others, _IGNORED))
        return cls(engine_args.build(), engine_args)

    def get_tokenizer(self) -> ClientTokenizer:
        """Return the tokenizer, which may also be awaited."""
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters of a call that gives none."""
        return SamplingParams() if self._args is None else self._args.default_params()

    def make_request(
        self,
        name: str,
        prompt: Any,
        params: SamplingParams | None,
        index: int | None = None,
        adapter: str | None = None,
    ) -> VllmRequest:
        """Return a checked request, which is not submitted yet.

        Args:
            name: The client's request_id.
            prompt: The prompt in one of vLLM's formats.
            params: The parameters; by default those of the model.
            index: The index of the prompt in a call of `LLM`.
            adapter: The name of a loaded adapter.
        """
        params = self.get_default_sampling_params() if params is None else params
        if not isinstance(params, SamplingParams):
            kind = type(params)
            raise TypeError(f"params must be llama.compat.vllm's SamplingParams, got {kind}")
        # `replace` checks the parameters again, because a client may have changed them.
        output_kind = params.output_kind if index is None else RequestOutputKind.FINAL_ONLY
        params = replace(params, output_kind=output_kind)
        # An id beyond the vocabulary never occurs; the engine would refuse it.
        vocab_size = self.model_config.vocab_size
        stop_token_ids = tuple(x for x in params.stop_token_ids if x < vocab_size)
        params = replace(params, stop_token_ids=stop_token_ids)
        if isinstance(prompt, Mapping) and prompt.get("cache_salt") is not None:
            params = replace(params, cache_salt=prompt["cache_salt"])
        pictures = self._pictures(prompt)
        text, ids = self._encode(prompt)
        request_id = name if index is None else ""
        marks = self.llama.dialog_format.reasoning
        starts_behind = params.structured_outputs is not None and self._names_reasoning()
        if starts_behind and marks is not None:
            params = replace(params, reasoning=marks.rule(None))
        request = self.llama_engine.prepare(
            request_id, ids, params, index=index or 0, adapter=adapter, pictures=pictures
        )
        if starts_behind:
            for answer in request.answers:
                answer.reader = None  # vLLM's texts contain the reasoning.
        if params.seed is not None:
            # In vLLM, each prompt of a list has this seed itself, not one derived from it.
            request.set_seed(params.seed)
        tokenizer = self.llama.tokenizer
        return VllmRequest(
            request=request, params=params, name=name, prompt=text, tokenizer=tokenizer
        )

    def _names_reasoning(self) -> bool:
        """Return whether a reasoning_parser is given: formats then begin after the reasoning."""
        return self._args is not None and bool(self._args.reasoning_parser)

    def _encode(self, prompt: Any) -> tuple[str | None, Any]:
        """Return the text of a prompt, if it has one, and its ids."""
        text: Any = None
        ids: Any = None
        if isinstance(prompt, Mapping):
            refuse("a prompt", _without(prompt, _PROMPT_FIELDS))
            text = prompt.get("prompt")
            ids = prompt.get("prompt_token_ids")
        elif isinstance(prompt, str):
            text = prompt
        else:
            ids = prompt
        if ids is not None:
            return text, ids
        if not isinstance(text, str):
            raise TypeError(
                f"the prompt {brief(prompt)} must be a string, a list of token ids, or a dict with "
                "'prompt' or 'prompt_token_ids'"
            )
        return text, self.tokenizer.encode_images(text)

    @property
    def _reader(self) -> PictureReader | None:
        """The reader of images; None if the model reads text alone."""
        sizes = self.llama_engine.images
        return None if sizes is None else PictureReader(sizes.chunk_size, sizes.max_tiles)

    def _pictures(self, prompt: Any) -> list[Picture]:
        """Return the images of a prompt."""
        data = prompt.get("multi_modal_data") if isinstance(prompt, Mapping) else None
        if not data:
            return []
        refuse("multi_modal_data", _without(data, frozenset({"image"})))
        reader = self._reader
        if reader is None:
            raise ValueError("multi_modal_data cannot be used: the model reads text alone")
        given = data["image"] if isinstance(data["image"], list | tuple) else [data["image"]]
        return [x if isinstance(x, Picture) else reader.read(x) for x in given]


class LLM(EngineFrontend, PoolingMethods):
    """vLLM's class for whole batches: it takes prompts or messages and returns their outputs.

    Under torchrun every rank makes the same calls.
    """

    def __init__(self, model: str, **engine_args: Any) -> None:
        """Load a model.

        Args:
            model: The path or name of the model.
            engine_args: The other fields of `EngineArgs`.
        """
        args = EngineArgs(model, **engine_args)
        super().__init__(args.build(), args)
        self.llm_engine = LLMEngine(self.llama, args)
        self.names = map(str, itertools.count())

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, **others: Any) -> Self:
        """Load a model."""
        return cls(**vars(engine_args), **others)

    def generate(
        self,
        prompts: Any,
        sampling_params: _Params = None,
        use_tqdm: _MakeBar = True,
        lora_request: Any = None,
        **others: Any,
    ) -> list[RequestOutput]:
        """Return the final output of each prompt, in their order.

        Args:
            prompts: A text, token ids, {"prompt": text}, {"prompt_token_ids": ids}, or a list of
                such prompts. A prompt of a vision model has `<|image|>` for each of its images,
                which are "multi_modal_data": {"image": an image of Pillow, or a list of them}.
            sampling_params: Parameters for all prompts, or a list with those of each. The default
                is that of the model's generation_config.json.
            use_tqdm: Whether to show a progress bar, or a function that makes one.
            lora_request: A `LoRARequest` for all prompts, or a list with one or None for each.
            others: Arguments of vLLM that are not supported.

        Raises:
            TypeError, ValueError: An argument cannot be used; the message names it.
        """
        refuse("LLM.generate", others)
        return self._run(lambda: _as_list(prompts), sampling_params, use_tqdm, lora_request)

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: _Params = None,
        use_tqdm: _MakeBar = True,
        lora_request: Any = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **others: Any,
    ) -> list[RequestOutput]:
        """Return the answers to one dialog, or to each dialog of a list.

        The format is that of the model. `chat_template_kwargs` has variables of its chat template;
        see `generate` for the other arguments.
        """
        refuse("LLM.chat", others, {"chat_template_content_format": ("auto", "string")})
        options = PromptOptions(
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **template_options(chat_template_kwargs or {}),
        )

        def prompt(dialog: Sequence[Any]) -> dict[str, Any]:
            read = dialog if self._reader is None else with_pictures(dialog, self._reader)
            ids = self.tokenizer.dialog_format.encode(read, tools, options)
            return {
                "prompt": self.tokenizer.decode(ids),
                "prompt_token_ids": ids,
                "multi_modal_data": {"image": found} if (found := pictures_of(read)) else None,
            }

        is_one = bool(messages) and isinstance(messages[0], Mapping)
        dialogs = [messages] if is_one else messages
        return self._run(
            lambda: [prompt(x) for x in dialogs], sampling_params, use_tqdm, lora_request
        )

    def beam_search(
        self, prompts: Any, params: BeamSearchParams, **others: Any
    ) -> list[BeamSearchOutput]:
        """Return the `params.beam_width` best continuations of each prompt."""
        refuse("LLM.beam_search", others, {"use_tqdm": (False, True)})
        sampling_params = SamplingParams(
            temperature=0.0,
            max_tokens=params.max_tokens,
            ignore_eos=params.ignore_eos,
            skip_special_tokens=params.skip_special_tokens,
        )
        made: list[VllmRequest] = []
        results = beam_search(
            self.llama_engine,
            self._requests(lambda: _as_list(prompts), sampling_params, made),
            params.beam_width,
            params.length_penalty,
            early_stopping=False,
        )
        pairs = zip(made, results, strict=True)
        return [request.beam_search_output(beams) for request, beams in pairs]

    def _run(
        self,
        encode: Callable[[], list[Any]],
        params: _Params,
        use_tqdm: _MakeBar,
        lora_request: Any,
    ) -> list[RequestOutput]:
        """Compute requests to their end.

        Args:
            encode: Returns the prompts.
            params: Parameters for all prompts, or a list with those of each.
            use_tqdm: See `generate`.
            lora_request: See `generate`.
        """
        made: list[VllmRequest] = []
        found = adapters_of(self.llama, lora_request)
        adapters = found if isinstance(lora_request, list | tuple) else found[0]
        stream = self.llama_engine.stream(self._requests(encode, params, made, adapters))
        # A VllmRequest has made the outputs vLLM's.
        outputs = cast(Generator[RequestOutput, None, None], stream)
        make_bar = use_tqdm if callable(use_tqdm) else tqdm
        is_shown = bool(use_tqdm and made) and self.llama_engine.parallel.global_rank == 0
        bar = make_bar(outputs, total=len(made), desc="Processed prompts", disable=not is_shown)
        with contextlib.closing(outputs):
            by_name = {output.request_id: output for output in bar}
        return [by_name[request.name] for request in made]

    def _requests(
        self,
        encode: Callable[[], list[Any]],
        params: _Params,
        made: list[VllmRequest],
        adapters: str | list[str | None] | None = None,
    ) -> Iterator[Request]:
        """Yield the engine's request for each prompt, and append the client's to `made`.

        The engine iterates over this where an error on one rank becomes an error on every rank.
        """
        prompts = encode()
        if params is None:
            params = self.get_default_sampling_params()
        all_params: list[Any] = [params] * len(prompts)
        if isinstance(params, list | tuple):
            all_params = list(params)
        if len(all_params) != len(prompts):
            raise ValueError(
                f"{len(prompts)} prompts and {len(all_params)} sampling_params: give one for each "
                "prompt"
            )
        names = adapters if isinstance(adapters, list) else [adapters] * len(prompts)
        if len(names) != len(prompts):
            raise ValueError(
                f"{len(prompts)} prompts and {len(names)} in lora_request: give one for each prompt"
            )
        for i, (prompt, own_params) in enumerate(zip(prompts, all_params, strict=True)):
            made.append(self.make_request(next(self.names), prompt, own_params, i, names[i]))
        yield from (each.request for each in made)


class LLMEngine(EngineFrontend):
    """vLLM's engine that its client steps. Under torchrun every rank makes the same calls."""

    def add_request(
        self,
        request_id: str,
        prompt: Any = None,
        params: SamplingParams | None = None,
        *,
        inputs: Any = None,
        lora_request: Any = None,
        **others: Any,
    ) -> str:
        """Queue a request and return its id.

        Args:
            request_id: The name of the request.
            prompt: The prompt in one of vLLM's formats.
            params: The parameters; by default those of the model.
            inputs: The prompt under the name that it has in vLLM 0.5.
            lora_request: A `LoRARequest`; None for the base model.
            others: Arguments of vLLM that are not supported.
        """
        refuse("add_request", others, {"priority": (0,)})
        prompt = _one_prompt(prompt, inputs)
        if request_id == "":
            raise ValueError("request_id is empty: give each request a name")
        (adapter,) = adapters_of(self.llama, lora_request)

        def prepared() -> Iterator[Request]:
            """Make the request within the engine, so that an error of one rank is one of all."""
            yield self.make_request(request_id, prompt, params, adapter=adapter).request

        self.llama_engine.submit(prepared())
        return request_id

    def step(self) -> list[RequestOutput]:
        """Return the outputs since the last step. The model runs once to compute them."""
        return cast(list[RequestOutput], self.llama_engine.step())

    def abort_request(self, request_id: str | Iterable[str]) -> None:
        """End requests, which then have no further output. Unknown ids are ignored."""
        for name in [request_id] if isinstance(request_id, str) else list(request_id):
            self.llama_engine.abort_request(name)

    def has_unfinished_requests(self) -> bool:
        """Return whether a request has an output to come."""
        return self.llama_engine.has_unfinished_requests()

    def get_num_unfinished_requests(self) -> int:
        """Return the number of requests with an output to come."""
        return self.llama_engine.num_unfinished_requests


class AsyncLLMEngine(EngineFrontend):
    """vLLM's engine for asyncio: an iterator per request, any number at once, in one process.

    Attributes:
        errored: Always false: an error of the model ends only the requests of that step.
    """

    errored = False

    def __init__(self, llama: Llama, args: EngineArgs | None = None) -> None:
        """Wrap a model; see `EngineFrontend`."""
        super().__init__(llama, args)
        self._engine = api.AsyncLLMEngine(llama)
        self.is_running = True

    async def generate(
        self,
        prompt: Any = None,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        inputs: Any = None,
        lora_request: Any = None,
        **others: Any,
    ) -> AsyncIterator[RequestOutput]:
        """Yield the outputs of a request as they come. Leaving the loop aborts it.

        Args:
            prompt: The prompt in one of vLLM's formats.
            sampling_params: The parameters; by default those of the model.
            request_id: The name of the request.
            inputs: The prompt under the name that it has in vLLM 0.5.
            lora_request: A `LoRARequest`; None for the base model.
            others: Arguments of vLLM that are not supported.

        Raises:
            TypeError, ValueError: An argument cannot be used. The error comes when the first
                output is asked for.
        """
        refuse("generate", others, {"priority": (0,)})
        outputs = await self.add_request(
            request_id, prompt, sampling_params, inputs=inputs, lora_request=lora_request
        )
        async with contextlib.aclosing(outputs):
            async for output in outputs:
                yield output

    async def add_request(
        self,
        request_id: str | None,
        prompt: Any = None,
        params: SamplingParams | None = None,
        *,
        inputs: Any = None,
        lora_request: Any = None,
        **others: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Check a request and return the iterator of its outputs, as vLLM 0.5 does.

        The arguments are those of `LLMEngine.add_request`. The request starts when the first output
        is asked for.

        Raises:
            TypeError, ValueError: An argument cannot be used.
        """
        refuse("add_request", others, {"priority": (0,)})
        prompt = _one_prompt(prompt, inputs)
        if not isinstance(request_id, str) or not request_id:
            raise TypeError(f"request_id={brief(request_id)} must be a string that is not empty")
        await self.check_health()
        # This runs in a thread because a long text or a grammar would block the event loop.
        (adapter,) = await asyncio.to_thread(adapters_of, self.llama, lora_request)
        request = await asyncio.to_thread(
            self.make_request, request_id, prompt, params, None, adapter
        )
        # A VllmRequest has made the outputs vLLM's.
        return cast(AsyncGenerator[RequestOutput, None], self._engine.stream([request.request]))

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests. Their iterators get a last output with finish_reason "abort"."""
        for name in [request_id] if isinstance(request_id, str) else list(request_id):
            await self._engine.abort(name)

    async def check_health(self) -> None:
        """Raise RuntimeError if the engine was shut down."""
        if not self.is_running:
            raise RuntimeError("this AsyncLLMEngine was shut down: make another one")

    @property
    def is_stopped(self) -> bool:
        """Whether the engine was shut down."""
        return not self.is_running

    def shutdown(self) -> None:
        """Abort all unfinished requests. Later requests raise RuntimeError."""
        self.is_running = False
        self._engine.close()


AsyncLLM = AsyncLLMEngine  # the name in vLLM 1


def random_uuid() -> str:
    """Return a unique request_id of 32 hexadecimal digits."""
    return uuid.uuid4().hex


def _one_prompt(prompt: Any, inputs: Any) -> Any:
    """Return the prompt that is given under one of its two names.

    Raises:
        TypeError: Both are given.
    """
    if prompt is not None and inputs is not None:
        raise TypeError("prompt and inputs are both given: they are the same, so give one of them")
    return inputs if prompt is None else prompt


def _without(arguments: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    known = set(names)
    return {name: value for name, value in arguments.items() if name not in known}


def _as_list(prompts: Any) -> list[Any]:
    """Return one prompt in any of vLLM's formats, or a list of prompts, as a list."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if hasattr(prompts, "tolist"):
        prompts = prompts.tolist()
    if not isinstance(prompts, list | tuple):
        raise TypeError(f"prompts must be a prompt or a list of them, got {type(prompts).__name__}")
    if not prompts:
        return []
    first = prompts[0]
    is_prompt = isinstance(first, str | Mapping | list | tuple) or hasattr(first, "tolist")
    return list(prompts) if is_prompt else [prompts]
