"""Models for embeddings, classification and reranking, against transformers in float32."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.nn.functional import cosine_similarity, normalize

from helpers.embedders import last_states, pooling_files, write_model
from helpers.kernels import KERNELS_RUN
from helpers.prompts import prompts_of
from llama import Llama
from llama.checkpoint.write.convert import convert, pack
from llama.cli import doctor

IDS = prompts_of([9, 1, 33, 18], seed=4)
TEXTS = ["the cat sleeps", "where is the ball?", "a"]
NVIDIA = {"architectures": ["LlamaBidirectionalModel"], "model_type": "llama_bidirec"}
RERANKER = {
    "architectures": ["LlamaBidirectionalForSequenceClassification"],
    "model_type": "llama_bidirec",
    "pooling": "avg",
}
DIALOG = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello there."}]


def build(folder: Path, **options: Any) -> Llama:
    settings: dict[str, Any] = {"device": "cpu", "dtype": "fp32", "verbose": False} | options
    return Llama.build(str(folder), None, 256, 4, **settings)


def close(found: Any, wanted: Any) -> bool:
    return bool(np.allclose(np.asarray(found), np.asarray(wanted), atol=2e-5, rtol=1e-4))


@pytest.fixture(scope="module")
def bidirectional(tmp_path_factory) -> tuple[Path, Any]:
    """A model like NVIDIA's embedding models, with the files of sentence-transformers."""
    folder = tmp_path_factory.mktemp("bidirectional") / "model"
    files = pooling_files("mean_tokens", query="query: ", passage="passage: ")
    model = write_model(
        folder,
        transformers.LlamaModel,
        is_causal=False,
        changes=NVIDIA,
        sentence_transformers=files,
    )
    return folder, model


