"""vLLM's API on random models and the demo: the flows of its clients, and its refusals.

The oracles are Meta's calls on the same model; where vLLM itself is installed, its own classes.
"""

import argparse
import asyncio
import dataclasses
import json
import subprocess
import sys
import threading
from typing import Any

import pytest
from transformers import AutoTokenizer

from helpers.adapters import write_demo_adapter
from helpers.chat_templates import CHATML, R1
from helpers.fine_tunes import chain_model, make_model
from helpers.launch import DEMO, PROGRAMS, environment
from helpers.prompts import FRANCE, prompts_of, user
from helpers.waiting import wait_until
from llama import Llama
from llama.checkpoint.write.convert import convert
from llama.compat.vllm import (
    LLM,
    AsyncEngineArgs,
    AsyncLLM,
    AsyncLLMEngine,
    BeamSearchParams,
    CompletionOutput,
    EngineArgs,
    FlexibleArgumentParser,
    LLMEngine,
    Logprob,
    LoRARequest,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
    random_uuid,
)
from llama.prompts import ToolFormat, encode_chat, parse_tool_call

IDS = prompts_of([9, 12, 5], seed=3)
NO_EFFECT: dict[str, Any] = {"gpu_memory_utilization": 0.9, "swap_space": 4}
ASKS_FOR_NOTHING: dict[str, Any] = {
    "enable_prompt_embeds": False,
    "revision": None,
    "worker_use_ray": False,
}
DEMO_ARGS: dict[str, Any] = {
    "dtype": "float32", "device": "cpu", "max_model_len": 512, "enforce_eager": True,
    "trust_remote_code": True, "disable_log_stats": True, "pipeline_parallel_size": 1,
}  # fmt: skip


def greedy(count: int = 12, **others: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=count, **others)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(str(DEMO), tokenizer=str(DEMO), **DEMO_ARGS)


@pytest.fixture
def engine(shared_llama) -> LLMEngine:
    return LLMEngine(shared_llama)


def ends_of(engine: LLMEngine) -> dict[str, RequestOutput]:
    """Return the finished outputs of a client's loop over `step`."""
    ends = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                ends[output.request_id] = output
    return ends


def test_generate_takes_every_form_of_a_prompt(llm):
    text = "Once upon a time"
    ids = llm.llama.tokenizer.encode(text, bos=True, eos=False)
    (wanted,) = llm.llama.text_completion([text], 0.0, max_gen_len=12)
    forms = [text, {"prompt": text}, ids, {"prompt_token_ids": ids}, "<|begin_of_text|>" + text]
    outputs = llm.generate(forms, greedy())
    assert [output.outputs[0].text for output in outputs] == [wanted["generation"]] * 5
    assert [output.prompt_token_ids for output in outputs] == [ids] * 5
    assert [output.prompt for output in outputs[:4]] == [text, text, None, None]
    assert [int(output.request_id) for output in outputs] == [
        int(outputs[0].request_id) + i for i in range(5)
    ]
    one = [llm.generate(form, greedy(), use_tqdm=False) for form in forms[:4]]
    assert [output.outputs[0].text for (output,) in one] == [wanted["generation"]] * 4
    assert llm.generate([], greedy()) == []


@pytest.mark.parametrize("form", [{"choice": ["yes", "no"]}, {"grammar": 'root ::= "yes" | "no"'}])
def test_structured_outputs(llm, form):
    asked = SamplingParams(structured_outputs=StructuredOutputsParams(**form), seed=1)
    (output,) = llm.generate(["One"], asked)
    assert output.outputs[0].text in ("yes", "no")


def test_a_stop_id_beyond_the_vocabulary_never_comes(llm):
    (free,) = llm.generate("Once upon a time", greedy(12))
    asked = greedy(12, stop_token_ids=[llm.llama.tokenizer.n_words, free.outputs[0].token_ids[5]])
    (output,) = llm.generate("Once upon a time", asked)
    assert output.outputs[0].token_ids == free.outputs[0].token_ids[:6]
    assert output.outputs[0].stop_reason == free.outputs[0].token_ids[5]


def test_each_prompt_may_have_its_own_parameters(llm, capsys):
    outputs = llm.generate(["One", "Two"], [greedy(3), greedy(5)], use_tqdm=True)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [3, 5]
    assert "Processed prompts: 100%" in capsys.readouterr().err
    with pytest.raises(ValueError, match="2 prompts and 1 sampling_params: give one for each"):
        llm.generate(["One", "Two"], [greedy()])


def test_a_seed_is_that_seed_for_each_request(llm):
    # with a lower temperature it recites its training data
    asked = SamplingParams(temperature=5.0, seed=5, max_tokens=8)
    first, second = llm.generate(["The cat"] * 2, asked)
    (wanted,) = llm.llama.text_completion(["The cat"], 5.0, 1.0, 8, seed=5)
    assert first.outputs[0].text == second.outputs[0].text == wanted["generation"]
    many = llm.generate("The cat", SamplingParams(n=3, temperature=5.0, seed=5, max_tokens=8))
    assert [answer.index for answer in many[0].outputs] == [0, 1, 2]
    assert many[0].outputs[0].text == wanted["generation"]
    assert len({answer.text for answer in many[0].outputs}) == 3


