"""The key that a path needs is decided by the route that answers, however the path is spelt."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi import APIRouter
from starlette.testclient import TestClient

from helpers.services import service_of
from llama.server.app import make_app

OPEN = {"/", "/health", "/ready", "/of_host/{name}"}
OPERATOR = {"/metrics", "/load"}
CONTROL = ["%0a", "%0d", "%00", "%09", "%1f", "%7f", "%c2%85"]
SPELT = ["/{}/", "//{}", "/./{}", "/x/../{}", "/%2f{}", "/{}%20", "/{};", "/{}%2f", "/%6d%65trics"]


def _host_routes() -> APIRouter:
    router = APIRouter()

    @router.get("/of_host/{name}")
    async def of_host(name: str) -> str:
        return name

    return router


@pytest.fixture(scope="module")
def app(demo) -> Iterator[Any]:
    service = service_of()
    service.start(demo)
    yield make_app(service, api_keys=["a", "b"], metrics_keys=["m"], host_routes=_host_routes())
    service.close()


@pytest.fixture(scope="module")
def client(app) -> Iterator[TestClient]:
    with TestClient(app, base_url="http://localhost", follow_redirects=False) as made:
        yield made


def _key(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"} if key else {}


@pytest.mark.parametrize("end", CONTROL)
def test_a_control_character_in_a_path_is_refused(client, end):
    for path in ("/metrics", "/load", "/health", "/v1/models", "/v1/models/demo", "/nowhere"):
        for key in ("", "a", "m"):
            found = client.get(f"{path}{end}", headers=_key(key))
            assert found.status_code == 400, (path, key, found.text)
            assert "control character" in found.json()["error"]["message"]


@pytest.mark.parametrize("spelt", SPELT)
@pytest.mark.parametrize("name", ["metrics", "load"])
def test_no_spelling_of_an_operators_path_shows_it_to_a_tenant(client, name, spelt):
    path = spelt.format(name)
    for key in ("", "a"):
        found = client.get(f"http://localhost{path}", headers=_key(key))
        assert found.status_code in (307, 401, 403, 404), (path, key, found.text)
        assert "llama_" not in found.text and "server_load" not in found.text
    for plain in OPERATOR:
        assert client.get(plain, headers=_key("m")).status_code == 200
        assert client.get(plain, headers=_key("a")).status_code == 403


def test_each_route_needs_the_key_that_its_kind_needs(app, client):
    num_checked = 0
    for route in app.routes:
        path = re.sub(r"\{.*?\}", "x", route.path)
        for method in route.methods - {"HEAD"}:
            without = client.request(method, path)
            with_key = client.request(method, path, headers=_key("a"))
            assert (without.status_code == 401) == (route.path not in OPEN), (method, path)
            assert (with_key.status_code == 403) == (route.path in OPERATOR), (method, path)
            num_checked += 1
    assert num_checked > 25


@pytest.mark.parametrize("path", ["/health/", "/v1/models/demo/", "/api/tags/", "/v1/embeddings/"])
def test_a_slash_at_the_end_redirects_nowhere(client, path):
    """Behind a proxy of TLS, the address of a redirect would not be the client's."""
    headers = {**_key("a"), "x-forwarded-proto": "https"}
    for method in ("GET", "POST"):
        assert client.request(method, path, headers=headers).status_code in (200, 404, 405)


@pytest.mark.parametrize("encoding", ["gzip", "br", "zstd", "deflate, gzip"])
def test_a_compressed_body_is_refused(client, encoding):
    for path in ("/v1/completions", "/api/generate", "/v1/messages"):
        headers = {**_key("a"), "content-encoding": encoding, "content-type": "application/json"}
        found = client.post(path, content=b"\x1f\x8b", headers=headers)
        assert (found.status_code, "Content-Encoding" in found.text) == (415, True)
        plain = client.post(
            path, content=b"{}", headers={**headers, "content-encoding": "identity"}
        )
        assert plain.status_code in (200, 400)


def test_a_request_without_a_host_header_passes(client):
    """HAProxy's check of health is such a request."""
    for headers, status in (({}, 200), ({"host": "evil.example"}, 400)):
        request = client.build_request("GET", "/health")
        del request.headers["host"]
        request.headers.update(headers)
        assert client.send(request).status_code == status
