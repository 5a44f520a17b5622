"""Load a model as the arguments of `Llama.build` ask: device, ranks, memory, weights.

In: what the user asked for. Out: one rank's Transformer, the Tokenizer and the size of the KV
cache, or one clear error on every rank before any weight is read. Nothing here runs the model.

The file has over 400 lines because the steps of a build share their order and their data.

`load_model` is the sequence of steps; every step is a function: `find_files`, `choose_kernels`,
`estimate_memory` and `load_weights`. Between steps the ranks compare what they have.
"""

import functools
import itertools
import sys
import warnings
import zlib
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from llama import weights
from llama.build_args import BuildArgs
from llama.checkpoint import memory, packed, reader
from llama.checkpoint.chat_templates import DEFAULT, find_chat_templates, read_template
from llama.checkpoint.find import Checkpoint, find
from llama.checkpoint.pooling import HEAD, PoolingSettings
from llama.checkpoint.shards import open_head
from llama.checkpoint.tokenizer_files import load_tokenizer
from llama.checkpoint.verify import LoadCheck
from llama.checks import FieldError, brief, number, path_like
from llama.device import dtype_name, free_bytes, pick_device, pick_dtype, set_num_threads
from llama.engine.core import DRAFTERS, PAGE_SIZE
from llama.engine.runner import ModelRunner
from llama.gpu import selection, selfcheck_cache
from llama.model.layers import Matrix, RMSNorm
from llama.model.plan import LayerPlan
from llama.model.transformer import Transformer
from llama.ops.cpu import native
from llama.ops.kv_cache import AS_COMPUTED, KVFormat, pick_kv_format
from llama.ops.triton.kernels import TORCH_ONLY, KernelSet
from llama.prompts.call_format import check_call_parser
from llama.prompts.dialog_format import DialogFormat, MetaFormat, MissingFormat
from llama.prompts.reasoning import find_marks
from llama.prompts.tools import tool_format_of
from llama.ranks.collectives import ModelParallel
from llama.ranks.groups import connect
from llama.ranks.placement import Placement
from llama.shares import check_shares, column_step, resolve_shares, tightest_memory
from llama.sizes import (
    CUDA_RESERVE,
    DEFAULT_SEQ_LEN,
    Memory,
    choose_sizes,
    default_batch_size,
    max_cache_tokens,
    pages_for,
    step_bytes,
)
from llama.storage.downloads import shown
from llama.tokenizer import Tokenizer
from llama.weights.plain import all_finite

_LARGE = 1 << 28  # bytes of weights from which on loading takes long
_META_TEMPLATE = "llama3"  # the value of chat_template that means Meta's format
_PROBES = (  # tokenizers that agree on these texts are taken to be the same
    "Hello, world!  The year 1984;\n\n\tdef f(x): return {x: 'é'}",
    "straße, naïve, 日本語, привет, عربى, 🎈 and antidisestablishmentarianism",
)


@dataclass(frozen=True)
class Files:
    """A model in files, and how one rank is going to hold its weights.

    Attributes:
        checkpoint: The files.
        dtype: The type of the model.
        quantize: The format that weights are rounded to at load; None: none.
        placement: What the rank holds.
        device: Where it holds that.
        kernels: The Triton kernels that the model may run.
        activations: How activations are rounded, as the user or the files ask; None: they are not.
    """

    checkpoint: Checkpoint
    dtype: torch.dtype
    quantize: str | None
    placement: Placement
    device: torch.device
    kernels: KernelSet = TORCH_ONLY
    activations: str | None = None

    def with_shares(self, shares: tuple[int, ...]) -> "Files":
        """Return the same files for ranks with these relative shares, in this rank's part."""
        return replace(self, placement=replace(self.placement, shares=shares))

    def compared(self) -> list[tuple[str, object]]:
        """Return what must be the same on every rank, by name."""
        checkpoint = self.checkpoint
        quantize = checkpoint.file_type if checkpoint.in_codes else self.quantize
        compared: list[tuple[str, object]] = [
            ("torch", torch.__version__),
            ("dtype", self.dtype),
            ("quantize", quantize),
            ("rounding of activations", self.activations),
        ]
        for name, value in vars(checkpoint.params).items():
            compared.append((f"{name} of the checkpoint", value))
        return compared

    def formats(self) -> tuple[str | weights.QuantKey | None, ...]:
        """Return the formats that the matrices will have."""
        if self.device.type == "cuda" and self.checkpoint.in_codes:
            return None, *memory.gpu_formats(self.checkpoint, self.placement)
        return tuple(dict.fromkeys([self.quantize, weights.lm_head_format(self.quantize)]))


