"""`llama serve --replicas N`: check the flags, share the devices out, and start everything.

In: the flags of `llama serve`. Out: an exit code. Each replica is an ordinary `llama serve` with
the same flags, which listens on a Unix domain socket in a private folder. torch is not imported.
"""

import argparse
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from llama.cli.flags import UsageError
from llama.cli.model import check_alone, demo_dir
from llama.cli.ranks import say
from llama.cli.replicas.child import Child
from llama.cli.replicas.haproxy import Config, check_config, find_haproxy
from llama.cli.replicas.shares import Share, num_nodes, shares
from llama.cli.replicas.supervisor import LISTENING, READY, Supervisor

_BACKLOG = 2048  # connections that may wait to be accepted
_MAX_FOLDER_BYTES = 90  # With the name of a socket that makes less than 107, the limit of unix(7).
_CORES_PER_THREAD = 8  # HAProxy needs 0.03 ms of a core for an event.
_MAX_THREADS = 4
# Flags that cannot be given with --replicas, and what to do instead.
_REFUSED = {
    "background": "a server in the background is one process: leave it out",
    "uds": "the replicas have sockets of their own: give --host and --port",
    "lora_folder": "one replica only would load an adapter: give all of them with --lora_modules",
    "fastchat_controller": "FastChat's controller itself routes requests to several servers: start "
    "each of them without --replicas, on a --port of its own",
}


def serve_replicas(options: argparse.Namespace) -> int:
    """Serve with several replicas until SIGTERM or Ctrl-C, and return the exit code.

    Raises:
        UsageError: Flags cannot be used together, there is no HAProxy, or there are too few GPUs.
        OSError: The port is taken, or a replica cannot start.
    """
    count = options.replicas
    check_alone("--replicas")
    for name, remedy in _REFUSED.items():
        if getattr(options, name):
            raise UsageError(f"--{name} cannot be given with --replicas {count}: {remedy}")
    program = find_haproxy()
    divided = shares(count, options.ranks, options.device)
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    address = (options.host, options.port)
    with (
        socket.create_server(address, family=family, backlog=_BACKLOG) as listener,
        tempfile.TemporaryDirectory(prefix="llama-replicas-") as folder,
    ):
        _run(options, program, divided, listener, Path(folder))
    return 0


def _run(
    options: argparse.Namespace,
    program: str,
    divided: Sequence[Share],
    listener: socket.socket,
    folder: Path,
) -> None:
    if len(os.fsencode(folder)) > _MAX_FOLDER_BYTES:
        raise OSError(f"{folder} is too long a path for a socket: set TMPDIR to a shorter one")
    sockets = [folder / f"{i}.sock" for i in range(len(divided))]
    max_per_address = options.max_per_address or max(1, options.max_connections * 3 // 4)
    config = Config(
        sockets=sockets,
        listener=listener.fileno(),
        admin=folder / "admin.sock",
        num_threads=max(1, min(_MAX_THREADS, (os.cpu_count() or 1) // _CORES_PER_THREAD)),
        max_connections=options.max_connections,
        max_per_address=min(options.max_connections, max_per_address),
        drain_s=options.drain_s,
    )
    path = config.write(folder)
    check_config(program, path, listener.fileno())
    proxy = Child(
        "HAProxy",
        [program, "-db", "-f", str(path)],
        signal.SIGUSR1,
        descriptors=[listener.fileno()],
        is_ready=True,  # It has nothing to load.
    )
    replicas = [
        Child(
            f"replica {i}",
            _command(options, sockets[i]),
            signal.SIGTERM,
            variables=share.variables,
            cores=share.cores,
        )
        for i, share in enumerate(divided)
    ]
    host = f"[{options.host}]" if ":" in options.host else options.host
    url = f"http://{host}:{listener.getsockname()[1]}"
    name = options.served_model_name or Path(options.ckpt_dir or demo_dir()).resolve().name
    described = f"{len(replicas)} replicas of {name}"
    say(f"{LISTENING}{url}; loading {described}")
    nodes = num_nodes()
    if divided[0].cores is not None and len(divided) > nodes:
        say(
            f"note: {len(divided)} replicas share the memory of {nodes} NUMA "
            f"node{'s' * (nodes > 1)}: one server with a larger --max_batch_size answers as fast, "
            "and has one prefix cache"
        )
    Supervisor(
        replicas,
        proxy,
        admin=config.admin,
        drain_s=options.drain_s,
        close_listener=listener.close,
        on_ready=lambda: say(f"{READY}{described} at {url}/v1"),
    ).run()


def _command(options: argparse.Namespace, path: Path) -> list[str]:
    """Return the command line of a replica: that of this process, with other network flags.

    Of a flag that is given twice, the last value counts. LLAMA_* variables are inherited.
    """
    given = sys.orig_argv[1:]
    end = given.index("--") if "--" in given else len(given)
    # All connections come from HAProxy, which counts those of each address.
    limit = str(options.max_connections)
    own = ["--replicas", "1", "--uds", str(path), "--max_per_address", limit]
    return [sys.executable, *given[:end], *own, *given[end:]]
