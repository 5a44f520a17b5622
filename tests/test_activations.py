"""`activations=` of `Llama.build`: which matrices round their inputs, and what does not change."""

import re
from collections.abc import Iterator

import pytest
import torch

from helpers.checkpoints import write_byte_tokenizer
from helpers.gguf_files import MIXED, PARAMS, write_gguf
from helpers.kernels import KERNELS_RUN, without_amx
from helpers.launch import DEMO
from llama import Llama
from llama.cli import main
from llama.kernels.cpu import native
from llama.weights.choice import (
    check_activations,
    default_activations,
    packed,
    round_activations,
)

CPU = torch.device("cpu")
needs_kernels = pytest.mark.skipif(not KERNELS_RUN, reason="needs x86-64 with AVX2, and g++")


@pytest.fixture(autouse=True)
def _in_groups() -> Iterator[None]:
    """Let a CPU with AMX round in groups, too."""
    with without_amx():
        yield


def build(folder, **options) -> Llama:
    return Llama.build(str(folder), None, 128, 8, device="cpu", **options)


@pytest.fixture(scope="module")
def folder(make_checkpoint) -> str:
    return str(make_checkpoint(dim=128, seed=31)[0])


def logits_of(llama: Llama) -> torch.Tensor:
    tokens = torch.arange(60).remainder(250)[None] + 3
    return torch.cat([llama.model(tokens[:, :40], 0)] + [
        llama.model(tokens[:, i : i + 1], i) for i in range(40, 60)
    ], 1)  # fmt: skip


@needs_kernels
@pytest.mark.parametrize("quantize", ["int8", "int4"])
@pytest.mark.parametrize("activations", ["int8", "int8_token", "int8_lm_head"])
def test_inputs_of_the_layers_are_rounded(folder, quantize, activations, capsys):
    llama = build(folder, quantize=quantize, activations=activations)
    assert f"cpu, {quantize}, activations={activations}, model_par" in capsys.readouterr().out
    model = llama.model
    for layer in model.blocks():
        for linear in (layer.attention.wo, layer.feed_forward.w2):
            k = linear.weight.shape[1]
            assert linear.weight.activations == (k if activations == "int8_token" else 32)
    assert model.output.weight.activations == (32 if activations == "int8_lm_head" else 0)
    rounded, plain = logits_of(llama), logits_of(build(folder, quantize=quantize))
    assert not torch.equal(rounded, plain)
    error = (rounded - plain).square().mean() / plain.square().mean()
    assert error < (2e-3 if activations == "int8_token" else 1e-3)
    model.use_modules(True)
    assert torch.equal(logits_of(llama), rounded), "the modules are the definition"
    model.use_modules(False)
    state = {name: x.clone() for name, x in model.state_dict().items()}
    model.load_state_dict(state)
    assert model.blocks()[0].attention.wo.weight.activations, "also after other weights are loaded"
    assert model.output.weight.exact_top == (activations == "int8_lm_head")


@pytest.mark.parametrize("has_kernels", [True, False])
def test_inputs_in_e4m3_are_rounded_alone_and_in_any_batch(folder, has_kernels, request):
    """With e4m3 a row is rounded by itself, so that prompts in one step change no answer."""
    if not has_kernels:
        request.getfixturevalue("no_kernels")
    llama = build(folder, quantize="fp8", activations="fp8")
    model = llama.model
    for layer in model.blocks():
        assert layer.attention.wqkv.weight.rounds_to_e4m3
        assert layer.feed_forward.w2.weight.rounds_to_e4m3
    assert not model.output.weight.rounds_to_e4m3
    rounded, plain = logits_of(llama), logits_of(build(folder, quantize="fp8"))
    error = (rounded - plain).square().mean() / plain.square().mean()
    assert 1e-5 < error < 1e-2  # e4m3 has three bits after the point
    model.use_modules(True)
    assert torch.equal(logits_of(llama), rounded), "the modules are the definition"
    model.use_modules(False)
    model.load_state_dict({name: x.clone() for name, x in model.state_dict().items()})
    assert model.blocks()[0].attention.wo.weight.rounds_to_e4m3, "also after a load"
    if has_kernels and KERNELS_RUN:
        prompts = [[256, *range(60 + i, 90 + 3 * i)] for i in range(5)]
        together = llama.generate(prompts, 12, temperature=0)[0]
        for prompt, answer in zip(prompts, together, strict=True):
            assert llama.generate([prompt], 12, temperature=0)[0] == [answer]


@needs_kernels
def test_rounding_the_inputs_of_lm_head_hardly_changes_the_next_token():
    """The largest logits are computed again without it; otherwise the divergence is 2.6e-5."""
    first, second = [
        Llama.build(
            str(DEMO), None, 128, 8, device="cpu", quantize="int8", activations=activations
        ).model
        for activations in ("int8", "int8_lm_head")
    ]
    tokens = torch.arange(300, 380)[None]
    expected, found = first(tokens, 0).log_softmax(-1), second(tokens, 0).log_softmax(-1)
    assert not torch.equal(expected, found)
    divergence = (expected.exp() * (expected - found)).sum(-1).mean()
    assert divergence < 1.2e-5