@dataclass(frozen=True)
class Loaded:
    """One rank's model with its tokenizer.

    Attributes:
        model: The model.
        tokenizer: Its tokenizer.
        num_pages: The pages of its KV cache.
        files: Where it came from.
        dialog_format: The format of its dialogs.
        draft_model: The model that drafts tokens for it, if there is one.
        head: Its classification head on the CPU, (labels, E) float32, if it has one.
    """

    model: Transformer
    tokenizer: Tokenizer
    num_pages: int
    files: Files
    dialog_format: DialogFormat
    draft_model: Transformer | None = None
    head: torch.Tensor | None = None

    @property
    def pooling(self) -> PoolingSettings:
        """The settings of embeddings and scores of whole prompts."""
        return self.files.checkpoint.pooling

    @property
    def why_silent(self) -> str:
        """Why the model cannot generate text; empty if it can."""
        return self.files.checkpoint.why_silent

    def describe(self, runner: ModelRunner) -> str:
        """Return device, type, ranks and sizes, as `Llama.build` prints them.

        Args:
            runner: The runner of the model. With CUDA graphs it may have fewer pages.
        """
        params = self.model.params
        weight = self.model.norm.weight
        name = self.model.quantization or dtype_name(weight.dtype)
        file_type = self.files.checkpoint.file_type
        if file_type not in (None, name):
            name += f" from {file_type}"
        for adapter in self.files.checkpoint.adapters:
            name += f" with {adapter.folder.name}"
        if self.files.activations is not None:
            name += f", activations={self.files.activations}"
        tokens = f"{runner.num_pages * PAGE_SIZE:,} tokens"
        if self.model.plan.kv_format.name:
            tokens += f" in {self.model.plan.kv_format.name}"
        sequences = runner.num_pages // pages_for(params.max_seq_len)
        plural = "" if sequences == 1 else "s"
        shares = ",".join(map(str, self.files.placement.shares))
        graphs = ", CUDA graphs" if runner.has_graphs else ""
        purpose = self.files.checkpoint.purpose
        stages = self.model.parallel.placement.stages
        pipeline = f", pipeline_parallel_size={stages}" if stages > 1 else ""
        return (
            f"{weight.device.type}, {name}, model_parallel_size={self.model.parallel.size}"
            f"{f' with shares {shares}' if shares else ''}{pipeline}, "
            f"max_seq_len={params.max_seq_len}, max_batch_size={params.max_batch_size}, "
            f"model context {params.longest_context:,} tokens, "
            f"KV cache {tokens}, {sequences} sequence{plural} of full length at once"
            f"{selection.describe(self.model)}{graphs}"
            f"{f'; {purpose}' if purpose else ''}"
        )

    def warn_not_finite(self) -> None:
        """Warn of plain weights that hold NaN or infinity, with their files.

        The engine calls this when a row has no token: to examine the weights of every load would
        take up to half as long as to load them. Packing has examined all others.
        """
        _warn_not_finite(self.model, self.files.checkpoint, _plain_not_finite(self.model))

    def pack_command(self) -> str | None:
        """Return the command that writes these weights packed; None if that would gain nothing."""
        files = self.files
        is_for_kernels = files.device.type == "cpu" and native.kernels() is not None
        is_large = sum(weight.nbytes for weight in self.model.parameters()) >= _LARGE
        if files.checkpoint.packed is not None or not is_for_kernels or not is_large:
            return None
        return packed.command(str(files.checkpoint.weights_path), files.quantize)


