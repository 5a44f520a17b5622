"""A prompt beyond the context: clients and agents recognize the error, and shorten the dialog.

The expressions are those that opencode, LiteLLM and LangChain search in the message of an error.
"""

import re
from typing import Any

import openai
import pytest

OPENCODE = r"maximum context length is \d+ tokens"
LITELLM = "this model's maximum context length is"
LANGCHAIN = "prompt is too long"  # openai's newer clients do not show it the code
LONG = "the cat sat " * 400
TURNS: Any = [{"role": "user", "content": LONG}]


@pytest.fixture(scope="module")
def client(server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("ask", "name"),
    [
        (lambda c, **m: c.chat.completions.create(model="m", messages=TURNS, **m), "messages"),
        (lambda c, **m: c.completions.create(model="m", prompt=LONG, **m), "prompt"),
        (lambda c, **m: c.completions.create(model="m", prompt=["a", LONG], **m), "prompt[1]"),
        (lambda c, **m: c.responses.create(model="m", input=LONG, **m), "input"),
        (
            lambda c, stream: c.embeddings.create(
                model="m", input=["a", "b", LONG], extra_body={"pooling": "last"}
            ),
            "input[2]",
        ),
        (
            lambda c, **m: c.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "Hi"}], max_tokens=600, **m
            ),
            "prompt tokens and max_tokens=600",
        ),
    ],
)
def test_clients_recognize_a_prompt_that_is_too_long(client, ask, name, stream):
    with pytest.raises(openai.BadRequestError) as raised:
        ask(client, stream=stream)
    error = raised.value
    assert error.code == "context_length_exceeded"
    assert re.search(OPENCODE, str(error), re.IGNORECASE)
    assert LITELLM in str(error).lower() and "512 tokens" in error.body["message"]  # type: ignore[index]
    assert name in error.body["message"]  # type: ignore[index]
    assert (LANGCHAIN in error.body["message"]) == ("max_tokens" not in name)  # type: ignore[index]
    assert not re.search("prompt 0|build", str(error))
