"""Request bodies of Ollama's API: the models that read them are the published schema.

In: a JSON object. Out: an `ApiRequest`, or a `FieldError` that names the field. Source:
https://docs.ollama.com/api. This file knows no network and runs no model. The bodies
of a chat and of a text share most fields, so that they are in one file of more than 400 lines.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from llama.common.checks import FieldError
from llama.common.validation import with_message
from llama.prompts.dialog_format import PromptOptions
from llama.prompts.fields import IMAGE_LIST, LATER_IMAGES, UNUSED, Fields
from llama.prompts.messages import FunctionCall, TextPart
from llama.prompts.tools import ToolList, Tools, tool_request
from llama.sampling_params import MAX_COUNT, Retention, SamplingParams, StructuredOutput
from llama.server.accepted import FalseOnly, ModelName
from llama.server.errors import ErrorFields
from llama.server.request import ApiRequest, ImageSource, image_part
from llama.server.sampling import CacheSalt, SamplingFields, Seed, sampling_fields

CHAT_URL = "/api/chat"
GENERATE_URL = "/api/generate"
SHOW_URL = "/api/show"

# Ollama's own defaults, but for the penalties, which it has by default over 64 tokens.
DEFAULTS = SamplingParams(
    max_tokens=None, temperature=0.8, top_k=40, top_p=0.9, skip_special_tokens=True
)
_TOO_LONG = (
    "the prompt has {count} tokens, and the context {max_count}: shorten the dialog. A prompt is "
    "never cut here, unlike in Ollama"
)
_UNLOADED = (0, "0", "0s", "0m", "0h")  # values of keep_alive that unload a model in Ollama

_Count = Annotated[int | None, UNUSED]
_Number = Annotated[float | None, UNUSED]
_Flag = Annotated[bool | None, UNUSED]
_Zero = Annotated[Annotated[int, Field(ge=0, le=0)] | None, UNUSED]
_One = Annotated[Annotated[float, Field(ge=1, le=1)] | None, UNUSED]
_EMPTY = Field(max_length=0)
_Images = Annotated[list[str] | None, IMAGE_LIST]  # files in base64
_THINK = with_message(" must be true, false, 'low', 'medium' or 'high'", of_parts=True)
_Format = Annotated[
    Literal["", "json"] | dict[str, Any],
    with_message(" must be 'json' or a JSON schema, which is an object", of_parts=True),
]

_Sampling: type[SamplingFields] = sampling_fields(
    {
        "temperature": "temperature",
        "top_k": "top_k",
        "top_p": "top_p",
        "min_p": "min_p",
        "stop": "stop",
        "repeat_penalty": "repetition_penalty",
        "presence_penalty": "presence_penalty",
        "frequency_penalty": "frequency_penalty",
    }
)


class Options(_Sampling):  # type: ignore[misc, valid-type]
    """The field `options`: how an answer is sampled, and hints for the machine without effect.

    Attributes:
        seed: -1 stands for a random one.
        num_predict: number of tokens; 0 and below is as many as fit.
        num_ctx: number of tokens of prompt and answer together, if the context has as many.
        repeat_last_n: tokens that the penalties count: -1 for all, 0 for none.
    """

    own_names: ClassVar[Any] = _Sampling.own_names

    @model_validator(mode="before")
    @classmethod
    def _whole(cls, value: Any) -> Any:
        """Read whole numbers that are written as 40.0, as some languages have no others."""
        if not isinstance(value, dict):
            return value
        return {
            name: int(item) if isinstance(item, float) and item.is_integer() else item
            for name, item in value.items()
        }

    seed: Seed | None = None
    num_predict: Annotated[int, Field(ge=-2, le=MAX_COUNT)] | None = None
    num_ctx: Annotated[int, Field(ge=1, le=MAX_COUNT)] | None = None
    repeat_last_n: Annotated[int, Field(ge=-1, le=MAX_COUNT)] | None = None
    mirostat: _Zero = None
    mirostat_tau: _Number = None
    mirostat_eta: _Number = None
    tfs_z: _One = None
    typical_p: _One = None
    penalize_newline: _Flag = None
    num_keep: _Count = None  # tokens that Ollama keeps when it cuts a prompt; nothing is cut here
    num_batch: _Count = None
    num_gpu: _Count = None
    main_gpu: _Count = None
    num_thread: _Count = None
    num_gqa: _Count = None
    numa: _Flag = None
    low_vram: _Flag = None
    f16_kv: _Flag = None
    logits_all: _Flag = None
    vocab_only: _Flag = None
    use_mmap: _Flag = None
    use_mlock: _Flag = None
    embedding_only: _Flag = None

    def params(self, defaults: SamplingParams, **changes: Any) -> SamplingParams:
        """Return `defaults` with these options and with `changes`.

        Raises:
            FieldError: names the option as a field of the body.
        """
        if self.num_predict is not None and self.num_predict > 0:
            changes["max_tokens"] = self.num_predict
        if self.seed is not None:
            changes["seed"] = self.seed
        try:
            params: SamplingParams = self.sampling_params(defaults, **changes)
        except FieldError as error:
            raise error.at(f"options.{error.field}") from None
        without = replace(
            params, repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0
        )
        if self.repeat_last_n == 0:
            return without
        if self.repeat_last_n not in (None, -1) and params != without:
            problem = " must be -1 or 0: penalties count the prompt and the whole answer"
            raise FieldError.of("options.repeat_last_n", problem)
        return params

    def names(self) -> dict[str, str]:
        """Return the names of the body by those of the parameters, for errors."""
        named = {"max_tokens": "num_predict", "seed": "seed"} | self.given_names()
        return {name: f"options.{own_name}" for name, own_name in named.items()}


class _Body(Fields):
    """The fields of a chat and of a text to generate."""

    model: ModelName | None = None
    stream: bool | None = None
    options: Options | None = None
    format: _Format | None = None
    keep_alive: float | str | None = None  # without effect: the model stays loaded
    think: Annotated[Annotated[bool | Literal["low", "medium", "high"], _THINK] | None, UNUSED] = (
        None
    )
    logprobs: Annotated[FalseOnly | None, UNUSED] = None
    top_logprobs: _Zero = None
    cache_salt: CacheSalt | None = None
    prompt_cache_retention: Retention | None = None
    truncate: _Flag = None  # without effect, as shift is: nothing is cut here
    shift: _Flag = None

    @property
    def unloads(self) -> bool:
        """Whether Ollama would unload the model after this request."""
        return self.keep_alive in _UNLOADED

    def _prompt_options(self, *, continues: bool) -> PromptOptions:
        """Return the options of a chat's prompt; a model thinks unless `think` is false."""
        options: dict[str, Any] = {}
        if self.think is not None:
            options["enable_thinking"] = self.think is not False
        if isinstance(self.think, str):
            options["reasoning_effort"] = self.think
        return PromptOptions.for_answer(continues=continues, **options)

    def _answer_format(self) -> StructuredOutput | None:
        if not self.format:
            return None
        if self.format == "json":
            return StructuredOutput(json_object=True)
        try:
            return StructuredOutput(json=self.format)
        except FieldError as error:
            raise error.at("format") from None

    def _request(self, prompt_field: str, **content: Any) -> ApiRequest:
        """Return the request with this content, and what is the same for both bodies.

        Args:
            prompt_field: the field that an error about the prompt names.
            content: further arguments of `ApiRequest`.
        """
        options = self.options or Options()
        changes: dict[str, Any] = {"structured_output": self._answer_format()}
        for name in ("cache_salt", "prompt_cache_retention"):
            if getattr(self, name) is not None:
                changes[name] = getattr(self, name)
        return ApiRequest(
            params=options.params(DEFAULTS, **changes),
            model=self.model,
            stream=self.stream is not False,
            max_context=options.num_ctx,
            fields=ErrorFields(
                prompt_field, options.names(), answer_format="format", too_long=_TOO_LONG
            ),
            **content,
        )


