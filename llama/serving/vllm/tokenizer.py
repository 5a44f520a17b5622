"""`get_tokenizer()` of vLLM: the calls that clients make on a tokenizer of transformers.

In: texts, messages, ids. Out: ids and texts by Llama 3's tokenizer. Special tokens that stand in a
text count as such, as in transformers: clients render chat templates to text.
"""

from collections.abc import Generator, Mapping, Sequence
from typing import Any

from llama.serving.tools import encode_chat
from llama.tokenizer import Tokenizer


class ClientTokenizer:
    """A `Tokenizer` under transformers' names; whatever is not here is the tokenizer's own.

    It can be awaited, and gives itself: `AsyncLLMEngine.get_tokenizer` was a coroutine before
    vLLM 0.11.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.bos_token_id = tokenizer.bos_id
        stop = tokenizer.eos_id if tokenizer.eot_id is None else tokenizer.eot_id
        self.eos_token_id = stop  # as in the tokenizers of Instruct models
        self.bos_token, self.eos_token = (
            tokenizer.decode([tokenizer.bos_id]),
            tokenizer.decode([stop]),
        )
        self.vocab_size = tokenizer.n_words
        self.all_special_ids = sorted(tokenizer.special_tokens.values())

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text, with one begin_of_text before them, whether the text had it or not."""
        ids = self._tokenizer.encode(text, bos=False, eos=False, allowed_special="all")
        if not add_special_tokens or ids[:1] == [self.bos_token_id]:
            return ids
        return [self.bos_token_id, *ids]

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        ids = self.encode(text, add_special_tokens)
        return {"input_ids": ids, "attention_mask": [1] * len(ids)}

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        skipped = frozenset(self.all_special_ids if skip_special_tokens else ())
        return self._tokenizer.decode([token for token in token_ids if token not in skipped])

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
    ) -> str | list[int]:
        """The ids, or with tokenize=False the text, of a dialog; see `encode_chat`."""
        ids = encode_chat(
            self._tokenizer,
            conversation,
            tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        return ids if tokenize else self._tokenizer.decode(ids)

    def __len__(self) -> int:
        return self.vocab_size

    def __getattr__(self, name: str) -> Any:
        if name == "_tokenizer":  # before __init__, as copy looks it up
            raise AttributeError(name)
        return getattr(self._tokenizer, name)

    def __await__(self) -> Generator[None, None, "ClientTokenizer"]:
        return self
        yield
