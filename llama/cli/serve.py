"""`llama serve`: from flags to a server that runs until a signal.

Under torchrun, rank 0 listens and leads; the other ranks follow. With --replicas, several such
servers are started (see llama/cli/replicas).
"""

import argparse
import contextlib
import os
import re
import signal
import socket
import stat
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from llama.api import SIGNALS
from llama.cli.flags import NETWORK_FLAGS, UsageError, extra, usage_errors
from llama.cli.model import check_alone, demo_dir, load, quick_imports
from llama.cli.public_text import read_public_text
from llama.cli.ranks import check_one_group, finish_on_signal, global_rank, say
from llama.cli.replicas.command import serve_replicas
from llama.cli.replicas.supervisor import LISTENING, READY
from llama.cli.resident import LISTENER_FD, InheritedSocket, resident_server
from llama.sampling_params import SamplingParams
from llama.storage.kv_disk import default_folder, make_private, secret_of

_INTERVAL_VARIABLE = "FASTCHAT_WORKER_HEART_BEAT_INTERVAL"  # FastChat's variable
_INTERVAL_S = "45"  # FastChat's default
_BACKLOG = 2048  # connections to a Unix domain socket that may wait to be accepted
_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/,\s]+")  # RFC 6454: scheme, host, port


def serve(options: argparse.Namespace) -> int:
    """Serve until SIGTERM or Ctrl-C, and return the exit code."""
    if options.replicas > 1:
        return serve_replicas(options)
    inherited = None
    if options.background:
        if LISTENER_FD not in os.environ:
            return _start_in_background(options)
        inherited = InheritedSocket(options.idle_minutes)
        if options.kv_cache_dir is None:
            options.kv_cache_dir = _default_pages()
    with SIGNALS.taken_alone(signal.SIGTERM, is_server=True):
        name = options.served_model_name or Path(options.ckpt_dir or demo_dir()).resolve().name
        defaults = _sampling_defaults(options)
        adapters = _adapters(options, name)
        server = None if global_rank() else _listen(options, name, defaults, inherited)
        signals: tuple[int, ...] = (signal.SIGTERM, signal.SIGINT)
        if os.environ.get("WORLD_SIZE", "1") != "1":
            finish_on_signal(options.drain_s)
            signals = ()  # With several ranks, their watch takes the signals.
        try:
            if server is not None:
                server.start()
                url = _url_of(options, server.port, inherited)
                say(f"{LISTENING}{url}; loading {name}")
            llama = load(options, images=not options.text_only)
            remedy = "or start one for each group with --ranks and --replicas"
            check_one_group(llama.model.parallel.data_size, "one server leads one group", remedy)
            for adapter, path in adapters.items():
                llama.load_adapter(adapter, path)
            SIGNALS.has_begun = True  # Every rank sets this.

            def work() -> None:
                assert server is not None
                server.open(llama)
                say(f"{READY}{name} at {url}{'/v1' if url.startswith('http') else ''}")
                is_idle = inherited.is_idle if inherited else lambda: False
                with SIGNALS.taken_alone(*signals):
                    server.serve(options.drain_s, is_idle)

            llama.lead(work)
        finally:
            if server is not None:
                server.stop()
    return 0


def _default_pages() -> str | None:
    """Return the folder of KV pages of a server in the background; None if it cannot be used."""
    folder = default_folder()
    try:
        make_private(folder)
    except OSError as error:
        say(f"KV pages are not kept on disk: {error}")
        return None
    say(f"KV pages, from which prompts can be read, are kept in {folder} (--kv_cache_dir)")
    return str(folder)


def _secret(options: argparse.Namespace, keys: list[str]) -> bytes | None:
    """Return the secret of the roots of tenants, if there are any with pages on disk."""
    if len(keys) < 2 or options.kv_cache_dir in (None, "none"):
        return None
    return secret_of(Path(options.kv_cache_dir).expanduser())


def _sampling_defaults(options: argparse.Namespace) -> dict[str, Any]:
    """Return the sampling parameters that the model's files give for requests that give none.

    This looks for the weights and the tokenizer, so that every rank reports what is wrong alike.

    Raises:
        ValueError: The weights or the tokenizer are missing, or a parameter is out of range.
    """
    with quick_imports():
        from llama.api import find, sampling_defaults
    checkpoint = find(options.ckpt_dir or demo_dir())
    if not options.tokenizer_path:
        checkpoint.tokenizer_path()
    if options.generation_config == "none":
        return {}
    try:
        defaults = sampling_defaults(checkpoint)
        SamplingParams(**defaults)
    except ValueError as error:
        remedy = "correct it, or give --generation_config none"
        raise ValueError(
            f"the sampling defaults of {checkpoint.weights_path}: {error}: {remedy}"
        ) from None
    return defaults


