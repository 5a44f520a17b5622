"""Grammars that never finish compiling have threads of their own and delay no other request."""

import asyncio
import contextlib
import os
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from helpers.services import service_of
from llama.common.checks import FieldError
from llama.requests.grammar import GrammarCompiler
from llama.server import workers
from llama.server.app import make_app
from llama.server.limits import Limits

SLOW = {"structured_outputs": {"regex": "slow"}}
QUICK = {"structured_outputs": {"regex": "yes|no"}}
NUM_SLOW = 6 + (os.cpu_count() or 1)  # more than the threads of asyncio's default executor
LIMIT_S = 60.0  # generous: distinguishes a hang from an answer


@pytest.fixture
def is_released(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Make the compilation of the regex "slow" last until the event is set."""
    event = threading.Event()
    matcher = GrammarCompiler.matcher

    def wait(self: GrammarCompiler, form: Any, root: bytes) -> Any:
        if form.regex == "slow":
            event.wait()
            raise FieldError("structured_output", "structured_output was released")
        return matcher(self, form, root)

    monkeypatch.setattr(GrammarCompiler, "matcher", wait)
    yield event
    event.set()


async def _ask(client: httpx.AsyncClient, **changes: Any) -> httpx.Response:
    body = {"prompt": "Once", "max_tokens": 1, **changes}
    return await asyncio.wait_for(client.post("/v1/completions", json=body), LIMIT_S)


def _error(response: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = response.json()["error"]
    return error


@pytest.mark.parametrize("is_long", [False, True])
def test_slow_grammars_hold_up_no_other_request(demo, is_released, monkeypatch, is_long):
    """Slow grammars delay no other request.

    With six or more grammars that never finish, a request without a grammar is answered, small or
    large. The compiling requests get 400 and others 503; later grammars compile as usual.
    """
    monkeypatch.setattr(workers, "PREPARE_S", 0.3)

    async def run() -> None:
        service = service_of()
        service.start(demo)
        transport = httpx.ASGITransport(make_app(service))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            try:
                slow = await asyncio.gather(*[_ask(client, **SLOW) for _ in range(NUM_SLOW)])
                prompt = "a cat " * 3000 if is_long else "Once"
                small = await _ask(client, prompt=prompt)
                late = await _ask(client, **QUICK)
                is_released.set()
                quick = await _ask(client, **QUICK)
            finally:
                is_released.set()
                service.close()
        if is_long:
            assert (
                small.status_code == 400
                and "maximum context length is 512" in _error(small)["message"]
            )
        else:
            assert small.status_code == 200
        began = [response for response in slow if response.status_code == 400]
        refused = [response for response in slow if response.status_code == 503]
        assert 0 < len(began) < len(slow) and len(began) + len(refused) == len(slow)
        for response in began:
            assert "to prepare" in _error(response)["message"]
            assert _error(response)["param"] == "structured_outputs"
        for response in [*refused, late]:
            assert response.status_code == 503 and "try again" in _error(response)["message"]
            assert int(response.headers["Retry-After"]) > 0
        assert quick.status_code == 200
        assert service.metrics.refused._value.get() == len(refused) + 1

    asyncio.run(run())


def test_grammars_beyond_the_queue_are_refused_at_once(demo, is_released):
    async def run() -> None:
        service = service_of(limits=Limits(max_queue=2))
        service.start(demo)
        transport = httpx.ASGITransport(make_app(service))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            try:
                num_held = workers.NUM_THREADS // 2 + 2  # one sender has half of the threads
                held = [asyncio.create_task(_ask(client, **SLOW)) for _ in range(num_held + 1)]
                done, waiting = await asyncio.wait(held, return_when=asyncio.FIRST_COMPLETED)
                (refused,) = [task.result() for task in done]
                assert refused.status_code == 503 and len(waiting) == num_held
                is_released.set()
                for response in await asyncio.gather(*waiting):
                    assert response.status_code == 400
                    assert "released" in _error(response)["message"]
            finally:
                is_released.set()
                service.close()

    asyncio.run(run())


@pytest.mark.parametrize("late", [QUICK, {"structured_outputs": {"choice": ["yes", "no"]}}])
@pytest.mark.parametrize("num_slow", [workers.NUM_THREADS, 30])
def test_slow_grammars_of_one_sender_leave_threads_to_others(demo, is_released, late, num_slow):
    """However many grammars one address has compiled, those of others are compiled meanwhile."""

    async def run() -> None:
        service = service_of()
        service.start(demo)
        app = make_app(service)
        async with contextlib.AsyncExitStack() as stack:
            first, second = [
                await stack.enter_async_context(
                    httpx.AsyncClient(
                        transport=httpx.ASGITransport(app, client=(address, 1)),
                        base_url="http://localhost",
                    )
                )
                for address in ("192.0.2.1", "192.0.2.2")
            ]
            slow = [asyncio.create_task(_ask(first, **SLOW)) for _ in range(num_slow)]
            try:
                await asyncio.sleep(0.1)
                assert (await _ask(second, **late)).status_code == 200
                assert not any(task.done() for task in slow)
            finally:
                is_released.set()
                await asyncio.gather(*slow, return_exceptions=True)
                service.close()

    asyncio.run(run())
