"""The table of bad requests: what is wrong with each, and what its answer must be.

Each row has one fault. test_bad_requests.py reads the table, and so does loop_times.py, which
measures how long each row blocks the event loop. The server has the demo model, a context of 512
tokens, the key "k", and tools in the format of Llama 3.1, unless a row says that its model has
none.
"""

from typing import Any, NamedTuple

from helpers.bad_bodies import (
    CALLED,
    FIELD,
    FUNCTION,
    IN_A_CHAT,
    IN_A_COUNT,
    IN_COMPLETIONS,
    IN_EMBEDDINGS,
    IN_MESSAGES,
    IN_RESPONSES,
    INPUT,
    OF_A_TEXT,
    OF_IDS,
    OF_STRUCTURED_OUTPUTS,
    OF_TOOLS,
    TURNS,
    USED,
    WEATHER,
    Faults,
)  # fmt: skip

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MESSAGES, COUNT, RESPONSES = "/v1/messages", "/v1/messages/count_tokens", "/v1/responses"
_ASKED = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
EMBEDDINGS = "/v1/embeddings"
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
KEY = {"Authorization": "Bearer k"}


class BadRequest(NamedTuple):
    """One request and its expected answer.

    Attributes:
        path: the route.
        body: JSON, or bytes that are sent unchanged.
        status: the expected status code.
        param: of the error object; None for Anthropic's errors, which have none.
        message: text that the error message contains.
        headers: additions to the key and the content type, or replacements for them.
        method: the HTTP method.
        has_tools: whether the model has a tool format.
    """

    path: str
    body: Any
    status: int
    param: str | None
    message: str
    headers: dict[str, str | bytes] = {}  # noqa: RUF012
    method: str = "POST"
    has_tools: bool = True

    @property
    def name(self) -> str:
        body = self.body if isinstance(self.body, bytes) else repr(self.body)
        return f"{self.method} {self.path[:40]} {body[:60]!r}: {self.message}"


def rows(path: str, good: dict[str, Any], faults: Faults) -> list[BadRequest]:
    """Return a request for each fault, with the good fields alongside the faulty ones."""
    return [
        BadRequest(path, good | fields, 400, param, message) for fields, param, message in faults
    ]


GATE = [
    BadRequest(TEXT, {"prompt": "x"}, 401, None, "give the server's key", {"Authorization": ""}),
    BadRequest(CHAT, {"messages": TURNS}, 401, None, "key", {"Authorization": "Bearer K"}),
    BadRequest(RESPONSES, {"input": "x"}, 401, None, "key", {"Authorization": "Basic k"}),
    BadRequest(TOKENIZE, {"prompt": "x"}, 401, None, "key", {"Authorization": "Bearer kk"}),
    BadRequest(MESSAGES, {}, 401, None, "key", {"Authorization": b"Bearer \xff\xe9"}),
    BadRequest("/v1/models", None, 401, None, "key", {"Authorization": ""}, "GET"),
    BadRequest("/metrics", None, 401, None, "key", {"Authorization": ""}, "GET"),
    BadRequest(TEXT, {"prompt": "x"}, 400, None, "the Host header", {"Host": "evil.example"}),
    BadRequest(TEXT, {"prompt": "x"}, 400, None, "the Host header", {"Host": "localhost:1@x.org"}),
    BadRequest(MESSAGES, {}, 400, None, "the Host header", {"Host": "127.0.0.1.evil.example"}),
    BadRequest("/health", None, 400, None, "the Host header", {"Host": "x"}, "GET"),
    BadRequest(TEXT, {"prompt": "x"}, 431, None, "more than 65536 bytes", {"X": "a" * 70_000}),
    BadRequest("/nowhere", {}, 404, None, "POST /nowhere: Not Found"),
    *(
        row
        for kind in (["x"], {"a": 1}, 5, [])  # They are no text, and some have no hash.
        for row in (
            BadRequest(MESSAGES, {**_ASKED, "thinking": {"type": kind}}, 400, "thinking", ".type"),
            BadRequest(
                CHAT,
                {"messages": [{"role": "user", "content": [{"type": kind, "text": "x"}]}]},
                400,
                "messages",
                "messages[0].content",
            ),
        )
    ),
    BadRequest("/" + "%01" * 3000, None, 400, None, "control character", {}, "GET"),
    BadRequest(f"{MESSAGES}/batches", {}, 404, None, "Not Found"),
    BadRequest("/health", {}, 405, None, "Method Not Allowed"),
    BadRequest(CHAT, None, 405, None, "Method Not Allowed", {}, "GET"),
    BadRequest(MESSAGES, None, 405, None, "Method Not Allowed", {}, "DELETE"),
    BadRequest(TEXT, {"prompt": "x"}, 400, None, "Content-Type", {"Content-Type": "text/plain"}),
    BadRequest(CHAT, b"x=1", 400, None, "Content-Type",
               {"Content-Type": "application/x-www-form-urlencoded"}),
    BadRequest(MESSAGES, {"messages": TURNS}, 400, None, "Content-Type", {"Content-Type": ""}),
    BadRequest(TEXT, b"a" * (8 * 2**20 + 1), 413, None, "more than 8388608 bytes"),
    BadRequest(TEXT, b"[" * 100_001, 413, None, "more than 100000 times '['"),
    BadRequest(MESSAGES, b"{" * 100_001, 413, None, "more than 100000 times '{'"),
    BadRequest(TEXT, b'{"prompt": [7' + b",7" * 1_000_001, 413, None, "1000000 times ','"),
    BadRequest(CHAT, b'{"a": 1' + b',"":1' * 100_001, 413, None, "100000 times ':'"),
    BadRequest(TEXT, b"", 400, None, "not JSON: Expecting value"),
    BadRequest(CHAT, b"{", 400, None, "not JSON"),
    BadRequest(MESSAGES, b"{'messages': []}", 400, None, "not JSON: Expecting property name"),
    BadRequest(TOKENIZE, b'{"prompt": "x"} {}', 400, None, "not JSON: Extra data"),
    BadRequest(TEXT, b'{"prompt": "\xff"}', 400, None, "not JSON: 'utf-8' codec"),
    BadRequest(TEXT, b'{"prompt": "x", "temperature": NaN}', 400, None, "JSON has no NaN"),
    BadRequest(TEXT, b'{"prompt": "x", "top_p": -Infinity}', 400, None, "JSON has no -Infinity"),
    BadRequest(RESPONSES, b"[" * 100_000, 400, None, "not JSON: maximum recursion"),
    BadRequest(CHAT, b'{"a":' * 99_000, 400, None, "not JSON: maximum recursion"),
    BadRequest(TEXT, b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}", 400, None, "5000 digits"),
    BadRequest(DETOKENIZE, b'{"tokens": [' + b"9" * 4000 + b"]}", 400, "tokens", "tokens[0]=999"),
    BadRequest(TEXT, b'{"prompt": "x", "temperature": 1e999}', 400, "temperature", "=inf must"),
    BadRequest(TEXT, b'{"prompt": "x", "structured_outputs": {"json": {"const": -1e999}}}', 400,
               FIELD, "structured_outputs.json is not JSON"),
    BadRequest(CHAT, b'{"messages": [{"role": "user", "content": "x"}], "tools": [{"type": '
               b'"function", "function": {"name": "f", "parameters": {"default": 1e999}}}]}', 400,
               "tools", "a number is too large"),
    *(BadRequest(path, body, 400, None, "body must be an object") for path, body in [
        (TEXT, []), (CHAT, "x"), (MESSAGES, None), (COUNT, 7), (RESPONSES, True), (TOKENIZE, []),
        (DETOKENIZE, [1])]),
]  # fmt: skip

