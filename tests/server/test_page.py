"""The page at `/`, in headless Chromium against a real server: what a person does and sees.

Skipped without playwright or a Chromium. Answers that a model would not give on demand come from a
scripted stream, in OpenAI's format.
"""

import base64
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from helpers.browser import (
    CONTRAST,
    DONE,
    answer_of,
    bodies_of,
    script,
    send,
    settings,
    show_tokens,
)
from helpers.server import run_server
from helpers.services import service_of
from helpers.waiting import wait_until
from helpers.web import web
from llama.server.page import read_page
from llama.server.process import Server


def test_each_message_and_each_block_runs_as_its_first_letter_does(page, server):
    """Arabic and Hebrew run from right to left: in a question, its field, and each block."""
    direction = "node => getComputedStyle(node).direction"
    script(page, [{"content": "- عربي\n\nEnglish\n\n```\nx = 1  # עברית\n```\n\n> עברית\n"}])
    page.fill("#message", "שלום")
    assert page.eval_on_selector("#message", direction) == "rtl"
    page.fill("#message", "Hello")
    assert page.eval_on_selector("#message", direction) == "ltr"
    send(page, "שלום")
    answer_of(page)
    assert page.eval_on_selector(".user .text", direction) == "rtl"
    blocks = page.eval_on_selector_all(
        ".answer :is(li, p, pre)", "nodes => nodes.map((node) => getComputedStyle(node).direction)"
    )
    assert blocks == ["rtl", "ltr", "ltr", "rtl"]


def test_the_page_is_one_small_text_with_nothing_from_elsewhere(server):
    text = read_page()
    assert len("".join(text.split())) < 80_000, "its layout is the formatter's, and does not count"
    assert set(re.findall(r"https?://[^\s'\"]+", text)) == {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1998/Math/MathML",
    }
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text)
    found = web.get(server.url)
    assert (found.text, found.headers["content-type"]) == (text, "text/html; charset=utf-8")
    policy = found.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "connect-src 'self'" in policy
    assert policy.count("'sha256-") == 2 and "unsafe" not in policy
    assert "require-trusted-types-for 'script'" in policy and "trusted-types 'none'" in policy


def test_an_answer_streams_and_says_what_it_took(page, server):
    settings(page, temperature="0", max_tokens="120")
    page.evaluate("""() => {
        window.lengths = new Set();
        const note = () => lengths.add(document.querySelector(".markdown")?.textContent.length);
        new MutationObserver(note).observe(document.querySelector("#log"),
            { childList: true, subtree: true, characterData: true });
    }""")
    question = "<b>Tell</b> <img src=x onerror=alert(1)> me a story about a cat"
    send(page, question)
    found = answer_of(page)
    assert len(page.evaluate("[...lengths]")) > 3, "the answer came in one piece"
    messages = [{"role": "user", "content": question}]
    body = {"messages": messages, "max_tokens": 120, "temperature": 0, "top_p": 0.9}
    wanted = web.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).json()
    content = wanted["choices"][0]["message"]["content"]
    assert found == " ".join(content.split())
    show_tokens(page)
    assert answer_of(page) == content
    assert page.text_content("article.user .text") == question
    assert page.query_selector("#log b, #log img") is None
    figures = page.inner_text(f"{DONE} .figures")
    assert re.search(r"[\d.]+ tokens/s\s+First token \d+\.\d\d s\s", figures)
    assert f"{wanted['usage']['completion_tokens']} tokens" in figures
    assert f"Prompt {wanted['usage']['prompt_tokens']}, " in figures and "cached" in figures
    # Nothing else can run on this page, and no other host can be contacted.
    page.evaluate("""() => {
        const other = document.createElement("script");
        other.append("window.isOpen = true");
        document.body.append(other);
    }""")
    assert page.evaluate("window.isOpen") is None
    with pytest.raises(Exception, match="requires 'TrustedHTML'"):
        page.evaluate("document.body.innerHTML = '<b>'")


def test_the_speed_is_the_servers_own(page):
    """The speed is the server's own; this answer arrives in one burst, without measurable time."""
    usage = {"prompt_tokens": 9, "completion_tokens": 3, "total_tokens": 12}
    last = {"choices": [], "usage": usage, "timings": {"predicted_per_second": 249.6}}
    script(page, [{"content": word} for word in ("a", "b", "c")], last=last)
    send(page, "Hello")
    answer_of(page)
    assert page.inner_text(f"{DONE} .figures").startswith("250 tokens/s")


