"""The front door: Meta's `Llama.build`, `generate`, `text_completion` and `chat_completion`.

Each call prepares its requests, gives them to the one `LLMEngine`, and collects what they came to,
the same on every rank. Meta's scripts find all of the API under this one name.
"""

import contextlib
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, NoReturn, TypedDict, TypeVar

from llama.build_args import BuildArgs, taking
from llama.checks import FieldError, FieldTypeError, whole_number
from llama.engine.core import EngineCore
from llama.engine.sampler import sample_top_p
from llama.gpu.selection import recorder_for
from llama.loading import load_model, pages_for, step_bytes
from llama.model.transformer import Transformer
from llama.prompts.answer import AnswerDeltas
from llama.prompts.chat import ChatOptions
from llama.prompts.template import encode_chat
from llama.prompts.tools import ToolFormat, tool_format_of
from llama.ranks.stdout import MutedStdout
from llama.requests.beam_search import beam_search
from llama.requests.llm_engine import LLMEngine
from llama.requests.prepare import not_ids
from llama.requests.request import Request, RequestOutput
from llama.sampling_params import SamplingParams
from llama.tokenizer import ChatFormat, Message, Tokenizer

__all__ = ["ChatPrediction", "CompletionPrediction", "Llama", "sample_top_p"]

_T = TypeVar("_T")
_SLOW_S = 2.0  # seconds of a load
_NO_OPTIONS = ChatOptions()  # of a call without tools
_Dialogs = Seq[Seq[Mapping[str, Any]]]  # of Meta's messages, or of OpenAI's


class _Scored(TypedDict, total=False):
    """With logprobs=True only."""

    tokens: list[str]
    logprobs: list[float]


class CompletionPrediction(_Scored):
    generation: str


class AnswerMessage(Message, total=False):
    """With tool calls, in OpenAI's form, content is None where there are no words beside them."""

    tool_calls: list[dict[str, Any]]


class ChatPrediction(_Scored):
    generation: AnswerMessage


class BeamPrediction(TypedDict):
    generation: str
    score: float  # sum of log-probabilities / length ** length_penalty


@dataclass(frozen=True)
class TextDelta:
    """A piece of the answer to prompt `index`."""

    index: int
    text: str
    finish_reason: str | None  # of the last one: "stop", "length" or "tool_calls"
    tool_calls: tuple[dict[str, Any], ...] = ()  # pieces, in OpenAI's form; see `stream_chat`


