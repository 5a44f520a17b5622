"""schemathesis checks the server against /openapi.json with random requests, good and bad.

A bad request gets 400 with its API's error object; a valid one may also get 400, where the schema
cannot express what the engine needs. No answer is a 5xx, and the server answers after all of them.
"""

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error

from helpers.server import RunningServer
from helpers.web import web

CHOICES = {"max_tokens": 2, "n": 1, "best_of": None, "max_completion_tokens": None}
FEW_TOKENS: dict[str, dict[str, Any]] = {
    "/v1/completions": CHOICES,
    "/v1/chat/completions": CHOICES,
}
FEW_TOKENS |= {"/api/chat": {"options": {"num_predict": 2}}}
FEW_TOKENS |= {"/api/generate": {"options": {"num_predict": 2}}}
FEW_TOKENS |= {"/v1/messages": {"max_tokens": 2}, "/v1/responses": {"max_output_tokens": 2}}


@pytest.fixture(scope="module")
def document(server) -> schemathesis.BaseSchema:
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json")


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_no_request_is_an_error_of_the_server(server: RunningServer, document, mode):
    checked = 0
    for result in document.get_all_operations():
        operation = result.ok()
        if operation.method != "post":
            continue

        @settings(
            max_examples=6, deadline=None, database=None, derandomize=True,
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        def check(case):
            nonlocal checked
            checked += 1
            if mode is GenerationMode.POSITIVE:
                case.body |= FEW_TOKENS.get(case.operation.path, {})
            response = case.call(timeout=60)
            case.validate_response(response, checks=[not_a_server_error])
            assert len(response.content) < 4096 or response.status_code == 200
            if response.status_code != 200:
                error = response.json()["error"]
                is_ollama = case.operation.path.startswith("/api/")
                assert isinstance(error, str) if is_ollama else error["type"]
                is_anthropic = case.operation.path.startswith("/v1/messages")
                assert (response.json().get("type") == "error") == is_anthropic
            if mode is GenerationMode.NEGATIVE:
                assert response.status_code in (400, 404, 405, 422), case.body

        strategy = operation.as_strategy(generation_mode=mode)
        given(case=strategy)(check)()
    assert checked > 40
    good = web.post(f"{server.url}/v1/completions", json={"prompt": "x", "max_tokens": 2})
    assert good.status_code == 200
