"""Measure the gain of speculative decoding: the same requests with and without it, in turn.

In: a folder with trained weights, and batch sizes. Out: a row for each kind of text and batch size
with the tokens per second both ways (by processor time), the steps, and the accepted drafts. Every
answer must be the same both ways.

Random weights show no gain, as their answers repeat nothing, or only themselves. That speculation
costs nothing on random tokens can be shown with a shape.
"""

import contextlib
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.engines.ours import our_llama
from bench.report import Column
from bench.run import Bench, Row, whole
from llama import Llama, SamplingParams
from llama.options.speculation import hook
from llama.options.speculation.lookup import Speculator

_COLUMNS: list[Column] = [
    ("text", "kind", ""), ("batch", "batch", ""), ("without", "plain", ".1f"),
    ("with", "speculating", ".1f"), ("gain", "gain", ".3f"), ("+-", "error", ".3f"),
    ("by the clock", "wall_gain", ".3f"), ("tokens", "tokens", ""),
    ("steps without", "plain_steps", ""), ("with", "steps", ""), ("drafted", "drafted", ""),
    ("right", "accepted", ""),
]  # fmt: skip
_CODE = '''def read_rows(path, limit):
    """Return the first rows of a file as lists of words."""
    rows = []
    with open(path) as handle:
        for number, line in enumerate(handle):
            if number >= limit:
                break
            words = line.strip().split(",")
            if len(words) < 2:
                continue
            rows.append(words)
    return rows


def write_rows(path, rows):
    """Write lists of words to a file, one row on a line."""
    with open(path, "w") as handle:
        for words in rows:
            line = ",".join(words)
            handle.write(line + "\\n")


def count_rows(path):
    """Return how many rows a file has."""
    total = 0
    with open(path) as handle:
        for line in handle:
            total += 1
    return total
'''
_STORY = """The harbour of Millbrook was built in 1874, when the railway came down from the hills.
For forty years its cranes loaded coal from the mines of Upper Dell onto ships bound for the north.
In 1921 a storm broke the outer wall, and the council had no money to build it again. The mines
closed in 1934. Since then fishermen have used the inner harbour, and since 1988 a museum in the old
customs house has shown how the coal was loaded. Last year 41,000 people came to see it.
"""
_TEXTS = "edit", "quote", "chat", "json", "random"
_KEYS = "name_of_the_harbour", "year_it_was_built_in", "goods_it_was_loading_then", \
    "year_of_the_great_storm", "number_of_visitors_last_year"  # fmt: skip
_SCHEMA = {"type": "object", "required": [*_KEYS], "additionalProperties": False, "properties": {
    key: {"type": "string", "maxLength": 30} if i % 2 == 0 and i < 4 else {
        "type": "integer", "minimum": 0, "maximum": 99_999}
    for i, key in enumerate(_KEYS)
}}  # fmt: skip


def _edit(i: int) -> str:
    new = f"read_table_{i}"
    edited = _CODE.replace("read_rows", new)
    return (
        f"File before:\n```python\n{_CODE}```\n\nThe same file, where read_rows is called {new}:\n"
        f"```python\n{edited[:60]}"
    )


def _quote(i: int) -> str:
    return (
        f"Text {i}:\n{_STORY}\nThe sentences of this text with a year in them, word for word:\n"
        "1. The harbour of Millbrook was built in 1874,"
    )


def _chat(i: int) -> str:
    asked = ["Why is the sky blue?", "How do I learn to swim?", "What is a good name for a cat?"]
    return f"Question: {asked[i % 3]}\nAnswer:"


def _object(i: int) -> str:
    return f"{_STORY}\nThe facts of this text as JSON, with the {_KEYS[i % 5]} first:\n"


