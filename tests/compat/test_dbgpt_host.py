"""DB-GPT's own DefaultModelWorker, with this runtime as its model.

It runs where `dbgpt` is installed (0.8.2, with cloudpickle, shortuuid and fastapi, which its worker
imports), and is skipped elsewhere. DB-GPT builds the prompt, calls our functions and reads their
output; the oracle is chat_completion.
"""

import asyncio
import itertools
from typing import Any

import pytest

from helpers.launch import DEMO
from llama import AsyncLLMEngine, Llama, Message
from llama.compat.client_tokenizer import ClientTokenizer
from llama.compat.hosts import async_generate_stream, generate_stream

pytestmark = pytest.mark.hosts
_MISSING = "it needs DB-GPT: pip install dbgpt==0.8.2 cloudpickle shortuuid fastapi"


def host_module(name: str) -> Any:
    return pytest.importorskip(name, reason=_MISSING, exc_type=ImportError)


host = host_module("dbgpt.model.cluster.worker.default_worker")
base = host_module("dbgpt.model.adapter.base")
vllm_adapter = host_module("dbgpt.model.adapter.vllm_adapter")
core = host_module("dbgpt.core")
parameter = host_module("dbgpt.core.interface.parameter")

CONTEXT = 256


def build() -> Llama:
    return Llama.build(str(DEMO), None, CONTEXT, 8, device="cpu", dtype="fp32")


class Adapter(vllm_adapter.VLLMModelAdapterWrapper):  # type: ignore[name-defined]
    """DB-GPT's own adapter for vLLM, with another model and another function to call."""

    provider = "llama-async"

    def match(self, provider, model_name=None, model_path=None) -> bool:
        return provider == self.provider

    def load_from_params(self, params):
        engine = AsyncLLMEngine(build())
        return engine, ClientTokenizer(engine.engine.tokenizer)

    def get_async_generate_stream_function(self, model, deploy_model_params):
        return async_generate_stream


class SyncAdapter(Adapter):
    provider = "llama"

    def load_from_params(self, params):
        llama = build()
        return llama, ClientTokenizer(llama.tokenizer)

    def support_async(self) -> bool:
        return False

    def get_generate_stream_function(self, model, deploy_model_params):
        return generate_stream


for adapter in (Adapter, SyncAdapter):
    base.register_model_adapter(adapter)


@pytest.fixture(scope="module", params=["llama-async", "llama"])
def worker(request):
    started = host.DefaultModelWorker()
    deployed = parameter.LLMDeployModelParameters(name=request.param, provider=request.param)
    started.load_worker(request.param, deployed)
    started.start()
    yield started
    if started.support_async():
        started.model.close()
    started.stop()


def ask(content: str, **changes: Any) -> dict[str, Any]:
    """Return a request as DB-GPT's own class sends it to a worker."""
    message = core.ModelMessage.build_human_message(content)
    sent = core.ModelRequest.build_request(
        "llama", [message], temperature=0.0, max_new_tokens=12, span_id="1:2"
    )
    return {**sent.to_dict(), **changes}


def outputs(worker, requests: list[dict[str, Any]]) -> list[list[Any]]:
    """Return the output of each request's stream; the async worker serves them at once."""
    if not worker.support_async():
        return [list(worker.generate_stream(request)) for request in requests]

    async def one(request: dict[str, Any]) -> list[Any]:
        return [output async for output in worker.async_generate_stream(request)]

    async def main() -> list[list[Any]]:
        return await asyncio.gather(*(one(request) for request in requests))

    return asyncio.run(main())


def test_it_streams_the_answers_of_chat_completion(worker, demo):
    asked = ["Hello", "Tell me a story.", "What is the capital of France?"]
    dialogs: list[list[Message]] = [[{"role": "user", "content": content}] for content in asked]
    wanted = demo.chat_completion(dialogs, 0.0, max_gen_len=12)
    for told, answer in zip(outputs(worker, [ask(c) for c in asked]), wanted, strict=True):
        texts = [output.text for output in told]
        assert texts[-1] == answer["generation"]["content"]
        assert len(told) > 2 and all(b.startswith(a) for a, b in itertools.pairwise(texts))
        assert {output.error_code for output in told} == {0}
        usage = told[-1].usage
        assert told[-1].finish_reason in ("stop", "length")
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        assert told[-1].metrics.completion_tokens == usage["completion_tokens"]


def test_it_counts_the_tokens_that_the_model_reads(worker):
    """The worker counts tokens with our tokenizer.

    If that call had failed, DB-GPT would have used an OpenAI tokenizer.
    """
    prompt = worker.tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hello"}], tokenize=False, add_generation_prompt=True
    )
    ((*_, last),) = outputs(worker, [ask("Hello")])
    assert worker.count_token(prompt) == last.usage["prompt_tokens"]
    assert worker.count_token("Hello") == len(worker.tokenizer.encode("Hello"))


def test_an_error_is_an_answer_with_a_code(worker):
    """An error is an answer with a code, which the host shows, and the worker goes on."""
    ((error,), told) = outputs(worker, [ask("Hello", max_new_tokens="many"), ask("Hello")])
    assert error.error_code == 1 and "max_new_tokens='many' must be a whole number" in error.text
    assert told[-1].error_code == 0


def test_what_is_too_long_shortens_the_answer(worker):
    (told,) = outputs(worker, [ask("word " * 200, max_new_tokens=400)])
    assert told[-1].error_code == 0
    assert told[-1].usage["prompt_tokens"] > 200
    assert told[-1].usage["total_tokens"] <= CONTEXT


def test_its_benchmark_variable_ignores_stops(worker, monkeypatch):
    if not worker.support_async():
        pytest.skip("it is of DB-GPT's function for vLLM")
    monkeypatch.setenv("DB_GPT_MODEL_BENCHMARK", "true")
    (told,) = outputs(worker, [ask("Hello", max_new_tokens=80, stop=["e", " "])])
    assert told[-1].usage["completion_tokens"] == 80