HOSTILE = """\
<script>hacked = 1</script><img src=x onerror="hacked = 1"><svg onload="hacked = 1">
[a](javascript:hacked=1) [b](data:text/html,<script>hacked=1</script>) [c](vbscript:x) [d](//evil.x)
[e]( JaVaScRiPt:hacked=1 ) [f](java&#115;cript:hacked=1) [g](\x01javascript:hacked=1) <javascript:x>
![p](http://evil.x/p.png) ![q](data:image/svg+xml,<svg/onload=hacked=1>) [h](http://evil.x/"onclick="x)

```"><img src=x onerror=hacked=1>
</code></pre><script>hacked = 1</script>
```

| <img src=http://evil.x/t.png> | b |
|---|---|
| [x](javascript:hacked=1) | <iframe src=http://evil.x> |

$\\href{javascript:hacked=1}{x} \\url{http://evil.x} \\text{<img src=x onerror=hacked=1>}$
$$\\includegraphics{http://evil.x/p.png} \\style{background:url(http://evil.x)}{x}$$
$\\color{url(http://evil.x)} \\begin{array}{" onclick="hacked=1"} x \\end{array}$
"""


def test_what_streams_is_drawn_block_by_block(page):
    """Complete blocks are drawn as they end, and stay; in the end all is as if it came at once."""
    seen = page.evaluate(
        """async (text) => {
            const [grown, whole] = [document.createElement("div"), document.createElement("div")];
            const [markdown, other] = [new Markdown(grown), new Markdown(whole)];
            let removed = 0;
            const observer = new MutationObserver((records) => {
                const nodes = records.flatMap((record) => [...record.removedNodes]);
                removed += nodes.filter((node) => node.className !== "tail").length;
            });
            observer.observe(grown, { childList: true });
            const numDrawn = [];
            for (let i = 0; i < text.length; i += 60) {
                markdown.show(text.slice(0, i), true);
                await markdown.drawing;
                numDrawn.push(grown.querySelectorAll(":scope > :not(.tail)").length);
            }
            const tail = grown.querySelector(".tail").textContent;
            markdown.show(text, false);
            other.show(text, false);
            await Promise.all([markdown.drawing, other.drawing]);
            return [grown.innerHTML === whole.innerHTML, removed, numDrawn.at(-1), tail,
                grown.querySelectorAll("pre .code-keyword").length, grown.children.length];
        }""",
        "# Title\n\nSome **bold** text.\n\n```js\nlet x;\n\nlet y;\n```\n\n- a\n- b\n\n" * 40
        + "The *end*",
    )
    is_equal, removed, num_drawn, tail, num_keywords, num_blocks = seen
    assert is_equal and removed == 0
    assert num_drawn > 140 and tail
    assert (num_keywords, num_blocks) == (80, 161)


def test_a_text_that_takes_long_stays_text(page):
    slow = "\\[\n" * 20_000
    drawn = page.evaluate(
        """async ([slow, long]) => {
            const nodes = [slow, long].map(() => document.createElement("div"));
            const shown = nodes.map((node) => new Markdown(node));
            shown.forEach((each, i) => each.show([slow, long][i], false));
            await Promise.all(shown.map((each) => each.drawing));
            return nodes.map((node) => [node.children.length, node.textContent.length]);
        }""",
        [slow, "a *b*\n\n" * 10_000],
    )
    assert drawn[0] == [1, len(slow.strip())]
    assert drawn[1] == [10_000, 30_000], "a long text is drawn in parts"


def test_no_text_can_run_or_load_anything(page, server):
    asked: list[str] = []
    page.context.on("request", lambda request: asked.append(request.url))
    script(page, [{"content": HOSTILE}])
    name = "<img src=x onerror=hacked=1>"
    file = {"name": f"{name}.txt", "mimeType": "text/plain", "buffer": HOSTILE.encode()}
    page.set_input_files("#files", file)
    send(page, HOSTILE)
    answer_of(page)
    page.wait_for_selector("#chat-list .title")
    chats = {"format": "llama chats", "chats": [{"title": name, "messages": [
        {"role": "user", "content": HOSTILE, "files": [{"name": name, "text": HOSTILE}]},
        {"role": "assistant", "content": HOSTILE, "figures": [name]},
        {"role": "tool", "tool_call_id": name, "name": name, "content": HOSTILE}]}]}  # fmt: skip
    page.set_input_files("#import-file", _json_file(chats))
    page.click(f"#chat-list .title >> text={name}")
    page.wait_for_selector("article.tool")
    page.evaluate("Promise.all(chat.messages.map((message) => message.markdown?.drawing))")
    found = "#log :is(script, img, svg, iframe, object, embed, style, link, form, [style], [src])"
    assert page.locator(found).count() == 0
    assert (
        page.evaluate("""[...document.querySelectorAll("#log *")].flatMap((node) =>
        node.getAttributeNames().filter((name) => name.startsWith("on")))""")
        == []
    )
    links = page.eval_on_selector_all("#log a", "(all) => all.map((a) => [a.protocol, a.rel])")
    assert {tuple(link) for link in links} == {("http:", "noopener noreferrer")}
    assert page.evaluate("[typeof hacked, location.pathname]") == ["undefined", "/"]
    assert {url for url in asked if not url.startswith((server.url, "blob:"))} == set()


