"""The size of the KV cache: by hand, and through `Llama.build` on a simulated machine."""

import inspect
import math
from functools import partial
from typing import Any, NamedTuple, get_type_hints

import pytest
import torch

from helpers.checkpoints import write_meta
from helpers.flags import read
from helpers.kernels import KERNELS_RUN
from helpers.launch import DEMO
from llama import Llama
from llama.build_args import BuildArgs
from llama.checkpoint.find import find
from llama.checkpoint.write.convert import convert
from llama.cli.flags import BUILD_FLAGS, FLAGS, UsageError
from llama.cli.parser import Command
from llama.loading.files import Files
from llama.loading.memory import _token_budget, estimate_memory, usual_memory
from llama.loading.sizes import Memory, choose_sizes, step_bytes
from llama.model.args import ModelArgs
from llama.model.plan import LayerPlan
from llama.ranks.placement import Placement

GIB = 2**30
LLAMA_8B = 131072  # bytes per token: 2 x 32 layers x 8 kv heads x 128 x 2 bytes


class Sizes(NamedTuple):
    max_seq_len: int
    num_pages: int


def sizes(seq_len=None, batch=256, kv_bytes=None, *, free=139 * GIB, weights=15 * GIB) -> Sizes:
    memory = Memory(free, weights, reserve=2 * GIB, per_token=LLAMA_8B)
    return Sizes(*choose_sizes(memory, seq_len, batch, kv_bytes, longest=131072))


def test_the_kv_cache_is_what_is_free_beside_the_weights():
    """The KV cache takes the memory that is free next to the weights.

    For an 8B on a GPU of 139 GiB, 256 sequences of 8,192 would need 256 GiB, and are allowed.
    """
    found = sizes()
    assert found.max_seq_len == 131072, "the model's own"
    assert found.num_pages == (int(139 * GIB * 0.9) - 15 * GIB) // (16 * LLAMA_8B)
    # the length of one sequence does not limit the pool
    assert sizes(131072).num_pages == found.num_pages
    assert sizes(512, 4).num_pages == 4 * 32  # no more than these could use
    assert sizes(kv_bytes=4 * GIB).num_pages == 4 * GIB // (16 * LLAMA_8B)


def test_a_small_card_keeps_its_reserve():
    """A small card keeps its reserve.

    A tenth of 20 GiB is 2 GiB: the memory of a step and the 10 % are not added.
    """
    assert sizes(free=20 * GIB).num_pages == 3 * GIB // (16 * LLAMA_8B)
    assert sizes(free=18 * GIB).num_pages == 1 * GIB // (16 * LLAMA_8B)


def test_pages_count_in_whole():
    """Pages are counted in whole: a million sequences of one token take a million pages."""
    found = sizes(1, 2**20, free=2000 * GIB)
    assert found.num_pages == (1800 - 15) * GIB // (16 * LLAMA_8B) < 2**20


