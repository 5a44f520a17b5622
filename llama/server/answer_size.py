"""How large an answer is for the event loop, which must not be held up by making its JSON.

In: what a body asks for, and outputs. Out: counts.
"""

from llama.api import RequestOutput
from llama.sampling_params import SamplingParams
from llama.server.request import ApiRequest

# Tokens, log-probabilities and tokens of a prediction that are encoded in the event loop at a time;
# 1,000 take 2 to 6 ms.
MAX_IN_LOOP = 1000


def num_items(
    request: ApiRequest, output: RequestOutput, earlier: RequestOutput | None = None
) -> int:
    """Return how many tokens and log-probabilities an output has that an earlier one has not."""
    num_tokens = output.usage.completion_tokens
    if earlier is not None:
        num_tokens -= earlier.usage.completion_tokens
    elif request.echo:
        num_tokens += output.usage.prompt_tokens * len(output.outputs)
    return num_tokens * (1 + num_logprobs(request.params))


def num_logprobs(params: SamplingParams) -> int:
    """Return how many log-probabilities an answer has for each of its tokens."""
    return 0 if params.logprobs is None else 1 + params.logprobs
