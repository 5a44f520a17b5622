"""A chat template that takes long for some dialogs holds up nobody else."""

import asyncio
import time
from typing import Any

import httpx
import pytest

from helpers.fine_tunes import make_model
from helpers.services import service_of
from llama import Llama
from llama.server.app import make_app

TEMPLATE = (
    "{% for m in messages %}{% if m.content == 'slow' %}{% for i in range(99999) %}"
    "{% for j in range(99999) %}{% endfor %}{% endfor %}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)


def question(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 1}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize", "/v1/messages/count_tokens"])
def test_a_slow_template_does_not_hold_up_the_event_loop(tmp_path, path):
    folder = make_model(tmp_path / "model", "chatml")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    asked = {"messages": question("slow")["messages"]}
    if path != "/tokenize":
        asked = {**asked, **({"max_tokens": 1} if "chat" in path else {})}

    async def run(llama: Llama) -> None:
        service = service_of()
        service.start(llama)
        transport = httpx.ASGITransport(make_app(service))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            slow = asyncio.create_task(client.post(path, json=asked, timeout=60))
            num_answers = 0
            while not slow.done():
                assert (await client.get("/health")).status_code == 200
                num_answers += 1
                await asyncio.sleep(0.02)
            refused = await slow
            end = time.monotonic() + 60  # on a busy machine, the slow rendering goes on for a while
            while time.monotonic() < end:
                quick = await client.post("/v1/chat/completions", json=question("Hi"), timeout=60)
                if quick.status_code == 200:
                    break
        service.close()
        assert refused.status_code == 400, refused.text
        assert "processor time" in refused.text or "to prepare" in refused.text
        assert quick.status_code == 200
        assert num_answers > 5, "the event loop was held up"

    with Llama.build(str(folder), max_seq_len=128, max_batch_size=1, device="cpu") as llama:
        asyncio.run(run(llama))
