"""HTTP's protocol for uvicorn, with a limit for what comes before a body.

In: the bytes of a connection. Out: uvicorn's protocol class. uvicorn limits the headers where h11
reads them, and not where httptools does: a client could send them without end, before any check.
"""

import asyncio

from llama.server.encoding import to_json
from llama.server.errors import ApiError

MAX_HEADER_BYTES = 64 * 1024


def too_large() -> ApiError:
    return ApiError(431, f"the headers have more than {MAX_HEADER_BYTES} bytes: send fewer")


def bounded_protocol() -> type[asyncio.Protocol] | str:
    """The class, or uvicorn's name of h11 where httptools is not installed."""
    try:
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
    except ImportError:
        return "h11"

    class BoundedProtocol(HttpToolsProtocol):
        """Ends a connection whose headers go on beyond the limit. Headers that come to their end in
        fewer reads are counted by `AuthAndLimits`."""

        _is_in_head = False
        _num_head_bytes = 0

        def on_message_begin(self) -> None:
            self._is_in_head, self._num_head_bytes = True, 0
            super().on_message_begin()

        def on_headers_complete(self) -> None:
            self._is_in_head = False
            super().on_headers_complete()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self._is_in_head and not self.transport.is_closing():
                self._num_head_bytes += len(data)
                if self._num_head_bytes > MAX_HEADER_BYTES:
                    self.transport.write(_response(too_large()))
                    self.transport.close()

    return BoundedProtocol


def _response(error: ApiError) -> bytes:
    """The last bytes of a connection; its path is not known for sure, so the form is OpenAI's."""
    body = to_json(error.body())
    head = (
        f"HTTP/1.1 {error.status} Request Header Fields Too Large\r\n"
        "content-type: application/json\r\nconnection: close\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body
