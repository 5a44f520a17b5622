"""A server whose model reasons: a tiny random model with the tokens of DeepSeek-R1-Distill-Llama.

The checkpoint, the engine and the app are real; only the sampled ids come from a script.
"""

from typing import Any

import openai

from helpers.scripted import ApiProcesses, ScriptedServer
from llama import Llama
from llama.prompts import ToolFormat
from llama.prompts.dialog_format import MetaFormat, PromptOptions
from llama.prompts.format_source import FormatSource
from llama.prompts.reasoning import find_marks
from llama.prompts.template import jinja_template

QUESTION: Any = [{"role": "user", "content": "How is it?"}]
OPENING = '{% if add_generation_prompt %}{{ "<think>\\n" }}{% endif %}'
_DEFAULT = PromptOptions()


class ReasoningFormat(MetaFormat):
    """Meta's format, whose prompts end with the start mark unless `is_open` is false.

    Attributes:
        is_open: whether prompts open the reasoning.
        seen: the options of the latest prompt.
        messages: its messages.
    """

    is_open = True
    seen = PromptOptions()
    messages: Any = None

    def encode(self, messages: Any, tools: Any = None, options: Any = _DEFAULT) -> list[int]:
        self.seen = options
        self.messages = messages
        ids = super().encode(messages, tools, options)
        if not self.is_open:
            return ids
        text = "<think>\n"
        return ids + self.tokenizer.encode(text, bos=False, eos=False, allowed_special="all")


class ReasoningServer(ScriptedServer):
    """A server whose model writes texts, in which <think> and </think> are tokens.

    API processes have the same prompts from a template, as the format is made by a program.
    """

    def __init__(self, llama: Llama, apis: ApiProcesses | None = None) -> None:
        super().__init__(llama, apis)
        self.format = ReasoningFormat(llama.tokenizer, ToolFormat.LLAMA_3_1)
        self.format.reasoning = find_marks(llama.tokenizer)
        llama.dialog_format = self.format
        if apis is not None:
            template = jinja_template(ToolFormat.LLAMA_3_1) + OPENING
            source = FormatSource(ToolFormat.LLAMA_3_1, {"default": template})
            llama.dialog_format = source.make(llama.tokenizer)

    def ids_of(self, text: str) -> list[int]:
        return self.llama.tokenizer.encode(text, bos=False, eos=False, allowed_special="all")

    def chat(self, **body: Any) -> tuple[Any, list[Any]]:
        """Return the whole answer and the chunks of a stream of the same request."""

        async def both(client: openai.AsyncOpenAI) -> tuple[Any, list[Any]]:
            common: Any = {"model": "tiny", "messages": QUESTION, **body}
            whole = await client.chat.completions.create(**common)
            common |= {"stream_options": {"include_usage": True}}
            stream: Any = await client.chat.completions.create(**common, stream=True)
            return whole, [chunk async for chunk in stream]

        return self.call(both)

    def parts(self, **body: Any) -> list[tuple[str, str | None, str]]:
        """Return reasoning, content and finish_reason of each choice, streamed and whole alike."""
        whole, chunks = self.chat(**body)
        assert chunks[-1].usage == whole.usage
        found = []
        for choice in whole.choices:
            deltas = [c.delta for chunk in chunks for c in chunk.choices if c.index == choice.index]
            reasoning = getattr(choice.message, "reasoning_content", "")
            assert joined(deltas, "reasoning_content") == reasoning
            assert joined(deltas, "content") == (choice.message.content or "")
            kinds = [kind for delta in deltas if (kind := kind_of(delta))]
            assert kinds == sorted(kinds, reverse=True), "reasoning comes before content"
            found.append((reasoning, choice.message.content, choice.finish_reason))
        return found


def joined(deltas: list[Any], name: str) -> str:
    return "".join(getattr(delta, name, None) or "" for delta in deltas)


def kind_of(delta: Any) -> str:
    if getattr(delta, "reasoning_content", None):
        return "reasoning"
    return "content" if delta.content else ""
