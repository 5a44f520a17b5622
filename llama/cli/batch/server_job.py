"""A batch job on a server: `llama batch --url`. No model is loaded, and torch is not imported.

Requests that the server refuses temporarily, or loses, are sent again after increasing waits.
"""

import asyncio
import contextlib
import os
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from llama.api import SIGNALS, derived_seed, stop_requested
from llama.cli.batch.files import Line, Results, check_files
from llama.cli.batch.lines import error_record, response_record, target
from llama.cli.batch.loop import BatchReport, Loop
from llama.cli.client import Client, Reply, ServerError, sampling_fields, usage_of
from llama.sampling_params import SamplingParams
from llama.server.openai.models import CHAT_URL, TEXT_URL
from llama.server.responses.models import RESPONSES_URL

MAX_CONCURRENCY = 1024
_POLL_S = 0.5  # interval of the checks for a signal
_FIRST_WAIT_S = 0.5  # wait before the second attempt; each further wait is twice as long
_MAX_WAIT_S = 30.0


def run_server_batch(
    url: str,
    in_path: str,
    out_path: str,
    defaults: SamplingParams,
    *,
    images: Path | None = None,
    seed: int = 1,
    api_key: str | None = None,
    model: str | None = None,
    concurrency: int = 16,
    retry_s: float = 600.0,
    resume: bool = False,
    progress: bool = False,
) -> BatchReport:
    """Have every line of a file answered by a server.

    See `llama.cli.batch.job.run_batch` for the files; docs/guides/batch.md says what differs.

    Args:
        url: The server; see `Client`.
        in_path: A file with one request per line.
        out_path: A file that gets one JSON record per line.
        defaults: Parameters of lines that do not give their own. Without `max_tokens` the
            server's own default applies.
        images: The folder of the images that lines name.
        seed: The seed of the job, from which each line without a seed gets its own.
        api_key: The key of the server.
        model: One of the server's models; its first one by default.
        concurrency: Number of requests that are sent at once.
        retry_s: Seconds after its first failure during which a request is sent again.
        resume: Whether to add the missing records to an output of the same input and arguments.
        progress: Whether to show a progress bar.

    Raises:
        ServerError: The server cannot be reached, or it refuses the key.
        ValueError: An argument, a file or the server cannot be used.
        OSError: A file cannot be used.
    """
    if not 1 <= concurrency <= MAX_CONCURRENCY:
        raise ValueError(f"concurrency={concurrency} must be from 1 to {MAX_CONCURRENCY}")
    check_files(in_path, out_path, resume=resume)
    with contextlib.closing(Client(url, api_key)) as client, open(in_path, "rb") as file:
        name, _ = client.run(client.model(model))
        answers = ServerAnswers(client, defaults, name, seed, concurrency, retry_s)
        size = os.fstat(file.fileno()).st_size
        with contextlib.closing(Results(out_path, max_lines=size)) as results:
            num_done = results.num_done
            loop = Loop(answers, file, results, defaults, seed, images, shows_progress=progress)
            report = loop.run()
            results.check_written(num_done + report.written)
            return report


class _Running(NamedTuple):
    """A line that the server is answering."""

    line: Line
    custom_id: str