def load_model(args: BuildArgs) -> Loaded:
    """Load what the arguments ask for. The sizes that are chosen are in the model's params."""
    device = pick_device(args.device)
    number("timeout_s", args.timeout_s, 0, 10**6, above=True)
    parallel = connect(
        args.model_parallel_size, device, args.timeout_s, args.pipeline_parallel_size
    )
    with parallel.agree("the arguments of Llama.build", world=True) as must_match:
        args = args.checked()
        _check_drafter(args)
        check_shares(args.shares, parallel.size)
        files = find_files(args, parallel.placement, device)
        kv_format = pick_kv_format(args.kv_cache_dtype, device)
        tokenizer = load_tokenizer(files.checkpoint, args.tokenizer_path)
        dialog_format = find_dialog_format(
            files.checkpoint,
            tokenizer,
            chat_template=args.chat_template,
            reasoning_parser=args.reasoning_parser,
            tool_call_parser=args.tool_call_parser,
        )
        models = [files, *_find_draft_files(args, files, tokenizer)]
        _check_speculation(args, models)
        # A wrong name in a variable is an error before weights are read.
        allowed = selection.allowed_kernels()
        native.allowed_instruction_sets()
        must_match += _compared_arguments(args, models)
        template_crc = zlib.crc32(dialog_format.jinja_template().encode())
        must_match.append(f"CRC-32 of the chat template={template_crc:08x}")
    with parallel.agree("the weights", world=True) as must_match:
        if parallel.world is not None:
            for model_files in models:
                must_match += model_files.checkpoint.samples()
    shares = resolve_shares(args.shares, parallel, device)
    models = [each.with_shares(shares) for each in models]
    models = [choose_kernels(each, parallel, allowed, kv_format) for each in models]
    batch_size = args.max_batch_size or default_batch_size(device)
    seq_len, num_pages = _fit_memory(args, models, parallel, kv_format, batch_size)
    with parallel.agree("the checkpoint", world=True):
        load = functools.partial(
            load_weights,
            parallel=parallel,
            kv_format=kv_format,
            max_seq_len=seq_len,
            max_batch_size=batch_size,
            verify=args.verify,
        )
        model, *draft = [load(each) for each in models]
        head = load_head(files.checkpoint)
    return Loaded(
        model,
        tokenizer,
        num_pages,
        models[0],
        dialog_format,
        draft_model=draft[0] if draft else None,
        head=head,
    )


def _fit_memory(
    args: BuildArgs,
    models: list[Files],
    parallel: ModelParallel,
    kv_format: KVFormat,
    batch_size: int,
) -> tuple[int, int]:
    """Return the maximum sequence length and the pages that fit into the memory of every rank."""
    with parallel.agree("the memory of the ranks", world=True):
        free = free_bytes(models[0].device, models[0].placement.shares)
        needs = [estimate_memory(each, free, batch_size, kv_format) for each in models]
    memory = tightest_memory(Memory.of_all(needs), parallel, args.kv_cache_memory_bytes)
    longest = min(each.checkpoint.params.longest_context for each in models)
    with parallel.agree("the memory of the ranks", world=True):
        return choose_sizes(
            memory, args.max_seq_len, batch_size, args.kv_cache_memory_bytes, longest
        )


def _compared_arguments(args: BuildArgs, models: list[Files]) -> list[str]:
    """Return the arguments and properties of files that every rank must have alike."""
    compared = {**args.shared(), "device": models[0].device.type}
    for model, suffix in zip(models, ("", " (draft)"), strict=False):
        compared |= {f"{name}{suffix}": value for name, value in model.compared()}
    return [f"{name}={value}" for name, value in compared.items()]


