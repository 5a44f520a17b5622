"""From the arguments of `Llama.build` to a loaded model: device, ranks, threads, memory, weights.

In: what the user asked for. Out: one rank's Transformer, the Tokenizer and the size of the KV
cache, or one clear error on every rank before any weight is read. Nothing here runs the model.
"""

import functools
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from llama import weights
from llama.build_args import BuildArgs
from llama.checkpoint import memory, packed, reader
from llama.checkpoint.find import Checkpoint, find
from llama.checkpoint.tokenizer_files import load_tokenizer
from llama.checkpoint.verify import LoadCheck
from llama.checks import brief, number, path_like
from llama.device import dtype_name, free_bytes, pick_device, pick_dtype, set_num_threads
from llama.engine.core import PAGE_SIZE, TOKEN_BUDGET
from llama.engine.runner import ModelRunner
from llama.gpu import selection, selfcheck_cache
from llama.model.args import ModelArgs
from llama.model.layers import Matrix
from llama.model.plan import LayerPlan
from llama.model.transformer import Transformer
from llama.ops.cpu import native
from llama.ops.kv_cache import AS_COMPUTED, KVFormat, pick_kv_format
from llama.ops.triton.kernels import TORCH_ONLY, KernelSet
from llama.ranks.collectives import ModelParallel
from llama.ranks.groups import connect
from llama.ranks.placement import Placement
from llama.tokenizer import Tokenizer

MEMORY_FRACTION = 0.9  # of what is free; the allocator's slack needs the rest
DEFAULT_SEQ_LEN = 8192  # aimed at where the user says nothing
_CUDA_RESERVE = 3 << 29  # bytes: modules of cuBLAS, buffers of nccl, graphs
_PROBES = (  # tokenizers that agree on these are taken to be the same
    "Hello, world!  The year 1984;\n\n\tdef f(x): return {x: 'é'}",
    "straße, naïve, 日本語, привет, عربى, 🎈 and antidisestablishmentarianism",
)
_LARGE = 1 << 28  # bytes of weights that take long to load
_SCORED_ROWS = 256  # rows of logits that a step holds at the least


@dataclass(frozen=True)
class Loaded:
    """One rank's model with its tokenizer, and how many pages its KV cache has."""

    model: Transformer
    tokenizer: Tokenizer
    num_pages: int
    files: "Files"
    draft_model: Transformer | None = None  # guesses for it

    def describe(self, runner: ModelRunner) -> str:
        """Device, type, ranks and sizes, as `Llama.build` prints them. runner: of the model; where
        it has graphs, there may be fewer pages."""
        params, device = self.model.params, self.model.norm.weight.device
        name = self.model.quantization or dtype_name(self.model.norm.weight.dtype)
        file_type = self.files.checkpoint.file_type
        if file_type not in (None, name):
            name += f" from {file_type}"
        kv_format = self.model.plan.kv_format.name
        tokens = f"{runner.num_pages * PAGE_SIZE:,} tokens" + f" in {kv_format}" * bool(kv_format)
        sequences = runner.num_pages // pages_for(params.max_seq_len)
        return (
            f"{device.type}, {name}, model_parallel_size={self.model.parallel.size}, "
            f"max_seq_len={params.max_seq_len}, max_batch_size={params.max_batch_size}, "
            f"KV cache {tokens}, {sequences} sequence{'s' * (sequences != 1)} of full "
            f"length at once{selection.describe(self.model)}" + ", CUDA graphs" * runner.has_graphs
        )


