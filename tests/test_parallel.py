"""Real processes: torchrun and gloo on 2 and 4 ranks, and ranks that differ."""

import json
import os
import re
import shutil
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from helpers.adapters import PREFIX, write_adapter
from helpers.checkpoints import ffn_dim, write_byte_tokenizer, write_meta
from helpers.embedders import write_model
from helpers.fixtures import PARAMS as TINY
from helpers.gguf_files import PARAMS as GGUF_PARAMS
from helpers.gguf_files import write_gguf
from helpers.kernels import HAS_KERNELS, KERNELS_RUN, without_amx
from helpers.launch import PROGRAMS, REPO, environment, run_program, torchrun, torchrun_groups
from helpers.prompts import prompts_of
from helpers.weights import flip_a_bit
from llama import Llama
from llama.checkpoint.packing import pack_matrix
from llama.compat.vllm import LLM, BeamSearchParams
from llama.compat.vllm import SamplingParams as VllmParams
from llama.model.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from llama.ops.norm import rms_norm
from llama.ranks.one_shot import MAX_BYTES
from llama.ranks.parallel import SAME_CALLS, Parallel
from llama.ranks.placement import Placement
from llama.weights.bytes import BytesWeight
from llama.weights.plain import PlainWeight

PROMPTS = prompts_of([3, 17, 9, 30, 5, 2], seed=20)
REPEATED = [prompt * 8 for prompt in PROMPTS[:3]]


@pytest.fixture(scope="module")
def sharded(make_checkpoint, tmp_path_factory) -> dict[str, Path]:
    """The same weights in 1, 2 and 4 shards, with 4 kv heads; and with 1 and 2 kv heads.

    "other" has other weights, with 2 kv heads. "wide" has heads of 32, which the CPU kernels
    support. "yarn" has heads of 24 in a model of 64 columns, and RoPE scaled by YaRN.
    """
    folders = {}
    for kv_heads in (4, 2, 1):
        folder, state, params = make_checkpoint(seed=kv_heads, n_kv_heads=kv_heads)
        folders[f"kv{kv_heads}"] = folder
        for shards in (2, 4) if kv_heads == 4 else ():
            folders[f"shards{shards}"] = tmp_path_factory.mktemp(f"shards{shards}")
            write_meta(folders[f"shards{shards}"], params, state, shards)
            write_byte_tokenizer(folders[f"shards{shards}"])
    folders["other"] = make_checkpoint(seed=3, n_kv_heads=2)[0]
    yarn = {"rope_yarn_factor": 4.0, "rope_original_context": 32, "rope_attention_factor": 1.2}
    folders["yarn"] = make_checkpoint(seed=25, n_kv_heads=4, head_size=24, **yarn)[0]
    folders["wide"] = make_checkpoint(seed=24, n_kv_heads=4, dim=128)[0]
    return folders


def alone(folder: Path, **kwargs) -> list:
    llama = Llama.build(str(folder), None, 128, 4, dtype="fp32", device="cpu")
    tokens, logprobs = llama.generate(PROMPTS, **kwargs)
    return [tokens, logprobs]


GREEDY: dict[str, Any] = {"max_gen_len": 8, "temperature": 0.0, "logprobs": True, "echo": True}
SAMPLED: dict[str, Any] = {"max_gen_len": 8, "temperature": 1.0, "top_p": 0.95, "seed": 3}


def shard_jobs(sharded: dict[str, Path]) -> list[dict[str, Any]]:
    """Return a greedy job for each folder and one sampled job, which does not depend on files."""
    folders = [str(folder) for name, folder in sharded.items() if name not in ("other", "wide")]
    asked = [*((folder, GREEDY) for folder in folders), (folders[0], SAMPLED)]
    return [
        {"do": "generate", "folder": folder, "prompts": PROMPTS, **settings}
        for folder, settings in asked
    ]


TEXTS = ["Once", "x", "The end"]


@pytest.fixture(scope="module")
def reranker(tmp_path_factory) -> Path:
    """A bidirectional model with a head of one label."""
    folder = tmp_path_factory.mktemp("reranker") / "model"
    model_class = transformers.LlamaForSequenceClassification
    write_model(folder, model_class, num_labels=1, is_causal=False, changes={"pooling": "avg"})
    return folder


@pytest.fixture(scope="module")
def adapter_roots(tmp_path_factory) -> list[str]:
    """A folder of adapters for even ranks and one for odd ones.

    "lost" is in the first one alone, and "unlike" differs.
    """
    roots = [tmp_path_factory.mktemp(f"adapters{rank}") for rank in range(2)]
    for rank, root in enumerate(roots):
        for name, seed in {"one": 1, "two": 2, "unlike": 3 + rank}.items():
            write_tiny_adapter(root / name, seed)
    write_tiny_adapter(roots[0] / "lost", 9)
    return [str(root) for root in roots]


