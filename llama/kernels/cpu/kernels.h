// The operators of a layer: declarations, and the structures that describe their arguments.
//
// layers.cpp runs these operators as phases of one thread team (team.h), and the exported function
// of each operator runs it alone. Both ways call the same body, so they give the same bytes. The
// Python modules of llama/ops own all tensors and check shapes and types; nothing is checked here.
// All tensors are contiguous.
#pragma once
#include <cstdint>

#include "constants.h"
#include "team.h"

// --- elementwise.cpp: each function computes one row, whose width is a multiple of 32 elements ---

// RMSNorm of x (width) bf16, multiplied by weight (width) -> out (width).
void rms_norm(const uint16_t* x, const uint16_t* weight, uint16_t* out, long width, float eps);

// silu(gate) * up: gate and up (width) bf16 -> out (width).
void silu_mul(const uint16_t* gate, const uint16_t* up, uint16_t* out, long width);

// Multiplies x (width) bf16 by Sylvester's Hadamard matrix over sqrt(width) -> out (width). The
// width is a power of two. The workspace has `width` floats.
void hadamard(const uint16_t* x, float* workspace, uint16_t* out, long width);

// Returns the bytes of one element of the KV cache.
inline long kv_element_bytes(KvFormat format) { return format == KvFormat::INT8 ? 1 : 2; }

// Returns the bytes of one row of the KV cache, `dim` elements and their scale. A page has S slots
// of K kv heads. It is (S, K, D) bf16, or (S, K, D) int8 followed by the bf16 scales (K, S): see
// llama/ops/kv_cache.py.
inline long kv_row_bytes(long dim, KvFormat format) {
  return format == KvFormat::INT8 ? dim + 2 : 2 * dim;
}

// The shape of one token's queries, keys and values, and of the pages that store keys and values.
struct QkvShape {
  long heads;       // query heads
  long kv_heads;    // key heads, which are as many as value heads
  long dim;         // elements per head
  long num_pages;   // pages of a plane; the plane of the values follows the plane of the keys
  long page_size;   // slots per page
  KvFormat format;  // format of the pages
};

// Rotates the queries and keys of one token, and stores its keys and values in a slot of the pages.
// qkv (heads + 2 * kv_heads, dim) bf16, freqs_cis (dim / 2, 2) -> queries (heads, dim).
// slot = page * page_size + offset in the page.
void rope_and_store(const uint16_t* qkv, const float* freqs_cis, char* pages, int64_t slot,
                    uint16_t* queries, const QkvShape& shape);

// --- linear.cpp: products with a packed weight (n, k), in a format of packed_weight.h ---

// Returns the number of blocks of a weight of n rows. The last one may have fewer rows than 32: the
// rest of it is padding, finite numbers that no output depends on.
inline long num_blocks(long n) { return (n + N_BLOCK - 1) / N_BLOCK; }

// A packed weight. `Weight.native_matrix` in Python describes it by these MATRIX_FIELDS integers.
struct Matrix {
  const char* data;        // elements
  const char* parameters;  // scales and offsets; unused if per_group is 0
  const float* table;      // nibbles: the 16 elements; six bits: the first of 64; otherwise unused
  ElementFormat format;
  ScaleFormat scale_format;
  int64_t per_group;   // 0: elements are the weights; 1: a scale per group; 2: scale and offset
  int64_t group;       // consecutive k that share a scale and an offset
  int64_t is_rotated;  // whether x must be multiplied by hadamard() first
  // Consecutive k of x that share a scale when x is rounded to int8, 32 or all; 0: x stays bf16.
  // The elements are whole numbers then, K is a multiple of 32, and groups have 16 k or a multiple
  // of 32.
  int64_t activations;
  // A low-rank adapter, whose product is added: down (rank, k), then up (n, rank), both bf16 in
  // blocks. The rank is a multiple of 32, or 0 without an adapter.
  const uint16_t* adapter;
  int64_t rank;
  // Distance in bytes between blocks of 32 rows. If this matrix is one rank's part of several
  // matrices that are stored as one, up to two gaps contain the blocks of other ranks: before block
  // `first` of this part, `blocks` blocks are skipped.
  int64_t stride;
  struct Gap {
    int64_t first;
    int64_t blocks;
  } gaps[2];

  // Returns the index in memory of a block of this part.
  long stored_index(long block) const {
    long skipped = 0;
    for (const Gap& gap : gaps) skipped += block >= gap.first ? gap.blocks : 0;
    return block + skipped;
  }

  // Returns the address of the elements of a block.
  const char* block(long index) const { return data + stored_index(index) * stride; }
};
static_assert(sizeof(Matrix) == MATRIX_FIELDS * sizeof(int64_t));

