// Constants that Python numbers too, in constants.py: formats, states, and limits of sizes.
// constants.cpp gives their values by name, and native.py compares them when it loads the library.
#pragma once
#include <cstdint>

// How the elements of a packed weight are stored, see packed_weight.h.
enum class ElementFormat : int64_t { BF16, INT8, FP8, NIBBLES, SIX_BITS };

// How the scales and offsets of a packed weight are stored, see Parameters in packed_weight.h.
enum class ScaleFormat : int64_t { FLOAT32, FLOAT16, EIGHTS };

// How the KV cache stores a key or a value: bf16; or int8, with one bf16 scale per token and head.
enum class KvFormat : int64_t { BF16, INT8 };

// What a half layer computes between its two products, see layers.cpp.
enum class BodyKind : int64_t { ATTENTION, FEED_FORWARD };

// What became of the rows of a file in pack_gguf().
enum class PackState : int64_t { PACKED, NOT_FINITE, FILE_TOO_SHORT };

// What an operation on shared memory returns, and the types that it can add up.
enum class ChannelState : int64_t { DONE, PENDING, MISMATCH, BROKEN };
enum class SumType : int64_t { BF16, FP16, FP32, NONE };

constexpr int N_BLOCK = 32;         // rows of a weight that are packed together
constexpr long MIN_GROUP = 16;      // columns that share a scale; other groups are multiples of it
constexpr long MAX_RANK = 256;      // of an adapter
constexpr long MAX_HEAD_DIM = 256;  // a block of rows of this size fits on the stack
constexpr int MAX_RANKS = 64;       // that share memory
constexpr long MATRIX_FIELDS = 15;  // of Matrix in kernels.h, 64 bits each
constexpr long HALF_FIELDS = 34;    // of Half in layers.cpp, 64 bits each
