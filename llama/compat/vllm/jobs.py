"""What LLM, LLMEngine and AsyncLLMEngine share: from vLLM's prompts and parameters to requests.

In: one prompt in any of vLLM's forms, and its parameters. Out: a checked `Job`, which makes the
request for the engine and vLLM's outputs. Beam searches are run here; all else is only made.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llama.checks import brief, whole_number
from llama.compat.vllm.outputs import Reporter, RequestOutput
from llama.compat.vllm.params import EngineArgs, SamplingParams, refuse
from llama.compat.vllm.tokenizer import ClientTokenizer
from llama.generation import Llama
from llama.requests.beam_search import Beam, BeamParams, beam_search
from llama.requests.llm_engine import LLMEngine
from llama.requests.request import Request
from llama.sampling_params import SamplingParams as LlamaParams


@dataclass(frozen=True)
class ModelConfig:
    """What clients read of a model: where it came from, its longest sequence, its vocabulary."""

    model: str
    max_model_len: int
    vocab_size: int
    seed: int

    def get_vocab_size(self) -> int:
        return self.vocab_size


@dataclass
class Job:
    """One request: its prompt as ids, and how it is computed and reported."""

    ids: list[int]
    params: LlamaParams
    asked: SamplingParams
    reporter: Reporter

    def request(self, engine: LLMEngine, name: str = "", index: int = 0) -> Request:
        """index: its place in the client's list; a seed is that seed in each place."""
        request = engine.prepare(name, self.ids, self.params, index=index)
        if self.params.seed is not None:
            request.set_seed(self.params.seed)
        return request


class Served:
    """What LLM, LLMEngine and AsyncLLMEngine share: a model, its engine, and how jobs are made."""

    def __init__(self, llama: Llama, args: EngineArgs | None = None) -> None:
        """args: where the model came from, if it was built from them."""
        self.llama = llama
        self.llama_engine = llama.llm_engine
        self.tokenizer = ClientTokenizer(llama.tokenizer)
        self._args = args
        self.model_config = ModelConfig(
            "" if args is None else args.model,
            self.llama_engine.max_seq_len,
            llama.tokenizer.n_words,
            llama.seed,
        )

    def get_tokenizer(self) -> ClientTokenizer:
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        return SamplingParams() if self._args is None else self._args.default_params()

    def make_job(self, request_id: str, prompt: Any, params: SamplingParams | None) -> Job:
        asked = self.get_default_sampling_params() if params is None else params
        if not isinstance(asked, SamplingParams):
            raise TypeError(
                f"params must be llama.compat.vllm's SamplingParams, got {type(params).__name__}"
            )
        text, ids = self._encoded(prompt, asked.truncate_prompt_tokens)
        params_now = asked.engine_params()
        reporter = Reporter(
            request_id, text, params_now, asked.output_kind, asked.detokenize, self.llama.tokenizer
        )
        return Job(ids, params_now, asked, reporter)

    def _encoded(self, prompt: Any, most: int | None) -> tuple[str | None, list[int]]:
        """A prompt's text, if it has one, and its last `most` ids."""
        most = whole_number("truncate_prompt_tokens", most, 1, 2**31 - 1, optional=True)
        if isinstance(prompt, Mapping):
            names = {"prompt", "prompt_token_ids", "type"}
            refuse("a prompt", {k: v for k, v in prompt.items() if k not in names})
            text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        else:
            text, ids = (prompt, None) if isinstance(prompt, str) else (None, prompt)
        if ids is None and not isinstance(text, str):
            raise TypeError(
                f"the prompt {brief(prompt)} must be a string, a list of token ids, or a dict with "
                "'prompt' or 'prompt_token_ids'"
            )
        if ids is not None:
            ids = ids.tolist() if hasattr(ids, "tolist") else ids
            return text, ids if most is None else ids[-most:]
        ids = self.tokenizer.encode(str(text))
        if most is not None and len(ids) > most:
            ids = ids[:1] + ids[len(ids) - most + 1 :]
        return text, ids

    def search(self, jobs: list[Job], engine: LLMEngine) -> list[RequestOutput]:
        """The outputs of beam searches, in order; those with equal parameters run together."""
        if not jobs:
            return []
        found: dict[int, list[Beam]] = {}
        groups: dict[tuple[BeamParams, frozenset[int]], list[int]] = {}
        with self.llama_engine.agree("the beam searches") as must_match:
            sequences = []
            for i, job in enumerate(jobs):
                params, request = job.asked.beam_params(), job.request(self.llama_engine)
                sequences.append(request.answers[0].sequence)
                groups.setdefault((params, sequences[i].stop_ids), []).append(i)
                must_match.append((params, request.fingerprint()))
        for (params, stop_ids), places in groups.items():
            prompts = [jobs[i].ids for i in places]
            limits = [sequences[i].max_len - sequences[i].num_prompt for i in places]
            beams = beam_search(engine, prompts, limits, stop_ids, params)
            found |= dict(zip(places, beams, strict=True))
        return [
            job.reporter.report_beams(job.ids, found[i][: job.asked.n])
            for i, job in enumerate(jobs)
        ]


def one_of(name: str, value: Any, old_name: str, old_value: Any) -> Any:
    if value is not None and old_value is not None:
        raise TypeError(f"{name} and {old_name} are the same: give one")
    return old_value if value is None else value


def one_prompt(prompt: Any, token_ids: Any) -> Any:
    """vLLM before 0.6 took ids beside the text; they count, and the text is only its label."""
    if token_ids is None:
        return prompt
    if isinstance(prompt, str):
        return {"prompt": prompt, "prompt_token_ids": token_ids}
    if prompt is not None:
        raise TypeError("prompts and prompt_token_ids are both given: give one")
    return token_ids