def load_model(args: BuildArgs) -> Loaded:
    """The sizes that are chosen are in the model's params."""
    device = pick_device(args.device)
    number("timeout_s", args.timeout_s, 0, 10**6, above=True)
    parallel = connect(args.model_parallel_size, device, args.timeout_s)
    with parallel.agree("the arguments of Llama.build", world=True) as must_match:
        args = args.checked()
        # Every rank estimates what the first one of its group needs, so that all choose the same.
        files = Files.of(args, replace(parallel.placement, rank=0), device)
        kv_format = pick_kv_format(args.kv_cache_dtype, device)
        tokenizer = files.tokenizer(args.tokenizer_path)
        models = [files, *_draft_files(args, files, tokenizer)]
        longest = min(x.checkpoint.params.longest_context for x in models)
        # A wrong name in a variable is an error before weights are read.
        allowed = selection.asked_for()
        native.allowed_instruction_sets()
        compared = {
            **args.shared(),
            "device": device.type,
            **{f"{name}{' (draft)' * i}": v for i, x in enumerate(models) for name, v in x.said()},
        }
        must_match += [f"{name}={value}" for name, value in compared.items()]
    with parallel.agree("the weights", world=True) as must_match:
        for each in models if parallel.world is not None else ():
            must_match += each.checkpoint.samples()
    models = [each.with_kernels(parallel, allowed, kv_format) for each in models]
    free = parallel.all_reduce_min(free_bytes(device))
    batch_size = args.max_batch_size or default_batch_size(device)
    with parallel.agree("the memory of the ranks", world=True):
        memory = Memory.of_all([x.memory(free, batch_size, kv_format) for x in models])
        seq_len, pages = choose_sizes(
            memory, args.max_seq_len, batch_size, args.kv_cache_memory_bytes, longest
        )
    with parallel.agree("the checkpoint", world=True):
        rest = kv_format, (seq_len, batch_size), args.verify
        model, *draft = [each.load(parallel, *rest) for each in models]
    return Loaded(model, tokenizer, pages, models[0], *draft)


