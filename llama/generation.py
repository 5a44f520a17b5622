"""Meta's API: `Llama.build`, `generate`, `text_completion` and `chat_completion`.

In: texts, dialogs or token ids. Out: answers, the same on every rank. Each call reads its prompts
(`requests/prompts.py`), runs their requests on the one `LLMEngine`, and makes predictions of the
outputs (`requests/predictions.py`); embeddings and scores are in `requests/pooling.py` and
`requests/scoring.py`. Nothing here knows the server or the command line.

The file has over 400 lines, nearly all of them signatures and docstrings, as Meta's scripts and the
documentation expect the whole API in this one class.
"""

import logging
import os
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any, Literal, NoReturn, TypeVar

import numpy as np
import torch

from llama.assembly import assemble
from llama.build_args import BuildArgs
from llama.checkpoint.pooling import GENERATES, HeadSettings, PoolingSettings
from llama.common.checks import path_like, whole_number
from llama.engine.core import EngineCore
from llama.engine.sampler import sample_top_p
from llama.gpu.selection import recorder_for
from llama.loading import load_model
from llama.loading.sizes import step_bytes
from llama.model.transformer import Transformer
from llama.options.engine_options import EngineOptions
from llama.prompts.chat import ChatOptions
from llama.prompts.dialog_format import DialogFormat, MetaFormat
from llama.prompts.tools import tool_format_of
from llama.ranks.stdout import MutedStdout
from llama.requests.adapters import AdapterInfo
from llama.requests.beam_search import beam_search
from llama.requests.llm_engine import LLMEngine
from llama.requests.pooling import EmbeddingOptions, Pooler, check_inputs
from llama.requests.predictions import (
    BeamPrediction,
    ChatPrediction,
    CompletionPrediction,
    Predictor,
    TextDelta,
    checked,
    scores_of,
    tokens_of,
)
from llama.requests.prompts import CallOptions, PromptReader, rows
from llama.requests.request import Request, RequestOutput
from llama.requests.scoring import (
    Classification,
    ClassificationHead,
    Classifier,
    PairScorer,
    ranked,
)
from llama.tokenizer import ChatFormat, Tokenizer

__all__ = ["ChatPrediction", "CompletionPrediction", "Llama", "sample_top_p"]

_LOGGER = logging.getLogger(__name__)
_T = TypeVar("_T")
_SLOW_LOAD_S = 2.0  # loads that take longer print the command that packs the weights
_Dialogs = Seq[Seq[Mapping[str, Any]]]  # dialogs of Meta's or OpenAI's messages