def write_tiny_adapter(folder: Path, seed: int) -> None:
    """Write an adapter for the model of these tests: the matrices that ranks divide both ways."""
    draw = torch.Generator().manual_seed(seed)
    sizes: dict[str, Any] = dict(TINY)
    dim = sizes["dim"]
    shapes = {
        "self_attn.q_proj": (dim, dim),
        "self_attn.o_proj": (dim, dim),
        "mlp.up_proj": (ffn_dim(sizes), dim),
        "mlp.down_proj": (dim, ffn_dim(sizes)),
    }
    tensors = {}
    for part, (rows, columns) in shapes.items():
        name = f"model.layers.0.{part}"
        tensors[f"{PREFIX}{name}.lora_A.weight"] = torch.randn((4, columns), generator=draw)
        tensors[f"{PREFIX}{name}.lora_B.weight"] = torch.randn((rows, 4), generator=draw)
    write_adapter(folder, tensors)


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory) -> Path:
    """A model in Q4_0."""
    folder = tmp_path_factory.mktemp("gguf")
    write_byte_tokenizer(folder)
    path: Path = folder / "model.gguf"
    write_gguf(path, GGUF_PARAMS, "Q4_0", tokenizer=folder / "tokenizer.model")
    return path


@pytest.fixture(scope="module")
def two_ranks(
    sharded, reranker, adapter_roots, gguf_file, tmp_path_factory
) -> dict[str, list[list[dict]]]:
    """The results of two ranks for the jobs of all tests that need no launch of their own."""
    kv2, kv4, wide = (str(sharded[name]) for name in ("kv2", "kv4", "wide"))
    damaged = tmp_path_factory.mktemp("damaged") / "model"
    shutil.copytree(kv2, damaged)
    flip_a_bit(damaged / "consolidated.00.pth", "norm.weight")
    groups: dict[str, list[dict[str, Any]]] = {
        "shards": shard_jobs(sharded),
        "differ": [
            {"do": "place", "folder": kv2},
            {"do": "different", "folder": kv2, "prompts": [[256, 65], [256, 66]]},
            {"do": "one_bad", "folder": kv2, "bad_rank": 1},
            {"do": "build_unlike", "folder": kv2},
            {"do": "fewer_files", "folder": kv2},
            {"do": "verified", "folder": str(damaged)},
            {"do": "other_weights", "folders": [kv2, str(sharded["other"])]},
            {"do": "other_torch", "folder": kv2},
            {"do": "generate", "folder": kv2, "prompts": PROMPTS, **GREEDY},
        ],
        "processors": [{"do": "one_amx", "folder": str(gguf_file)}],
        "requests": [
            {"do": "place", "folder": kv4},
            {"do": "listening", "folder": kv4},
            {"do": "different_requests", "folder": kv4},
            {"do": "stream", "folder": kv4, "prompts": TEXTS},
            {"do": "beams", "folder": kv4, "prompts": TEXTS},
            {"do": "second_thread", "folder": kv4},
            {"do": "embed", "folder": kv4, "prompts": PROMPTS},
            {"do": "score", "folder": str(reranker), "texts": TEXTS},
        ],
        "adapters": [
            {"do": "adapters", "folder": kv4, "roots": adapter_roots, "prompts": PROMPTS},
        ],
        "vllm": [
            {"do": "vllm_client", "folder": kv4, "prompts": TEXTS, "size": 2},
            {"do": "vllm_bad_request", "folder": kv4, "bad_rank": 1},
            {"do": "host_bad_request", "folder": kv4, "bad_rank": 1},
        ],
        "samples": [
            {"do": "place", "folder": kv4},
            {"do": "samples", "folder": kv4, "prompts": PROMPTS[:2] * 2},
            {"do": "speak", "folder": kv4},
            {"do": "led", "folder": kv4, "prompts": PROMPTS},
            {"do": "gathered", "folder": kv4},
            {"do": "shares_memory", "folder": kv4, "prompts": PROMPTS},
            {"do": "one_shot_sums", "folder": kv4},
            {"do": "speculated", "folder": kv4, "prompts": REPEATED, "draft": "lookup"},
            {"do": "in_8_bits", "folder": kv4, "prompts": PROMPTS},
            {"do": "speculated", "folder": kv4, "prompts": REPEATED, "draft": kv4},
            {"do": "build_often", "folder": kv4},
            {"do": "drafted", "folder": wide, "quantize": None, "kinds": ["stop_ids", "too_long"]},
            {"do": "drafted", "folder": wide, "quantize": "int8", "kinds": ["some"]},
            {"do": "rounded", "folder": wide, "prompts": PROMPTS},
            {"do": "gathered_unequal", "folder": kv4},
            {"do": "rounded", "folder": kv4, "prompts": PROMPTS},
            *(
                {"do": "faults", "folder": kv4, "prompts": PROMPTS, "when": when}
                for when in ("measured", "recorded", "in a step")
            ),
        ],
    }
    return torchrun_groups(2, groups, tmp_path_factory.mktemp("two_ranks"))