def test_without_a_seed_each_prompt_has_a_sample_of_its_own(llm):
    outputs = llm.generate(["The cat"] * 4, SamplingParams(temperature=5.0, max_tokens=8))
    assert len({output.outputs[0].text for output in outputs}) == 4


def test_the_tokenizer_has_the_calls_of_transformers(llm):
    tokenizer, ours = llm.get_tokenizer(), llm.llama.tokenizer
    ids = ours.encode("One two", bos=True, eos=False)
    assert tokenizer.encode("One two") == tokenizer("One two").input_ids == ids
    assert tokenizer.encode("One two", add_special_tokens=False) == ids[1:]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "One two"
    assert len(tokenizer) == tokenizer.vocab_size == ours.n_words
    assert ours.eot_id in tokenizer.all_special_ids and tokenizer.bos_token_id == ids[0]
    dialog = [user("Say <|eot_id|>")]
    assert tokenizer.apply_chat_template(dialog).count(ours.eot_id) == 1
    with pytest.raises(ValueError, match="a message holds the name of a special token"):
        tokenizer.apply_chat_template(dialog, tokenize=False)


def test_the_stop_token_is_the_last_id_and_has_a_logprob(llm):
    """The stop token is the last id and has a logprob, as in vLLM; Meta's calls leave it out."""
    prompt = encode_chat(llm.llama.tokenizer, [user(FRANCE)])
    (output,) = llm.generate([prompt], greedy(60, logprobs=2))
    (tokens,), scores = llm.llama.generate([prompt], 60, 0.0, logprobs=True)
    answer = output.outputs[0]
    assert answer.token_ids == [*tokens, llm.llama.tokenizer.eot_id]
    assert (answer.finish_reason, answer.stop_reason) == ("stop", None)
    assert answer.finished() and output.finished
    own = [x[token].logprob for x, token in zip(answer.logprobs, answer.token_ids, strict=True)]
    assert own[:-1] == pytest.approx(scores[0], abs=1e-5)
    assert answer.cumulative_logprob == pytest.approx(sum(own), abs=1e-4)
    assert [x[token].rank for x, token in zip(answer.logprobs, answer.token_ids, strict=True)] == (
        [1] * len(own)
    )
    assert answer.logprobs[0][tokens[0]].decoded_token == llm.llama.tokenizer.decode(tokens[:1])
    assert [sorted(x.rank for x in position.values()) for position in answer.logprobs] == (
        [[1, 2]] * len(own)
    )
    asked = greedy(60, stop_token_ids=[tokens[2]])
    (named,) = llm.generate([prompt], asked)
    assert named.outputs[0].stop_reason == tokens[2] == named.outputs[0].token_ids[-1]


def test_prompt_logprobs_and_the_rank_of_an_unlikely_token(llm):
    (output,) = llm.generate("A dog of", SamplingParams(max_tokens=1, prompt_logprobs=1))
    first, *others = output.prompt_logprobs
    assert first is None and len(others) == len(output.prompt_token_ids) - 1
    ranks = [x[token].rank for x, token in zip(others, output.prompt_token_ids[1:], strict=True)]
    assert set(ranks) <= {1, None} and None in ranks
    assert all(isinstance(entry, Logprob) for x in others for entry in x.values())


def test_special_tokens_show_only_where_they_are_asked_for(engine):
    """Special tokens show only on request; they are half of the random model's vocabulary."""
    tokenizer = engine.llama.tokenizer
    for name, fields in {
        "skipped": {}, "shown": {"skip_special_tokens": False}, "none": {"detokenize": False},
        "apart": {"skip_special_tokens": False, "spaces_between_special_tokens": False},
    }.items():  # fmt: skip
        engine.add_request(name, IDS[0], greedy(30, ignore_eos=True, **fields))
    ends = {name: output.outputs[0] for name, output in ends_of(engine).items()}
    ids = ends["skipped"].token_ids
    assert any(token > 255 for token in ids) and any(token < 256 for token in ids)
    assert ends["skipped"].text == tokenizer.decode([token for token in ids if token < 256])
    assert ends["shown"].text == ends["apart"].text == tokenizer.decode(ids)
    assert ends["none"].text == "" and ends["none"].token_ids == ids