def speculate(
    batches: tuple[int, ...] = (1, 8, 32),
    texts: str = ",".join(_TEXTS),
    steps: int = 160,
    repeats: int = 3,
    temperature: float = 0.0,
    speculate: str = "lookup",
    **flags: Any,
) -> None:
    """Measure the gain of speculative decoding by kind of text and batch size.

    The kinds are a file edited in one name, quoted sentences, answered questions, an object of a
    schema with long keys, and random words. Each figure is the median of pairs of runs in turn,
    with its standard error. Without drafts, a step makes one token of each answer.
    """
    bench = Bench(**flags)
    is_shape = not Path(bench.model).is_dir()
    if is_shape and (texts, speculate) != ("random", "lookup"):
        raise ValueError(
            f"model={bench.model!r}: give a folder with trained weights, or --texts random"
        )
    sizes = [whole("batches", n) for n in batches]
    if unknown := {*texts.split(",")}.difference(_TEXTS):
        raise ValueError(f"texts={texts!r}: {min(unknown)!r} is none of {', '.join(_TEXTS)}")
    context = min(2048, bench.args.longest_context)
    shape: dict[str, Any] = {"max_seq_len": context, "max_batch_size": max(sizes)}
    with open(os.devnull, "w") as quiet, contextlib.redirect_stdout(quiet):
        if is_shape:
            llama = our_llama(bench.ours(), shape)
            hook.speculate(llama.engine, Speculator(7, llama.model.parallel))
        else:
            llama = our_llama(bench.ours(), shape | {"speculate": speculate})
    draw = random.Random(bench.seed)
    ids = list(llama.tokenizer.ranks.values())
    kinds: dict[str, Callable[[int], str | list[int]]] = {
        "edit": _edit, "quote": _quote, "chat": _chat, "json": _object,
        "random": lambda i: draw.choices(ids, k=300),
    }  # fmt: skip
    rows = []
    for kind, batch in ((kind, batch) for kind in texts.split(",") for batch in sizes):
        print(f"... {kind}, {batch}", file=sys.stderr, flush=True)
        # Random words go on as random ones: at temperature 1 of flat logits.
        asked = SamplingParams(
            max_tokens=whole("steps", steps), ignore_eos=kind != "json", seed=bench.seed,
            temperature=temperature if kind != "random" else 10.0,
            structured_output={"json": _SCHEMA} if kind == "json" else None,
        )  # fmt: skip
        prompts = [kinds[kind](i + bench.seed) for i in range(batch)]
        rows.append({"kind": kind, "batch": batch} | _measure(llama, prompts, asked, repeats))
    bench.report(_COLUMNS, rows, None)


def _measure(
    llama: Llama, prompts: list[str | list[int]], asked: SamplingParams, repeats: int
) -> Row:
    core = llama.engine
    (drafter,) = [x.drafter for x in core.hooks if isinstance(x, hook.Speculation)]
    found: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    answers: list[list[list[int]]] = []
    counts: Row = {}
    for i in range(whole("repeats", repeats) + 1):  # the first is a warm-up, and reads the prompts
        for is_drafting in ((False, True), (True, False))[i % 2]:
            hook.speculate(core, drafter if is_drafting else None)
            stats = core.stats
            before = stats.steps, stats.draft_tokens, stats.accepted_tokens
            requests = [
                llama.llm_engine.prepare("", p, asked, index=i) for i, p in enumerate(prompts)
            ]
            began, spent = time.perf_counter(), time.process_time()
            outputs = llama.llm_engine.run(requests)
            found[is_drafting].append((time.process_time() - spent, time.perf_counter() - began))
            answers.append([output.outputs[0].token_ids for output in outputs])
            if is_drafting:
                steps, drafted, accepted = (
                    now - old
                    for now, old in zip(
                        (stats.steps, stats.draft_tokens, stats.accepted_tokens),
                        before,
                        strict=True,
                    )
                )
                counts |= {"steps": steps, "drafted": drafted, "accepted": accepted}
            else:
                counts["plain_steps"] = stats.steps - before[0]
    hook.speculate(core, drafter)
    if any(answer != answers[0] for answer in answers):
        raise RuntimeError("an answer depends on the drafts")
    num = sum(map(len, answers[0]))
    pairs = list(zip(found[False][1:], found[True][1:], strict=True))
    gains = [a[0] / b[0] for a, b in pairs]
    return {
        **counts,
        "tokens": num,
        "plain": num / statistics.median(a[0] for a, _ in pairs),
        "speculating": num / statistics.median(b[0] for _, b in pairs),
        "gain": statistics.median(gains),
        # Of a median of n normal numbers: sqrt(pi / 2) of that of their mean.
        "error": 1.25 * statistics.stdev(gains) / len(gains) ** 0.5 if len(gains) > 1 else None,
        "wall_gain": statistics.median(a[1] / b[1] for a, b in pairs),
    }