@pytest.mark.parametrize("world", [2, 3, 4])
def test_every_shard_count_on_every_world(
    world, sharded, reranker, adapter_roots, request, tmp_path
):
    """Every shard count works on every world size.

    1, 2 and 4 shards, and kv heads fewer than ranks, give the ids of one process on every rank,
    greedy and sampled, and log probabilities within 1e-4. Three ranks hold unequal parts, the last
    time by shares of 2, 1 and 1, and with other shares of the feed-forward columns.
    """
    jobs = shard_jobs(sharded)
    if world == 2:
        ranks = request.getfixturevalue("two_ranks")["shards"]
    elif world == 3:
        uneven: dict[str, Any] = {
            "do": "use_shares", "shares": [2, 1, 1], "ffn_shares": [1, 1, 3]
        }  # fmt: skip
        ranks = torchrun(world, [*jobs, uneven, {"do": "forget"}, jobs[0]], tmp_path)
        for rank in ranks:
            del rank[len(jobs) : -1]  # the results of two jobs that are not compared
        jobs.append(jobs[0])
    else:
        kv4 = str(sharded["kv4"])
        drafts = {"do": "speculated", "folder": kv4, "prompts": REPEATED, "draft": "lookup"}
        wide = {"do": "drafted", "folder": str(sharded["wide"]), "quantize": None}
        embeds = {"do": "embed", "folder": kv4, "prompts": PROMPTS}
        scores = {"do": "score", "folder": str(reranker), "texts": TEXTS}
        chosen = {"do": "adapters", "folder": kv4, "roots": adapter_roots, "prompts": PROMPTS}
        ranks = torchrun(
            world, [*jobs, chosen, scores, embeds, wide | {"kinds": ["some"]}, drafts], tmp_path
        )
        alone_without = Llama.build(kv4, None, 256, 4, dtype="fp32", device="cpu")
        wanted = alone_without.generate(REPEATED, 60, 0.0)[0]
        (called, led, drafted), *others = [rank.pop()["result"] for rank in ranks]
        assert called == led == wanted and others == [[wanted, None, drafted]] * 3 and drafted > 20
        changed, drafted = ranks[0].pop()["result"]
        assert [rank.pop()["result"] for rank in ranks[1:]] == [[[], drafted]] * 3
        assert changed == [] and drafted > 500
        check_embeddings(sharded, [rank.pop()["result"] for rank in ranks])
        check_scores(reranker, [rank.pop()["result"] for rank in ranks])
        check_adapters(sharded, adapter_roots, [rank.pop()["result"] for rank in ranks])
    assert all(rank == ranks[0] for rank in ranks), "ranks differ"
    for job, found in zip(jobs, ranks[0], strict=True):
        settings = SAMPLED if job["temperature"] else GREEDY
        tokens, logprobs = alone(Path(job["folder"]), **settings)
        assert found["result"][0] == tokens
        for ours, wanted in zip(found["result"][1] or [], logprobs or [], strict=True):
            assert ours == pytest.approx(wanted, abs=1e-4)


def check_embeddings(sharded: dict[str, Path], ranks: list[Any]) -> None:
    """Compare the results of the job "embed" with those of one process."""
    llama = Llama.build(str(sharded["kv4"]), None, 128, 4, dtype="fp32", device="cpu")
    vectors = [x for kind in ("mean", "last") for x in llama.embed(PROMPTS, pooling=kind)]
    states = llama.hidden_states(PROMPTS, [1, "norm"], "last")
    for called, led in ranks:
        assert called == ranks[0][0] == (led or called), "ranks differ"
    found, led = ranks[0]
    assert led == found and [rank[1] for rank in ranks[1:]] == [None] * (len(ranks) - 1)
    for ours, wanted in zip(found, vectors, strict=False):
        assert ours == pytest.approx(wanted.tolist(), abs=2e-5)
    for ours, state in zip(found[-1], states, strict=True):
        for name, tensor in state.items():
            assert ours[str(name)][0] == pytest.approx(tensor[0].tolist(), abs=1e-4)


