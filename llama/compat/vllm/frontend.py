"""What vLLM's `LLM`, `LLMEngine` and `AsyncLLMEngine` share: from its prompts to our requests.

In: one prompt in any of vLLM's forms, and its parameters. Out: a checked `VllmRequest`. Beam
searches are run here; all else is only made.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from llama.checks import brief, whole_number
from llama.compat.client_tokenizer import ClientTokenizer
from llama.compat.vllm.engine_args import EngineArgs
from llama.compat.vllm.vllm_params import RequestOutputKind, SamplingParams, refuse
from llama.compat.vllm.vllm_request import RequestOutput, VllmRequest
from llama.generation import Llama
from llama.prompts import ToolFormat
from llama.requests.beam_search import Beam, BeamParams, beam_search

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
    """What the three share: a model, its engine, and how requests are made and beams searched."""

    def __init__(self, llama: Llama, args: EngineArgs | None = None) -> None:
        """args: where the model came from, if it was built from them."""
        self.llama = llama
        self.llama_engine = llama.llm_engine
        own = llama.tool_format  # a 3.0 model has none; vLLM gives it 3.1's all the same
        self.tool_format = ToolFormat.LLAMA_3_1 if own is ToolFormat.NONE else own
        self.tokenizer = ClientTokenizer(llama.tokenizer, self.tool_format)
        self._args = args
        self.model_config = ModelConfig(
            "" if args is None else args.model,
            self.llama_engine.max_seq_len,
            llama.tokenizer.n_words,
            llama.seed,
        )

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, **others: Any) -> Self:
        place = f"{cls.__name__}.from_engine_args"
        refuse(place, {name: x for name, x in others.items() if name not in _LABELS})
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
        asked = self.get_default_sampling_params() if params is None else params
        if not isinstance(asked, SamplingParams):
            raise TypeError(
                f"params must be llama.compat.vllm's SamplingParams, got {type(params).__name__}"
            )
        text, ids = self._encoded(prompt, asked.truncate_prompt_tokens)
        id_there = name if index is None else ""
        request = self.llama_engine.prepare(id_there, ids, asked.engine_params(), index=index or 0)
        if asked.seed is not None:
            request.set_seed(asked.seed)  # that very seed, in each place of a list
        request.prompt = text
        return VllmRequest(
            **vars(request),
            name=name,
            kind=asked.output_kind if index is None else RequestOutputKind.FINAL_ONLY,
            detokenize=asked.detokenize,
            tokenizer=self.llama.tokenizer,
            beams=asked.beam_params() if asked.use_beam_search else None,
            num_beams=asked.n,
        )

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

    def search(
        self, requests: list[VllmRequest], is_aborted: Callable[[], bool] = lambda: False
    ) -> list[RequestOutput]:
        """The outputs of beam searches, in order; those with equal parameters run together."""
        if not requests:
            return []
        found: dict[int, list[Beam]] = {}
        groups: dict[tuple[BeamParams, frozenset[int]], list[int]] = {}
        sequences = [request.answers[0].sequence for request in requests]
        with self.llama_engine.agree("the beam searches") as must_match:
            for i, request in enumerate(requests):
                assert request.beams is not None
                groups.setdefault((request.beams, sequences[i].stop_ids), []).append(i)
                must_match.append((request.beams, request.fingerprint()))
        for (params, stop_ids), places in groups.items():
            prompts = [sequences[i].tokens for i in places]
            limits = [sequences[i].max_len - sequences[i].num_prompt for i in places]
            beams = beam_search(
                self.llama_engine, prompts, limits, stop_ids, params, is_aborted=is_aborted
            )
            found |= dict(zip(places, beams, strict=True))
        return [request.of_beams(found[i]) for i, request in enumerate(requests)]


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
