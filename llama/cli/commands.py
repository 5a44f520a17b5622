"""The commands except the server: each takes checked flags and returns an exit code.

Standard output holds answers, and the figures of a batch; everything else goes to stderr. Under
torchrun every rank comes here, and rank 0 reads and writes for all. The server is in serve.py.
"""

import argparse
import contextlib
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from llama.api import SIGNALS, Watch, stop_requested
from llama.cli.chat.line_editor import history_path
from llama.cli.flags import SAMPLING_FLAGS, UsageError, extra
from llama.cli.model import (
    check_client,
    check_sampling,
    demo_dir,
    figures,
    load,
    sampling_params,
)
from llama.cli.ranks import check_one_group, finish_on_signal, global_rank, say
from llama.cli.resident import KEYED, PAGES, resident_server


def chat(options: argparse.Namespace) -> int:
    """Chat in the terminal, or answer the questions of a pipe."""
    check_sampling(options)
    finish_on_signal()
    settings = _picked(options, "system", "seed", *SAMPLING_FLAGS)
    settings["history"] = None if options.no_history else history_path()
    if options.url or options.resident:  # This avoids the import of torch, which takes seconds.
        with _server(options) as url:
            from llama.cli.chat.server_session import chat_on_server

            chat_on_server(url, api_key=options.api_key, model=options.model, **settings)
        return 0
    llama = load(options, images=True)
    from llama.cli.chat.engine_session import chat_on_engine

    chat_on_engine(llama, **settings)
    return 0


@contextlib.contextmanager
def _server(options: argparse.Namespace) -> Iterator[str]:
    """Yield the URL of the server of --url or --resident."""
    url = getattr(options, "url", None)
    if url and options.resident:
        raise UsageError("--url and --resident are both given: give one of them")
    if url:
        check_client(options, "--url")
        with extra("client", "--url"):
            yield url
        return
    names = ("ckpt_dir", *KEYED, *PAGES)
    check_client(options, "--resident", *names)
    options.api_key = None  # LLAMA_API_KEY is the key of another server.
    flags = {name: getattr(options, name) for name in names}
    given = {name: value for name, value in flags.items() if value is not None}
    with extra("client", "--resident"), resident_server(options, given) as url:
        yield url


def complete(options: argparse.Namespace) -> int:
    """Continue one text. The continuation is streamed to stdout while it is generated."""
    check_sampling(options)
    prompt = read_prompt(options.prompt, options.prompt_file)
    finish_on_signal()
    if options.resident:
        with _server(options) as url:
            _complete_on_server(url, prompt, options)
        return 0
    params = sampling_params(**_picked(options, "seed", *SAMPLING_FLAGS))
    stream_continuation(load(options), prompt, params)
    return 0


def _picked(options: argparse.Namespace, *names: str) -> dict[str, Any]:
    return {name: getattr(options, name) for name in names}


def _complete_on_server(url: str, prompt: bytes, options: argparse.Namespace) -> None:
    from llama.cli.client import Client, json_at, sampling_fields

    async def stream(client: Client) -> None:
        text = prompt.decode()
        counts = (await client.post("/tokenize", {"prompt": text})).body
        capacity = max(1, json_at(counts, "max_model_len") - json_at(counts, "count"))
        params = sampling_params(**_picked(options, "seed", *SAMPLING_FLAGS))
        max_tokens = capacity if params.max_tokens is None else min(params.max_tokens, capacity)
        params = replace(params, max_tokens=max_tokens)
        body = {"prompt": text, "stream": True, **sampling_fields(params)}
        async for event in client.events("/v1/completions", body):
            _write(json_at(event, "choices", 0, "text") or "")
        _write("\n")

    with contextlib.closing(Client(url)) as client:
        client.run(stream(client))


def stream_continuation(llama: Any, prompt: bytes, params: Any, *, heading: str = "") -> None:
    """Write a heading and the continuation of one prompt to stdout, while it is generated.

    Args:
        llama: The model.
        prompt: The prompt in UTF-8. Rank 0's is used, and rank 0 writes.
        params: The `SamplingParams` of the continuation.
        heading: A text to write before the continuation.

    Raises:
        ValueError: The prompt is too long, or the model failed.
    """
    parallel = llama.model.parallel
    check_one_group(parallel.data_size, "there is one prompt", "or start fewer processes")
    text = parallel.broadcast_bytes(prompt).decode()
    engine = llama.llm_engine
    # The engine iterates this where an error of one rank becomes an error of every rank.
    requests = (engine.prepare("", each, params, index=0) for each in [text])
    unwritten = heading
    watch = Watch.of_process()
    with contextlib.closing(engine.stream(requests)) as outputs:
        for output in outputs:
            if output.error is not None:
                raise ValueError(f"prompt 0: {output.error}")
            unwritten += output.outputs[0].new_text
            if parallel.is_leader and unwritten:
                _write(unwritten, watch)
            unwritten = ""
    if parallel.is_leader:
        _write(f"{unwritten}\n", watch)


def _write(piece: str, watch: Watch | None = None) -> None:
    """Write a piece of the answer to stdout at once.

    Args:
        piece: The text.
        watch: The watch of this rank, if there are several ranks. Then a reader that has left is
            no error, because the other ranks need the further steps of this one.

    Raises:
        OSError: The text cannot be written. This ends the other ranks too.
    """
    try:
        sys.stdout.write(piece)
        sys.stdout.flush()
    except OSError as e:
        if watch is None:
            raise OSError(e.errno, e.strerror, "standard output") from None
        if not isinstance(e, BrokenPipeError):
            watch.fail(OSError(e.errno, e.strerror, "standard output"), has_trace=False)
            raise


