"""Images in prompts: Llama 3.2 Vision against Meta's own modules, and images in the engine."""

import base64
import io
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from llama_models.datatypes import RawMediaItem, RawMessage, RawTextItem
from llama_models.llama3.chat_format import ChatFormat as MetasChatFormat
from llama_models.llama3.tokenizer import Tokenizer as MetasTokenizer
from PIL import Image
from torch import Tensor

from helpers import vision
from helpers.kernels import KERNELS_RUN
from helpers.kv_pages import wait_until_written
from helpers.launch import PROGRAMS, run_program
from helpers.tape import TapeRecorder
from helpers.vision import IMAGE_ID, picture
from llama import Llama
from llama.checkpoint.write.convert import convert
from llama.engine.hooks import StepHook
from llama.engine.sequence import SequenceState
from llama.engine.step import Step
from llama.ops.batch import Batch
from llama.options import page_store
from llama.options.engine_options import EngineOptions
from llama.options.speculation.lookup import Speculator
from llama.storage import kv_disk, kv_folder

# An image for each grid of tiles that there is.
SIZES = [(20, 20), (56, 28), (84, 28), (112, 28), (28, 56), (56, 56), (25, 84), (20, 112)]
Parts = list[Any]


def one_of_each_grid() -> list[Parts]:
    return [["Look: ", picture(*size, seed=i), " What is it?"] for i, size in enumerate(SIZES)]


PROMPTS: list[Parts] = [
    ["no image"],
    [picture(20, 20), " an image first"],
    [picture(20, 20)],
    ["One ", picture(30, 30, 1), picture(56, 28, 2), " two ", picture(25, 80, 3), " three"],
    *one_of_each_grid(),
]


def images_in(parts: Parts) -> list[Image.Image]:
    return [part for part in parts if not isinstance(part, str)]


def ids_of(llama: Llama, parts: Parts) -> list[int]:
    ids = [llama.tokenizer.bos_id]
    for part in parts:
        is_text = isinstance(part, str)
        ids += llama.tokenizer.encode(part, bos=False, eos=False) if is_text else [IMAGE_ID]
    return ids


@dataclass
class Expected:
    """What Meta's model computes: logits after each token of PROMPTS, and greedy ids."""

    folder: Path
    logits: list[Tensor]
    greedy: list[list[int]]


@pytest.fixture(scope="module")
def metas(tmp_path_factory) -> Expected:
    folder = tmp_path_factory.mktemp("vision")
    with vision.metas_modules() as module:
        model = vision.MetasVision(module)
        vision.write_metas(folder, model.state())
        llama = build(folder, images=False)
        prompts = [(ids_of(llama, parts), images_in(parts)) for parts in PROMPTS]
        found = [model.run(ids, images, 5) for ids, images in prompts]
    return Expected(folder, *map(list, zip(*found, strict=True)))


def build(folder: Path, dtype: str = "fp32", **more: Any) -> Llama:
    return Llama.build(str(folder), None, 128, 4, device="cpu", dtype=dtype, verbose=False, **more)


@pytest.fixture(scope="module")
def llama(metas) -> Iterator[Llama]:
    with build(metas.folder) as built:
        yield built


@pytest.fixture(scope="module", params=["Meta's", "Hugging Face's"])
def in_layout(request, metas, llama, tmp_path_factory) -> Iterator[Llama]:
    """The model of files in a layout."""
    if request.param == "Meta's":
        yield llama
        return
    folder = tmp_path_factory.mktemp("converted") / "hf"
    convert(metas.folder, folder)
    with build(folder) as built:
        yield built


def answers(llama: Llama, prompts: list[Parts], count: int = 5) -> list[Any]:
    """Return tokens and log-probabilities of greedy answers."""
    given = [parts[0] if parts == parts[:1] and isinstance(parts[0], str) else parts
             for parts in prompts]  # fmt: skip
    found = llama.text_completion(given, 0.0, max_gen_len=count, logprobs=True)
    return [(answer["tokens"], answer["logprobs"]) for answer in found]


