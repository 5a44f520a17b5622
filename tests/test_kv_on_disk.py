"""KV pages on disk: a later process computes nothing twice, and answers with the same bits."""

import errno
import json
import os
import random
import re
import shutil
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.adapters import PREFIX, write_adapter
from helpers.kernels import HAS_KERNELS, KERNELS_RUN
from helpers.kv_pages import (
    PROMPTS,
    START,
    always,
    answers,
    build,
    num_cached,
    wait_until_written,
)
from helpers.launch import DEMO, PROGRAMS, environment, run_program
from helpers.server import run_server
from helpers.waiting import wait_until
from helpers.web import web
from llama import Llama, SamplingParams
from llama.cli import main
from llama.options import page_store
from llama.options.page_store import POLICY, DiskPolicy
from llama.storage import kv_disk, kv_folder

WEIGHTS = "consolidated.00.pth"
ROTATIONS: list[tuple[dict[str, Any], int]] = [
    ({}, 192),
    ({"rope_theta": 1e4}, 0),
    ({"use_scaled_rope": True, "rope_scale_factor": 8.0}, 0),
    ({"use_scaled_rope": True, "rope_scale_factor": 32.0}, 0),
    ({"rope_linear_factor": 4.0}, 0),
    ({"rope_yarn_factor": 4.0}, 0),
]
FULL = [(len(prompt) - 1) // 16 * 16 for prompt in PROMPTS]


@pytest.fixture(autouse=True)
def root(tmp_path, monkeypatch) -> Path:
    for name in vars(DiskPolicy()):
        monkeypatch.setattr(POLICY, name, getattr(POLICY, name))
    for module, name in (
        (kv_disk, "_MIN_FREE"),
        (kv_disk, "_MIN_FREE_PART"),
        (kv_folder, "_REFRESH_S"),
    ):
        monkeypatch.setattr(module, name, getattr(module, name))
    always()
    return tmp_path / "kv"


CASES: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp32": {"dtype": "fp32"},
    "int8 KV cache": {"kv_cache_dtype": "int8"},
    "int8 weights": {"quantize": "int8"},
    "rounded activations": {"quantize": "int8", "activations": "int8"},
    "drafts": {"speculate": "lookup"},
    "chunks of 40": {"max_num_batched_tokens": 40},
    "chunks of 70": {"max_num_batched_tokens": 70},
    "chunks of 150": {"max_num_batched_tokens": 150},
    "few pages": {"max_batch_size": 2, "kv_cache_memory_bytes": 34 * 32768},
}


@pytest.mark.parametrize("case", CASES)
def test_answers_keep_their_bits(root, case):
    """Ids and log-probabilities are those without pages on disk, and prompts are loaded."""
    options = CASES[case]
    with build(DEMO, None, **options) as llama:
        wanted = answers(llama)
    with build(DEMO, root, **options) as llama:
        assert answers(llama) == wanted
    with build(DEMO, root, **options) as llama:
        assert answers(llama) == wanted
        assert llama.pages_on_disk is not None
        assert llama.pages_on_disk.stats.hit_tokens >= max(FULL)
        assert llama.engine.stats.prompt_tokens < 0.5 * sum(map(len, PROMPTS))
        assert llama.pages_on_disk.folder.num_damaged == 0


def test_several_answers_to_a_prompt(root):
    """Three answers to a prompt that is loaded once are those to one that is computed."""
    params = SamplingParams(
        n=3, temperature=0.9, seed=7, max_tokens=12, logprobs=1, ignore_eos=True
    )
    found = []
    for folder in (None, root, root):
        with build(DEMO, folder) as llama:
            request = llama.llm_engine.prepare("", PROMPTS[3], params)
            answer = llama.llm_engine.run([request])[0]
            found.append([(each.token_ids, each.logprobs) for each in answer.outputs])
            pages = llama.pages_on_disk
    assert found[0] == found[1] == found[2] and len({tuple(ids) for ids, _ in found[0]}) == 3
    assert pages is not None and pages.stats.hit_tokens == FULL[3]


