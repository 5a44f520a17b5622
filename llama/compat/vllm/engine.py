"""vLLM's LLMEngine: requests are added one by one, and a client's loop calls `step`.

In: vLLM's calls, in the forms of 0.4 to today. Out: vLLM's outputs. It translates; the engine of
`llama.requests` computes.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from llama.checks import brief
from llama.compat.vllm.jobs import Job, ModelConfig, Served, one_of, one_prompt
from llama.compat.vllm.outputs import Reporter, RequestOutput
from llama.compat.vllm.params import LABELS, EngineArgs, SamplingParams, refuse
from llama.generation import Llama
from llama.requests.request import Request


class LLMEngine(Served):
    """vLLM's engine that its client steps. Under torchrun every rank makes the same calls.

    A beam search is computed whole by one `step`, which then takes as long as the search.
    """

    def __init__(self, llama: Llama, args: EngineArgs | None = None) -> None:
        super().__init__(llama, args)
        self._reporters: dict[str, Reporter] = {}
        self._searches: dict[str, Job] = {}

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, **others: Any) -> "LLMEngine":
        refuse("LLMEngine.from_engine_args", {k: v for k, v in others.items() if k not in LABELS})
        return cls(engine_args.build(), engine_args)

    def add_request(
        self,
        request_id: str,
        prompt: Any = None,
        params: SamplingParams | None = None,
        prompt_token_ids: list[int] | None = None,
        *,
        inputs: Any = None,
        sampling_params: SamplingParams | None = None,
        **others: Any,
    ) -> str:
        """Queue a request: prompt, or inputs as in 0.5, or prompt_token_ids as in 0.4; its id."""
        refuse("add_request", others, {"priority": (0,)})
        params = one_of("params", params, "sampling_params", sampling_params)
        prompt = one_prompt(one_of("prompt", prompt, "inputs", inputs), prompt_token_ids)
        if request_id in self._reporters:
            raise ValueError(f"request_id={brief(request_id)} is in use by an unfinished request")
        if request_id == "":
            raise ValueError("request_id is empty: give each request a name")
        jobs: list[Job] = []

        def prepared() -> Iterator[Request]:
            jobs.append(self.make_job(request_id, prompt, params))
            request = jobs[0].request(self.llama_engine, request_id)
            if not jobs[0].asked.use_beam_search:
                yield request

        self.llama_engine.submit(prepared())  # which checks it where all ranks see an error
        self._reporters[request_id] = jobs[0].reporter
        if jobs[0].asked.use_beam_search:
            self._searches[request_id] = jobs[0]
        return request_id

    def step(self) -> list[RequestOutput]:
        """The outputs that came since the last step; the model runs once for them."""
        searches = list(self._searches.values())
        self._searches.clear()
        outputs = []
        try:
            for output in self.search(searches, self.llama_engine):
                del self._reporters[output.request_id]
                outputs.append(output)
            for ours in self.llama_engine.step():
                report = self._reporters[ours.request_id].report(ours)
                outputs += [] if report is None else [report]
                if ours.finished:
                    del self._reporters[ours.request_id]
        except BaseException:  # which ended all requests of the step
            for name in [n for n in self._reporters if self.llama_engine.find(n) is None]:
                del self._reporters[name]
            raise
        return outputs

    def abort_request(self, request_id: str | Iterable[str]) -> None:
        """End requests; they have no further output. Nothing, for one that is not there."""
        for name in [request_id] if isinstance(request_id, str) else list(request_id):
            self._searches.pop(name, None)
            if self._reporters.pop(name, None) is not None:
                self.llama_engine.abort_request(name)

    def has_unfinished_requests(self) -> bool:
        return bool(self._reporters)

    def get_num_unfinished_requests(self) -> int:
        return len(self._reporters)

    def get_model_config(self) -> ModelConfig:
        return self.model_config