def test_beam_search_is_that_of_llama(llm):
    wanted = llm.llama.beam_search(["The cat", "One"], 3, 10, length_penalty=0.5)
    prompts = ["The cat", {"prompt": "One"}]
    outputs = llm.beam_search(prompts, BeamSearchParams(3, 10, length_penalty=0.5))
    for text, output, beams in zip(["The cat", "One"], outputs, wanted, strict=True):
        prompt = llm.tokenizer.encode(text)
        texts = [text + beam["generation"] for beam in beams]
        assert [sequence.text for sequence in output.sequences] == texts
        assert all(x.tokens[: len(prompt)] == prompt for x in output.sequences)
        # The stop token counts for the score, and is left out.
        for sequence, beam in zip(output.sequences, beams, strict=True):
            length = len(sequence.tokens) - len(prompt) + (sequence.finish_reason == "stop")
            assert sequence.cum_logprob == pytest.approx(beam["score"] * length**0.5)
    assert [x.finish_reason for x in outputs[0].sequences[:2]] == ["stop"] * 2
    (one,) = llm.beam_search("The cat", BeamSearchParams(3, 10, length_penalty=0.5))
    assert one.sequences[0].tokens == outputs[0].sequences[0].tokens


def test_an_engine_is_stepped_by_its_client(engine, shared_llama):
    asked = greedy(6, ignore_eos=True)
    engine.add_request("dict", {"prompt_token_ids": IDS[0]}, asked)
    engine.add_request("ids", IDS[0], asked)
    engine.add_request(request_id="named", prompt=IDS[0], params=asked)
    with pytest.raises(ValueError, match="request_id='ids' is in use"):
        engine.add_request("ids", IDS[1], asked)
    assert engine.get_num_unfinished_requests() == 3
    ends = ends_of(engine)
    requests = [shared_llama.llm_engine.prepare("", IDS[0], asked)]
    wanted = shared_llama.llm_engine.run(requests)[0].outputs[0].token_ids
    for name in ("dict", "ids", "named"):
        assert ends[name].outputs[0].token_ids == wanted, name
    assert engine.step() == []


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_an_output_holds_what_its_kind_says(engine, kind):
    asked = greedy(8, ignore_eos=True, output_kind=kind, logprobs=0, skip_special_tokens=False)
    engine.add_request("a", IDS[0], dataclasses.replace(asked, prompt_logprobs=0))
    engine.add_request("whole", IDS[0], dataclasses.replace(
        asked, output_kind=RequestOutputKind.CUMULATIVE))  # fmt: skip
    seen: list[RequestOutput] = []
    whole: list[RequestOutput] = []
    while engine.has_unfinished_requests():
        for output in engine.step():
            (whole if output.request_id == "whole" else seen).append(output)
    last = whole[-1].outputs[0]
    answers = [output.outputs[0] for output in seen]
    if kind is RequestOutputKind.DELTA:
        assert [len(a.token_ids) for a in answers] == [len(a.logprobs or ()) for a in answers]
        assert [token for a in answers for token in a.token_ids] == last.token_ids
        assert "".join(a.text for a in answers) == last.text
        assert [output.prompt_logprobs is None for output in seen] == [False] + [True] * 7
    else:
        assert len(answers) == (8 if kind is RequestOutputKind.CUMULATIVE else 1)
        assert (answers[-1].text, answers[-1].token_ids) == (last.text, last.token_ids)
        assert seen[-1].prompt_logprobs is not None


def test_aborted_requests_are_gone_and_others_go_on(engine):
    for name in "abc":
        engine.add_request(name, IDS[0], greedy(30, ignore_eos=True))
    engine.step()
    engine.add_request("late", IDS[0], greedy(4))
    engine.abort_request("a")
    engine.abort_request(["b", "late", "unknown"])
    assert list(ends_of(engine)) == ["c"]


def test_a_failed_step_leaves_no_request_behind(engine, shared_llama, monkeypatch):
    """A failed step leaves no request behind, so that a client's loop over them ends."""
    engine.add_request("a", IDS[0], greedy())

    def fail(*_: object) -> None:
        raise OSError("no more")

    with monkeypatch.context() as patch:
        patch.setattr(shared_llama.engine, "step", fail)
        with pytest.raises(OSError, match="no more"):
            engine.step()
    assert not engine.has_unfinished_requests()
    engine.add_request("a", IDS[0], greedy(2, ignore_eos=True))
    assert len(ends_of(engine)["a"].outputs[0].token_ids) == 2


def test_async_requests_stream_side_by_side(shared_llama):
    served = AsyncLLM(shared_llama)

    async def answer(i: int, **fields: Any) -> list[RequestOutput]:
        stream = served.generate(IDS[i], greedy(10, ignore_eos=True, **fields), random_uuid())
        return [output async for output in stream]

    async def main() -> list[list[RequestOutput]]:
        assert (await served.get_tokenizer()) is served.get_tokenizer()
        assert served.model_config.max_model_len == 128
        found = await asyncio.gather(
            answer(0), answer(1, output_kind=RequestOutputKind.DELTA),
            answer(2, output_kind=RequestOutputKind.FINAL_ONLY),
        )  # fmt: skip
        async for output in served.generate({"prompt_token_ids": IDS[0]}, greedy(90), "left"):
            assert not output.finished
            break
        return list(found)

    found = asyncio.run(main())
    served.shutdown()
    alone = LLMEngine(shared_llama)
    for i in range(3):
        alone.add_request(str(i), IDS[i], greedy(10, ignore_eos=True))
    ends = ends_of(alone)
    wanted = {name: output.outputs[0].token_ids for name, output in ends.items()}
    assert found[0][-1].outputs[0] == ends["0"].outputs[0]
    assert any(token > 255 for token in wanted["0"]), "no special token: the text tests less"
    assert [token for o in found[1] for token in o.outputs[0].token_ids] == wanted["1"]
    assert [len(o.outputs[0].token_ids) for o in found[2]] == [10]
    assert found[2][0].outputs[0].token_ids == wanted["2"]
    assert not shared_llama.llm_engine.has_unfinished_requests()


