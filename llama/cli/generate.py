"""The commands that run a model: chat, complete and batch. Checked flags in, an exit code out.

Standard output holds answers, and for a batch the figures; all else goes to stderr. Under torchrun
every rank comes here, and rank 0 reads and writes for all.
"""

import argparse
import itertools
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from llama.cli.flags import UsageError, extra
from llama.cli.model import check_client, check_sampling, demo_dir, figures, load
from llama.cli.ranks import finish_on_signal, global_rank, say
from llama.ranks.signals import SIGNALS, stop_requested

if TYPE_CHECKING:
    from llama.cli.batch.loop import BatchReport
    from llama.generation import Llama

_CHAT_CONTEXT, _DEMO_CONTEXT = 4096, 512  # tokens; the demo model was trained on 512


def chat(options: argparse.Namespace) -> int:
    """Talk in the terminal, or answer the questions of a pipe."""
    check_sampling(options)
    if options.url:
        return _chat_on_server(options)
    options.max_seq_len = options.max_seq_len or (
        _CHAT_CONTEXT if options.ckpt_dir else _DEMO_CONTEXT
    )
    finish_on_signal()
    llama = load(options)
    from llama.cli.chat import session

    session.chat(
        llama,
        system=options.system,
        temperature=options.temperature,
        top_p=options.top_p,
        max_gen_len=options.max_gen_len,
        seed=options.seed,
    )
    return 0


def _chat_on_server(options: argparse.Namespace) -> int:
    """Without torch, which takes seconds to import."""
    check_client(options)
    finish_on_signal()
    with extra("client", "--url"):
        from llama.cli.chat.server_session import chat_on_server

    chat_on_server(
        options.url,
        api_key=options.api_key,
        model=options.model,
        system=options.system,
        temperature=options.temperature,
        top_p=options.top_p,
        max_gen_len=options.max_gen_len,
        seed=options.seed,
    )
    return 0


def complete(options: argparse.Namespace) -> int:
    """Continue one text; the continuation streams to stdout as it is generated."""
    check_sampling(options)
    prompt = read_prompt(options.prompt, options.prompt_file)
    if not options.ckpt_dir:
        options.max_seq_len = options.max_seq_len or _DEMO_CONTEXT
    finish_on_signal()
    stream_continuation(
        load(options),
        prompt,
        options.temperature,
        options.top_p,
        options.max_gen_len,
        seed=options.seed,
    )
    return 0


def stream_continuation(
    llama: "Llama",
    prompt: bytes,
    temperature: float,
    top_p: float,
    max_gen_len: int | None,
    *,
    seed: int | None = None,
    heading: str = "",
) -> None:
    """Write the heading and the continuation of one prompt to stdout, as it is generated.

    Rank 0 has the prompt, and writes. Nothing is written of a prompt that cannot be used.
    """
    parallel = llama.model.parallel
    if parallel.data_size > 1:
        raise ValueError(
            f"there is one prompt for {parallel.data_size} model-parallel groups: leave "
            "model_parallel_size out, or start fewer processes"
        )
    text = parallel.broadcast_bytes(prompt).decode()
    deltas = llama.stream_text([text], temperature, top_p, max_gen_len, seed=seed)
    for piece in itertools.chain((delta.text for delta in deltas), "\n"):
        if parallel.rank == 0:
            _write(heading + piece, alone=parallel.size == 1)
        heading = ""


def read_prompt(prompt: str | None, prompt_file: str | None) -> bytes:
    """The prompt in UTF-8: the text, or a file's, or without either that of standard input.

    A file is read without the end of its last line; "-" is standard input too. Rank 0 alone reads:
    the others get nothing.
    """
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


def _write(piece: str, *, alone: bool) -> None:
    """A piece of the answer, at once. Where nobody reads, other ranks still need this one's steps.

    BrokenPipeError where this is the only rank.
    """
    try:
        sys.stdout.write(piece)
        sys.stdout.flush()
    except BrokenPipeError:
        if alone:
            raise


def batch(options: argparse.Namespace) -> int:
    """Answer each line of a file into another file; 0 once each line has its record.

    A record may be an error: the line failed then, and not the job. torchrun --max-restarts would
    start a job again that has nothing left to do. What torchrun restarts resumes by itself.
    """
    check_sampling(options)
    resume = options.resume or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    run = _batch_on_server if options.url else _batch_on_engine
    finish_on_signal()
    try:
        report = run(options, resume)
    except KeyboardInterrupt:
        say(f"stopped: what was finished is in {options.out_file}; add --resume to do the rest")
        raise
    say(f"{options.out_file}: results added {report.written}, errors in it {report.failed}")
    if report.failed:
        say("each failed line has its record: error.line and error.message say what failed")
    if stop_requested():
        say("stopped by a signal: add --resume to do the rest")
    return 0


def _batch_on_engine(options: argparse.Namespace, resume: bool) -> "BatchReport":
    from llama.cli.batch.files import check_files
    from llama.cli.batch.job import run_batch

    check_files(options.in_file, options.out_file, resume=resume)
    llama = load(options)
    report = run_batch(
        llama,
        options.in_file,
        options.out_file,
        options.temperature,
        options.top_p,
        options.max_gen_len,
        resume=resume,
        model=Path(options.ckpt_dir or demo_dir()).name,
        progress=sys.stderr.isatty(),
    )
    if global_rank() == 0:
        print(figures(llama), flush=True)
    return report


def _batch_on_server(options: argparse.Namespace, resume: bool) -> "BatchReport":
    """Without torch, which takes seconds to import."""
    check_client(options)
    with extra("client", "--url"):
        from llama.cli.batch.server_job import run_server_batch

    with SIGNALS.taken_alone():
        return run_server_batch(
            options.url,
            options.in_file,
            options.out_file,
            options.temperature,
            options.top_p,
            options.max_gen_len,
            seed=options.seed,
            api_key=options.api_key,
            model=options.model,
            concurrency=options.concurrency,
            retry_s=options.retry_s,
            resume=resume,
            progress=sys.stderr.isatty(),
        )