def check_scores(folder: Path, ranks: list[Any]) -> None:
    """Compare the results of the job "score" with those of one process."""
    llama = Llama.build(str(folder), None, 128, 4, dtype="fp32", device="cpu")
    assert all(rank == ranks[0] for rank in ranks)
    *scores, logits = ranks[0]
    assert scores == pytest.approx(llama.score(TEXTS[0], TEXTS[1:]), abs=1e-5)
    assert logits == pytest.approx(llama.classify(TEXTS)[0].logits, abs=1e-4)


def test_two_ranks_choose_adapters(sharded, adapter_roots, two_ranks):
    """Called and led; a file that one rank lacks, or that differs, is loaded on none."""
    ranks = [rank[0]["result"] for rank in two_ranks["adapters"]]
    check_adapters(sharded, adapter_roots, ranks)


def check_adapters(sharded: dict[str, Path], roots: list[str], ranks: list[Any]) -> None:
    """Compare the results of the job "adapters" with those of merged models on one process."""
    expected = []
    for name in (None, "one", "two"):
        lora = None if name is None else f"{roots[0]}/{name}"
        merged = Llama.build(
            str(sharded["kv4"]), None, 128, 4, dtype="fp32", device="cpu", lora=lora
        )
        expected.append(merged.generate(PROMPTS, 8, 0.0)[0])
    assert expected[0] != expected[1] != expected[2]
    for rank, (refused, called, led, left) in enumerate(ranks):
        assert refused[0].startswith("FileNotFound" if rank % 2 else "RankError")
        assert "the adapter differ" in refused[1]
        assert called == expected[1] and left == 1
        assert rank == 0 or led is None
    failures, answers = ranks[0][2]
    assert failures[0].startswith("RankError") and "the adapter differ" in failures[1]
    assert answers == expected


def test_two_ranks_embed(sharded, reranker, two_ranks):
    """Vectors and hidden states are those of one process on every rank, called and led."""
    check_scores(reranker, [rank[7]["result"] for rank in two_ranks["requests"]])
    check_embeddings(sharded, [rank[6]["result"] for rank in two_ranks["requests"]])


def test_a_client_of_vllm_runs_on_two_ranks(sharded, two_ranks):
    """A vLLM client runs on two ranks.

    It gets the ids of one process, on both ranks; a bad request on one is an error on both.
    """
    llm = LLM(str(sharded["kv4"]), dtype="float32", device="cpu", max_model_len=128)
    asked = VllmParams(temperature=0.9, seed=3, max_tokens=6, ignore_eos=True)
    ids = [output.outputs[0].token_ids for output in llm.generate(TEXTS, asked)]
    (beams,) = llm.beam_search(TEXTS[1], BeamSearchParams(2, 4))
    wanted = [*ids, beams.sequences[0].tokens, *ids]
    for rank, (client, bad, host) in enumerate(two_ranks["vllm"]):
        assert client["result"] == wanted
        kind = ("RankError: rank 1 failed: ", "")[rank]
        assert bad["error"].startswith(f"{kind}TypeError: the prompt {{'prompt': 7}} must be")
        assert host["error"].startswith(f"{kind}ValueError: params: top_p=7 must be")


def test_four_ranks_as_two_replicas(sharded, tmp_path):
    """Four ranks can be two replicas.

    The world is larger than the model-parallel size: two groups of neighbours, all with results.
    """
    folder = str(sharded["shards2"])
    jobs: list[dict[str, Any]] = [
        {"do": "place", "folder": folder, "size": 2},
        {"do": "generate", "folder": folder, "prompts": PROMPTS, "size": 2, **GREEDY},
    ]
    ranks = torchrun(4, jobs, tmp_path)
    assert [rank[0]["result"] for rank in ranks] == [
        [0, 2, 0, 2], [1, 2, 0, 2], [0, 2, 1, 2], [1, 2, 1, 2],
    ]  # fmt: skip
    wanted = alone(sharded["shards2"], **GREEDY)[0]
    assert all(rank[1]["result"][0] == wanted for rank in ranks)


