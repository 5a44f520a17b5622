// Products of x in int8 with weights of bytes in AMX tiles: both have one scale per row, so integer
// sums run over all k (Scaling::TOKENS of rounded_rows.h). linear.cpp asks tiles_work() first.
//
// The sums are exact, so the outputs have the bits that llama/ops/rounded.py defines, and those of
// the vectors of integer_product.cpp, which multiply a few rows. Quads of the weights are made as
// there: unsigned bytes, whose offset is taken off at the end. A step of 64 k has the bytes of a
// step of 32 k of bf16, so multiply_tiles() of amx.h runs both. Groups of 32 k would fill half of a
// step, and scaling their sums would take longer than tiles of bf16 do.
#pragma once
#include "amx.h"
#include "rounded_rows.h"

namespace {

constexpr long BYTE_TILE_K = 2 * TILE_K;              // k of a step
constexpr long BYTE_TILE_K_BLOCK = 2 * TILE_K_BLOCK;  // k of a K block, as many bytes as in bf16

// The layout of rounded rows in tiles: K blocks one after the other, each with the tiles of all
// rows, each tile (K/64, height, 64) int8; then for each row its scale and, as int32, its first
// value. Where K is no multiple of 64, the rest of a row is 0.
struct ByteTiles {
  long m, k;
  long padded_k;  // k with the rest of the last step
  long height;    // rows of a tile
  long tiles;     // tiles that cover the m rows
  ByteTiles(long m, const Weight& weight)
      : m(m),
        k(weight.k),
        padded_k((weight.k + BYTE_TILE_K - 1) & -BYTE_TILE_K),
        height(std::min(m, TILE_ROWS)),
        tiles(Partition(m, TILE_ROWS).count) {}

  // The k of the K block that begins with k = `begin`.
  long count_k(long begin) const { return std::min(padded_k - begin, BYTE_TILE_K_BLOCK); }
  // The index of the first element of a tile of that K block.
  long index(long tile, long begin) const {
    return (begin * tiles + tile * count_k(begin)) * height;
  }
  // The address of the scale and the first value of a row.
  const char* terms(const char* packed, long row) const {
    return packed + tiles * height * padded_k + row * 2 * sizeof(float);
  }

  // A piece of work is a row.
  long pieces() const { return m; }
  void pack(const uint16_t* x, char* packed, long row) const {
    const uint16_t* from = x + row * k;
    const RoundingScale scale(largest_magnitude(from, k));
    int32_t sum = 0;
    for (long i = 0; i < padded_k; i += ROUNDED_GROUP) {
      const long begin = i - i % BYTE_TILE_K_BLOCK;
      const long step = (i - begin) / BYTE_TILE_K;
      char* to = packed + index(row / TILE_ROWS, begin) +
                 (step * height + row % TILE_ROWS) * BYTE_TILE_K + i % BYTE_TILE_K;
      const __m256i codes = i < k ? round_group(from + i, scale.inverse) : __m256i{};
      const HalfSums sums(codes);
      sum += sums.first + sums.second;
      store(to, codes);
    }
    char* row_terms = (char*)terms(packed, row);
    store(row_terms, scale.scale);
    store(row_terms + sizeof(float), -BYTE_OFFSET * sum);
  }
};

// Multiplies row blocks of x, of one tile or two each, by the weight blocks of a panel, as
// multiply_panel() of amx.h does: int32 totals (blocks, rows, 32), which lack the first values.
inline void multiply_byte_panel(const char* packed, const ByteTiles& x, const Partition& row_blocks,
                                long first_row_block, long end_row_block, const Weight& weight,
                                long first_block, long blocks, float* totals) {
  alignas(64) char quads[BYTE_TILE_K_BLOCK * N_BLOCK];
  const ByteQuads source(weight);
  const long first_tile = row_blocks.first(first_row_block);
  const long rows = count_rows(x, row_blocks, first_row_block, end_row_block);
  const auto address = [&](long block, long k) {
    return weight.block(first_block + block) + k / STEP_K * ByteQuads::STEP;
  };
  for (long begin = 0; begin < x.k; begin += BYTE_TILE_K_BLOCK)
    for (long block = 0; block < blocks; block++) {
      const long count_k = x.count_k(begin), steps = count_k / BYTE_TILE_K;
      const char* prefetch =
          block + 1 < blocks ? address(block + 1, begin) : address(0, begin + BYTE_TILE_K_BLOCK);
      compiler_barrier();  // the tiles must have loaded the previous quads
      // Where K ends within a step, the tiles multiply the rest of old quads by zeros.
      make_quads(source, address(block, begin), std::min(x.k - begin, count_k), quads, prefetch);
      compiler_barrier();
      for (long b = first_row_block; b < end_row_block; b++) {
        const long tile = row_blocks.first(b);
        const auto run = row_blocks.size(b) == 2 ? multiply_tiles<2, TileElements::INT8>
                                                 : multiply_tiles<1, TileElements::INT8>;
        float* sums = totals + (block * rows + (tile - first_tile) * x.height) * N_BLOCK;
        run((const uint16_t*)(packed + x.index(tile, begin)), x.height, x.height * count_k / 2,
            {quads, nullptr, steps, 0, false}, sums, begin == 0);
      }
    }
}

// Scales integer totals (rows, 32) of a weight block and rows of x from `row` on: first by the
// scales of x, then by those of the weight.
inline void scale_totals(const ByteTiles& x, const char* packed, long row, long rows,
                         const Weight& weight, long block, float* totals) {
  alignas(64) float scales[2 * N_BLOCK];
  Parameters(weight, block).unpack(0, 1, scales);
  for (long r = 0; r < rows; r++, totals += N_BLOCK) {
    const char* terms = x.terms(packed, row + r);
    const float scale = load<float>(terms);
    const int32_t first = load<int32_t>(terms + sizeof(float));
    for (long i = 0; i < N_BLOCK; i += LANES) {
      const Ints sums = load<Ints>(totals + i) + first;
      const Floats scaled = __builtin_convertvector(sums, Floats) * scale;
      store(totals + i, scaled * load<Floats>(scales + i));
    }
  }
}

// Multiplies all rounded rows by the weight, see the overload in linear.cpp.
template <class Kind, class Packed>
void multiply_all(Worker& worker, const ByteTiles& x, Packed packed, const Weight& weight,
                  const Outputs& out) {
  const auto multiply = [&](const char* packed_rows, const Partition& row_blocks,
                            long first_row_block, long end_row_block, long first_block, long blocks,
                            float* totals) {
    const long row = row_blocks.first(first_row_block) * TILE_ROWS;
    const long rows = count_rows(x, row_blocks, first_row_block, end_row_block);
    multiply_byte_panel(packed_rows, x, row_blocks, first_row_block, end_row_block, weight,
                        first_block, blocks, totals);
    for (long p = 0; p < blocks; p++)
      scale_totals(x, packed_rows, row, std::min(rows, x.m - row), weight, first_block + p,
                   totals + p * rows * N_BLOCK);
  };
  multiply_panels(worker, x, packed, weight, out, multiply);
}

}  // namespace
