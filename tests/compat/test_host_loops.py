"""The hosts' own loops around generate_stream, rewritten: one for each program that has one.

The result of a loop is compared with the same request to LLMEngine. Where FastChat's inference code
is installed (fschat 0.2.36 with accelerate and peft), its function, on transformers with our
tokenizer, is compared with ours, and its chat loop runs on ours.
"""

import asyncio
import json
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from helpers.launch import DEMO
from llama import AsyncLLMEngine, Llama, SamplingParams
from llama.checkpoint.write.convert import convert
from llama.compat.client_tokenizer import ClientTokenizer
from llama.compat.hosts import (
    async_generate_stream,
    generate_stream,
    gorilla_generate_stream,
    guanaco_generate_stream,
)
from llama.compat.vllm import AsyncLLMEngine as VllmEngine
from llama.compat.vllm import SamplingParams as VllmParams

PROMPT = "Once upon a time"


def answer(llama: Llama, **sampling: Any) -> list[str]:
    engine = llama.llm_engine
    params = SamplingParams(skip_special_tokens=True, **sampling)
    (output,) = engine.run([engine.prepare("", PROMPT, params)])
    return [each.text for each in output.outputs]


def words_printed(reports: Iterator[Any]) -> str:
    """Print as FastChat's command line does: whole words as they come, and the rest at the end."""
    shown, printed = 0, ""
    words: list[str] = []
    for report in reports:
        words = report["text"].strip().split(" ")
        ready = len(words) - 1
        if ready > shown:
            printed += " ".join(words[shown:ready]) + " "
            shown = ready
    return printed + " ".join(words[shown:])


def test_fastchats_chat_loop(demo):
    """FastChat's chat loop passes context_len and judge_sent_end, and prints new words by count."""
    sent = {
        "model": "demo", "prompt": PROMPT, "temperature": 0.7, "repetition_penalty": 1.0,
        "max_new_tokens": 40, "stop": None, "stop_token_ids": [None], "echo": False, "seed": 3,
    }  # fmt: skip
    reports = generate_stream(
        demo, demo.tokenizer, sent, "cpu", context_len=512, judge_sent_end=False
    )
    (wanted,) = answer(demo, max_tokens=40, temperature=0.7, seed=3)
    assert len(wanted.split()) > 10
    assert words_printed(reports) == wanted.strip()


def fastchat_gate(function: Callable, llama: Llama, sent: dict[str, Any]) -> Iterator[bytes]:
    """Act as FastChat's model worker: it knows these keys and these exceptions, and no others."""
    try:
        for output in function(llama, llama.tokenizer, sent, "cpu", 512, 2):
            reply = {"text": output["text"], "error_code": 0}
            for key in ("usage", "finish_reason", "logprobs"):
                if key in output:
                    reply[key] = output[key]
            yield json.dumps(reply).encode() + b"\0"
    except (torch.cuda.OutOfMemoryError, ValueError, RuntimeError) as error:
        yield json.dumps({"text": f"({error})", "error_code": 50002}).encode() + b"\0"


def openai_chunks(chunks: Iterator[bytes]) -> list[tuple[str | None, str | None]]:
    """Act as FastChat's OpenAI server: send the new text, by its length; then a reason alone."""
    previous, sent, ends = "", [], []
    for chunk in chunks:
        content = json.loads(chunk[:-1])
        if content["error_code"]:
            return [("error", content["text"])]
        text = content["text"].replace("\ufffd", "")
        new, previous = text[len(previous) :], max(previous, text, key=len)
        if new:
            sent.append((new, content["finish_reason"]))
        elif content["finish_reason"] is not None:
            ends.append((None, content["finish_reason"]))
    return sent + ends