@needs_kernels
def test_bf16_is_the_default(folder, capsys):
    plain = logits_of(build(folder, quantize="int8"))
    llama = build(folder, quantize="int8", activations="bf16")
    assert "activations" not in capsys.readouterr().out
    assert torch.equal(logits_of(llama), plain)


@needs_kernels
def test_quantized_gguf_files_round_as_llama_cpp_does(tmp_path, capsys):
    """By default, on CPUs without AMX; what does not fit, such as an lm_head in F16, stays."""
    write_byte_tokenizer(tmp_path)
    built = {}
    files: dict[str, dict[str, str] | str]
    files = {"all": "Q4_0", "head": MIXED | {"output": "F16"}, "none": "F16"}
    for name, kinds in files.items():
        path = tmp_path / f"{name}.gguf"
        write_gguf(path, PARAMS, kinds, tokenizer=tmp_path / "tokenizer.model")
        built[name] = build(path).model
        assert ("activations=int8_lm_head" in capsys.readouterr().out) == (name != "none")
    for name, rounded in {"all": (32, 32), "head": (32, 0)}.items():
        model = built[name]
        found = model.blocks()[0].feed_forward.w2.weight, model.output.weight
        assert tuple(getattr(weight, "activations", 0) for weight in found) == rounded
    asked = [build(tmp_path / "all.gguf", activations=name) for name in ("int8_lm_head", "bf16")]
    assert torch.equal(logits_of(build(tmp_path / "all.gguf")), logits_of(asked[0]))
    assert asked[1].model.output.weight.activations == 0
    with pytest.raises(ValueError, match="'int8_lm_head' needs an lm_head whose elements"):
        build(tmp_path / "head.gguf", activations="int8_lm_head")
    assert default_activations("int8_lm_head", torch.device("cuda")) is None
    capsys.readouterr()
    main(["doctor", str(tmp_path / "all.gguf"), "--device", "cpu"])
    assert "int8_lm_head; --activations bf16 rounds none" in capsys.readouterr().out


@needs_kernels
def test_an_answer_is_the_same_in_any_batch_and_with_drafts(folder):
    prompts = [[256, *range(60 + i, 90 + 3 * i)] for i in range(5)]
    llama = build(folder, quantize="int4", activations="int8")
    together = llama.generate(prompts, 20, temperature=0)[0]
    for prompt, answer in zip(prompts, together, strict=True):
        assert llama.generate([prompt], 20, temperature=0)[0] == [answer]
    drafting = build(folder, quantize="int4", activations="int8", speculate="lookup")
    assert drafting.generate(prompts, 20, temperature=0)[0] == together


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"activations": "int4"}, "activations='int4': give one of bf16, fp8, int8, int8_lm_head,"),
        ({"activations": 8}, "activations=8: give one of"),
        ({"activations": "int8"}, "activations='int8' needs matrices whose elements are whole"),
        ({"activations": "int8", "quantize": "fp8"}, "none: give quantize='int8' or 'int4' too"),
    ],
)
def test_what_cannot_be_rounded_is_refused(folder, asked, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        build(folder, **asked)


def test_other_devices_amx_and_ranks_with_broken_groups_are_refused(monkeypatch):
    with pytest.raises(ValueError, match="activations='int8' is for the CPU, not for cuda: leave"):
        check_activations("int8", torch.device("cuda"), is_plain=False)
    assert check_activations("bf16", torch.device("cuda"), is_plain=True) is None
    sets = [x for x in native.INSTRUCTION_SETS if x.name == "amx"]
    with monkeypatch.context() as patch:
        patch.setattr(native, "allowed_instruction_sets", lambda: sets)
        with pytest.raises(ValueError, match="slower than bf16 on this CPU, which has AMX: leave"):
            check_activations("int8", CPU, is_plain=False)
        assert check_activations("int8_token", CPU, is_plain=False) == "int8_token"
        assert default_activations("int8_token", CPU) == "int8_token"
        assert default_activations("int8_lm_head", CPU) is None
        plain = torch.ones(32, 64).bfloat16()
        with pytest.raises(ValueError, match="unless matrices are in int8 with one scale per row"):
            round_activations(
                {"layers.0.attention.wo": packed(plain.clone(), "int4")}, "int8_token"
            )
        weight = packed(plain, "int8")
        round_activations({"layers.0.attention.wo": weight}, "int8_token")
        assert weight.activations == 64
    held = {
        "layers.0.attention.wo": packed(torch.ones(32, 64).bfloat16(), "int8"),
        "output.weight": packed(torch.ones(32, 64).bfloat16()),
    }
    with pytest.raises(
        ValueError, match="'int8_lm_head' needs an lm_head whose elements are whole"
    ):
        round_activations(held, "int8_lm_head")
    held = {"layers.0.attention.wo": packed(torch.ones(32, 80).bfloat16(), "int8")}
    with pytest.raises(
        ValueError, match=r"attention.wo has 80 columns on a rank, which is no mult"
    ):
        round_activations(held, "int8")


@pytest.mark.parametrize("per_token", [False, True])
def test_without_kernels_pytorch_computes_the_same(folder, no_kernels, per_token):
    llama = build(folder, quantize="int8", activations="int8_token" if per_token else "int8")
    plain = logits_of(build(folder, quantize="int8"))
    rounded = logits_of(llama)
    assert not torch.equal(rounded, plain)
    assert (rounded - plain).square().mean() / plain.square().mean() < 2e-3