@dataclass
class ServerAnswers:
    """Answers from a server. The client's event loop runs only within `finished`.

    Attributes:
        client: The client of the server.
        defaults: Parameters of lines that do not give their own.
        model: The name of the server's model.
        seed: The seed of the job.
        concurrency: Number of requests that are sent at once.
        retry_s: Seconds after its first failure during which a request is sent again.
        num_tokens: Number of tokens generated so far.
        running: The lines that are being answered.
        stopping: Is set once no request is to be sent again.
    """

    client: Client
    defaults: SamplingParams
    model: str
    seed: int
    concurrency: int
    retry_s: float
    num_tokens: int = 0
    running: dict[asyncio.Task[Reply], _Running] = field(default_factory=dict)
    stopping: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def has_capacity(self) -> bool:
        """Whether another request may be sent."""
        return len(self.running) < self.concurrency

    @property
    def is_idle(self) -> bool:
        """Whether nothing is running, or what still runs is left to a later job."""
        return not self.running or SIGNALS.is_time_over

    def start(self, line: Line, custom_id: str, fields: dict[str, Any]) -> None:
        """Begin to answer a line; see `Answers.start`."""
        path, body = target(fields)
        seed = derived_seed(self.seed, line.number - 1)
        body = with_defaults(path, body, self.defaults, model=self.model, seed=seed)
        task = self.client.start(self._reply(path, body, f"line-{line.number}"))
        self.running[task] = _Running(line, custom_id)

    def finished(self) -> list[tuple[Line, dict[str, Any]]]:
        """Wait for answers, at most for `_POLL_S`, and return their records.

        Raises:
            ServerError: The server refuses the key.
        """
        if stop_requested():
            self.stopping.set()
        wait = asyncio.wait(self.running, timeout=_POLL_S, return_when=asyncio.FIRST_COMPLETED)
        done, _ = self.client.run(wait)
        records: list[tuple[Line, dict[str, Any]]] = []
        for line, custom_id, task in [(*self.running.pop(task), task) for task in done]:
            record = self._record(line, custom_id, task)
            if record is not None:
                records.append((line, record))
        return records

    async def _reply(self, path: str, body: dict[str, Any], request_id: str) -> Reply:
        """Send a request until the server answers it.

        The waits between attempts increase, or are as long as the server asks for. Each is
        shortened at random by up to a half.

        Raises:
            ServerError: The last attempt failed, and its error is not transient, `retry_s` is over,
                or the job is stopping.
        """
        wait_s = _FIRST_WAIT_S
        end = None
        while True:
            try:
                return await self.client.post(path, body, request_id=request_id)
            except ServerError as e:
                now = time.monotonic()
                if end is None:
                    end = now + self.retry_s
                pause_s = max(e.retry_after_s, wait_s * random.uniform(0.5, 1.0))
                if not e.is_transient or now + pause_s > end:
                    raise
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.stopping.wait(), pause_s)
                if self.stopping.is_set():
                    raise
            wait_s = min(2 * wait_s, _MAX_WAIT_S)

    def _record(
        self, line: Line, custom_id: str, task: asyncio.Task[Reply]
    ) -> dict[str, Any] | None:
        """Return the record of a line.

        It is None if a signal came before there was an answer: a resumed job answers the line.
        """
        try:
            reply = task.result()
        except ServerError as error:
            if error.is_key_refused:
                raise
            if error.is_transient and self.stopping.is_set():
                return None
            code = "server_error" if error.is_transient else "invalid_request"
            return error_record(custom_id, line.number, code, str(error))
        usage = usage_of(reply.body)
        if usage is not None:
            self.num_tokens += usage.completion_tokens
        request_id = reply.request_id or f"line-{line.number}"
        return response_record(custom_id, request_id, reply.body)


def with_defaults(
    path: str, body: Mapping[str, Any], defaults: SamplingParams, *, model: str, seed: int
) -> dict[str, Any]:
    """Return the body with values for the fields that it leaves out or has as null.

    Args:
        path: The path of its route.
        body: The body.
        defaults: The sampling parameters that it does not give, where the route generates text.
        model: The name of the model that it does not give.
        seed: The seed that it does not give.
    """
    given = {name: value for name, value in body.items() if value is not None}
    if path not in (CHAT_URL, TEXT_URL, RESPONSES_URL):
        return {"model": model, **given}
    values = {"model": model, "seed": seed, **sampling_fields(defaults)}
    max_tokens = values.pop("max_tokens", None)
    if path == RESPONSES_URL:
        values["max_output_tokens"] = max_tokens
    elif "max_completion_tokens" not in given:
        values["max_tokens"] = max_tokens
    return {name: value for name, value in values.items() if value is not None} | given