@pytest.fixture(scope="module")
def classifier(tmp_path_factory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("classifier") / "model"
    labels: dict[str, Any] = {"id2label": {0: "bad", 1: "good", 2: "none"}}
    return folder, write_model(folder, transformers.LlamaForSequenceClassification, **labels)


def test_a_bidirectional_model_embeds_as_its_files_say(bidirectional):
    folder, model = bidirectional
    llama = build(folder)
    states = [last_states(model, ids) for ids in IDS]
    for vector, state in zip(llama.embed(IDS), states, strict=True):
        assert close(vector, normalize(state.mean(0), dim=0))
    for vector, state in zip(
        llama.embed(IDS, pooling="last", normalize=False), states, strict=True
    ):
        assert close(vector, state[-1])
    assert not close(llama.embed([IDS[0]]), llama.embed([IDS[0][:-1] + [5]])), "vectors are alike"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    (query,) = llama.embed(TEXTS[:1], prompt_name="query", dimensions=16)
    ids = tokenizer(f"query: {TEXTS[0]}").input_ids
    assert close(query, normalize(last_states(model, ids).mean(0)[:16], dim=0))
    passages = [
        last_states(model, tokenizer(f"passage: {text}").input_ids).mean(0) for text in TEXTS[1:]
    ]
    whole = last_states(model, ids).mean(0)
    wanted = [float(cosine_similarity(whole, passage, dim=0)) for passage in passages]
    assert close(llama.score(TEXTS[0], TEXTS[1:]), wanted)
    with pytest.raises(ValueError, match="its attention is bidirectional"):
        llama.generate([[1, 2]], 4)
    with pytest.raises(ValueError, match="no classification head"):
        llama.classify(["x"])


@pytest.mark.parametrize(
    "changes",
    [
        {"max_seq_length": 5},
        {"do_lower_case": True},
        {"max_seq_length": 7, "do_lower_case": True},
        {"max_seq_length": None, "do_lower_case": False},
    ],
)
def test_texts_are_cut_and_lowered_as_sentence_bert_config_says(tmp_path, changes):
    """Its documentation: the text is lowered with its prompt, and then cut to so many tokens."""
    files = pooling_files("mean_tokens", query="Query: ") | {"sentence_bert_config.json": changes}
    end = "<|end_of_text|>"
    model = write_model(tmp_path, transformers.LlamaModel, ends=(end,), sentence_transformers=files)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    llama = build(tmp_path)
    for text in ("The Story of Tom and Lily, who went to the PARK.", "A"):
        given = f"Query: {text}"
        given = given.lower() if changes.get("do_lower_case") else given
        length = changes.get("max_seq_length")
        ids = tokenizer(given, truncation=length is not None, max_length=length).input_ids
        (found,) = llama.embed([text], prompt_name="query")
        assert close(found, normalize(last_states(model, ids).mean(0), dim=0))


def test_doctor_and_the_first_line_say_what_a_model_is_for(bidirectional, classifier, capsys):
    for (folder, _), purpose in {
        bidirectional: "embeds texts by the mean of all tokens with the prompts query, passage; "
        "generates nothing, as its attention is bidirectional",
        classifier: "labels texts (bad, good, none) by the last token; generates nothing, as its "
        "files (LlamaForSequenceClassification) have no lm_head",
    }.items():
        facts = {x.name: x for x in doctor._checkpoint(str(folder), torch.device("cpu"))}
        assert facts["purpose"].text == purpose and "chat" not in facts
        assert not any(fact.problem for fact in facts.values())
        build(folder, verbose=True)
        assert capsys.readouterr().out.endswith(f"; {purpose}\n")


def test_a_bidirectional_prompt_is_one_step(bidirectional):
    """Prompts longer than what is left of a step wait for the next; no prefix is reused."""
    folder, model = bidirectional
    llama = Llama.build(str(folder), None, 2500, 3, device="cpu", dtype="fp32", verbose=False)
    prompts = prompts_of([2300, 900, 40], seed=6)
    vectors = llama.embed([*prompts, prompts[2]], normalize=False)
    for ids, vector in zip(prompts, vectors, strict=False):
        assert np.allclose(vector, last_states(model, ids).mean(0).numpy(), atol=1e-4)
    assert llama.engine.stats.steps == 2
    assert llama.engine.stats.prompt_tokens == sum(map(len, prompts)) + 40


@pytest.mark.skipif(not KERNELS_RUN, reason="the native layers are compared")
def test_every_executor_is_bidirectional(bidirectional):
    """The bf16 kernels, which are batch-invariant, have the bits of the modules."""
    folder, model = bidirectional
    llama = build(folder, dtype="bf16")
    found = llama.embed(IDS, normalize=False)
    assert llama.model.execution_path() is not None
    llama.model.use_modules()
    assert np.array_equal(np.stack(llama.embed(IDS, normalize=False)), np.stack(found))
    llama.model.use_modules(False)
    for ids, vector in zip(IDS, found, strict=True):
        assert np.array_equal(llama.embed([ids], normalize=False)[0], vector)
        state = last_states(model, ids).mean(0)
        assert float(cosine_similarity(torch.from_numpy(vector), state, dim=0)) > 0.999


def test_a_chat_model_becomes_bidirectional_by_a_flag(tmp_path):
    """As LLM2Vec's models, whose files do not say it; a mean may leave out the instruction."""
    model = write_model(tmp_path, transformers.LlamaForCausalLM)
    model.config.is_causal = False
    llama = build(tmp_path, bidirectional=True, pooling="mean")
    (vector,) = llama.embed([TEXTS[0]], prompt="Find: ", include_prompt=False, normalize=False)
    ids = llama.tokenizer.encode(f"Find: {TEXTS[0]}", bos=True, eos=False)
    skip = len(llama.tokenizer.encode("Find: ", bos=True, eos=False))
    assert close(vector, last_states(model, ids)[skip:].mean(0))
    with pytest.raises(ValueError, match=r"speculate='lookup': .* leave out speculate"):
        build(tmp_path, bidirectional=True, speculate="lookup")


def test_the_first_token_of_a_bidirectional_model(tmp_path):
    model = write_model(
        tmp_path, transformers.LlamaModel, is_causal=False, changes={"pooling": "cls"}
    )
    llama = build(tmp_path)
    for ids, vector in zip(IDS, llama.embed(IDS), strict=True):
        assert close(vector, normalize(last_states(model, ids)[0], dim=0))


def test_a_headless_model_reads_its_special_tokens(tmp_path):
    """Its tokenizer ends texts with a token, whose state is the vector."""
    files = pooling_files("lasttoken", include_prompt=True)
    end = "<|end_of_text|>"
    model = write_model(tmp_path, transformers.LlamaModel, ends=(end,), sentence_transformers=files)
    llama = build(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text, vector in zip(TEXTS, llama.embed(TEXTS), strict=True):
        ids = tokenizer(text).input_ids
        assert ids[-1] == tokenizer.convert_tokens_to_ids(end)
        assert close(vector, normalize(last_states(model, ids)[-1], dim=0))
    (cut,) = llama.embed([TEXTS[1]], truncate=4, normalize=False)
    assert close(cut, last_states(model, [*tokenizer(TEXTS[1]).input_ids[:3], ids[-1]])[-1])
    with pytest.raises(ValueError, match=r"\(LlamaModel\) have no lm_head"):
        llama.text_completion(["x"])
    for write in (convert, pack):
        with pytest.raises(
            ValueError, match=r"cannot be converted: its files \(LlamaModel\) have no"
        ):
            write(tmp_path, tmp_path / "out")


def test_labels_are_those_of_transformers(classifier):
    folder, model = classifier
    llama = build(folder)
    for ids, found in zip(IDS, llama.classify(IDS), strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([ids])).logits[0]
        assert close(found.logits, logits) and close(found.probs, logits.softmax(-1))
        assert found.label == model.config.id2label[int(logits.argmax())]
    with pytest.raises(ValueError, match="has 3 labels: pairs need one"):
        llama.score("x", ["y"])
    with pytest.raises(ValueError, match="no lm_head"):
        llama.chat_completion([DIALOG[:1]])


def test_a_reward_is_that_of_a_conversation(tmp_path):
    """A reward model reads the chat template without a header for an answer."""
    model = write_model(
        tmp_path, transformers.LlamaForSequenceClassification, num_labels=1, torch_dtype="float32"
    )
    template = (
        "{{ bos_token }}{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    (tmp_path / "chat_template.jinja").write_text(template)
    llama = build(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer.apply_chat_template(DIALOG, return_dict=False)
    (found,) = llama.classify([DIALOG])
    with torch.inference_mode():
        reward = float(model(torch.tensor([ids])).logits[0, 0])
    assert close(found.logits, [reward]) and close(found.probs, torch.tensor(reward).sigmoid())
    pairs = [tokenizer(TEXTS[0], text).input_ids for text in TEXTS[1:]]
    with torch.inference_mode():
        wanted = [float(model(torch.tensor([ids])).logits[0, 0].sigmoid()) for ids in pairs]
    assert close(llama.score(TEXTS[0], TEXTS[1:]), wanted)
    assert llama.score([TEXTS[0]] * 2, TEXTS[1:]) == llama.score(TEXTS[0], TEXTS[1:])


def test_a_bidirectional_reranker(tmp_path):
    """NVIDIA's reranker: the mean of the states, a head, and the prompt of its model card."""
    model = write_model(
        tmp_path,
        transformers.LlamaForSequenceClassification,
        num_labels=1,
        is_causal=False,
        changes=RERANKER | {"sentence_transformers": {"activation_fn": "torch.nn.Identity"}},
    )
    llama = build(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    wanted = []
    for text in TEXTS:
        ids = tokenizer(f"question:ball \n \n passage:{text}").input_ids
        with torch.inference_mode():
            wanted.append(float(model.score(last_states(model, ids).mean(0))))
    assert close(llama.score("ball", TEXTS), wanted)
    order = sorted(range(3), key=lambda i: -wanted[i])
    assert [i for i, _ in llama.rerank("ball", TEXTS, top_n=2)] == order[:2]


def changed(folder: Path, out: Path, **changes: Any) -> Path:
    """Copy a model with other tensors (None removes one) and return the new folder."""
    out.mkdir()
    for path in folder.iterdir():
        if path.is_file():
            (out / path.name).write_bytes(path.read_bytes())
    weights = load_file(out / "model.safetensors") | changes
    kept = {name: tensor for name, tensor in weights.items() if tensor is not None}
    save_file(kept, out / "model.safetensors", {"format": "pt"})
    return out


def configured(folder: Path, **keys: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))
    return folder


def test_what_is_not_known_is_named(classifier, bidirectional, tmp_path):
    folder, _ = classifier
    gate: dict[str, Any] = {"score.weight": None, "gating.weight": torch.ones(4, 128)}
    unknown = configured(
        changed(folder, tmp_path / "gate", **gate), architectures=["LlamaForRewardModelWithGating"]
    )
    nan: dict[str, Any] = {"score.weight": torch.full((3, 128), torch.nan)}
    wide: dict[str, Any] = {"score.weight": torch.ones(5, 128)}
    for found, message in {
        unknown: "'gating.weight' belongs to a head of LlamaForRewardModelWithGating",
        changed(folder, tmp_path / "none", **{"score.weight": None}): "score.weight is missing",
        changed(folder, tmp_path / "bias", **{"score.bias": torch.ones(3)}): "'score.bias' belongs",
        changed(folder, tmp_path / "nan", **nan): "score.weight holds NaN",
        changed(folder, tmp_path / "wide", **wide): r"has shape \(5, 128\)",
    }.items():
        with pytest.raises(ValueError, match=message):
            build(found)
    files = {
        "1_Pooling/config.json": ({"pooling_mode_max_tokens": True}, "the pooling is"),
        "modules.json": ([{"type": "sentence_transformers.models.Dense"}], "models.Dense"),
        "config_sentence_transformers.json": ({"prompts": {"a": 1}}, "prompts is"),
        "sentence_bert_config.json": ({"max_seq_length": "8"}, "max_seq_length='8' must be"),
    }
    for i, (name, (content, message)) in enumerate(files.items()):
        out = changed(bidirectional[0], tmp_path / f"files{i}")
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_text(json.dumps(content))
        with pytest.raises(ValueError, match=message):
            build(out)
    first = configured(changed(folder, tmp_path / "first"), pooling="cls")
    with pytest.raises(ValueError, match="would be the same for every text"):
        build(first)