def test_a_request_that_is_removed_while_it_loads(root):
    """Its pages are free again, and prompts that need the same ones have the same answers."""
    options = {"max_num_batched_tokens": 40}
    with build(DEMO, root, **options) as llama:
        wanted = answers(llama)
    with build(DEMO, root, **options) as llama:
        pages = llama.pages_on_disk
        assert pages is not None
        engine = llama.llm_engine
        for i in range(1, 4):
            engine.add_request("removed", PROMPTS[i], SamplingParams(max_tokens=4))
            for _ in range(i):
                engine.step()
            assert 0 < pages.stats.hit_tokens < FULL[i]
            engine.abort_request("removed")
            while engine.has_unfinished_requests():
                engine.step()
            pool = llama.engine.scheduler.pool
            assert pool.num_free == pool.num_pages and not pages._staged and not pages._planned
            llama.engine.scheduler.check()
        assert answers(llama) == wanted


def test_continued_texts_are_known(root, monkeypatch):
    """Pages after others that were found may exceed the bytes of a day; others may not."""
    with build(DEMO, root) as llama:
        assert llama.pages_on_disk is not None
        writer = llama.pages_on_disk.writer._writer
        append = writer.append
        marks: list[bool] = []

        def marked(*values: Any, is_continued: bool) -> bool:
            marks.append(is_continued)
            return append(*values, is_continued=is_continued)

        monkeypatch.setattr(writer, "append", marked)
        for prompt, mark in ((PROMPTS[0], False), (PROMPTS[3], True), (START[::-1], False)):
            num_cached(llama, prompt)
            wait_until_written(llama)
            assert marks and set(marks) == {mark}
            marks.clear()


def test_nothing_is_found_under_other_conditions(root, tmp_path):
    """Another type, KV format, model or rotation finds nothing."""
    with build(DEMO, root) as llama:
        num_cached(llama, START)
    others: list[dict[str, Any]] = [
        {"dtype": "fp32"},
        {"kv_cache_dtype": "int8"},
        {"quantize": "int8"},
    ]
    for options in others:
        with build(DEMO, root, **options) as llama:
            assert num_cached(llama, START) == 0, options
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in DEMO.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    with build(copy, root) as llama:  # the files have other times
        assert num_cached(llama, START) == 0
    shutil.copystat(DEMO / WEIGHTS, copy / WEIGHTS)
    params = json.loads((copy / "params.json").read_text())
    for change, hits in ROTATIONS:
        (copy / "params.json").write_text(json.dumps(params | change))
        with build(copy, root) as llama:
            assert num_cached(llama, START) == hits, change
    (copy / "params.json").write_text(json.dumps(params))
    weights = torch.load(copy / WEIGHTS, weights_only=True)
    weights["layers.2.feed_forward.w2.weight"] *= 2
    torch.save(weights, copy / WEIGHTS)  # of the same name, size and time
    shutil.copystat(DEMO / WEIGHTS, copy / WEIGHTS)
    with build(copy, root) as llama:
        assert num_cached(llama, START) == 0
    with build(DEMO, root) as llama:
        assert num_cached(llama, START) == 192


@pytest.mark.skipif(not HAS_KERNELS, reason="needs two kinds of kernels")
def test_other_kernels_are_close(root, monkeypatch):
    """Pages that torch has rounded are loaded by kernels only with kv_cache_reuse="close"."""
    with build(DEMO, root, dtype="fp32") as llama:
        wanted = answers(llama, max_gen_len=1)
    identity = "llama.loading.page_identity._kernels"
    monkeypatch.setattr(identity, lambda files: ["other"])
    for reuse, hits in (("exact", 0), ("close", 192)):
        with build(DEMO, root, dtype="fp32", kv_cache_reuse=reuse) as llama:
            assert num_cached(llama, START) == hits
            assert [ids for ids, _ in answers(llama, max_gen_len=1)] == [ids for ids, _ in wanted]