def test_what_differs_between_ranks_is_an_error_on_each(sharded, two_ranks):
    """Differences between ranks are an error on each.

    Different prompts, one bad prompt, unlike arguments, other weights of the same shapes, or a
    folder missing on one rank: an error on both ranks names the cause, and the same Llama answers
    afterwards.
    """
    for rank, results in enumerate(two_ranks["differ"]):
        _, different, one_bad, unlike, fewer, damaged, weights, library, after = results
        assert "the prompts or parameters differ between rank 0 and rank 1" in different["error"]
        assert different["error"].endswith(SAME_CALLS)
        kind = ("RankError: rank 1 failed: ", "")[rank]
        assert one_bad["error"].startswith(f"{kind}ValueError: prompt 0 has 0 tokens")
        arguments, alike = "the arguments of Llama.build", "Give every rank the same arguments"
        for error, what, values, remedy in (
            (unlike["error"], arguments, ["max_seq_len=64", "max_seq_len=65"], alike),
            (weights["error"], "the weights", ["consolidated.00.pth: .*, sample .*"] * 2, "Copy"),
            (library["error"], arguments, ["torch=2.10", "torch=2.11"], alike),
        ):
            first, other = values
            pattern = rf"{what} differ .* 0 \({first}\) and rank 1 \({other}\) .*\. {remedy}"
            assert re.search(pattern, error), error
        kind = ("RankError: rank 1 failed: FieldPathError: ", "FieldPathError: ")[rank]
        assert fewer["error"].startswith(kind)
        assert "consolidated.00.pth" in damaged["error"] and "is damaged" in damaged["error"]
        assert after["result"][0] == alone(sharded["kv2"], **GREEDY)[0]
    kinds = sorted(results[5]["error"].split(":")[0] for results in two_ranks["differ"])
    assert kinds == ["RankError", "ValueError"], "one rank alone read the damaged bytes"


@pytest.mark.skipif(not KERNELS_RUN, reason="needs x86-64 with AVX2, and g++")
def test_no_rank_rounds_by_default_where_one_has_amx(two_ranks):
    """A default is no error where the CPUs of the ranks differ; what is asked for can be one."""
    for rank, (job,) in enumerate(two_ranks["processors"]):
        with_amx, without, error = job["result"]
        assert (with_amx, without) == (False, True)
        kind = ("RankError: rank 1 failed: FieldError", "FieldError")[rank]
        pattern = "activations='int8_lm_head' is slower than bf16 on this CPU, which has AMX: leave"
        assert error.startswith(f"{kind}: {pattern}")


def test_requests_streams_and_beams_on_two_ranks(sharded, two_ranks):
    """Requests, streams and beams work on two ranks.

    Everything built on the engine's step gives the answers of one process on each rank; and
    requests that differ between ranks are an error on each, after which the engine goes on.
    """
    llama = Llama.build(str(sharded["kv4"]), None, 128, 4, dtype="fp32", device="cpu")
    texts = [r["generation"] for r in llama.text_completion(TEXTS, 1.0, 1.0, 16, seed=3)]
    beams = [[b["generation"] for b in found] for found in llama.beam_search(TEXTS, 3, 8)]
    for _, listening, differ, streamed, searched, threaded, *_ in two_ranks["requests"]:
        assert listening["result"] == [], "ranks of one machine talk over loopback alone"
        assert "the prompts or parameters differ between rank 0 and rank 1" in differ["error"]
        assert "RuntimeError: another thread of this rank has" in threaded["result"]
        assert streamed["result"] == texts
        assert searched["result"] == beams


def test_samples_without_a_seed_are_those_of_one_process(sharded, two_ranks):
    """Samples without a seed are those of one process.

    Each call samples anew; a call that was refused, on one rank alone, uses no seed on any rank.
    """
    llama = Llama.build(str(sharded["kv4"]), None, 128, 4, dtype="fp32", device="cpu")
    wanted = [llama.generate(PROMPTS[:2] * 2, 8, 1.0, 1.0)[0] for _ in range(2)]
    assert len({tuple(tokens) for call in wanted for tokens in call}) == 8
    assert [rank[1]["result"] for rank in two_ranks["samples"]] == [wanted, wanted]


def test_rank_0_leads_and_the_others_follow(sharded, two_ranks):
    """Rank 0 leads, and the others follow.

    Threads, asyncio, a bad request, an abandoned stream and beam search on rank 0 alone give the
    answers of one process. Afterwards every rank calls again, with rank 0's next seed.
    """
    llama = Llama.build(str(sharded["kv4"]), None, 128, 4, dtype="fp32", device="cpu")
    for _ in range(2):  # the calls without a seed of the job "samples"
        llama.generate(PROMPTS[:1], 8, 1.0, 1.0)
    llama.text_completion(["never finished"], 0.0, max_gen_len=1)
    wanted = [llama.generate([p], 8, 1.0, 1.0, seed=4)[0][0] for p in PROMPTS]
    unseeded = llama.generate(PROMPTS[:1], 8, 1.0, 1.0)[0]
    beams = [b["generation"] for b in llama.beam_search(["Once"], 3, 8)[0]]
    after = llama.generate(PROMPTS[:1], 8, 1.0, 1.0)[0]
    (found, then), following = (rank[3]["result"] for rank in two_ranks["samples"])
    answers, bad, last, first, searched = found
    assert (answers, last, first, searched) == (wanted, wanted[0], unseeded, beams)
    assert "prompt 0 holds 999" in bad
    assert then == after and following == [None, after]


