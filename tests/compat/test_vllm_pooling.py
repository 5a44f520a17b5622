"""vLLM's pooling calls: the numbers are those of `Llama`, in vLLM's classes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from helpers.embedders import write_model
from llama.compat.vllm import (
    LLM,
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingParams,
    PoolingRequestOutput,
    ScoringRequestOutput,
)

TEXTS = ["the cat sleeps", "where is the ball?", "a"]
ARGS: dict[str, Any] = {"dtype": "float32", "device": "cpu", "max_model_len": 64}


@pytest.fixture(scope="module")
def reranker(tmp_path_factory) -> LLM:
    folder: Path = tmp_path_factory.mktemp("vllm") / "m"
    write_model(folder, transformers.LlamaForSequenceClassification, num_labels=1)
    return LLM(str(folder), runner="pooling", **ARGS)


def test_embeddings(tmp_path):
    write_model(tmp_path, transformers.LlamaForCausalLM)
    config = {"pooling_type": "MEAN"}
    llm = LLM(str(tmp_path), task="embed", pooler_config=config, **ARGS)
    wanted = llm.llama.embed(TEXTS, pooling="mean")
    for outputs in (llm.embed(TEXTS), llm.embed([{"prompt": text} for text in TEXTS])):
        for output, vector in zip(outputs, wanted, strict=True):
            assert isinstance(output, EmbeddingRequestOutput) and output.finished
            assert np.allclose(output.outputs.embedding, vector, rtol=0, atol=1e-6)
            assert output.outputs.hidden_size == 128
    (one,) = llm.embed(wanted_ids := llm.llama.pooler.encode(TEXTS[0]))
    assert np.allclose(one.outputs.embedding, wanted[0], rtol=0, atol=1e-6)
    assert one.prompt_token_ids == wanted_ids
    params = PoolingParams(dimensions=8, normalize=False)
    (encoded,) = llm.encode(TEXTS[0], params, pooling_task="embed", truncate_prompt_tokens=3)
    (raw,) = llm.llama.embed(TEXTS[:1], pooling="mean", dimensions=8, normalize=False, truncate=3)
    assert isinstance(encoded.outputs.data, torch.Tensor)
    assert np.allclose(encoded.outputs.data.numpy(), raw)
    wrong: Any = {"dimensions": 2}
    for message, call in {
        "no classification head": lambda: llm.classify("x"),
        "does not support lora_request": lambda: llm.embed("x", lora_request=1),
        "pooling_task='token_embed'": lambda: llm.encode("x", pooling_task="token_embed"),
        "pooling_params must be": lambda: llm.embed("x", pooling_params=wrong),
        "pooler_config=": lambda: LLM("x", pooler_config={"pooling_type": "CLS"}),
    }.items():
        with pytest.raises((TypeError, ValueError), match=message):
            call()


def test_labels_rewards_and_scores(reranker):
    llama = reranker.llama
    wanted = llama.classify(TEXTS)
    for output, result in zip(reranker.classify(TEXTS), wanted, strict=True):
        assert isinstance(output, ClassificationRequestOutput)
        assert output.outputs.probs == result.probs and output.outputs.num_classes == 1
    for output, result in zip(reranker.reward(TEXTS), wanted, strict=True):
        assert type(output) is PoolingRequestOutput
        assert output.outputs.data.tolist() == result.logits
    scores = llama.score("ball", TEXTS)
    for output, score in zip(reranker.score("ball", TEXTS), scores, strict=True):
        assert isinstance(output, ScoringRequestOutput) and output.outputs.score == score
    encoded = reranker.encode(TEXTS)
    assert [x.outputs.data.tolist() for x in encoded] == [pytest.approx(x.probs) for x in wanted]
    with pytest.raises(ValueError, match="cannot generate"):
        reranker.generate("x")