class Llama:
    """A loaded model with its tokenizer and engine; make one with `Llama.build`.

    What building changes in the process: the groups of torch.distributed and fairscale exist
    afterwards, also for one process, as with Meta's build; and torch's number of threads on the
    CPU, where nobody chose it (see `llama.device`). With several ranks, the stdout of those but
    rank 0 is muted until `close`, and SIGTERM and `sys.excepthook` are watched until the groups
    end, so that the job ends as one. No default type and no global seed is touched.
    """

    @staticmethod
    @taking(BuildArgs)
    def build(args: BuildArgs) -> "Llama":
        """Load a checkpoint, on one process or on all that torchrun started.

        ValueError, FileNotFoundError and the like name what is wrong, on every rank, before weights
        are read. See `Llama` for what changes in the process.
        """
        began = time.perf_counter()
        loaded = load_model(args)
        with loaded.model.parallel.agree("the KV cache", world=True):
            llama = Llama(
                loaded.model, loaded.tokenizer, seed=args.seed, num_pages=loaded.num_pages,
                draft_model=loaded.draft_model,
            )  # fmt: skip
            if args.speculate:
                llama.engine.speculate(args.speculate_tokens, is_shared=args.speculate_shared)
        llama.is_guard = loaded.files.checkpoint.is_guard
        llama.load_seconds = seconds = time.perf_counter() - began
        if loaded.model.parallel.global_rank == 0:
            print(f"Loaded in {seconds:.2f} seconds: {loaded.describe(llama.engine.runner)}")
            if seconds > _SLOW_S and (command := loaded.files.packed_by(loaded.model)):
                print(f"Weights that need no loading: {command}")
        elif args.mute_ranks:
            llama._muted = MutedStdout.held()
        return llama

    def __init__(
        self,
        model: Transformer,
        tokenizer: Tokenizer,
        *,
        seed: int = 1,
        num_pages: int | None = None,
        draft_model: Transformer | None = None,
    ) -> None:
        """num_pages: of the KV cache. Default: max_batch_size sequences of max_seq_len tokens."""
        args = model.params
        self.model, self.tokenizer = model, tokenizer
        self.formatter = ChatFormat(tokenizer)
        self.seed = seed
        self.load_seconds = 0.0
        self.is_guard = False  # Llama Guard, by its files: it has no tools
        self._muted: MutedStdout | None = None
        core = EngineCore.for_model(
            model,
            num_pages=num_pages or args.max_batch_size * pages_for(args.max_seq_len),
            draft_model=draft_model,
            recorder_for=recorder_for,
            reserve=step_bytes(args, model.plan, model.norm.weight.dtype, args.max_batch_size),
        )
        self.llm_engine = LLMEngine(core, tokenizer, args.max_seq_len, seed)

    def lead(self, work: Callable[[], _T]) -> _T | None:
        """Rank 0 does the work and the others follow: for threads, asyncio, a keyboard, a socket.
        There, any thread may call any method of this Llama at any time. See `LLMEngine.lead`."""
        return self.llm_engine.lead(work)

    def close(self) -> None:
        """Abort what is not finished, and give back this rank's stdout. Later calls are errors."""
        self.llm_engine.close()
        self.engine.close()
        if self._muted is not None:
            self._muted.release()
            self._muted = None

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Llama cannot be copied or pickled: build one in each process")

    def __enter__(self) -> "Llama":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def tool_format(self) -> ToolFormat:
        """The form of this model's tool calls, or NONE; see `tool_format_of`."""
        return tool_format_of(self.model.params.rope_factor, is_guard=self.is_guard)

    @property
    def engine(self) -> EngineCore:
        """The engine below `llm_engine`: its statistics, its scheduler, its pages."""
        return self.llm_engine.core

    def generate(
        self,
        prompt_tokens: list[list[int]],
        max_gen_len: int | None = None,
        temperature: float = 0.6,
        top_p: float = 0.9,
        logprobs: bool = False,
        echo: bool = False,
        *,
        seed: int | None = None,
    ) -> tuple[list[list[int]], list[list[float]] | None]:
        """Continue each prompt until a stop token (left out), max_gen_len tokens or max_seq_len.

        Returns (tokens, logprobs), one list per prompt; with echo, the prompt comes first.
        logprobs are the model's own, natural, before temperature and top_p; the first token of an
        echoed prompt gets 0.0. temperature 0 is greedy. seed: of the first prompt, from which those
        of the others are derived; without it, they follow from the build's seed, the number of the
        call and the place in the list. ValueError or TypeError names the bad prompt or parameter,
        before any work, and where the ranks of one group were given different ones.
        """
        sampling = {"temperature": temperature, "top_p": top_p, "seed": seed}
        ids = _rows("prompt_tokens", prompt_tokens)
        outputs = self._run(ids, max_gen_len, sampling, logprobs, echo)
        tokens = [_tokens(output, echo) for output in outputs]
        return tokens, [_scores(output, echo) for output in outputs] if logprobs else None

    def text_completion(
        self,
        prompts: list[str],
        temperature: float = 0.6,
        top_p: float = 0.9,
        max_gen_len: int | None = None,
        logprobs: bool = False,
        echo: bool = False,
        *,
        seed: int | None = None,
    ) -> list[CompletionPrediction]:
        """Continue each text: [{"generation": text}]; with logprobs, also "tokens", "logprobs"."""
        sampling = {"temperature": temperature, "top_p": top_p, "seed": seed}
        outputs = self._run(self._encode_texts(prompts), max_gen_len, sampling, logprobs, echo)
        texts = [self.tokenizer.decode(_tokens(output, echo)) for output in outputs]
        scored = [self._scored(output, logprobs, echo) for output in outputs]
        return [{"generation": text, **x} for text, x in zip(texts, scored, strict=True)]

    def chat_completion(
        self,
        dialogs: _Dialogs,
        temperature: float = 0.6,
        top_p: float = 0.9,
        max_gen_len: int | None = None,
        logprobs: bool = False,
        *,
        seed: int | None = None,
        tools: Seq[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool = True,
        response_format: Mapping[str, Any] | None = None,
    ) -> list[ChatPrediction]:
        """Answer each dialog: [{"generation": {"role": "assistant", "content": text}}].

        A message may be one of OpenAI's: content in parts, tool calls, and their results with the
        role "tool". tools, tool_choice, parallel_tool_calls and response_format are OpenAI's too,
        for all dialogs. With tools, an answer may have "tool_calls"; append it and the results to
        the dialog, and ask again. Errors name the dialog and the message, before any work.
        """
        chat = ChatOptions(tools, tool_choice, parallel_tool_calls, response_format)
        sampling = {"temperature": temperature, "top_p": top_p, "seed": seed}
        prompts = self._encode_dialogs(dialogs, chat)
        outputs = self._run(prompts, max_gen_len, sampling, logprobs, chat=chat)
        answers: list[Any] = [self._reader(x, chat).message(x.outputs[0]) for x in outputs]
        scored = [self._scored(output, logprobs) for output in outputs]
        return [{"generation": answer, **x} for answer, x in zip(answers, scored, strict=True)]

    def stream_text(
        self,
        prompts: list[str],
        temperature: float = 0.6,
        top_p: float = 0.9,
        max_gen_len: int | None = None,
        *,
        stop: str | Seq[str] = (),
        seed: int | None = None,
    ) -> Generator[TextDelta, None, None]:
        """text_completion as it comes: joined by index, the deltas are its answers. No delta holds
        half a character or any part of a stop string. Leaving the loop early aborts what is left.
        Errors are raised at the call, before any work."""
        sampling = {"temperature": temperature, "top_p": top_p, "seed": seed, "stop": stop}
        requests = self._requests(self._encode_texts(prompts), max_gen_len, sampling)
        return self._deltas(self.llm_engine.stream(requests), _NO_OPTIONS)

    def stream_chat(
        self,
        dialogs: _Dialogs,
        temperature: float = 0.6,
        top_p: float = 0.9,
        max_gen_len: int | None = None,
        *,
        stop: str | Seq[str] = (),
        seed: int | None = None,
        tools: Seq[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool = True,
        response_format: Mapping[str, Any] | None = None,
    ) -> Generator[TextDelta, None, None]:
        """chat_completion as it comes; as `stream_text`. A call comes in pieces: the first has its
        index, id and name, the others more of its arguments, as JSON."""
        chat = ChatOptions(tools, tool_choice, parallel_tool_calls, response_format)
        sampling = {"temperature": temperature, "top_p": top_p, "seed": seed, "stop": stop}
        prompts = self._encode_dialogs(dialogs, chat)
        requests = self._requests(prompts, max_gen_len, sampling, chat=chat)
        return self._deltas(self.llm_engine.stream(requests), chat)

    def beam_search(
        self,
        prompts: list[str],
        beam_width: int = 4,
        max_gen_len: int | None = None,
        *,
        length_penalty: float = 1.0,
        early_stopping: bool | str = False,
    ) -> list[list[BeamPrediction]]:
        """The likeliest continuations of each text, best first; see `BeamParams`."""
        requests = self._requests(self._encode_texts(prompts), max_gen_len, {"temperature": 0.0})
        found = beam_search(self.llm_engine, requests, beam_width, length_penalty, early_stopping)
        decode = self.tokenizer.decode
        return [
            [{"generation": decode(beam.tokens), "score": beam.score} for beam in beams]
            for beams in found
        ]

    def _requests(
        self,
        prompts: Iterable[Any],
        max_gen_len: int | None,
        sampling: Mapping[str, Any],
        logprobs: bool = False,
        echo: bool = False,
        *,
        chat: ChatOptions = _NO_OPTIONS,
    ) -> Iterator[Request]:
        """A request for each prompt, as ids. sampling: other fields of `SamplingParams`. All checks
        run when this is iterated, not when it is called: the engine does that where an error on one
        rank becomes an error on every rank."""
        params = SamplingParams(
            max_tokens=whole_number("max_gen_len", max_gen_len, 0, 2**31 - 1, optional=True),
            logprobs=0 if logprobs else None,
            prompt_logprobs=0 if logprobs and echo else None,
            **sampling,
        )
        params = chat.params(params, self.tool_format)
        for i, ids in enumerate(prompts):
            if isinstance(ids, str):  # which the engine would take for a prompt
                raise not_ids(f"prompt {i}", ids)
            yield self.llm_engine.prepare("", ids, params, index=i)

    def _run(self, prompts: Iterable[Any], *asked: Any, **more: Any) -> list[RequestOutput]:
        outputs = self.llm_engine.run(self._requests(prompts, *asked, **more))
        for output in outputs:
            _check(output)
        return outputs

    def _deltas(
        self, outputs: Generator[RequestOutput, None, None], chat: ChatOptions
    ) -> Generator[TextDelta, None, None]:
        readers: dict[int, AnswerDeltas] = {}
        with contextlib.closing(outputs):  # leaving this one leaves that one, at once
            for output in outputs:
                _check(output)
                (answer,), index = output.outputs, output.index
                if index not in readers:
                    readers[index] = self._reader(output, chat)
                deltas = readers[index].push(answer) or [{}] * output.finished
                for i, delta in enumerate(deltas, start=1):
                    ends = output.finished and i == len(deltas)
                    reason = readers[index].finish_reason(answer.finish_reason) if ends else None
                    calls = tuple(delta.get("tool_calls", ()))
                    yield TextDelta(index, delta.get("content", ""), reason, calls)

    def _reader(self, output: RequestOutput, chat: ChatOptions) -> AnswerDeltas:
        """What finds the calls in an answer to a dialog with tools."""
        key = ("", output.prompt_token_ids, output.index, 0)
        return AnswerDeltas(chat.tool_request, self.tokenizer, key)

    def _scored(self, output: RequestOutput, logprobs: bool, echo: bool = False) -> _Scored:
        if not logprobs:
            return {}
        pieces = [self.tokenizer.decode([token]) for token in _tokens(output, echo)]
        return {"tokens": pieces, "logprobs": _scores(output, echo)}

    def _encode_texts(self, prompts: Any) -> Iterator[list[int]]:
        for i, prompt in enumerate(_rows("prompts", prompts)):
            if not isinstance(prompt, str):
                raise TypeError(f"prompts[{i}] is {type(prompt).__name__}, not a string")
            yield self.tokenizer.encode(prompt, bos=True, eos=False)

    def _encode_dialogs(self, dialogs: Any, chat: ChatOptions) -> Iterator[list[int]]:
        for i, dialog in enumerate(_rows("dialogs", dialogs)):
            tools, tool_format = chat.tool_request, self.tool_format
            try:
                yield encode_chat(self.tokenizer, dialog, tools, tool_format=tool_format)
            except (TypeError, ValueError) as e:
                kind = FieldTypeError if isinstance(e, TypeError) else FieldError
                raise kind(getattr(e, "field", "dialogs"), f"dialog {i}, {e}") from None


def _rows(name: str, prompts: Any) -> Iterator[Any]:
    """The prompts, one row each, of a list, a tuple, an array or a tensor."""
    if not (isinstance(prompts, list | tuple) or hasattr(prompts, "tolist")):
        raise TypeError(f"{name} must be a list, got {type(prompts).__name__}: wrap it in [ ]")
    yield from prompts


def _tokens(output: RequestOutput, echo: bool) -> list[int]:
    tokens = output.outputs[0].token_ids
    return output.prompt_token_ids + tokens if echo else tokens


def _scores(output: RequestOutput, echo: bool) -> list[float]:
    """Each token's own log-probability; 0.0 for the first of a prompt: nothing comes before it."""
    entries = (output.prompt_logprobs or [] if echo else []) + (output.outputs[0].logprobs or [])
    return [
        0.0 if entry is None else entry[token]
        for token, entry in zip(_tokens(output, echo), entries, strict=True)
    ]


def _check(output: RequestOutput) -> None:
    if output.error is not None:
        raise ValueError(f"prompt {output.index}: {output.error}")