def test_async_requests_can_be_aborted_and_the_engine_shut_down(shared_llama, monkeypatch):
    """Requests can be aborted, and the engine shut down.

    Each request waits in its first step until it is aborted, so that it cannot end before.
    """
    served = AsyncLLMEngine(shared_llama)
    step, may_step = shared_llama.engine.step, threading.Event()
    monkeypatch.setattr(
        shared_llama.engine, "step", lambda *args: may_step.wait(60) and step(*args)
    )

    async def reason_of(i: int, asked: SamplingParams, *, shut_down: bool = False) -> str | None:
        may_step.clear()
        stream = served.generate(IDS[i], asked, f"r{i}")
        task = asyncio.ensure_future(anext(stream))
        request = None
        while request is None:
            request = shared_llama.llm_engine.find(f"r{i}")
            await asyncio.sleep(0)
        if shut_down:
            ending = asyncio.create_task(asyncio.to_thread(served.shutdown))
            await asyncio.to_thread(wait_until, lambda: request.finished)
            may_step.set()
            await ending
        else:
            await served.abort([f"r{i}", "unknown"])
            may_step.set()
        output = await task
        async for later in stream:
            output = later
        return output.outputs[0].finish_reason

    async def main() -> None:
        await served.check_health()
        long = greedy(100, ignore_eos=True)
        assert await reason_of(1, long) == "abort"
        assert await reason_of(2, long, shut_down=True) == "abort"
        assert served.is_stopped and not served.errored
        with pytest.raises(RuntimeError, match="make another one"):
            await anext(served.generate(IDS[0], greedy(), "late"))

    asyncio.run(main())


def test_chat_is_chat_completion(llm):
    dialogs = [[user(FRANCE)], [user("What is the capital of Japan?")]]
    wanted = llm.llama.chat_completion(dialogs, 0.0, max_gen_len=40)
    outputs = llm.chat(dialogs, greedy(40))
    assert [o.outputs[0].text for o in outputs] == [w["generation"]["content"] for w in wanted]
    assert outputs[0].prompt == llm.get_tokenizer().apply_chat_template(
        dialogs[0], tokenize=False, add_generation_prompt=True
    )
    (one,) = llm.chat(dialogs[0], greedy(40), use_tqdm=False)
    assert one.outputs[0].text == outputs[0].outputs[0].text
    start: list[Any] = [*dialogs[0], {"role": "assistant", "content": one.outputs[0].text[:10]}]
    (rest,) = llm.chat(start, greedy(40), add_generation_prompt=False, continue_final_message=True)
    assert rest.prompt_token_ids == encode_chat(
        llm.llama.tokenizer, start, add_generation_prompt=False, continue_final_message=True
    )
    tools = [{"type": "function", "function": {"name": "now", "parameters": {}}}]
    (called,) = llm.chat(dialogs[0], greedy(2), tools=tools)
    assert called.prompt_token_ids == encode_chat(llm.llama.tokenizer, dialogs[0], tools)


def test_tools_are_told_in_the_form_of_the_model(make_checkpoint):
    """Tools are described in the format of the model: 3.2's prompt differs from 3.1's."""
    folder, _, _ = make_checkpoint(use_scaled_rope=True, rope_scale_factor=32.0)
    own = LLM(str(folder), max_model_len=2048, max_num_seqs=1, device="cpu")
    dialog = [user(FRANCE)]
    wanted = encode_chat(own.llama.tokenizer, dialog, TOOLS, tool_format=ToolFormat.LLAMA_3_2)
    (called,) = own.chat(dialog, greedy(1), tools=TOOLS)
    assert called.prompt_token_ids == wanted
    template = own.get_tokenizer().apply_chat_template
    assert template(dialog, tools=TOOLS, add_generation_prompt=True) == wanted


TOOLS = [{"type": "function", "function": {"name": "capital", "parameters": {"country": "str"}}}]


SWITCH = CHATML + "{{ '<think>' if enable_thinking else '' }}{{ style or '' }}"


