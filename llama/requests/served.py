"""The model as a server sees it, and its description for a process that has not loaded it.

In: a loaded `Llama`, or its description. Out: a `ServedModel`: the tokenizer, the formats and the
requests of the model, the same ones on either way. A process that makes it of a description needs
no torch.
"""

import base64
import hashlib
import json
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from llama.checkpoint.pooling import HeadSettings, PoolingSettings
from llama.options.image_sizes import ImageSizes
from llama.prompts.dialog_format import DialogFormat, MetaFormat
from llama.prompts.format_source import FormatSource
from llama.requests.adapters import AdapterInfo, AdapterNames
from llama.requests.book import RequestBook
from llama.requests.formats import RemoteFormats
from llama.requests.pooling import Pooler
from llama.requests.port import Port
from llama.requests.scoring import ClassificationHead, Classifier
from llama.tokenizer import Tokenizer, TokenizerSource

_FLOAT_NAMES = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}


@dataclass(frozen=True)
class ModelCard:
    """Sizes and names of a model.

    Attributes:
        max_seq_len: The largest number of tokens of a sequence.
        max_batch_size: The number of sequences that run at once.
        weight_format: The format of the weights, such as INT8 or BF16.
        num_bytes: The bytes of the weights in memory, on all ranks together.
        is_on_gpu: Whether they are on GPUs.
        why_silent: Why the model cannot generate; empty if it can.
        images: The sizes of images; None if the model reads text alone.

    The other fields are those of `llama.model.args.ModelArgs`.
    """

    max_seq_len: int
    max_batch_size: int
    vocab_size: int
    dim: int
    n_layers: int
    n_heads: int
    kv_heads: int
    head_dim: int
    ffn_dim: int
    norm_eps: float
    rope_theta: float
    tied_output: bool
    weight_format: str
    num_bytes: int
    is_on_gpu: bool
    why_silent: str
    images: ImageSizes | None = None

    @classmethod
    def of(cls, llama: Any) -> "ModelCard":
        """Return the card of a `Llama`."""
        from llama.checkpoint.table import part_of  # The import of torch is for its process alone.
        from llama.common.device import dtype_name

        model = llama.model
        params = model.params
        weight = model.norm.weight
        own_bytes = sum(each.nbytes for each in [*model.parameters(), *model.buffers()])
        name = model.quantization or _FLOAT_NAMES[dtype_name(weight.dtype)]
        names = cls.__dataclass_fields__.keys()
        sizes = {x: getattr(params, x) for x in names if hasattr(params, x)}
        return cls(
            **sizes,
            weight_format=name.upper(),
            num_bytes=int(own_bytes / part_of(params, model.parallel.placement)),
            is_on_gpu=weight.device.type == "cuda",
            why_silent=llama.llm_engine.why_silent,
            images=llama.llm_engine.images,
        )


@dataclass(frozen=True)
class _Description:
    """The parts that another process makes a `ServedModel` of.

    Attributes:
        card: The card.
        tokenizer: The source of the tokenizer.
        dialog_format: The source of the format of dialogs.
        pooling: What the model does with whole prompts.
        head: The classification head, (labels, E) float32 in base64; empty if there is none.
        digest: A hash of the vocabulary and the template, which the files may have lost since.
    """

    card: ModelCard
    tokenizer: TokenizerSource
    dialog_format: FormatSource
    pooling: PoolingSettings
    head: str
    digest: str


_DESCRIPTION = TypeAdapter(_Description)


