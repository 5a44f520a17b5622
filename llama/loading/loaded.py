"""A loaded model: what `load_model` returns, and the lines that describe it.

In: one rank's model with its tokenizer, files and sizes. Out: its description for the line "Loaded
in ...", the command that would pack its weights, and a warning of weights that are not finite.
"""

from dataclasses import dataclass

import torch

from llama.checkpoint import packed
from llama.checkpoint.pooling import PoolingSettings
from llama.common.device import dtype_name
from llama.engine.core import PAGE_SIZE
from llama.engine.runner import ModelRunner
from llama.gpu import selection
from llama.kernels.cpu import native
from llama.loading.files import Files
from llama.loading.sizes import pages_for
from llama.loading.weights import plain_not_finite, warn_not_finite
from llama.model.transformer import Transformer
from llama.options.engine_options import EngineOptions
from llama.prompts.dialog_format import DialogFormat
from llama.tokenizer import Tokenizer

_LARGE = 1 << 28  # bytes of weights from which on loading takes long


@dataclass(frozen=True)
class Loaded:
    """One rank's model with its tokenizer.

    Attributes:
        model: The model.
        tokenizer: Its tokenizer.
        files: Where it came from.
        dialog_format: The format of its dialogs.
        options: What its engine is made with.
        head: Its classification head on the CPU, (labels, E) float32, if it has one.
    """

    model: Transformer
    tokenizer: Tokenizer
    files: Files
    dialog_format: DialogFormat
    options: EngineOptions
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
        placement = self.files.placement
        shares = "".join(
            f" with {name} {','.join(map(str, values))}"
            for name, values in (
                ("shares", placement.shares),
                ("ffn_shares", placement.ffn_shares),
            )
            if values
        )
        graphs = ", CUDA graphs" if runner.replayer else ""
        purpose = self.files.checkpoint.purpose
        counts = placement.layer_counts
        layers = ",".join(map(str, counts))
        pipeline = f", pipeline_parallel_size={len(counts)} with layers {layers}" if counts else ""
        return (
            f"{weight.device.type}, {name}, model_parallel_size={self.model.parallel.size}"
            f"{shares}{pipeline}, "
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
        warn_not_finite(self.model, self.files.checkpoint, plain_not_finite(self.model))

    def pack_command(self) -> str | None:
        """Return the command that writes these weights packed; None if that would gain nothing."""
        files = self.files
        is_for_kernels = files.device.type == "cpu" and native.kernels() is not None
        is_large = sum(weight.nbytes for weight in self.model.parameters()) >= _LARGE
        if files.checkpoint.packed is not None or not is_for_kernels or not is_large:
            return None
        return packed.command(str(files.checkpoint.weights_path), files.quantize)
