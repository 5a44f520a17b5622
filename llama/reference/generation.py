"""Meta's API around the Transformer: `build`, `generate`, `text_completion`, `chat_completion`.

In: a folder with one `consolidated.NN.pth` for each model-parallel rank, and prompts. Out: tokens,
texts and log-probabilities, the same on every rank. It runs under torchrun, over nccl on GPUs and
gloo on CPUs, and without torchrun as one process. Of torch's global state it changes the process
groups alone. Shapes: B sequences, S tokens of a call of the model, T of a row, V vocabulary.
"""

import atexit
import json
import os
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fairscale.nn.model_parallel import initialize as fs_init
from torch import Tensor

from llama.reference.model import ModelArgs, Transformer
from llama.tokenizer import ChatFormat, Dialog, Tokenizer

# Keys of params.json that change nothing here:
_UNUSED = {"context_length", "max_batch_size", "max_seq_len", "model_parallel_size"}


class Llama:
    """This rank's part of a model with its tokenizer; make one with `Llama.build`."""

    def __init__(self, model: Transformer, tokenizer: Tokenizer, seed: int = 1) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.formatter = ChatFormat(tokenizer)
        self.generator = torch.Generator(model.device).manual_seed(seed)  # the same on each rank

    @staticmethod
    def build(
        ckpt_dir: str | os.PathLike[str],
        tokenizer_path: str | os.PathLike[str],
        max_seq_len: int,
        max_batch_size: int,
        model_parallel_size: int | None = None,
        seed: int = 1,
        dtype: torch.dtype | None = None,
    ) -> "Llama":
        """Join the process groups, and load this rank's shard of a checkpoint.

        Args:
            ckpt_dir: The folder with params.json and a shard for each rank of a group.
            tokenizer_path: The tokenizer.model.
            max_seq_len: The most tokens of a prompt with its answer.
            max_batch_size: The most prompts of a call.
            model_parallel_size: The ranks of a group, which share a copy; None for all ranks.
            seed: The seed of all draws.
            dtype: None for bfloat16 on a GPU that has it, else float16, and float32 on a CPU.

        Raises:
            OSError, ValueError: A file is missing or wrong, or other ranks are needed.
        """
        device, default_dtype = torch.device("cpu"), torch.float32
        if torch.cuda.is_available():
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
            has_bf16 = torch.cuda.get_device_capability(device) >= (8, 0)
            default_dtype = torch.bfloat16 if has_bf16 else torch.float16
        join_groups(device, model_parallel_size)
        params, shard = read_checkpoint(Path(ckpt_dir))
        args = ModelArgs(**params, max_seq_len=max_seq_len, max_batch_size=max_batch_size)
        model = Transformer(args, shard, dtype or default_dtype, device)
        is_3_0 = not args.use_scaled_rope  # Its tokenizer.model has other special tokens.
        tokenizer = Tokenizer(tokenizer_path, llama_3_0=is_3_0, vocab_size=args.vocab_size)
        return Llama(model, tokenizer, seed)

    @torch.inference_mode()
    def generate(
        self,
        prompt_tokens: list[list[int]],
        max_gen_len: int | None = None,
        temperature: float = 0.6,
        top_p: float = 0.9,
        logprobs: bool = False,
        echo: bool = False,
    ) -> tuple[list[list[int]], list[list[float]] | None]:
        """Continue each prompt until a stop token, max_gen_len tokens or max_seq_len tokens.

        Args:
            prompt_tokens: The token ids of B prompts, of any lengths.
            max_gen_len: The most tokens of an answer; None for what fits.
            temperature: The divisor of the logits; 0 takes the top token.
            top_p: The probability mass that is sampled from.
            logprobs: Whether log-probabilities, before temperature and top_p, are returned.
            echo: Whether each prompt is put before its answer. Its first token scores 0.0.

        Returns:
            A list of tokens, without the stop token, for each prompt; log-probabilities or None.
        """
        # 1. Put the prompts into one matrix, a row for each, padded at the end.
        params, device, pad = self.model.params, self.model.device, self.tokenizer.pad_id
        check_prompts(prompt_tokens, params)
        limit = params.max_seq_len if max_gen_len is None else max_gen_len
        lengths = [len(prompt) for prompt in prompt_tokens]
        shortest, total = min(lengths), min(params.max_seq_len, max(lengths) + limit)
        tokens = torch.full((len(lengths), total), pad, device=device)  # (B, T)
        for row, prompt in zip(tokens, prompt_tokens, strict=True):
            row[: len(prompt)] = torch.tensor(prompt)
        is_prompt = tokens != pad
        scores = torch.zeros(tokens.shape, device=device)  # (B, T) log-probabilities
        stop_ids = torch.tensor(sorted(self.tokenizer.stop_tokens), device=device)
        is_finished = torch.zeros(len(lengths), dtype=torch.bool, device=device)

        # 2. Where no prompt leaves room for an answer, score the prompts alone.
        if shortest == total and logprobs:
            scores[:, 1:] = score(self.model(tokens, 0)[:, :-1], tokens[:, 1:])

        # 3. Run the positions that all prompts have at once, then one position at a time.
        computed = 0
        for position in range(shortest, total):
            logits = self.model(tokens[:, computed:position], computed)  # (B, S, V)
            # 4. Choose the next token of each row, unless its prompt goes on.
            chosen = self._choose(logits[:, -1], temperature, top_p)  # (B)
            goes_on = is_prompt[:, position]
            tokens[:, position] = torch.where(goes_on, tokens[:, position], chosen)
            # 5. The logits of each position score the token after it.
            if logprobs:
                after = slice(computed + 1, position + 1)
                scores[:, after] = score(logits, tokens[:, after])
            # 6. End once every row has generated a stop token.
            is_finished |= ~goes_on & torch.isin(chosen, stop_ids)
            computed = position
            if is_finished.all():
                break

        # 7. Cut each row at its limit, and before the first stop token of its answer.
        out_tokens, out_scores = [], []
        for row, length in enumerate(lengths):
            answer = tokens[row, length : length + limit].tolist()
            stops = (i for i, token in enumerate(answer) if token in self.tokenizer.stop_tokens)
            start = 0 if echo else length
            end = length + next(stops, len(answer))
            out_tokens.append(tokens[row, start:end].tolist())
            out_scores.append(scores[row, start:end].tolist())
        return out_tokens, out_scores if logprobs else None

    def _choose(self, logits: Tensor, temperature: float, top_p: float) -> Tensor:
        """Return the next token of each row, (B), from logits (B, V): rank 0's, on every rank."""
        if temperature > 0:
            probs = torch.softmax(logits / temperature, dim=-1)
            chosen = sample_top_p(probs, top_p, self.generator)[:, 0]
        else:
            chosen = logits.argmax(dim=-1)
        group = fs_init.get_model_parallel_group()
        dist.broadcast(chosen, fs_init.get_model_parallel_src_rank(), group)
        return chosen

    def text_completion(
        self,
        prompts: list[str],
        temperature: float = 0.6,
        top_p: float = 0.9,
        max_gen_len: int | None = None,
        logprobs: bool = False,
        echo: bool = False,
    ) -> list[dict[str, Any]]:
        """Return [{"generation": text}, ...]; with logprobs, "tokens" as texts and "logprobs"."""
        ids = [self.tokenizer.encode(prompt, bos=True, eos=False) for prompt in prompts]
        return self._complete(ids, max_gen_len, temperature, top_p, logprobs, echo)

    def chat_completion(
        self,
        dialogs: list[Dialog],
        temperature: float = 0.6,
        top_p: float = 0.9,
        max_gen_len: int | None = None,
        logprobs: bool = False,
    ) -> list[dict[str, Any]]:
        """Return the same as `text_completion`, with messages of the assistant as "generation"."""
        ids = [self.formatter.encode_dialog_prompt(dialog) for dialog in dialogs]
        predictions = self._complete(ids, max_gen_len, temperature, top_p, logprobs)
        for each in predictions:
            each["generation"] = {"role": "assistant", "content": each["generation"]}
        return predictions

    def _complete(self, ids: list[list[int]], *options: Any) -> list[dict[str, Any]]:
        tokens, scores = self.generate(ids, *options)
        decode = self.tokenizer.decode
        predictions: list[dict[str, Any]] = [{"generation": decode(answer)} for answer in tokens]
        for prediction, answer, row in zip(predictions, tokens, scores or [], strict=False):
            prediction |= {"tokens": [decode(token) for token in answer], "logprobs": row}
        return predictions