def test_adapters_and_salts_share_nothing(root, tmp_path):
    """Pages are found under the adapter and the salt of the prompt alone, with the same bits."""
    adapter = tmp_path / "adapter"
    draw = torch.Generator().manual_seed(0)
    name = f"{PREFIX}model.layers.0.self_attn.v_proj.lora_"
    sizes = {"A": (4, 256), "B": (128, 4)}
    tensors = {
        f"{name}{side}.weight": torch.randn(size, generator=draw) for side, size in sizes.items()
    }
    write_adapter(adapter, tensors, r=4, target_modules=["v_proj"])
    results: list[Any] = []
    for _ in range(2):
        with build(DEMO, root) as llama:
            llama.load_adapter("a", str(adapter))
            assert num_cached(llama, START, "x") == (192 if results else 0)
            results.append([answers(llama, adapter=name) for name in (None, "a")])
    with build(DEMO, None) as llama:
        llama.load_adapter("a", str(adapter))
        results.append([answers(llama, adapter=name) for name in (None, "a")])
    assert results[0] == results[1] == results[2] and results[0][0] != results[0][1]
    with build(DEMO, root) as llama:
        assert num_cached(llama, START, "y") == 0


def test_damaged_pages_are_computed(root):
    """Pages on disk that have changed are computed and written again; answers stay the same."""
    with build(DEMO, root) as llama:
        wanted = answers(llama)
    for path in root.glob("*/*.kv"):
        content = bytearray(path.read_bytes())
        for place in range(40_000, len(content), 100_000):
            content[place] ^= 1
        path.write_bytes(content)
    counts: list[int] = []
    while not counts or counts[-1]:
        with build(DEMO, root) as llama:
            assert answers(llama) == wanted
            assert llama.pages_on_disk is not None
            counts.append(llama.pages_on_disk.folder.num_damaged)
        assert len(counts) < 12
    assert counts[0] > 0


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_an_error_of_the_disk_is_no_error_of_a_request(root, monkeypatch, caplog, code):
    """Prompts are computed where the disk cannot be read, and one line says what is not written."""
    with build(DEMO, root) as llama:
        wanted = answers(llama)

    def failing(*_: Any) -> int:
        raise OSError(code, os.strerror(code))

    with build(DEMO, root) as llama:
        pages = llama.pages_on_disk
        assert pages is not None
        monkeypatch.setattr(os, "pwrite", failing)
        num_cached(llama, START[::-1])
        wait_until_written(llama)
        assert pages.num_dropped == 12 and pages.writer.written_bytes == 0
        assert [os.strerror(code) in each.message for each in caplog.records] == [True]
        monkeypatch.setattr(os, "preadv", failing)
        assert answers(llama) == wanted
        assert pages.stats.hit_tokens == 0


def test_a_changed_model_neither_reads_nor_writes(root):
    """While a hook sees a part of the model, its pages are its own."""
    with build(DEMO, root) as llama:
        handle = llama.model.layers[0].register_forward_hook(lambda *_: None)
        num_cached(llama, START)
        assert llama.pages_on_disk is not None
        wait_until_written(llama)
        assert llama.pages_on_disk.writer.written_bytes == 0
        handle.remove()


def test_a_slow_disk_is_not_read(root, monkeypatch):
    """Prompts are computed where reading them takes longer, from the second load on."""
    with build(DEMO, root) as llama:
        for prompt in PROMPTS:
            num_cached(llama, prompt[::-1])
    POLICY.min_gain = 2.0
    with build(DEMO, root) as llama:
        pages = llama.pages_on_disk
        assert pages is not None
        num_cached(llama, [5] * 300)  # says how long computing takes
        num_cached(llama, PROMPTS[0][::-1])
        assert pages.stats.hit_tokens > 0
        pages._page_seconds = 1e3
        before = pages.stats.hit_tokens
        for prompt in PROMPTS[1:]:
            assert num_cached(llama, prompt[::-1]) < 192
        assert pages.stats.hit_tokens == before


def test_the_first_load_is_bounded(root, monkeypatch):
    """A disk is judged by a few pages, before a whole prompt is read."""
    with build(DEMO, root) as llama:
        num_cached(llama, START)
    POLICY.min_gain = 2.0
    monkeypatch.setattr(page_store, "_UNCOMPARED_S", 0.0)
    for limit, hits in ((1e3, 64), (0.0, 0)):
        monkeypatch.setattr(page_store, "_MAX_UNCOMPARED_S", limit)
        with build(DEMO, root) as llama:
            num_cached(llama, START)
            assert llama.pages_on_disk is not None
            assert llama.pages_on_disk.stats.hit_tokens == hits
            assert llama.pages_on_disk._page_seconds is not None