def test_fastchats_model_worker_and_openai_server(demo):
    """FastChat's model worker and OpenAI server lose nothing.

    The first piece is the first token's, and the end has a chunk of its own. An error reaches the
    client; an exception of another type would end the stream without a message.
    """
    sent = {"model": "m", "prompt": PROMPT, "temperature": 0, "top_k": -1.0, "top_p": None,
            "max_new_tokens": 31.0, "logprobs": None, "echo": None, "stop": [], "best_of": None,
            "stop_token_ids": None, "use_beam_search": False}  # fmt: skip
    chunks = openai_chunks(fastchat_gate(generate_stream, demo, sent))
    (wanted,) = answer(demo, max_tokens=31, temperature=0)
    *texts, end = chunks
    assert "".join(str(text) for text, _ in texts) == wanted
    assert {reason for _, reason in texts} == {None} and end == (None, "length")
    assert texts[0][0] == answer(demo, max_tokens=1, temperature=0)[0]
    for bad, named in (("max_new_tokens", "many"), ("top_p", [1]), ("stop", 7), ("n", {})):
        ((kind, message),) = openai_chunks(
            fastchat_gate(generate_stream, demo, sent | {bad: named})
        )
        assert kind == "error" and bad in str(message)
    scored = [*fastchat_gate(generate_stream, demo, sent | {"logprobs": 1})][-1]
    logprobs = json.loads(scored[:-1])["logprobs"]
    assert "".join(logprobs["tokens"]) == wanted and max(logprobs["token_logprobs"]) <= 0


def db_gpt_pieces(outputs: Iterator[Any]) -> list[str]:
    """Act as DB-GPT's worker: strings or dicts of the text so far, whose added part is new."""
    previous, pieces = "", []
    for output in outputs:
        text = output if isinstance(output, str) else output["text"]
        pieces.append(text[len(previous) :])
        previous = text
    return pieces


def test_db_gpts_function_for_vllm(demo):
    """DB-GPT's function for vLLM works: several concurrent answers, a set of stops, and echo."""
    calls: list[dict[str, Any]] = [
        {"prompt": PROMPT, "temperature": 1.0, "seed": seed, "n": n, "max_new_tokens": "20",
         "stop": {"."}, "stop_token_ids": [None], "top_k": -1, "best_of": None, "echo": True,
         "is_reasoning_model": False, "request_id": f"r{seed}", "span_id": "1:2"}
        for seed, n in ((1, 1), (2, 2), (3, 1))
    ]  # fmt: skip

    async def one(served: AsyncLLMEngine, sent: dict[str, Any]) -> list[dict[str, Any]]:
        stream = async_generate_stream(served, demo.tokenizer, sent, "cpu", 512)
        return [output async for output in stream]

    async def main() -> list[list[dict[str, Any]]]:
        served = AsyncLLMEngine(demo)
        try:
            return await asyncio.gather(*(one(served, sent) for sent in calls))
        finally:
            served.close()

    for sent, outputs in zip(calls, asyncio.run(main()), strict=True):
        n = int(sent["n"])
        wanted = answer(demo, max_tokens=20, temperature=1.0, seed=sent["seed"], n=n, stop=".")
        assert outputs[-1]["text"] == " ".join(PROMPT + text for text in wanted)
        reason = outputs[-1]["finish_reason"]
        assert len(reason) == n if n > 1 else reason in ("stop", "length")
        if n == 1:
            assert "".join(db_gpt_pieces(iter(outputs))) == outputs[-1]["text"]


def test_gorillas_function(demo):
    """Gorilla's function yields strings without the prompt, for the first and each second token.

    Its program prints whole words, as FastChat's does, and DB-GPT's worker takes the difference.
    """
    sent = {"prompt": PROMPT, "max_new_tokens": 30, "stop": None, "echo": True, "seed": 5}
    texts = list(gorilla_generate_stream(demo, demo.tokenizer, sent, "cpu"))
    (wanted,) = answer(demo, max_tokens=30, temperature=1.0, seed=5)
    assert texts[-1] == wanted and len(texts) == 16 and all(type(text) is str for text in texts)
    assert "".join(db_gpt_pieces(iter(texts))) == wanted
    assert words_printed({"text": text} for text in texts) == wanted.strip()
    stopped = gorilla_generate_stream(demo, demo.tokenizer, sent | {"stop": "."}, "cpu", 512, 3)
    assert list(stopped)[-1] == wanted[: wanted.index(".")]
    default = gorilla_generate_stream(demo, demo.tokenizer, {"prompt": PROMPT, "seed": 5}, "cpu")
    (longest,) = answer(demo, max_tokens=1024, temperature=1.0, seed=5)
    assert list(default)[-1] == longest