class CalledFunction(FunctionCall):
    """The function of a call, with its position among the calls."""

    index: int | None = None


class Call(Fields):
    """A call of a tool in a message of the assistant."""

    function: CalledFunction
    id: str | None = None
    type: Literal["function"] | None = None


class Message(Fields):
    """A message; a chat template decides whether the model sees its thinking again."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: _Images = None
    tool_calls: list[Call] | None = None
    tool_name: str | None = None
    name: str | None = None  # the tool, as OpenAI's clients write it
    tool_call_id: str | None = None


class ChatBody(_Body):
    """The body of /api/chat; without messages, it only asks that the model be loaded."""

    unknown_message: ClassVar[str] = "{names} cannot be used in /api/chat: leave it out"

    messages: Annotated[list[Message], Field(fail_fast=True), LATER_IMAGES] | None = None
    tools: ToolList | None = None

    @property
    def only_loads(self) -> bool:
        """Whether there is nothing to answer."""
        return not self.messages

    def request(self) -> ApiRequest:
        """Return the body as a chat; the answer continues a last message of the assistant's."""
        messages = self.messages or []
        tools = tool_request([tool.function for tool in self.tools or ()], None, None)
        last = messages[-1]
        continues = last.role == "assistant" and not last.tool_calls
        if continues:
            self._check_continued(tools)
        return self._request(
            "messages",
            messages=_openai_messages(messages),
            images=[
                image
                for i, message in enumerate(messages)
                for image in _images(message.images, f"messages[{i}].images")
            ],
            tools=tools,
            prompt_options=self._prompt_options(continues=continues),
        )

    def _check_continued(self, tools: Tools | None) -> None:
        """Raise a FieldError for a grammar, which would have to begin inside of a message."""
        problem = " cannot be used where the last message is the assistant's"
        if self.format:
            raise FieldError.of("format", problem)
        if tools is not None and tools.needs_grammar:
            raise FieldError.of("tools", f": a strict one{problem}")


