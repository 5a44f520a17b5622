"""The page at `/`, in headless Chromium against a real server: what a person does and sees.

Skipped where playwright or a Chromium is missing. Answers of tools come from a scripted stream, in
OpenAI's shapes.
"""

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from helpers.browser import (
    CONTRAST,
    DONE,
    answer_of,
    bodies_of,
    script,
    send,
    settings,
)
from helpers.server import run_server
from helpers.web import web

PAGE = Path(__file__).resolve().parents[2] / "llama/server/page.html"


def test_the_page_is_one_small_file_with_nothing_from_elsewhere(server):
    text = PAGE.read_text()
    assert len(text.encode()) < 60_000
    assert set(re.findall(r"https?://[^\s'\"]+", text)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text)
    found = web.get(server.url)
    assert (found.text, found.headers["content-type"]) == (text, "text/html; charset=utf-8")
    policy = found.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "connect-src 'self'" in policy
    assert policy.count("'sha256-") == 2 and "unsafe" not in policy


def test_an_answer_streams_as_plain_text_and_says_what_it_took(page, server):
    settings(page, temperature="0", max_tokens="24")
    page.evaluate("""() => {
        window.lengths = new Set();
        const note = () => lengths.add(document.querySelectorAll(".token").length);
        new MutationObserver(note).observe(document.querySelector("#log"),
            { childList: true, subtree: true });
    }""")
    question = "<b>Tell</b> <img src=x onerror=alert(1)> me a story about a cat"
    send(page, question)
    found = answer_of(page)
    assert len(page.evaluate("[...lengths]")) > 3, "the answer came in one piece"
    messages = [{"role": "user", "content": question}]
    body = {"messages": messages, "max_tokens": 24, "temperature": 0, "top_p": 0.9}
    wanted = web.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).json()
    assert found == wanted["choices"][0]["message"]["content"]
    assert page.text_content("article.user .text") == question
    assert page.query_selector("#log b, #log img") is None
    figures = page.inner_text(f"{DONE} .figures")
    assert re.search(r"First token \d+\.\d\d s\s+[\d.]+ tokens/s\s", figures)
    assert f"{wanted['usage']['completion_tokens']} tokens" in figures
    assert f"of {wanted['usage']['prompt_tokens']} prompt tokens cached" in figures
    # Nothing else can run here, nor be asked.
    page.evaluate("""() => {
        const other = document.createElement("script");
        other.textContent = "window.isOpen = true";
        document.body.append(other);
    }""")
    assert page.evaluate("window.isOpen") is None


def test_stop_retry_and_edit(page, server):
    settings(page, temperature="100", top_p="1")  # any token: the end of the answer is far away
    send(page, "Tell me a long story")
    page.wait_for_function("() => document.querySelectorAll('.token').length > 4")
    page.dispatch_event("#stop", "click")
    stopped = answer_of(page)
    assert stopped and "Stopped" in page.inner_text(f"{DONE} .figures")
    end = time.monotonic() + 30
    while web.get(f"{server.url}/load").json() != {"server_load": 0}:
        assert time.monotonic() < end
        time.sleep(0.02)
    settings(page, temperature="0.6", max_tokens="6", seed="7", system=" Be brief. ")
    with bodies_of(page) as bodies:
        page.click("text=Retry")
        first = answer_of(page)
        send(page, "And then?")
        page.wait_for_function("() => document.querySelectorAll('article.done').length === 2")
        page.click("article.user >> nth=0 >> text=Edit")
        assert page.evaluate("document.activeElement.value") == "Tell me a long story"
        page.keyboard.press("Escape")
        assert page.locator("article").count() == 4, "the edit was cancelled"
        page.click("article.user >> nth=0 >> text=Edit")
        page.fill("#edited", "Tell me about a dog")
        page.click("text=Save and send")
        page.wait_for_function("() => document.querySelectorAll('article').length === 2")
        answer_of(page)
    retried, second, edited = [body["messages"] for body in bodies]
    system = {"role": "system", "content": "Be brief."}
    assert retried == [system, {"role": "user", "content": "Tell me a long story"}]
    assert second == [
        *retried,
        {"role": "assistant", "content": first},
        {"role": "user", "content": "And then?"},
    ]
    assert edited == [system, {"role": "user", "content": "Tell me about a dog"}]
    page.click("#clear")
    assert page.locator("article").count() == 0 and page.is_visible("#hint")


