"""A hub of models on loopback: the routes that huggingface_hub uses to fetch files.

Input: the files of one repository. Output: its address. The hub can be gated, refuse a token, and
cut a connection once or stall it. It records the requests.
"""

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "c0ffee" * 6 + "c0ff"


@dataclass
class Hub:
    repo: str
    files: dict[str, bytes]
    token: str | None = None  # the token that its files require
    message: str = "Invalid credentials in Authorization header"
    commit: str = COMMIT
    commit_of_main: str = COMMIT
    # further fields of each file in the tree of a commit
    more_of_tree: dict[str, object] = field(default_factory=dict)
    # name and value of a header of every file, in place of the usual one
    header: tuple[str, str] = ("", "")
    # file -> what is sent instead of the listed content, with headers that fit it
    sent_instead: dict[str, bytes] = field(default_factory=dict)
    # file -> bytes sent before the connection is closed
    cut: dict[str, int] = field(default_factory=dict)
    # file -> bytes sent before the connection stalls
    stalled: dict[str, int] = field(default_factory=dict)
    ended: threading.Event = field(default_factory=threading.Event)
    # file and the offset of the first byte sent
    sent: list[tuple[str, int]] = field(default_factory=list)
    url: str = ""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        hub, path = self.hub, self.path.partition("?")[0]
        given = self.headers.get("Authorization", "Bearer ").removeprefix("Bearer ")
        if given not in ("", hub.token):
            self._refuse(401, "", hub.message)
        elif path in (f"/api/models/{hub.repo}", f"/api/models/{hub.repo}/revision/main"):
            listed = [_listed(name, data) for name, data in hub.files.items()]
            commit = hub.commit_of_main if path.endswith("/main") else hub.commit
            self._answer(json.dumps({"id": hub.repo, "sha": commit, "siblings": listed}).encode())
        elif path == f"/api/models/{hub.repo}/tree/{COMMIT}":
            self._answer(json.dumps([
                {"type": "file", "path": name, "size": len(data), "oid": _oid(name, data)}
                | hub.more_of_tree
                for name, data in hub.files.items()
            ]).encode())  # fmt: skip
        elif path.startswith("/api/"):
            self._refuse(401, "RepoNotFound", "Repository not found")
        elif hub.token != given and hub.token is not None:
            self._refuse(401, "GatedRepo", f"Access to model {hub.repo} is restricted.")
        else:
            self._file(path.removeprefix(f"/{hub.repo}/resolve/{COMMIT}/"))

    do_HEAD = do_GET

    def _file(self, name: str) -> None:
        first = int(self.headers.get("Range", "bytes=0-")[6:].rstrip("-"))
        headers = {"ETag": f'"{_oid(name, self.hub.files[name])}"', "X-Repo-Commit": COMMIT}
        if self.hub.header[0]:
            headers[self.hub.header[0]] = self.hub.header[1]
        data = self.hub.sent_instead.get(name, self.hub.files[name])
        cut = None
        if self.command == "GET":
            self.hub.sent.append((name, first))
            cut = self.hub.cut.pop(name, self.hub.stalled.get(name))
            headers["Content-Range"] = f"bytes {first}-{len(data) - 1}/{len(data)}"
        self._answer(data[first:], 206 if first else 200, cut, headers)
        if cut is not None and name in self.hub.stalled:
            self.hub.ended.wait(60)

    def _answer(
        self, data: bytes, status: int = 200, cut: int | None = None, headers: dict | None = None
    ) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data[:cut])
        self.close_connection = cut is not None

    def _refuse(self, status: int, code: str, message: str) -> None:
        self._answer(b"", status, headers={"X-Error-Code": code, "X-Error-Message": message})


def _listed(name: str, data: bytes) -> dict[str, object]:
    """Return the entry of a file in the hub's listing."""
    entry: dict[str, object] = {"rfilename": name, "size": len(data), "blobId": _git_oid(data)}
    if _is_large(name):
        entry["lfs"] = {"sha256": _oid(name, data), "size": len(data), "pointerSize": 134}
    return entry


def _is_large(name: str) -> bool:
    """Return whether the hub stores a file by Git LFS."""
    return name.endswith((".safetensors", ".pth", ".gguf", "tokenizer.json", "tokenizer.model"))


def _oid(name: str, data: bytes) -> str:
    """Return the name of a file in the cache."""
    return hashlib.sha256(data).hexdigest() if _is_large(name) else _git_oid(data)


def _git_oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@contextlib.contextmanager
def run_hub(hub: Hub) -> Iterator[Hub]:
    handler = type("Handler", (_Handler,), {"hub": hub})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_address[1]}"
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield hub
        hub.ended.set()
        server.shutdown()