TOO_LONG = [
    BadRequest(TOKENIZE, {"prompt": "x" * 1_000_001}, 413, "prompt", "more than 1000000 char"),
    BadRequest(TOKENIZE, {"messages": [{"role": "user", "content": "x" * 1_000_000}]}, 413,
               "messages", "more than 1000000 tokens"),
]  # fmt: skip
WITHOUT_TOOLS: list[tuple[str, str, dict[str, Any], str | None, str]] = [
    (CHAT, "messages", {"tools": [WEATHER]}, "tools", "tools cannot be used with this model"),
    (RESPONSES, "input", {"tools": [FUNCTION]}, "tools", "cannot be used with this model"),
    (MESSAGES, "messages", {"tools": [INPUT], "max_tokens": 1}, None, "tools cannot be used"),
    (COUNT, "messages", {"tools": [INPUT]}, None, "tools cannot be used"),
    (TOKENIZE, "messages", {"tools": [WEATHER]}, "tools", "cannot be used with this model"),
    (RESPONSES, "input", {"input": [CALLED]}, "input", "input[0]: tool_calls cannot be used"),
    (MESSAGES, "messages", {"messages": [*TURNS, USED, *TURNS], "max_tokens": 1}, None,
     "messages[1]: tool_calls cannot be used"),
]  # fmt: skip
OF_A_MODEL_WITHOUT_TOOLS = [
    BadRequest(path, {field: TURNS, **fields}, 400, param, message, has_tools=False)
    for path, field, fields, param, message in WITHOUT_TOOLS
]

BAD_REQUESTS = [
    *GATE,
    *rows(TEXT, {"prompt": "x", "max_tokens": 2}, IN_COMPLETIONS + OF_STRUCTURED_OUTPUTS),
    *rows(CHAT, {"messages": TURNS, "max_tokens": 2}, IN_A_CHAT),
    *rows(CHAT, {"messages": TURNS, "max_tokens": 2, "tools": [WEATHER]}, OF_TOOLS),
    *rows(RESPONSES, {"input": "x", "max_output_tokens": 5}, IN_RESPONSES),
    *rows(MESSAGES, {"messages": TURNS, "max_tokens": 5}, IN_MESSAGES),
    *rows(COUNT, {"messages": TURNS}, IN_A_COUNT),
    *rows(TOKENIZE, {}, OF_A_TEXT),
    *rows(DETOKENIZE, {}, OF_IDS),
    *rows(EMBEDDINGS, {"input": "x", "pooling": "mean"}, IN_EMBEDDINGS),
    *TOO_LONG,
    *OF_A_MODEL_WITHOUT_TOOLS,
]
