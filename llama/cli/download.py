"""`llama download`: a model of Hugging Face's hub, which every command then finds by its name.

Into Hugging Face's cache come the files that the model is loaded from, and no others. A connection
that is cut is taken up where it was; of a download that was stopped, whole files stay.
"""

import argparse
import functools
import os
import re
import shlex
import shutil
import signal
from pathlib import Path
from typing import Never

from llama.checkpoint.downloads import hub_cache, model_folder, repository
from llama.checks import nearest
from llama.cli.flags import UsageError, extra

_BESIDE = r"(generation_|tokenizer_)?config\.json|(original/)?tokenizer\.(model|json)"
_HUGGING_FACE = rf"model[^/]*\.safetensors(\.index\.json)?|chat_template\.\w+|{_BESIDE}"
_OF_META = r"consolidated\.\d+\.pth|fp8_scales_\d+\.pt|params\.json|checklist\.chk"
_META = rf"original/({_OF_META})|{_BESIDE}"
_PART = re.compile(r"\d{5}(?=\\-of\\-\d{5}\\.gguf$)")
_SIZES = ["3-8B", "3-70B", "3.1-8B", "3.1-70B", "3.1-405B", "3.2-1B", "3.2-3B", "3.3-70B"]
_NAMES = [f"{'Meta-' * size.startswith('3-')}Llama-{size}-Instruct" for size in _SIZES]


def download(options: argparse.Namespace) -> int:
    """Fetch what is missing of a model. OSError says why not, and what to type."""
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise UsageError("one process downloads for all ranks: start it without torchrun")
    with extra("download", "llama download"):
        from huggingface_hub import errors
    hub, repo = os.environ.get("HF_ENDPOINT", "https://huggingface.co"), repository(options.name)
    parts = hub_cache() / f"models--{repo.replace('/', '--')}" / "blobs"
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, functools.partial(_stop, parts))
    try:
        place = _fetch(repo, hub, options.file)
        for part in parts.glob("*.incomplete"):  # of a process that was killed
            if part.with_name(part.name.partition(".")[0]).exists():
                part.unlink(missing_ok=True)
    except (OSError, errors.HTTPError) as e:  # HTTPError: of its HTTP library
        why = str(getattr(e, "server_message", None) or e.__cause__ or e).partition("\n")[0]
        if isinstance(e, errors.GatedRepoError):
            why = f"accept its licence at {hub}/{repo} and set HF_TOKEN, from {hub}/settings/tokens"
        elif isinstance(e, errors.RepositoryNotFoundError):
            likely = nearest(repo.rpartition("/")[2], _NAMES) or f"; of Meta's: {', '.join(_NAMES)}"
            why = f"{hub} has none, or not without HF_TOKEN{likely}"
        raise OSError(f"{repo} is not downloaded: {why}; then: llama download {repo}") from None
    print(f"{place}\nnext: llama chat {shlex.quote(place) if options.file else options.name}")
    return 0


def _stop(folder: Path, number: int, _: object) -> Never:
    """At once: the package's threads would go on to the ends of their files. Nobody goes on from
    their parts, whose names are of one process."""
    for part in folder.glob("*.incomplete"):
        part.unlink(missing_ok=True)
    os._exit(128 + number)


def _fetch(repo: str, hub: str, file: str | None) -> str:
    """A GGUF file, or one layout: Hugging Face's, or Meta's where it is alone, or here."""
    import huggingface_hub

    listed = huggingface_hub.HfApi(hub).model_info(repo, files_metadata=True).siblings or []
    sizes, here = {each.rfilename: each.size or 0 for each in listed}, model_folder(repo)
    is_meta = any(here.glob("original/*.pth")) or "config.json" not in sizes
    pattern = _META if is_meta else _HUGGING_FACE
    if file is not None:  # or all of its parts
        pattern = _PART.sub(r"\\d{5}", re.escape(file))
    wanted = [x for x in sizes if re.fullmatch(pattern, x)]
    if not any(x.endswith((".pth", ".safetensors", ".gguf")) for x in wanted):
        found = ", ".join(x for x in sizes if x.endswith(".gguf"))
        known = f"; give --file, one of {found}" if found else ""
        raise OSError(f"it has no {file or 'model*.safetensors or original/*.pth'}{known}")
    missing, cache = sum(sizes[x] for x in wanted if not (here / x).exists()), hub_cache()
    cache.mkdir(parents=True, exist_ok=True)
    if missing > (free := shutil.disk_usage(cache).free):
        full = f"it needs {missing:,} bytes more in {cache}, where {free:,} are free"
        raise OSError(f"{full}: make room, or set HF_HUB_CACHE to a folder elsewhere")
    folder = huggingface_hub.snapshot_download(
        repo, allow_patterns=wanted, cache_dir=cache, endpoint=hub
    )
    return folder if file is None else os.path.join(folder, wanted[0])
