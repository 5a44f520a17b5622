"""The reference against Meta's own model of llama-models, on 1, 2 and 4 ranks, in float32."""

import json
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import meta as oracle
from helpers.checkpoints import change_params, random_state, write_byte_tokenizer, write_meta
from helpers.launch import DEMO, PROGRAMS, environment
from helpers.prompts import prompts_of, user
from llama import Llama as Engine
from llama.reference import Llama
from llama.reference.generation import sample_top_p
from llama.tokenizer import Dialog, Tokenizer

NUM_SHAPES = 20
GREEDY = {"max_gen_len": 12, "temperature": 0, "logprobs": True}


def random_params(seed: int) -> dict[str, Any]:
    """Return the sizes of a small model that 1, 2 and 4 ranks can share."""
    draw = random.Random(seed)
    n_kv_heads = draw.choice([1, 2, 4, 8])
    n_heads = n_kv_heads * draw.choice([n for n in (1, 2, 3, 4) if n_kv_heads * n % 4 == 0])
    params = {
        "dim": n_heads * draw.choice([4, 8, 12]),
        "n_layers": draw.randint(1, 3),
        "n_heads": n_heads,
        "n_kv_heads": n_kv_heads,
        "vocab_size": 512,
        "multiple_of": draw.choice([4, 12, 32]),
        "ffn_dim_multiplier": draw.choice([None, 1.3]),
        "norm_eps": draw.choice([1e-5, 1e-3]),
        "rope_theta": draw.choice([10_000.0, 500_000.0]),
        "use_scaled_rope": draw.random() < 0.5,
    }
    return {name: value for name, value in params.items() if value is not None}


class Model:
    """A random model, its folder of each number of shards, and what Meta's model answers.

    `answers` are Meta's greedy answers to each prompt alone, and `scores` the log-probabilities of
    prompt and answer.
    """

    def __init__(self, seed: int, root: Path) -> None:
        self.params = random_params(seed)
        state = random_state(self.params, seed)
        self.folders = {}
        for size in (1, 2, 4):
            self.folders[size] = write_meta(root / f"{seed}-{size}", self.params, state, size)
            write_byte_tokenizer(self.folders[size])
        draw = random.Random(seed)
        lengths = [draw.randint(1, 40) for _ in range(draw.randint(1, 6))]
        self.prompts = prompts_of(lengths, seed=seed)
        tokenizer = Tokenizer(
            self.folders[1] / "tokenizer.model",
            llama_3_0=not self.params["use_scaled_rope"],
        )
        theirs = oracle.model(state, self.params)
        self.answers = [
            oracle.greedy(theirs, prompt, 12, tokenizer.stop_tokens) for prompt in self.prompts
        ]
        texts = [x + y for x, y in zip(self.prompts, self.answers, strict=True)]
        self.scores = [oracle.logprobs(theirs, text) for text in texts]

    def check(self, tokens: list[list[int]], scores: list[list[float]], echo: bool) -> None:
        assert len(tokens) == len(self.prompts)
        for i, prompt in enumerate(self.prompts):
            start = 0 if echo else len(prompt)
            assert tokens[i] == (prompt + self.answers[i])[start:], self.params
            assert scores[i] == pytest.approx(self.scores[i][start:], abs=1e-4), self.params


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> list[Model]:
    oracle.join_a_world_of_one()
    made = [Model(seed, tmp_path_factory.mktemp("models")) for seed in range(NUM_SHAPES)]
    oracle.leave_the_world()
    assert sum(len(set(map(tuple, model.answers))) > 1 for model in made) > NUM_SHAPES / 2
    return made


def on_ranks(num_ranks: int, jobs: list[dict], folder: Path) -> list[list[Any]]:
    """Run jobs under torchrun, and return the results of each rank."""
    (folder / "jobs.json").write_text(json.dumps(jobs))
    program = [str(PROGRAMS / "reference_ranks.py"), str(folder / "jobs.json"), str(folder)]
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_ranks}"]
    if num_ranks == 1:
        launcher = []  # a process without torchrun's variables
    done = subprocess.run(
        [sys.executable, *launcher, *program],
        env=environment(), capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(num_ranks)]


@pytest.mark.dist
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_it_equals_metas_model_on_random_shapes(num_ranks, models, tmp_path):
    """Ragged batches give the ids and log-probabilities of each prompt alone, on every rank.

    Every second model echoes its prompts.
    """
    jobs = [
        {
            "folder": str(model.folders[num_ranks]),
            "prompts": model.prompts,
            "generate": GREEDY | {"echo": bool(i % 2)},
        }
        for i, model in enumerate(models)
    ]
    for results in on_ranks(num_ranks, jobs, tmp_path):
        for i, result in enumerate(results):
            models[i].check(*result, echo=bool(i % 2))


@pytest.mark.dist
def test_ranks_draw_the_same_tokens(models, tmp_path):
    """Two ranks that share a model draw the same tokens, by the seed; so do two copies.

    Shards that are not as many as ranks are an error on each rank.
    """
    model = models[0]
    sampled = {"max_gen_len": 12, "temperature": 1.0, "top_p": 0.95}
    job = {"folder": str(model.folders[2]), "prompts": model.prompts, "generate": sampled}
    jobs = [job, job, job | {"build": {"seed": 2}}, job | {"folder": str(model.folders[4])}]
    first, second = on_ranks(2, jobs, tmp_path)
    assert first == second
    assert first[0] == first[1] != first[2]
    assert re.search(r"4 files .* and 2 ranks share the model: start 4 ranks", first[3])


def build(folder: Path, max_seq_len: int = 64, max_batch_size: int = 4, **options: Any) -> Llama:
    return Llama.build(folder, folder / "tokenizer.model", max_seq_len, max_batch_size, **options)


