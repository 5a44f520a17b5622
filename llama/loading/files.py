"""The files of a model, and how one rank is going to hold what they contain.

In: the arguments of `Llama.build`, and the rank's placement and device. Out: `Files`, with
the dtype, the quantized format and the rounding of activations that are chosen, or an error that
names the argument that these files cannot satisfy. No weight is read here.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from llama.build_args import BuildArgs, read_counts
from llama.checkpoint import memory, packed
from llama.checkpoint.find import Checkpoint, find
from llama.checkpoint.weight_files import log_choice
from llama.common.checks import FieldError, path_like
from llama.common.device import pick_dtype
from llama.gpu.check import unsupported_reason
from llama.kernels.cpu import native
from llama.loading.shares import column_step, shares_in_pieces
from llama.loading.sizes import USUAL_SEQ_LEN, default_batch_size
from llama.model.args import ModelArgs
from llama.model.cost import Storage
from llama.model.shares import RankShare, distinct_ranks
from llama.model.stage_layers import stage_layers
from llama.ops.kernels import NO_KERNELS, Kernels
from llama.ops.rounded import PIECE
from llama.ranks.parallel import Parallel
from llama.ranks.placement import Placement
from llama.weights import choice
from llama.weights.groups import QuantKey

# The matrices of a layer, and the dimension of the columns of each.
_COLUMNS = {"attention.wqkv": "E", "attention.wo": "Q", "feed_forward.w2": "F"}


@dataclass(frozen=True)
class Files:
    """A model in files, and how one rank is going to hold its weights.

    Attributes:
        checkpoint: The files.
        dtype: The type of the model.
        quantize: The format that weights are rounded to at load; None: none.
        placement: What the rank holds.
        device: Where it holds that.
        kernels: The kernels that the model may run.
        activations: How activations are rounded, as the user or the files ask; None: they are not.
        rounds_where_possible: Whether matrices that do not fit `activations` keep their rows as
            they are, without an error, because the user did not ask for it.
    """

    checkpoint: Checkpoint
    dtype: torch.dtype
    quantize: str | None
    placement: Placement
    device: torch.device
    kernels: Kernels = NO_KERNELS
    activations: str | None = None
    rounds_where_possible: bool = False

    def with_shares(self, shares: tuple[int, ...], ffn_shares: tuple[int, ...] = ()) -> "Files":
        """Return the same files for ranks with these relative shares, in this rank's part."""
        placement = replace(self.placement, shares=shares, ffn_shares=ffn_shares)
        return replace(self, placement=placement)

    def in_pieces(self) -> "Files":
        """Return the same files for ranks whose feed-forward columns suit rounded activations."""
        if not self._rounds_in_pieces:
            return self
        ffn_shares = shares_in_pieces(self.checkpoint.params, self.placement)
        return self.with_shares(self.placement.shares, ffn_shares or self.placement.ffn_shares)

    def check_pieces(self) -> None:
        """Check that each rank's columns of each matrix fill the pieces of rounded activations.

        Of matrices that keep the codes of their files, only loading tells which are rounded.

        Raises:
            FieldError: The columns of a rank do not; the error is the same on every rank.
        """
        is_rounded = self.quantize is not None and choice.has_integers(self.quantize)
        if not (self._rounds_in_pieces and is_rounded):
            return
        params = self.checkpoint.params
        for rank in distinct_ranks(params, self.placement):
            share = RankShare.of(params, rank)
            for matrix, dimension in _COLUMNS.items():
                num_columns = len(share.rows(dimension))
                if num_columns % PIECE:
                    raise choice.no_pieces(str(self.activations), matrix, num_columns)

    @property
    def _rounds_in_pieces(self) -> bool:
        rounded = choice.ROUNDED_ACTIVATIONS.get(self.activations or "")
        return rounded is not None and not rounded.is_e4m3

    def compared(self) -> list[tuple[str, object]]:
        """Return what must be the same on every rank, by name."""
        checkpoint = self.checkpoint
        quantize = checkpoint.file_type if checkpoint.in_codes else self.quantize
        compared: list[tuple[str, object]] = [
            ("torch", torch.__version__),
            ("dtype", self.dtype),
            ("quantize", quantize),
        ]
        for name, value in vars(checkpoint.params).items():
            compared.append((f"{name} of the checkpoint", value))
        return compared

    def round_alike(self, parallel: Parallel) -> "Files":
        """Return the same files, which round activations by default only if every rank does.

        Where one rank's CPU has AMX, none rounds. What the user asks for is the same on every rank.
        All ranks call this.
        """
        rounds = parallel.gather_integers([self.activations is not None])
        return self if all(value for (value,) in rounds) else replace(self, activations=None)

    def formats(self) -> tuple[str | QuantKey | None, ...]:
        """Return the formats that the matrices will have."""
        if self.device.type == "cuda" and self.checkpoint.in_codes:
            return None, *memory.gpu_formats(self.checkpoint, self.placement)
        return tuple(dict.fromkeys([self.quantize, choice.lm_head_format(self.quantize)]))


