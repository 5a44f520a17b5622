"""The options of Meta's dialog format, against the Jinja template of converted folders."""

import pytest

from llama.common.checks import FieldError
from llama.prompts import ToolFormat, encode_chat
from llama.prompts.chat import chat_params
from llama.prompts.dialog_format import MetaFormat, PromptOptions
from llama.sampling_params import SamplingParams

QUESTION = {"role": "user", "content": "What is the weather?"}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {}}}


def test_a_date_can_be_given_and_other_variables_are_refused(demo):
    dialog_format = MetaFormat(demo.tokenizer)
    options = PromptOptions(template_kwargs={"date_string": "1 Jan 2025"})
    ids = dialog_format.encode([QUESTION], [TOOL], options)
    assert ids == encode_chat(demo.tokenizer, [QUESTION], [TOOL], date="1 Jan 2025")
    assert ids != dialog_format.encode([QUESTION], [TOOL])
    for wrong in ({"enable_thinking": False}, {"date_string": 3}):
        with pytest.raises(FieldError, match=r"enable_thinking|must be a text") as caught:
            dialog_format.encode([QUESTION], None, PromptOptions(template_kwargs=wrong))
        assert caught.value.field == "chat_template_kwargs"


def test_the_stop_strings_of_a_format_end_the_answers_of_chats(demo):
    dialog_format = MetaFormat(demo.tokenizer, ToolFormat.NONE)
    params = SamplingParams(stop=["a"])
    options = PromptOptions()
    assert chat_params(params, None, dialog_format, options).stop == ("a",)
    dialog_format.stop_strings = ("<|im_end|>",)
    changed = chat_params(params, None, dialog_format, options)
    assert changed.stop == ("a", "<|im_end|>")


def test_another_tool_format_is_meta_s_alone(demo):
    dialog_format = MetaFormat(demo.tokenizer).with_tool_format(ToolFormat.NONE)
    assert not dialog_format.has_tools
    assert dialog_format.describe() == "Meta's chat format, no tools"