@dataclass(frozen=True)
class Files:
    """The weights of a model as their files have them, the format in which they are held, and the
    placement and device of a rank that holds them."""

    checkpoint: Checkpoint
    dtype: torch.dtype
    quantize: str | None
    placement: Placement
    device: torch.device
    kernels: KernelSet = TORCH_ONLY

    @classmethod
    def of(cls, args: BuildArgs, placement: Placement, device: torch.device) -> "Files":
        """ValueError for what ranks with such a placement cannot load so; no weight is read."""
        dtype, quantize = args.dtype, args.quantize
        if quantize is None and isinstance(dtype, str) and dtype in weights.QUANTIZED:
            dtype, quantize = None, dtype  # as it was written before there was quantize=
        chosen_dtype = pick_dtype(dtype, device)
        weights.check_quantize(quantize, chosen_dtype, device)
        checkpoint = find(path_like("ckpt_dir", args.ckpt_dir))
        checkpoint.params.check_ranks(placement.size)
        longest = checkpoint.params.longest_context
        if args.max_seq_len is not None and args.max_seq_len > longest:
            raise ValueError(
                f"max_seq_len={args.max_seq_len} is beyond this model's limit of {longest} tokens: "
                "build with that or less"
            )
        if checkpoint.packed is not None:
            packed.check_use(checkpoint, device, chosen_dtype, quantize)
        is_default = dtype in (None, "auto") and quantize is None
        if is_default and stays_in_codes(checkpoint, device):
            checkpoint = replace(checkpoint, in_codes=True)
        return cls(checkpoint, chosen_dtype, quantize, placement, device)

    def said(self) -> list[tuple[str, object]]:
        """What must be the same on every rank, by name."""
        held = self.checkpoint.file_type if self.checkpoint.in_codes else self.quantize
        params = vars(self.checkpoint.params).items()
        named = [(f"{name} of the checkpoint", value) for name, value in params]
        return [("torch", torch.__version__), ("dtype", self.dtype), ("quantize", held), *named]

    def with_kernels(
        self, parallel: ModelParallel, allowed: frozenset[str], kv_format: KVFormat = AS_COMPUTED
    ) -> "Files":
        """Return these files with the kernels that the GPU may run, see `selection.kernels_for`.

        Weights become plain where there is no kernel for quantized ones, which each step would
        unpack.
        """
        params, place = self.checkpoint.params, (parallel, self.device, self.dtype)
        with parallel.agree("the weights' forms", world=True):  # one rank's file may be cut short
            formats = self.formats()
        kernels = selection.kernels_for(params, *place, allowed, formats, kv_format)
        files = replace(self, kernels=kernels)
        is_plain = self.quantize is None and not self.checkpoint.in_codes
        if self.device.type != "cuda" or is_plain or "linear" in kernels.names:
            return files
        if parallel.global_rank == 0:
            warnings.warn(
                f"the weights are held in {dtype_name(self.dtype)}: products of quantized ones "
                "need the GPU's kernel linear, which is not in use",
                stacklevel=3,
            )
        return replace(files, quantize=None, checkpoint=replace(self.checkpoint, in_codes=False))

    def formats(self) -> tuple[str | weights.Form | None, ...]:
        if self.device.type == "cuda" and self.checkpoint.in_codes:
            return None, *memory.gpu_formats(self.checkpoint, self.placement)
        return tuple(dict.fromkeys([self.quantize, weights.of_output(self.quantize)]))

    def tokenizer(self, path: str | None) -> Tokenizer:
        """That of a file, or the one beside the weights."""
        chosen = path or self.checkpoint.header or self.checkpoint.tokenizer_path()
        return load_tokenizer(path_like("tokenizer_path", chosen), self.checkpoint.params)

    def memory(self, free: int, batch_size: int, kv_format: KVFormat = AS_COMPUTED) -> "Memory":
        """What one of the ranks needs of `free` bytes; reads no file."""
        checkpoint = self.checkpoint
        plan = LayerPlan.of(checkpoint.params, self.placement, kv_format)
        if checkpoint.packed is not None:
            held = packed.bytes_of(checkpoint, self.placement)
        else:
            held = memory.bytes_of(
                checkpoint, self.placement, self.dtype, self.quantize, self.device
            )
        reserve = step_bytes(checkpoint.params, plan, self.dtype, batch_size)
        reserve += _CUDA_RESERVE if self.device.type == "cuda" else 0
        return Memory(free, held, reserve, plan.kv_bytes_per_token(self.dtype))

    def packed_by(self, model: Transformer) -> str | None:
        """The command that writes these weights packed; None where it would gain nothing."""
        is_ours = self.device.type == "cpu" and native.kernels() is not None
        large = sum(x.nbytes for x in model.parameters()) >= _LARGE
        if self.checkpoint.packed is not None or not (is_ours and large):
            return None
        return packed.command(str(self.checkpoint.weights_path), self.quantize)

    def load(
        self, parallel: ModelParallel, kv_format: KVFormat, shape: tuple[int, int], verify: bool
    ) -> Transformer:
        """Read this rank's weights, each checked if `verify`, and packed once it is whole. shape:
        max_seq_len and max_batch_size. A warning names those in which packing saw NaN, or zeros as
        a download leaves them that was cut."""
        if self.device.type == "cpu":
            set_num_threads()
        args = replace(self.checkpoint.params, max_seq_len=shape[0], max_batch_size=shape[1])
        model = Transformer(
            args, parallel=parallel, device=self.device, dtype=self.dtype, kv_format=kv_format,
            fills_late=self.device.type == "cuda",
        )  # fmt: skip
        model.use_kernels(self.kernels)
        is_first = parallel.global_rank == 0
        check = LoadCheck(self.checkpoint, warns=is_first).check if verify else None
        if self.checkpoint.packed is not None:
            packed.attach(self.checkpoint, model)
            return model
        reader.load(
            self.checkpoint,
            model,
            check=check,
            filled=functools.partial(model.pack, quantize=self.quantize),
            progress=is_first and sys.stderr.isatty(),
        )
        if self.checkpoint.in_codes:
            model.quantization = self.checkpoint.file_type
        held = [x for x in model.modules() if isinstance(x, Matrix)]
        in_layers = [x for x in held if x.names[0].startswith("layers.")]  # vocabularies are padded
        if self.checkpoint.in_codes and self.device.type == "cuda" and is_first:
            tell_of_plain(in_layers, str(self.checkpoint.file_type))
        faulty = {
            "NaN or infinity": ["/".join(x.names) for x in held if not x.weight.is_finite],
            "rows of zeros": ["/".join(x.names) for x in in_layers if x.weight.has_empty_row],
        }
        if told := [f"{what} in {brief(names)}" for what, names in faulty.items() if names]:
            words = f"{' and '.join(told)}: fetch or convert it again"
            warnings.warn(f"{self.checkpoint.weights_path} holds {words}", stacklevel=2)
        return model


def _draft_files(args: BuildArgs, model: Files, tokenizer: Tokenizer) -> list[Files]:
    """Those of a draft model, where one is given. ValueError where it cannot be one."""
    path = args.speculate
    if path in (None, "lookup"):
        return []
    try:
        files = Files.of(replace(args, ckpt_dir=str(path)), model.placement, model.device)
        other = files.tokenizer(None)
    except (OSError, ValueError) as e:
        raise ValueError(f"speculate={path!r}, neither 'lookup' nor a draft model: {e}") from e
    own, drafts = (
        (x.n_words, [x.encode(text, bos=True, eos=True) for text in _PROBES])
        for x in (tokenizer, other)
    )
    if own != drafts:
        raise ValueError(
            f"speculate={path!r}: the draft model has another vocabulary ({drafts[0]} tokens) than "
            f"the model ({own[0]}): give one of the same family"
        )
    return [files]