def test_a_token_shows_the_likeliest_others_and_is_continued_from(page, server):
    settings(page, temperature="0", max_tokens="16")
    send(page, "Tell me a story")
    before = answer_of(page)
    tokens = page.eval_on_selector_all(f"{DONE} .token", "nodes => nodes.map(n => n.textContent)")
    assert "".join(tokens) == before
    page.click(f"{DONE} .token >> nth=5")
    rows = page.locator(".choices li")
    assert rows.count() == 5, "greedy: the token is among the five likeliest"
    shown = rows.all_inner_texts()
    assert shown[0].startswith(tokens[5].replace(" ", "␣")) and all("%" in row for row in shown)
    assert re.search(r"p \d.*\s%, −log p \d+\.\d\d nats", page.inner_text(".choices .note"))
    name = page.inner_text(".choices li button .code >> nth=0").replace("␣", " ")
    with bodies_of(page) as bodies:
        page.click(".choices li button >> nth=0")
        after = answer_of(page)
    start = "".join(tokens[:5]) + name
    (body,) = bodies
    assert body["messages"][-1] == {"role": "assistant", "content": start}
    assert (body["continue_final_message"], body["add_generation_prompt"]) == (True, False)
    plain = {key: body[key] for key in body.keys() - {"stream", "stream_options"}}
    wanted = web.post(f"{server.url}/v1/chat/completions", json=plain, timeout=60).json()
    assert after == start + wanted["choices"][0]["message"]["content"] != before
    scored = page.locator(f"{DONE} .token.scored").count()
    assert scored == 6 + wanted["usage"]["completion_tokens"], "those before keep their values"


def test_what_is_no_text_cannot_be_continued_from(page):
    """Neither half a character nor the end of the answer; a token's text may come later than it."""

    def entry(token: bytes, logprob: float) -> dict[str, Any]:
        return {"token": token.decode(errors="replace"), "bytes": [*token], "logprob": logprob}

    others = [entry(b"<|eot_id|>", -2.0), entry(b"\xf0\x9f", -3.0), entry(b"\n", -4.0)]
    tokens = [b"<|python_tag|>", b"\xf0\x9f", b"\x8e\x88", b"!"]
    content = [entry(token, -1.0) | {"top_logprobs": others} for token in tokens]
    events = [
        {"choices": [{"index": 0, "delta": {"content": text}, "logprobs": {"content": scores}}]}
        for text, scores in [("", content[:2]), ("🎈", content[2:]), ("!", [])]
    ]
    stream = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
    script(page, f": nothing yet\n\n{stream}data: [DONE]\n\n")
    send(page, "Hello")
    assert answer_of(page) == "🎈!"
    assert page.locator(".token.scored").all_text_contents() == ["🎈", "!"]
    page.click(".token >> nth=1")
    rows = page.locator(".choices li button")
    assert [rows.nth(i).is_disabled() for i in range(3)] == [True, True, False]
    titles = [rows.nth(i).get_attribute("aria-label") for i in range(3)]
    assert "ends the text" in titles[0] and "bytes f0 9f, 5.0" in titles[1] and "↵" in titles[2]


