"""vLLM's Python API on a `Llama`: a client that was written for vLLM changes its import.

    from llama.compat.vllm import LLM, SamplingParams

In: vLLM's calls, in the forms of 0.4 to today. Out: outputs in vLLM's shape. An argument that means
nothing here is an error that names it. `llama.compat.vllm` has the parts; this file has `LLM`.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tqdm import tqdm

from llama.compat.vllm.async_engine import AsyncLLMEngine
from llama.compat.vllm.engine import LLMEngine
from llama.compat.vllm.jobs import Job, Served, one_prompt
from llama.compat.vllm.outputs import CompletionOutput, Logprob, RequestOutput
from llama.compat.vllm.params import (
    AsyncEngineArgs,
    BeamSearchParams,
    EngineArgs,
    RequestOutputKind,
    SamplingParams,
    refuse,
)
from llama.prompts import encode_chat
from llama.requests.request import Request
from llama.structured_output import StructuredOutput as StructuredOutputsParams

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLMEngine",
    "BeamSearchParams",
    "CompletionOutput",
    "EngineArgs",
    "LLMEngine",
    "Logprob",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
]


class LLM(Served):
    """vLLM's class for whole batches: prompts or messages in, the outputs in their order.

    The arguments are the fields of `EngineArgs`. Under torchrun every rank makes the same calls.
    """

    def __init__(self, model: str, **engine_args: Any) -> None:
        args = EngineArgs(model, **engine_args)
        super().__init__(args.build(), args)
        self.llm_engine = LLMEngine(self.llama, args)
        self._num_requests = 0

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> "LLM":
        return cls(**vars(engine_args))

    def generate(
        self,
        prompts: Any = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        prompt_token_ids: list[list[int]] | list[int] | None = None,
        use_tqdm: bool | Callable[..., tqdm] = True,
        **others: Any,
    ) -> list[RequestOutput]:
        """The final output of each prompt.

        prompts: a text, {"prompt": text}, token ids, {"prompt_token_ids": ids}, or a list of such.
        sampling_params: for all, or one for each; by default those of generation_config.json.
        TypeError or ValueError names what is wrong, before any work.
        """
        refuse("LLM.generate", others)
        return self._run(
            lambda: _as_list(one_prompt(prompts, prompt_token_ids)), sampling_params, use_tqdm
        )

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

        def prompts() -> list[Any]:
            is_one = bool(messages) and isinstance(messages[0], Mapping)
            encoded = [
                encode_chat(
                    self.llama.tokenizer,
                    dialog,
                    tools,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message,
                )
                for dialog in ([messages] if is_one else messages)
            ]
            decode = self.tokenizer.decode
            return [{"prompt": decode(ids), "prompt_token_ids": ids} for ids in encoded]

        return self._run(prompts, sampling_params, use_tqdm)

    def beam_search(
        self, prompts: Any, params: BeamSearchParams, **others: Any
    ) -> list[RequestOutput]:
        """The beam_width best continuations of each prompt, as the outputs of one request."""
        refuse("LLM.beam_search", others, {"use_tqdm": (False, True)})
        asked = SamplingParams(
            n=params.beam_width,
            best_of=params.beam_width,
            use_beam_search=True,
            temperature=0.0,
            max_tokens=params.max_tokens,
            ignore_eos=params.ignore_eos,
            length_penalty=params.length_penalty,
            skip_special_tokens=params.skip_special_tokens,
        )
        return self._run(lambda: _as_list(prompts), asked, False)

    def _run(
        self,
        prompts: Callable[[], list[Any]],
        params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool | Callable[..., tqdm],
    ) -> list[RequestOutput]:
        jobs: list[Job] = []
        found: dict[int, RequestOutput] = {}
        outputs = self.llama_engine.stream(self._requests(prompts, params, jobs))
        make_bar = use_tqdm if callable(use_tqdm) else tqdm
        shows = bool(use_tqdm and jobs) and self.llama_engine.parallel.global_rank == 0
        bar = make_bar(total=len(jobs), desc="Processed prompts", disable=not shows)
        with bar, contextlib.closing(outputs):
            for output in outputs:
                report = jobs[output.index].reporter.report(output)
                if report is not None:
                    found[output.index] = report
                    bar.update()
            searched = [i for i, job in enumerate(jobs) if job.asked.use_beam_search]
            beams = self.search([jobs[i] for i in searched], self.llama_engine)
            found |= dict(zip(searched, beams, strict=True))
            bar.update(len(searched))
        return [found[i] for i in range(len(jobs))]

    def _requests(
        self, encode: Callable[[], list[Any]], params: Any, jobs: list[Job]
    ) -> Iterator[Request]:
        """Make a job for each prompt, and a request for each that is no beam search.

        The engine iterates over it where an error on one rank becomes an error on every rank.
        """
        prompts = encode()
        params = self.get_default_sampling_params() if params is None else params
        each = list(params) if isinstance(params, list | tuple) else [params] * len(prompts)
        if len(each) != len(prompts):
            raise ValueError(
                f"{len(prompts)} prompts and {len(each)} sampling_params: give as many"
            )
        first, self._num_requests = self._num_requests, self._num_requests + len(prompts)
        for i, (prompt, asked) in enumerate(zip(prompts, each, strict=True)):
            job = self.make_job(str(first + i), prompt, asked)
            job.reporter.kind = RequestOutputKind.FINAL_ONLY
            jobs.append(job)
            request = job.request(self.llama_engine, index=i)
            if not job.asked.use_beam_search:
                yield request


def _as_list(prompts: Any) -> list[Any]:
    """One prompt, of any form, or a list of them, as a list."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    prompts = prompts.tolist() if hasattr(prompts, "tolist") else prompts
    if not isinstance(prompts, list | tuple):
        raise TypeError(f"prompts must be a prompt or a list of them, got {type(prompts).__name__}")
    is_one = bool(prompts) and not isinstance(prompts[0], str | Mapping | list | tuple)
    return [prompts] if is_one and not hasattr(prompts[0], "tolist") else list(prompts)