def test_stop_retry_and_edit(page, server):
    # Any token: with this seed, the end of the answer is far away.
    settings(page, temperature="100", top_p="1", seed="2")
    send(page, "Tell me a long story")
    page.wait_for_function("() => document.querySelector('.markdown')?.textContent.length > 20")
    page.dispatch_event("#stop", "click")
    stopped = answer_of(page)
    assert stopped and "Stopped" in page.inner_text(f"{DONE} .figures")
    wait_until(lambda: web.get(f"{server.url}/load").json() == {"server_load": 0})
    settings(page, temperature="0.6", max_tokens="6", seed="7", system=" Be brief. ")
    with bodies_of(page) as bodies:
        page.click("text=Retry")
        first = answer_of(page)
        send(page, "And then?")
        page.wait_for_function("() => document.querySelectorAll('article.done').length === 2")
        page.hover("article.user >> nth=0")
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
    page.click("#new-chat")
    assert page.locator("article").count() == 0 and page.is_visible("#hint")


def _show_version(page: Any, name: str, number: str) -> None:
    """Show the next or the previous version of a message."""
    page.click(f"article [aria-label='{name} version']:enabled >> nth=0")
    page.wait_for_selector(f".versions >> text={number}")


def _texts(page: Any) -> list[str]:
    return page.locator("article :is(.user .text, .answer)").all_text_contents()


def test_an_edited_message_keeps_the_old_branch(page):
    script(page, *([{"content": f"Answer {i}"}] for i in range(1, 8)))

    def done(count: int, text: str) -> None:
        page.wait_for_selector(f"article.done >> text={text}")
        page.wait_for_function(
            "(n) => document.querySelectorAll('article').length === n", arg=count
        )

    send(page, "One")
    done(2, "Answer 1")
    send(page, "Two")
    done(4, "Answer 2")
    assert page.locator(".versions button").count() == 0
    page.dispatch_event("article.user >> nth=0 >> [data-action=edit]", "click")
    page.fill("#edited", "Other")
    page.click("text=Save and send")
    done(2, "Answer 3")
    assert _texts(page) == ["Other", "Answer 3"]
    assert page.text_content(".versions >> nth=0") == "‹2/2›"
    assert page.locator("[aria-label='Next version']:disabled").count() == 1
    page.focus("[aria-label='Previous version']")
    page.keyboard.press("Enter")
    done(4, "Answer 2")
    assert _texts(page) == ["One", "Answer 1", "Two", "Answer 2"]
    assert page.evaluate("document.activeElement.ariaLabel") == "Next version"
    assert page.inner_text("#say") == "Version 1 of 2"
    # An answer that is asked again has versions, too; those of the other branch stay.
    page.click("article.assistant >> nth=1 >> text=Retry")
    done(4, "Answer 4")
    with bodies_of(page) as bodies:
        send(page, "Three")
        done(6, "Answer 5")
    sent = [message["content"] for message in bodies[-1]["messages"]]
    assert sent == ["One", "Answer 1", "Two", "Answer 4", "Three"]
    assert all(message.keys() == {"role", "content"} for message in bodies[-1]["messages"])
    page.wait_for_function("() => !chat.saving")
    page.reload()
    done(6, "Answer 5")
    numbers = page.locator(".versions:not(:empty)").all_text_contents()
    assert numbers == ["‹1/2›", "‹2/2›"]
    with page.expect_download() as exported:
        page.click("#export-all")
    file = json.loads(Path(exported.value.path()).read_text())
    _show_version(page, "Next", "2/2")
    assert _texts(page) == ["Other", "Answer 3"]
    _menu(page, "One", "Delete")
    page.set_input_files("#import-file", _json_file(file))
    page.click("#chat-list .title >> text=One")
    done(6, "Answer 5")
    page.click("article.assistant >> nth=1 >> [aria-label='Previous version']")
    done(4, "Answer 2")
    _show_version(page, "Next", "2/2")
    assert _texts(page) == ["Other", "Answer 3"]
    for versions in ({"index": 2, "tails": [None]}, {"index": 0, "tails": [None, []]}, {}):
        file["chats"][0]["messages"][0]["versions"] = versions
        page.set_input_files("#import-file", _json_file(file))
        page.wait_for_selector("#toast >> text=the versions of a message are malformed")
        page.evaluate("$('toast').hidden = true")


