"""The pages of the KV cache that images of prompts take, for whoever checks prompts.

In: the images of a prompt. Out: how many pages they take, or an error if they never fit. The
process that has the text of requests knows these sizes, also where the engine is in another one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from llama.engine.request import ImageSpan


@dataclass(frozen=True)
class ImageSizes:
    """The sizes of images for one engine.

    Attributes:
        chunk_size: T, the pixels of a tile's side.
        max_tiles: The largest number of tiles of an image.
        tokens_per_tile: The tokens of images that a tile becomes.
        tokens_per_page: The tokens of images that a page holds.
        page_size: The tokens of text that a page holds.
        num_pages: The pages of the KV cache.
    """

    chunk_size: int
    max_tiles: int
    tokens_per_tile: int
    tokens_per_page: int
    page_size: int
    num_pages: int

    def pages_for(self, num_tokens: int) -> int:
        """Return how many pages hold so many tokens of images."""
        return -(-num_tokens // self.tokens_per_page)

    def num_pages_of(self, images: Sequence[ImageSpan]) -> int:
        """Return how many pages the images of a prompt have together."""
        return sum(
            self.pages_for(sum(self.tokens_per_tile * x.rows * x.columns for x in group))
            for group in touching(images)
        )

    def check_fits(self, images: Sequence[ImageSpan], max_len: int) -> None:
        """Raise a ValueError if a sequence with these images never fits the KV cache.

        Args:
            images: The images.
            max_len: The largest number of tokens of the sequence.
        """
        needed = -(-max_len // self.page_size) + self.num_pages_of(images)
        if needed > self.num_pages:
            raise ValueError(
                f"up to {max_len} tokens with {len(images)} images take as much of the KV cache as "
                f"{needed * self.page_size} tokens, and it holds "
                f"{self.num_pages * self.page_size}: ask for fewer tokens, or give fewer or "
                "smaller images"
            )


def touching(images: Sequence[ImageSpan]) -> list[list[ImageSpan]]:
    """Return the images in groups that follow one another in the prompt."""
    groups: list[list[ImageSpan]] = []
    for image in images:
        if groups and groups[-1][-1].position + 1 == image.position:
            groups[-1].append(image)
        else:
            groups.append([image])
    return groups
