"""The calls that clients make on a tokenizer of transformers: texts, messages, ids, and back.

Special tokens that stand in a text count as such: clients render chat templates to text.
"""

from collections.abc import Generator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from llama.prompts import ToolFormat, encode_chat
from llama.tokenizer import Tokenizer


class ClientTokenizer:
    """A `Tokenizer` with transformers' names beside its own. It can be awaited, and gives itself:
    `AsyncLLMEngine.get_tokenizer` was a coroutine in vLLM, and is a plain method today."""

    def __init__(
        self, tokenizer: Tokenizer, tool_format: ToolFormat = ToolFormat.LLAMA_3_1
    ) -> None:
        self.wrapped, self.tool_format = tokenizer, tool_format
        self.vocab_size = tokenizer.n_words
        self.all_special_ids = sorted(tokenizer.special_tokens.values())
        self.bos_token_id, self.bos_token = tokenizer.bos_id, tokenizer.decode(tokenizer.bos_id)
        self.eos_token_id, self.eos_token = tokenizer.eos_id, tokenizer.decode(tokenizer.eos_id)
        self.pad_token: str | None = None  # a host may set it

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text, with one begin_of_text before them, whether the text had it or not."""
        ids = self.wrapped.encode(text, bos=False, eos=False, allowed_special="all")
        has_begin = ids[:1] == [self.bos_token_id]
        return ids if has_begin or not add_special_tokens else [self.bos_token_id, *ids]

    def __call__(
        self, text: str | list[str] | tuple[str, ...], add_special_tokens: bool = True
    ) -> SimpleNamespace:
        """One text, or each of a list: `input_ids` of what is returned has its ids, or theirs."""
        texts = [text] if isinstance(text, str) else text
        ids = [self.encode(each, add_special_tokens) for each in texts]
        return SimpleNamespace(input_ids=ids[0] if isinstance(text, str) else ids)

    def num_tokens(self, text: str) -> int:
        return len(self.encode(text))

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
    ) -> Any:
        """The ids, or with tokenize=False the text, of a dialog; see `encode_chat`. ValueError for
        the text where a special token is named in it: as a prompt, it would be another dialog."""
        ids = encode_chat(
            self.wrapped,
            conversation,
            tools,
            tool_format=self.tool_format,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        if tokenize:
            return ids
        text = self.wrapped.decode(ids)
        if self.encode(text) == ids:
            return text
        raise ValueError(
            "a message holds the name of a special token, which the text cannot tell from the "
            "token: leave it out, or use tokenize=True"
        )

    def __len__(self) -> int:
        return self.vocab_size

    def __getattr__(self, name: str) -> Any:
        if name == "wrapped":  # before __init__, as copy looks it up
            raise AttributeError(name)
        return getattr(self.wrapped, name)

    def __await__(self) -> Generator[None, None, "ClientTokenizer"]:
        return self
        yield