def find_files(args: BuildArgs, placement: Placement, device: torch.device) -> Files:
    """Find the files of a model, and decide how a rank will hold its weights.

    No weight is read.

    Raises:
        ValueError: A rank with this placement and device cannot load them as the arguments ask.
    """
    dtype = args.dtype
    quantize = args.quantize
    if quantize is None and isinstance(dtype, str) and dtype in weights.QUANTIZED:
        # Earlier versions took the names of quantized formats as dtype.
        quantize = dtype
        dtype = None
    chosen_dtype = pick_dtype(dtype, device)
    weights.check_quantize(quantize, chosen_dtype, device)
    checkpoint = find(path_like("ckpt_dir", args.ckpt_dir))
    checkpoint.params.check_ranks(placement.size)
    if placement.stages > checkpoint.params.n_layers:
        raise FieldError.of(
            "pipeline_parallel_size",
            f"={placement.stages} is more than the {checkpoint.params.n_layers} layers of this "
            "model: give each stage a layer at least",
        )
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
        if args.lora is not None:
            raise ValueError(
                f"{checkpoint.weights_path} keeps its matrices in the codes of "
                f"{checkpoint.file_type}, into which no adapter can be merged: build with "
                "dtype='bf16', so that they are dequantized first"
            )
        checkpoint = replace(checkpoint, in_codes=True)
    checkpoint = checkpoint.merged_with(args.lora)
    if args.bidirectional or not checkpoint.params.is_causal:
        # The largest step has a whole prompt, so that its memory follows from the context.
        seq_len = args.max_seq_len or min(longest, DEFAULT_SEQ_LEN)
        params = replace(checkpoint.params, is_causal=False, max_seq_len=seq_len)
        checkpoint = replace(checkpoint, params=params)
    if args.pooling is not None:
        pooling = replace(checkpoint.pooling, kind=args.pooling)
        checkpoint = replace(checkpoint, pooling=pooling)
    is_plain = quantize is None and not checkpoint.in_codes and checkpoint.packed is None
    activations = args.activations
    if activations is None and (checkpoint.in_codes or checkpoint.packed is not None):
        activations = weights.default_activations(checkpoint.activations, device)
    activations = weights.check_activations(activations, device, is_plain=is_plain)
    placement = replace(placement, column_step=column_step(checkpoint, device))
    files = Files(checkpoint, chosen_dtype, quantize, placement, device)
    return replace(files, activations=activations)


def stays_in_codes(checkpoint: Checkpoint, device: torch.device) -> bool:
    """Return whether a device multiplies by the matrices of a file without dequantizing them."""
    if not checkpoint.is_quantized or native.kernels() is None:
        return False
    if device.type == "cuda":
        return not selfcheck_cache.unsupported_reason(device)
    return device.type == "cpu"


def _check_drafter(args: BuildArgs) -> None:
    """Raise a ValueError for a drafter that cannot be used like this.

    It has no use for the texts that `speculate_shared` offers, or it is a model beside a pipeline.
    """
    name = args.speculate
    if args.pipeline_parallel_size > 1 and name is not None and name not in DRAFTERS:
        raise FieldError.of(
            "speculate",
            f"={brief(name)} is a draft model, which needs pipeline_parallel_size=1: give "
            f"speculate={' or '.join(map(repr, DRAFTERS))}, which works with "
            f"pipeline_parallel_size={args.pipeline_parallel_size}",
        )
    if args.speculate_shared and not (name in DRAFTERS and DRAFTERS[name].can_share):
        sharing = [repr(known) for known, kind in DRAFTERS.items() if kind.can_share]
        raise ValueError(
            f"speculate_shared looks up the texts of other requests, and speculate={name!r} "
            f"looks nothing up: give speculate={' or '.join(sharing)}, or leave out "
            "speculate_shared"
        )


def _check_speculation(args: BuildArgs, models: list[Files]) -> None:
    """Raise a ValueError for speculation with a model that generates no text."""
    for files in models if args.speculate else ():
        why_silent = files.checkpoint.why_silent
        if why_silent:
            raise ValueError(
                f"speculate={args.speculate!r}: {files.checkpoint.folder} cannot generate: "
                f"{why_silent}; leave out speculate"
            )


