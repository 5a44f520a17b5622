"""Whether the engine gives the answers of the reference: `llama verify DIR --answers`.

In: a checkpoint of any layout, on every rank of a job. Out: a `Comparison` of greedy ids and
log-probabilities, the same on every rank. The reference runs first and is dropped, then the engine
is built, so that one copy of the weights is in memory at a time. Nothing here reads flags.
"""

import gc
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor

from llama.checkpoint.find import Checkpoint, find
from llama.checkpoint.reader import CheckpointReader
from llama.checkpoint.table import shard_shapes
from llama.checkpoint.tokenizer_files import load_tokenizer
from llama.common.device import dtype_name, free_unused, pick_device, pick_dtype
from llama.generation import Llama
from llama.ranks.groups import connect
from llama.ranks.parallel import Parallel
from llama.ranks.placement import Placement
from llama.reference.generation import Llama as Reference
from llama.reference.generation import read_checkpoint
from llama.reference.model import ModelArgs, Transformer
from llama.tokenizer import ChatFormat, Message, Tokenizer

TEXTS = (
    "",
    "The capital of France is",
    "Once upon a time, there was a small fox who lived at the edge of a forest.",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "Wer früh aufsteht, hat mehr vom Tag. 早起きは三文の徳。",
    "The quick brown fox jumps over the lazy dog. " * 6,
)
DIALOG: list[Message] = [
    {"role": "system", "content": "Answer briefly."},
    {"role": "user", "content": "What is the capital of France?"},
    {"role": "assistant", "content": "Paris."},
    {"role": "user", "content": "And of Japan?"},
]
ANSWER_TOKENS = 32
_MAX_SEQ_LEN = 512
# Parameters that the reference has no field for: these make the same model without one.
_READ_HERE = {"context_length", "tied_output", "is_causal"}
_TIMEOUT_S = 600.0
# Largest difference of a log-probability that rounding explains. The logits of a model in bf16 or
# fp16 are rounded to these types, too.
BOUNDS = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.3}


class Answers(NamedTuple):
    """The prompts with their answers by a model, a list for each prompt.

    Attributes:
        tokens: The ids of prompt and answer.
        scores: Their log-probabilities.
    """

    tokens: list[list[int]]
    scores: list[list[float]]


@dataclass
class Comparison:
    """How far the engine's answers are from the reference's.

    Attributes:
        bound: The largest difference that rounding explains.
        num_ids: The number of greedy ids that were compared.
        num_wrong: Those that differ although the engine holds one for clearly more probable.
        num_scores: The number of log-probabilities that were compared.
        largest: Their largest difference; NaN if one is not a number.
    """

    bound: float
    num_ids: int = 0
    num_wrong: int = 0
    num_scores: int = 0
    largest: float = 0.0

    @property
    def agrees(self) -> bool:
        """Whether rounding explains all differences."""
        return self.num_wrong == 0 and self.largest <= self.bound

    def describe(self) -> str:
        """Return the result as one sentence."""
        verdict = "agree" if self.agrees else "DISAGREE"
        return (
            f"the engine and the reference {verdict}: {self.num_wrong} of {self.num_ids} greedy "
            f"ids differ, and {self.num_scores} log-probabilities by at most {self.largest:.2g} "
            f"(bound {self.bound:g})"
        )


def verify_answers(
    ckpt_dir: str | os.PathLike[str],
    original: str | os.PathLike[str] | None = None,
    *,
    device: str | None = None,
    dtype: str | None = None,
) -> tuple[bool, str]:
    """Run fixed prompts through the reference and then through the engine, and compare.

    Args:
        ckpt_dir: The checkpoint that the engine loads.
        original: The checkpoint that the reference loads; None for the same.
        device: As for `Llama.build`.
        dtype: As for `Llama.build`, but float32 on a CPU by default.

    Returns:
        Whether they agree, and a line that says so.

    Raises:
        OSError: A file is missing.
        ValueError: A checkpoint cannot be loaded, or generates nothing.
    """
    chosen_device = pick_device(device)
    if dtype is None and chosen_device.type != "cuda":
        dtype = "fp32"
    chosen_dtype = pick_dtype(dtype, chosen_device)
    parallel = connect(None, chosen_device, _TIMEOUT_S)
    with parallel.agree("the weights of the reference", world=True):
        checkpoint = _find(original or ckpt_dir)
        reference = load_reference(checkpoint, parallel, chosen_dtype, chosen_device)
    max_seq_len = reference.model.params.max_seq_len
    prompts = make_prompts(reference.tokenizer, max_seq_len - ANSWER_TOKENS)
    wanted = _answers(reference, prompts)
    stop_ids = reference.tokenizer.stop_tokens
    del reference
    gc.collect()
    free_unused(chosen_device)
    with Llama.build(
        os.fspath(ckpt_dir),
        max_seq_len=max_seq_len,
        max_batch_size=len(prompts),
        device=chosen_device,
        dtype=chosen_dtype,
        verbose=False,
    ) as llama:
        found = _answers(llama, prompts)

        def score(prefix: list[int], token: int) -> float:
            """Return the engine's log-probability of a token after others."""
            _, scores = llama.generate([[*prefix, token]], 0, 0.0, logprobs=True, echo=True)
            assert scores is not None
            return scores[0][-1]

        comparison = compare(prompts, wanted, found, stop_ids, score, BOUNDS[chosen_dtype])
    run = f"{dtype_name(chosen_dtype)}, {chosen_device.type}, {parallel.size} rank(s)"
    source = f" of {checkpoint.weights_path}" if original else ""
    line = f"{os.fspath(ckpt_dir)}: {comparison.describe()}{source}; {run}"
    return comparison.agrees, line