def test_an_empty_answer_is_no_version(page):
    error = json.dumps({"error": {"message": "failed"}})
    failure = f"data: {error}\n\ndata: [DONE]\n\n"
    script(page, [{"content": "A"}], failure, failure, [{"content": "B"}], [{"content": "C"}])
    send(page, "One")
    page.wait_for_selector("article.done >> text=A")
    page.click("text=Retry")
    page.wait_for_selector(".versions >> text=2/2")
    page.wait_for_selector("article.done >> text=Failed.")
    page.click("text=Retry")
    page.wait_for_selector("article.done >> text=Failed.")
    with bodies_of(page) as bodies:
        send(page, "Two")
        page.wait_for_selector("article.done >> text=B")
    assert [message["content"] for message in bodies[-1]["messages"]] == ["One", "Two"]
    page.click("article.assistant >> nth=0 >> [aria-label='Previous version']")
    page.wait_for_selector("article.done >> text=A")
    assert _texts(page) == ["One", "A"]


def test_the_oldest_turns_are_left_out_once_the_context_is_full(page, server):
    """What is sent fits the context; the page says from where on."""
    script(page, *([{"content": f"Answer {i}"}] for i in range(6)))
    limit = web.get(f"{server.url}/v1/models").json()["data"][0]["max_model_len"]
    assert page.evaluate("contextLength") == limit == 512
    settings(page, max_tokens="200", system="Be brief.")
    sent = []
    for i in range(5):
        with bodies_of(page) as bodies:
            send(page, f"{i} " + "word " * 90)
            page.wait_for_selector(f"article.done >> text=Answer {i}")
        sent.append(bodies[-1]["messages"])
    assert [len(messages) for messages in sent][:2] == [2, 4]
    for messages in sent:
        assert messages[0] == {"role": "system", "content": "Be brief."}
        assert messages[1]["role"] == "user"
        body = {"messages": messages}
        assert web.post(f"{server.url}/tokenize", json=body).json()["count"] + 200 <= limit
    first = sent[-1][1]["content"]
    assert not first.startswith("0 ")
    note = page.inner_text(".cut")
    assert note == "The context of 512 tokens is full: the model no longer gets the messages above."
    assert page.text_content(".cut + article .text") == first
    assert page.locator("article").count() == 10, "they stay in view"
    page.click("#new-chat")
    assert page.locator(".cut").count() == 0


def test_reasoning_is_folded_once_the_answer_begins(page):
    parts = [{"reasoning_content": "First **this**, "}, {"reasoning_content": "then that."}]
    parts_of_vllm = [{"reasoning": part["reasoning_content"]} for part in parts]
    script(page, parts, [*parts_of_vllm, {"content": "Done"}], [{"content": "Next"}])
    send(page, "Think")
    page.wait_for_selector("article.done details[open] strong >> text=this")
    page.click("text=Retry")
    assert answer_of(page) == "Done"
    assert page.text_content("details.thoughts .markdown") == "First this, then that."
    assert page.locator("article.done details.thoughts:not([open])").count() == 1
    page.click("summary >> text=Reasoning")
    assert page.is_visible("details.thoughts >> text=then that.")
    with bodies_of(page) as bodies:
        send(page, "Next")
        page.wait_for_selector("article.done >> text=Next")
    assert bodies[-1]["messages"][1] == {"role": "assistant", "content": "Done"}
    page.wait_for_function("() => !chat.saving")
    page.reload()
    page.click("summary >> text=Reasoning")
    assert page.is_visible("details.thoughts >> text=then that.")


def test_a_token_shows_the_likeliest_others_and_is_continued_from(page, server):
    settings(page, temperature="0", max_tokens="16")
    send(page, "Tell me a story")
    show_tokens(page)
    before = answer_of(page)
    tokens = page.eval_on_selector_all(f"{DONE} .token", "nodes => nodes.map(n => n.textContent)")
    assert "".join(tokens) == before
    page.click(f"{DONE} .token >> nth=5")
    rows = page.locator(".choices li")
    assert rows.count() == 5, "greedy: the token is among the five most probable"
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
    """Only text can be continued from.

    Neither half of a character nor the end of the answer is offered; a token's text may arrive
    later than the token.
    """

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
    show_tokens(page)
    assert page.locator(".token.scored").all_text_contents() == ["🎈", "!"]
    page.click(".token >> nth=1")
    rows = page.locator(".choices li button")
    assert [rows.nth(i).is_disabled() for i in range(3)] == [True, True, False]
    titles = [rows.nth(i).get_attribute("aria-label") for i in range(3)]
    assert "ends the text" in titles[0] and "bytes f0 9f, 5.0" in titles[1] and "↵" in titles[2]