def test_a_fine_tune_with_the_variables_of_its_template(tmp_path):
    folder = make_model(tmp_path, "chatml")
    template = tmp_path / "other.jinja"
    template.write_text(SWITCH, encoding="utf-8")
    fields = {"reasoning_parser": "deepseek_r1", "tool_call_parser": "hermes"}
    args: Any = {"chat_template": str(template), "max_model_len": 64, "device": "cpu", **fields}
    own = LLM(str(folder), **args)
    reasoning = own.llama.dialog_format.reasoning
    assert reasoning is not None and reasoning.end == "</think>"
    tokenizer = own.get_tokenizer()
    named = {token.id for token in own.llama.tokenizer.added_tokens.values()}
    assert set(tokenizer.all_special_ids) < named
    dialog: list[Any] = [user("Who?")]
    theirs: Any = AutoTokenizer.from_pretrained(folder).apply_chat_template
    source: Any = {"chat_template": SWITCH, "add_generation_prompt": True}
    cases: list[Any] = [{"enable_thinking": True}, {"style": "x", "enable_thinking": False}, {}]
    for variables in cases:
        (output,) = own.chat(dialog, greedy(1), chat_template_kwargs=variables)
        wanted = theirs(dialog, **source, **variables)["input_ids"]
        assert output.prompt_token_ids == wanted
        ours = tokenizer.apply_chat_template(dialog, add_generation_prompt=True, **variables)
        assert ours == wanted
    with pytest.raises(ValueError, match="has no variable 'stile'"):
        own.chat(dialog, greedy(1), chat_template_kwargs={"stile": "x"})


@pytest.mark.parametrize(
    ("fields", "text"), [({"reasoning_parser": "deepseek_r1"}, "Hm so</think>No."), ({}, "No.")]
)
def test_structured_outputs_behind_reasoning(tmp_path, fields, text):
    folder = chain_model(tmp_path, "r1", "\nHm so</think>Yes.<｜end▁of▁sentence｜>")
    (folder / "chat_template.jinja").write_text(R1, encoding="utf-8")
    own = LLM(str(folder), max_model_len=64, device="cpu", **fields)
    params = greedy(40, structured_outputs=StructuredOutputsParams(choice=["No."]))
    (output,) = own.chat([user("Is it so?")], params)
    assert output.outputs[0].text == text
    deltas = dataclasses.replace(params, output_kind=RequestOutputKind.DELTA)
    own.llm_engine.add_request("a", {"prompt_token_ids": output.prompt_token_ids}, deltas)
    pieces = []
    while own.llm_engine.has_unfinished_requests():
        pieces += [piece.outputs[0].text for piece in own.llm_engine.step()]
    assert "".join(pieces) == text and len(pieces) > 1


def test_the_flow_of_a_chatglm_client(llm):
    """The flow of a ChatGLM client works, as in ChatGLM's server for vLLM.

    History and tools become a text, the answer is streamed by increments, the call is parsed from
    it, and the tool's result is in the next prompt. The client gives no seed, so `min_tokens` alone
    determines the minimal length of an answer.
    """
    engine = AsyncLLMEngine(llm.llama, AsyncEngineArgs(str(DEMO)))
    history: list[dict[str, Any]] = [{"role": "user", "content": FRANCE}]

    async def stream(messages: list[dict[str, Any]], name: str) -> list[str]:
        tokenizer = await engine.get_tokenizer()
        inputs = tokenizer.apply_chat_template(
            messages, tools=TOOLS, add_generation_prompt=True, tokenize=False
        )
        of_old: dict[str, Any] = {
            "use_beam_search": False, "length_penalty": 1, "early_stopping": False,
        }  # fmt: skip
        params = SamplingParams(
            n=1, best_of=1, presence_penalty=0.0, frequency_penalty=0.0, **of_old,
            temperature=0.8, top_p=0.8, top_k=-1, repetition_penalty=1.0,
            stop_token_ids=[tokenizer.eos_token_id], ignore_eos=False, max_tokens=20,
            logprobs=None, prompt_logprobs=None, skip_special_tokens=True, min_tokens=20,
        )  # fmt: skip
        increments, seen = [], ""
        outputs = engine.generate(inputs=inputs, sampling_params=params, request_id=name)
        async for output in outputs:
            text = output.outputs[0].text
            assert text.startswith(seen) and output.prompt == inputs
            increments.append(text[len(seen) :])
            seen = text
        assert output.finished and len(output.outputs[0].token_ids) > 0
        return increments

    async def main() -> tuple[list[str], list[str]]:
        first = await stream(history, "a")
        call = parse_tool_call('{"name": "capital", "parameters": {"country": "France"}}')
        assert call is not None
        function = {"name": call.name, "arguments": json.dumps(call.arguments)}
        history.append({"role": "assistant", "tool_calls": [{"function": function}]})
        history.append({"role": "tool", "content": "Paris"})
        return first, await stream(history, "b")

    first, second = asyncio.run(main())
    engine.shutdown()
    assert "".join(first) and "".join(second) and len(first) > 1


