"""What every ASGI app here does (ASGI 3): it stops computing for a client that has left.

In: the work for one request, and the channel on which the server tells that the client leaves. Out:
the work's result. It needs no web framework.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")
Receive = Callable[[], Awaitable[Any]]  # the next message of the client


class ClientLeft(Exception):
    """The client closed the connection before its response was sent."""


async def unless_client_leaves(work: Coroutine[Any, Any, _T], receive: Receive) -> _T:
    """The result of the work; `ClientLeft`, and the work is cancelled, if the client leaves.

    The request's body must have been read.
    """
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_disconnect(receive))
    try:
        await asyncio.wait([working, leaving], return_when=asyncio.FIRST_COMPLETED)
    finally:
        has_left = not working.done()
        leaving.cancel()
        if has_left:
            working.cancel()
        await asyncio.wait([working, leaving])
    if has_left:
        if not working.cancelled():
            working.exception()  # nobody is there to hear of it
        raise ClientLeft
    return working.result()


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
