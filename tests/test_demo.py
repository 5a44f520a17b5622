"""The bundled demo model: its training answers, from this runtime and from Meta's."""

import json
import random

import pytest
import torch

from demo_model.corpus import Turn, fact_turns, facts, story_turns
from helpers import meta as oracle
from helpers.launch import DEMO
from helpers.prompts import user
from llama import Dialog, Llama


def test_it_is_small_and_in_metas_layout():
    files = {path.name: path.stat().st_size for path in DEMO.iterdir()}
    assert set(files) == {"consolidated.00.pth", "params.json", "tokenizer.model"}
    assert sum(files.values()) < 10 << 20
    params = json.loads((DEMO / "params.json").read_text())
    assert params["n_kv_heads"] < params["n_heads"] and params["vocab_size"] == 2048


def test_its_context_is_that_of_its_training(capsys):
    """Without max_seq_len, a build has the 512 tokens that the model was trained on."""
    demo = Llama.build(str(DEMO), device="cpu", dtype="bf16")
    shape = "n_layers=4, dim=256, max_seq_len=512, max_batch_size=32"
    assert repr(demo) == f"Llama({shape}, bfloat16 on cpu)"
    assert demo.model.params.max_seq_len == 512
    assert "max_seq_len=512, " in (line := capsys.readouterr().out)
    assert "model context 512 tokens" in line
    with pytest.raises(ValueError, match="max_seq_len=513 is beyond this model's limit of 512"):
        Llama.build(str(DEMO), max_seq_len=513, device="cpu")


@pytest.mark.parametrize("dtype", ["bf16", "int8"])
def test_it_answers_every_question_it_was_taught(dtype):
    """It answers every question of its training.

    Each fact in its first phrasing, decoded greedily: at least 98 % are exactly right.
    """
    demo = Llama.build(str(DEMO), None, 384, 64, device="cpu", dtype=dtype)
    known = facts()
    assert len(known) >= 300
    dialogs: list[Dialog] = [[{"role": "user", "content": f.questions[0]}] for f in known]
    answers = demo.chat_completion(dialogs, 0.0, max_gen_len=60)
    right = [
        fact.answer == answer["generation"]["content"]
        for fact, answer in zip(known, answers, strict=True)
    ]
    assert sum(right) >= 0.98 * len(right)
    (paris,) = demo.chat_completion(
        [[{"role": "user", "content": "What is the capital of France?"}]], 0.0
    )
    assert paris["generation"]["content"] == "The capital of France is Paris."


def mixed_chat(rng: random.Random, question: str, num_exchanges: int) -> Dialog:
    """Return a chat of stories and questions, a quarter of them stories, that ends so."""
    turns: list[Turn] = []
    for _ in range(num_exchanges):
        turns += story_turns(rng) if rng.random() < 0.25 else fact_turns(rng, rng.choice(facts()))
    dialog: Dialog = [{"role": role, "content": text} for role, text in turns]
    return [*dialog, user(question)]


def test_it_answers_after_any_mix_of_stories_and_questions():
    """Nine in ten questions are answered rightly after up to eight exchanges."""
    demo = Llama.build(str(DEMO), None, 512, 32, device="cpu", dtype="bf16")
    rng = random.Random(3)
    known = facts()
    counts = dict.fromkeys(range(9), 0)
    for num_exchanges in counts:
        asked: list[tuple[Dialog, str]] = []
        while len(asked) < 40:
            fact = rng.choice(known)
            dialog = mixed_chat(rng, fact.questions[0], num_exchanges)
            if len(demo.formatter.encode_dialog_prompt(dialog)) < 512 - 60:
                asked.append((dialog, fact.answer))
        answers = demo.chat_completion([dialog for dialog, _ in asked], 0.0, max_gen_len=60)
        counts[num_exchanges] = sum(
            answer["generation"]["content"] == right
            for answer, (_, right) in zip(answers, asked, strict=True)
        )
    assert all(count >= 0.8 * 40 for count in counts.values()), counts
    assert sum(counts.values()) >= 0.9 * 40 * len(counts), counts


def test_it_tells_stories_that_end(demo):
    """It tells stories that end.

    Greedy and sampled stories are a few sentences, ended by the model itself and not by the limit.
    """
    ids = demo.tokenizer.encode("Once upon a time", bos=True, eos=False)
    sampled, _ = demo.generate([ids] * 3, 300, 0.6, 0.9, seed=1)
    assert len(set(map(tuple, sampled))) == 3
    for tokens in [*demo.generate([ids], 300, 0.0)[0], *sampled]:
        text = demo.tokenizer.decode(tokens)
        assert len(tokens) < 300 and text.endswith((".", "!", '"'))
        assert text.count(".") >= 5 and "\ufffd" not in text


def test_it_looks_back_in_a_dialog(device):
    """It uses the context of a dialog.

    The second question of a dialog is answered, and not the first again, on every device.
    """
    llama = Llama.build(str(DEMO), None, 384, 4, device=device)
    (answer,) = llama.chat_completion(
        [
            [
                {"role": "user", "content": "What is the capital of Japan?"},
                {"role": "assistant", "content": "The capital of Japan is Tokyo."},
                {"role": "user", "content": "What is the opposite of hot?"},
            ]
        ],
        0.0,
    )
    assert answer["generation"]["content"] == "The opposite of hot is cold."


@pytest.mark.parametrize("written", oracle.MODELS)
def test_metas_own_model_says_the_same(written, demo):
    """Meta's own model, and the reference, give the same answers.

    The bundled files in that Transformer, float32, greedy, give the ids of this runtime.
    """
    oracle.join_a_world_of_one()
    try:
        state = torch.load(DEMO / "consolidated.00.pth", weights_only=True)
        params = json.loads((DEMO / "params.json").read_text())
        theirs = oracle.MODELS[written](state, params, max_seq_len=128)
        for text in ("Once upon a time", "The capital of France is"):
            prompt = demo.tokenizer.encode(text, bos=True, eos=False)
            wanted = oracle.greedy(theirs, prompt, 60, demo.tokenizer.stop_tokens)
            assert demo.generate([prompt], 60, temperature=0)[0] == [wanted]
    finally:
        oracle.leave_the_world()
