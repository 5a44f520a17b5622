// Integer products: what linear.cpp, which packs x (rounded_rows.h), and integer_product.cpp share.
// The types have external linkage, because they cross the border of the two files.
#pragma once
#include "kernels.h"
#include "vectors.h"

// The quads of a row of x that lie together: one, or two where matrices are multiplied.
#if defined(HAS_MATRICES)
typedef int64_t PackedQuads;
#else
typedef int32_t PackedQuads;
#endif

// A row block of R rows from a K block on: quads (K/4, R, 4), or (K/8, R, 8), and the terms of its
// pieces (P, 3, R), which are the first values as int32, the scales of x, and the sums of its
// codes.
struct QuadRows {
  const char* quads;
  const float* terms;
};

// The layout of rounded x: the quads of all row blocks one after the other, then their terms.
struct RoundedLayout {
  long m, k;
  long piece;                      // k that share terms, 32 or 16
  Partition row_blocks, m_blocks;  // an M block is some row blocks

  // Returns the row block of `rows` rows from `row` on, from k = `begin` on.
  QuadRows part(const char* packed, long row, long rows, long begin) const {
    const long before = row * k + begin * rows;
    return {packed + before, (const float*)(packed + m * k) + 3 * before / piece};
  }
};

// Multiplies the row blocks of one M block of x by one weight block: totals (rows, 32). All rows of
// x are in `packed`, and `totals` holds up to M_BLOCK + REGISTER_ROWS rows.
using MultiplyRounded = void(const RoundedLayout& x, const char* packed, long m_block,
                             const Weight& weight, long block, float* totals);

// Returns the function for a weight of int8, nibbles or six bits whose elements are whole numbers.
MultiplyRounded* rounded_multiplier(const Weight& weight);
