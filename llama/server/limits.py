"""The limits of a server, as its flags and its tests set them, and the states of its models.

Nothing is checked here: `Serving` checks its queue, and the files that the attributes name check
the others.
"""

from dataclasses import dataclass
from enum import Enum


class State(Enum):
    """The state of a server."""

    LOADING = "loading"  # The model is being loaded.
    READY = "ready"
    DRAINING = "draining"  # Running requests are finished, and new ones are rejected.
    BROKEN = "broken"  # A step failed; the process ends.


@dataclass(frozen=True)
class Limits:
    """The limits of a server.

    Attributes:
        max_queue: sequences that may wait, besides those that run.
        max_wait_s: seconds until the first token of a request.
        max_body_bytes: bytes of one body.
        max_image_body_bytes: bytes of one body where a model reads images.
        max_images: images of one request.
        image_hosts: names of hosts from which images are fetched, separated by commas.
        max_bodies_bytes: bytes of all bodies that are being received. See `SharedMemory`.
        max_prompts: prompts of one body.
        max_answer_mb: MiB that one answer may take; all together may take four times as much. See
            `hold_answer`.
        max_connections: open connections. See `Connections`.
        max_loras: LoRA adapters that are loaded at once, if clients can load them.
        max_per_address: open connections of one address; None stands for three quarters of all.
    """

    max_queue: int = 1024
    max_wait_s: float = 600.0
    max_body_bytes: int = 8 * 2**20
    max_image_body_bytes: int = 32 * 2**20
    max_images: int = 16
    image_hosts: str | None = None
    max_bodies_bytes: int = 64 * 2**20
    max_prompts: int = 256
    max_answer_mb: int = 512
    max_connections: int = 4096
    max_loras: int = 16
    max_per_address: int | None = None
