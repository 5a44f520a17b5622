"""Load a model as the arguments of `Llama.build` ask: device, ranks, memory, weights.

In: what the user asked for. Out: one rank's Transformer, the Tokenizer and the options of the
engine, or one clear error on every rank before any weight is read. Nothing here runs the model.

`load_model` is the sequence of steps, and each file of this package has one of them. Between steps
the ranks compare what they have.
"""

import contextlib
import zlib

import torch

from llama.build_args import BuildArgs
from llama.checkpoint.tokenizer_files import load_tokenizer
from llama.common.checks import number
from llama.common.device import free_unused, pick_device, shares_gpu
from llama.gpu import selection
from llama.kernels.cpu import native
from llama.loading.dialog_format import find_dialog_format
from llama.loading.draft import check_drafter, check_speculation, find_draft_files
from llama.loading.files import Files, find_files
from llama.loading.kernels import choose_kernels
from llama.loading.loaded import Loaded
from llama.loading.memory import fit_memory, with_ffn_shares
from llama.loading.page_identity import identity_of
from llama.loading.shares import check_shares, resolve_shares
from llama.loading.weights import load_head, load_weights
from llama.ops.kv_cache import pick_kv_format
from llama.options.engine_options import EngineOptions
from llama.ranks.groups import connect
from llama.ranks.parallel import Parallel

_SAME_FILES = (
    "Copy the same folder to every machine; `llama verify DIR` shows where a copy was damaged."
)


def load_model(args: BuildArgs) -> Loaded:
    """Load what the arguments ask for. The sizes that are chosen are in the model's params."""
    device = pick_device(args.device)
    free_unused(device)
    parallel = _connect(args, device)
    with parallel.agree(
        "the arguments of Llama.build",
        world=True,
        remedy="Give every rank the same arguments, and every machine the same files.",
    ) as must_match:
        args = args.checked()
        check_drafter(args)
        check_shares(args.shares, parallel.size)
        check_shares(args.ffn_shares, parallel.size, "ffn_shares")
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
        models = [files, *find_draft_files(args, files, tokenizer)]
        check_speculation(args, models)
        # A wrong name in a variable is an error before weights are read.
        allowed = selection.allowed_kernels()
        native.allowed_instruction_sets()
        must_match += _compared_arguments(args, models)
        template_crc = zlib.crc32(dialog_format.jinja_template().encode())
        must_match.append(f"CRC-32 of the chat template={template_crc:08x}")
    with parallel.agree("the weights", world=True, remedy=_SAME_FILES) as must_match:
        if parallel.world_size > 1:
            for model_files in models:
                must_match += model_files.checkpoint.samples()
    shares = resolve_shares(args.shares, parallel, device)
    models = [each.with_shares(shares).round_alike(parallel) for each in models]
    models = with_ffn_shares(args, models, parallel, kv_format)
    models = [choose_kernels(each, parallel, allowed, kv_format) for each in models]
    sizes = fit_memory(args, models, parallel, kv_format)
    with parallel.agree("the checkpoint", world=True):
        for each in models:
            each.check_pieces()
        model, *draft = [
            load_weights(
                each, parallel=parallel, kv_format=kv_format, sizes=sizes, verify=args.verify
            )
            for each in models
        ]
        head = load_head(files.checkpoint)
    draft_model = draft[0] if draft else None
    identity = None
    if args.kv_cache_dir is not None and files.checkpoint.params.is_causal:
        with parallel.agree("the files of the weights", world=True):
            identity = identity_of(models[0], kv_format)
    options = EngineOptions.of(
        args,
        num_pages=sizes.num_pages,
        token_budget=sizes.token_budget,
        draft_model=draft_model,
        page_identity=identity,
    )
    return Loaded(model, tokenizer, models[0], dialog_format, options, head)


def _connect(args: BuildArgs, device: torch.device) -> Parallel:
    """Meet the other ranks; the limits of this wait are checked before it begins."""
    number("timeout_s", args.timeout_s, 0, 10**6, above=True)
    number("silence_s", args.silence_s, 1, 10**6)
    allowed = frozenset[str]()
    with contextlib.suppress(ValueError):  # a wrong name in the variable: load_model raises it
        allowed = selection.allowed_kernels()
    return connect(
        args.model_parallel_size,
        device,
        args.timeout_s,
        args.pipeline_parallel_size,
        args.silence_s,
        # Symmetric memory refuses ranks on one GPU.
        allows_one_shot=selection.ONE_SHOT in allowed and not shares_gpu(),
    )


def _compared_arguments(args: BuildArgs, models: list[Files]) -> list[str]:
    """Return the arguments and properties of files that every rank must have alike."""
    compared = {**args.shared(), "device": models[0].device.type}
    for model, suffix in zip(models, ("", " (draft)"), strict=False):
        compared |= {f"{name}{suffix}": value for name, value in model.compared()}
    return [f"{name}={value}" for name, value in compared.items()]