@pytest.mark.parametrize(("job", "least"), [(7, 20), (9, 5)])
def test_rank_0_drafts_for_all_ranks(sharded, two_ranks, job, least):
    """Rank 0 drafts for all ranks.

    It uses lookup, or a model that the ranks share, where every rank makes the calls, and where
    rank 0 leads.
    """
    llama = Llama.build(str(sharded["kv4"]), None, 256, 4, dtype="fp32", device="cpu")
    wanted = llama.generate(REPEATED, 60, 0.0)[0]
    (*answers, drafted), *others = (rank[job]["result"] for rank in two_ranks["samples"])
    assert answers == [wanted, wanted] and others == [[wanted, None, drafted]] and drafted > least


@pytest.mark.skipif(not HAS_KERNELS, reason="needs x86-64 with AVX2, and g++")
@pytest.mark.parametrize("job", [11, 12])
def test_no_draft_changes_a_bit_on_two_ranks(two_ranks, job):
    """No draft changes a bit on two ranks.

    In bf16 and in int8, texts, ids, log probabilities, reasons and usage are equal, where every
    rank makes the calls and where rank 0 leads; and so are the bytes of the cache.
    """
    (changed, drafted), other = (rank[job]["result"] for rank in two_ranks["samples"])
    assert changed == [] == other[0] and drafted == other[1] > 500


def test_two_ranks_keep_keys_and_values_in_8_bits(sharded, two_ranks):
    """Two ranks store keys and values in 8 bits.

    Log probabilities are those of one process, up to a value that is rounded the other way; a cache
    dtype that one rank alone was given is an error on each.
    """
    llama = Llama.build(
        str(sharded["kv4"]), None, 128, 4, dtype="fp32", device="cpu", kv_cache_dtype="int8"
    )
    wanted = llama.generate(PROMPTS, **GREEDY | {"max_gen_len": 1})[1]
    results = [rank[8]["result"] for rank in two_ranks["samples"]]
    assert results[0][0] == results[1][0] and wanted is not None
    for ours, theirs in zip(results[0][0][1], wanted, strict=True):
        assert ours[:-1] == pytest.approx(theirs[:-1], abs=0.05)
    plain = alone(sharded["kv4"], **GREEDY | {"max_gen_len": 1})[1]
    assert plain[1][:-1] != pytest.approx(wanted[1][:-1], abs=1e-4)
    for _, error in results:
        assert "0 (kv_cache_dtype=int8) and rank 1 (kv_cache_dtype=None)" in error


@pytest.mark.skipif(not HAS_KERNELS, reason="needs x86-64 with AVX2, and g++")
@pytest.mark.parametrize(
    ("name", "job", "columns"), [("wide", 13, [224, 224]), ("kv4", 15, [128, 96])]
)
def test_two_ranks_round_activations_in_the_groups_of_one_process(
    sharded, two_ranks, name, job, columns
):
    """Log probabilities are near those of one process; test_rounded.py compares the codes of parts.

    Where equal parts of the columns would not fill groups, one rank has more of them.
    """
    with without_amx():
        llama = Llama.build(
            str(sharded[name]), None, 128, 4, device="cpu", quantize="int8", activations="int8"
        )
        wanted = llama.generate(PROMPTS, 1, 0.0, logprobs=True, echo=True)[1]
    results = [rank[job]["result"] for rank in two_ranks["samples"]]
    (answers, groups, _), other = results
    assert [answers, groups] == other[:2] and groups == [32] * 4
    assert [result[2] for result in results] == columns
    assert wanted is not None
    for ours, theirs in zip(answers[1], wanted, strict=True):
        assert ours[:-1] == pytest.approx(theirs[:-1], abs=0.3)


def test_only_rank_0_speaks_until_the_last_model_is_closed(two_ranks):
    """Only rank 0 prints until the last model is closed.

    build mutes stdout on the other ranks, unless it is disabled; each `close` undoes one build.
    """
    heard = ["two", "one", "none"]
    assert [rank[2]["result"] for rank in two_ranks["samples"]] == [heard, ["none"]]


def test_a_build_takes_the_place_of_one_that_is_gone(two_ranks):
    """A build replaces one that is gone, whose threads and sockets end.

    Three more builds have no more of them than two.
    """
    for rank in two_ranks["samples"]:
        after_two, after_five = rank[10]["result"]
        assert after_five == after_two


def test_greedy_rows_exchange_their_top_tokens_and_not_their_logits(two_ranks):
    """Greedy rows exchange their top tokens and not their logits: a value and an id per row."""
    assert [rank[4]["result"] for rank in two_ranks["samples"]] == [[[2, 2]]] * 2


