"""Answer prompts on several ranks with and without KV pages on disk; test_kv_on_disk.py runs it.

The arguments are a checkpoint, a folder for pages, a file for rank 0's results as JSON, the number
of stages, `kv_cache_reuse`, the type, and how many runs there are. Each result is the answers, and
the tokens that were loaded. With --max-restarts of torchrun all ranks kill themselves once their
pages are written, and the processes that follow go on.
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from helpers.kv_pages import always, answers, build, wait_until_written
from llama.storage.kv_segments import Part, Segment

RANK = int(os.environ["RANK"])


def main(
    checkpoint: str, root: str, results: str, stages: str, reuse: str, dtype: str, runs: str
) -> None:
    always()
    options = {"pipeline_parallel_size": int(stages), "dtype": dtype, "kv_cache_reuse": reuse}
    file = Path(results)
    found: dict[str, list] = json.loads(file.read_text()) if file.exists() else {}
    is_killed = os.environ["TORCHELASTIC_MAX_RESTARTS"] > "0" and not found

    own: set[Part] = set()

    def run(name: str, folder: str | None, *, is_led: bool = False) -> None:
        if name in found or len(found) == int(runs):
            return
        llama = build(checkpoint, folder, **options)
        given = llama.lead(lambda: answers(llama)) if is_led else answers(llama)
        pages = llama.pages_on_disk
        found[name] = [given, pages.stats.hit_tokens if pages else 0]
        if RANK == 0:
            file.write_text(json.dumps(found))
        if pages:
            own.add(pages.folder.part)
        if pages and is_killed:
            wait_until_written(llama)
            dist.barrier()
            os.kill(os.getpid(), signal.SIGKILL)
        llama.close()

    run("without", None)
    run("first", root)
    run("later", root)
    run("led", root, is_led=True)
    if RANK == 1 and int(runs) > len(found):  # Only this rank misses pages.
        for path in Path(root).glob("*/*.kv"):
            content = bytearray(path.read_bytes())
            content[len(content) // 2 :] = bytes(len(content) - len(content) // 2)
            if Segment(path).description.part in own:
                path.write_bytes(content)
    run("damaged", root, is_led=True)
    run("mended", root)


if __name__ == "__main__":
    main(*sys.argv[1:])