def test_the_length_shrinks_only_where_nobody_asked_for_one():
    for free in (16.2, 16.6, 20.3, 30):
        found = sizes(free=int(free * GIB), weights=14 * GIB - GIB // 2)
        assert found.max_seq_len == min(131072, found.num_pages * 16 // 256 * 256), "what fits"
    assert sizes(batch=2, free=139 * GIB).num_pages == 131072 // 16, "one sequence of full length"
    assert sizes(batch=32, weights=0, free=1000 * GIB).num_pages == 32 * 8192 // 16
    with pytest.raises(ValueError, match=r"max_seq_len=8192 takes 1.00 GiB.*max_seq_len=\d+ would"):
        sizes(8192, free=int(16.6 * GIB), weights=14 * GIB)
    with pytest.raises(ValueError, match="use more ranks, a smaller dtype"):
        sizes(free=14 * GIB, weights=14 * GIB)
    with pytest.raises(ValueError, match="free next to the weights: ask for that or less"):
        sizes(kv_bytes=200 * GIB)
    with pytest.raises(ValueError, match=r"bytes=\d+ asked for: max_seq_len=64 would fit"):
        sizes(8192, kv_bytes=64 * LLAMA_8B)
    with pytest.raises(ValueError, match=f"=1 asked for: kv_cache_memory_bytes={64 * LLAMA_8B} "):
        sizes(64, kv_bytes=1)


def test_the_reserve_is_what_a_step_holds():
    """The reserve is the memory of a step.

    It is within a factor of two of the largest tensors of a step of 2,048 tokens of an 8B.
    """
    args = ModelArgs(
        dim=4096, n_layers=32, n_heads=32, n_kv_heads=8, vocab_size=128256,
        ffn_dim_multiplier=1.3, multiple_of=1024,
    )  # fmt: skip
    gate_and_up = 2048 * 2 * args.ffn_dim * 2
    logits = 256 * 128256 * 4
    found = step_bytes(args, LayerPlan.of(args), torch.bfloat16, 256)
    assert gate_and_up + 2 * logits < found < 2 * (gate_and_up + 3 * logits)


@pytest.mark.parametrize(
    ("gib", "used", "stages", "budget"),
    [(79, 16, 1, 8192), (79, 16, 4, 2048), (79, 76, 1, 2048), (40, 16, 1, 2048)],
)
def test_large_gpus_compute_more_tokens_in_a_step(monkeypatch, gib, used, stages, budget):
    """Steps of 8,192 tokens are the default on GPUs of 80 GB where the KV cache hardly shrinks."""
    files = Files(find(DEMO), torch.bfloat16, None, Placement(stages=stages), torch.device("cuda"))
    free = (gib - used) << 30

    def needs(tokens: int) -> Memory:
        return Memory(free, 0, (2 << 30) + tokens * (1 << 17), 1 << 17)

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, gib << 30))
    assert _token_budget(BuildArgs(str(DEMO)), files, 64, needs) == budget
    assert _token_budget(BuildArgs(str(DEMO), max_num_batched_tokens=99), files, 64, needs) == 99
    told = usual_memory(files, 70 << 30, 64)  # what doctor shows
    tokens = 8192 // stages if gib == 79 else 2048
    assert told == estimate_memory(files, 70 << 30, 64, token_budget=tokens)


def test_the_tokens_of_a_step_are_an_argument(checkpoint_dir):
    """They bound a step, and must be enough for a token of each sequence."""
    folder = str(checkpoint_dir[0])
    build: Any = partial(Llama.build, folder, None, 128, 4, device="cpu", dtype="fp32")
    llama = build(max_num_batched_tokens=10)
    assert llama.engine.scheduler.token_budget == 10
    assert build().engine.scheduler.token_budget == 2048
    prompt = [256, *range(40)]
    before = llama.engine.stats.steps
    llama.generate([prompt], 1, 0.0)
    assert llama.engine.stats.steps - before == 5  # 41 tokens
    with pytest.raises(ValueError, match="max_num_batched_tokens=3 is less than max_batch_size=4"):
        build(max_num_batched_tokens=3)


def test_build_says_what_fits(checkpoint_dir, capsys):
    folder = str(checkpoint_dir[0])
    llama = Llama.build(
        folder, None, 128, 4, device="cpu", dtype="fp32", kv_cache_memory_bytes=98304
    )
    assert "KV cache 192 tokens, 1 sequence of full length at once" in capsys.readouterr().out
    assert llama.engine.scheduler.pool.num_pages == 12
    for bad in (0, 1.5, "4GiB", True):
        with pytest.raises((TypeError, ValueError), match="kv_cache_memory_bytes"):
            Llama.build(folder, device="cpu", kv_cache_memory_bytes=bad)  # type: ignore[arg-type]


