"""Answer prompts on several ranks with and without KV pages on disk; test_kv_on_disk.py runs it.

The arguments are a checkpoint, a folder for pages, a file for rank 0's results as JSON, the number
of stages, `kv_cache_reuse`, the type, and how many runs there are. Each result is the answers, and
the tokens that were loaded.
"""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from helpers.kv_pages import always, answers, build

RANK = int(os.environ["RANK"])


def main(
    checkpoint: str, root: str, results: str, stages: str, reuse: str, dtype: str, runs: str
) -> None:
    always()
    options = {"pipeline_parallel_size": int(stages), "dtype": dtype, "kv_cache_reuse": reuse}
    found: dict[str, list] = {}

    def run(name: str, folder: str | None, *, is_led: bool = False) -> None:
        if len(found) == int(runs):
            return
        llama = build(checkpoint, folder, **options)
        results = llama.lead(lambda: answers(llama)) if is_led else answers(llama)
        pages = llama.pages_on_disk
        found[name] = [results, pages.stats.hit_tokens if pages else 0]
        llama.close()

    run("without", None)
    run("first", root)
    run("later", root)
    run("led", root, is_led=True)
    if RANK == 1 and int(runs) > len(found):  # Only this rank misses pages.
        for path in Path(root).glob("*/*.kv"):
            content = bytearray(path.read_bytes())
            content[len(content) // 2 :] = bytes(len(content) - len(content) // 2)
            if str(os.getpid()) in path.name:
                path.write_bytes(content)
    run("damaged", root, is_led=True)
    run("mended", root)
    if RANK == 0:
        Path(results).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