def _adapters(options: argparse.Namespace, model_name: str) -> dict[str, str]:
    """Return the paths of the adapters to load, by their names.

    Raises:
        UsageError: A flag cannot be used.
    """
    folder = options.lora_folder
    if folder is not None and not Path(folder).is_dir():
        raise UsageError(f"--lora_folder {folder} is no folder")
    adapters: dict[str, str] = {}
    for text in options.lora_modules.split(",") if options.lora_modules else ():
        name, _, path = text.partition("=")
        if not name or not path:
            raise UsageError(f"--lora_modules {text}: give NAME=PATH for each adapter")
        if name in adapters or name == model_name:
            raise UsageError(f"--lora_modules {text}: {name!r} is the name of another model")
        adapters[name] = path
    if len(adapters) > options.max_loras:
        raise UsageError(
            f"--lora_modules has {len(adapters)} adapters, more than --max_loras "
            f"{options.max_loras}"
        )
    return adapters


def _start_in_background(options: argparse.Namespace) -> int:
    """Start a server that stays, and print its URL once it is ready."""
    check_alone("--background")
    flags = vars(options)
    for name, default in {**NETWORK_FLAGS, "ranks": 1, "replicas": 1}.items():
        if flags[name] != default:
            raise UsageError(
                "--background serves at a socket of this user, from one process: leave out "
                f"--{name} and LLAMA_{name.upper()}"
            )
    names = flags.keys() - NETWORK_FLAGS.keys() - {"background", "ranks", "replicas"}
    given = {}
    for name in names:
        value = flags[name]
        if value is not None and value is not False:  # 0 is a value.
            given[name] = value
    with resident_server(options, given, is_new=True) as url:
        print(url)
    return 0


def _listen(
    options: argparse.Namespace,
    name: str,
    defaults: dict[str, Any],
    inherited: InheritedSocket | None,
) -> Any:
    """Return a server that has a socket but does not accept connections yet."""
    with extra("serve", "the server"), quick_imports():
        from llama.prompts import ToolFormat
        from llama.server.fetch import host_names
        from llama.server.limits import Limits
        from llama.server.log import log_to_stderr
        from llama.server.process import Server
        from llama.server.service import Service

    names = [each.value for each in ToolFormat]
    if options.tool_format not in (None, *names):
        raise UsageError(f"--tool_format {options.tool_format} must be one of {', '.join(names)}")
    with usage_errors(["image_hosts"]):
        host_names(options.image_hosts)
    given = vars(options)
    limits = Limits(**{x.name: given[x.name] for x in fields(Limits) if x.name in given})
    tool_format = None if options.tool_format is None else ToolFormat(options.tool_format)
    model: dict[str, Any] = {
        "given_format": tool_format,
        "reasoning_field": options.reasoning_field,
        "sampling_defaults": defaults,
        "lora_folder": _lora_folder(options),
        "public_text": read_public_text(options),
    }
    keys = _keys(options)
    secret = _secret(options, keys)
    app: dict[str, Any] = {
        "api_keys": keys,
        "metrics_keys": _metrics_keys(options),
        "allowed_origins": _origins(options),
        "lenient": options.lenient,
    }
    fastchat = _fastchat(options)
    num_processes = _num_api_processes(options)
    log_to_stderr()
    network: dict[str, Any] = {"host": options.host, "port": options.port}
    if num_processes:
        from llama.server.api_options import ApiOptions
        from llama.server.split import SplitServer

        shared: dict[str, Any] = {} if secret is None else {"secret": secret.hex()}
        api_options = ApiOptions(name=name, limits=limits, **model, **app, **shared)
        listener = _listener(options, inherited)
        return SplitServer(api_options, num_processes, **network, listener=listener)
    service = Service(limits)
    service.add(name, **model)
    listener = _listener(options, inherited)
    return Server(service, **network, **app, secret=secret, host_routes=fastchat, listener=listener)


def _num_api_processes(options: argparse.Namespace) -> int:
    """Return the number of processes that answer HTTP; 0 stands for the one of the model.

    On a CPU, they would take time from a step, which has few tokens there.
    """
    count: int | None = options.api_processes
    if options.fastchat_controller is not None:
        if count:
            raise UsageError(
                f"--api_processes {count}: a worker of FastChat has one process: leave out "
                "--api_processes or --fastchat_controller"
            )
        return 0
    if count is not None:
        return count
    if not _may_have_gpu():
        return 0
    from llama.common.device import pick_device

    return int(pick_device(options.device).type == "cuda")


