"""Constants that the C++ kernels number too, in constants.h: formats, states, limits of sizes.

The kernels get them as plain integers, so a difference would be taken for another format. Therefore
native.py compares `ALL` with the values of each library that it loads.
"""

from enum import IntEnum

from llama.ops.formats import N_BLOCK, ElementFormat


class ScaleFormat(IntEnum):
    """How the scales and offsets of a packed weight are stored."""

    FLOAT32 = 0
    FLOAT16 = 1
    EIGHTS = 2


class KvFormat(IntEnum):
    """How the KV cache stores a key or a value."""

    BF16 = 0
    INT8 = 1


class BodyKind(IntEnum):
    """The computation of a half layer between its two products."""

    ATTENTION = 0
    FEED_FORWARD = 1
    BIDIRECTIONAL_ATTENTION = 2


class PackState(IntEnum):
    """The outcome of packing rows of a file."""

    PACKED = 0
    NOT_FINITE = 1
    FILE_TOO_SHORT = 2


class ChannelState(IntEnum):
    """The result of an operation on memory that ranks share."""

    DONE = 0
    PENDING = 1
    MISMATCH = 2
    BROKEN = 3


class SumType(IntEnum):
    """The types that ranks can sum in shared memory."""

    BF16 = 0
    FP16 = 1
    FP32 = 2
    NONE = 3  # bytes, which are copied


MIN_GROUP = 16  # neighbouring columns that share a scale; other groups are multiples of it
MAX_RANK = 256  # columns of an adapter
MAX_HEAD_DIM = 256  # elements of a head
MAX_RANKS = 64  # ranks that share memory
RANK_BLOCK = 16  # rows of an adapter's down matrix that are packed together
SHRINK_COLUMNS = 2048  # columns of it that one piece of work multiplies
MATRIX_FIELDS = 16  # integers that describe a packed weight, `Matrix` in kernels.h
DELTA_FIELDS = 20  # integers that describe an adapter's update of a product, `Delta` in kernels.h
SEGMENT_FIELDS = 3  # integers that describe the rows of an adapter, `Segment` in kernels.h
HALF_FIELDS = 36  # integers that describe a half layer, `Half` in layers.cpp

_ENUMS = (ElementFormat, ScaleFormat, KvFormat, BodyKind, PackState, ChannelState, SumType)
ALL: dict[str, int] = {
    **{f"{enum.__name__}::{member.name}": member.value for enum in _ENUMS for member in enum},
    "N_BLOCK": N_BLOCK,
    "MIN_GROUP": MIN_GROUP,
    "MAX_RANK": MAX_RANK,
    "MAX_HEAD_DIM": MAX_HEAD_DIM,
    "MAX_RANKS": MAX_RANKS,
    "RANK_BLOCK": RANK_BLOCK,
    "SHRINK_COLUMNS": SHRINK_COLUMNS,
    "MATRIX_FIELDS": MATRIX_FIELDS,
    "DELTA_FIELDS": DELTA_FIELDS,
    "SEGMENT_FIELDS": SEGMENT_FIELDS,
    "HALF_FIELDS": HALF_FIELDS,
}