def find_files(args: BuildArgs, placement: Placement, device: torch.device) -> Files:
    """Find the files of a model, and decide how a rank will hold its weights.

    No weight is read.

    Raises:
        ValueError: A rank with this placement and device cannot load them as the arguments ask.
    """
    dtype = args.dtype
    quantize = args.quantize
    if quantize is None and isinstance(dtype, str) and dtype in choice.QUANTIZED:
        # Earlier versions took the names of quantized formats as dtype.
        quantize = dtype
        dtype = None
    chosen_dtype = pick_dtype(dtype, device)
    choice.check_quantize(quantize, chosen_dtype, device)
    checkpoint = find(path_like("ckpt_dir", args.ckpt_dir))
    if args.images:
        checkpoint = checkpoint.with_images()
    log_choice(checkpoint.choice)
    checkpoint.params.check_ranks(placement.size)
    check_stages(checkpoint.params, placement.stages)
    longest = checkpoint.params.longest_context
    if args.max_seq_len is not None and args.max_seq_len > longest:
        raise FieldError.of(
            "max_seq_len",
            f"={args.max_seq_len} is beyond this model's limit of {longest} tokens: "
            "build with that or less",
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
        seq_len = args.max_seq_len or min(longest, USUAL_SEQ_LEN)
        params = replace(checkpoint.params, is_causal=False, max_seq_len=seq_len)
        checkpoint = replace(checkpoint, params=params)
    if args.pooling is not None:
        pooling = replace(checkpoint.pooling, kind=args.pooling)
        checkpoint = replace(checkpoint, pooling=pooling)
    placement = replace(placement, column_step=column_step(checkpoint, device))
    files = Files(
        checkpoint,
        chosen_dtype,
        quantize,
        placement,
        device,
        activations=_rounding(args.activations, quantize, checkpoint, device),
        rounds_where_possible=args.activations is None,
    )
    counts = layer_counts(args.pipeline_layers, args.max_batch_size, files)
    return replace(files, placement=replace(placement, layer_counts=counts))


def _rounding(
    asked: str | None, quantize: str | None, checkpoint: Checkpoint, device: torch.device
) -> str | None:
    """Return how activations are rounded: as the user asks, else as files in codes ask."""
    is_in_codes = checkpoint.in_codes or checkpoint.packed is not None
    if asked is None and is_in_codes:
        return choice.default_activations(checkpoint.activations, device)
    return choice.check_activations(asked, device, is_plain=quantize is None and not is_in_codes)


def check_stages(params: ModelArgs, stages: int) -> None:
    """Raise a FieldError if a model has too few layers for so many pipeline stages."""
    if stages > params.n_layers:
        raise FieldError.of(
            "pipeline_parallel_size",
            f"={stages} is more than the {params.n_layers} layers of this model: give each stage a "
            "layer at least",
        )


def layer_counts(
    pipeline_layers: str | Sequence[int] | None, batch_size: int | None, files: Files
) -> tuple[int, ...]:
    """Return the number of layers of each pipeline stage; empty without a pipeline.

    Args:
        pipeline_layers: The argument of `Llama.build`.
        batch_size: max_batch_size, if the user gives one.
        files: The files, of any rank.

    Raises:
        FieldError: The user's numbers are not for these stages, or not for this model.
    """
    params = files.checkpoint.params
    stages = files.placement.stages
    given = read_counts("pipeline_layers", pipeline_layers)
    if given is not None and (len(given) != stages or sum(given) != params.n_layers):
        raise FieldError.of(
            "pipeline_layers",
            f"={','.join(map(str, given))} must have a number for each stage "
            f"(pipeline_parallel_size={stages}) and {params.n_layers} layers in all",
        )
    if stages == 1:
        return ()
    if given is not None:
        return given
    batch_size = batch_size or default_batch_size(files.device)
    quantize = files.quantize or files.checkpoint.file_type
    is_known = quantize in choice.QUANTIZED  # else the matrices of a file are taken to be alike
    itemsize = files.dtype.itemsize
    storage = Storage.of(params, itemsize, quantize if is_known else None, kv_width=itemsize)
    rows = max(1, batch_size // stages)
    return stage_layers(params, storage, stages, rows, is_gpu=files.device.type == "cuda")


def stays_in_codes(checkpoint: Checkpoint, device: torch.device) -> bool:
    """Return whether a device multiplies by the matrices of a file without dequantizing them."""
    if not checkpoint.is_quantized or native.kernels() is None:
        return False
    if device.type == "cuda":
        return not unsupported_reason(device)
    return device.type == "cpu"
