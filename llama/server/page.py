"""The route `/`: one page for people, with a chat, a completion and the figures of the engine.

In: page.html, which holds its own style and script. Out: that file, with headers that let a browser
run nothing else. It knows neither the model nor the service: the page asks the other routes.
"""

import base64
import hashlib
import re
from importlib.resources import files

from fastapi import APIRouter
from starlette.responses import Response


def routes() -> APIRouter:
    page = files("llama.server").joinpath("page.html").read_text(encoding="utf-8")
    headers = {
        "Content-Security-Policy": content_security_policy(page),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    router = APIRouter()

    @router.get("/", include_in_schema=False)
    async def index() -> Response:
        return Response(page, media_type="text/html", headers=headers)

    return router


def content_security_policy(page: str) -> str:
    """Allow the page its own script and style by their hashes, requests to its own server, and
    images that it draws itself (https://www.w3.org/TR/CSP3/)."""
    allowed = {
        "default-src": "'none'",
        "script-src": _hashed(page, "script"),
        "style-src": _hashed(page, "style"),
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return "; ".join(f"{name} {source}" for name, source in allowed.items())


def _hashed(page: str, tag: str) -> str:
    """The source expression of the one element of this name."""
    (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
    digest = hashlib.sha256(content.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
