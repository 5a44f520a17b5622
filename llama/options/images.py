"""The images of the sequences of an engine: their pages, and what each step sees and encodes.

In: sequences whose specification has images, and their pixels. Out: pages of the KV cache that hold
the keys and values of images, and a `Batch` with the rows that see them.

Images that touch in a prompt are a group: one stream of tokens. A row sees the images of the latest
group that has begun, up to its own position. A sequence has the pages of the groups that its next
tokens see, from its admission on. A group is encoded in the step that has its first row, and found
again by a hash of its pixels, which begins with the root of the sequence's prefix hashes.
"""

import hashlib
import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from llama.engine.hooks import StepHook
from llama.engine.pages import PagePool, page_hash
from llama.engine.request import ImageSpan
from llama.engine.scheduler import Scheduler
from llama.engine.sequence import SequenceState, no_pages
from llama.engine.step import Step
from llama.model.args import ModelArgs
from llama.model.transformer import Transformer
from llama.ops.batch import Batch, CrossRows, NewImage
from llama.ops.sample import on_device_of
from llama.options.image_sizes import ImageSizes, touching

_CONTENT = b"image"  # so that no page of text has the hash of one of an image


@dataclass(eq=False)
class _Group:
    """Images that touch, with their pages.

    Attributes:
        spans: The images.
        ends: The number of tokens up to the end of each image.
        cost: What encoding them costs, in tokens of text.
        contents: The hash of each page.
        pages: The pages.
        is_new: Whether no step has been scheduled yet that encodes them.
        step: The step that encodes them, if one of this sequence does.
        table: The entries of `llama.vision.cross.plane_of` that the parts of the pages are.
    """

    spans: list[ImageSpan]
    ends: list[int]
    cost: int
    contents: list[bytes]
    pages: "array[int]" = field(default_factory=no_pages)
    is_new: bool = True
    step: Step | None = None
    table: "array[int]" = field(default_factory=no_pages)

    @property
    def first(self) -> int:
        """The position of the first row that sees them."""
        return self.spans[0].position


@dataclass(frozen=True)
class _Seen:
    """Rows of a step that see the same tokens: the first `num_tokens` of a group."""

    first_row: int
    num_rows: int
    group: _Group
    num_tokens: int