def _may_have_gpu() -> bool:
    """Return whether a driver of GPUs is loaded; else torch need not be imported to find one."""
    return any(os.path.exists(path) for path in ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd"))


def _lora_folder(options: argparse.Namespace) -> Path | None:
    """Return the folder from which clients can load adapters."""
    return None if options.lora_folder is None else Path(options.lora_folder)


def _listener(
    options: argparse.Namespace, inherited: InheritedSocket | None
) -> socket.socket | None:
    """Return the socket to listen on, or None for a socket at the host and port."""
    if inherited is not None:
        return inherited.socket
    return None if options.uds is None else unix_listener(options.uds)


def unix_listener(path: str) -> socket.socket:
    """Listen on a Unix domain socket, which replaces one on which nobody listens any more.

    Raises:
        OSError: The path is that of something else, or a server listens there.
    """
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise FileExistsError(f"--uds {path} is no socket: give a path that does not exist")
        with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(ConnectionRefusedError):
            probe.connect(path)
            raise OSError(f"--uds {path}: another server listens there")
        os.unlink(path)
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(path)
        os.chmod(path, 0o600)  # Nobody can connect before the next call.
        listener.listen(_BACKLOG)
    except OSError as e:
        listener.close()
        raise OSError(f"--uds {path}: {e.strerror or e}") from None
    return listener


def _url_of(options: argparse.Namespace, port: int, inherited: InheritedSocket | None) -> str:
    if inherited is not None:
        return inherited.url
    return _url(options.host, port) if options.uds is None else f"unix:{options.uds}"


def _origins(options: argparse.Namespace) -> list[str]:
    origins: list[str] = options.allow_origin.split(",") if options.allow_origin else []
    for origin in origins:
        if not _ORIGIN.fullmatch(origin):
            raise UsageError(
                f"--allow_origin {origin} is not an origin: give * for all pages, or an origin "
                "such as http://localhost:3000"
            )
    return origins


def _fastchat(options: argparse.Namespace) -> Callable[[Any, int], Any] | None:
    """Return a function that makes the routes of a FastChat worker, if a controller is given."""
    text = os.environ.get(_INTERVAL_VARIABLE, _INTERVAL_S)
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"{_INTERVAL_VARIABLE}={text!r} must be a whole number of seconds")
    for name in ("fastchat_controller", "worker_address"):
        url = getattr(options, name) or "http://"
        if not url.startswith(("http://", "https://")):
            raise UsageError(f"--{name} {url} must begin with http:// or https://")
    if options.fastchat_controller is None:
        return None
    if options.uds is not None and not options.worker_address:
        raise UsageError(
            "--uds is no address that FastChat reaches: give the one of the proxy before it, as in "
            "--worker_address http://10.0.0.2:8000"
        )
    if options.host in ("", "0.0.0.0", "::") and not options.worker_address:
        raise UsageError(
            f"--host {options.host} stands for every address of this machine: give the one by "
            "which FastChat reaches it, as in --worker_address http://10.0.0.2:8000"
        )
    from llama.compat.fastchat import FastChatWorker

    def routes(service: Any, port: int) -> Any:
        address = (options.worker_address or _url(options.host, port)).rstrip("/")
        controller = options.fastchat_controller.rstrip("/")
        return FastChatWorker(service, controller, address, int(text)).router()

    return routes


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _keys(options: argparse.Namespace) -> list[str]:
    """Return the key of the flag and those of the file, which has one key per line."""
    keys = [options.api_key] if options.api_key else []
    if options.api_key_file:
        keys += _keys_in(options.api_key_file)
    return _sendable(keys, "--api_key and --api_key_file")


def _metrics_keys(options: argparse.Namespace) -> list[str]:
    """Return the keys of the operator's paths."""
    if not options.metrics_key_file:
        return []
    return _sendable(_keys_in(options.metrics_key_file), "--metrics_key_file")


def _keys_in(path: str) -> list[str]:
    """Return the keys of a file, which has one per line."""
    lines = Path(path).read_text().splitlines()
    keys = [line.strip() for line in lines if line.strip()]
    if not keys:
        raise UsageError(f"{path} has no key: write one key per line")
    return keys


def _sendable(keys: list[str], flags: str) -> list[str]:
    """Return the keys if a client can send them; `flags` are those that gave them."""
    for key in keys:
        if not (key.isascii() and key.isprintable() and key == key.strip()):
            raise UsageError(
                "a key must be printable ASCII without blanks at its ends, since no client can "
                f"send another: see {flags}"
            )
    return keys
