"""The calls that clients make on a tokenizer of transformers: texts, messages, ids, and back.

A special token that is written in a text counts as that token, because clients render chat
templates to text.
"""

from collections.abc import Generator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from llama.prompts.dialog_format import DialogFormat, MetaFormat, PromptOptions
from llama.tokenizer import IMAGE, Tokenizer


class ClientTokenizer:
    """A `Tokenizer` that has the names of transformers in addition to its own.

    It can be awaited, with itself as the result: `AsyncLLMEngine.get_tokenizer` was a coroutine in
    vLLM and is a plain method today.

    Attributes:
        wrapped: The tokenizer.
        dialog_format: The format of `apply_chat_template`: by default that of the tokenizer's
            model. Where that has no tools, as Llama 3.0, or is unknown, it is that of Llama 3.1.
        pad_token: Unused here; a host may set it.
    """

    def __init__(self, tokenizer: Tokenizer, dialog_format: DialogFormat | None = None) -> None:
        """Wrap a tokenizer."""
        self.wrapped = tokenizer
        known = dialog_format or tokenizer.dialog_format
        if not isinstance(known, DialogFormat) or (
            isinstance(known, MetaFormat) and not known.has_tools
        ):
            known = MetaFormat(tokenizer)
        self.dialog_format = known
        self.vocab_size = tokenizer.n_words
        added = tokenizer.added_tokens.values()
        self.all_special_ids = sorted(token.id for token in added if token.special)
        self.bos_token_id = tokenizer.bos_id
        self.bos_token = tokenizer.decode(tokenizer.bos_id)
        self.eos_token_id = tokenizer.eos_id
        self.eos_token = tokenizer.decode(tokenizer.eos_id)
        self.pad_token: str | None = None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text.

        Args:
            text: The text.
            add_special_tokens: Whether the ids begin with begin_of_text. It is there once, even if
                the text begins with it.
        """
        if add_special_tokens:
            return self.wrapped.encode_rendered(text)
        return self.wrapped.encode(text, bos=False, eos=False, allowed_special="all")

    def encode_images(self, text: str, mark: str = IMAGE) -> list[int]:
        """Return the ids of a text, in which each `mark` is an image if the model reads images."""
        if self.wrapped.image_id is None:
            return self.encode(text)
        first, *others = text.split(mark)
        ids = self.encode(first)
        for part in others:  # each after an image
            ids += [self.wrapped.image_id, *self.encode(part, add_special_tokens=False)]
        return ids

    def __call__(
        self, text: str | list[str] | tuple[str, ...], add_special_tokens: bool = True
    ) -> SimpleNamespace:
        """Return an object whose `input_ids` has the ids of a text, or of each text of a list."""
        if isinstance(text, str):
            return SimpleNamespace(input_ids=self.encode(text, add_special_tokens))
        return SimpleNamespace(input_ids=[self.encode(each, add_special_tokens) for each in text])

    def num_tokens(self, text: str) -> int:
        """Return the number of ids of a text, with begin_of_text."""
        return len(self.encode(text))

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        **template_kwargs: Any,
    ) -> Any:
        """Return the ids of a dialog, or with tokenize=False its text.

        The text begins with begin_of_text only where the template writes it.

        Further arguments are variables of the chat template.

        Raises:
            ValueError: The template has no such variable. Or the text is asked for, and a message
                names a special token: as a prompt, that text would be another dialog.
        """
        options = PromptOptions(
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **template_options(template_kwargs),
        )
        ids = self.dialog_format.encode(conversation, tools, options)
        if tokenize:
            return ids
        text = self.wrapped.decode(ids)
        if self.encode(text, add_special_tokens=False) == ids:
            return text
        raise ValueError(
            "a message holds the name of a special token, which the text cannot tell from the "
            "token: leave it out, or use tokenize=True"
        )

    def __len__(self) -> int:
        return self.vocab_size

    def __getattr__(self, name: str) -> Any:
        if name == "wrapped":  # copy looks it up before __init__ has run.
            raise AttributeError(name)
        return getattr(self.wrapped, name)

    def __await__(self) -> Generator[None, None, "ClientTokenizer"]:
        return self
        yield  # This makes the method a generator, as `await` requires.


def template_options(template_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `PromptOptions` for variables of a chat template.

    Clients give enable_thinking to every model, so a template need not have it.
    """
    others = dict(template_kwargs)
    return {"enable_thinking": others.pop("enable_thinking", None), "template_kwargs": others}
