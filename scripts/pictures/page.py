"""The server's page in headless Chromium, after a chat with the demo model: light and dark.

In: a server of its own, on a free port of loopback. Out: two pictures. It uses the page as a person
does, with a keyboard and a mouse.
"""

import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

QUESTION = "Tell me a story about a lion named Leo."
TOKEN = 8  # of the answer: the one whose probability is shown
_WIDTH, _HEIGHT = 960, 640
_LIMIT_S = 120.0


def make(folder: Path) -> None:
    """Write page-light.png and page-dark.png."""
    try:
        from playwright.sync_api import sync_playwright
    except ModuleNotFoundError as e:
        raise ValueError(f"{e}: install the extra, pip install -e '.[test]'") from e
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    if program is None:
        raise ValueError("there is no Chromium: install the package chromium")
    with _server() as url, sync_playwright() as playwright:
        # A container may have no user namespaces, which Chromium's sandbox needs.
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        for scheme in ("light", "dark"):
            context = browser.new_context(
                viewport={"width": _WIDTH, "height": _HEIGHT},
                color_scheme=scheme,
                device_scale_factor=1.5,
            )
            page = context.new_page()
            page.goto(url)
            _chat(page)
            page.screenshot(path=folder / f"page-{scheme}.png")
            context.close()
        browser.close()


def _chat(page: Any) -> None:
    """Ask a question and open a token of the answer."""
    page.wait_for_selector("#state.ready")
    page.click("#settings-button")
    page.fill("#temperature", "0")
    page.click("#settings-button")
    page.fill("#message", QUESTION)
    page.press("#message", "Enter")
    page.wait_for_selector("article.assistant.done")
    page.click("article.assistant [data-action=tokens]")
    page.click(f"article.assistant .token >> nth={TOKEN}")
    page.wait_for_selector(".choices li")
    page.evaluate("() => scrollTo(0, 0)")


@contextmanager
def _server() -> Iterator[str]:
    """Yield the URL of `llama serve` with the demo model, once it is ready."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    process = subprocess.Popen([sys.executable, "-m", "llama", "serve", "--port", str(port)])
    try:
        end = time.monotonic() + _LIMIT_S
        while not _is_ready(url):
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"the server was not ready within {_LIMIT_S:g} s")
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait()


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=5):
            return True
    except (urllib.error.URLError, TimeoutError):
        return False
