"""Embeddings and hidden states of whole prompts: texts or ids in, vectors out.

In: what a caller asks for, and what the model's files say (`PoolingSettings`). Out: requests for
the engine, which end with their prompts, and the vectors of their outputs. A value that cannot be
used is a TypeError or a ValueError that names it, before any work.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from llama.checkpoint.pooling import PoolingKind, PoolingSettings, TokenTemplate
from llama.common.checks import FieldError, FieldTypeError, brief, index_of, whole_number
from llama.engine.request import Capture, Pooling
from llama.requests.prepare import not_ids
from llama.requests.request import Request, RequestOutput
from llama.sampling_params import SamplingParams
from llama.tokenizer import Tokenizer

if TYPE_CHECKING:
    from torch import Tensor

NO_ANSWER = SamplingParams(max_tokens=0)
NORM = "norm"  # the name of the normalised states, from which logits are computed
_KINDS: tuple[PoolingKind, ...] = ("last", "mean")


@dataclass(frozen=True)
class EmbeddingOptions:
    """How texts become vectors; None stands for what the model's files say.

    Attributes:
        pooling: "last" for the hidden state of the last token, "mean" for the mean of all.
        normalize: Whether vectors get the length 1.
        dimensions: The number of leading elements that are kept, for models that were trained so
            (Matryoshka representation learning, Kusupati et al., 2022). The length is made 1 after
            the cut.
        prompt_name: The name of a text of the model's files that is put before each input.
        prompt: A text that is put before each input.
        include_prompt: Whether a mean has the states of that text.
        truncate: The number of leading tokens that an input is cut to; None: what the model's files
            say, else a longer input than the context is an error.
    """

    pooling: PoolingKind | None = None
    normalize: bool = True
    dimensions: int | None = None
    prompt_name: str | None = None
    prompt: str | None = None
    include_prompt: bool | None = None
    truncate: int | None = None

    def vector(self, output: RequestOutput) -> np.ndarray:
        """Return the vector of a finished output: (dimensions) float32."""
        pooled = output.pooled
        assert pooled is not None
        vector: np.ndarray = pooled[: self.dimensions]
        if self.normalize:
            length = float(np.linalg.norm(vector.astype(np.float64)))
            vector = (vector / max(length, 1e-12)).astype(np.float32)
        return vector


@dataclass(frozen=True)
class Pooler:
    """The requests for embeddings and hidden states of one model.

    Attributes:
        settings: What the model's files say.
        tokenizer: The tokenizer of the model.
        prepare: Makes requests, see `Preparer.prepare`.
        dim: The number of elements of a hidden state.
        n_layers: The number of layers.
        max_seq_len: The largest number of tokens of a prompt.
    """

    settings: PoolingSettings
    tokenizer: Tokenizer
    prepare: Callable[..., Request]
    dim: int
    n_layers: int
    max_seq_len: int

    def checked(self, options: EmbeddingOptions) -> EmbeddingOptions:
        """Return options of which none is left to the model's files.

        Raises:
            FieldTypeError: A value has a wrong type.
            FieldError: A value cannot be used, or the files do not say what the caller leaves out.
        """
        settings = self.settings
        kind = options.pooling or settings.kind
        if kind is None:
            raise FieldError(
                "pooling",
                "pooling is not given, and the files of this model do not say how a text becomes a "
                "vector, as it is made to generate: give pooling='mean' or 'last' (or --pooling), "
                "or use a model for embeddings",
            )
        if kind not in _KINDS and kind != settings.kind:
            names = " or ".join(map(repr, _KINDS))
            raise FieldError("pooling", f"pooling={brief(kind)} must be {names}")
        dimensions = whole_number("dimensions", options.dimensions, 1, self.dim, optional=True)
        truncate = whole_number("truncate", options.truncate, 1, 2**31 - 1, optional=True)
        include = options.include_prompt
        return replace(
            options,
            truncate=settings.max_tokens if truncate is None else truncate,
            pooling=kind,
            dimensions=dimensions,
            prompt=self._prompt(options),
            include_prompt=settings.include_prompt if include is None else include,
        )

    def _prompt(self, options: EmbeddingOptions) -> str:
        """Return the text that is put before each input."""
        if options.prompt is not None:
            if not isinstance(options.prompt, str):
                raise FieldTypeError("prompt", f"prompt={brief(options.prompt)} must be a text")
            if options.prompt_name is not None:
                raise FieldError("prompt", "prompt and prompt_name are both given: leave out one")
            return options.prompt
        name = options.prompt_name
        prompts = self.settings.prompts
        if name is None:
            default = self.settings.default_prompt
            return "" if default is None else prompts[default]
        if not isinstance(name, str) or name not in prompts:
            known = ", ".join(map(repr, prompts)) or "none"
            raise FieldError(
                "prompt_name", f"prompt_name={brief(name)}: this model has these prompts: {known}"
            )
        return prompts[name]

    def requests(
        self, inputs: Iterable[Any], options: EmbeddingOptions, **more: Any
    ) -> Iterator[Request]:
        """Yield a request for each input, a text or a list of token ids.

        Args:
            inputs: The inputs.
            options: The result of `checked`.
            **more: Further arguments of `Preparer.prepare`.
        """
        for i, item in enumerate(inputs):
            yield self.request(item, options, index=i, **more)

    def request(
        self, item: Any, options: EmbeddingOptions, *, index: int = 0, **more: Any
    ) -> Request:
        """Return the request for one input.

        Args:
            item: A text or a list of token ids.
            options: The result of `checked`.
            index: The position of the input in the caller's list.
            **more: Further arguments of `Preparer.prepare`.
        """
        assert options.pooling is not None
        ids = item
        skip = 0
        if isinstance(item, str):
            ids = self.encode(f"{options.prompt}{item}", options.truncate)
            if options.prompt and options.pooling == "mean" and not options.include_prompt:
                template = self._template(1)
                skip = template.index(0) + len(self._ids(options.prompt, options.truncate))
        elif options.truncate is not None and isinstance(ids, list):
            ids = ids[: options.truncate]
        reads = Pooling(options.pooling, skip)
        return self.prepare("", ids, NO_ANSWER, index=index, reads=reads, **more)

    def encode(self, text: str, max_len: int | None = None) -> list[int]:
        """Return the ids of a text, with the special tokens that the model expects around it.

        Args:
            text: The text.
            max_len: The number of tokens that it is cut to, special tokens included.
        """
        return self._joined(self._template(1), [self._ids(text, max_len)], max_len)

    def pair_encoder(self, max_len: int | None = None) -> Callable[[str, str], list[int]]:
        """Return a function from a query and a document to their ids together.

        The ids of a query that comes again in the next pair are kept, where they do not depend on
        the document.

        Args:
            max_len: The number of tokens that a pair is cut to, the document first.
        """
        template = self.settings.pair_template
        encode = partial(self._ids, max_len=max_len)
        query_ids = lru_cache(1)(encode)

        def in_template(query: str, document: str) -> list[int]:
            assert template is not None
            before, _, after = template.partition("{query}")
            middle, _, end = after.partition("{document}")
            return self.encode(f"{before}{query}{middle}{document}{end}", max_len)

        def joined(query: str, document: str) -> list[int]:
            return self._joined(self._template(2), [query_ids(query), encode(document)], max_len)

        return joined if template is None else in_template

    def _ids(self, text: str, max_len: int | None = None) -> list[int]:
        if self.settings.lowers:
            text = text.lower()
        if max_len is not None:
            return self.tokenizer.encode_start(text, max_len)
        return self.tokenizer.encode(text, bos=False, eos=False)

    def _template(self, num_texts: int) -> TokenTemplate:
        """Return the special tokens around one or two texts."""
        given = self.settings.text if num_texts == 1 else self.settings.pair
        if given is not None:
            return given
        names = {token: name for name, token in self.tokenizer.special_tokens.items()}
        bos = names[self.tokenizer.bos_id]
        return (bos, 0) if num_texts == 1 else (bos, 0, bos, 1)

    def _joined(
        self, template: TokenTemplate, texts: list[list[int]], max_len: int | None
    ) -> list[int]:
        """Return the ids of texts within a template; the last text is cut first."""
        if max_len is not None:
            free = max_len - sum(isinstance(part, str) for part in template)
            for i, text in enumerate(texts):
                texts[i] = text[: max(free, 0)]
                free -= len(texts[i])
        ids: list[int] = []
        for part in template:
            if isinstance(part, int):
                ids += texts[part]
            elif part in self.tokenizer.special_tokens:
                ids.append(self.tokenizer.special_tokens[part])
            else:
                raise ValueError(f"the tokenizer has no token {brief(part)}, which texts need")
        return ids

    def captures(
        self, prompts: Iterable[Any], layers: Iterable[Any], tokens: object, **more: Any
    ) -> Iterator[Request]:
        """Yield a request for the hidden states of each prompt, a text or a list of token ids.

        Args:
            prompts: The prompts.
            layers: The layers, see `Llama.hidden_states`.
            tokens: "all" or "last".
            **more: Further arguments of `Preparer.prepare`.
        """
        if tokens not in ("all", "last"):
            raise FieldError("tokens", f"tokens={brief(tokens)} must be 'all' or 'last'")
        states = tuple(dict.fromkeys(map(self.number_of, layers)))
        if not states:
            raise FieldError("layers", "layers is empty: give at least one")
        reads = Capture(states, tokens == "last")
        for i, prompt in enumerate(prompts):
            ids = self.encode(prompt) if isinstance(prompt, str) else prompt
            yield self.prepare("", ids, NO_ANSWER, index=i, reads=reads, **more)

    def number_of(self, layer: object) -> int:
        """Return the engine's number of a hidden state, see `Llama.hidden_states`."""
        if layer == NORM:
            return self.n_layers + 1
        number = index_of(layer)
        if number is None or not -self.n_layers - 1 <= number <= self.n_layers:
            raise FieldError(
                "layers",
                f"layers has {brief(layer)}: give numbers from {-self.n_layers - 1} to "
                f"{self.n_layers}, of which 0 is the embedding, or {NORM!r}",
            )
        return number % (self.n_layers + 1)

    def states(self, output: RequestOutput, layers: Sequence[Any]) -> "dict[Any, Tensor]":
        """Return the hidden states of an output, (T, E) for each layer as the caller named it."""
        import torch  # The processes that make embeddings for a server have none.

        parts = output.captured
        return {layer: torch.cat(parts[self.number_of(layer)]) for layer in layers}


def check_inputs(name: str, inputs: object) -> Iterator[Any]:
    """Yield the texts or lists of token ids of a list.

    Raises:
        TypeError: It is no list, or has something else.
    """
    if not isinstance(inputs, list | tuple) and not hasattr(inputs, "tolist"):
        text = f"{name} must be a list, got {type(inputs).__name__}: wrap it in [ ]"
        raise FieldTypeError(name, text)
    items: Any = inputs
    for i, item in enumerate(items):
        if not isinstance(item, str | list | tuple) and not hasattr(item, "tolist"):
            raise not_ids(f"{name}[{i}]", item)
        yield item