class Llama:
    """A loaded model with its tokenizer and engine; make one with `Llama.build`.

    Building a model changes the process in these ways. The groups of torch.distributed and
    fairscale exist afterwards, also in a single process, as with Meta's build. The number of CPU
    threads of torch is set, unless the user has chosen one (see `llama.common.device`). With
    several ranks, the stdout of all ranks but 0 is muted until `close`, and SIGTERM and
    `sys.excepthook` are watched until the groups end, so that all ranks end together. The default
    dtype and the global seeds stay unchanged.

    Rank 0 prints one line, "Loaded in ... seconds", to stdout, as Meta's build does, unless
    `verbose` is false. All other messages go to the logger `llama` of the module `logging`. If no
    handler is configured there, warnings are written to stderr.
    """

    @staticmethod
    def build(
        ckpt_dir: str,
        tokenizer_path: str | None = None,
        max_seq_len: int | None = None,
        max_batch_size: int | None = None,
        model_parallel_size: int | None = None,
        seed: int = 1,
        *,
        pipeline_parallel_size: int = 1,
        pipeline_layers: str | Seq[int] | None = None,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype | None = None,
        quantize: str | None = None,
        chat_template: str | None = None,
        activations: str | None = None,
        lora: str | os.PathLike[str] | Seq[str | os.PathLike[str]] | None = None,
        shares: str | Seq[int] | None = None,
        ffn_shares: str | Seq[int] | None = None,
        max_num_batched_tokens: int | None = None,
        kv_cache_memory_bytes: int | None = None,
        kv_cache_dtype: str | None = None,
        kv_cache_dir: str | os.PathLike[str] | None = None,
        kv_cache_disk_bytes: int | None = None,
        kv_cache_reuse: Literal["exact", "close"] = "exact",
        reasoning_parser: str = "auto",
        tool_call_parser: str = "auto",
        timeout_s: float = 600.0,
        silence_s: float = 30.0,
        verify: bool = False,
        pooling: Literal["last", "mean"] | None = None,
        bidirectional: bool = False,
        mute_ranks: bool = True,
        verbose: bool = True,
        speculate: str | None = None,
        speculate_tokens: int = 7,
        speculate_shared: bool = False,
        images: bool = True,
    ) -> "Llama":
        """Load a checkpoint in one process, or in all processes that torchrun has started.

        A ValueError, FileNotFoundError or similar error names what is wrong, on every rank, before
        weights are read. See `Llama` for what changes in the process.

        Args:
            ckpt_dir: a folder with Meta's consolidated.NN.pth and params.json, in any number of
                shards, or with Hugging Face's *.safetensors and config.json; or a GGUF file, or a
                folder that holds one; or the name of a model that `llama download` has fetched.
            tokenizer_path: a tokenizer.model, a tokenizer.json or a GGUF file. Default: the
                tokenizer in the folder of the weights, or inside their file.
            max_seq_len: the maximum number of tokens of a prompt and its answer together. Default:
                the model's own limit, or as much of it as fits the memory.
            max_batch_size: the number of sequences that run at once; further sequences wait.
                Default: 32, and 256 on CUDA.
            model_parallel_size: the number of ranks that share each layer. Default: all processes,
                or all of a pipeline stage.
            seed: the seed of calls that give none. Each call draws from this seed and from its own
                number: a second call draws new samples, and a second run of the program the same.
            pipeline_parallel_size: the number of pipeline stages that divide the layers, each with
                model_parallel_size ranks. Only hidden states cross from one stage to the next: use
                stages between machines, and between GPUs without NVLink. Several steps are in
                flight, so that all stages work at once if several sequences run.
            pipeline_layers: the number of layers of each stage, such as "10,6" or [10, 6],
                beginning with the stage that has the first layers: for stages of unequal speed or
                memory. Default: so that all stages take as long for a step that generates, with the
                lm_head.
            device: "cuda", "mps" or "cpu". Default: the first of these that is available.
            dtype: "bf16", "fp16" or "fp32", or torch's names for them. Default, and also "auto":
                bf16 where the device supports it, else fp16. On the CPU quantized matrices stay as
                their file has them, unless "bf16" is given.
            quantize: the format that matrices are quantized to while they are loaded. "int8" and
                "fp8" take half the memory of bf16, with one scale per row; "int4" takes less than a
                third, with a scale and an offset for each group of 32. The lm_head is quantized to
                int8, and the rest of the model stays in bf16. The older dtype="int8" means the
                same.
            chat_template: the file of a Jinja chat template that replaces the model's own, or
                "llama3" for Meta's format. Default: the template in the model's files, if they hold
                one.
            activations: "int8" also rounds the inputs of each layer's matrices on the CPU, with one
                scale for each group of 32, if the elements of these matrices are whole numbers, as
                they are with quantize="int8" or "int4" and in most quantized files: prompts and
                batches take a third less time. lm_head is multiplied as before. "int8_lm_head"
                rounds its inputs, too, and computes the largest logits of each row again without
                rounding. "int8_token" has one scale per token instead, which loses more. "fp8"
                rounds the inputs to e4m3, with one scale per token, for quantize="fp8" and files in
                e4m3: on NVIDIA GPUs of compute capability 8.9 and up, and more slowly on the CPU.
                "bf16" rounds none. Default: as the files ask: on the CPU "int8_token" for W8A8
                folders and "int8_lm_head" for quantized GGUF files unless the CPU has AMX; on such
                a GPU "fp8" for FP8-dynamic folders; otherwise "bf16".
            lora: LoRA or DoRA adapters in PEFT's format that are merged into the weights while
                these are loaded: the folder of one, several with commas between them, or a list,
                which are merged in order. The result is a model like any other, so that it takes no
                longer to run. Quantized weights must not keep their codes: give dtype="bf16", too.
            shares: the relative share of the model that each rank of a group holds, such as "3,2,2"
                or [3, 2, 2], in whole numbers: for GPUs with unequal memory or speed. Whole
                key-value heads, or query heads where there are more ranks, are dealt to the ranks,
                so that the shares are met as far as the heads allow. On a CPU the ranks of a
                machine divide its cores and its memory in the same way. "memory" measures the free
                memory of each rank's device, and "speed" the rate at which each reads memory; the
                result is printed. With "memory", ranks with more heads or less memory hold fewer
                feed-forward columns, so that the KV cache has more tokens. Default: equal shares.
            ffn_shares: the same for the feed-forward columns alone, in whole numbers. Default: as
                `shares`, or with shares="memory" what that measures.
            max_num_batched_tokens: the maximum number of tokens that one step computes, at least
                max_batch_size. More read prompts faster, above all with quantized weights on a GPU;
                answers alongside them wait longer for their next token, and the KV cache gets less
                memory. Default: 2,048, and 8,192 on GPUs of 80 GB and more if that leaves nine
                tenths of the KV cache, over the number of pipeline stages.
            kv_cache_memory_bytes: the size of the KV cache on each rank. Default: the memory that
                the weights leave, but no more than max_batch_size x max_seq_len tokens need.
            kv_cache_dtype: "int8" stores the KV cache in int8, on CPU or CUDA, with one scale per
                token and head: almost twice as many tokens fit. Default, and also "auto": `dtype`.
            kv_cache_dir: a folder of this user that keeps the KV pages of prompts, so that prompts
                that begin alike are not computed again after a restart or an eviction. Whoever can
                read a page can read the text. Default, and also "none": nothing is kept.
            kv_cache_disk_bytes: the size of all files in that folder, those of other models
                included; at least 128 MiB. Default: 8 GiB, or a tenth of the free disk.
            kv_cache_reuse: "exact" loads pages that the same kernels, torch and ranks have
                computed, so that answers keep their bits. "close" also loads those of others.
            reasoning_parser: "deepseek_r1" says that answers may begin with reasoning between
                <think> and </think>; "none" leaves the text of answers as the model writes it.
                Default, "auto": the model's tokens and its chat template tell.
            tool_call_parser: the format of the tool calls of a model with a chat template of its
                own: "hermes", "llama3_json", "xlam", "nemotron", "functionary", "pythonic" or
                "none". Default, "auto": as the template writes them.
            timeout_s: the maximum time that a rank waits for another rank, in seconds.
            silence_s: the time after which ranks give up another machine that is silent, and end
                the job, in seconds. TCP sends lost packets again after up to several seconds.
            verify: compare the weights with their checksums, in .pth files or checklist.chk, while
                they are loaded. A warning names files without a checksum. See `llama verify`.
            pooling: how embeddings make a vector of a text: "last" takes the hidden state of the
                last token, "mean" the mean of all. Default: as the model's files say.
            bidirectional: let each token attend to its whole text, as models need that were trained
                so and whose files do not say it (LLM2Vec). Such a model makes embeddings and
                generates nothing.
            mute_ranks: drop what ranks other than 0 print to `sys.stdout`, until `close`. Their
                stderr is not affected.
            verbose: print "Loaded in ... seconds", with a summary of the model, to stdout on rank
                0.
            speculate: "lookup" drafts the next tokens by looking up earlier occurrences of the end
                of the text, and one step verifies several drafted tokens. The folder, file or name
                of a smaller model with the same vocabulary drafts with that model, which is loaded
                in the same dtype and quantize. Answers stay the same bit for bit with the CPU
                kernels (bf16 and quantized weights). Steps do not overlap on CUDA while speculation
                is on.
            speculate_tokens: the maximum number of tokens drafted per step.
            speculate_shared: "lookup" may also use the texts of other requests that have ended. The
                speed of an answer then reveals something about them.
            images: load the parts of a vision model that read images, if the files hold them. They
                take 0.8 billion parameters for the encoder, and a quarter of the text model's for
                cross-attention.
        """
        args = BuildArgs(**locals())  # A test holds the names and defaults of both equal.
        began = time.perf_counter()
        loaded = load_model(args)
        with loaded.model.parallel.agree("the KV cache", world=True):
            llama = Llama(
                loaded.model,
                loaded.tokenizer,
                dialog_format=loaded.dialog_format,
                seed=args.seed,
                options=loaded.options,
                pooling=loaded.pooling,
                head=loaded.head,
                why_silent=loaded.why_silent,
            )
            llama.engine.explain_failure = loaded.warn_not_finite
        seconds = time.perf_counter() - began
        llama.load_seconds = seconds
        if loaded.model.parallel.global_rank == 0:
            if args.verbose:
                print(f"Loaded in {seconds:.2f} seconds: {loaded.describe(llama.engine.runner)}")
            command = loaded.pack_command() if seconds > _SLOW_LOAD_S else None
            if command:
                _LOGGER.warning("llama: to load without this wait, pack the weights: %s", command)
        elif args.mute_ranks:
            llama._muted = MutedStdout.hold()
        return llama

    def __init__(
        self,
        model: Transformer,
        tokenizer: Tokenizer,
        *,
        dialog_format: DialogFormat | None = None,
        seed: int = 1,
        options: EngineOptions | None = None,
        pooling: PoolingSettings = GENERATES,
        head: torch.Tensor | None = None,
        why_silent: str = "",
    ) -> None:
        """Make an engine for a loaded model.

        Args:
            model: the model.
            tokenizer: its tokenizer.
            dialog_format: the format of its dialogs; by default Meta's, as far as the model tells.
            seed: the seed of calls that give none.
            options: what the engine is made with; its graphs and what a step needs follow from the
                model.
            pooling: what the model does with whole prompts.
            head: its classification head, (labels, dim) float32.
            why_silent: why it cannot generate; empty if it can.
        """
        args = model.params
        self.model = model
        self.tokenizer = tokenizer
        self.formatter = ChatFormat(tokenizer)
        if dialog_format is None:
            tool_format = tool_format_of(args.rope_factor, is_guard=False)
            dialog_format = MetaFormat(tokenizer, tool_format)
        self.dialog_format = tokenizer.dialog_format = dialog_format
        tokenizer.image_id = None if args.vision is None else args.vocab_size
        self.seed = seed
        self.load_seconds = 0.0
        self._muted: MutedStdout | None = None
        options = replace(
            options or EngineOptions(),
            recorder_for=(lambda _: None) if why_silent else recorder_for,  # Graphs generate.
        )
        reserve = step_bytes(
            args, model.plan, model.norm.weight.dtype, args.max_batch_size, options.token_budget
        )
        options = replace(options, reserve=reserve)
        assembled = assemble(model, options)
        self.pages_on_disk = assembled.pages
        self.image_store = assembled.images
        self.llm_engine = LLMEngine(
            assembled.core,
            assembled.adapters,
            tokenizer,
            args.max_seq_len,
            seed,
            why_silent,
            images=None if assembled.images is None else assembled.images.sizes,
        )
        self.pooler = Pooler(
            pooling,
            tokenizer,
            self.llm_engine.prepare,
            dim=args.dim,
            n_layers=args.n_layers,
            max_seq_len=args.max_seq_len,
        )
        known_head = None
        if head is not None:
            known_head = ClassificationHead(head.float().numpy(), pooling.head or HeadSettings())
        self.classifier = Classifier(self.pooler, dialog_format, known_head)

    def __repr__(self) -> str:
        args = self.model.params
        weight = self.model.norm.weight
        shape = f"n_layers={args.n_layers}, dim={args.dim}, max_seq_len={args.max_seq_len}"
        dtype = str(weight.dtype).removeprefix("torch.")
        return f"Llama({shape}, max_batch_size={args.max_batch_size}, {dtype} on {weight.device})"

    def load_adapter(
        self, name: str, path: str | os.PathLike[str], *, replace: bool = False
    ) -> AdapterInfo:
        """Load a LoRA adapter, which requests choose with `adapter=name` from now on.

        Batches mix requests of any adapters and of the base model, whose weights stay as they are:
        they can be quantized or packed. Under torchrun every rank makes this call, or rank 0 alone
        within `lead`; each rank reads its own path.

        Args:
            name: the name.
            path: the folder that PEFT's `save_pretrained` writes, or the name of a download.
            replace: whether an adapter of the same name may be replaced.

        Raises:
            OSError: a file is missing or cannot be read.
            ValueError: the name is in use; or the adapter is damaged, does not fit the model, or
                can only be merged (`Llama.build(lora=...)`), as DoRA. Nothing has been loaded.
            AdapterInUseError: requests are using the adapter that would be replaced.
        """
        return self.llm_engine.load_adapter(
            name, os.fspath(path_like("path", path)), replace=replace
        )

    def drop_adapter(self, name: str) -> None:
        """Free an adapter that no request is using.

        Raises:
            ValueError: no adapter has this name.
            AdapterInUseError: requests are using it.
        """
        self.llm_engine.drop_adapter(name)

    @property
    def adapters(self) -> Mapping[str, AdapterInfo]:
        """The adapters that are loaded, by name."""
        return self.llm_engine.adapters

    def lead(self, work: Callable[[], _T]) -> _T | None:
        """Run work on rank 0 while the other ranks follow.

        Any thread of rank 0 may then call any method of this Llama at any time: this serves work
        with threads, asyncio, a keyboard or a socket. See `LLMEngine.lead`.
        """
        return self.llm_engine.lead(work)

    def close(self) -> None:
        """Abort unfinished requests, free the KV cache, and unmute this rank's stdout.

        Later calls are errors. The weights are freed when nothing refers to the model.
        """
        self.llm_engine.close()
        self.engine.close()
        if self._muted is not None:
            self._muted.release()
            self._muted = None

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Llama cannot be copied or pickled: build one in each process")

    def __enter__(self) -> "Llama":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def engine(self) -> EngineCore:
        """Core of the engine, with its statistics, its scheduler and its pages."""
        return self.llm_engine.core

    @property
    def _prompts(self) -> PromptReader:
        return PromptReader(self.llm_engine, self.dialog_format)

    @property
    def _predictor(self) -> Predictor:
        return Predictor(self.tokenizer, self.dialog_format)

    def generate(
        self,
        prompt_tokens: list[list[int]],
        max_gen_len: int | None = None,
        temperature: float = 0.6,
        top_p: float = 0.9,
        logprobs: bool = False,
        echo: bool = False,
        *,
        seed: int | None = None,
        adapter: str | None = None,
    ) -> tuple[list[list[int]], list[list[float]] | None]:
        """Continue each prompt until a stop token, max_gen_len tokens or max_seq_len tokens.

        Args:
            prompt_tokens: the token ids of each prompt.
            max_gen_len: maximum number of generated tokens; None generates as many as fit.
            temperature: divisor of the logits; 0 decodes greedily.
            top_p: probability mass that is sampled from.
            logprobs: also return the log-probabilities.
            echo: put the prompt before each answer.
            seed: the seed of the first prompt; those of the others are derived from it. By default
                the seeds follow from the seed of the build, the number of the call and the index of
                the prompt.
            adapter: the name of a LoRA adapter, see `load_adapter`; None for the base model.

        Returns:
            the tokens and the log-probabilities (or None), with one list per prompt. A stop token
            is left out. Log-probabilities are natural logarithms of the model's own probabilities,
            before temperature and top_p; that of the first token of an echoed prompt is 0.0.

        Raises:
            TypeError, ValueError: names the prompt or parameter at fault, before any work. It is
                also raised if the ranks of one group are given different arguments.
        """
        sampling = {"temperature": temperature, "top_p": top_p, "seed": seed}
        options = CallOptions(max_gen_len, sampling, logprobs, echo, adapter=adapter)
        ids = rows("prompt_tokens", prompt_tokens)
        outputs = self.run_prompts(self._prompts.requests(ids, options))
        tokens = [tokens_of(output, echo) for output in outputs]
        return tokens, [scores_of(output, echo) for output in outputs] if logprobs else None

    def text_completion(
        self,
        prompts: Seq[str | Seq[Any]],
        temperature: float = 0.6,
        top_p: float = 0.9,
        max_gen_len: int | None = None,
        logprobs: bool = False,
        echo: bool = False,
        *,
        seed: int | None = None,
        adapter: str | None = None,
    ) -> list[CompletionPrediction]:
        """Continue each text; for a vision model also lists of texts and images, [image, "text"].

        The arguments are those of `generate`.

        Returns:
            [{"generation": text}, ...]; with logprobs each also has "tokens" and "logprobs".
        """
        sampling = {"temperature": temperature, "top_p": top_p, "seed": seed}
        options = CallOptions(max_gen_len, sampling, logprobs, echo, adapter=adapter)
        ids = self._prompts.texts(prompts)
        outputs = self.run_prompts(self._prompts.requests(ids, options))
        return self._predictor.completions(outputs, options)

    def chat_completion(
        self,
        dialogs: _Dialogs,
        temperature: float = 0.6,
        top_p: float = 0.9,
        max_gen_len: int | None = None,
        logprobs: bool = False,
        *,
        seed: int | None = None,
        tools: Seq[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool = True,
        response_format: Mapping[str, Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        thinking_token_budget: int | None = None,
        adapter: str | None = None,
    ) -> list[ChatPrediction]:
        """Answer each dialog.

        A message may also be in OpenAI's format: with content in parts, with tool calls, or with
        the result of a call and the role "tool". For a vision model, content is a list of texts and
        images, which are {"type": "image", "image": source} or OpenAI's image_url; a source is
        bytes, a path of pathlib, a binary file, base64, a data: URL or an image of Pillow. Meta's
        RawMessage is read, too. tools, tool_choice, parallel_tool_calls and
        response_format are OpenAI's, and apply to all dialogs. With tools an answer may have
        "tool_calls": append the answer and the results to the dialog, and call again.
        chat_template_kwargs are variables of the model's chat template, and thinking_token_budget
        is the maximum number of tokens of the reasoning. The other arguments are those of
        `generate`.

        Returns:
            [{"generation": {"role": "assistant", "content": text}}, ...]; with logprobs each also
            has "tokens" and "logprobs". The reasoning of a model that reasons is in the message,
            too, as "reasoning_content".

        Raises:
            TypeError, ValueError: names the dialog and the message at fault, before any work.
        """
        chat = ChatOptions(
            tools,
            tool_choice,
            parallel_tool_calls,
            response_format,
            chat_template_kwargs,
            thinking_token_budget,
        )
        sampling = {"temperature": temperature, "top_p": top_p, "seed": seed}
        options = CallOptions(max_gen_len, sampling, logprobs, chat=chat, adapter=adapter)
        ids = self._prompts.dialogs(dialogs, chat)
        outputs = self.run_prompts(self._prompts.requests(ids, options))
        return self._predictor.chats(outputs, options)

    def stream_text(
        self,
        prompts: list[str],
        temperature: float = 0.6,
        top_p: float = 0.9,
        max_gen_len: int | None = None,
        *,
        stop: str | Seq[str] = (),
        seed: int | None = None,
        adapter: str | None = None,
    ) -> Generator[TextDelta, None, None]:
        """Stream `text_completion`.

        The texts of all deltas with the same index, joined, are the answer. No delta has half of a
        character or a part of a `stop` text, which ends an answer. Leaving the loop early aborts
        the unfinished answers. Errors are raised at the call, before any work.
        """
        sampling = {"temperature": temperature, "top_p": top_p, "seed": seed, "stop": stop}
        options = CallOptions(max_gen_len, sampling, adapter=adapter)
        requests = self._prompts.requests(self._prompts.texts(prompts), options)
        return self._predictor.deltas(self.llm_engine.stream(requests), options)

    def stream_chat(
        self,
        dialogs: _Dialogs,
        temperature: float = 0.6,
        top_p: float = 0.9,
        max_gen_len: int | None = None,
        *,
        stop: str | Seq[str] = (),
        seed: int | None = None,
        tools: Seq[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool = True,
        response_format: Mapping[str, Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        thinking_token_budget: int | None = None,
        adapter: str | None = None,
    ) -> Generator[TextDelta, None, None]:
        """Stream `chat_completion`; see also `stream_text`.

        A tool call arrives in pieces: the first one has its index, id and name, and the others have
        more of its arguments, as JSON.
        """
        chat = ChatOptions(
            tools,
            tool_choice,
            parallel_tool_calls,
            response_format,
            chat_template_kwargs,
            thinking_token_budget,
        )
        sampling = {"temperature": temperature, "top_p": top_p, "seed": seed, "stop": stop}
        options = CallOptions(max_gen_len, sampling, chat=chat, adapter=adapter)
        requests = self._prompts.requests(self._prompts.dialogs(dialogs, chat), options)
        return self._predictor.deltas(self.llm_engine.stream(requests), options)

    def beam_search(
        self,
        prompts: list[str],
        beam_width: int = 4,
        max_gen_len: int | None = None,
        *,
        length_penalty: float = 1.0,
        early_stopping: bool | str = False,
        adapter: str | None = None,
    ) -> list[list[BeamPrediction]]:
        """Return the most probable continuations of each text, best first; see `BeamParams`."""
        options = CallOptions(max_gen_len, {"temperature": 0.0}, adapter=adapter)
        requests = self._prompts.requests(self._prompts.texts(prompts), options)
        results = beam_search(
            self.llm_engine, requests, beam_width, length_penalty, early_stopping, adapter
        )
        decode = self.tokenizer.decode
        return [
            [{"generation": decode(beam.tokens), "score": beam.score} for beam in beams]
            for beams in results
        ]

    def embed(
        self,
        inputs: list[Any],
        *,
        pooling: Literal["last", "mean"] | None = None,
        normalize: bool = True,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        prompt: str | None = None,
        include_prompt: bool | None = None,
        truncate: int | None = None,
        adapter: str | None = None,
    ) -> list[np.ndarray]:
        """Return the vector of each input.

        The vectors of a model that was trained for embeddings can be compared by their dot product.
        Those of a chat model are poor embeddings.

        Args:
            inputs: texts or lists of token ids.
            pooling: "last" for the hidden state of the last token, "mean" for the mean of all
                tokens. By default the model's files say it; on a chat model it must be given.
            normalize: make the length of each vector 1.
            dimensions: keep so many leading elements, for models that were trained for it.
            prompt_name: the name of a text in the model's files that is put before each input,
                such as "query". By default the files say it.
            prompt: a text that is put before each input.
            include_prompt: whether a mean has the states of that text. By default the files say it.
            truncate: cut longer inputs to so many leading tokens.
            adapter: the name of a LoRA adapter, see `load_adapter`; None for the base model.

        Returns:
            one array of float32 per input, with `dimensions` elements, else as many as the model's
            hidden states have.

        Raises:
            TypeError, ValueError: names the input or argument at fault, before any work.
        """
        options = EmbeddingOptions(
            pooling, normalize, dimensions, prompt_name, prompt, include_prompt, truncate
        )
        # Checked where an error of one rank becomes an error of every rank.
        requests = self._pooled(check_inputs("inputs", inputs), options, adapter)
        return [options.vector(output) for output in self.run_prompts(requests)]

    def _pooled(
        self, inputs: Iterable[Any], options: EmbeddingOptions, adapter: str | None
    ) -> Iterator[Request]:
        yield from self.pooler.requests(inputs, self.pooler.checked(options), adapter=adapter)

    def classify(self, inputs: list[Any], *, truncate: int | None = None) -> list[Classification]:
        """Return the labels of each input, by the model's classification head.

        Args:
            inputs: texts, lists of token ids, or conversations, which are lists of messages. The
                reward of a conversation by a reward model is `logits[0]`.
            truncate: cut longer inputs to so many leading tokens.

        Raises:
            TypeError, ValueError: the model has no head, or an input is wrong, before any work.
        """
        request = self.classifier.request
        requests = (
            request(item, truncate, index=i)
            for i, item in enumerate(check_inputs("inputs", inputs))
        )
        outputs = self.run_prompts(requests)
        return [self.classifier.head().classify(output) for output in outputs]

    def score(
        self, queries: str | list[str], documents: list[str], *, truncate: int | None = None
    ) -> list[float]:
        """Return how relevant each document is to a query, or to the query at its index.

        A model with a head of one label reads query and document together; its score is a
        probability, or the logit where the model's files say so. Of a model for embeddings it is
        the cosine of the two vectors, with the prompts that the files have for queries and
        documents.

        Args:
            queries: one query for all documents, or one for each.
            documents: the documents.
            truncate: cut longer inputs to so many leading tokens.

        Raises:
            TypeError, ValueError: the model can do neither, or a text is wrong, before any work.
        """
        given = [queries] if isinstance(queries, str) else list(queries)
        return self.score_outputs(given, documents, truncate)[0]

    def score_outputs(
        self, queries: Seq[str], documents: Seq[str], truncate: int | None = None
    ) -> tuple[list[float], list[RequestOutput]]:
        """Return the result of `score`, and the outputs of all inputs that were run for it."""
        scorers: list[PairScorer] = []

        def requests() -> Iterator[Request]:
            # Checked where an error of one rank becomes an error of every rank.
            scorer = self.classifier.pair_scorer(queries, documents, truncate)
            scorers.append(scorer)
            for i, item in enumerate(scorer.inputs):
                yield scorer.request(item, index=i)

        outputs = self.run_prompts(requests())
        return scorers[0].scores(outputs), outputs

    def run_prompts(self, requests: Iterable[Request]) -> list[RequestOutput]:
        """Run requests, and return the last output of each.

        Raises:
            ValueError: A logit or a hidden state is NaN or infinite.
        """
        return [checked(output) for output in self.llm_engine.run(requests)]

    def rerank(
        self,
        query: str,
        documents: list[str],
        *,
        top_n: int | None = None,
        truncate: int | None = None,
    ) -> list[tuple[int, float]]:
        """Return the indices of documents with their scores, the most relevant first.

        Args:
            query: the query.
            documents: the documents.
            top_n: the number of results; None for all.
            truncate: cut longer inputs to so many leading tokens.

        Raises:
            TypeError, ValueError: as for `score`.
        """
        count = whole_number("top_n", top_n, 1, 2**31 - 1, optional=True)
        scores = self.score(query, documents, truncate=truncate)
        return [(i, scores[i]) for i in ranked(scores, count)]

    def hidden_states(
        self,
        prompts: list[Any],
        layers: Seq[int | str] = (-1,),
        tokens: Literal["all", "last"] = "all",
        *,
        adapter: str | None = None,
    ) -> list[dict[int | str, torch.Tensor]]:
        """Return hidden states of each prompt, with the bits that generation computes.

        Args:
            prompts: texts or lists of token ids.
            layers: 0 is the embedding of the tokens, i the residual stream after i layers, -1 the
                one after the last layer, before the norm, and "norm" the normalised one, from
                which logits are computed. transformers calls this one hidden_states[-1].
            tokens: "all", or "last" for the last token of each prompt alone.
            adapter: the name of a LoRA adapter, see `load_adapter`; None for the base model.

        Returns:
            for each prompt a tensor (tokens, dim) per layer, on the CPU in the model's dtype.

        Raises:
            TypeError, ValueError: names the prompt or argument at fault, before any work.
        """
        checked = check_inputs("prompts", prompts)
        requests = self.pooler.captures(checked, layers, tokens, adapter=adapter)
        return [self.pooler.states(output, layers) for output in self.run_prompts(requests)]
