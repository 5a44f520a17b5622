"""The calls in one answer of a chat: the engine's output in, what reads its deltas out."""

from llama.prompts.answer import AnswerDeltas
from llama.requests.request import CompletionOutput, RequestOutput
from llama.server.openai.requests import OpenAIRequest
from llama.tokenizer import Tokenizer


def tool_deltas(
    request: OpenAIRequest,
    tokenizer: Tokenizer,
    response_id: str,
    output: RequestOutput,
    answer: CompletionOutput,
) -> AnswerDeltas | None:
    """None where the chat has no tools."""
    if request.tools is None:
        return None
    key = (response_id, output.prompt_token_ids, output.index, answer.index)
    shows_special = not request.params.skip_special_tokens
    return AnswerDeltas(request.tools, tokenizer, key, shows_special=shows_special)
