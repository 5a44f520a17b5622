"""Many LoRA adapters in one batch, chosen by request: PEFT's answers, and the bits of each row."""

import contextlib
import dataclasses
import gc
import json
import pickle
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from helpers.adapters import EMBEDDING, PREFIX, update_of, weight_of, write_adapter
from helpers.checkpoints import shard_of, write_byte_tokenizer
from helpers.kernels import HAS_KERNELS, without_amx
from helpers.tape import Again
from helpers.weights import hf_logits, hf_model, loaded, metas_state
from llama import Llama
from llama.checkpoint.find import find
from llama.checkpoint.lora import unmerged
from llama.checkpoint.write.convert import convert, pack
from llama.kernels.cpu import native
from llama.kernels.cuda.table import table
from llama.ops.adapters import AdapterWeights
from llama.options import adapters as adapters_module
from llama.options.adapters import AdapterStore
from llama.options.engine_options import EngineOptions
from llama.options.graphs.step_graphs import StepGraphs
from llama.requests.adapters import AdapterInUseError
from llama.sampling_params import SamplingParams

LAYERS = [f"model.layers.{i}" for i in range(2)]
PARTS = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
PARTS += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
# The adapters by their names: rank, and the modules of each layer that they update.
ADAPTERS: dict[str, tuple[int, list[str]]] = {
    "all": (4, PARTS),
    "qv": (16, ["self_attn.q_proj", "self_attn.v_proj"]),
    "odd": (33, ["self_attn.k_proj", "mlp.up_proj", "mlp.down_proj"]),
}
PROMPTS = torch.randint(3, 500, (5, 20), generator=torch.Generator().manual_seed(2)).tolist()
# The adapter of each prompt: a batch that mixes the base model and all adapters.
MIXED = [None, "all", "qv", "odd", "all"]
needs_kernels = pytest.mark.skipif(not HAS_KERNELS, reason="there are no CPU kernels here")


def base_model() -> transformers.LlamaForCausalLM:
    """Return a model whose sizes the CPU kernels take, with weights that are numbers of bf16."""
    model = hf_model(vocab_size=512, hidden_size=128, initializer_range=0.08)
    for weight in model.parameters():
        weight.data = weight.data.bfloat16().float()
    return model


@pytest.fixture(scope="module")
def model() -> transformers.LlamaForCausalLM:
    return base_model()