class ImageStore(StepHook):
    """The images of the sequences of one engine; its pages are `SidePages` of the scheduler.

    Attributes:
        args: The sizes of the parts that read images.
        sizes: What images take in the KV cache.
        num_encoded: The images that steps have encoded.
        num_found: The images whose pages were found, when their sequences were admitted.
    """

    def __init__(self, model: Transformer, scheduler: Scheduler, num_pages: int) -> None:
        """Start without images.

        Args:
            model: The model, which has `image_parts`.
            scheduler: The scheduler, whose pool has the pages.
            num_pages: P, the pages of the KV cache.
        """
        vision = model.params.vision
        assert vision is not None, "the model reads text alone"
        self.args = vision
        self._params = model.params
        self._parallel = model.parallel
        self._pool: PagePool = scheduler.pool
        self._ratio = model.plan.image_ratio
        self.sizes = ImageSizes(
            chunk_size=vision.chunk_size,
            max_tiles=vision.max_tiles,
            tokens_per_tile=vision.tokens_per_tile,
            tokens_per_page=self._ratio * self._pool.page_size,
            page_size=self._pool.page_size,
            num_pages=self._pool.num_pages,
        )
        self._num_pages = num_pages
        self._groups: dict[SequenceState, list[_Group]] = {}
        self._due: list[_Group] = []  # groups that the next step encodes
        self.num_encoded = 0
        self.num_found = 0
        scheduler.side = self

    # The pages of sequences, as the scheduler asks for them.

    def pages_of(self, seq: SequenceState) -> int:
        """Return how many pages the images of a sequence have."""
        return self.sizes.num_pages_of(seq.spec.images)

    def used(self) -> Iterator[Sequence[int]]:
        """Return the pages of the images of all sequences."""
        for groups in self._groups.values():
            for group in groups:
                yield group.pages

    def wanted(self, seq: SequenceState, start: int) -> tuple[list[int], int]:
        """Return the pages of images that are cached, and how many more a sequence needs."""
        found: list[int] = []
        num_missing = 0
        for group in self._needed(seq, start):
            cached = self._cached(group)
            found += cached
            num_missing += 0 if cached else len(group.contents)
        return found, num_missing

    def admit(self, seq: SequenceState, start: int) -> None:
        """Take the pages that `wanted` names."""
        groups = self._needed(seq, start)
        for group in groups:
            cached = self._cached(group)
            self._pool.incref(cached)
            group.pages.extend(cached)
            group.is_new = not cached
            self.num_found += len(group.spans) if cached else 0
        for group in groups:
            if group.is_new:
                group.pages.extend(self._pool.allocate() for _ in group.contents)
            for page in group.pages:
                for part in range(self._ratio):
                    group.table.append(page + 2 * self._num_pages * part)
        if groups:
            self._groups[seq] = groups

    def fitting(self, seq: SequenceState, count: int, budget: int, *, is_first: bool) -> int:
        """Return how many of the next tokens a step may compute; pages of passed groups go.

        See `SidePages.fitting`. A group that is beyond the budget has one row with it.
        """
        groups = self._groups.get(seq)
        if groups is None:
            return count
        start = seq.num_computed
        while len(groups) > 1 and groups[1].first <= start:
            self._pool.release(groups.pop(0).pages)
        for group in groups:
            num_before = max(group.first - start, 0)  # rows that do not see it
            if not group.is_new or num_before >= count:
                continue
            budget -= group.cost
            if num_before >= budget and not (is_first and num_before == 0):
                return num_before
            is_first = False
            count = min(count, max(budget, 1))
        return count

    def schedule(self, seq: SequenceState, start: int, count: int) -> int:
        """Let the next step encode the groups that these tokens see; return the cost."""
        cost = 0
        for group in self._groups.get(seq, ()):
            if group.is_new and group.first < start + count:
                group.is_new = False
                cost += group.cost
                self.num_encoded += len(group.spans)
                self._due.append(group)
                for page, content in zip(group.pages, group.contents, strict=True):
                    self._pool.cache(page, content)
        return cost

    def release(self, seq: SequenceState) -> None:
        """Give up the pages of the images of a sequence."""
        for group in self._groups.pop(seq, ()):
            self._pool.release(group.pages)

    def reset(self) -> None:
        """Forget the pages of all sequences."""
        self._groups.clear()
        self._due.clear()

    def _needed(self, seq: SequenceState, start: int) -> list[_Group]:
        """Return the groups that the rows from `start` on see, without pages."""
        streams = touching(seq.spec.images)
        passed = [stream for stream in streams[1:] if stream[0].position <= start]
        groups = []
        for spans in streams[len(passed) :]:
            tokens = [self.args.tokens_per_tile * x.rows * x.columns for x in spans]
            ends = np.cumsum(tokens).tolist()
            digests = b"".join(span.digest for span in spans)
            root = hashlib.sha256(_CONTENT + seq.spec.prefix_root + digests).digest()
            contents = [page_hash(root, [i]) for i in range(self.sizes.pages_for(ends[-1]))]
            cost = sum(encoding_cost(self._params, span.rows * span.columns) for span in spans)
            groups.append(_Group(spans, ends, cost, contents))
        return groups

    def _cached(self, group: _Group) -> list[int]:
        """Return the pages of a group if all are cached, else none."""
        pages = self._pool.match_prefix(group.contents)
        return pages if len(pages) == len(group.contents) else []

    # The steps.

    def before_pack(self, step: Step) -> None:
        """Note which images the step encodes."""
        for group in self._due:
            group.step = step
        self._due.clear()

    def changes_batch(self, step: Step) -> bool:
        """Return whether a sequence of the step has images."""
        return any(item.sequence in self._groups for item in step.items)

    def pack(self, step: Step, batch: Batch) -> Batch:
        """Return the batch with what its rows see of images, and the images that are new."""
        if not self.changes_batch(step):
            return batch
        seen: list[_Seen] = []
        new: list[NewImage] = []
        row = 0
        for item in step.items:
            for group in self._groups.get(item.sequence, ()):
                if group.step is step:
                    new += self._encoded(item.sequence, group, batch.positions.device)
            seen += self._seen(item.sequence, item.start, item.count, row)
            row += item.count
        if not seen:
            return batch
        return batch.with_cross(_cross_rows(seen, new, batch))

    def _encoded(
        self, seq: SequenceState, group: _Group, device: torch.device
    ) -> Iterator[NewImage]:
        """Yield the images of a group, with pixels that rank 0 has sent to all ranks."""
        pages = torch.tensor(group.pages, device=device)
        starts = [0, *group.ends]
        side = self.args.chunk_size
        for span, first in zip(group.spans, starts, strict=False):
            pixels = seq.pixels.get(span.digest)
            if not self._parallel.is_alone:
                own = b"" if pixels is None else pixels.tobytes()
                data = self._parallel.broadcast_bytes(own)
                pixels = np.frombuffer(bytearray(data), np.uint8).reshape(-1, side, side, 3)
            assert pixels is not None, "an image without pixels"
            yield NewImage(torch.from_numpy(pixels), span.rows, span.columns, pages, first)

    def _seen(self, seq: SequenceState, start: int, count: int, row: int) -> Iterator[_Seen]:
        """Yield which rows of a sequence see what.

        Args:
            seq: The sequence.
            start: The position of its first row in the step.
            count: The number of its rows.
            row: The first of them among the rows of the step.
        """
        changes: list[tuple[int, _Group, int]] = []  # a position, and what is seen from there on
        for group in self._groups.get(seq, ()):
            for span, end in zip(group.spans, group.ends, strict=True):
                changes.append((span.position, group, end))
        bounds = [position for position, _, _ in changes]
        for i, (position, group, num_tokens) in enumerate(changes):
            first = max(position, start)
            end = min([start + count, *bounds[i + 1 : i + 2]])
            if first < end:
                yield _Seen(row + first - start, end - first, group, num_tokens)


