"""The commands: checked flags in, an exit code out. The server's is in serve.py.

Standard output holds answers, and for a batch the figures; all else goes to stderr. Under torchrun
every rank comes here, and rank 0 reads and writes for all.
"""

import argparse
import contextlib
import itertools
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from llama.cli.flags import UsageError, extra
from llama.cli.model import SAMPLING_FLAGS, check_client, check_sampling, demo_dir, figures, load
from llama.cli.ranks import check_one_group, finish_on_signal, global_rank, say
from llama.cli.resident import KEYED, resident_server
from llama.ranks.signals import SIGNALS, stop_requested

_OF_BATCH = ("resume", *SAMPLING_FLAGS)
_CHAT_CONTEXT, _DEMO_CONTEXT = 4096, 512  # tokens; the demo model was trained on 512


def chat(options: argparse.Namespace) -> int:
    """Talk in the terminal, or answer the questions of a pipe."""
    check_sampling(options)
    finish_on_signal()
    settings = _picked(options, "system", "seed", *SAMPLING_FLAGS)
    if options.url or options.resident:  # without torch, which takes seconds to import
        with _server(options) as url:
            from llama.cli.chat.server_session import chat_on_server

            chat_on_server(url, api_key=options.api_key, model=options.model, **settings)
        return 0
    context = _CHAT_CONTEXT if options.ckpt_dir else _DEMO_CONTEXT
    options.max_seq_len = options.max_seq_len or context
    llama = load(options)
    from llama.cli.chat.engine_session import chat_on_engine

    chat_on_engine(llama, **settings)
    return 0


@contextlib.contextmanager
def _server(options: argparse.Namespace) -> Iterator[str]:
    """The URL of the server of --url or --resident."""
    url, names = getattr(options, "url", None), ("ckpt_dir", *KEYED)
    if url and options.resident:
        raise UsageError("--url and --resident are both given: give one of them")
    how = "--url" if url else "--resident"
    check_client(options, how, *([] if url else names))
    with contextlib.ExitStack() as stack, extra("client", how):
        if not url:
            options.api_key = None  # of another server
            flags = {name: x for name in names if (x := getattr(options, name)) is not None}
            url = stack.enter_context(resident_server(options, flags))
        yield url


def complete(options: argparse.Namespace) -> int:
    """Continue one text; the continuation streams to stdout as it is generated."""
    check_sampling(options)
    prompt = read_prompt(options.prompt, options.prompt_file)
    finish_on_signal()
    if options.resident:
        with _server(options) as url:
            _complete_on_server(url, prompt, options)
        return 0
    if not options.ckpt_dir:
        options.max_seq_len = options.max_seq_len or _DEMO_CONTEXT
    stream_continuation(load(options), prompt, **_picked(options, "seed", *SAMPLING_FLAGS))
    return 0


def _picked(options: argparse.Namespace, *names: str) -> dict[str, Any]:
    return {name: getattr(options, name) for name in names}


def _complete_on_server(url: str, prompt: bytes, options: argparse.Namespace) -> None:
    from llama.cli.client import Client, found_at

    async def stream(client: Client) -> None:
        text = prompt.decode()
        counted = (await client.post("/tokenize", {"prompt": text})).body
        room = max(1, found_at(counted, "max_model_len") - found_at(counted, "count"))
        most = options.max_gen_len
        body = {
            "prompt": text, "stream": True, "temperature": options.temperature,
            "top_p": options.top_p, "seed": options.seed,
            "max_tokens": room if most is None else min(most, room),
        }  # fmt: skip
        async for event in client.events("/v1/completions", body):
            _write(found_at(event, "choices", 0, "text") or "")
        _write("\n")

    with contextlib.closing(Client(url)) as client:
        client.run(stream(client))


def stream_continuation(
    llama: Any, prompt: bytes, *sampling: Any, heading: str = "", **more: Any
) -> None:
    """Write the heading and the continuation of one prompt to stdout, as it is generated. Rank 0
    has the prompt, and writes. sampling, more: as of `Llama.stream_text`."""
    parallel = llama.model.parallel
    check_one_group(parallel.data_size, "there is one prompt", "or start fewer processes")
    text = parallel.broadcast_bytes(prompt).decode()
    deltas = llama.stream_text([text], *sampling, **more)
    for piece in itertools.chain((delta.text for delta in deltas), "\n"):
        if parallel.is_leader:
            _write(heading + piece, parallel.watch)
        heading = ""


