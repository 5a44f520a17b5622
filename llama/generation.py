"""The front door: Meta's `Llama.build`, `generate`, `text_completion` and `chat_completion`.

In: a folder of weights, then prompts as text, ids or dialogs. Out: text, ids and log-probabilities,
the same on every rank. Here text becomes ids and ids become text; the engine below sees ids only.
"""

import time
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from itertools import count
from typing import TypedDict

import torch

from llama.engine.core import EngineCore
from llama.engine.pages import PagePool
from llama.engine.runner import ModelRunner
from llama.engine.sampler import sample_top_p
from llama.engine.scheduler import Scheduler
from llama.engine.sequence import Sequence
from llama.loading import describe, load_model
from llama.model import Transformer
from llama.requests.beam_search import BeamParams, beam_search
from llama.requests.llm_engine import LLMEngine, Request, check_prompt
from llama.sampling_params import SamplingParams
from llama.tokenizer import ChatFormat, Dialog, Message, Tokenizer, validate_dialog

__all__ = ["ChatPrediction", "CompletionPrediction", "Llama", "sample_top_p"]

PAGE_SIZE = 16  # slots: a shared prefix is reused in steps of this many tokens
TOKEN_BUDGET = 2048  # tokens a step: bounds its memory, and the wait between two tokens


class CompletionPrediction(TypedDict, total=False):
    generation: str
    tokens: list[str]  # with logprobs=True only
    logprobs: list[float]  # likewise


class ChatPrediction(TypedDict, total=False):
    generation: Message
    tokens: list[str]
    logprobs: list[float]


class BeamPrediction(TypedDict):
    generation: str
    score: float  # sum of log-probabilities / length ** length_penalty


@dataclass(frozen=True)
class TextDelta:
    """A piece of the answer to prompt `index`; finish_reason ("stop", "length") ends the last."""

    index: int
    text: str
    finish_reason: str | None