def sample_top_p(probs: Tensor, p: float, generator: torch.Generator | None = None) -> Tensor:
    """Draw an id (B, 1) by probs (B, V), among tokens with at most the mass p before them."""
    ordered, ids = probs.sort(dim=-1, descending=True)
    mass_before = ordered.cumsum(dim=-1) - ordered
    kept = ordered.masked_fill(mass_before > p, 0.0)  # multinomial normalizes the sum
    return ids.gather(-1, torch.multinomial(kept, 1, generator=generator))


def score(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the log-probability of each token (B, S) by the logits (B, S, V) before it: (B, S)."""
    return logits.log_softmax(dim=-1).gather(-1, tokens[..., None])[..., 0]


def check_prompts(prompt_tokens: list[list[int]], params: ModelArgs) -> None:
    """Raise a ValueError that names the first prompt that cannot be run."""
    size, limit = params.max_batch_size, params.max_seq_len
    if not 0 < len(prompt_tokens) <= size:
        raise ValueError(f"{len(prompt_tokens)} prompts: give 1 to max_batch_size={size} of them")
    for i, prompt in enumerate(prompt_tokens):
        if not 0 < len(prompt) <= limit:
            raise ValueError(f"prompt {i} has {len(prompt)} tokens: give 1 to max_seq_len={limit}")


def join_groups(device: torch.device, model_parallel_size: int | None) -> None:
    """Make the process groups of torch and fairscale, or use those that this process is in."""
    if not dist.is_initialized():
        backend, gpu = ("nccl", device) if device.type == "cuda" else ("gloo", None)
        alone: dict[str, Any] = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
        options = {} if "RANK" in os.environ else alone  # torchrun sets RANK
        dist.init_process_group(backend, device_id=gpu, **options)
        atexit.register(leave_groups)
    size = model_parallel_size or dist.get_world_size()
    if dist.get_world_size() % size:
        raise ValueError(f"model_parallel_size={size} does not divide the number of ranks")
    if not fs_init.model_parallel_is_initialized():
        fs_init.initialize_model_parallel(size)
    if fs_init.get_model_parallel_world_size() != size:
        raise ValueError(f"model_parallel_size={size}: this process is in groups of another size")


def leave_groups() -> None:
    """Leave the groups, without which a process may end with an error."""
    if dist.is_initialized():
        fs_init.destroy_model_parallel()
        dist.destroy_process_group()


def read_checkpoint(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the contents of params.json, and this rank's shard: tensors by Meta's names."""
    params = json.loads((folder / "params.json").read_text())
    params = {key: value for key, value in params.items() if key not in _UNUSED}
    if unknown := params.keys() - {field.name for field in fields(ModelArgs)}:
        raise ValueError(f"{folder}/params.json has keys that may change answers: {unknown}")
    rank, size = fs_init.get_model_parallel_rank(), fs_init.get_model_parallel_world_size()
    shards = len(list(folder.glob("consolidated.*.pth")))
    if shards != size:
        raise ValueError(
            f"{folder} has {shards} files consolidated.NN.pth, and {size} ranks share the model: "
            f"start {shards} ranks, or write {size} shards with `llama reshard`"
        )
    path = folder / f"consolidated.{rank:02d}.pth"
    shard: dict[str, Tensor] = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    shard.pop("rope.freqs", None)  # in some of Meta's files, and computed here
    return params, shard