@pytest.fixture(scope="module")
def base(model, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("bases") / "hf"
    model.save_pretrained(folder)
    write_byte_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def folders(model, tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    found = {}
    for i, (name, (rank, parts)) in enumerate(ADAPTERS.items()):
        modules = [f"{layer}.{part}" for layer in LAYERS for part in parts]
        tensors = update_of(model, *modules, rank=rank)
        tensors = {key: (x * (0.5 + i)).bfloat16().float() for key, x in tensors.items()}
        targets = sorted({part.split(".")[1] for part in parts})
        found[name] = write_adapter(root / name, tensors, r=rank, target_modules=targets)
    return found


def build(base: Path, folders: dict[str, Path], **arguments: Any) -> Llama:
    """Build a model on the CPU, and load all adapters."""
    sizes = {"max_seq_len": 64, "max_batch_size": 8}
    llama = Llama.build(str(base), device="cpu", verbose=False, **sizes | arguments)
    for name, folder in folders.items():
        llama.load_adapter(name, folder)
    return llama


def answers(
    llama: Llama,
    names: list[str | None],
    prompts: list[list[int]],
    n: int = 6,
    of_prompts: bool = True,
) -> list:
    """Return ids, their log-probabilities and those of the prompt, all in one batch."""
    params = SamplingParams(
        temperature=0.0, max_tokens=n, logprobs=0, prompt_logprobs=0 if of_prompts else None
    )
    prepare = llama.llm_engine.prepare
    requests = [
        prepare("", prompt, params, index=i, adapter=name)
        for i, (name, prompt) in enumerate(zip(names, prompts, strict=True))
    ]
    outputs = llama.llm_engine.run(requests)
    found = []
    for output in outputs:
        answer = output.outputs[0]
        of_prompt = [entry and [*entry.values()] for entry in output.prompt_logprobs or []]
        scores = [[*entry.values()] for entry in answer.logprobs or []]
        found.append((answer.token_ids, scores, of_prompt))
    return found


def in_graphs(base: Path, folders: dict[str, Path]) -> Llama:
    """Return a model whose steps are recorded, with the kernels of adapters and of attention."""
    plain = build(base, {}, dtype="fp32")
    plain.model.use_kernels(table({"adapters", "attention"}, {torch.float32}))
    llama = Llama(
        plain.model, plain.tokenizer, options=EngineOptions(num_pages=64, token_budget=60)
    )
    for name, folder in folders.items():
        llama.load_adapter(name, folder)
    return llama


@pytest.mark.parametrize("way", ["torch", "kernels in graphs"])
def test_a_mixed_batch_gives_the_answers_of_peft(base, folders, monkeypatch, way):
    """In float32: ids, and log-probabilities of the prompt and of the answer.

    On a GPU, steps of single tokens and of short prompts are graphs, also where some rows have
    adapters.
    """
    prompts, n = PROMPTS, 6
    if way != "torch":
        pytest.importorskip("triton")
        monkeypatch.setattr("llama.generation.recorder_for", lambda model: Again())
        # PyTorch computes attention in the place of its kernel.
        monkeypatch.setattr("llama.kernels.cuda.table.suits_tiles", lambda *_: False)
        prompts, n = [prompt[:8] for prompt in PROMPTS], 3  # the interpreter is slow
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    named = dict(folders)
    # PEFT wants names of modules where our files have a regular expression.
    first, *others = named
    oracle = peft.PeftModel.from_pretrained(base_model(), named[first], adapter_name=first)
    for name in others:
        oracle.load_adapter(named[name], adapter_name=name)
    oracle.eval()
    llama = build(base, folders, dtype="fp32") if way == "torch" else in_graphs(base, folders)
    ours = answers(llama, MIXED, prompts, n)
    if way != "torch":
        graphs = llama.engine.runner.replayer
        assert isinstance(graphs, StepGraphs)
        assert {shape.reach.max_rank for shape in graphs._graphs} == {0, 64}
        monkeypatch.setattr(llama.engine.runner, "hidden_states", None)
        alone = answers(llama, MIXED, prompts, 1, of_prompts=False)
        assert [ids for ids, *_ in alone] == [ids[:1] for ids, *_ in ours]
        assert {shape.reach.max_rank for shape in graphs._graphs if shape.prompts} == {0, 64}
    texts = torch.tensor([[*p, *found[0]] for p, found in zip(prompts, ours, strict=True)])
    names = [name or "__base__" for name in MIXED]
    with torch.inference_mode():
        logprobs = oracle(texts, adapter_names=names).logits.float().log_softmax(-1)
    for row, (ids, scores, of_prompt) in enumerate(ours):
        expected = logprobs[row, :-1].gather(1, texts[row, 1:, None])[:, 0]
        given = torch.tensor([x[0] for x in [*of_prompt[1:], *scores]])
        assert ids == logprobs[row, len(prompts[row]) - 1 : -1].argmax(-1).tolist()
        torch.testing.assert_close(given, expected, atol=2e-4, rtol=0)
    assert len({tuple(ids) for ids, *_ in ours}) > 3, "the adapters change the answers"
    llama.close()


FORMATS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "int8": {"quantize": "int8"},
    "int4 and rounded": {"quantize": "int4", "activations": "int8"},
    "8-bit cache": {"kv_cache_dtype": "int8"},
    "packed": {},
    "codes": {},
}


@needs_kernels
@pytest.mark.parametrize("name", FORMATS)
def test_a_row_gets_the_same_bits_in_any_batch(name, base, folders, tmp_path):
    """Alone, in a mixed batch, in chunks, by modules; base rows as without any adapter."""
    with without_amx() if "activations" in FORMATS[name] else contextlib.nullcontext():
        check_rows(name, base, folders, tmp_path)


def check_rows(name: str, base: Path, folders: dict[str, Path], tmp_path: Path) -> None:
    if name == "packed":
        pack(base, tmp_path / "packed")
        base = tmp_path / "packed"
    elif name == "codes":
        convert(base, tmp_path / "q8.gguf", quantize="q8_0")
        base = tmp_path / "q8.gguf"
    plain = build(base, {}, **FORMATS[name])
    expected = answers(plain, [None] * 5, PROMPTS)
    plain.close()
    llama = build(base, folders, **FORMATS[name])
    mixed = answers(llama, MIXED, PROMPTS)
    assert mixed[0] == expected[0], "a row of the base model"
    assert all(mixed[i] != expected[i] for i in range(1, 5))
    for i in range(1, 5):
        assert answers(llama, [MIXED[i]], [PROMPTS[i]]) == [mixed[i]]
    assert answers(llama, [None] * 5, PROMPTS) == expected
    llama.engine.scheduler.token_budget = 9
    assert answers(llama, MIXED, PROMPTS) == mixed
    llama.engine.scheduler.token_budget = 2048
    llama.model.use_modules()
    assert answers(llama, MIXED, PROMPTS) == mixed
    llama.close()


@needs_kernels
def test_a_step_with_adapters_is_one_native_call(base, folders, monkeypatch):
    llama = build(base, folders)
    calls: list[str] = []
    call = native.call

    def spy(name: str, *args: Any) -> int:
        calls.append(name)
        return call(name, *args)

    monkeypatch.setattr(native, "call", spy)
    answers(llama, MIXED, PROMPTS, n=1)
    layers = calls.index("layers_bf16")
    assert calls.count("layers_bf16") == 1 and "linear_packed" not in calls[:layers]
    assert calls.count("linear_packed") == 2, "the lm_head, for scores and for the token"
    llama.close()


@needs_kernels
def test_bf16_is_as_close_to_the_exact_product_as_a_merge(base, folders):
    """The error against float32 is not larger than that of the merged model."""
    exact = build(base, folders, dtype="fp32")
    wanted = answers(exact, ["all"], PROMPTS[:1])[0][2][1:]
    exact.close()
    unmerged_llama = build(base, folders)
    given = answers(unmerged_llama, ["all"], PROMPTS[:1])[0][2][1:]
    unmerged_llama.close()
    merged = build(base, {}, lora=folders["all"])
    rounded = answers(merged, [None], PROMPTS[:1])[0][2][1:]
    merged.close()
    errors = [(torch.tensor(x) - torch.tensor(wanted)).abs().mean() for x in (given, rounded)]
    assert errors[0] < 1.5 * errors[1] < 0.5


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_shares_of_all_ranks_are_the_whole_update(size, base, folders, model):
    """Sums over ranks of what is divided by columns, rows side by side of what is by rows."""
    zero = transformers.LlamaForCausalLM(model.config).double()
    for weight in zero.parameters():
        weight.data.zero_()
    tensors = load_file(folders["odd"] / "adapter_model.safetensors")
    for layer in LAYERS:
        for part in ADAPTERS["odd"][1]:
            a, b = (tensors[f"{PREFIX}{layer}.{part}.lora_{x}.weight"].double() for x in "AB")
            zero.get_parameter(f"{layer}.{part}.weight").data += 8 / 33 * b @ a
    state = metas_state(zero)
    found = find(base)
    for rank in range(size):
        part_of = loaded(found, rank, size, torch.float32)
        adapter = unmerged.load(folders["odd"], part_of)
        for block in part_of.blocks():
            for half in (block.attention, block.feed_forward):
                for linear in (half.first, half.second):
                    expect_share(adapter.weights, linear, state, rank, size)


def expect_share(
    weights: AdapterWeights,
    linear: Any,
    state: dict[str, Tensor],
    rank: int,
    size: int,
) -> None:
    sizes = {"n_heads": 4, "n_kv_heads": 2, "dim": 128}
    wanted = [shard_of(name, state[name], sizes, rank, size) for name in linear.names]
    whole = torch.cat(wanted)
    delta = weights.deltas.get(linear.names[0])
    out = torch.zeros(linear.weight.shape[1], linear.weight.shape[0])
    if delta is not None:
        delta.add_to(out, torch.eye(linear.weight.shape[1]))
    torch.testing.assert_close(out.T.double(), whole, atol=1e-5, rtol=1e-5)


def test_cached_pages_belong_to_the_content_of_an_adapter(base, folders, tmp_path, model):
    """Another adapter never finds them, also not under the same name; a reload does."""
    llama = build(base, folders, dtype="fp32")
    prompt = [[*range(5, 50)]]

    def cached(adapter: str | None) -> int:
        params = SamplingParams(temperature=0.0, max_tokens=1)
        request = llama.llm_engine.prepare("", prompt[0], params, adapter=adapter)
        return llama.llm_engine.run([request])[0].usage.cached_tokens

    assert [cached(x) for x in (None, "all", "qv")] == [0, 0, 0]
    assert [cached(x) for x in (None, "all", "qv")] == [32, 32, 32]
    llama.drop_adapter("all")
    llama.load_adapter("all", folders["odd"])
    assert cached("all") == 0 and cached("odd") == 32
    llama.load_adapter("again", folders["all"])
    assert cached("again") == 32
    info = llama.load_adapter("all", folders["all"], replace=True)
    assert cached("all") == 32 and info.digest == llama.adapters["again"].digest
    llama.close()


def test_drafts_change_no_answer(base, folders):
    """By look-up, and by a draft model, which has no adapter."""
    plain = build(base, folders, dtype="fp32")
    expected = [x[0] for x in answers(plain, MIXED, PROMPTS, n=20)]
    plain.close()
    for drafter in ("lookup", str(base)):
        llama = build(base, folders, dtype="fp32", speculate=drafter)
        given = llama.llm_engine.run(
            llama.llm_engine.prepare(
                "", prompt, SamplingParams(temperature=0.0, max_tokens=20), adapter=name
            )
            for name, prompt in zip(MIXED, PROMPTS, strict=True)
        )
        assert [x.outputs[0].token_ids for x in given] == expected
        if drafter == str(base):
            assert llama.engine.stats.draft_tokens > 0
        llama.close()


def test_every_call_takes_an_adapter(base, folders, model):
    """Each call gives what it gives on the merged model."""
    llama = build(base, folders, dtype="fp32")
    merged = build(base, {}, dtype="fp32", lora=folders["all"])
    calls: list[Callable[..., Any]] = [
        lambda x, **a: x.generate(PROMPTS[:1], 5, 0.0, **a),
        lambda x, **a: x.text_completion(["Hello"], 0.0, max_gen_len=5, **a),
        lambda x, **a: [d.text for d in x.stream_text(["Hello"], 0.0, max_gen_len=5, **a)],
        lambda x, **a: [b["generation"] for b in x.beam_search(["Hello"], 2, 4, **a)[0]],
    ]
    for call in calls:
        given = call(llama, adapter="all")
        assert given == call(merged) and given != call(llama)
    for embed in (
        lambda x, **a: torch.tensor(x.embed(["Hello"], pooling="mean", **a)[0]),
        lambda x, **a: x.hidden_states(["Hello"], [1], **a)[0][1],
    ):
        given = embed(llama, adapter="all")
        torch.testing.assert_close(given, embed(merged), atol=1e-4, rtol=1e-4)
        assert not torch.allclose(given, embed(llama), atol=1e-3)
    for bad, error in (("none", ValueError), (3, TypeError)):
        with pytest.raises(error, match=f"adapter={bad!r}"):
            llama.generate(PROMPTS[:1], 5, adapter=bad)  # type: ignore[arg-type]
    llama.close()
    merged.close()


def test_an_adapter_in_use_stays(base, folders):
    llama = build(base, folders, dtype="fp32")
    deltas = llama.stream_text(["Hello"], 0.0, adapter="qv")
    next(deltas)
    with pytest.raises(AdapterInUseError, match="'qv' is in use by 1 unfinished"):
        llama.drop_adapter("qv")
    with pytest.raises(AdapterInUseError):
        llama.load_adapter("qv", folders["all"], replace=True)
    llama.load_adapter("same", folders["qv"])
    llama.drop_adapter("qv")  # another name keeps the content
    assert [delta.text for delta in deltas]
    llama.drop_adapter("same")
    assert [*llama.adapters] == ["all", "odd"]
    for name, error in (("qv", ValueError), (None, TypeError)):
        with pytest.raises(error, match="name="):
            llama.drop_adapter(name)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="is the name of a loaded adapter"):
        llama.load_adapter("all", folders["all"])
    for bad in ("", "x" * 300, "a\nb"):
        with pytest.raises(ValueError, match="printable"):
            llama.load_adapter(bad, folders["all"])
    llama.close()


