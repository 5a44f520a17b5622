// What layers.cpp runs as phases of one team, and the single ops as teams of their own: each has
// one body, so that both give the same bytes. All pointers are to what the ops' Python files check.
#pragma once
#include <cstdint>

#include "constants.h"
#include "team.h"

// elementwise.cpp: one row each, a multiple of 32 numbers.
void rms_norm(const uint16_t* x, const uint16_t* weight, uint16_t* out, long width, float eps);
void silu_mul(const uint16_t* gate, const uint16_t* up, uint16_t* out, long width);
// Sylvester's Hadamard matrix over sqrt(width), a power of two; with room for so many floats.
void hadamard(const uint16_t* x, float* room, uint16_t* out, long width);

// A page of the KV cache, as kv_cache.py defines it: (S, K, D) bf16; or (S, K, D) int8, followed by
// their scales (K, S) bf16.
inline long kv_element_bytes(KvFormat format) { return format == KvFormat::INT8 ? 1 : 2; }
inline long kv_row_bytes(long dim, KvFormat format) {
  return format == KvFormat::INT8 ? dim + 2 : 2 * dim;
}

struct Heads {
  long queries, kv, dim;      // how many of each, and the numbers of one
  long num_pages, page_size;  // of the cache
  KvFormat kv_format;
};

// qkv (queries + 2 * kv, dim) and freqs_cis (dim / 2, 2) of a token -> its queries, and its keys
// and values in their slot of the pages.
void rope_and_store(const uint16_t* qkv, const float* freqs_cis, char* pages, int64_t slot,
                    uint16_t* queries, const Heads& heads);

// linear.cpp: a packed weight (n, k) in one of the formats of packed_weight.h, as Python's `Weight`
// describes it in fifteen numbers.
struct Matrix {
  const char *data, *parameters;  // no parameters: the numbers are the weights
  const float* table;             // 16 numbers, for nibbles; the first of 64, for six bits
  ElementFormat format;
  ScaleFormat scale_format;
  int64_t per_group;   // parameters of a group: a scale, or a scale and an offset
  int64_t group;       // how many neighbouring k share them
  int64_t is_rotated;  // rows go through hadamard() first
  // What is added to the weight: down (rank, k), then up (n, rank), bf16 in blocks. The rank is a
  // multiple of 32, and 0 where there is none.
  const uint16_t* adapter;
  int64_t rank;
  // Blocks of 32 rows lie `stride` bytes apart. A rank's share of several matrices in one lies in
  // up to three places: from block `first` on, so many blocks that are not its own lie between.
  int64_t stride;
  struct Gap {
    int64_t first, blocks;
  } gaps[2];

  long place(long block) const {
    long before = 0;
    for (const Gap& gap : gaps) before += block >= gap.first ? gap.blocks : 0;
    return block + before;
  }
  const char* block(long number) const { return data + place(number) * stride; }
};
static_assert(sizeof(Matrix) == MATRIX_FIELDS * sizeof(int64_t));

struct Weight : Matrix {
  long n, k;
};

// Rows (count, k); with a norm, they are normalised first, as rms_norm() does.
struct Rows {
  const uint16_t* data;
  long count;
  const uint16_t* norm = nullptr;
  float eps = 0;
};

// Where the outputs go: (m, n). Of an adapter, `up`, and what `down` gave (m, rank).
struct Outputs {
  enum Kind { BF16, FLOAT32, ADDED };  // ADDED: rounded to bf16, then added to the bf16 there
  void* data;
  Kind kind;
  const uint16_t* up = nullptr;
  const float* middle = nullptr;
  long rank = 0;
};

// Bytes of workspace for `m` rows of up to `k` numbers.
long linear_bytes(long m, long k, long threads);
void linear(Worker& member, Rows x, Weight weight, Outputs out, char* workspace);

// attention.cpp; the legend of the letters is in attention.py.
struct Attention {
  const uint16_t* queries;    // (T, H, D)
  const char *keys, *values;  // P pages each
  uint16_t* out;              // (T, H, D)
  const int64_t *table, *query_starts, *seq_lens;
  char* workspace;
  long num_seqs, pages_each, page_size, heads, kv_heads, dim;
  float scale;  // of the scores
  KvFormat kv_format;
};

long attention_bytes(const Attention& call);
double plan_attention(const Attention& call);  // fills the workspace; returns the multiplications
void attend(Worker& member, const Attention& call);