def test_generation_config_gives_the_defaults(tmp_path):
    args = EngineArgs(str(tmp_path))
    assert args.default_params() == SamplingParams()
    said = {"temperature": 0.6, "top_p": 0.9, "max_new_tokens": 7, "do_sample": True}
    (tmp_path / "generation_config.json").write_text(json.dumps(said))
    wanted = SamplingParams(temperature=0.6, top_p=0.9, max_tokens=7)
    assert args.default_params() == wanted
    assert EngineArgs(str(tmp_path), generation_config="vllm").default_params() == SamplingParams()
    (tmp_path / "generation_config.json").write_text('{"top_p": 9}')
    with pytest.raises(ValueError, match=r"generation_config.json: top_p=9 must be a number"):
        args.default_params()


def test_arguments_reach_build_and_the_command_line(shared_llama, monkeypatch):
    seen: list[Any] = []

    def build(**named: Any) -> Llama:
        seen.append(named)
        return shared_llama

    monkeypatch.setattr(Llama, "build", build)
    parser = AsyncEngineArgs.add_cli_args(argparse.ArgumentParser())
    args = AsyncEngineArgs.from_cli_args(parser.parse_args([
        "--model", "m", "--max-model-len", "64", "--dtype", "bfloat16", "--seed", "3",
        "--tensor-parallel-size", "2", "--max-num-seqs", "5", "--tokenizer", str(DEMO),
        "--max-num-batched-tokens", "99",
        "--enforce-eager", "--no-enable-prefix-caching", "--swap-space", "4", "--load-format",
        "auto", "--pipeline-parallel-size", "2", "--no-enable-prompt-embeds",
    ]))  # fmt: skip
    with pytest.raises(TypeError, match="does not support enable_prompt_embeds=True"):
        AsyncEngineArgs.from_cli_args(parser.parse_args(["--model", "m", "--enable-prompt-embeds"]))
    assert type(args) is AsyncEngineArgs
    served = AsyncLLMEngine.from_engine_args(args, usage_context="ENGINE_CONTEXT")
    assert (served.model_config.model, served.model_config.max_model_len) == ("m", 128)
    drafts = '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}'
    others: dict[str, Any] = {"distributed_timeout_seconds": 9, "speculative_config": drafts}
    args = EngineArgs("m", quantization="int8", kv_cache_dtype="int8", **others)
    assert LLMEngine.from_engine_args(args).model_config.get_vocab_size() == 512
    small = {"model": "small", "num_speculative_tokens": 3}
    LLMEngine.from_engine_args(EngineArgs("m", speculative_config=small))
    named = seen.pop()
    assert (named["speculate"], named["speculate_tokens"]) == ("small", 3)
    with pytest.raises(TypeError, match="from_engine_args does not support executor=1"):
        LLMEngine.from_engine_args(args, executor=1)
    tokenizer = str(DEMO / "tokenizer.model")
    first = {
        "ckpt_dir": "m", "tokenizer_path": tokenizer, "max_seq_len": 64, "max_batch_size": 5,
        "model_parallel_size": 2, "pipeline_parallel_size": 2, "seed": 3, "dtype": "bfloat16",
        "max_num_batched_tokens": 99,
    }  # fmt: skip
    second = {
        "ckpt_dir": "m", "tokenizer_path": None, "model_parallel_size": 1, "seed": 0,
        "pipeline_parallel_size": 1,
        "quantize": "int8", "kv_cache_dtype": "int8", "timeout_s": 9, "speculate": "lookup",
        "speculate_tokens": 5,
    }  # fmt: skip
    assert seen == [first, second]


def test_an_option_may_be_spelled_with_dashes_or_underscores(monkeypatch):
    parser = FlexibleArgumentParser()
    parser.add_argument("--my_own", type=int)
    parser.add_argument("rest", nargs="*")
    AsyncEngineArgs.add_cli_args(parser)
    for words in (
        ["--model", "a_b", "--max-model-len", "7", "--my-own=8", "c_d", "x=y_z"],
        ["--model=a_b", "--max_model-len=7", "--my_own", "8", "c_d", "x=y_z"],
    ):
        monkeypatch.setattr(sys, "argv", ["program", *words])
        args = parser.parse_args()
        assert (args.model, args.max_model_len, args.my_own) == ("a_b", 7, 8)
        assert args.rest == ["c_d", "x=y_z"]
    assert AsyncEngineArgs.from_cli_args(args).max_model_len == 7
    with pytest.raises(SystemExit):
        parser.parse_args(["--model", "m", "--max_modl_len", "7"])


def test_memory_utilization_says_that_it_does_nothing():
    with pytest.warns(UserWarning, match="kv_cache_memory_bytes sets its size"):
        EngineArgs("m", **NO_EFFECT)


def test_parameters_may_change_before_use(llm):
    assert SamplingParams(seed=-1).seed is None
    asked = greedy(30)
    copy = asked.clone()
    asked.max_tokens = 2  # type: ignore[misc]  # clients assign to fields
    assert len(llm.generate("One", asked)[0].outputs[0].token_ids) == 2 and copy.max_tokens == 30
    asked.top_p = 2.0  # type: ignore[misc]
    with pytest.raises(ValueError, match=r"top_p=2\.0 must be a number from 0 to 1"):
        llm.generate("One", asked)