def test_guanacos_function(demo):
    """Guanaco's function yields a string for each token, greedily and with its penalty of 1.7."""
    sent = {"prompt": PROMPT, "max_new_tokens": 80, "temperature": 0.8, "stop": None}
    texts = list(guanaco_generate_stream(demo, demo.tokenizer, sent, "cpu", 512))
    (wanted,) = answer(demo, max_tokens=80, temperature=0, repetition_penalty=1.7)
    assert texts[-1] == wanted and len(texts) == 80
    assert "".join(db_gpt_pieces(iter(texts))) == wanted
    assert wanted != answer(demo, max_tokens=80, temperature=0)[0]
    sent["stop"] = wanted[4:7]
    stopped = list(guanaco_generate_stream(demo, demo.tokenizer, sent, "cpu"))
    assert stopped[-1] == wanted[: wanted.index(wanted[4:7])]


@pytest.mark.parametrize("function", [gorilla_generate_stream, guanaco_generate_stream])
def test_what_yields_texts_refuses_and_aborts_as_generate_stream(function, demo):
    for bad, named in (({"prompt": None}, "no 'prompt'"), ({"prompt": "x", "beams": 2}, "beams=2")):
        with pytest.raises(ValueError, match=named):
            function(demo, demo.tokenizer, bad, "cpu")
    not_params: Any = None
    with pytest.raises(ValueError, match="params must be a dict"):
        function(demo, demo.tokenizer, not_params, "cpu")
    texts: Any = function(demo, demo.tokenizer, {"prompt": PROMPT, "n": 2, "echo": True}, "cpu")
    assert not next(texts).startswith(PROMPT) and demo.llm_engine.has_unfinished_requests()
    texts.close()
    assert not demo.llm_engine.has_unfinished_requests()


def test_chatglm4s_api_client(demo):
    """ChatGLM4's API server for vLLM runs with its import changed.

    It renders the template, gives the text as `inputs`, by `generate` or by `add_request` of vLLM
    0.5, and sends the increments of the text so far as chunks of OpenAI's API.
    """
    engine = VllmEngine(demo)
    dialog: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
    (wanted,) = demo.chat_completion([dialog], 0.0, max_gen_len=20)

    async def chunks(name: str, *, is_added: bool) -> list[str]:
        tokenizer = await engine.get_tokenizer()
        inputs = tokenizer.apply_chat_template(dialog, add_generation_prompt=True, tokenize=False)
        of_old: dict[str, Any] = {
            "use_beam_search": False, "length_penalty": 1, "early_stopping": False,
        }  # fmt: skip
        params = VllmParams(
            **of_old, n=1, best_of=1, presence_penalty=1.0, frequency_penalty=0.0, temperature=0.0,
            top_p=1.0, top_k=-1, repetition_penalty=1.0, ignore_eos=False, max_tokens=20,
            stop_token_ids=[tokenizer.eos_token_id], logprobs=None,
            prompt_logprobs=None, skip_special_tokens=True,
        )  # fmt: skip
        outputs: Any
        if is_added:
            outputs = await engine.add_request(inputs=inputs, params=params, request_id=name)
        else:
            outputs = engine.generate(inputs=inputs, sampling_params=params, request_id=name)
        previous, sent = "", []
        async for output in outputs:
            text = output.outputs[0].text
            sent.append(text[len(previous) :])
            previous = text
        assert output.finished and output.outputs[0].finish_reason in ("stop", "length")
        return sent

    async def main() -> list[list[str]]:
        try:
            both = (chunks("a", is_added=False), chunks("b", is_added=True))
            return list(await asyncio.gather(*both))
        finally:
            engine.shutdown()

    for sent in asyncio.run(main()):
        assert "".join(sent) == wanted["generation"]["content"] and len(sent) > 2


# --- FastChat's own code, where it is installed


def fastchat(name: str) -> Any:
    why = "it needs FastChat: pip install fschat==0.2.36 accelerate peft sentencepiece"
    return pytest.importorskip(f"fastchat.serve.{name}", reason=why, exc_type=ImportError)