@pytest.mark.parametrize("index", [0, 1, 2, 3, 4, 5])
def test_the_engine_equals_it(index, models):
    """The engine gives the ids, the texts and the log-probabilities of the reference."""
    folder = models[index].folders[1]
    reference = build(folder, 128, 8)
    engine = Engine.build(str(folder), None, 128, 8, device="cpu", dtype="fp32", verbose=False)
    for echo in (False, True):
        wanted = reference.generate(models[index].prompts, 12, 0.0, logprobs=True, echo=echo)
        found = engine.generate(models[index].prompts, 12, 0.0, logprobs=True, echo=echo)
        assert found[0] == wanted[0]
        assert wanted[1] is not None and found[1] is not None
        for own, other in zip(found[1], wanted[1], strict=True):
            assert own == pytest.approx(other, abs=1e-4)
    engine.close()


def test_texts_and_dialogs_are_those_of_the_engine(demo):
    reference = build(DEMO, 256)
    texts = ["Once upon a time", "The capital"]
    for one, other in zip(
        reference.text_completion(texts, 0.0, max_gen_len=16, logprobs=True, echo=True),
        demo.text_completion(texts, 0.0, max_gen_len=16, logprobs=True, echo=True),
        strict=True,
    ):
        assert one["logprobs"] == pytest.approx(other.pop("logprobs"), abs=1e-4)
        assert {name: one[name] for name in ("generation", "tokens")} == other
    dialogs: list[Dialog] = [[user("What is the capital of France?")], [user("Tell me a story.")]]
    for one, other in zip(
        reference.chat_completion(dialogs, 0.0, max_gen_len=16, logprobs=True),
        demo.chat_completion(dialogs, 0.0, max_gen_len=16, logprobs=True),
        strict=True,
    ):
        assert one["generation"] == other["generation"]
        assert one["tokens"] == other["tokens"]
        assert one["logprobs"] == pytest.approx(other["logprobs"], abs=1e-4)


def test_what_metas_code_gets_wrong_is_right(models):
    """Stop tokens of a prompt end nothing, and a prompt that fills the window is scored in step."""
    llama = build(models[0].folders[1], 32)
    stop = min(llama.tokenizer.stop_tokens)
    prompt = [*prompts_of([6])[0], stop, *prompts_of([4])[0]]
    tokens, _ = llama.generate([prompt], 4, 0.0, echo=True)
    assert tokens[0][: len(prompt)] == prompt
    full = prompts_of([32], seed=1)[0]
    filled, scores = llama.generate([full], None, 0.0, logprobs=True, echo=True)
    assert filled == [full] and scores is not None
    _, wanted = build(models[0].folders[1], 64).generate([full], 1, 0.0, logprobs=True, echo=True)
    assert wanted is not None
    assert scores[0] == pytest.approx(wanted[0][:32], abs=1e-5)


def test_top_p_keeps_the_tokens_before_which_the_mass_is_at_most_p():
    """It draws each kept token by its probability, and no other; p = 0 keeps the top token."""
    probs = torch.tensor([[0.125, 0.5, 0.25, 0.125]]).expand(4000, -1)
    draw = torch.Generator().manual_seed(0)
    counts = sample_top_p(probs, 0.5, draw).flatten().bincount(minlength=4)
    assert counts.tolist()[0] == counts.tolist()[3] == 0  # 0.75 comes before them
    assert int(counts[1]) == pytest.approx(4000 * 2 / 3, rel=0.05)
    assert (sample_top_p(probs, 0.0, draw) == 1).all()


def test_no_global_state_changes(models, capsys):
    """It leaves the default type, the seed and the number of threads of torch as they are."""

    def state() -> tuple[Any, ...]:
        drawn = torch.random.get_rng_state().sum()
        return torch.get_default_dtype(), int(drawn), torch.get_num_threads(), sys.stdout

    before = state()
    build(models[0].folders[1]).generate(models[0].prompts[:1], 4, 1.0)
    assert state() == before


def test_other_types_of_weights(models):
    """`dtype` chooses the type of weights, activations and cache."""
    llama = build(models[0].folders[1], dtype=torch.bfloat16)
    assert {x.dtype for x in llama.model.parameters()} == {torch.bfloat16}
    attention: Any = llama.model.layers[0].attention
    assert attention.cache_k.dtype == attention.cache_v.dtype == torch.bfloat16
    assert llama.generate(models[0].prompts[:2], 4, 0.0)[0][0]


def test_errors_name_value_and_remedy(models, tmp_path):
    folder = models[0].folders[1]
    llama = build(folder, 16, 2)
    with pytest.raises(ValueError, match="3 prompts: give 1 to max_batch_size=2"):
        llama.generate([[256]] * 3, 1)
    with pytest.raises(ValueError, match="prompt 1 has 17 tokens: give 1 to max_seq_len=16"):
        llama.generate([[256], [256] * 17], 1)
    with pytest.raises(ValueError, match="prompt 0 has 0 tokens"):
        llama.generate([[]], 1)
    with pytest.raises(ValueError, match=r"2 files .* and 1 ranks .*: start 2 ranks, or write 1"):
        build(models[0].folders[2])
    with pytest.raises(ValueError, match="model_parallel_size=2 does not divide"):
        build(folder, model_parallel_size=2)
    shutil.copytree(folder, tmp_path / "copy")
    change_params(tmp_path / "copy", window=4096)
    with pytest.raises(ValueError, match=r"may change answers: \{'window'\}"):
        build(tmp_path / "copy")
    (tmp_path / "copy" / "params.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"params\.json"):
        build(tmp_path / "copy")