struct Weight : Matrix {
  long n;  // rows, or output features
  long k;  // columns, or input features
};

// The inputs of a product: (count, k) bf16. With a norm (k), rms_norm() is applied to each row.
struct Rows {
  const uint16_t* data;
  long count;
  const uint16_t* norm = nullptr;
  float eps = 0;
};

// An adapter's update of one product: scale * up * down for each part of its outputs. Several
// matrices that are stored as one, such as queries, keys and values, have a part each. Python
// describes it by these DELTA_FIELDS integers; adapters.h has the layouts.
struct Delta {
  const uint16_t*
      down;       // (ranks, k) bf16 in blocks of RANK_BLOCK rows, the parts one below another
  int64_t ranks;  // a multiple of RANK_BLOCK; 0 if the adapter leaves the product as it is
  struct Part {
    const uint16_t* up;   // (32 * blocks, rank) bf16 in blocks; outputs of other parts have zeros
    int64_t first_block;  // its first block of 32 outputs
    int64_t blocks;       // 0 if there is no such part
    int64_t rank;         // an even number up to MAX_RANK
    int64_t offset;       // its first row of `down`
    double scale;
  } parts[3];
};
static_assert(sizeof(Delta) == DELTA_FIELDS * sizeof(int64_t));

// Consecutive rows of a step that belong to one adapter.
struct Segment {
  int64_t first_row;
  int64_t rows;
  const Delta* deltas;  // one per product
};
static_assert(sizeof(Segment) == SEGMENT_FIELDS * sizeof(int64_t));

// The adapters of the rows of a step: segments in ascending order.
struct Adapters {
  const Segment* segments;
  long count;
  float* middle;     // memory for down * x of all segments, see shrink()
  uint16_t* normed;  // memory for the rows (m, k) after RMSNorm, for products with a norm
};

// The updates of one product, whose down * x is in the memory of `adapters`.
struct Updates {
  const Adapters* adapters;
  long product;  // index in the deltas of each segment
  long k;
};

// The outputs of a product: (m, n), and the adapter's operands, if there is an adapter.
struct Outputs {
  // BF16 and FLOAT32 overwrite the outputs. ADDED rounds each sum to bf16 and adds it to the bf16
  // that is stored there.
  enum Kind { BF16, FLOAT32, ADDED };
  void* data;
  Kind kind;
  const uint16_t* up = nullptr;         // (n, rank) bf16 in blocks, the last one padded
  const float* down_outputs = nullptr;  // (m, rank), x times the down matrix
  long rank = 0;
  const Updates* updates = nullptr;  // of the adapters that some rows have, if any has one
};

// Returns the bytes of workspace that linear() needs for m rows of up to k elements.
long linear_bytes(long m, long k, long threads);

// Computes x times the transposed weight. All workers of a team call it with the same arguments.
void linear(Worker& worker, Rows x, Weight weight, Outputs out, char* workspace);

// The same with the updates of the adapters of some rows; `product` is their index of this product.
void linear(Worker& worker, Rows x, Weight weight, Outputs out, char* workspace,
            const Adapters& adapters, long product);

// --- attention.cpp: attention over the paged KV cache ---

// The arguments of attention. attention.py has the legend of the letters.
struct Attention {
  const uint16_t* queries;      // (T, H, D)
  const char* keys;             // P pages
  const char* values;           // P pages
  uint16_t* out;                // (T, H, D)
  const int64_t* table;         // (B, M) page indices
  const int64_t* query_starts;  // (B + 1)
  const int64_t* seq_lens;      // (B)
  char* workspace;              // attention_bytes()
  long num_seqs;                // B
  long pages_per_seq;           // M
  long page_size;               // S
  long heads;                   // H
  long kv_heads;                // K
  long dim;                     // D
  float scale;                  // factor of the scores
  KvFormat kv_format;
  bool is_bidirectional;  // whether each query attends to its whole sequence
};

// Returns the arguments that describe sequences and heads; the others are 0.
inline Attention attention_shape(const int64_t* query_starts, const int64_t* seq_lens,
                                 long num_seqs, long heads, long kv_heads, long head_dim) {
  Attention attention = {};
  attention.query_starts = query_starts;
  attention.seq_lens = seq_lens;
  attention.num_seqs = num_seqs;
  attention.heads = heads;
  attention.kv_heads = kv_heads;
  attention.dim = head_dim;
  return attention;
}

// Returns the bytes of workspace that attention needs.
long attention_bytes(const Attention& call);

// Writes the work items to the workspace; returns the number of multiplications.
double plan_attention(const Attention& call);

// Computes attention, after plan_attention(). All workers of a team call it.
void attend(Worker& worker, const Attention& call);
