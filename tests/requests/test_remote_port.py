"""The text of requests in one process and their sequences in another give what one process gives.

Both sides run in this process, with a pair of sockets between them, over which every byte goes.
"""

import asyncio
import random
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from helpers.sequences import state_of
from llama import SamplingParams
from llama.common.checks import FieldError
from llama.engine.request import Pooling
from llama.engine.sequence import SequenceState
from llama.requests.book import RequestBook
from llama.requests.engine_side import EngineSide
from llama.requests.formats import FormatCompiler, RemoteFormats
from llama.requests.hosted import HostedCall, HostedSequences
from llama.requests.messages import (
    Add,
    Message,
    Refuse,
    Remove,
    from_bytes,
    to_bytes,
)
from llama.requests.port import RefusedError
from llama.requests.remote_port import RemotePort
from llama.requests.reports import Cursor, apply_report, pack_report
from llama.requests.request import Request, RequestOutput
from llama.requests.text_side import TextSide

REPORT = b"R"
ASKED: list[dict[str, Any]] = [
    {"max_tokens": 12},
    {"max_tokens": 30, "seed": 3, "temperature": 1.5, "n": 3},
    {"max_tokens": 20, "logprobs": 3, "prompt_logprobs": 2, "temperature": 1.0},
    {"max_tokens": 20, "best_of": 4, "n": 2, "temperature": 1.0, "seed": 9},
    {"max_tokens": 40, "stop": ["e", " a"], "temperature": 0},
    {"max_tokens": 40, "stop": ["the"], "include_stop_str_in_output": True, "temperature": 0},
    {"max_tokens": 9, "structured_output": {"choice": ["yes", "no \u00fc", "perhaps"]}},
    {"max_tokens": 30, "structured_output": {"regex": "[a-c]{3,9}"}, "n": 2},
    {"max_tokens": 5, "logit_bias": {7: 3.5, 9: -100.0}, "bad_words": ["dog"], "logprobs": 0},
    {"max_tokens": 8, "ignore_eos": True, "stop_token_ids": [32, 101], "temperature": 1.0},
]


class Pipe:
    """One direction of a pair of sockets: messages go in whole and come out whole."""

    def __init__(self) -> None:
        self.sender, self.receiver = socket.socketpair()
        self.lock = threading.Lock()

    def send(self, data: bytes) -> None:
        with self.lock:
            self.sender.sendall(struct.pack("<I", len(data)) + data)

    def receive(self) -> bytes:
        size = struct.unpack("<I", self._read(4))[0]
        return self._read(size)

    def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            part = self.receiver.recv(size - len(data))
            if not part:
                raise EOFError
            data += part
        return data


class Split:
    """A book of requests whose sequences `llama` computes behind a pair of sockets."""

    def __init__(self, llama: Any) -> None:
        self.engine = llama.llm_engine
        self.up, self.down = Pipe(), Pipe()
        self.hosted = HostedSequences(
            self.engine.port,
            lambda report: self.down.send(REPORT + report),
            lambda message: self.down.send(to_bytes(message)),
        )
        self.constraints = FormatCompiler(llama.tokenizer)
        self.sent: list[Message] = []
        self.port = RemotePort(self._send, self.hosted.keep_pixels)
        self.book = RequestBook(
            self.port, llama.tokenizer, RemoteFormats(), self.engine.max_seq_len
        )

    def _send(self, message: Message) -> None:
        self.sent.append(message)
        self.up.send(to_bytes(message))
        self._serve(from_bytes(self.up.receive()))

    def _serve(self, message: Message) -> None:
        if isinstance(message, Remove):
            self.hosted.remove(message.numbers)
            return
        assert isinstance(message, Add)
        call = self.hosted.open(message)
        try:
            call.compile(self.constraints)
            self.hosted.start(call)
        except FieldError as error:
            self.hosted.refuse(call, "field", error.field, error.message)

    def read(self) -> None:
        """Read what the engine has sent so far."""
        self.down.receiver.setblocking(False)
        try:
            while True:
                data = self.down.receive()
                if data[:1] == REPORT:
                    self.port.take_report(data[1:])
                else:
                    refusal = from_bytes(data)
                    assert isinstance(refusal, Refuse)
                    self.port.take_refusal(refusal)
        except BlockingIOError:
            pass

    def step(self) -> None:
        """Run one step, and read its report."""
        first = self.engine.port.threads.num_steps
        if self.engine.port.has_sequences:
            self.engine.port.wait_until(lambda: self.engine.port.threads.num_steps > first)
        self.read()

    def outputs(self, requests: list[Request]) -> Iterator[RequestOutput]:
        """Run requests, and yield each output."""
        self.book.submit(requests)
        while not all(request.finished for request in requests):
            self.step()
            for request in requests:
                if request.has_output:
                    yield self.book.take_output(request)