def test_tensors_of_unequal_widths_are_gathered(two_ranks):
    """Tensors of unequal widths are gathered row by row, in shared memory and by gloo."""
    wanted = [0, 1, 2, 10, 11, 3, 4, 5, 12, 13]
    assert [rank[14]["result"] for rank in two_ranks["samples"]] == [[wanted, wanted]] * 2


def test_ranks_of_one_machine_talk_through_shared_memory(sharded, two_ranks):
    """Ranks of one machine communicate through shared memory.

    A step of this model of two layers exchanges the embedding, two sums per layer, and the top
    tokens or the logits; for log probabilities also a message from rank 0.
    """
    if HAS_KERNELS:
        greedy = alone(sharded["kv4"], max_gen_len=8, temperature=0.0)[0]
        for rank in two_ranks["samples"]:
            assert rank[5]["result"] == [[6, 6, 7], greedy]


def test_a_one_shot_sum_is_tried_before_it_is_used(two_ranks):
    """A one-shot sum is tried before it is used.

    A sum that is wrong, has other bits or is unavailable on one rank is used on none; nor is it
    used for float16, which torch's kernels do not support. Each way is used up to the size where
    another one is faster, the same on all ranks. A rank that fails while another waits
    for it inside torch ends the job soon.
    """
    sums = [[2 * i + 1 for i in row] for row in ([0, 1, 2, 3], [4, 5, 6, 7])]
    # Without a switch, unavailable thrice, with a switch, and with one that is wrong or missing.
    alone = [MAX_BYTES, MAX_BYTES]
    joined = [alone, *[[0, 0]] * 3, [4 << 20, 8 << 10], alone, alone]
    wanted = [
        [True, False, False],
        sums,
        [False, False, True, True, False, True, False],
        joined,
        [True, True, False],
    ]
    results = [rank[6]["result"] for rank in two_ranks["samples"]]
    assert [result[:5] for result in results] == [wanted] * 2
    assert results[1][5].startswith(
        "the GPUs of this machine could not map each other's memory within 0.5 s, which some ranks "
        "did and others not (this one failed with OSError: no permission): "
    )


def test_a_kernel_or_graph_that_fails_on_one_rank_is_dropped_and_the_job_goes_on(
    sharded, two_ranks
):
    """The kernel is dropped where it failed, within the step; graphs on both ranks, at build or
    in a step. The answers are those of one process.
    """
    wanted = alone(sharded["kv4"], max_gen_len=8, temperature=0.0)[0]
    for rank, results in enumerate(two_ranks["samples"]):
        for when, result in zip(("measured", "recorded", "in a step"), results[-3:], strict=True):
            found, has_kernel, has_graphs, said = result["result"]
            assert found == wanted
            assert has_kernel == (rank == 0)
            assert has_graphs == [when == "in a step", False]
            reason = "no memory for a graph" if rank else "another rank could not"
            expected = ["steps run without graphs from now on: a step of "]
            expected += ["torch runs in place of the GPU's kernel for silu_mul: no shared"] * rank
            assert len(said) == len(expected)
            assert all(text.startswith(start) for text, start in zip(said, expected, strict=True))
            assert reason in said[0]


def test_every_launch_of_a_rank_is_on_its_own_gpu(tmp_path):
    """Every launch of a rank is on its own GPU.

    A past fault: ranks other than 0 launched the self-test of the one-shot sums on GPU 0, as no
    device was current, and every build on two or more GPUs would have hung.
    """
    program = [str(PROGRAMS / "current_devices.py"), str(tmp_path)]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=3"]
    done = run_program([*command, *program], timeout=120)
    assert done.returncode == 0, done.stderr
    for rank in range(3):
        seen = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert {device for _, device in seen} == {rank}, seen
        names = {"init_process_group", "all_reduce", "rendezvous", "one-shot kernel"}
        assert {name for name, _ in seen} == names


def test_no_rank_splits_the_communicator_for_others(tmp_path):
    """No rank splits nccl's communicator for a group on gloo of which it is no part.

    The ranks inside of such a group take no part in the split, which waits for all. Two copies of a
    model have such groups.
    """
    program = [str(PROGRAMS / "current_devices.py"), str(tmp_path)]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = run_program([*command, *program], env=environment(GROUP_SIZE="1"), timeout=120)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        seen = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert {device for _, device in seen} == {rank}, seen
        assert {name for name, _ in seen} == {"init_process_group", "all_reduce"}