def test_logits_are_those_of_metas_model(metas, in_layout):
    """Log-probabilities of prompts: each grid of tiles, several images, text before and after."""
    ids = [ids_of(in_layout, parts) for parts in PROMPTS]
    found = in_layout.text_completion(PROMPTS, 0.0, max_gen_len=0, logprobs=True, echo=True)
    for tokens, logits, answer in zip(ids, metas.logits, found, strict=True):
        rows = logits[:-1].log_softmax(-1)
        expected = [
            0.0 if token == IMAGE_ID else float(row[token])
            for row, token in zip(rows, tokens[1:], strict=True)
        ]
        assert answer["logprobs"] == pytest.approx([0.0, *expected], abs=2e-4)


def test_greedy_answers_are_those_of_metas_model(metas, in_layout):
    """With several images, too: all tokens of the answer see the last ones."""
    prompts = in_layout._prompts
    options = call_options(in_layout, max_gen_len=5)
    found = in_layout.llm_engine.run(prompts.requests(prompts.texts(PROMPTS), options))
    assert [output.outputs[0].token_ids for output in found] == metas.greedy


def test_pages_of_images_are_stored_in_eight_bits(metas):
    """A cache in int8 is read with its scales, as that of text is."""
    given = PROMPTS[:4]
    with build(metas.folder, kv_cache_dtype="int8") as built:
        found = built.text_completion(given, 0.0, max_gen_len=0, logprobs=True, echo=True)
    for logits, answer, parts in zip(metas.logits, found, given, strict=False):
        ids = ids_of(built, parts)
        rows = logits[:-1].log_softmax(-1)
        for token, row, logprob in zip(ids[1:], rows, answer["logprobs"][1:], strict=True):
            assert token == IMAGE_ID or logprob == pytest.approx(float(row[token]), abs=0.2)


def call_options(llama: Llama, **more: Any) -> Any:
    from llama.requests.prompts import CallOptions

    return CallOptions(sampling={"temperature": 0.0}, **more)


def png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def test_a_dialog_has_metas_tokens_and_pixels(metas, llama):
    """Meta's messages give Meta's ids; OpenAI's parts and those of Python the same answers."""
    data = png(picture(56, 40))
    url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    theirs = [
        RawMessage(role="system", content="Be brief."),
        RawMessage(role="user", content=[RawMediaItem(data=io.BytesIO(data)),
                                         RawTextItem(text=" What is this?")]),
    ]  # fmt: skip
    tokenizer = MetasTokenizer(metas.folder / "tokenizer.model")
    expected = MetasChatFormat(tokenizer).encode_dialog_prompt(theirs)
    prompt: Any = next(llama._prompts.dialogs([theirs], chat_options()))
    assert prompt.ids == [IMAGE_ID if token == 128256 else token for token in expected.tokens]
    text = {"type": "text", "text": " What is this?"}
    dialogs = [theirs] + [
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [part, text]}]
        for part in (
            {"type": "image_url", "image_url": {"url": url}},
            {"type": "image", "image": data},
            {"type": "image", "image": picture(56, 40)},
        )
    ]
    first, *others = llama.chat_completion(dialogs, temperature=0.0, max_gen_len=4, logprobs=True)
    assert others == [first] * 3


def chat_options() -> Any:
    from llama.prompts.chat import ChatOptions

    return ChatOptions()


@pytest.fixture(scope="module")
def native(metas) -> Iterator[Llama]:
    """The model in bf16, with the CPU's kernels where they run."""
    with build(metas.folder, "bf16") as built:
        yield built


def with_engine(llama: Llama, **options: Any) -> Llama:
    """Return the same model with another engine."""
    return Llama(llama.model, llama.tokenizer, options=EngineOptions(**options))