@dataclass(frozen=True)
class ServedModel:
    """A model as the routes of a server see it.

    Attributes:
        card: Its sizes and names.
        book: Its requests.
        tokenizer: Its tokenizer.
        dialog_format: The format of its dialogs.
        pooler: Its requests for embeddings.
        classifier: Its labels and scores.
    """

    card: ModelCard
    book: RequestBook
    tokenizer: Tokenizer
    dialog_format: DialogFormat
    pooler: Pooler
    classifier: Classifier

    @property
    def adapters(self) -> AdapterNames:
        """The adapters that requests can choose."""
        return self.book.adapters

    def adapter_table(self) -> list[dict[str, Any]]:
        """Return the adapters that are loaded, for another process."""
        infos = self.adapters.values()
        return [{**asdict(info), "digest": info.digest.hex()} for info in infos]

    def set_adapters(self, table: list[dict[str, Any]]) -> None:
        """Make the adapters of this process those of the engine's table."""
        infos = [AdapterInfo(**{**row, "digest": bytes.fromhex(row["digest"])}) for row in table]
        for name in set(self.adapters) - {info.name for info in infos}:
            self.adapters.remove(name)
        for info in infos:
            self.adapters.set(info)

    @classmethod
    def of(cls, llama: Any) -> "ServedModel":
        """Return a `Llama` of this process as the routes see it."""
        return cls(
            ModelCard.of(llama),
            llama.llm_engine,
            llama.tokenizer,
            llama.dialog_format,
            llama.pooler,
            llama.classifier,
        )

    def describe(self) -> str:
        """Return the description of the model as JSON.

        Raises:
            ValueError: The model has a tokenizer or a format that was not made of files.
        """
        source = self.dialog_format.source
        if source is None and isinstance(self.dialog_format, MetaFormat):
            source = FormatSource(self.dialog_format.tool_format, reasoning_parser="none")
        if not isinstance(source, FormatSource):
            raise ValueError(
                "the format of dialogs was made by a program: no process can be sent it"
            )
        head = self.classifier.known_head
        description = _Description(
            self.card,
            self.tokenizer.source,
            source,
            replace(self.pooler.settings, prompts=dict(self.pooler.settings.prompts)),
            "" if head is None else base64.b64encode(head.weight.tobytes()).decode(),
            _digest(self.tokenizer, self.dialog_format),
        )
        return json.dumps(_DESCRIPTION.dump_python(description, mode="json"))

    @classmethod
    def described(cls, text: str, port: Port) -> "ServedModel":
        """Return the model of a description, whose sequences a port computes.

        Raises:
            OSError, ValueError: Its files have changed since.
        """
        description = _DESCRIPTION.validate_json(text)
        card = description.card
        tokenizer = description.tokenizer.make()
        if card.images is not None:
            tokenizer.image_id = card.vocab_size
        dialog_format = description.dialog_format.make(tokenizer)
        tokenizer.dialog_format = dialog_format
        if _digest(tokenizer, dialog_format) != description.digest:
            raise ValueError("the files of the tokenizer or of the chat template have changed")
        book = RequestBook(
            port, tokenizer, RemoteFormats(), card.max_seq_len, card.why_silent, card.images
        )
        pooling = description.pooling
        pooler = Pooler(
            pooling,
            tokenizer,
            book.prepare,
            dim=card.dim,
            n_layers=card.n_layers,
            max_seq_len=card.max_seq_len,
        )
        head = None
        if description.head:
            weight = np.frombuffer(base64.b64decode(description.head), np.float32)
            settings = pooling.head or HeadSettings()
            head = ClassificationHead(weight.reshape(-1, card.dim), settings)
        classifier = Classifier(pooler, dialog_format, head)
        return cls(card, book, tokenizer, dialog_format, pooler, classifier)


def _digest(tokenizer: Tokenizer, dialog_format: DialogFormat) -> str:
    """Return a hash of what texts become tokens by."""
    parts = [
        sorted(tokenizer.special_tokens.items()),
        sorted(tokenizer.stop_tokens),
        tokenizer.n_words,
        dialog_format.jinja_template(),
        dialog_format.describe(),
    ]
    found = hashlib.sha256(json.dumps(parts).encode())
    for token, number in tokenizer.ranks.items():
        found.update(b"%d %b" % (number, token))
    return found.hexdigest()