def find_dialog_format(
    checkpoint: Checkpoint,
    tokenizer: Tokenizer,
    *,
    chat_template: str | None = None,
    reasoning_parser: str = "auto",
    tool_call_parser: str = "auto",
) -> DialogFormat:
    """Return the format of the dialogs of a checkpoint, with the marks of its reasoning.

    Args:
        checkpoint: The model.
        tokenizer: Its tokenizer, which gets the stop tokens of the format.
        chat_template: The argument of `Llama.build`.
        reasoning_parser: The argument of `Llama.build`.
        tool_call_parser: The argument of `Llama.build`.

    Raises:
        OSError: The file of the template cannot be read.
        ValueError: A chat template cannot be used.
    """
    dialog_format = _chosen_format(checkpoint, tokenizer, chat_template, tool_call_parser)
    template = dialog_format.jinja_template()
    dialog_format.reasoning = find_marks(tokenizer, template, reasoning_parser)
    return dialog_format


def _chosen_format(
    checkpoint: Checkpoint, tokenizer: Tokenizer, chat_template: str | None, tool_call_parser: str
) -> DialogFormat:
    """Return Meta's format, that of a template, or the one of a model without a template."""
    check_call_parser(tool_call_parser)
    rope_factor = checkpoint.params.rope_factor
    tool_format = tool_format_of(rope_factor, is_guard=checkpoint.is_guard)
    meta = MetaFormat(tokenizer, tool_format)
    if chat_template == _META_TEMPLATE or (chat_template is None and checkpoint.is_guard):
        return meta
    if chat_template is not None:
        templates = {DEFAULT: _given_template(chat_template)}
    else:
        templates = find_chat_templates(checkpoint)
    # Further templates alone, such as the one for tools, leave chats without a template.
    if DEFAULT in templates:
        # Jinja takes a fiftieth of the time that a command needs to start; Meta's files need none.
        from llama.prompts.template_format import choose_format

        return choose_format(templates, meta, tool_call_parser)
    # Meta's own files hold no templates, and those of its layout that a conversion wrote do.
    is_base = checkpoint.source_layout in ("hf", "gguf")
    return MissingFormat(tokenizer) if is_base else meta


def _given_template(chat_template: str) -> str:
    """Return the text of the template that `Llama.build` was given."""
    path = Path(path_like("chat_template", chat_template))
    if not path.is_file():
        raise FileNotFoundError(
            f"chat_template={shown(path)} is no file: give the path of a Jinja template, or "
            f"{_META_TEMPLATE} for Meta's format"
        )
    return read_template(path)


def _find_draft_files(args: BuildArgs, model: Files, tokenizer: Tokenizer) -> list[Files]:
    """Find the draft model, if `speculate` is one and not the name of a drafter.

    Raises:
        ValueError: There is no model, or it does not have the model's vocabulary.
    """
    path = args.speculate
    if path is None or path in DRAFTERS:
        return []
    try:
        # What is rounded depends on the matrices, so a draft model follows its own files.
        activations = "bf16" if args.activations == "bf16" else None
        draft_args = replace(
            args,
            ckpt_dir=str(path),
            activations=activations,
            lora=None,
            pooling=None,
            bidirectional=False,
        )
        files = find_files(draft_args, model.placement, model.device)
        draft_tokenizer = load_tokenizer(files.checkpoint)
    except (OSError, ValueError) as e:
        names = ", ".join(map(repr, DRAFTERS))
        raise ValueError(f"speculate={path!r}, neither {names} nor a draft model: {e}") from e
    num_tokens = tokenizer.n_words
    num_draft_tokens = draft_tokenizer.n_words
    if num_tokens != num_draft_tokens or _probe(tokenizer) != _probe(draft_tokenizer):
        raise ValueError(
            f"speculate={path!r}: the draft model has another vocabulary ({num_draft_tokens} "
            f"tokens) than the model ({num_tokens}): give one of the same family"
        )
    return [files]


def _probe(tokenizer: Tokenizer) -> list[list[int]]:
    return [tokenizer.encode(text, bos=True, eos=True) for text in _PROBES]