def read_prompt(prompt: str | None, prompt_file: str | None) -> bytes:
    """Return the prompt in UTF-8, on rank 0; the other ranks get an empty text.

    Args:
        prompt: The prompt itself.
        prompt_file: A file that holds it. The line end of its last line is left out. Without
            either, or with "-", standard input is read.

    Raises:
        UsageError: Both are given.
        ValueError: The prompt is not UTF-8.
    """
    if prompt is not None and prompt_file is not None:
        raise UsageError("--prompt and --prompt_file are both given: give one of them")
    if global_rank():
        return b""
    if prompt is not None:
        return prompt.encode()
    if prompt_file in (None, "-"):
        source = "standard input"
        if sys.stdin.isatty():
            say("type the text to continue; end it with Ctrl-D at the beginning of a line")
        data = sys.stdin.buffer.read()
    else:
        source = prompt_file
        data = Path(prompt_file).read_bytes()
    data = data.removesuffix(b"\n").removesuffix(b"\r")
    try:
        data.decode()
    except UnicodeDecodeError as e:
        raise ValueError(f"{source} is not UTF-8 text: {e}") from None
    return data


def batch(options: argparse.Namespace) -> int:
    """Answer each line of a file into another file.

    Returns:
        0 once each line has its record, which may be an error. A job that torchrun has restarted
        resumes by itself.
    """
    from llama.cli.batch.files import unread_columns

    check_sampling(options)
    if options.images is not None:
        options.images = Path(options.images)
        if not options.images.is_dir():
            raise UsageError(f"--images {options.images} is no folder")
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        options.resume = True
    finish_on_signal()
    run = _batch_on_server if options.url or options.resident else _batch_on_engine
    try:
        written, failed = run(options)
    except KeyboardInterrupt:
        say(f"stopped: finished answers are in {options.out_file}; add --resume to answer the rest")
        raise
    say(f"{options.out_file}: {written} results added, {failed} errors in the file")
    unread = unread_columns(options.in_file)
    if unread:
        say(f"{options.in_file}: these columns have no effect: {', '.join(unread)}")
    if failed:
        say("each failed line has a record: see its error.line and error.message")
    if stop_requested():
        say("stopped by a signal: add --resume to answer the rest")
    return 0


def _batch_on_engine(options: argparse.Namespace) -> tuple[int, int]:
    """Run a job on the engine; return the records written and the errors in the file."""
    from llama.cli.batch.files import check_files
    from llama.cli.batch.job import run_batch

    check_files(options.in_file, options.out_file, resume=options.resume)
    llama = load(options, images=True)
    report = run_batch(
        llama,
        options.in_file,
        options.out_file,
        sampling_params(**_picked(options, *SAMPLING_FLAGS)),
        images=options.images,
        resume=options.resume,
        model=Path(options.ckpt_dir or demo_dir()).name,
        progress=sys.stderr.isatty(),
    )
    line = figures(llama)
    if global_rank() == 0:
        print(line, flush=True)
    return report


def _batch_on_server(options: argparse.Namespace) -> tuple[int, int]:
    """Run a job on a server; return the records written and the errors in the file.

    This avoids the import of torch, which takes seconds.
    """
    names = ("images", "seed", "api_key", "model", "concurrency", "retry_s", "resume")
    with _server(options) as url, SIGNALS.taken_alone(signal.SIGTERM):
        from llama.cli.batch.server_job import run_server_batch

        return run_server_batch(
            url,
            options.in_file,
            options.out_file,
            sampling_params(**_picked(options, *SAMPLING_FLAGS)),
            progress=sys.stderr.isatty(),
            **_picked(options, *names),
        )


def verify(options: argparse.Namespace) -> int:
    """Print a line for each file, or fail at the first fault; or compare answers."""
    if options.answers:
        from llama.cli.verify_answers import verify_answers

        is_equal, line = verify_answers(
            options.ckpt_dir, options.original, **_picked(options, "device", "dtype")
        )
        if global_rank() == 0:
            print(line)
        return 0 if is_equal else 1
    if options.original is not None:
        raise UsageError("--original is for a comparison of answers: add --answers")
    if global_rank() == 0:
        from llama.api import verify as check

        for line in check(options.ckpt_dir, progress=sys.stderr.isatty()):
            print(line)
    return 0


def reshard(options: argparse.Namespace) -> int:
    """Write a checkpoint in another number of shards, and print which files were written."""
    from llama.api import reshard as write

    return _write_weights(write, options, options.model_parallel_size)


def convert(options: argparse.Namespace) -> int:
    """Write a checkpoint in another layout, and print which files were written."""
    from llama.api import convert as write_layout
    from llama.api import pack

    asked = _picked(options, "quantize", "lora") | {"images": not options.text_only}
    if not options.packed:
        return _write_weights(write_layout, options, activations=options.activations, **asked)
    if options.activations is not None:
        raise UsageError(
            "--activations is for a folder of compressed-tensors: leave out --packed, or give "
            "--activations to the command that loads the packed folder"
        )
    return _write_weights(pack, options, **asked)


def _write_weights(
    write: Callable[..., list[str]], options: argparse.Namespace, *more: int, **named: Any
) -> int:
    if global_rank() == 0:
        progress = sys.stderr.isatty()
        for line in write(options.ckpt_dir, options.out_dir, *more, **named, progress=progress):
            print(line)
        print(f"next: llama verify {shlex.quote(options.out_dir)}")
    return 0


def doctor(options: argparse.Namespace) -> int:
    """Print what this machine offers; return 1 if there is a problem."""
    from llama.cli.doctor import doctor as report

    return report(options)


def plan(options: argparse.Namespace) -> int:
    """Print how to divide a model among devices, and the speed to expect."""
    from llama.cli.plan.command import plan as report

    return report(options)