class Llama:
    """A loaded model with its tokenizer and engine; make one with `Llama.build`."""

    @staticmethod
    def build(
        ckpt_dir: str,
        tokenizer_path: str | None = None,
        max_seq_len: int | None = None,
        max_batch_size: int | None = None,
        model_parallel_size: int | None = None,
        seed: int = 1,
        *,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype | None = None,
        timeout_s: float = 600.0,
    ) -> "Llama":
        """Load a checkpoint, on one process or on all that torchrun started.

        ckpt_dir: a folder with Meta's consolidated.NN.pth and params.json, in any number of shards,
        or with Hugging Face's *.safetensors and config.json. tokenizer_path defaults to the file
        beside the weights; max_seq_len (tokens of prompt and answer) and max_batch_size (sequences
        that run at once; more wait their turn) to what fits the memory; model_parallel_size to the
        number of processes; device to cuda, mps or cpu, the first there is; dtype ("bf16", "fp16",
        "fp32") to bf16 where the device has it; "int8", on the CPU, holds the matrices in half the
        memory, with a scale a row, and the rest in bf16. timeout_s (seconds) bounds each wait for a
        rank.

        The same seed and prompt give the same answer. ValueError, FileNotFoundError and the like
        name what is wrong, on every rank, before weights are read. No global state is changed, but
        for torch's number of threads on the CPU where nobody chose it: see `llama.threads`.
        """
        began = time.perf_counter()
        model, tokenizer = load_model(
            ckpt_dir,
            tokenizer_path,
            max_seq_len,
            max_batch_size,
            model_parallel_size,
            seed,
            device=device,
            dtype=dtype,
            timeout_s=timeout_s,
        )
        with model.parallel.agree("the pages", world=True):
            llama = Llama(model, tokenizer, seed=seed)
        llama.load_seconds = time.perf_counter() - began
        if model.parallel.global_rank == 0:
            print(f"Loaded in {llama.load_seconds:.2f} seconds: {describe(model)}")
        return llama

    def __init__(self, model: Transformer, tokenizer: Tokenizer, *, seed: int = 1) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.formatter = ChatFormat(tokenizer)
        self.seed = seed
        self.load_seconds = 0.0
        self._serials = count()  # of streams: the same on every rank
        args = model.params
        num_pages = args.max_batch_size * -(-args.max_seq_len // PAGE_SIZE)
        engine = EngineCore(
            ModelRunner(model, num_pages=num_pages, page_size=PAGE_SIZE),
            Scheduler(
                PagePool(num_pages, PAGE_SIZE),
                max_batch_size=args.max_batch_size,
                token_budget=max(TOKEN_BUDGET, args.max_batch_size),
            ),
        )
        self.llm_engine = LLMEngine(
            engine,
            tokenizer,
            max_seq_len=args.max_seq_len,
            seed=seed,
            parallel=model.parallel,
        )

    @property
    def engine(self) -> EngineCore:
        return self.llm_engine.engine

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

        Returns (tokens, logprobs), a list for each prompt; with echo, the prompt comes first.
        logprobs are the model's own, natural, before temperature and top_p; the first token of an
        echoed prompt gets 0.0. temperature 0 is greedy; the draw of each token depends on seed (by
        default the build's) and its position alone. ValueError or TypeError names the bad prompt or
        parameter, before any work, and where the ranks of one group were given different ones.
        """
        with self.model.parallel.agree("the prompts or parameters") as must_match:
            params = self._params(temperature, top_p, logprobs, echo, seed)
            sequences = self._sequences(prompt_tokens, max_gen_len, params)
            must_match += [params, [(seq.tokens, seq.limit) for seq in sequences]]
        self._run(sequences)
        tokens = [seq.tokens if echo else seq.output for seq in sequences]
        if not logprobs:
            return tokens, None
        return tokens, [(seq.prompt_logprobs if echo else []) + seq.logprobs for seq in sequences]

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
        with self.model.parallel.agree("the prompts"):
            ids = self._encode_texts(prompts)
        tokens, scores = self.generate(
            ids, max_gen_len, temperature, top_p, logprobs, echo, seed=seed
        )
        if scores is None:
            return [{"generation": self.tokenizer.decode(t)} for t in tokens]
        return [
            {"generation": self.tokenizer.decode(t), "tokens": self._pieces(t), "logprobs": s}
            for t, s in zip(tokens, scores, strict=True)
        ]

    def chat_completion(
        self,
        dialogs: list[Dialog],
        temperature: float = 0.6,
        top_p: float = 0.9,
        max_gen_len: int | None = None,
        logprobs: bool = False,
        *,
        seed: int | None = None,
    ) -> list[ChatPrediction]:
        """Answer each dialog: [{"generation": {"role": "assistant", "content": text}}]."""
        with self.model.parallel.agree("the dialogs"):
            ids = self._encode_dialogs(dialogs)
        tokens, scores = self.generate(ids, max_gen_len, temperature, top_p, logprobs, seed=seed)
        answers: list[Message] = [
            {"role": "assistant", "content": self.tokenizer.decode(t)} for t in tokens
        ]
        if scores is None:
            return [{"generation": answer} for answer in answers]
        return [
            {"generation": answer, "tokens": self._pieces(t), "logprobs": s}
            for answer, t, s in zip(answers, tokens, scores, strict=True)
        ]

    def stream_text(
        self,
        prompts: list[str],
        temperature: float = 0.6,
        top_p: float = 0.9,
        max_gen_len: int | None = None,
        *,
        stop: str | Seq[str] = (),
        seed: int | None = None,
    ) -> Iterator[TextDelta]:
        """text_completion as it comes: joined by index, the increments are its answers.

        No increment holds half a character or any part of a stop string. Leaving the loop early
        aborts what is left. Errors are raised at the call, before any work.
        """
        with self.model.parallel.agree("the prompts"):
            ids = self._encode_texts(prompts)
        return self._stream(ids, temperature, top_p, max_gen_len, stop, seed)

    def stream_chat(
        self,
        dialogs: list[Dialog],
        temperature: float = 0.6,
        top_p: float = 0.9,
        max_gen_len: int | None = None,
        *,
        stop: str | Seq[str] = (),
        seed: int | None = None,
    ) -> Iterator[TextDelta]:
        """chat_completion as it comes; as `stream_text`."""
        with self.model.parallel.agree("the dialogs"):
            ids = self._encode_dialogs(dialogs)
        return self._stream(ids, temperature, top_p, max_gen_len, stop, seed)

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
        with self.model.parallel.agree("the prompts or parameters") as must_match:
            params = BeamParams(beam_width, length_penalty, early_stopping)
            sampling = self._params(0.0, 1.0, False, False, None)
            sequences = self._sequences(self._encode_texts(prompts), max_gen_len, sampling)
            must_match += [params, [(seq.tokens, seq.limit) for seq in sequences]]
        limits = [seq.limit - seq.num_prompt for seq in sequences]
        stop_ids = frozenset(self.tokenizer.stop_tokens)
        ids = [seq.tokens for seq in sequences]
        advance = self.llm_engine.advance
        found = beam_search(self.engine, ids, limits, stop_ids, params, advance)
        return [
            [
                {"generation": self.tokenizer.decode(beam.tokens), "score": beam.score}
                for beam in beams
            ]
            for beams in found
        ]

    def _stream(
        self,
        prompts: list[list[int]],
        temperature: float,
        top_p: float,
        max_gen_len: int | None,
        stop: str | Seq[str],
        seed: int | None,
    ) -> Iterator[TextDelta]:
        """Check everything now; queue and run once the caller asks for the first increment."""
        with self.model.parallel.agree("the prompts or parameters") as must_match:
            params = replace(self._params(temperature, top_p, False, False, seed), stop=stop)
            params = replace(params, max_tokens=check_length(max_gen_len))
            serial = next(self._serials)
            requests = [
                self.llm_engine.prepare(f"stream-{serial}-{i}", prompt, params)
                for i, prompt in enumerate(prompts)
            ]
            must_match += [params, prompts]
        return self._increments(requests)

    def _increments(self, requests: list[Request]) -> Iterator[TextDelta]:
        indices = {request.request_id: i for i, request in enumerate(requests)}
        try:
            for request in requests:
                self.llm_engine.submit(request)
            while indices:
                for output in self.llm_engine.step(indices):
                    answer, index = output.outputs[0], indices[output.request_id]
                    if output.finished:
                        del indices[output.request_id]
                    if answer.new_text or output.finished:
                        yield TextDelta(index, answer.new_text, answer.finish_reason)
        finally:
            for request_id in indices:
                self.llm_engine.abort_request(request_id)

    def _encode_texts(self, prompts: list[str]) -> list[list[int]]:
        _check_list("prompts", prompts)
        for i, prompt in enumerate(prompts):
            if not isinstance(prompt, str):
                raise TypeError(f"prompts[{i}] is {type(prompt).__name__}, not a string")
        return [self.tokenizer.encode(prompt, bos=True, eos=False) for prompt in prompts]

    def _encode_dialogs(self, dialogs: list[Dialog]) -> list[list[int]]:
        _check_list("dialogs", dialogs)
        for i, dialog in enumerate(dialogs):
            validate_dialog(dialog, i)
        return [self.formatter.encode_dialog_prompt(dialog) for dialog in dialogs]

    def _params(
        self, temperature: float, top_p: float, logprobs: bool, echo: bool, seed: int | None
    ) -> SamplingParams:
        return SamplingParams(
            max_tokens=None,
            temperature=temperature,
            top_p=top_p,
            seed=self.seed if seed is None else seed,
            logprobs=0 if logprobs else None,
            prompt_logprobs=0 if logprobs and echo else None,
        )

    def _sequences(
        self, prompts: list[list[int]], max_gen_len: int | None, params: SamplingParams
    ) -> list[Sequence]:
        """Every prompt checked, and its limit in tokens worked out."""
        longest = self.model.params.max_seq_len
        _check_list("prompt_tokens", prompts)
        most = check_length(max_gen_len)
        for i, prompt in enumerate(prompts):
            check_prompt(f"prompt {i}", prompt, longest, self.model.params.vocab_size)
        assert params.seed is not None
        return [
            Sequence(
                tokens=list(prompt),
                params=params,
                limit=min(longest, len(prompt) + (longest if most is None else most)),
                seed=params.seed,
                stop_ids=frozenset(self.tokenizer.stop_tokens),
            )
            for prompt in prompts
        ]

    def _run(self, sequences: list[Sequence]) -> None:
        """Step until all have ended; whatever interrupts it leaves no request behind."""
        try:
            for seq in sequences:
                self.engine.add(seq)
            while not all(seq.finished for seq in sequences):
                self.llm_engine.advance()
        finally:
            for seq in sequences:
                self.engine.abort(seq)

    def _pieces(self, tokens: list[int]) -> list[str]:
        return [self.tokenizer.decode([token]) for token in tokens]


def check_length(max_gen_len: int | None) -> int | None:
    """The most tokens to generate, checked; None is what fits."""
    if max_gen_len is not None and (
        isinstance(max_gen_len, bool) or not isinstance(max_gen_len, int) or max_gen_len < 0
    ):
        raise ValueError(f"max_gen_len={max_gen_len!r}: give a whole number from 0, or None")
    return max_gen_len


def _check_list(name: str, value: object) -> None:
    if not isinstance(value, list | tuple):
        raise TypeError(f"{name} is {type(value).__name__}, where a list belongs: wrap it in [ ]")
    if not value:
        raise ValueError(f"{name} is an empty list: give at least one")
