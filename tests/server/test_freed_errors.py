"""Nothing of a request that is refused stays in memory, however it was refused.

pydantic's errors refer to others in a way that the garbage collector does not see.
"""

import asyncio
import gc
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from helpers.bad_requests import BAD_REQUESTS, KEY
from helpers.services import service_of
from llama import SamplingParams
from llama.common.checks import FieldError
from llama.sampling_params import StructuredOutput
from llama.server.app import make_app

MAKERS: dict[str, Callable[[], object]] = {
    "a choice": lambda: StructuredOutput(choice=("x" * 50_000,) * 3),
    "two formats": lambda: StructuredOutput(regex="a", grammar="b"),
    "no format": lambda: StructuredOutput(),
    "a format of parameters": lambda: SamplingParams(structured_output={"regex": "a", "json": "b"}),
    "best of": lambda: SamplingParams(n=3, best_of=2),
    "a type": lambda: SamplingParams(temperature="x"),  # type: ignore[arg-type]
    "a number": lambda: SamplingParams(top_p=2.0),
}


def _num_errors() -> int:
    """Return how many errors of fields are alive."""
    gc.collect()
    return sum(isinstance(each, FieldError) for each in gc.get_objects())


@pytest.mark.parametrize("kind", MAKERS)
def test_the_error_of_a_value_is_freed(kind):
    before = _num_errors()
    for _ in range(20):
        with pytest.raises(FieldError):
            MAKERS[kind]()
    assert _num_errors() <= before + 1


def test_the_errors_of_bad_requests_are_freed(demo):
    """The second time that all bad requests are sent, not one error more is alive than before."""
    cases = [case for case in BAD_REQUESTS if case.method == "POST" and case.has_tools]

    async def send_all(client: httpx.AsyncClient) -> None:
        for case in cases:
            body = case.body if isinstance(case.body, bytes) else json.dumps(case.body).encode()
            headers: Any = {"Content-Type": "application/json", **KEY, **case.headers}
            found = await client.post(case.path, headers=headers, content=body)
            assert found.status_code >= 400

    async def run() -> list[int]:
        service = service_of()
        service.start(demo)
        transport = httpx.ASGITransport(make_app(service, api_keys=["k"]))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            counts = []
            for _ in range(2):
                await send_all(client)
                counts.append(_num_errors())
        service.close()
        return counts

    first, second = asyncio.run(run())
    assert len(cases) > 200 and second <= first + 1, (first, second)