class GenerateBody(_Body):
    """The body of /api/generate; without a prompt, it only asks that the model be loaded."""

    unknown_message: ClassVar[str] = "{names} cannot be used in /api/generate: leave it out"

    prompt: str | None = None
    system: str | None = None
    template: str | None = None
    raw: bool | None = None
    images: _Images = None
    suffix: (
        Annotated[
            Literal[""], with_message(" cannot be used: the model does not support insertion")
        ]
        | None
    ) = None
    context: (
        Annotated[list[Any], _EMPTY, with_message(" cannot be used: send the dialog to /api/chat")]
        | None
    ) = None

    @property
    def only_loads(self) -> bool:
        """Whether there is nothing to answer."""
        return not (self.prompt or self.images)

    def request(self) -> ApiRequest:
        """Return the body as a chat of one question, or as a text to continue."""
        prompt = self.prompt or ""
        if self._is_raw():
            return self._request("prompt", prompts=(prompt,))
        images = _images(self.images, "images")
        messages: list[dict[str, Any]] = [{"role": "user", "content": _content(prompt, images)}]
        if self.system:
            messages.insert(0, {"role": "system", "content": self.system})
        options = self._prompt_options(continues=False)
        return self._request("prompt", messages=messages, images=images, prompt_options=options)

    def _is_raw(self) -> bool:
        """Return whether the prompt is the whole text that the model continues."""
        template = "".join((self.template or "").split())
        if template not in ("", "{{.Prompt}}"):
            problem = (
                ": the model's own is used; leave it out, or give '{{ .Prompt }}' for a text to "
                "continue"
            )
            raise FieldError.of("template", problem)
        if not (self.raw or template):
            return False
        for field in ("system", "images"):
            if getattr(self, field):
                name = "raw" if self.raw else "a template"
                raise FieldError.of(field, f" cannot be used with {name}: leave it out")
        return True


class ShowBody(Fields):
    """The body of /api/show; older clients write `name` for the model."""

    unknown_message: ClassVar[str] = "{names} cannot be used in /api/show: leave it out"

    model: ModelName | None = None
    name: ModelName | None = None
    verbose: _Flag = None
    system: Annotated[str | None, UNUSED] = None
    template: Annotated[str | None, UNUSED] = None
    options: Annotated[dict[str, Any] | None, UNUSED] = None


def _openai_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return a dialog in OpenAI's format, where each result names the id of its call."""
    converted: list[dict[str, Any]] = []
    pending = _PendingCalls({})
    for i, message in enumerate(messages):
        images = _images(message.images, f"messages[{i}].images")
        if images and message.role not in ("system", "user"):
            problem = " are read in messages of the user and the system alone: leave them out"
            raise FieldError.of(f"messages[{i}].images", problem)
        content = _content(message.content or "", images)
        turn: dict[str, Any] = {"role": message.role, "content": content}
        if message.thinking:
            turn["reasoning_content"] = message.thinking
        if message.tool_calls:
            calls = [
                _openai_call(call, f"call_{i}_{k}") for k, call in enumerate(message.tool_calls)
            ]
            pending = _PendingCalls({call["id"]: call["function"]["name"] for call in calls})
            turn["tool_calls"] = calls
        elif message.role == "tool" and pending:
            turn["tool_call_id"] = pending.take(message)
        converted.append(turn)
    return converted


def _images(images: Sequence[str] | None, path: str) -> list[ImageSource]:
    return [ImageSource(image, f"{path}[{i}]") for i, image in enumerate(images or ())]


def _content(text: str, images: Sequence[ImageSource]) -> str | list[Any]:
    """Return the content of a message, whose images are before its text."""
    if not images:
        return text
    parts = [image_part(image) for image in images]
    return [*parts, TextPart(type="text", text=text)] if text else parts


def _openai_call(call: Call, default_id: str) -> dict[str, Any]:
    function = {"name": call.function.name, "arguments": call.function.arguments}
    return {"id": call.id or default_id, "function": function}


class _PendingCalls:
    """Calls that have no result yet, in order; finding the call of a result takes constant time.

    A call is in two queues, that of its tool's name and that of all calls. One that has its result
    is dropped once it is at the front.
    """

    def __init__(self, names: dict[str, str]) -> None:
        """Take the ids of the calls with the names of their tools."""
        self._ids = set(names)
        self._queue = deque(names)
        self._named: dict[str | None, deque[str]] = {}
        for call_id, name in names.items():
            self._named.setdefault(name, deque()).append(call_id)

    def __bool__(self) -> bool:
        return bool(self._ids)

    def take(self, result: Message) -> str:
        """Remove and return the call that a result belongs to: by its id, its name, or in order."""
        call_id = result.tool_call_id
        if call_id not in self._ids:
            named = self._first(self._named.get(result.tool_name or result.name, deque()))
            call_id = named or self._first(self._queue)
        assert call_id is not None
        self._ids.remove(call_id)
        return call_id

    def _first(self, queue: deque[str]) -> str | None:
        """Return the first call of a queue that has no result, or None."""
        while queue and queue[0] not in self._ids:
            queue.popleft()
        return queue[0] if queue else None