@pytest.fixture
def split(demo) -> Iterator[Split]:
    made = Split(demo)
    yield made
    made.book.discard_all()
    made.read()
    assert not demo.llm_engine.port.has_sequences
    assert not made.hosted._sequences and not made.hosted._cursors and not made.port._mirrors
    demo.engine.scheduler.check()


def described(output: RequestOutput) -> tuple[object, ...]:
    """Return all that an output reports, with the bits of every number."""
    answers = [
        (
            answer.text,
            answer.token_ids,
            answer.finish_reason,
            answer.stop_reason,
            repr(answer.cumulative_logprob),
            repr(answer.logprobs),
        )
        for answer in output.outputs
    ]
    return answers, repr(output.prompt_logprobs), output.usage, output.error


def test_outputs_are_those_of_one_process(demo, split):
    """Every kind of request gives the same text, tokens and log-probabilities to the bit."""
    engine = demo.llm_engine
    prompts: list[str | list[int]] = ["Once upon a time", [5, 6, 7, 8], "The dog"]

    def prepared(book: RequestBook) -> list[Request]:
        return [
            book.prepare("", prompts[i % 3], SamplingParams(**{"seed": i, **asked}))
            for i, asked in enumerate(ASKED)
        ]

    wanted = [described(x) for x in engine.run(prepared(engine))]
    found: dict[int, tuple[object, ...]] = {}
    requests = prepared(split.book)
    texts: dict[int, str] = dict.fromkeys(range(len(requests)), "")
    split.book.submit(requests)
    while not all(request.finished for request in requests):
        split.step()
        for i, request in enumerate(requests):
            if request.has_output:
                output = split.book.take_output(request)
                texts[i] += output.outputs[0].new_text if not request.is_best_of else ""
                found[i] = described(output)
    assert [found[i] for i in range(len(requests))] == wanted
    first = requests[4].returned_answers()[0]
    assert texts[4] == "".join(first.pieces), "no text follows a stop string"


def test_seeds_of_a_call_without_one_are_those_of_one_process(demo, split):
    """A call without a seed takes the engine's next number, and its prompts derive theirs."""
    engine = demo.llm_engine
    params = SamplingParams(max_tokens=8, temperature=1.5, n=2)

    def prepared(book: RequestBook) -> list[Request]:
        return [book.prepare("", [5, 6], params, index=i) for i in range(3)]

    number = engine._ranks._num_calls
    wanted = [described(output) for output in engine.run(prepared(engine))]
    engine._ranks._num_calls = number
    requests = prepared(split.book)
    last = {}
    for output in split.outputs(requests):
        last[output.index] = described(output)
    assert [last[i] for i in range(3)] == wanted
    assert len({str(x[0]) for x in wanted}) == 3


@pytest.mark.parametrize("form", [{"grammar": "start: nothing"}, {"choice": ["\ud800"]}])
def test_a_format_that_cannot_be_compiled_is_an_error_of_its_field(demo, split, form):
    params = SamplingParams(structured_output=form)
    with pytest.raises(FieldError) as wanted:
        demo.llm_engine.prepare("", [5], params)
    request = split.book.prepare("", [5], params)
    split.book.submit([request])
    split.read()
    with pytest.raises(FieldError) as found:
        split.book.take_output(request)
    assert (found.value.field, str(found.value)) == (wanted.value.field, str(wanted.value))


def test_a_pooled_vector_has_its_bits(demo, split):
    reads = Pooling("mean")
    params = SamplingParams(max_tokens=0)
    (wanted,) = demo.llm_engine.run([demo.llm_engine.prepare("", [5, 6], params, reads=reads)])
    *_, found = split.outputs([split.book.prepare("", [5, 6], params, reads=reads)])
    assert found.pooled is not None and wanted.pooled is not None
    assert np.array_equal(found.pooled, wanted.pooled) and found.pooled.dtype == np.float32


def test_a_request_that_ends_early_leaves_nothing(demo, split):
    """Requests that are aborted at any time free their pages, and others go on."""
    params = SamplingParams(max_tokens=50, ignore_eos=True, n=2)
    kept = split.book.prepare("", [9, 8], SamplingParams(max_tokens=10, ignore_eos=True))
    aborted = [split.book.prepare("", [5, 6, i], params) for i in range(6)]
    split.book.submit([kept])
    for request in aborted:
        split.book.submit([request])
    for request in aborted:
        split.book.abort(request)
        split.step()
    while not kept.finished:
        split.step()
    assert len(split.book.take_output(kept).outputs[0].token_ids) == 10
    assert demo.engine.scheduler.running == []
    assert not split.hosted._calls


def test_a_request_that_gave_way_counts_as_aborted(demo, split):
    """The finish_reason, which metrics count, is that of one process, where it is aborted."""
    requests = [split.book.prepare("", [5, 6], SamplingParams(max_tokens=50)) for _ in range(2)]
    for request in requests:
        split.book.submit([request])
    calls = list(split.hosted._calls.values())
    split.hosted.refuse(calls[0], "gave way")
    split.hosted.refuse(calls[1], "failed")
    split.read()
    found = [request.answers[0].finish_reason for request in requests]
    assert found == ["abort", "error"]
    with pytest.raises(RefusedError, match="gave way"):
        split.book.take_output(requests[0])
    split.book.discard(requests)


