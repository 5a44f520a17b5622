// Constants that Python defines as well, in constants.py: formats, states and size limits.
//
// Python passes them as plain integers. constants.cpp returns their values by name, and native.py
// compares them with Python's when it loads the library. tests/ops/test_native.py reads this file:
// each enumeration and each constant is on one line.
#pragma once
#include <cstdint>

// The storage format of the elements of a packed weight, see packed_weight.h.
enum class ElementFormat : int64_t { BF16, INT8, FP8, NIBBLES, SIX_BITS };

// The storage format of the scales and offsets of a packed weight, see Parameters in
// packed_weight.h.
enum class ScaleFormat : int64_t { FLOAT32, FLOAT16, EIGHTS };

// The storage format of keys and values in the KV cache: bf16, or int8 with one bf16 scale per
// token and head.
enum class KvFormat : int64_t { BF16, INT8 };

// The computation of a half layer between its two matrix products, see layers.cpp.
enum class BodyKind : int64_t { ATTENTION, FEED_FORWARD, BIDIRECTIONAL_ATTENTION };

// The result of pack_gguf().
enum class PackState : int64_t { PACKED, NOT_FINITE, FILE_TOO_SHORT };

// The result of an operation on shared memory.
enum class ChannelState : int64_t { DONE, PENDING, MISMATCH, BROKEN };

// The element types that ranks can sum; NONE stands for bytes, which are copied.
enum class SumType : int64_t { BF16, FP16, FP32, NONE };

constexpr int N_BLOCK = 32;            // rows of a weight that are packed together
constexpr long MIN_GROUP = 16;         // consecutive k of the smallest group; others are multiples
constexpr long MAX_RANK = 256;         // rank of an adapter
constexpr long MAX_HEAD_DIM = 256;     // elements of a head; stack buffers have this size
constexpr int MAX_RANKS = 64;          // ranks that share memory
constexpr long RANK_BLOCK = 16;        // rows of an adapter's down matrix packed together
constexpr long SHRINK_COLUMNS = 2048;  // columns of it that one piece of work multiplies
constexpr long MATRIX_FIELDS = 16;     // 64-bit fields of Matrix in kernels.h
constexpr long DELTA_FIELDS = 20;      // 64-bit fields of Delta in kernels.h
constexpr long SEGMENT_FIELDS = 3;     // 64-bit fields of Segment in kernels.h
constexpr long HALF_FIELDS = 36;       // 64-bit fields of Half in layers.cpp