def test_the_composer_does_not_cover_the_alternatives(page):
    """The composer does not cover the alternatives.

    That includes those of a chat's last token, where the page cannot scroll any further.
    """
    page.set_viewport_size({"width": 360, "height": 500})
    other = {"token": "x", "bytes": [120], "logprob": -2.0}
    scores: list[dict[str, Any]] = [
        {"token": text, "bytes": [*text.encode()], "logprob": -1.0, "top_logprobs": [other]}
        for text in [*["line\n"] * 30, "end"]
    ]
    content = "".join(each["token"] for each in scores)
    choice = {"index": 0, "delta": {"content": content}, "logprobs": {"content": scores}}
    script(page, f"data: {json.dumps({'choices': [choice]})}\n\ndata: [DONE]\n\n")
    send(page, "Hello")
    show_tokens(page)
    page.click(".token.scored >> text=end")
    covering = page.evaluate("""[...document.querySelectorAll(".choices button")].map((node) => {
        const box = node.getBoundingClientRect();
        const top = document.elementFromPoint(box.x + box.width / 2, box.y + box.height / 2);
        return node.contains(top);
    })""")
    assert covering == [True, True]


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
    page.wait_for_selector("text=The tools are not valid JSON")
    assert page.evaluate("document.activeElement.id") == "tools"
    page.fill("#tools", json.dumps(weather))
    page.press("#tools", "Escape")
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


def test_a_completion_is_a_heat_map_of_surprisal(page, server):
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
    assert f"Mean surprisal {mean:.2f} nats" in page.inner_text("#completion-figures")
    page.hover("#result .token >> nth=0")
    assert page.inner_text("#tip").endswith(f"−log p {-values[0]:.2f}")
    page.mouse.move(0, 0)
    page.focus("#complete")
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    page.keyboard.press("End")
    assert page.inner_text("#tip").endswith(f"−log p {-values[-1]:.2f}")
    page.click("#result .token >> text=🎈")
    assert re.search(r"This character consists of \d tokens", page.inner_text(".choices"))
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
    page.wait_for_function("() => document.activeElement.id === 'message'")
    page.focus("#chats-button")
    press("Tab")
    assert focused() == "settings-button"
    press("Enter")
    press("Tab")
    assert focused() == "tab-chat", "the tabs come before the settings"
    for _ in range(4):
        press("Tab")
    assert focused() == "max_tokens"
    page.keyboard.type("12")
    press("Enter")
    assert focused() == "settings-button" and not page.is_visible("#settings")
    press("Tab")
    press("ArrowRight")
    assert focused() == "tab-completion" and page.is_visible("#completion")
    press("Home")
    assert focused() == "tab-chat" and page.is_visible("#chat")
    press("Tab")
    assert focused() == "new-chat"
    while focused() != "message":
        press("Tab")
    page.keyboard.type("Hi")
    press("Shift+Enter")
    page.keyboard.type("you")
    press("Enter")
    first = answer_of(page)
    assert page.text_content("article.user .text") == "Hi\nyou"
    page.wait_for_selector("article.done [data-action=tokens]")
    for _ in range(2):
        press("Shift+Tab")
    press("Enter")
    for _ in range(4):
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
    page.focus("#chat-list .more")
    press("Enter")
    press("Enter")
    page.keyboard.type("Greeting")
    press("Enter")
    page.wait_for_function("() => document.activeElement.textContent === 'Greeting'")


def test_a_server_with_a_key_asks_for_it_and_one_that_ended_is_named(opened):
    with run_server("--max_seq_len", "512", "--api_key", "secret") as server:
        for path in ("/v1/models", "/metrics", "/openapi.json"):
            refused = web.get(server.url + path)
            assert (refused.status_code, refused.headers["WWW-Authenticate"]) == (401, "Bearer")
        page = opened(server.url)
        page.wait_for_selector("text=API key required")
        assert page.evaluate("document.activeElement.id") == "key"
        send(page, "Hello")
        page.wait_for_selector("article >> text=The server requires an API key.")
        page.wait_for_selector("#key-problem >> text=The server requires an API key.")
        page.fill("#key", "wrong")
        page.press("#key", "Enter")
        page.wait_for_selector("#state >> text=API key rejected")
        assert page.evaluate("document.activeElement.id") == "key"
        assert page.inner_text("#key-problem").startswith("The server rejected this API key.")
        page.fill("#key", "clé")
        page.press("#key", "Enter")
        page.wait_for_selector("#state >> text=API key malformed")
        page.fill("#key", "wrong")
        page.press("#key", "Enter")
        page.wait_for_selector("#state >> text=API key rejected")
        page.press("#key", "Escape")
        page.click("text=Retry")
        page.wait_for_selector("article >> text=The server rejected this API key.")
        settings(page, key="secret", max_tokens="4")
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


def test_the_engine_tab_asks_once_where_the_key_does_not_open_metrics(opened):
    """With several keys, the metrics need a key of their own: the tab names it, and does not poll.

    The server needs no model for that.
    """
    keys = ["first", "second"]
    server = Server(service_of(), host="127.0.0.1", port=0, api_keys=keys)
    server.start()
    try:
        page = opened(f"http://127.0.0.1:{server.port}")
        settings(page, key="second")
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url.rpartition("/")[2]))
        page.click("#tab-engine")
        page.wait_for_selector("#engine >> text=needs one of --metrics_key_file")
        page.wait_for_timeout(1300)
        assert asked.count("metrics") == 1
    finally:
        server.stop()


