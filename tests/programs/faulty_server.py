"""The program of server/test_server_faults.py: `llama serve` with a model that fails on demand.

FAULT="load": loading the weights never ends. "raise" or "kill": the failure of rank FAULT_RANK (of
all ranks by default) in a step with the token RAISE, once the file FAULT_FILE exists, if it is
given. A prompt whose last token is NAN has logits of NaN; other rows do not. Each step waits for as
long as the file HOLD_FILE exists, if it is given.
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llama.checkpoint import loader
from llama.cli import main
from llama.model import Transformer
from llama.ops.batch import Batch

RAISE, NAN = 1000, 1001  # ids of the demo model that no answer of the test has

_hidden_states = Transformer.hidden_states


def faulty(self: Transformer, tokens: Tensor, batch: Batch, kv_cache: Tensor, *more: Any) -> Tensor:
    while "HOLD_FILE" in os.environ and Path(os.environ["HOLD_FILE"]).exists():
        time.sleep(0.01)
    rank = os.environ.get("RANK", "0")
    if RAISE in tokens.tolist() and os.environ.get("FAULT_RANK", rank) == rank:
        if "FAULT_FILE" in os.environ:
            wait_for_file(Path(os.environ["FAULT_FILE"]))
        if os.environ["FAULT"] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise IndexError("made to fail")
    hidden = _hidden_states(self, tokens, batch, kv_cache, *more)
    hidden[tokens[batch.logit_rows] == NAN] = torch.nan
    return hidden


def wait_for_file(path: Path) -> None:
    path.with_suffix(".awaited").touch()
    while not path.exists():
        time.sleep(0.01)


def read_for_ever(*_: object, **__: object) -> None:
    sys.stderr.write("reading\n")  # one write, or the lines of two ranks could mix
    sys.stderr.flush()
    threading.Event().wait()


if __name__ == "__main__":
    if os.environ.get("FAULT") == "load":
        loader.load = read_for_ever
    Transformer.hidden_states = faulty  # type: ignore[method-assign, assignment]
    sys.exit(main())