QUERY = "model.layers.0.self_attn.q_proj"


def damaged(model: Any, root: Path) -> dict[str, tuple[Path, str]]:
    """Return folders that cannot be loaded, with what the message says."""
    good = update_of(model, QUERY)
    a, b = good
    nan = good | {b: torch.full_like(good[b], float("nan"))}
    narrow = good | {a: torch.ones(4, 64)}
    embedding = update_of(model, "model.embed_tokens")
    whole = good | {f"{PREFIX}model.norm.weight": torch.ones(128)}
    ends = {f"{PREFIX}{x}.weight": weight_of(model, x).clone() for x in ("lm_head", EMBEDDING)}
    more = {name: torch.cat([x, x[:8]]) for name, x in ends.items()}
    other = {f"{PREFIX}lm_head.weight": ends[f"{PREFIX}lm_head.weight"].clone()}
    other[f"{PREFIX}lm_head.weight"][-1, -1] += 0.01
    tokens = {f"{PREFIX}{EMBEDDING}.token_adapter.trainable_tokens_delta": torch.ones(1, 128)}
    cases: dict[str, tuple[dict[str, Tensor], dict[str, Any], str]] = {
        "dora": (update_of(model, QUERY, dora=True), {"use_dora": True}, "DoRA cannot be chosen"),
        "nan": (nan, {}, "holds NaN"),
        "shape": (narrow, {}, r"A has shape \(4, 64\)"),
        "name": (good | {f"{PREFIX}model.zzz.lora_A.weight": torch.ones(4, 8)}, {}, "zzz"),
        "rank": (good, {"r": 8}, r"but the rank in .* give \(8, 128\)"),
        "large rank": (update_of(model, QUERY, rank=257), {"r": 257}, "has rank 257"),
        "pissa": (good, {"init_lora_weights": "pissa"}, "changes the base model"),
        "key": (good, {"use_magic": 1}, "'use_magic' is 1"),
        "embedding": (embedding, {}, "updates tok_embeddings.weight"),
        "whole": (whole, {"modules_to_save": ["norm"]}, "replaces norm.weight"),
        "more rows": (good | more, {}, "has rows for 520 tokens, and the model for 512: merge it"),
        "another lm_head": (good | other, {}, "replaces output.weight"),
        "a token": (good | tokens, {"trainable_token_indices": [7]}, "changes rows of tok_embedd"),
        "a trained lm_head": (
            good | {f"{PREFIX}lm_head.weight": ends[f"{PREFIX}lm_head.weight"]},
            {"modules_to_save": ["lm_head"]},
            "replaces output.weight",
        ),
        "copies alone": (ends, {}, "holds no low-rank update"),
        "method": (good, {"peft_type": "IA3"}, "'IA3'"),
    }
    found = {}
    for name, (tensors, config, message) in cases.items():
        found[name] = write_adapter(root / name, tensors, **config), message
    (root / "pickle").mkdir()
    (root / "pickle" / "adapter_config.json").write_text(
        (root / "nan" / "adapter_config.json").read_text()
    )
    (root / "pickle" / "adapter_model.bin").write_bytes(pickle.dumps({"x": print}))
    found["pickle"] = root / "pickle", "adapter_model.bin"
    (root / "cut").mkdir()
    (root / "cut" / "adapter_config.json").write_text("{")
    found["cut"] = root / "cut", "adapter_config.json"
    return found