def choose_kernels(
    files: Files,
    parallel: ModelParallel,
    allowed: frozenset[str],
    kv_format: KVFormat = AS_COMPUTED,
) -> Files:
    """Return the files with the kernels that their model may run on a GPU.

    Weights become plain where no kernel multiplies by quantized ones: PyTorch would dequantize
    them in each step.
    """
    # The file of one rank may be truncated, which every rank must learn before kernels are chosen.
    with parallel.agree("the formats of the weights", world=True):
        formats = files.formats()
    kernels = selection.kernels_for(
        files.checkpoint.params,
        parallel.placed(files.placement),
        files.device,
        files.dtype,
        allowed,
        formats,
        kv_format,
        files.activations,
    )
    files = replace(files, kernels=kernels)
    is_plain = files.quantize is None and not files.checkpoint.in_codes
    if files.device.type != "cuda" or is_plain or "linear" in kernels.names:
        return files
    if parallel.global_rank == 0:
        warnings.warn(
            f"the weights are held in {dtype_name(files.dtype)}: products of quantized ones "
            "need the GPU's kernel linear, which is not in use",
            stacklevel=3,
        )
    checkpoint = replace(files.checkpoint, in_codes=False)
    return replace(files, quantize=None, activations=None, checkpoint=checkpoint)


def estimate_memory(
    files: Files, free: int, batch_size: int, kv_format: KVFormat = AS_COMPUTED
) -> Memory:
    """Return what a rank needs of `free` bytes. Where weights stay in codes, some are read."""
    checkpoint = files.checkpoint
    plan = LayerPlan.of(checkpoint.params, files.placement, kv_format)
    if checkpoint.packed is not None:
        weight_bytes = packed.bytes_of(checkpoint, files.placement)
    else:
        weight_bytes = memory.bytes_of(
            checkpoint, files.placement, files.dtype, files.quantize, files.device
        )
    reserve = step_bytes(checkpoint.params, plan, files.dtype, batch_size)
    if files.device.type == "cuda":
        reserve += CUDA_RESERVE
    per_token = plan.kv_bytes_per_token(files.dtype)
    max_tokens = max_cache_tokens(files.device, per_token)
    return Memory(free, weight_bytes, reserve, per_token, max_tokens)


def load_weights(
    files: Files,
    *,
    parallel: ModelParallel,
    kv_format: KVFormat,
    max_seq_len: int,
    max_batch_size: int,
    verify: bool,
) -> Transformer:
    """Read this rank's weights, and pack each part of the model once it is whole.

    Args:
        files: The files, and how their weights will be held.
        parallel: The rank among its peers.
        kv_format: The format of the KV cache.
        max_seq_len: The size of the run that the model is made for.
        max_batch_size: The number of sequences that run at once.
        verify: Whether the files are compared with the digests beside them.
    """
    if files.device.type == "cpu":
        set_num_threads(files.placement.shares)
    checkpoint = files.checkpoint
    params = replace(checkpoint.params, max_seq_len=max_seq_len, max_batch_size=max_batch_size)
    model = Transformer(
        params,
        parallel=parallel.placed(files.placement),
        device=files.device,
        dtype=files.dtype,
        kv_format=kv_format,
        fills_late=files.device.type == "cuda",
    )
    model.use_kernels(files.kernels)
    is_first = parallel.global_rank == 0
    has_stages = parallel.placement.stages > 1
    check = None
    if verify:
        check = LoadCheck(checkpoint, warns=is_first, divides=not has_stages).check
    if checkpoint.packed is not None:
        packed.attach(checkpoint, model)
    else:
        reader.load(
            checkpoint,
            model,
            check=check,
            filled=functools.partial(model.pack, quantize=files.quantize),
            progress=is_first and sys.stderr.isatty(),
        )
        if checkpoint.in_codes:
            model.quantization = checkpoint.file_type
            if files.device.type == "cuda" and is_first:
                warn_of_plain(_layer_matrices(model), str(checkpoint.file_type))
        _warn_of_damage(model, checkpoint)
    if files.activations is not None:
        round_activations(model, files.activations)
    return model


