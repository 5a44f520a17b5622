"""What each model host's own generate_stream does where a request says nothing: a table.

Plain values, read from the hosts' sources (named at each). It knows no engine and no request.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Dialect:
    """The defaults and habits of one host.

    max_new_tokens: of an answer, where the request does not say.
    echo: whether the text begins with the prompt, where the request does not say; None if the
        function yields texts alone, which never do.
    keeps_prompt: if prompt and answer are too long together, the answer is shortened, as in vLLM;
        else the prompt loses its beginning.
    stop: strings that end an answer, where the request names none.
    sampling: fields of SamplingParams, where the request does not say.
    """

    max_new_tokens: int
    echo: bool | None
    keeps_prompt: bool = False
    stop: tuple[str, ...] = ()
    sampling: Mapping[str, float] = field(default_factory=dict)


# FastChat 0.2.36, fastchat/serve/inference.py
FASTCHAT = Dialect(max_new_tokens=256, echo=True)
# DB-GPT 0.8.2, dbgpt/model/llm/llm_out/vllm_llm.py
DB_GPT = Dialect(max_new_tokens=2048, echo=True, keeps_prompt=True)
# DB-GPT 0.4, dbgpt/model/llm_out/gorilla_llm.py, after gorilla's own inference/serve
GORILLA = Dialect(max_new_tokens=1024, echo=None)
# DB-GPT 0.4, dbgpt/model/llm_out/guanaco_llm.py, after guanaco-lora's generate.py
GUANACO = Dialect(
    max_new_tokens=512,
    echo=None,
    stop=("###",),
    sampling={"top_k": 1, "repetition_penalty": 1.7},
)