@pytest.mark.skipif(not KERNELS_RUN, reason="bits are promised with the CPU's kernels")
def test_an_answer_does_not_depend_on_the_batch(native, monkeypatch):
    """Bits: alone, alongside others, with the image found, in chunks, after a preemption."""
    prompts = PROMPTS[:6]
    together = answers(native, prompts)
    assert answers(native, prompts) == together
    assert native.engine.scheduler.pool.num_free == native.engine.scheduler.pool.num_pages
    for parts, answer in zip(prompts, together, strict=True):
        assert answers(with_engine(native, num_pages=24), [parts]) == [answer]
    in_chunks = with_engine(native, num_pages=96, token_budget=7)
    assert answers(in_chunks, prompts) == together
    few_pages = with_engine(native, num_pages=6)
    crowded = few_pages.engine.scheduler
    preempted: list[SequenceState] = []
    preempt = crowded._preempt

    def noted(seq: SequenceState) -> None:
        preempted.append(seq)
        preempt(seq)

    monkeypatch.setattr(crowded, "_preempt", noted)
    calls, hook = encoder_calls(few_pages)
    assert answers(few_pages, prompts, 40) == answers(native, prompts, 40)
    assert any(seq.spec.images for seq in preempted)
    calls.clear()
    others: list[Parts] = [["Look: ", picture(56, 56, 30 + i), " What is it?"] for i in range(6)]
    assert answers(few_pages, others, 40) == answers(native, others, 40)
    assert len(calls) > len(others), "some were encoded again, as their pages were taken"
    hook.remove()
    crowded.check()


@pytest.mark.skipif(not KERNELS_RUN, reason="bits are promised with the CPU's kernels")
def test_text_has_the_bits_of_the_text_model(metas, native):
    text: list[Parts] = [["no image"], ["another text"]]
    with build(metas.folder, "bf16", images=False) as alone:
        expected = answers(alone, text)
    assert answers(native, [*text, *one_of_each_grid()])[:2] == expected


def encoder_calls(llama: Llama) -> tuple[list[int], Any]:
    """Return a list that gets an element for each image that is encoded, and the hook."""
    parts: Any = llama.model.image_parts
    calls: list[int] = []
    return calls, parts.vision_model.register_forward_hook(lambda *_: calls.append(1))


def prompt_of(llama: Llama, parts: Parts) -> Any:
    (prompt,) = llama._prompts.texts([parts])
    return prompt


def test_an_image_is_encoded_once(llama):
    """It is found by its pixels, whatever text is before it and alongside others of one step."""
    engine = with_engine(llama, num_pages=64)
    calls, hook = encoder_calls(engine)
    image = picture(50, 50, seed=9)
    answers(engine, [["a ", image, " b"], ["c ", image, " d"], [image, image]], 2)
    assert len(calls) == 3  # the two that touch are a stream of their own
    answers(engine, [["e ", image, " f"]], 2)
    assert len(calls) == 3
    engine.engine.scheduler.check()
    hook.remove()


class Steps(StepHook):
    """Notes how many images each step encodes, and all drafts."""

    def __init__(self, llama: Llama) -> None:
        self.counts: list[int] = []
        self.drafts: list[int] = []
        llama.engine.runner.hooks.append(self)

    def pack(self, step: Step, batch: Batch) -> Batch:
        self.counts.append(0 if batch.cross is None else len(batch.cross.new))
        self.drafts += [draft for item in step.items for draft in item.drafts]
        return batch


def test_images_are_encoded_within_the_budget_of_a_step(llama):
    """A step encodes several where there is room, and one where that alone is over its budget."""
    prompts: list[Parts] = [[picture(56, 56, seed=i), " text"] for i in range(3)]
    expected = answers(llama, prompts, 3)
    for budget, most in ((2048, 3), (12, 1)):
        engine = with_engine(llama, num_pages=64, token_budget=budget)
        steps = Steps(engine)
        found = answers(engine, prompts, 3)
        assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
        assert max(steps.counts) == most and sum(steps.counts) == 3


def test_images_of_two_tenants_are_apart(llama):
    """Pages are found by hashes that begin with the root of the tenant."""
    engine = with_engine(llama, num_pages=64)
    calls, hook = encoder_calls(engine)
    prompt = prompt_of(engine, [picture(20, 20), " text"])
    params = call_options(engine, max_gen_len=1).params(engine.dialog_format)
    for tenant in (b"one", b"two", b"one"):
        engine.run_prompts(
            [engine.llm_engine.prepare("", prompt.ids, params, tenant=tenant,
                                       pictures=prompt.pictures)]
        )  # fmt: skip
    assert len(calls) == 2
    hook.remove()


