"""Actions of a person on the server's page, for tests that drive a browser by playwright."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
DONE = "article.assistant.done"  # a complete answer
# The luminance of the page's background and its contrast with other colours, as WCAG 2.2 defines
# them.
CONTRAST = """(names) => {
    const parse = (css) => {
        const canvas = new OffscreenCanvas(1, 1).getContext("2d");
        canvas.fillStyle = css;
        canvas.fillRect(0, 0, 1, 1);
        return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
    };
    const light = (css) => parse(css).map((x) => x / 255)
        .map((x) => x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4)
        .reduce((sum, x, i) => sum + x * [0.2126, 0.7152, 0.0722][i], 0);
    const style = getComputedStyle(document.documentElement);
    const back = light(style.getPropertyValue("--back"));
    return [back, ...names.map((name) => {
        const other = light(style.getPropertyValue(name));
        return (Math.max(back, other) + 0.05) / (Math.min(back, other) + 0.05);
    })];
}"""


def settings(page: Any, **values: str) -> None:
    if not page.is_visible("#settings"):
        page.click("#settings-button")
    for name, value in values.items():
        page.fill(f"#{name}", value)
    page.click("#settings-button")


def send(page: Any, text: str) -> None:
    page.fill("#message", text)
    page.press("#message", "Enter")


def answer_of(page: Any) -> str:
    """Return the text of the last answer, once it is complete."""
    page.wait_for_selector(f"{DONE}:last-child")
    page.evaluate("chat.messages.at(-1).markdown?.drawing")
    return page.text_content(f"{DONE}:last-child .answer")


def show_tokens(page: Any) -> None:
    """Switch the last answer from Markdown to its tokens, once it is complete."""
    page.click(f"{DONE}:last-child [data-action=tokens][aria-pressed=false]")


@contextmanager
def bodies_of(page: Any) -> Iterator[list[dict[str, Any]]]:
    """Yield a list of the bodies of the requests for text that the page sends inside the block."""
    bodies: list[dict[str, Any]] = []

    def note(request: Any) -> None:
        if request.method == "POST" and not request.url.endswith("/markdown"):
            bodies.append(json.loads(request.post_data))

    page.on("request", note)
    yield bodies
    page.remove_listener("request", note)


def script(page: Any, *answers: list[dict[str, Any]] | str, last: Any = None) -> None:
    """Script the next answers of the server: the deltas of a chat, or the whole stream as text.

    `last` is the chunk that follows each answer.
    """
    rest = iter(answers)

    def reply(route: Any) -> None:
        deltas = next(rest)
        if isinstance(deltas, str):
            return route.fulfill(body=deltas, content_type="text/event-stream")
        events: list[dict[str, Any]] = [
            {"choices": [{"index": 0, "delta": d, "finish_reason": None}]} for d in deltas
        ]
        events[-1]["choices"][0]["finish_reason"] = "stop"
        if last is not None:
            events.append(last)
        body = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
        return route.fulfill(body=f"{body}data: [DONE]\n\n", content_type="text/event-stream")

    page.route("**/v1/chat/completions", reply)