def test_two_processes_on_one_folder(root):
    """Two models with one folder answer at once, and each finds what the other has written."""
    with build(DEMO, None) as llama:
        wanted = answers(llama)
    models = [build(DEMO, root) for _ in range(2)]
    found: dict[int, Any] = {}

    def ask(i: int) -> None:
        found[i] = [answers(models[i]) for _ in range(2)]

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {0: [wanted] * 2, 1: [wanted] * 2}
    num_cached(models[0], START[::-1])
    wait_until_written(models[0])
    assert num_cached(models[1], START[::-1]) == 192
    for model in models:
        model.close()


def run_ranks(
    folder: Path, num_ranks: int, root: Path, *options: str, num_kills: int = 0
) -> dict[str, list]:
    results = folder / "results.json"
    done = run_program(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone",
            f"--nproc_per_node={num_ranks}", f"--max-restarts={num_kills}",
            str(PROGRAMS / "kv_ranks.py"), str(DEMO), str(root), str(results), *options,
        ],
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(results.read_text())


@pytest.mark.dist
@pytest.mark.skipif(not KERNELS_RUN, reason="torch's products depend on the size of a step")
@pytest.mark.parametrize(("num_ranks", "stages"), [(2, 1), (3, 1), (4, 2)])
def test_ranks_load_alike(root, tmp_path, num_ranks, stages):
    """All ranks load the same pages, whether they call or are led, and keep the bits of answers.

    Those of two stages are killed by SIGKILL, and others load what they have written.
    A rank whose files are damaged lets all of them compute. One process reads what several ranks
    have written under "close" alone, and answers are those of rounding alone.
    """
    options = (str(stages), "exact", "bf16", "9")
    found = run_ranks(tmp_path, num_ranks, root, *options, num_kills=stages - 1)
    wanted = found["without"][0]
    hits = {name: num_loaded for name, (_, num_loaded) in found.items()}
    for name, (results, _) in found.items():
        assert results == wanted, name
    assert hits["first"] == 0 and min(hits["later"], hits["led"], hits["mended"]) >= max(FULL)
    assert hits["damaged"] < hits["led"]
    if stages > 1:
        return
    with build(DEMO, root, kv_cache_reuse="close") as llama:
        results = answers(llama)
        assert llama.pages_on_disk is not None
        assert llama.pages_on_disk.stats.hit_tokens >= max(FULL)
    alike = [
        abs(ours[1][0] - theirs[1][0]) < 0.1
        for ours, theirs in zip(results, wanted, strict=True)
        if ours[0][0] == theirs[0][0]
    ]
    assert all(alike) and len(alike) >= 3


@pytest.mark.dist
def test_three_ranks_read_what_one_has_written(root, tmp_path):
    with build(DEMO, root, dtype="fp32") as llama:
        wanted = [ids for ids, _ in answers(llama)]
    found = run_ranks(tmp_path, 3, root, "1", "close", "fp32", "2")
    assert found["first"][1] >= max(FULL)
    assert [ids for ids, _ in found["first"][0]] == wanted


@pytest.mark.slow
def test_a_server_on_a_slow_disk(root, tmp_path):
    """A server whose reads take long stops to load prompts, and answers all the same."""
    prompts = [random.Random(i).choices(range(300, 1800), k=200) for i in range(10)]
    with build(DEMO, root, dtype="bf16") as llama:
        found = [answers(llama, [prompt], temperature=0.0)[0][0] for prompt in prompts]
        wanted = [llama.tokenizer.decode(ids) for ids in found]
    program = (str(PROGRAMS / "kv_server.py"),)
    flags = (str(DEMO), "--dtype", "bf16", "--kv_cache_dir", str(root))
    env = environment(SLOW_READS_S="0.1")
    num_cached = []
    with run_server(*flags, program=program, env=env) as server:
        for prompt, text in zip(prompts, wanted, strict=True):
            body = {"prompt": prompt, "max_tokens": 12, "temperature": 0}
            answer = web.post(f"{server.url}/v1/completions", json=body, timeout=60)
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["text"] == text
            usage = answer.json()["usage"]
            num_cached.append(usage["prompt_tokens_details"]["cached_tokens"])
        assert server.stop() == 0
    assert num_cached[0] == 64 and sum(num_cached) <= 3 * 192