def test_tool_calls_stream_and_their_results_go_back(page):
    weather = {"type": "function", "function": {"name": "weather", "parameters": {}}}
    call = {"index": 0, "id": "call_1", "type": "function"}
    script(
        page,
        [
            {"role": "assistant", "content": ""},
            {"content": "I look."},
            {"tool_calls": [{**call, "function": {"name": "weather", "arguments": ""}}]},
            {"tool_calls": [{"index": 0, "function": {"arguments": '{"city": '}}]},
            {"tool_calls": [{"index": 0, "function": {"arguments": '"<b>Ulm</b>"}'}}]},
        ],
        [{"role": "assistant", "content": ""}, {"content": "It is "}, {"content": "warm."}],
    )
    page.click("#settings-button")
    page.fill("#tools", "{no")
    send(page, "How warm is it?")
    page.wait_for_selector("text=The tools are not JSON")
    assert page.evaluate("document.activeElement.id") == "tools"
    page.fill("#tools", json.dumps(weather))
    with bodies_of(page) as bodies:
        page.click("text=Retry")
        page.wait_for_selector("text=Calls weather")
        assert page.text_content(".call pre") == '{"city": "<b>Ulm</b>"}'
        page.get_by_label("Result of weather").fill("21 degrees")
        page.click("text=Send the result")
        page.wait_for_selector("text=It is warm.")
        assert page.locator("form.results").count() == 0
    assert bodies[0]["tools"] == [weather]
    function = {"name": "weather", "arguments": '{"city": "<b>Ulm</b>"}'}
    called = {"id": "call_1", "type": "function", "function": function}
    assert bodies[1]["messages"] == [
        {"role": "user", "content": "How warm is it?"},
        {"role": "assistant", "content": "I look.", "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "call_1", "content": "21 degrees"},
    ]


def test_a_completion_is_a_heat_map_of_surprise(page, server):
    prompt = "Once upon a zebra 🎈 time"
    page.click("#tab-completion")
    page.fill("#prompt", prompt)
    page.click("#score")
    page.wait_for_selector("#completion-figures span")
    body = {"prompt": prompt, "max_tokens": 0, "echo": True, "logprobs": 5}
    reply = web.post(f"{server.url}/v1/completions", json=body, timeout=60).json()
    values = reply["choices"][0]["logprobs"]["token_logprobs"][1:]
    heats = page.eval_on_selector_all(
        "#result .token",
        """nodes => nodes.map(
            (node) => [node.textContent, Number(node.style.getPropertyValue("--heat"))])""",
    )
    assert "".join(text for text, _ in heats) == prompt
    assert heats[0][1] == pytest.approx(min(1, -values[0] / 8), abs=2e-3)
    assert heats[-1][1] == pytest.approx(min(1, -values[-1] / 8), abs=2e-3)
    mean = -sum(values) / len(values)
    assert f"Mean surprise {mean:.2f} nats" in page.inner_text("#completion-figures")
    page.hover("#result .token >> nth=0")
    assert page.inner_text("#tip").endswith(f"−log p {-values[0]:.2f}")
    page.mouse.move(0, 0)
    page.focus("#complete")
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    page.keyboard.press("End")
    assert page.inner_text("#tip").endswith(f"−log p {-values[-1]:.2f}")
    page.click("#result .token >> text=🎈")
    assert re.search(r"This character has \d tokens", page.inner_text(".choices"))
    page.click(".choices >> text=Close")
    page.fill("#count", "5")
    page.click("#result .token >> nth=1")
    other = page.inner_text(".choices li button:enabled .code >> nth=0").replace("␣", " ")
    page.click(".choices li button:enabled >> nth=0")
    page.wait_for_selector("#completion-figures >> text=5 tokens")
    assert page.input_value("#prompt") == heats[0][0] + other
    assert page.text_content("#result .text").startswith(heats[0][0] + other)
    assert page.locator("#result .first").count() == 1


def test_the_engine_tab_is_live_and_asks_only_while_it_is_shown(page, server):
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    body = {"prompt": "Once", "max_tokens": 480, "n": 4, "ignore_eos": True, "stream": True}
    with web.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60):
        page.click("#tab-engine")
        page.wait_for_function("""() => {
            const [running, , cache, , out] = [...document.querySelectorAll("#figures dd")]
                .map((node) => node.textContent);
            return running === "4" && parseFloat(cache) > 0 && parseFloat(out) > 0;
        }""")
    page.click("#tab-chat")
    count = len([url for url in asked if url.endswith("/metrics")])
    assert count >= 2
    page.wait_for_timeout(1300)
    assert len([url for url in asked if url.endswith("/metrics")]) == count