def _find(path: str | os.PathLike[str]) -> Checkpoint:
    """Find the checkpoint that the reference runs."""
    checkpoint = find(path)
    if checkpoint.why_silent:
        raise ValueError(f"{path} has no answers to compare: {checkpoint.why_silent}")
    if checkpoint.packed is not None:
        raise ValueError(
            f"{path} holds packed weights, which the reference cannot read: give the folder that "
            "they were made from, as --original DIR"
        )
    return checkpoint


def load_reference(
    checkpoint: Checkpoint, parallel: Parallel, dtype: torch.dtype, device: torch.device
) -> Reference:
    """Make the reference with this rank's part of a checkpoint, in groups that exist.

    Where the files are Meta's shards for these ranks, the reference reads them itself.

    Raises:
        ValueError: The model has a parameter that the reference does not know.
    """
    names = {field.name for field in fields(ModelArgs)}
    for field in fields(checkpoint.params):
        value = getattr(checkpoint.params, field.name)
        if field.name not in names | _READ_HERE and value != field.default:
            raise ValueError(
                f"{checkpoint.folder}: {field.name}={value} is not in Meta's model, which the "
                "reference is: its answers cannot be compared"
            )
    params = {name: x for name, x in vars(checkpoint.params).items() if name in names}
    is_own = checkpoint.layout == "meta" and len(checkpoint.shards) == parallel.size
    if is_own and not checkpoint.is_quantized and checkpoint.vision is None:
        params, state = read_checkpoint(checkpoint.folder)
    else:
        state = _read_state(checkpoint, parallel, dtype, device)
    params["max_seq_len"] = min(_MAX_SEQ_LEN, checkpoint.params.longest_context)
    params["max_batch_size"] = len(TEXTS) + 1
    model = Transformer(ModelArgs(**params), state, dtype, device)
    return Reference(model, load_tokenizer(checkpoint))


def _read_state(
    checkpoint: Checkpoint, parallel: Parallel, dtype: torch.dtype, device: torch.device
) -> dict[str, Tensor]:
    """Return what a rank holds of each tensor, by Meta's names; quantized ones are plain."""
    reader = CheckpointReader(checkpoint, device)
    placement = Placement(rank=parallel.rank, size=parallel.size)
    state = {}
    for name, shape in shard_shapes(checkpoint.params, parallel.size).items():
        state[name] = torch.empty(shape, dtype=dtype, device=device)
        reader.copy(name, state[name], placement)
    state.setdefault("output.weight", state["tok_embeddings.weight"])  # They are one if tied.
    return state


def make_prompts(tokenizer: Tokenizer, max_tokens: int) -> list[list[int]]:
    """Return the token ids of the texts, and of the dialog where the model has Meta's format."""
    prompts = [tokenizer.encode(text, bos=True, eos=False) for text in TEXTS]
    if tokenizer.eot_id is not None:
        prompts.append(ChatFormat(tokenizer).encode_dialog_prompt(DIALOG))
    return [prompt[:max_tokens] for prompt in prompts]


def _answers(model: Reference | Llama, prompts: list[list[int]]) -> Answers:
    tokens, scores = model.generate(prompts, ANSWER_TOKENS, 0.0, logprobs=True, echo=True)
    assert scores is not None
    return Answers(tokens, scores)


def compare(
    prompts: Sequence[list[int]],
    wanted: Answers,
    found: Answers,
    stop_ids: set[int],
    score: Callable[[list[int], int], float],
    bound: float,
) -> Comparison:
    """Compare the answers of two models to the same prompts.

    The ids of an answer are compared up to the first that differs, since the texts are not the same
    after it. It is wrong unless the two ids are about as probable, so that rounding chooses.

    Args:
        prompts: The token ids of the prompts.
        wanted: The answers of the reference.
        found: The answers of the engine.
        stop_ids: The tokens that end an answer, and are not in it.
        score: Returns the engine's log-probability of a token after others.
        bound: The largest difference that rounding explains.
    """
    result = Comparison(bound)
    differences = [0.0]
    for prompt, tokens, scores, own_tokens, own_scores in zip(
        prompts, *wanted, *found, strict=True
    ):
        pairs = zip(tokens, own_tokens, strict=False)
        lengths = len(tokens), len(own_tokens)
        same = next((i for i, (one, other) in enumerate(pairs) if one != other), min(lengths))
        result.num_ids += same - len(prompt)
        # The first token of a prompt has no score.
        pairs_of_scores = zip(scores[1:same], own_scores[1:same], strict=True)
        differences += [abs(one - other) for one, other in pairs_of_scores]
        if tokens == own_tokens:
            continue
        prefix = tokens[:same]
        best, own_best = (
            max(score(prefix, token) for token in each[same : same + 1] or stop_ids)
            for each in (tokens, own_tokens)
        )
        result.num_ids += 1
        result.num_wrong += not abs(own_best - best) <= bound
    result.num_scores = len(differences) - 1
    result.largest = math.nan if any(map(math.isnan, differences)) else max(differences)
    return result
