"""The route /markdown: a text of an answer as trees of elements, which the page shows.

In: a text. Out: its blocks as trees, or an `ApiError` for a text that takes too long. The work is
done in a process with limits, because the text may be hostile; see `page/markdown.py`.
"""

import functools
from typing import Annotated, ClassVar

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from llama.common.confined import Confined, ConfinedError, LimitError
from llama.prompts.fields import Fields
from llama.server.encoding import to_json
from llama.server.errors import ApiError
from llama.server.exchange import body_router
from llama.server.worker_pool import PoolBusyError, WorkerPool

MARKDOWN_URL = "/markdown"
_MAX_TEXT = 1 << 16  # characters; the page sends longer texts in parts
_CPU_S = 1.0
_MEMORY_MB = 256
_WAIT_S = 20.0  # longer than a second of processor time may take where others compute
_ROUTE_S = _WAIT_S + 5.0  # the process says what is wrong with a text, and ends first
_MAX_WAITING = 64  # texts that wait for the process


class MarkdownBody(Fields):
    """The body of /markdown."""

    unknown_message: ClassVar[str] = "{names} cannot be used in /markdown: leave it out"

    text: Annotated[str, Field(max_length=_MAX_TEXT)]


def routes() -> APIRouter:
    """Return the route of Markdown."""
    router = body_router()
    process = Confined(
        "llama.server.page.markdown", cpu_s=_CPU_S, memory_mb=_MEMORY_MB, wait_s=_WAIT_S
    )
    pool = WorkerPool("llama-page", 1, _MAX_WAITING)

    def rendered(text: str) -> bytes:
        return to_json({"blocks": process.call(text)})

    @router.post(MARKDOWN_URL)
    async def markdown(body: MarkdownBody, http: Request) -> Response:
        """Return the blocks of a text as [end, nodes], with ends in units of UTF-16."""
        try:
            content = await pool.run(functools.partial(rendered, body.text), _ROUTE_S)
        except (LimitError, ConfinedError) as error:
            raise ApiError(
                400, f"text cannot be shown as Markdown: {error}", param="text"
            ) from None
        except (PoolBusyError, TimeoutError):
            raise ApiError(503, "the server is drawing other texts: try again") from None
        return Response(content, media_type="application/json")

    return router