class HostTokenizer:
    """Our tokenizer, accepting decode's two options for spaces, which only transformers has."""

    def __init__(self, llama: Llama) -> None:
        self.tokenizer = ClientTokenizer(llama.tokenizer)
        self.eos_token_id = self.tokenizer.eos_token_id

    def __call__(self, text: str) -> Any:
        return self.tokenizer(text)

    def decode(self, ids: Any, skip_special_tokens: bool = False, **_: Any) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)


@pytest.fixture(scope="module")
def theirs(tmp_path_factory) -> Any:
    fastchat("inference")  # skips before any work
    from transformers import LlamaForCausalLM

    folder = tmp_path_factory.mktemp("hosts") / "hf"
    convert(DEMO, folder)
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.mark.hosts
@pytest.mark.parametrize(
    "changes",
    [{}, {"echo": False}, {"max_new_tokens": 1}, {"max_new_tokens": 200, "echo": False},
     {"repetition_penalty": 1.3}, {"stop": ["named", "x y z"], "echo": False}, {"logprobs": 1},
     {"logprobs": 1, "echo": False, "max_new_tokens": 8}, {"top_k": "3"}, {"n": 1, "best_of": 1}],
)  # fmt: skip
def test_fastchats_own_function_says_the_same(changes, demo, theirs):
    """FastChat's own function gives the same texts, as many of them, and the same logprobs.

    Decoding is greedy, and each text is compared.
    """
    sent = {"prompt": PROMPT, "temperature": 0.0, "max_new_tokens": 21, **changes}
    inference = fastchat("inference")
    for interval in (2, 3):
        wanted = list(
            inference.generate_stream(theirs, HostTokenizer(demo), dict(sent), "cpu", 512, interval)
        )
        found = list(generate_stream(demo, demo.tokenizer, sent, "cpu", 512, interval))
        if "stop" not in sent:  # FastChat delays a whole report for a part of a stop string
            assert [f["text"] for f in found] == [w["text"] for w in wanted]
        assert found[-1]["text"] == wanted[-1]["text"]
        assert found[-1]["finish_reason"] == wanted[-1]["finish_reason"]
        assert found[-1]["usage"]["prompt_tokens"] == wanted[-1]["usage"]["prompt_tokens"]
        if "logprobs" in sent:
            ours, host = found[-1]["logprobs"], wanted[-1]["logprobs"]
            assert ours.keys() == host.keys() and ours["tokens"] == host["tokens"]
            first = int(host["token_logprobs"][0] is None)
            assert ours["token_logprobs"][:first] == host["token_logprobs"][:first]
            assert ours["token_logprobs"][first:] == pytest.approx(
                host["token_logprobs"][first:], abs=1e-4
            )


@pytest.mark.hosts
def test_fastchats_own_chat_loop(demo, monkeypatch):
    """FastChat's own chat loop works: a turn is typed, and the answer is printed.

    Only its import of generate_stream is replaced.
    """
    inference = fastchat("inference")
    cli = fastchat("cli")
    typed = iter(["Once upon a time", ""])
    answers = []

    class Terminal(cli.SimpleChatIO):  # type: ignore[name-defined]
        def prompt_for_input(self, role: str) -> str:
            return next(typed)

        def stream_output(self, output_stream: Any) -> str:
            answers.append(super().stream_output(output_stream))
            return str(answers[-1])

    monkeypatch.setattr(inference, "load_model", lambda *_, **__: (demo, demo.tokenizer))
    monkeypatch.setattr(inference, "generate_stream", generate_stream)
    config = SimpleNamespace(max_sequence_length=512, rope_scaling=None)
    monkeypatch.setattr(demo, "config", config, raising=False)
    inference.chat_loop(
        model_path="demo", device="cpu", num_gpus=1, max_gpu_memory="", dtype=None,
        load_8bit=False, cpu_offloading=False, conv_template="zero_shot", conv_system_msg=None,
        temperature=0.0, repetition_penalty=1.0, max_new_tokens=30, chatio=Terminal(),
        judge_sent_end=False, debug=False,
    )  # fmt: skip
    assert len(answers) == 1 and len(answers[0].split()) > 3