def test_everything_works_from_the_keyboard(page):
    press = page.keyboard.press
    focused = lambda: page.evaluate("document.activeElement.id")  # noqa: E731
    press("Tab")
    assert focused() == "settings-button"
    press("Enter")
    press("Tab")
    assert focused() == "tab-chat", "the tabs come before the settings"
    for _ in range(4):
        press("Tab")
    assert focused() == "max_tokens"
    page.keyboard.type("12")
    page.focus("#settings-button")
    press("Enter")
    press("Tab")
    press("ArrowRight")
    assert focused() == "tab-completion" and page.is_visible("#completion")
    press("Home")
    assert focused() == "tab-chat" and page.is_visible("#chat")
    press("Tab")
    assert focused() == "message"
    page.keyboard.type("Hi")
    press("Shift+Enter")
    page.keyboard.type("you")
    press("Enter")
    first = answer_of(page)
    assert page.text_content("article.user .text") == "Hi\nyou"
    for _ in range(3):
        press("Shift+Tab")
    assert "arrow keys" in page.evaluate("document.activeElement.ariaLabel")
    press("ArrowRight")
    assert page.inner_text("#say").startswith(page.inner_text("#tip")[:3])
    press("Enter")
    assert page.is_visible(".choices")
    press("Escape")
    assert not page.is_visible(".choices")
    assert "arrow keys" in page.evaluate("document.activeElement.ariaLabel")
    press("Enter")
    press("Enter")
    assert answer_of(page) != first


def test_a_server_with_a_key_asks_for_it_and_one_that_ended_is_named(opened):
    with run_server("--max_seq_len", "512", "--api_key", "secret") as server:
        assert web.get(f"{server.url}/v1/models").status_code == 401
        page = opened(server.url, _by_a_proxy_that_has_the_key)
        page.wait_for_selector("text=Needs an API key")
        assert page.evaluate("document.activeElement.id") == "key"
        send(page, "Hello")
        page.wait_for_selector("text=The server asks for an API key.")
        page.fill("#key", "wrong")
        page.click("text=Retry")
        page.wait_for_selector("text=The server does not know this API key.")
        page.fill("#key", "secret")
        page.fill("#max_tokens", "4")
        page.click("text=Retry")
        assert answer_of(page)
        stored = "[localStorage.length, document.cookie, sessionStorage.getItem('key')]"
        assert page.evaluate(stored) == [0, "", "secret"]
        server.process.kill()
        server.process.wait()
        page.click("text=Retry")
        page.wait_for_selector("text=The server does not answer.")
        page.wait_for_selector("text=No answer")
        page.click("#tab-engine")
        page.wait_for_selector("#engine >> text=The server does not answer.")


def _by_a_proxy_that_has_the_key(page: Any) -> None:
    """The page itself comes, and its own requests have no key."""

    def with_key(route: Any) -> None:
        route.continue_(headers={**route.request.headers, "authorization": "Bearer secret"})

    page.route(lambda url: url.endswith("/"), with_key)