@pytest.mark.slow
def test_a_server_that_was_killed(root, tmp_path, capsys):
    """After kill -9 each key finds its own prompts, and no other key does; clear leaves nothing."""
    keys = tmp_path / "keys"
    keys.write_text("one\ntwo\n")
    operator = tmp_path / "operator"
    operator.write_text("three\n")
    program = (str(PROGRAMS / "kv_server.py"),)
    flags = (
        str(DEMO), "--kv_cache_dir", str(root), "--api_key_file", str(keys),
        "--metrics_key_file", str(operator),
    )  # fmt: skip

    def cached(url: str, key: str, **fields: Any) -> int:
        body = {"prompt": START, "max_tokens": 1, **fields}
        headers = {"Authorization": f"Bearer {key}"}
        answer = web.post(f"{url}/v1/completions", json=body, headers=headers, timeout=60)
        assert answer.status_code == 200, answer.text
        return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    def written(url: str) -> float:
        headers = {"Authorization": "Bearer three"}
        lines = web.get(f"{url}/metrics", headers=headers, timeout=60).text.splitlines()
        return float(
            next(x for x in lines if x.startswith("llama:kv_disk_written_bytes_t")).split()[1]
        )

    with run_server(*flags, program=program) as server:
        assert (
            cached(server.url, "one", prompt=START[::-1], prompt_cache_retention="in_memory") == 0
        )
        assert cached(server.url, "one") == 0
        wait_until(lambda: written(server.url) > 12 * 32_000)
        assert cached(server.url, "two", cache_salt="x") == 0
        server.process.kill()
        server.process.wait()
    with run_server(*flags, program=program) as server:
        assert cached(server.url, "two") == 0
        assert cached(server.url, "one", prompt=START[::-1]) == 0
        assert cached(server.url, "one") == 192
        names = " ".join(str(path) for path in root.rglob("*"))
        assert "one" not in names.replace(str(root), "") and "two" not in names
        capsys.readouterr()
        assert main(["kv", str(root)]) == 0
        listed = capsys.readouterr().out
        tenants = re.findall("MB  tenant ([0-9a-f]{16})\n", listed)
        assert len(set(tenants)) == len(tenants) == 2
        assert main(["kv", str(root), "--clear", "--tenant", tenants[0]]) == 0
        assert main(["kv", str(root)]) == 0
        assert tenants[0] not in capsys.readouterr().out
        assert main(["kv", str(root), "--clear"]) == 0
        assert not list(root.iterdir())
        assert cached(server.url, "one") == 192  # in memory
        assert server.stop() == 0


def test_the_command_lists_pages(root, capsys):
    with build(DEMO, root) as llama:
        num_cached(llama, START)
    assert main(["kv", str(root)]) == 0
    out = capsys.readouterr().out
    assert "demo" in out and "bfloat16" in out and "MB" in out
    assert main(["kv", str(root), "--clear", "--model", "demo"]) == 0
    assert main(["kv", str(root)]) == 0
    assert "no KV pages" in capsys.readouterr().out


def test_arguments_that_cannot_be_used(root, tmp_path):
    assert Llama.build(str(DEMO), kv_cache_dir="none", verbose=False).pages_on_disk is None
    with pytest.raises(ValueError, match="kv_cache_disk_bytes"):
        build(DEMO, root, kv_cache_disk_bytes=1 << 20)
    with pytest.raises(ValueError, match="kv_cache_reuse"):
        build(DEMO, root, kv_cache_reuse="never")
    open_to_all = tmp_path / "open"
    open_to_all.mkdir(mode=0o755)
    with pytest.raises(PermissionError, match="chmod 700"):
        build(DEMO, open_to_all)