def test_the_end_of_a_process_removes_its_sequences(demo):
    """What a process asked for is not computed to its end once the process is gone."""
    port = demo.llm_engine.port
    ended: list[str] = []

    async def run() -> None:
        loop = asyncio.get_running_loop()
        own, other = socket.socketpair()
        has_begun, is_over = asyncio.Event(), asyncio.Event()

        def admit(side: EngineSide, call: HostedCall) -> None:
            call.owner.start(call)
            has_begun.set()

        engine = EngineSide(own, loop, {}, is_over.set)
        engine.serve(port, admit)
        text = TextSide(other, loop, {}, lambda: ended.append("text"))
        book = RequestBook(text.port, demo.tokenizer, RemoteFormats(), 512)
        params = SamplingParams(max_tokens=400, ignore_eos=True, n=2)
        book.submit([book.prepare("", [5, 6], params)])
        await has_begun.wait()
        first = port.threads.num_steps
        port.wait_until(lambda: port.threads.num_steps > first)
        assert len(demo.engine.scheduler.running) == 2
        text.close()
        await is_over.wait()

    asyncio.run(asyncio.wait_for(run(), 60))
    assert not ended, "it closed the stream itself"
    assert not port.has_sequences
    assert demo.engine.scheduler.running == []
    demo.engine.scheduler.check()


def test_a_step_that_fails_ends_its_requests(demo, split, monkeypatch):
    request = split.book.prepare("", [5, 6], SamplingParams(max_tokens=5))
    split.book.submit([request])

    def fail(step: object) -> None:
        raise MemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(demo.engine.runner, "start", fail)
        with pytest.raises(MemoryError):
            split.step()
    split.read()
    with pytest.raises(RefusedError, match="no room"):
        split.book.take_output(request)


@pytest.mark.parametrize("seed", range(8))
def test_mirrors_equal_the_sequences(seed):
    """After any steps, a mirror equals its sequence up to its removal, in whatever reports."""
    draw = random.Random(seed)
    sequences: dict[int, SequenceState] = {}
    mirrors: dict[int, SequenceState] = {}
    cursors: dict[SequenceState, Cursor] = {}
    removed: dict[int, list[int]] = {}

    def add(number: int) -> None:
        prompt = [draw.randrange(2**17) for _ in range(draw.randrange(1, 5))]
        asked: dict[str, Any] = {
            "logprobs": draw.choice([None, 0, 2]),
            "prompt_logprobs": draw.choice([None, 1]),
        }
        sequences[number] = state_of(prompt, 60, **asked)
        mirrors[number] = state_of(prompt, 60, **asked)
        cursors[sequences[number]] = Cursor.of(number, sequences[number])

    def entry() -> tuple[float, list[tuple[int, float]]]:
        value = draw.choice([-draw.random() * 10, -np.inf, -1e-300])
        return value, [(draw.randrange(9), -draw.random()) for _ in range(2)]

    def move(seq: SequenceState) -> None:
        if seq.spec.prompt_logprobs is not None and draw.random() < 0.5:
            value, top = entry()
            seq.prompt_logprobs.append(value)
            seq.prompt_top_logprobs.append(top)
        for _ in range(draw.choice([0, 1, 1, 1, 8])):
            if seq.finished:
                return
            if seq.spec.logprobs is not None:
                value, top = entry()
                seq.logprobs.append(value)
                seq.top_logprobs.append(top)
            if draw.random() < 0.05:
                seq.stop_id = draw.randrange(2**17)
                seq.finish_reason = "stop"
            elif draw.random() < 0.03:
                seq.finish_reason = "error"
            else:
                seq.append(draw.randrange(2**17))

    for number in range(12):
        add(number)
        moved = [seq for seq in sequences.values() if not seq.finished and draw.random() < 0.8]
        for seq in moved:
            seq.num_cached = 3 if seq.num_output == 0 else seq.num_cached
            move(seq)
        if draw.random() < 0.3:
            gone = draw.choice(list(mirrors))
            removed[gone] = list(mirrors.pop(gone).tokens)
        rows = [(seq, cursors[seq]) for seq in moved]
        found = apply_report(pack_report(rows), mirrors)
        assert set(map(id, found)) <= set(map(id, mirrors.values()))
        for key, mirror in mirrors.items():
            seq = sequences[key]
            if seq not in moved:
                continue
            for name in (
                "tokens",
                "finish_reason",
                "stop_id",
                "logprobs",
                "top_logprobs",
                "prompt_logprobs",
                "prompt_top_logprobs",
                "num_cached",
            ):
                assert getattr(mirror, name) == getattr(seq, name), name
    assert all(sequences[x].tokens[: len(known)] == known for x, known in removed.items())