def test_a_bad_folder_is_refused_by_name_and_the_engine_goes_on(base, folders, model, tmp_path):
    llama = build(base, folders, dtype="fp32")
    expected = answers(llama, MIXED, PROMPTS)
    num_bytes = llama.llm_engine.adapter_store.nbytes
    for name, (folder, message) in damaged(model, tmp_path).items():
        with pytest.raises((ValueError, OSError), match=message):
            llama.load_adapter(name, folder)
        assert name not in llama.adapters
    with pytest.raises(FileNotFoundError, match="is not a folder"):
        llama.load_adapter("absent", tmp_path / "absent")
    assert llama.llm_engine.adapter_store.nbytes == num_bytes
    assert answers(llama, MIXED, PROMPTS) == expected
    llama.close()


@pytest.mark.parametrize("free", [999, 1000])
def test_an_adapter_leaves_a_gpu_the_memory_of_a_step(monkeypatch, free):
    """One that takes memory that a step needs is refused; the step would end the job."""
    loaded: Any = object()
    weight = SimpleNamespace(device=torch.device("cuda", 0))
    model: Any = SimpleNamespace(norm=SimpleNamespace(weight=weight))
    monkeypatch.setattr(adapters_module, "load", lambda path, model: loaded)
    monkeypatch.setattr(adapters_module, "free_bytes", lambda device: free << 20)
    scheduler: Any = None
    store = AdapterStore(model, scheduler, reserve=1000 << 20)
    if free >= 1000:
        assert store.read("folder") is loaded
    else:
        with pytest.raises(ValueError, match="999 MiB of the GPU would be free, where a step need"):
            store.read("folder")


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_copies_of_the_ends_change_nothing(base, folders, model, tmp_path, dtype):
    """PEFT saves the embedding and lm_head of the base model if save_embedding_layers is set."""
    tensors = load_file(folders["qv"] / "adapter_model.safetensors")
    config = json.loads((folders["qv"] / "adapter_config.json").read_text())
    for name in ("lm_head", EMBEDDING):
        tensors[f"{PREFIX}{name}.weight"] = weight_of(model, name).clone()
    write_adapter(tmp_path, tensors, **config)
    llama = build(base, {"qv": folders["qv"], "copies": tmp_path}, dtype=dtype)
    expected = answers(llama, ["qv"], PROMPTS[:1])
    assert answers(llama, ["copies"], PROMPTS[:1]) == expected
    assert answers(llama, [None], PROMPTS[:1]) != expected
    llama.close()


