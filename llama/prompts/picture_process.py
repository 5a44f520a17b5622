"""Images of strangers, read in processes with limits, because their files may be hostile.

In: a data: URL, or a file in base64. Out: its `Picture`, or a ValueError. The decoders of images
are in C, and a small file may take minutes or gigabytes; a process that exceeds a limit is ended,
and another one is started. The Python API reads the user's own files without them.
"""

import base64
from typing import Any

from llama.common.confined import ConfinedError, ConfinedPool, LimitError, answer_requests
from llama.prompts.pictures import Picture, PictureReader, import_all

NUM_PROCESSES = 2
_CPU_S = 10.0
_MEMORY_MB = 1536  # an image of 64 megapixels in RGBA, and what it is made of on the way to RGB
WAIT_S = 30.0


class PictureProcesses:
    """The processes that read images; each starts when it is first needed."""

    def __init__(self) -> None:
        """Start nothing."""
        self._pool = ConfinedPool(
            __name__, NUM_PROCESSES, cpu_s=_CPU_S, memory_mb=_MEMORY_MB, wait_s=WAIT_S
        )

    def read(self, file: str, chunk_size: int, max_tiles: int) -> Picture:
        """Read an image.

        Args:
            file: A data: URL, or base64.
            chunk_size: T, the pixels of a tile's side.
            max_tiles: The largest number of tiles of the image.

        Raises:
            ValueError: It is no image of a known format, or it exceeds a limit.
        """
        import numpy as np  # Imported here because models of text do not need it.

        request = {"file": file, "chunk_size": chunk_size, "max_tiles": max_tiles}
        try:
            found = self._pool.call(request)
        except LimitError as error:
            raise ValueError(f"the image cannot be read: {error}") from None
        except ConfinedError as error:
            raise ValueError(str(error)) from None
        pixels = np.frombuffer(bytearray(base64.b64decode(found["pixels"])), np.uint8)
        side = chunk_size
        return Picture(pixels.reshape(-1, side, side, 3), found["rows"], found["columns"])

    def close(self) -> None:
        """End the processes."""
        self._pool.close()


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    """Read the image of a request, in the process with limits."""
    picture = PictureReader(request["chunk_size"], request["max_tiles"]).read(request["file"])
    pixels = base64.b64encode(picture.pixels.tobytes()).decode()
    return {"pixels": pixels, "rows": picture.rows, "columns": picture.columns}


if __name__ == "__main__":
    import_all()
    answer_requests(_answer)
