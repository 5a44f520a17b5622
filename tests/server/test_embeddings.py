"""/v1/embeddings with real clients, alongside generation; the vectors are those of `Llama.embed`.

langchain-openai is installed in an environment of its own. In this environment run:
LANGCHAIN_PYTHON=ITS/bin/python python -m pytest -m hosts tests/server/test_embeddings.py
"""

import base64
import json
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import openai
import pytest

from helpers.launch import PROGRAMS
from helpers.web import web

LANGCHAIN = os.environ.get("LANGCHAIN_PYTHON", "")
TEXTS = ["The cat sleeps.", "a", "Where is the ball?"]
MEAN: dict[str, Any] = {"pooling": "mean"}


@pytest.fixture(scope="module")
def client(server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0)


def test_vectors_ids_and_usage(client, demo):
    """The client asks for base64 by itself; lists of numbers are the same vectors."""
    wanted = demo.embed(TEXTS, pooling="mean")
    ids = [demo.tokenizer.encode(text, bos=True, eos=False) for text in TEXTS]
    for inputs in (TEXTS, ids):
        found = client.embeddings.create(model="any", input=inputs, extra_body=MEAN)
        assert [x.index for x in found.data] == [0, 1, 2] and found.model == "any"
        assert found.usage.prompt_tokens == found.usage.total_tokens == sum(map(len, ids))
        for item, vector in zip(found.data, wanted, strict=True):
            assert item.embedding == pytest.approx(vector.tolist(), abs=1e-5)
    (one,) = client.embeddings.create(
        model="any", input=TEXTS[0], encoding_format="float", dimensions=8, extra_body=MEAN
    ).data
    (cut,) = demo.embed(TEXTS[:1], pooling="mean", dimensions=8)
    assert one.embedding == pytest.approx(cut.tolist(), abs=1e-5)


def test_base64_has_the_bits_of_the_numbers(server):
    url = f"{server.url}/v1/embeddings"
    body = {"input": [5, 6, 7], "normalize": False, **MEAN}
    numbers = web.post(url, json=body).json()["data"][0]["embedding"]
    text = web.post(url, json=body | {"encoding_format": "base64"}).json()
    bits = base64.b64decode(text["data"][0]["embedding"])
    assert np.array_equal(np.frombuffer(bits, "<f4"), np.array(numbers, np.float32))


def test_more_inputs_than_prompts_of_a_body(client, demo):
    """Six hundred inputs, which are run in groups, keep their order alongside a stream."""
    inputs = [[i % 700, 9] for i in range(600)]
    with ThreadPoolExecutor(1) as pool:
        text = pool.submit(
            client.completions.create, model="any", prompt="Once", max_tokens=40, temperature=0
        )
        data = client.embeddings.create(model="any", input=inputs, extra_body=MEAN).data
    alone = demo.text_completion(["Once"], 0.0, max_gen_len=40)
    assert text.result().choices[0].text == alone[0]["generation"]
    wanted = demo.embed(inputs[595:], pooling="mean")
    for item, vector in zip(data[595:], wanted, strict=True):
        assert item.embedding == pytest.approx(vector.tolist(), abs=1e-5)


@pytest.mark.hosts
@pytest.mark.skipif(not LANGCHAIN, reason="LANGCHAIN_PYTHON names no Python with langchain-openai")
def test_langchain_embeds(server, demo):
    command = [LANGCHAIN, str(PROGRAMS / "langchain_embeddings.py"), server.url, json.dumps(TEXTS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    documents, query = json.loads(done.stdout)
    wanted = demo.embed(TEXTS, pooling="mean", dimensions=16)
    for ours, vector in zip([*documents, query], [*wanted, wanted[0]], strict=True):
        assert ours == pytest.approx(vector.tolist(), abs=1e-5)