def tell_of_plain(held: list[Matrix], file_type: str) -> None:
    """Warn of matrices that no kernel of a GPU takes in the codes of their file."""
    if plain := ["/".join(x.names) for x in held if type(x.weight) is weights.PlainWeight]:
        warnings.warn(
            f"{len(plain)} of {len(held)} matrices of {file_type} are held in bf16, as no kernel "
            f"of a GPU takes their codes: {brief(plain)}",
            stacklevel=3,
        )


def stays_in_codes(checkpoint: Checkpoint, device: torch.device) -> bool:
    """Whether a device multiplies with the matrices of a file as they are there."""
    takes = device.type == "cpu" or (device.type == "cuda" and not selfcheck_cache.not_for(device))
    return checkpoint.is_quantized and takes and native.kernels() is not None


def default_batch_size(device: torch.device) -> int:
    return 256 if device.type == "cuda" else 32


@dataclass(frozen=True)
class Memory:
    """The bytes of one rank: `free` ones of its device, those of the weights, what a step needs
    beside weights and KV cache (`reserve`), and the keys and values of one token."""

    free: int
    weights: int
    reserve: int
    per_token: int

    @classmethod
    def of_all(cls, each: "Sequence[Memory]") -> "Memory":
        """Of models that run in turn, with the same tokens in their caches."""
        weights, per_token = sum(x.weights for x in each), sum(x.per_token for x in each)
        return cls(each[0].free, weights, max(x.reserve for x in each), per_token)

    @property
    def room(self) -> int:
        """Bytes for the KV cache; 0 where not even the weights fit."""
        room = min(int(self.free * MEMORY_FRACTION), self.free - self.reserve) - self.weights
        return max(room, 0)

    @property
    def kv_tokens(self) -> int:
        """Tokens in the whole pages that fit."""
        return self.room // (self.per_token * PAGE_SIZE) * PAGE_SIZE


def pages_for(num_tokens: int) -> int:
    return -(-num_tokens // PAGE_SIZE)


def choose_sizes(
    memory: Memory, seq_len: int | None, batch_size: int, kv_bytes: int | None, longest: int
) -> tuple[int, int]:
    """max_seq_len and the pages of the KV cache: as asked for, or as large as the memory allows, up
    to the model's limit, `longest`. ValueError if not one sequence of max_seq_len fits."""
    room, page = memory.room, memory.per_token * PAGE_SIZE
    if kv_bytes is not None and kv_bytes > room:
        raise ValueError(
            f"kv_cache_memory_bytes={kv_bytes} is more than the {room} bytes that are free beside "
            "the weights: ask for that or less"
        )
    fitting = (kv_bytes or room) // page
    chosen = seq_len or min(longest, DEFAULT_SEQ_LEN)
    while seq_len is None and chosen > 256 and pages_for(chosen) > fitting:
        chosen //= 2
    if pages_for(chosen) > fitting:
        would_fit, needed = fitting * PAGE_SIZE // 64 * 64, pages_for(chosen) * page
        remedy = "use more ranks, a smaller dtype or max_batch_size, or a device with more memory"
        if would_fit or kv_bytes:
            remedy = f"max_seq_len={would_fit}" if would_fit else f"kv_cache_memory_bytes={needed}"
            remedy += " would fit"
        raise ValueError(
            f"the weights take {_gib(memory.weights)}, a step {_gib(memory.reserve)}, and the KV "
            f"cache of one sequence of max_seq_len={chosen} takes {_gib(needed)}, but "
            f"{_gib(memory.free)} are free on each rank's device"
            + (f" and kv_cache_memory_bytes={kv_bytes} asked for" if kv_bytes else "")
            + f": {remedy}"
        )
    return chosen, min(fitting, batch_size * pages_for(chosen))


def step_bytes(params: ModelArgs, plan: LayerPlan, dtype: torch.dtype, batch_size: int) -> int:
    """What a step of TOKEN_BUDGET tokens holds on one rank beside weights and KV cache: what the
    layers hold of each token; and float32 logits of sequences or scored rows four times over
    (whole, counted, adjusted, sampled)."""
    per_token = plan.elements_per_token()
    tokens = max(TOKEN_BUDGET, batch_size)
    rows = max(batch_size, _SCORED_ROWS)
    return tokens * per_token * dtype.itemsize + 4 * 4 * rows * params.vocab_size


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