def _json_file(value: Any) -> dict[str, Any]:
    data = json.dumps(value).encode()
    return {"name": "chats.json", "mimeType": "application/json", "buffer": data}


def _menu(page: Any, title: str, item: str) -> None:
    page.click(f"#chat-list li:has-text('{title}') .more")
    page.click(f"#menu >> text={item}")


def _titles(page: Any, *wanted: str) -> None:
    """Wait until these are the titles in the list."""
    page.wait_for_function(
        """(wanted) => {
            const titles = [...document.querySelectorAll("#chat-list .title")].map((n) => n.title);
            return JSON.stringify(titles) === JSON.stringify(wanted);
        }""",
        arg=list(wanted),
    )


def test_chats_are_kept_named_deleted_and_exported(page, server):
    answers = [[{"content": f"**Answer** {i}"}] for i in range(4)]
    script(page, *answers)
    send(page, "First")
    answer_of(page)
    send(page, "First again")
    page.wait_for_function("() => document.querySelectorAll('article.done').length === 2")
    page.click("#new-chat")
    assert page.locator("article").count() == 0
    send(page, "Second\nline")
    answer_of(page)
    _titles(page, "Second", "First")
    _menu(page, "First", "Rename")
    page.keyboard.type("The <b>first")
    page.keyboard.press("Enter")
    _titles(page, "Second", "The <b>first")
    page.reload()
    page.wait_for_selector("article.user >> text=Second")
    page.click("#chat-list .title >> text=The <b>first")
    page.wait_for_function("() => document.querySelectorAll('article').length === 4")
    page.wait_for_function("() => document.querySelectorAll('.markdown strong').length === 2")
    with bodies_of(page) as bodies:
        send(page, "More")
        page.wait_for_selector("text=Answer 3")
    said = [message["content"] for message in bodies[0]["messages"]]
    assert said == ["First", "**Answer** 0", "First again", "**Answer** 1", "More"]
    assert bodies[0]["messages"][1] == {"role": "assistant", "content": "**Answer** 0"}
    with page.expect_download() as markdown:
        _menu(page, "Second", "Export as Markdown")
    assert markdown.value.suggested_filename == "Second.md"
    lines = Path(markdown.value.path()).read_text().split("\n\n")
    assert lines == ["# Second", "## You", "Second\nline", "## Model", "**Answer** 2\n"]
    with page.expect_download() as exported:
        page.click("#export-all")
    file = Path(exported.value.path()).read_text()
    for title in ("The <b>first", "Second"):
        _menu(page, title, "Delete")
    _titles(page)
    page.click("#toast-undo")
    _titles(page, "Second")
    assert page.text_content("article.user .text") == "Second\nline"
    page.set_input_files("#import-file", _json_file(json.loads(file)))
    page.wait_for_selector("text=2 chats were imported.")
    _titles(page, "The <b>first", "Second", "Second")
    page.set_input_files("#import-file", _json_file({"format": "llama chats", "chats": [{}]}))
    page.wait_for_selector("text=This is not a file of exported chats")
    page.reload()
    _titles(page, "The <b>first", "Second", "Second")


def test_an_answer_goes_on_while_another_chat_is_shown(page):
    page.evaluate(
        """() => {  // one piece of an answer, and no end
            const event = {choices: [{index: 0, delta: {content: "Piece"}, finish_reason: null}]};
            const bytes = new TextEncoder().encode(`data: ${JSON.stringify(event)}\\n\\n`);
            const body = new ReadableStream({start: (stream) => stream.enqueue(bytes)});
            const answer = new Response(body, {headers: {"content-type": "text/event-stream"}});
            const { fetch } = window;
            window.fetch = (url, ...rest) =>
                String(url).includes("completions") ? Promise.resolve(answer) : fetch(url, ...rest);
        }"""
    )
    send(page, "Long")
    page.wait_for_selector(".busy >> text=Long")
    page.click("#new-chat")
    assert page.is_visible("#send") and not page.is_visible("#stop")
    page.click("#chat-list >> text=Long")
    assert page.is_visible("#stop")
    page.wait_for_timeout(1000)
    page.reload()
    page.wait_for_selector("article.user >> text=Long")
    assert answer_of(page) == "Piece", "what had come was kept"