BAD_PARAMS: list[tuple[dict[str, Any], str]] = [
    ({"extra_args": {"a": 1}}, "SamplingParams does not support extra_args={'a': 1}: leave it out"),
    ({"logits_processors": [len]}, "does not support logits_processors="),
    ({"temprature": 0.5}, "does not support temprature=0.5"),
    (
        {"structured_output": {"choice": ["a"]}},
        "SamplingParams does not support structured_output=",
    ),
    ({"flat_logprobs": True}, "does not support flat_logprobs=True: leave it out (allowed: False)"),
    ({"temperature": -1}, "temperature=-1 must be a number from 0 to 100"),
    ({"stop": "x", "detokenize": False}, "stop needs detokenize=True"),
    ({"detokenize": 1}, "detokenize=1 must be True or False"),
    ({"output_kind": 1}, "output_kind=1 must be a RequestOutputKind"),
    ({"length_penalty": 2.0}, "does not support length_penalty=2.0: leave it out (allowed: 1)"),
    (
        {"early_stopping": True},
        "does not support early_stopping=True: leave it out (allowed: False)",
    ),
    ({"truncate_prompt_tokens": 5}, "does not support truncate_prompt_tokens=5: leave it out"),
    (
        {"use_beam_search": True},
        "does not support use_beam_search=True: leave it out (allowed: False)",
    ),
]


@pytest.mark.parametrize(("fields", "message"), BAD_PARAMS)
def test_a_bad_parameter_is_an_error_that_names_it(fields, message):
    with pytest.raises((TypeError, ValueError)) as caught:
        SamplingParams(**fields)
    assert message in str(caught.value)


BAD_ARGS: list[tuple[dict[str, Any], str]] = [
    (
        {"enable_prompt_embeds": True},
        "EngineArgs does not support enable_prompt_embeds=True: leave it out (allowed: False)",
    ),
    ({"pipeline_parallel_size": 2}, "pipeline_parallel_size=2 does not divide the 1 processes"),
    ({"speculative_config": "{"}, "speculative_config='{': give the model that drafts"),
    ({"speculative_config": {"method": "eagle", "model": "x"}}, "the method 'ngram' or 'suffix'"),
    ({"max_modl_len": 5}, "does not support max_modl_len=5: leave it out (allowed: nothing)"),
    ({"max_model_len": 0}, "max_model_len=0 must be a whole number from 1"),
    ({"quantization": "awq"}, "quantization='awq': give one of int8, fp8, int4, or None"),
    ({"generation_config": "other"}, "generation_config='other' must be 'auto' or 'vllm'"),
]


@pytest.mark.parametrize(("fields", "message"), BAD_ARGS)
def test_a_bad_engine_argument_is_an_error_that_names_it(fields, message):
    with pytest.raises((TypeError, ValueError)) as caught:
        EngineArgs("m", **fields).build()
    assert message in str(caught.value)
    AsyncEngineArgs("m", **ASKS_FOR_NOTHING)


def test_a_bad_request_is_an_error_that_names_what_is_wrong(llm, engine):
    asked = greedy()
    for prompt, message in [
        ({"prompt": "x", "multi_modal_data": {"image": 1}}, "the model reads text alone"),
        ({}, "the prompt {} must be a string, a list of token ids, or a dict"),
        ([1, "x"], "prompt 0 holds 'x'"),
        (7, "prompts must be a prompt or a list of them, got int"),
        ([[]], "prompt 0 has 0 tokens"),
    ]:  # fmt: skip
        with pytest.raises((TypeError, ValueError)) as caught:
            llm.generate(prompt, asked)
        assert message in str(caught.value)
    with pytest.raises(TypeError, match="lora_request='x' must be a LoRARequest"):
        llm.generate("x", asked, lora_request="x")
    with pytest.raises(TypeError, match=r"LLM\.chat does not support chat_template='x'"):
        llm.chat([user("x")], asked, chat_template="x")
    with pytest.raises(TypeError, match=r"generate does not support prompt_token_ids=\[\[1\]\]"):
        llm.generate("x", asked, prompt_token_ids=[[1]])
    with pytest.raises(TypeError, match="BeamSearchParams does not support include_stop_str_in"):
        BeamSearchParams(2, 4, include_stop_str_in_output=True)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="add_request does not support priority=1"):
        engine.add_request("a", "x", asked, priority=1)
    with pytest.raises(TypeError, match=r"params must be .*SamplingParams, got <class 'dict'>"):
        engine.add_request("a", "x", {})
    assert not engine.has_unfinished_requests()


