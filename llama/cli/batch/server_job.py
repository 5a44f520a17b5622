"""A batch job on a server: `llama batch --url`. No model is loaded, and torch is not imported.

What the server refuses for now, or loses, is sent again after waits that grow.
"""

import asyncio
import contextlib
import os
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from llama.cli.batch.files import Line, Results, check_files
from llama.cli.batch.lines import error_record, response_record, target
from llama.cli.batch.loop import BatchReport, Loop
from llama.cli.client import Client, Reply, ServerError, usage_of
from llama.ranks.signals import SIGNALS, stop_requested
from llama.requests.request import derived_seed
from llama.sampling_params import SamplingParams

MAX_CONCURRENCY = 1024
_LOOK_S = 0.5  # between two looks at whether a signal came
_FIRST_WAIT_S, _MAX_WAIT_S = 0.5, 30.0  # between two attempts; doubled each time


def run_server_batch(
    url: str,
    in_path: str,
    out_path: str,
    temperature: float = 0.6,
    top_p: float = 0.9,
    max_gen_len: int | None = None,
    *,
    seed: int = 1,
    api_key: str | None = None,
    model: str | None = None,
    concurrency: int = 16,
    retry_s: float = 600.0,
    resume: bool = False,
    progress: bool = False,
) -> BatchReport:
    """Have every line of a file answered by a server; see `llama.cli.batch.job.run_batch`, and
    llama/cli/README.md for what differs. max_gen_len, model: without them the server's default
    counts, and its first model. ServerError or ValueError if the server cannot be used at all, or
    refuses the key."""
    if not 1 <= concurrency <= MAX_CONCURRENCY:
        raise ValueError(f"concurrency={concurrency} must be 1 to {MAX_CONCURRENCY}")
    check_files(in_path, out_path, resume=resume)
    defaults = SamplingParams(max_tokens=max_gen_len, temperature=temperature, top_p=top_p)
    with contextlib.closing(Client(url, api_key)) as client, open(in_path, "rb") as file:
        name, _ = client.run(client.model(model))
        answers = ServerAnswers(client, defaults, name, seed, concurrency, retry_s)
        size = os.fstat(file.fileno()).st_size
        with contextlib.closing(Results(out_path, max_lines=size)) as results:
            num_done = results.num_done
            report = Loop(answers, file, results, defaults, seed, shows=progress).run()
            results.check_written(num_done + report.written)
            return report


@dataclass
class ServerAnswers:
    """Lines answered by a server, `concurrency` at once. The client's loop runs in `finished`."""

    client: Client
    defaults: SamplingParams
    model: str
    seed: int
    concurrency: int
    retry_s: float
    num_tokens: int = 0
    running: dict[asyncio.Task[Reply], tuple[Line, str]] = field(default_factory=dict)
    stops: asyncio.Event = field(default_factory=asyncio.Event)  # no request is sent again

    @property
    def has_room(self) -> bool:
        return len(self.running) < self.concurrency

    @property
    def is_idle(self) -> bool:
        """Also where what still runs is left to a later job."""
        return not self.running or SIGNALS.is_time_over

    def start(self, line: Line, custom_id: str, fields: dict[str, Any]) -> None:
        path, body = target(fields)
        seed = derived_seed(self.seed, line.number - 1)
        body = filled(body, self.defaults, model=self.model, seed=seed)
        task = self.client.start(self._reply(path, body, f"line-{line.number}"))
        self.running[task] = line, custom_id

    def finished(self) -> list[tuple[Line, dict[str, Any]]]:
        """Wait for answers, half a second at most. ServerError where the server refuses the key."""
        if stop_requested():
            self.stops.set()
        wait = asyncio.wait(self.running, timeout=_LOOK_S, return_when=asyncio.FIRST_COMPLETED)
        done, _ = self.client.run(wait)
        answers = [(*self.running.pop(task), task) for task in done]
        return [record for answer in answers if (record := self._record(*answer)) is not None]

    async def _reply(self, path: str, body: dict[str, Any], name: str) -> Reply:
        """That of an attempt, after waits that grow, or as long as the server asks for, shortened
        at random by up to a half. ServerError of the last attempt, if it is not transient,
        `retry_s` is over, or `stops` is set."""
        wait_s, end = _FIRST_WAIT_S, None
        while True:
            try:
                return await self.client.post(path, body, request_id=name)
            except ServerError as e:
                now = time.monotonic()
                end = now + self.retry_s if end is None else end
                pause_s = max(e.retry_after_s, wait_s * random.uniform(0.5, 1.0))
                if not e.is_transient or now + pause_s > end:
                    raise
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.stops.wait(), pause_s)
                if self.stops.is_set():
                    raise
            wait_s = min(2 * wait_s, _MAX_WAIT_S)

    def _record(
        self, line: Line, custom_id: str, answer: asyncio.Task[Reply]
    ) -> tuple[Line, dict[str, Any]] | None:
        """None where a signal came before there was an answer: the line is done on resume."""
        try:
            reply = answer.result()
        except ServerError as error:
            if error.is_about_the_key:
                raise
            if error.is_transient and self.stops.is_set():
                return None
            code = "server_error" if error.is_transient else "invalid_request"
            return line, error_record(custom_id, line.number, code, str(error))
        usage = usage_of(reply.body)
        self.num_tokens += usage.completion_tokens if usage else 0
        request_id = reply.request_id or f"line-{line.number}"
        return line, response_record(custom_id, request_id, reply.body)


def filled(
    body: Mapping[str, Any], defaults: SamplingParams, *, model: str, seed: int
) -> dict[str, Any]:
    """The body with values for what it leaves out or has as null."""
    given = {name: value for name, value in body.items() if value is not None}
    wanted = {"model": model, "temperature": defaults.temperature, "top_p": defaults.top_p}
    wanted["seed"] = seed
    if defaults.max_tokens is not None and "max_completion_tokens" not in given:
        wanted["max_tokens"] = defaults.max_tokens
    return wanted | given