def load_head(checkpoint: Checkpoint) -> torch.Tensor | None:
    """Return the classification head of a checkpoint, (labels, E) float32; None without one.

    Raises:
        OSError: A file cannot be read.
        ValueError: The tensor is missing or wrong, or not finite.
    """
    if checkpoint.pooling.head is None:
        return None
    tensor = open_head(checkpoint)
    head = tensor.data.to(torch.float32, copy=True)
    if not all_finite(head):
        raise ValueError(f"{tensor.file}: {HEAD} holds NaN or infinity: fetch it again")
    return head


def round_activations(model: Transformer, name: str) -> None:
    """Round the inputs of a model's matrices, as a value of `activations=` says.

    Raises:
        ValueError: The matrices do not fit this value.
    """
    matrices = {"/".join(x.names): x.weight for x in _layer_matrices(model)}
    if weights.ROUNDED_ACTIVATIONS[name].with_lm_head and model.plan.share.has_lm_head:
        matrices[weights.LM_HEAD] = model.output.weight
    weights.round_activations(matrices, name)


def _matrices(model: Transformer) -> list[Matrix]:
    return [module for module in model.modules() if isinstance(module, Matrix)]


def _layer_matrices(model: Transformer) -> list[Matrix]:
    """Return the matrices within the layers; those of the vocabulary can be padded with zeros."""
    return [matrix for matrix in _matrices(model) if matrix.names[0].startswith("layers.")]


def warn_of_plain(matrices: list[Matrix], file_type: str) -> None:
    """Warn of matrices that no GPU kernel takes in the codes of their file."""
    plain = ["/".join(x.names) for x in matrices if type(x.weight) is weights.PlainWeight]
    if plain:
        warnings.warn(
            f"{len(plain)} of {len(matrices)} matrices of {file_type} are held in bf16, as no "
            f"kernel of a GPU takes their codes: {brief(plain)}",
            stacklevel=3,
        )


def _warn_of_damage(model: Transformer, checkpoint: Checkpoint) -> None:
    """Warn of NaN and infinity, and of zeros as a truncated download has them, that packing saw."""
    damaged = [x.names for x in _matrices(model) if not x.weight.is_finite]
    _warn_not_finite(model, checkpoint, list(dict.fromkeys(itertools.chain(*damaged))))
    empty = ["/".join(x.names) for x in _layer_matrices(model) if x.weight.has_empty_row]
    if empty:
        warnings.warn(
            f"{checkpoint.weights_path} holds rows of zeros in {brief(empty)}: fetch or convert it "
            "again",
            stacklevel=3,
        )


def _plain_not_finite(model: Transformer) -> list[str]:
    """Return Meta's names of the tensors of this rank's model that are plain and not finite."""
    names: dict[str, None] = {}  # in order, and a tied matrix once
    for path, module in model.named_modules():
        if isinstance(module, Matrix) and isinstance(module.weight, weights.PlainWeight):
            if not all_finite(module.weight.plain()):
                names |= dict.fromkeys(module.names)
        elif isinstance(module, RMSNorm) and not all_finite(module.weight):
            names[f"{path}.weight"] = None
    return list(names)


def _warn_not_finite(model: Transformer, checkpoint: Checkpoint, names: list[str]) -> None:
    """Warn of tensors that are not finite in a model, with the files that hold them.

    Args:
        model: The model.
        checkpoint: Its files, which are read where `names` has tensors.
        names: Meta's names of the tensors.
    """
    if not names:
        return
    damaged = reader.find_not_finite(checkpoint, names)
    for file, damaged_names in damaged.items():
        warnings.warn(
            f"{file} holds NaN or infinity in {brief(damaged_names)}: fetch or convert it again",
            stacklevel=3,
        )
    if not damaged:
        warnings.warn(
            f"{brief(names)} of {checkpoint.weights_path} have elements that are too large for "
            f"{dtype_name(model.norm.weight.dtype)}: build with dtype='bf16'",
            stacklevel=3,
        )