def test_penalties_speculation_and_samples_work_with_images(llama, monkeypatch):
    """The id of an image is no row of the logits."""
    prompt = prompt_of(llama, ["ab ", picture(20, 20), " ab ab"])
    params = call_options(llama, max_gen_len=6).params(llama.dialog_format)
    from dataclasses import replace

    wide = replace(params, repetition_penalty=1.3, presence_penalty=0.5, prompt_logprobs=2, n=2,
                   temperature=0.7, seed=3)  # fmt: skip
    (output,) = llama.run_prompts(
        [llama.llm_engine.prepare("", prompt.ids, wide, pictures=prompt.pictures)]
    )
    position = prompt.ids.index(IMAGE_ID)
    assert [i for i, x in enumerate(output.prompt_logprobs) if x is None] == [0, position]
    monkeypatch.setattr(Speculator, "choose", lambda _, rates, __: [len(x) for x in rates])
    drafting = with_engine(llama, speculate="lookup")
    steps = Steps(drafting)
    prompt = prompt_of(drafting, ["ab", picture(20, 20)])
    forced = replace(params, logit_bias={ord("b"): 100.0})  # what the image has followed
    (output,) = drafting.run_prompts(
        [drafting.llm_engine.prepare("", prompt.ids, forced, pictures=prompt.pictures)]
    )
    assert output.outputs[0].text == "b" * 6
    assert steps.drafts and IMAGE_ID not in steps.drafts


def test_a_draft_model_guesses_without_images(metas):
    """Here the draft is the model's own text, and answers are Meta's."""
    with build(metas.folder, speculate=str(metas.folder)) as drafting:
        found = drafting.llm_engine.run(
            drafting._prompts.requests(
                drafting._prompts.texts(PROMPTS), call_options(drafting, max_gen_len=5)
            )
        )
        assert [output.outputs[0].token_ids for output in found] == metas.greedy
        assert drafting.engine.stats.draft_tokens > 0


@pytest.mark.parametrize("ahead", [False, True])
def test_steps_with_images_are_no_graphs(llama, ahead, monkeypatch):
    """Graphs have the operators of text alone, which steps of text alone replay next to images."""
    prompts = PROMPTS[:5]
    expected = answers(llama, prompts, 6)
    monkeypatch.setattr("llama.generation.recorder_for", TapeRecorder.of_model)
    engine = with_engine(llama, async_scheduling=ahead)
    graphs = engine.engine.runner.replayer
    assert graphs is not None
    replayed = []
    run = graphs.run

    def counted(step: Any, **options: Any) -> Any:
        replayed.append(step)
        return run(step, **options)

    monkeypatch.setattr(graphs, "run", counted)
    found = answers(engine, prompts[1:], 6)
    assert not replayed
    found = answers(engine, prompts[:1], 6) + found
    assert replayed
    for (tokens, logprobs), (wanted, scores) in zip(found, expected, strict=True):
        assert tokens == wanted and logprobs == pytest.approx(scores, abs=1e-4)


def test_beams_see_the_images_of_their_prompt(llama):
    """The one beam of a width of 1 is the greedy answer; of several, the best is no worse."""
    prompts: Any = PROMPTS[:4]
    greedy = answers(llama, prompts, 4)
    narrow = llama.beam_search(prompts, 1, 4)
    wide = llama.beam_search(prompts, 3, 4)
    for (tokens, logprobs), (only,), beams in zip(greedy, narrow, wide, strict=True):
        assert only["generation"] == "".join(tokens)
        assert only["score"] == pytest.approx(sum(logprobs) / 4, abs=1e-4)
        assert len(beams) == 3 and beams[0]["score"] >= only["score"] - 1e-6