def test_a_browser_asks_for_the_key_as_a_password(browser_context):
    """Of the page alone; its requests then have the key, and those of other sites have not."""
    with run_server("--max_seq_len", "512", "--api_key", "a:s") as server:
        refused = web.get(server.url)
        assert refused.status_code == 401 and refused.json()["error"]["code"] == "invalid_api_key"
        assert refused.headers["WWW-Authenticate"].startswith("Basic ")
        for path in ("/v1/models", "/metrics", "/openapi.json"):
            refused = web.get(server.url + path)
            assert (refused.status_code, refused.headers["WWW-Authenticate"]) == (401, "Bearer")
        url, body = f"{server.url}/v1/completions", {"prompt": "Once", "max_tokens": 1}
        for origin, status in ((None, 200), (server.url, 200), ("http://evil", 401), ("null", 401)):
            headers = {} if origin is None else {"Origin": origin}
            found = web.post(url, json=body, headers=headers, auth=("any", "a:s"))
            assert found.status_code == status, origin
        assert web.post(url, json=body, auth=("a:s", "")).status_code == 401
        assert web.get(url, headers={"Authorization": "Basic a:b"}).status_code == 401
        context = browser_context.browser.new_context(
            http_credentials={"username": "any", "password": "a:s"}
        )
        context.set_default_timeout(20_000)
        page = context.new_page()
        assert page.goto(server.url).status == 200
        page.wait_for_selector("#state.ready")
        settings(page, max_tokens="4")
        send(page, "Hello")
        assert answer_of(page)
        context.close()


def test_what_can_fail_says_so(page):
    error = json.dumps({"error": {"message": "the model failed in this step"}})
    chunk = json.dumps({"choices": [{"index": 0, "delta": {"content": "Half"}}]})
    script(page, f"data: {error}\n\ndata: [DONE]\n\n", f"data: {chunk}\n\n")
    send(page, "Hello")
    page.wait_for_selector("text=The model failed in this step.")
    page.click("text=Retry")
    page.wait_for_selector("text=The connection broke before the end of the answer.")
    assert answer_of(page) == "Half"
    page.unroute("**/v1/chat/completions")
    busy = {"error": {"message": "the model is being loaded: try again"}}
    page.route("**/v1/completions", lambda route: route.fulfill(
        status=503, json=busy, headers={"Retry-After": "5"}))  # fmt: skip
    page.route("**/ready", lambda route: route.fulfill(status=503, json={"status": "loading"}))
    page.click("#tab-completion")
    page.click("#complete")
    page.wait_for_selector("text=the model is being loaded: try again in 5 s.")
    page.wait_for_selector("text=Loading the model")
    page.unroute("**/v1/completions")
    page.fill("#count", "9999")
    page.click("#complete")
    page.wait_for_selector("text=are more than the context")
    page.fill("#count", "-1")
    page.click("#complete")
    page.wait_for_selector("text=Tokens to add must be a whole number from 0.")


def test_the_layout_fits_the_screen_and_its_colours_can_be_read(page):
    """Wide and as a phone, light and dark. Contrast as WCAG has it: 4.5, 7 for most text."""
    settings(page, max_tokens="12", seed="1")
    send(page, "x" * 80 + " Tell me a story")
    answer_of(page)
    page.click("#settings-button")

    def check(width: int) -> None:
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        boxes = page.evaluate("""[...document.querySelectorAll("button, input, textarea, .choices")]
            .filter((node) => node.checkVisibility()).map((node) => node.getBoundingClientRect())
            .map((box) => [box.left, box.right, box.height])""")
        assert all(left >= 0 and right <= width for left, right, _ in boxes)
        assert all(height >= 24 for _, _, height in boxes), "large enough for a finger"

    for width, scheme in [(1100, "light"), (1100, "dark"), (360, "dark"), (360, "light")]:
        page.set_viewport_size({"width": width, "height": 740})
        page.emulate_media(color_scheme=scheme)
        back, text, *others = page.evaluate(CONTRAST, ["--text", "--soft", "--accent", "--bad"])
        assert (back < 0.1) == (scheme == "dark")
        assert text > 7 and min(others) > 4.5
        page.click(f"{DONE} .token.scored >> nth=3")
        check(width)
        page.keyboard.press("Escape")
        for tab in ("completion", "engine", "chat"):
            page.click(f"#tab-{tab}")
            check(width)