@pytest.mark.hosts
def test_names_and_defaults_are_those_of_vllm():
    vllm = pytest.importorskip("vllm", reason="vLLM is not installed here")
    theirs: Any = vllm.SamplingParams()
    old = {"best_of", "structured_output", "prediction", "reasoning"}
    ours = SamplingParams()
    assert {f.name for f in dataclasses.fields(ours)} - old <= set(
        vllm.SamplingParams.__struct_fields__
    )
    empty = {"stop", "stop_token_ids", "bad_words", "logit_bias"}  # lists or None in vLLM
    for f in dataclasses.fields(ours):
        if f.name not in old | empty | {"output_kind"}:
            assert getattr(ours, f.name) == getattr(theirs, f.name), f.name
    assert [kind.name for kind in RequestOutputKind] == [k.name for k in type(theirs.output_kind)]
    for mine, whose in ((CompletionOutput, vllm.CompletionOutput), (EngineArgs, vllm.EngineArgs)):
        known = {f.name: f for f in dataclasses.fields(whose)}
        for f in dataclasses.fields(mine):
            if f.name not in ("device", "model"):
                assert f.default == known[f.name].default, f.name
    made = vllm.RequestOutput("a", "b", [1], None, [], True)
    mine_made = RequestOutput("a", "b", [1], None, [], True)
    assert vars(mine_made).items() <= vars(made).items()


@pytest.mark.hosts
def test_a_client_of_vllm_gets_the_same_answers(tmp_path):
    """A vLLM client gets the same answers: ids, reasons, log probabilities and ranks.

    One program runs on vLLM and on this module.
    """
    pytest.importorskip("vllm", reason="vLLM is not installed here")
    convert(DEMO, tmp_path / "model")
    command = [sys.executable, str(PROGRAMS / "vllm_answers.py"), str(tmp_path / "model"),
               str(tmp_path / "out.json")]  # fmt: skip
    subprocess.run(command, check=True, env=environment(), timeout=240)
    both = json.loads((tmp_path / "out.json").read_text())
    assert len(both["ours"]) == 9
    for ours, theirs in zip(both["ours"], both["vllm"], strict=True):
        for name in ("prompt", "ids", "text", "reasons"):
            assert ours[name] == theirs[name], name
        assert ours["cumulative"] == pytest.approx(theirs["cumulative"], abs=1e-3)
        for name in ("logprobs", "prompt_logprobs"):
            assert flat(ours[name]) == pytest.approx(flat(theirs[name]), abs=1e-3), name


def flat(positions: list[list[list[float]] | None] | None) -> list[float]:
    return [x for entries in positions or [] for entry in entries or [] for x in entry]


def test_add_request_takes_inputs_as_in_vllm_0_5(llm):
    """`add_request` takes the prompt as `inputs`, the name that it has in vLLM 0.5.

    The asynchronous engine returns the iterator of the outputs.
    """
    (wanted,) = llm.generate([IDS[0]], greedy(6), use_tqdm=False)
    prompt = {"prompt_token_ids": IDS[0]}
    engine = LLMEngine(llm.llama)
    engine.add_request(request_id="a", inputs=prompt, params=greedy(6))
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert outputs[-1].outputs[0].token_ids == wanted.outputs[0].token_ids
    with pytest.raises(TypeError, match="prompt and inputs are both given"):
        engine.add_request("b", IDS[0], greedy(6), inputs=prompt)

    async def main() -> list[int]:
        served = AsyncLLMEngine(llm.llama)
        try:
            with pytest.raises(TypeError, match="request_id='' must be a string that is not empty"):
                await served.add_request("", inputs=prompt, params=greedy(6))
            with pytest.raises(TypeError, match="prompt and inputs are both given"):
                await served.add_request("b", IDS[0], greedy(6), inputs=prompt)
            outputs = await served.add_request(request_id="a", inputs=prompt, params=greedy(6))
            return [output.outputs[0].token_ids async for output in outputs][-1]
        finally:
            served.shutdown()

    assert asyncio.run(main()) == wanted.outputs[0].token_ids


def test_a_lora_request_chooses_an_adapter(llm, tmp_path):
    """One for all prompts, or one for each; it is loaded at its first use."""
    one, two = (write_demo_adapter(tmp_path / str(seed), seed) for seed in (1, 2))
    asked = SamplingParams(temperature=0.0, max_tokens=8)
    first, second = LoRARequest("one", 1, str(one)), LoRARequest("two", 2, str(two))
    prompts = ["Once upon a time"] * 3
    mixed = llm.generate(prompts, asked, lora_request=[None, first, second])
    texts = [output.outputs[0].text for output in mixed]
    assert len({*texts}) == 3
    for request, text in zip((None, first, second), texts, strict=True):
        (same,) = llm.generate(prompts[:1], asked, lora_request=request)
        assert same.outputs[0].text == text
    assert [*llm.llama.adapters] == ["one", "two"]
    with pytest.raises(ValueError, match="3 prompts and 2 in lora_request"):
        llm.generate(prompts, asked, lora_request=[first, second])
    with pytest.raises(ValueError, match="'one' is loaded from"):
        llm.generate(prompts, asked, lora_request=LoRARequest("one", 1, str(two)))
    with pytest.raises(ValueError, match="lora_int_id"):
        LoRARequest("one", 0, str(one))
    for name in ("one", "two"):
        llm.llama.drop_adapter(name)
