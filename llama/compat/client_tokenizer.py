"""The calls that clients make on a tokenizer of transformers.

In: texts, messages, ids. Out: ids and texts by Llama 3's tokenizer. Special tokens that stand in a
text count as such, as in transformers: clients render chat templates to text.
"""

from collections.abc import Generator, Mapping, Sequence
from typing import Any

from llama.prompts import encode_chat
from llama.tokenizer import BatchEncoding, Tokenizer


class ClientTokenizer:
    """A `Tokenizer` with transformers' `encode` and `apply_chat_template`; the rest is its own.

    It can be awaited, and gives itself: `AsyncLLMEngine.get_tokenizer` was a coroutine in vLLM, and
    is a plain method today.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.vocab_size = tokenizer.n_words
        self.all_special_ids = sorted(tokenizer.special_tokens.values())

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text, with one begin_of_text before them, whether the text had it or not."""
        if add_special_tokens:
            return self._tokenizer(text).input_ids
        return self._tokenizer.encode(text, bos=False, eos=False, allowed_special="all")

    def __call__(self, text: str, add_special_tokens: bool = True) -> BatchEncoding:
        return BatchEncoding(self.encode(text, add_special_tokens))

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
    ) -> str | list[int]:
        """The ids, or with tokenize=False the text, of a dialog; see `encode_chat`.

        ValueError for the text of a dialog in which a special token is named: as a prompt, it would
        be another dialog.
        """
        ids = encode_chat(
            self._tokenizer,
            conversation,
            tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        if tokenize:
            return ids
        text = self._tokenizer.decode(ids)
        if self.encode(text) != ids:
            raise ValueError(
                "a message holds the name of a special token, which the text cannot tell from the "
                "token: leave it out, or use tokenize=True"
            )
        return text

    def __len__(self) -> int:
        return self.vocab_size

    def __getattr__(self, name: str) -> Any:
        if name == "_tokenizer":  # before __init__, as copy looks it up
            raise AttributeError(name)
        return getattr(self._tokenizer, name)

    def __await__(self) -> Generator[None, None, "ClientTokenizer"]:
        return self
        yield