def test_two_tabs_do_not_destroy_each_others_chats(page, opened, server):
    script(page, [{"content": "One"}], [{"content": "Three"}])
    send(page, "Shared")
    answer_of(page)
    other = opened(server.url)
    _titles(other, "Shared")
    other.click("#chat-list >> text=Shared")
    other.wait_for_selector("article >> text=One")  # or the message would begin a chat of its own
    script(other, [{"content": "Two"}], [{"content": "Four"}])
    send(other, "From the other tab")
    page.wait_for_selector("text=Two")
    page.evaluate("tabs.onmessage = null")  # simulates a notification that arrives too late
    other.click("article.user >> nth=1 >> text=Copy")
    send(other, "Once more")
    other.wait_for_selector("text=Four")
    _titles(other, "Shared")
    send(page, "At the same time")
    page.wait_for_selector("text=Three")
    _titles(other, "Shared (copy)", "Shared")
    page.reload()
    page.wait_for_selector("text=Three")
    page.click("#chat-list .title[title=Shared]")
    page.wait_for_selector("text=Four")
    assert page.locator("article").count() == 6
    _menu(page, "Shared (copy)", "Delete")
    _titles(other, "Shared")


def test_a_full_browser_says_so(page, server):
    control = page.context.new_cdp_session(page)
    control.send("Storage.overrideQuotaForOrigin", {"origin": server.url, "quotaSize": 1})
    script(page, [{"content": "An answer"}], [{"content": "Another"}])
    send(page, "Hello" * 1000)
    assert answer_of(page) == "An answer"
    page.wait_for_selector("#chat-problem >> text=This browser has no space left for chats")
    control.send("Storage.overrideQuotaForOrigin", {"origin": server.url})
    send(page, "Again")
    page.wait_for_selector("text=Another")
    page.wait_for_selector("#chat-list .title")
    page.reload()
    page.wait_for_selector("text=Another")
    assert page.locator("article").count() == 4


def test_text_files_are_attached(page):
    script(page, [{"content": "Seen"}])
    page.click("#attach")
    many = {
        "a.txt": b"one\n```\ntwo\n",
        "b.csv": "\ufeffx,é\n".encode(),
        "c.bin": b"\x89PNG\0\xff",
        "d.txt": b"x" * 1_000_001,
        "e.md": b"gone",
    }
    page.set_input_files(
        "#files", [{"name": name, "mimeType": "", "buffer": data} for name, data in many.items()]
    )
    page.wait_for_selector("#chat-problem >> text=c.bin is not text")
    assert "d.txt has 1.0 MB: the limit for a file is 1.0 MB." in page.inner_text("#chat-problem")
    page.get_by_label("Remove e.md").click()
    page.evaluate("""() => {
        const dataTransfer = new DataTransfer();
        dataTransfer.items.add(new File(["dropped"], "f.txt"));
        for (const type of ["dragover", "drop"]) {
            document.body.dispatchEvent(
                new DragEvent(type, { dataTransfer, bubbles: true, cancelable: true }));
        }
    }""")
    page.wait_for_function("() => document.querySelectorAll('.chip').length === 3")
    with bodies_of(page) as bodies:
        send(page, "What is in them?")
        answer_of(page)
    parts = [part["text"] for part in bodies[0]["messages"][0]["content"]]
    assert parts == [
        "File a.txt:\n````\none\n```\ntwo\n````",
        "File b.csv:\n```\nx,é\n```",
        "File f.txt:\n```\ndropped\n```",
        "What is in them?",
    ]
    assert page.locator(".chip").count() == 0
    page.reload()
    page.click("article.user summary >> text=b.csv")
    assert page.is_visible("article.user pre >> text=x,é")
    page.unroute("**/v1/chat/completions")
    settings(page, max_tokens="2")
    page.click("text=Retry")
    assert answer_of(page), "the server takes them"


def png(width: int, height: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height), "red").save(file, "PNG")
    return file.getvalue()


def test_images_are_attached(page):
    """They are data: URLs before the texts; a large one is shrunk, and one can be pasted."""
    script(page, [{"content": "Seen"}])
    small, wide = (png(*size) for size in ((8, 8), (3000, 30)))
    page.set_input_files(
        "#files",
        [
            {"name": "a.txt", "mimeType": "text/plain", "buffer": b"x"},
            {"name": "small.png", "mimeType": "image/png", "buffer": small},
            {"name": "wide.png", "mimeType": "image/png", "buffer": wide},
            {"name": "bad.png", "mimeType": "image/png", "buffer": b"x"},
        ],
    )
    page.wait_for_selector("#chat-problem >> text=bad.png is no image")
    paste = """(bytes) => {
        const clipboardData = new DataTransfer();
        const file = new File([new Uint8Array(bytes)], "p.png", { type: "image/png" });
        clipboardData.items.add(file);
        document.querySelector("#message").dispatchEvent(
            new ClipboardEvent("paste", { clipboardData, bubbles: true, cancelable: true }));
    }"""
    page.evaluate(paste, list(small))
    page.wait_for_function("() => document.querySelectorAll('.chip').length === 4")
    with bodies_of(page) as bodies:
        send(page, "What is this?")
        answer_of(page)
    parts = bodies[0]["messages"][0]["content"]
    assert [part["type"] for part in parts] == ["image_url"] * 3 + ["text"] * 2
    files = [base64.b64decode(part["image_url"]["url"].partition(",")[2]) for part in parts[:3]]
    assert files[0] == files[2] == small
    assert Image.open(io.BytesIO(files[1])).size == (2240, 22)
    page.reload()
    page.click("article.user summary >> text=small.png")
    assert page.is_visible("article.user img")
    page.unroute("**/v1/chat/completions")
    page.click("text=Retry")
    page.wait_for_selector("text=the model reads text alone")


