"""Dialogs that FastChat may send, for the tests with and without FastChat."""

NO_SYSTEM = "<|start_header_id|>assistant<|end_header_id|>\n\n"

_USER = {"role": "user", "content": "What is the capital of France?"}
DIALOGS = [
    [_USER],
    [{"role": "system", "content": "Answer briefly."}, _USER],
    [{"role": "system", "content": "  {braces} and spaces\n"}, _USER],
    [_USER, {"role": "assistant", "content": "Paris."}, {"role": "user", "content": "Why?"}],
    [{"role": "user", "content": "\n\n  spaces around é漢字 \t\n"}],
    [_USER, {"role": "assistant", "content": ""}, {"role": "user", "content": "Are you there?"}],
    [{"role": "user", "content": ""}],
]
