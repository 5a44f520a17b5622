"""`llama list` and `llama stop`: servers in the background, and models in the cache.

In: the folder of the servers in the background (see resident.py), and the cache of the hub. Out: a
table on stdout, or the end of servers. torch is not imported.
"""

import argparse
import json
import os
import signal
import time
from pathlib import Path

from llama.cli.flags import UsageError
from llama.cli.ranks import say
from llama.cli.resident import RunningServer, running_servers, started_at
from llama.storage.hub import hub_cache, model_folder

_STOP_S = 60.0  # time limit of a server's end; answers that run get --drain_s of it
_POLL_S = 0.05
_WEIGHTS = (".safetensors", ".pth", ".gguf")


def list_models(options: argparse.Namespace) -> int:
    """Print the servers in the background, and the models in the cache with their sizes."""
    servers = running_servers()
    print("servers in the background:" if servers else "no server runs in the background")
    for server in servers:
        print(f"  {server.model}  process {server.process}  {server.url}")
    models = cached_models()
    print(f"models in {hub_cache()}:" if models else f"no model in {hub_cache()}")
    width = max((len(name) for name in models), default=0)
    for name, num_bytes in models.items():
        print(f"  {name:<{width}}  {num_bytes / 1e9:8.2f} GB")
    return 0


def stop(options: argparse.Namespace) -> int:
    """End the servers in the background that have this model, and wait until they are gone.

    Raises:
        UsageError: No such server is running.
        ProcessLookupError: A server has ended, and its number is another process's.
        TimeoutError: A server does not end.
    """
    servers = running_servers()
    found = [server for server in servers if _is_named(server, options.name)]
    if not found:
        names = ", ".join(server.model for server in servers) or "none"
        raise UsageError(
            f"no server in the background has the model {options.name!r}; running: {names}"
        )
    for server in found:
        _terminate(server)
    deadline = time.monotonic() + _STOP_S
    for server in found:
        while server.is_running():
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"process {server.process} has not ended within {_STOP_S:g} s (its log: "
                    f"{server.log}); `kill -9 {server.process}` ends it at once"
                )
            time.sleep(_POLL_S)
        say(f"stopped {server.model} (process {server.process})")
    return 0


def _terminate(server: RunningServer) -> None:
    """Send SIGTERM to a server, and to no process that took over its number.

    Raises:
        ProcessLookupError: Its number is another process's.
    """
    if not hasattr(os, "pidfd_open"):  # not on Linux
        os.kill(server.process, signal.SIGTERM)
        return
    descriptor = os.pidfd_open(server.process)  # From now on it is one process.
    try:
        if started_at(server.process) != server.started:
            raise ProcessLookupError(
                f"process {server.process} is another process now, and is not ended; what the "
                f"server of {server.model} had started still holds {server.log}"
            )
        signal.pidfd_send_signal(descriptor, signal.SIGTERM)
    finally:
        os.close(descriptor)


def _is_named(server: RunningServer, name: str) -> bool:
    """Return whether a model's name, its folder, the end of its path or a process id is meant."""
    folder = str(model_folder(name).resolve())
    return server.model == folder or name in (Path(server.model).name, str(server.process))


def cached_models() -> dict[str, int]:
    """Return the models in the hub's cache that have Llama's layout, with their sizes in bytes.

    The size is that of the weights' files of the newest snapshot.
    """
    sizes = {}
    for repository in sorted(hub_cache().glob("models--*--*")):
        name = repository.name.removeprefix("models--").replace("--", "/", 1)
        try:
            folder = model_folder(name)
        except ValueError:  # Nothing here has written it.
            continue
        if repository not in folder.parents or not _is_llama(folder):
            continue
        files = [path for path in folder.rglob("*") if path.suffix in _WEIGHTS and path.exists()]
        sizes[name] = sum(path.stat().st_size for path in files)
    return sizes


def _is_llama(folder: Path) -> bool:
    """Return whether a snapshot may be loaded: Meta's or GGUF files, or a Llama's config.json."""
    if any(folder.rglob("params.json")) or any(folder.rglob("*.gguf")):
        return True
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and config.get("model_type") == "llama"
