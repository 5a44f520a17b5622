"""Run random requests for a given time and check that memory is stable and pages are freed.

In: minutes, a seed and the benchmark's flags. Out: a table of samples, one JSON line, and exit
code 1 where memory grew or pages were lost. Speed is not judged: the requests are drawn to differ.
"""

import gc
import random
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from bench.engines.ours import our_llama
from bench.report import Column
from bench.run import Bench, Row, whole
from bench.worker import memory
from llama.assembly import assemble
from llama.engine.core import PAGE_SIZE
from llama.options.engine_options import EngineOptions
from llama.requests.llm_engine import LLMEngine
from llama.sampling_params import SamplingParams

_TOKEN_BUDGET = 256
_LONGEST = 384  # tokens of prompt and answer
_LIVE = 24  # requests at once, so that some wait
_COLUMNS: list[Column] = [
    ("second", "second", ".0f"), ("requests", "requests", ""), ("aborted", "aborted", ""),
    ("tokens", "tokens", ""), ("preempted", "preempted", ""), ("private MB", "private_mb", ".1f"),
    ("growth MB", "growth_mb", ".1f"), ("pages in use", "pages", ""),
]  # fmt: skip


def soak(
    minutes: float = 20,
    max_batch_size: int = 16,
    sample_s: float = 10,
    growth_mb: float = 8,
    **flags: Any,
) -> None:
    """Run random requests with aborts and too few pages; fail where memory grows or pages leak.

    Every `sample_s` seconds all requests are finished, pages are counted, and private memory
    (RssAnon) is read. Memory may grow by `growth_mb` between a third of the time, when the process
    is warm, and the end.
    """
    bench = Bench(**flags)
    for name, value in (("minutes", minutes), ("sample_s", sample_s), ("growth_mb", growth_mb)):
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise ValueError(f"{name}={value!r}: give a number above 0")
    if bench.vs:
        raise ValueError(f"vs={bench.vs!r}: a soak is of this engine alone")
    sizes = {"max_seq_len": _LONGEST, "max_batch_size": whole("max_batch_size", max_batch_size)}
    traffic = Traffic(our_llama(bench.ours(), sizes), bench.seed)
    rows: list[Row] = []
    began = time.monotonic()
    while len(rows) < 2 or rows[-1]["second"] < 60 * minutes:
        sample = traffic.sample(time.monotonic() + sample_s)
        rows.append({"second": time.monotonic() - began, **sample})
        print(f"... {rows[-1]}", file=sys.stderr, flush=True)
    note_growth(rows, 60 * minutes)
    bench.failed |= faults(rows, growth_mb)
    bench.report(_COLUMNS, rows, None)


def note_growth(rows: list[Row], seconds: float) -> None:
    """Add the growth of memory since a third of `seconds`, or since the last sample but one."""
    warm = next((row for row in rows[:-1] if row["second"] >= seconds / 3), rows[-2])
    for row in rows[rows.index(warm) :]:
        row["growth_mb"] = row["private_mb"] - warm["private_mb"]


def faults(rows: list[Row], growth_mb: float) -> dict[str, str]:
    """Return what is wrong with the samples of a run."""
    grown, lost = rows[-1]["growth_mb"], max(row["pages"] for row in rows)
    problems = {}
    if grown > growth_mb:
        problems["memory"] = f"it grew by {grown:.1f} MB after the first third, over {growth_mb}"
    if lost:
        problems["pages"] = f"{lost} were in use when nothing ran"
    return problems


@dataclass
class Traffic:
    """Keeps an engine busy with requests drawn from a seed."""

    llama: Any
    seed: int
    live: dict[str, None] = field(default_factory=dict)
    requests: int = 0  # finished, or aborted
    aborted: int = 0
    tokens: int = 0

    def __post_init__(self) -> None:
        self.draw = random.Random(self.seed)
        self.serial = 0
        self.ids = list(self.llama.tokenizer.ranks.values())  # no special ones
        self.prefixes = [self.draw.choices(self.ids, k=k) for k in (20, 70, 130)]
        # Pages for a few of the longest requests: with a batch of many, some are preempted.
        assembled = assemble(
            self.llama.model,
            EngineOptions(num_pages=4 * (_LONGEST // PAGE_SIZE), token_budget=_TOKEN_BUDGET),
        )
        self.engine = LLMEngine(
            assembled.core,
            assembled.adapters,
            self.llama.tokenizer,
            max_seq_len=_LONGEST,
            seed=self.seed,
        )

    def sample(self, until: float) -> Row:
        """Add requests until that moment, at least once, and run all of them to the end."""
        self._add()
        while time.monotonic() < until or self.engine.has_unfinished_requests():
            if time.monotonic() < until:
                self._add()
            self._step()
        gc.collect()
        scheduler = self.engine.core.scheduler
        return {
            "requests": self.requests,
            "aborted": self.aborted,
            "tokens": self.tokens,
            "preempted": scheduler.num_preemptions,
            "private_mb": memory("RssAnon") / 1e6,
            "pages": scheduler.pool.num_pages - scheduler.pool.num_free,
        }

    def _add(self) -> None:
        for _ in range(self.draw.randint(0, _LIVE - len(self.live))):
            name = str(self.serial)
            self.serial += 1
            self.engine.add_request(name, self._prompt(), self._params())
            self.live[name] = None

    def _step(self) -> None:
        for output in self.engine.step():
            if output.finished:
                self._end(output)
        if self.live and self.draw.random() < 0.02:
            name = self.draw.choice(list(self.live))
            self._end(self.engine.abort_request(name))
            self.aborted += 1

    def _end(self, output: Any) -> None:
        del self.live[output.request_id]
        self.requests += 1
        self.tokens += output.usage.completion_tokens

    def _prompt(self) -> list[int]:
        """Half of them begin as others do."""
        shared = self.draw.choice([*self.prefixes, [], [], []])
        return shared + self.draw.choices(self.ids, k=self.draw.randint(1, 120))

    def _params(self) -> SamplingParams:
        pick, draw = self.draw.choice, self.draw
        warm = pick((0.0, 0.7, 1.3))
        n = pick((1, 1, 1, 2, 4)) if warm else 1
        return SamplingParams(
            max_tokens=draw.randint(1, 120),
            min_tokens=pick((0, 0, 1)),
            temperature=warm,
            top_p=pick((1.0, 0.9)),
            top_k=pick((0, 50)),
            min_p=pick((0.0, 0.05)),
            repetition_penalty=pick((1.0, 1.1)),
            presence_penalty=pick((0.0, 0.5)),
            frequency_penalty=pick((0.0, 0.5)),
            logit_bias=pick((None, {draw.choice(self.ids): 2.0})),
            stop=pick(((), (), (chr(draw.randint(97, 122)),), ("no such end", "e"))),
            stop_token_ids=pick(((), (draw.choice(self.ids),))),
            ignore_eos=pick((True, False)),
            seed=pick((None, draw.randint(0, 2**40))),
            n=n,
            best_of=pick((None, n + 1)) if warm else None,
            logprobs=pick((None, None, 0, 5)),
            prompt_logprobs=pick((None, None, None, 2)),
            bad_words=pick(((), ("the",))),
        )