def test_copies_that_cannot_be_compared_are_refused(base, folders, model, tmp_path):
    tensors = load_file(folders["qv"] / "adapter_model.safetensors")
    config = json.loads((folders["qv"] / "adapter_config.json").read_text())
    tensors[f"{PREFIX}lm_head.weight"] = weight_of(model, "lm_head").clone()
    write_adapter(tmp_path, tensors, **config)
    llama = build(base, {}, quantize="int8")
    with pytest.raises(ValueError, match=r"lm_head\.weight, and as the model's is quantized"):
        llama.load_adapter("copies", tmp_path)
    llama.close()


def test_loads_and_drops_leave_nothing(base, folders):
    llama = build(base, {})
    seen: list[weakref.ref] = []
    for i in range(64):
        llama.load_adapter(f"a{i}", folders["all"])
        adapters = llama.llm_engine.adapter_store
        (stored,) = adapters._adapters.values()
        seen.append(weakref.ref(stored.weights))
        del stored
        llama.generate(PROMPTS[:1], 2, 0.0, adapter=f"a{i}")
        llama.drop_adapter(f"a{i}")
    gc.collect()
    assert not [ref for ref in seen if ref() is not None]
    assert llama.llm_engine.adapter_store.nbytes == 0 and not llama.adapters
    assert not llama.engine.scheduler.has_adapters
    llama.close()