@pytest.mark.skipif(not KERNELS_RUN, reason="bits are promised with the CPU's kernels")
def test_pages_on_disk_have_the_digests_of_their_images(metas, tmp_path, monkeypatch):
    """After a restart the pages of text are loaded, and images are encoded again for what follows.

    Equal tokens with another image find nothing after it. Pages of images are not written.
    """
    for name in ("min_seconds", "min_gain"):
        monkeypatch.setattr(page_store.POLICY, name, 0.0)
    for name in ("_MIN_FREE", "_MIN_FREE_PART"):
        monkeypatch.setattr(kv_disk, name, 0)
    monkeypatch.setattr(kv_folder, "_REFRESH_S", 0.0)
    prompts: list[Parts] = [
        ["x" * 20, picture(30, 30, seed), "y" * 30, picture(56, 56, 7), "z" * 20] for seed in (1, 2)
    ]
    kept: list[Any] = []
    for number in range(3):
        with build(metas.folder, "bf16", kv_cache_dir=str(tmp_path)) as on_disk:
            calls, hook = encoder_calls(on_disk)
            kept.append(answers(on_disk, prompts[1:] if number == 1 else prompts[:1], 8))
            assert on_disk.pages_on_disk is not None
            wait_until_written(on_disk)
            hits = on_disk.pages_on_disk.stats.hit_tokens
            # Before the first image; then up to the last token but those of its page.
            assert hits == (0, 16, 64)[number] and len(calls) == 2
            hook.remove()
    assert kept[0] == kept[2] != kept[1]
    with build(metas.folder, "bf16") as alone:
        assert [answers(alone, [parts], 8) for parts in prompts] == kept[:2]


@pytest.mark.parametrize(
    ("parts", "named"),
    [
        ([b"no image"], r"prompts\[0\]\[0\].*no image in PNG, JPEG, WebP or GIF"),
        ([3], r"3 is no image"),
        ([picture(4, 4)] * 17, "more than 16 images"),
        (["x" * 90, *[picture(56, 56, i) for i in range(16)]], "take as much of the KV cache as"),
    ],
)
def test_what_cannot_be_read_is_named(llama, parts, named):
    engine = with_engine(llama, num_pages=16)
    with pytest.raises((TypeError, ValueError), match=named):
        engine.text_completion([parts])


def test_ids_without_an_image_are_refused(llama):
    with pytest.raises(ValueError, match="token ids are 0 to 511"):
        llama.generate([[256, IMAGE_ID]])
    with pytest.raises(ValueError, match="has 1 images, and 0 tokens that stand for one"):
        params = call_options(llama, max_gen_len=1).params(llama.dialog_format)
        prompt = prompt_of(llama, [picture(20, 20)])
        llama.llm_engine.prepare("", prompt.ids[:1], params, pictures=prompt.pictures)


def test_ranks_that_call_with_other_images_are_noticed(llama):
    params = call_options(llama, max_gen_len=1).params(llama.dialog_format)
    prints = []
    for seed in (0, 0, 1):
        prompt = prompt_of(llama, [picture(20, 20, seed), " text"])
        request = llama.llm_engine.prepare("", prompt.ids, params, pictures=prompt.pictures)
        prints.append(request.fingerprint()[1:])  # the first is a new id
    assert prints[0] == prints[1] != prints[2]


@pytest.mark.dist
@pytest.mark.parametrize("layout", ["2", "3", "1x2"])
def test_ranks_and_stages_give_the_answers_of_one_process(metas, layout, tmp_path):
    """All ranks call; then rank 0 leads, and sends pixels to the others."""
    size, _, stages = layout.partition("x")
    count = int(size) * int(stages or 1)
    out = tmp_path / "answers.json"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    program = [str(PROGRAMS / "images.py"), str(metas.folder), size, stages or "1", str(out)]
    done = run_program([*launcher, "--nproc-per-node", str(count), *program], timeout=240)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(out.read_text())
    with build(metas.folder) as one:
        expected = [tokens for tokens, _ in answers(one, PROMPTS)]
    assert found == [expected, expected]