def test_what_does_not_fit_the_memory_is_refused(checkpoint_dir, monkeypatch):
    """A size that exceeds the memory is refused before any allocation; the error says what fits."""
    folder = str(checkpoint_dir[0])
    monkeypatch.setattr("llama.loading.memory.free_bytes", lambda *_: 14 << 20)
    assert Llama.build(folder, None, 512, 64, device="cpu", dtype="fp32").generate([[256]], 3)[0]
    with pytest.raises(ValueError, match=r"max_seq_len=\d\d\d\d would fit"):
        Llama.build(folder, None, 8192, 1, device="cpu", dtype="fp32")
    monkeypatch.setattr("llama.loading.memory.free_bytes", lambda *_: 1 << 10)
    with pytest.raises(ValueError, match="use more ranks"):
        Llama.build(folder, device="cpu")


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), "ten"])
def test_timeout_s_is_checked(timeout, checkpoint_dir):
    with pytest.raises((TypeError, ValueError), match="timeout_s"):
        Llama.build(str(checkpoint_dir[0]), device="cpu", timeout_s=timeout)


@pytest.mark.parametrize("silence", [0, 0.5, float("inf"), "ten"])
def test_silence_s_is_checked(silence, checkpoint_dir):
    with pytest.raises((TypeError, ValueError), match="silence_s"):
        Llama.build(str(checkpoint_dir[0]), device="cpu", silence_s=silence)


def test_the_arguments_of_a_build_are_a_table(checkpoint_dir):
    """The arguments of a build are a table.

    Meta's six come first and by position; all are in the help, and all except the last are flags.
    The signature that a reader sees has the names, kinds, types and defaults of the table.
    """
    parameters = inspect.signature(Llama.build).parameters
    table = inspect.signature(BuildArgs).parameters
    assert [(x.name, x.kind, x.default) for x in parameters.values()] == [
        (x.name, x.kind, x.default) for x in table.values()
    ]
    types = get_type_hints(Llama.build)
    declared = get_type_hints(BuildArgs, localns={"torch": torch})
    assert {name: types[name] for name in table} == {name: declared[name] for name in table}
    by_position = [name for name, x in parameters.items() if x.kind is x.POSITIONAL_OR_KEYWORD]
    assert by_position == [
        "ckpt_dir", "tokenizer_path", "max_seq_len", "max_batch_size", "model_parallel_size",
        "seed",
    ]  # fmt: skip
    doc = inspect.getdoc(Llama.build) or ""
    assert all(f"\n    {name}: " in doc for name in parameters)
    assert {"images", "mute_ranks", "verbose"} == parameters.keys() - BUILD_FLAGS.keys()
    flags = {**BUILD_FLAGS, "ckpt_dir": inspect.Parameter.empty}
    assert all(parameters[name].default == default for name, default in flags.items())
    kinds = {name: FLAGS[name].kind for name in ("timeout_s", "verify", "dtype")}
    assert kinds == {"timeout_s": float, "verify": bool, "dtype": str}
    command = Command("", {"seed": 1})
    assert read("llama", command, ["--seed", "7"], {}).seed == 7
    for text in ("-1", "1.5", str(2**63)):
        with pytest.raises(UsageError, match=r"9223372036854775807|integer"):
            read("llama", command, ["--seed", text], {})
    folder = str(checkpoint_dir[0])
    for bad in (
        {"max_seq_len": 0},
        {"max_batch_size": 1.5},
        {"seed": -1},
        {"speculate_tokens": 65},
    ):
        with pytest.raises(ValueError, match=f"^{next(iter(bad))}=.* must be a whole number from "):
            Llama.build(folder, device="cpu", **bad)
    for name in (name for name, x in parameters.items() if isinstance(x.default, bool)):
        wrong: dict[str, Any] = {name: "yes"}
        with pytest.raises(TypeError, match=f"^{name}='yes' must be True or False$"):
            Llama.build(folder, device="cpu", **wrong)