def test_ranks_that_find_the_same_gpu_say_so(tmp_path):
    """Ranks that find the same GPU name it on every rank, before nccl does as a network fault.

    CUDA_VISIBLE_DEVICES=0 before torchrun shows all ranks of a machine one GPU.
    """
    program = [str(PROGRAMS / "current_devices.py"), str(tmp_path)]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    variables = environment(SHARED_GPU="GPU-1", CUDA_VISIBLE_DEVICES="0")
    done = run_program([*command, *program], env=variables, timeout=120)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        error = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert error.startswith("ranks 0 and 1 have the same GPU, which nccl refuses")
        assert f"CUDA_VISIBLE_DEVICES=0 on rank {rank}" in error


@pytest.mark.parametrize("variables", [{}, {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}])
def test_one_process_has_groups_without_a_port(variables):
    """One process has groups without a port.

    As after Meta's build, scripts that ask for their rank, or reduce over the group, go on.
    """
    program = [sys.executable, str(PROGRAMS / "groups_of_one.py")]
    out = run_program(program, env=environment() | variables, timeout=60)
    assert json.loads(out.stdout) == [[0, 1, 0, 1, 1], 3.0, 3.0, [{"a": 1}], [], 0]
    assert out.stderr == ""


def test_torchrun_example_on_two_cpu_ranks():
    """The torchrun example runs on two CPU ranks.

    torchrun_examples/two_cpu_ranks.sh runs as for a user, with the demo model. A GPU in the
    machine, which two ranks cannot share, is not used.
    """
    script = REPO / "torchrun_examples" / "two_cpu_ranks.sh"
    command = ["bash", str(script), "--dtype", "fp32", "--temperature", "0"]
    env = environment(
        PATH=f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ['PATH']}",
        PYTHONPATH=f"{PROGRAMS / 'one_gpu'}{os.pathsep}{REPO}",
    )
    del env["OMP_NUM_THREADS"]  # the script sets it, or torchrun would warn
    done = run_program([*command, "--max_gen_len", "24"], env=env)
    assert done.returncode == 0, done.stderr
    assert "OMP_NUM_THREADS" not in done.stderr
    assert "The capital of France is Paris." in done.stdout
    assert done.stdout.count("| ranks 2 | float32") == done.stdout.count("Loaded in ") == 2


def test_layers_split_over_ranks_are_the_whole_layer():
    """Layers split over ranks are the whole layer.

    Column, row and vocabulary shares put together by hand equal the unsplit product.
    """
    torch.manual_seed(0)
    weight, x, tokens = torch.randn(12, 8), torch.randn(5, 8), torch.tensor([0, 3, 7, 11, 5])
    columns, rows, embedded = [], [], []
    for rank in range(4):
        parallel = Parallel(Placement(rank=rank, size=4))
        object.__setattr__(parallel, "all_reduce", lambda t: t)
        column = ColumnParallelLinear(8, 3, parallel).to_empty(device="cpu")
        column.weight.values.copy_(weight.chunk(4)[rank])
        columns.append(column(x))
        row = RowParallelLinear(2, 12, parallel).to_empty(device="cpu")
        row.weight.values.copy_(weight.chunk(4, 1)[rank])
        rows.append(row(x.chunk(4, 1)[rank]))
        embedding = VocabParallelEmbedding(parallel.placement.span(12), 8, parallel).to_empty(
            device="cpu"
        )
        embedding.weight.values.copy_(weight.chunk(4)[rank])
        embedded.append(embedding(tokens))
    torch.testing.assert_close(torch.cat(columns, -1), x @ weight.T)
    torch.testing.assert_close(sum(rows), x @ weight.T)
    torch.testing.assert_close(sum(embedded), weight[tokens])
    assert rms_norm(x, torch.ones(8), 1e-5).pow(2).mean() == pytest.approx(1.0, abs=1e-3)


def test_int8_shares_of_a_tied_embedding_are_the_rows_of_the_whole():
    """int8 shares of a tied embedding are the rows of the whole.

    The scales of a rank are those of its own rows. The result is exact: each sum is of a value and
    zeros.
    """
    weight = torch.randn(128, 64, generator=torch.Generator().manual_seed(4)).bfloat16()
    tokens = torch.tensor([0, 127, 64, 63, 5])
    whole = BytesWeight.pack(weight)
    embedded = []
    for rank in range(2):
        parallel = Parallel(Placement(rank=rank, size=2))
        object.__setattr__(parallel, "all_reduce", lambda t: t)
        output = ColumnParallelLinear(64, 64, parallel).to_empty(device="cpu")
        output.weight = PlainWeight.pack(weight.chunk(2)[rank].clone())
        pack_matrix(output, "int8")
        embedding = VocabParallelEmbedding(parallel.placement.span(128), 64, parallel)
        embedding.weight = output.weight
        embedded.append(embedding(tokens))
    assert torch.equal(sum(embedded), whole.exact()[tokens].bfloat16())