def test_a_request_of_a_dropped_adapter_is_refused(base, folders):
    """It was prepared before, and is submitted afterwards."""
    llama = build(base, folders, dtype="fp32")
    request = llama.llm_engine.prepare("", PROMPTS[0], SamplingParams(), adapter="qv")
    llama.drop_adapter("qv")
    with pytest.raises(ValueError, match="has been dropped"):
        llama.llm_engine.submit([request])
    assert not llama.llm_engine.has_unfinished_requests()
    assert "adapter" in {
        field.name for field in dataclasses.fields(request.answers[0].sequence.spec)
    }
    llama.close()


@pytest.mark.parametrize("head_dim", [16, 96])
def test_heads_of_another_size_take_the_adapters_of_peft(tmp_path, head_dim):
    """Merged, and chosen by request; and loaded on each of two ranks, with copies of the ends."""
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    base = hf_model(vocab_size=512, hidden_size=128, head_dim=head_dim)
    base.save_pretrained(tmp_path / "base")
    write_byte_tokenizer(tmp_path / "base")
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    theirs = peft.get_peft_model(base, config)
    draw = torch.Generator().manual_seed(5)
    for parameter in theirs.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=draw)
    theirs.eval().save_pretrained(tmp_path / "adapter", save_embedding_layers=True)
    tokens = torch.tensor(PROMPTS[:1])
    expected = hf_logits(theirs, tokens)
    found = find(tmp_path / "base")
    merged = loaded(found.merged_with(tmp_path / "adapter"))
    torch.testing.assert_close(merged(tokens, 0), expected, atol=1e-4, rtol=1e-4)
    llama = build(tmp_path / "base", {"peft": tmp_path / "adapter"}, dtype="fp32")
    ((_, _, scores),) = answers(llama, ["peft"], PROMPTS[:1])
    llama.close()
    wanted = expected.log_softmax(-1)[0, range(19), tokens[0, 1:]]
    ours = [entry[0] for entry in scores[1:]]
    assert ours == pytest.approx(wanted.tolist(), abs=1e-4)
    for rank in range(2):
        assert unmerged.load(tmp_path / "adapter", loaded(found, rank, 2)).rank == 4