def encoding_cost(params: ModelArgs, num_tiles: int) -> int:
    """Return the work of encoding an image, in tokens of the text model.

    It is counted in multiplications: those of the encoder, the projector, and the keys and values
    of all cross-attention layers, and those of the layers of text.

    Args:
        params: The sizes.
        num_tiles: The tiles of the image.
    """
    args = params.vision
    assert args is not None, "the model reads text alone"
    num_tokens = num_tiles * args.tokens_per_tile
    num_rows = num_tokens + (args.tokens_per_tile if num_tiles < args.max_tiles else 0)
    per_row = 4 * args.width**2 + 2 * args.width * args.ffn_dim + 2 * num_rows * args.width
    work = (args.n_layers + args.n_global_layers) * num_rows * per_row
    work += num_tokens * args.features_dim * params.dim
    kv_dim = 2 * params.kv_heads * params.head_dim
    work += args.num_cross_layers * num_tokens * params.dim * kv_dim
    columns = 2 * params.n_heads * params.head_dim + kv_dim + 3 * params.ffn_dim
    return math.ceil(work / (params.n_layers * params.dim * columns))


def _cross_rows(seen: list[_Seen], new: list[NewImage], batch: Batch) -> CrossRows:
    """Return the rows of a step that see images, as a batch of their own."""
    seen = sorted(seen, key=lambda part: part.num_rows > 1)  # single rows first, see `Batch`
    rows = [row for part in seen for row in range(part.first_row, part.first_row + part.num_rows)]
    width = max(len(part.group.table) for part in seen)
    tables = np.zeros((len(seen), width), np.int64)
    for table, part in zip(tables, seen, strict=True):
        table[: len(part.group.table)] = part.group.table
    lengths = [part.num_tokens for part in seen]
    counts = [part.num_rows for part in seen]
    like = batch.positions
    sent = on_device_of(like, rows)
    crossed = Batch(
        positions=sent,
        slots=sent,
        page_table=on_device_of(like, tables),
        query_starts=on_device_of(like, [0, *np.cumsum(counts).tolist()]),
        seq_lens=on_device_of(like, lengths),
        logit_rows=sent,
        query_lens_cpu=counts,
        seq_lens_cpu=lengths,
    )
    return CrossRows(sent, crossed, new)