def test_the_header_stays_and_the_page_does_not_jump(page):
    page.set_viewport_size({"width": 360, "height": 500})
    script(page, [{"content": "A line.\n\n" * 30}])
    send(page, "Long")
    answer_of(page)
    grow = """async () => {
        const reply = chat.messages.at(-1);
        reply.content += "\\n\\nMore.".repeat(9);
        reply.draw();
        await reply.markdown.drawing;
    }"""

    def ends() -> tuple[float, float]:
        head, composer = page.evaluate(
            "['header', '#composer'].map((n) => document.querySelector(n).getBoundingClientRect())"
        )
        return head["top"], round(composer["bottom"])

    for _ in range(2):
        top = page.evaluate("scrollY")
        page.evaluate(grow)
        assert page.evaluate("hiddenBelow() < 8 && scrollY") > top + 100, "the answer is followed"
        assert ends() == (0, 500)
    page.evaluate("scrollBy(0, -120)")
    page.wait_for_function("() => !isAtEnd")
    top = page.evaluate("scrollY")
    page.evaluate(grow)
    assert page.evaluate("scrollY") == top, "who reads above is left there"
    assert ends() == (0, 500)
    page.click("#tab-engine")
    page.click("#tab-chat")
    assert page.evaluate("scrollY") == top
    page.click("#to-end")
    assert page.evaluate("hiddenBelow()") < 8
    page.click("#chats-button")
    assert page.evaluate("document.activeElement.id") == "new-chat"
    assert page.evaluate("[document.querySelector('main').inert, root.scrollWidth]") == [True, 360]
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.id") == "chats-button"
    page.wait_for_selector("#chats", state="hidden")


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


def test_a_long_unbroken_line_does_not_widen_the_page(page):
    """A line without a space is broken in every field, that of an edited message included."""
    line = "x" * 3000
    script(page, [{"content": line}])
    send(page, line)
    answer_of(page)
    sizes = """() => [document.documentElement.scrollWidth,
        ...[...document.querySelectorAll("textarea")]
            .filter((node) => node.checkVisibility())
            .map((node) => Math.ceil(node.getBoundingClientRect().right))]"""
    for width in (1280, 360):
        page.set_viewport_size({"width": width, "height": 740})
        page.fill("#message", line)
        for speaker in ("user", "assistant"):
            page.dispatch_event(f"article.{speaker} [data-action=edit]", "click")
            found = page.evaluate(sizes)
            assert len(found) == 3 and max(found) <= width
            page.dispatch_event("article >> text=Cancel", "click")
        settings(page, system=line, tools=line)
        page.click("#settings-button")
        found = page.evaluate(sizes)
        assert len(found) == 4 and max(found) <= width
        page.click("#settings-button")
    page.click("#tab-completion")
    page.fill("#prompt", line)
    assert page.evaluate("document.documentElement.scrollWidth") == 360


COLORS = (
    "--text --soft --accent --bad --code-keyword --code-string --code-number --code-name".split()
)


def test_the_layout_fits_the_screen_and_its_colours_can_be_read(page):
    """The layout fits the screen and its colours are readable, on desktop and phone, light and
    dark.

    Contrast is computed as WCAG defines it: at least 4.5, and 7 for most text.
    """
    settings(page, max_tokens="12", seed="1")
    send(page, "x" * 80 + " Tell me a story")
    show_tokens(page)

    def check(width: int) -> None:
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        boxes = page.evaluate("""[...document.querySelectorAll("button, input, textarea, .choices")]
            .filter((node) => node.checkVisibility({ visibilityProperty: true }))
            .map((node) => [node.getBoundingClientRect(), node.outerHTML])
            .map(([box, html]) => [box.left, box.right, box.height, html])""")
        assert [box for box in boxes if box[0] < 0 or box[1] > width] == []
        assert [box for box in boxes if box[2] < 24] == [], "large enough for a finger"

    for width, scheme in [(1100, "light"), (1100, "dark"), (360, "dark"), (360, "light")]:
        page.set_viewport_size({"width": width, "height": 740})
        page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        back, text, *others = page.evaluate(CONTRAST, COLORS)
        assert (back < 0.1) == (scheme == "dark")
        assert text > 7 and min(others) > 4.5
        page.click(f"{DONE} .token.scored >> nth=3")
        check(width)
        page.keyboard.press("Escape")
        for tab in ("completion", "engine", "chat"):
            page.click(f"#tab-{tab}")
            check(width)
