"""`llama kv`: the KV pages on disk, listed or removed.

In: the folder of `--kv_cache_dir`. Out: a table on stdout. torch is not imported.
"""

import argparse
import time
from pathlib import Path

from llama.cli.ranks import say
from llama.storage.kv_disk import clear, default_folder, stored_models, tenants_of

_UNITS = ((86_400, "days"), (3600, "hours"), (60, "minutes"), (0, "seconds"))


def kv(options: argparse.Namespace) -> int:
    """Print the models that have pages with the sizes of each tenant's, or remove pages."""
    given = options.kv_cache_dir
    root = default_folder() if given is None else Path(given).expanduser()
    if options.clear:
        num_bytes = clear(root, options.model, options.older_than, options.tenant)
        say(f"removed {num_bytes / 1e6:,.1f} MB from {root}")
        return 0
    models = stored_models(root)
    print(f"KV pages in {root}:" if models else f"no KV pages in {root}")
    for stored in models:
        used = _age(time.time() - stored.last_used)
        details = f"  ({stored.details})" if stored.details else ""
        print(f"  {stored.nbytes / 1e6:10,.1f} MB  used {used} ago  {stored.model}{details}")
        sizes = tenants_of(stored.folder)
        for tenant in sorted(sizes, key=lambda name: -sizes[name]) if any(sizes) else ():
            name = f"tenant {tenant}" if tenant else "all tenants"
            print(f"      {sizes[tenant] / 1e6:10,.1f} MB  {name}")
    return 0


def _age(seconds: float) -> str:
    """Return a time in its largest unit of which there are two at least."""
    size, name = next(unit for unit in _UNITS if seconds >= 2 * unit[0])
    return f"{seconds / (size or 1):.0f} {name}"