def _write(piece: str, watch: Any = None) -> None:
    """A piece of the answer, at once. OSError, which ends other ranks too; but where nobody reads
    any more they need the steps of this one, their `watch` says."""
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
    """The prompt in UTF-8: the text, or a file's, or without either, or for "-", that of standard
    input. A file is read without the end of its last line. Rank 0 alone gets it."""
    if prompt is not None and prompt_file is not None:
        raise UsageError("--prompt and --prompt_file are both given: give one of them")
    if global_rank():
        return b""
    if prompt is not None:
        return prompt.encode()
    if prompt_file not in (None, "-"):
        source, data = prompt_file, Path(prompt_file).read_bytes()
    else:
        if sys.stdin.isatty():
            say("type the text to continue; Ctrl-D at the beginning of a line ends it")
        source, data = "standard input", sys.stdin.buffer.read()
    data = data.removesuffix(b"\n").removesuffix(b"\r")
    try:
        data.decode()
    except UnicodeDecodeError as e:
        raise ValueError(f"{source} is not UTF-8 text: {e}") from None
    return data


def batch(options: argparse.Namespace) -> int:
    """Answer each line of a file into another file; 0 once each line has its record, which may be
    an error. What torchrun restarts resumes by itself."""
    check_sampling(options)
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        options.resume = True
    finish_on_signal()
    try:
        is_client = options.url or options.resident
        written, failed = (_batch_on_server if is_client else _batch_on_engine)(options)
    except KeyboardInterrupt:
        say(f"stopped: what was finished is in {options.out_file}; add --resume to do the rest")
        raise
    say(f"{options.out_file}: results added {written}, errors in it {failed}")
    if failed:
        say("each failed line has its record: error.line and error.message say what failed")
    if stop_requested():
        say("stopped by a signal: add --resume to do the rest")
    return 0


def _batch_on_engine(options: argparse.Namespace) -> tuple[int, int]:
    """Records written, and errors in the file."""
    from llama.cli.batch.files import check_files
    from llama.cli.batch.job import run_batch

    files, model = (options.in_file, options.out_file), Path(options.ckpt_dir or demo_dir()).name
    check_files(*files, resume=options.resume)
    llama = load(options)
    given = _picked(options, *_OF_BATCH) | {"progress": sys.stderr.isatty()}
    report = run_batch(llama, *files, model=model, **given)
    if global_rank() == 0:
        print(figures(llama), flush=True)
    return report


def _batch_on_server(options: argparse.Namespace) -> tuple[int, int]:
    """Without torch, which takes seconds to import."""
    names = ("seed", "api_key", "model", "concurrency", "retry_s", *_OF_BATCH)
    with _server(options) as url, SIGNALS.taken_alone(signal.SIGTERM):
        from llama.cli.batch.server_job import run_server_batch

        given = _picked(options, *names) | {"progress": sys.stderr.isatty()}
        return run_server_batch(url, options.in_file, options.out_file, **given)


def verify(options: argparse.Namespace) -> int:
    """Print a line for each file, or fail with the first fault."""
    if global_rank() == 0:
        from llama.checkpoint.verify import verify as check

        for line in check(options.ckpt_dir, progress=sys.stderr.isatty()):
            print(line)
    return 0


def reshard(options: argparse.Namespace) -> int:
    """Write another number of shards, and say which files were written."""
    from llama.checkpoint.convert import reshard as write

    return _write_weights(write, options, options.model_parallel_size)


def convert(options: argparse.Namespace) -> int:
    """Write another layout, or packed, and say which files were written."""
    from llama.checkpoint import convert as written_by

    write = written_by.pack if options.packed else written_by.convert
    return _write_weights(write, options, quantize=options.quantize)


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
    """Print what this machine offers; 1 if something stands in the way."""
    from llama.cli.doctor import doctor as report

    return report(options)