@pytest.mark.skipif(not KERNELS_RUN, reason="torch packs without a look at the numbers")
@pytest.mark.parametrize("quantize", [None, "int8", "fp8", "int4"])
def test_weights_that_are_not_finite_or_empty_are_named(make_checkpoint, quantize):
    """Weights that are not finite or empty are named, with their file.

    Packing reads each value anyway. A vocabulary may have rows of zeros.
    """
    folder, state, params = make_checkpoint(n_layers=2)
    state["layers.1.attention.wo.weight"][3, 5] = math.nan
    state["layers.0.feed_forward.w2.weight"][-1, -1] = -math.inf
    state["layers.1.feed_forward.w2.weight"][7] = 0
    state["output.weight"][9] = 0
    write_meta(folder, params, state, 1)
    with pytest.warns(UserWarning) as warned:
        Llama.build(str(folder), None, 32, 1, device="cpu", quantize=quantize)
    assert [str(x.message) for x in warned] == [
        f"{folder / 'consolidated.00.pth'} holds NaN or infinity in "
        "['layers.0.feed_forward.w2.weight', 'layers.1.attention.wo.weight']: `llama verify` says "
        "whether the file is damaged; else the model was trained so",
        f"{folder} holds rows of zeros in ['layers.1.feed_forward.w2.weight']: download it again, "
        "or convert it anew",
    ]


@pytest.mark.parametrize("layout", ["meta", "hf"])
@pytest.mark.parametrize("value", [math.nan, math.inf], ids=str)
def test_plain_weights_that_are_not_finite_are_named(make_checkpoint, tmp_path, value, layout):
    """Plain weights that are not finite are named once an answer fails.

    Nothing packs floats, an embedding or the norms. The file is the shard that holds the element,
    and the name is that of the file.
    """
    folder, state, params = make_checkpoint(n_layers=2)
    state["layers.1.attention.wv.weight"][0, 0] = value
    state["tok_embeddings.weight"][3, 1] = value
    state["layers.0.ffn_norm.weight"][2] = value
    write_meta(folder, params, state, 2 if layout == "meta" else 1)
    if layout == "hf":
        convert(folder, tmp_path / "hf")
        folder = tmp_path / "hf"
    llama = Llama.build(str(folder), None, 32, 1, device="cpu", dtype="fp32")
    with pytest.warns(UserWarning) as warned:
        for _ in range(2):
            with pytest.raises(ValueError, match="logits hold NaN or infinity"):
                llama.generate([[1, 2]], 4)
    messages = [str(x.message) for x in warned]
    norm = {"meta": "layers.0.ffn_norm", "hf": "layers.0.post_attention_layernorm"}[layout]
    for file, message in zip(find(folder).shards, messages, strict=True):
        assert message.startswith(f"{file} holds NaN or infinity in ["), message
        assert norm in message, "each shard holds the norms"
        is_first = file == find(folder).shards[0]
        assert ("embed" in message) == ("1.attention.wv" in message or "v_proj" in message)
        assert ("embed" in message) == is_first


def test_a_failed_answer_names_no_sound_weight(make_checkpoint, monkeypatch, recwarn):
    """A failed answer of a sound model names no weight, and a good one examines nothing."""
    llama = Llama.build(str(make_checkpoint(n_layers=1)[0]), None, 32, 1, device="cpu")
    llama.generate([[1, 2]], 4)
    assert llama.engine.explain_failure is not None
    hidden_states = llama.model.hidden_states
    monkeypatch.setattr(llama.model, "hidden_states", lambda *x: hidden_states(*x) * math.nan)
    with pytest.raises(ValueError, match="logits hold NaN or infinity"):
        llama.generate([[1, 2]], 4)
    assert llama.engine.explain_failure is None and not recwarn.list


def test_elements_too_large_for_fp16_are_no_damage_of_the_file(make_checkpoint):
    """Elements too large for fp16 are no damage of the file, and the warning names the remedy."""
    folder, state, params = make_checkpoint(n_layers=1)
    state["layers.0.attention.wo.weight"][:] = 1e6
    write_meta(folder, params, state, 1)
    llama = Llama.build(str(folder), None, 32, 1, device="cpu", dtype="fp16")
    expected = r"wo\.weight'\] of .* are too large for fp16: build with dtype='bf16'"
    with pytest.warns(UserWarning, match=expected) as warned, pytest.raises(ValueError):
        llama.generate([[1, 2]], 4)
    assert len(warned) == 1
