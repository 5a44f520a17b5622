// Low-rank updates of some rows of a product, one adapter per segment of rows (LoRA; Hu et al.,
// 2021; for many adapters in one batch, Chen et al., 2023, Punica).
//
// A row of the product gets scale * up * (down * x), which is added to its float32 sums before they
// are rounded. shrink() computes down * x as a phase of the team, from x in bf16 and without
// rounding; expand() adds the rest where the sums of a block are written. Every sum runs in the
// same order for any number of rows and threads, so a row gets the same bytes in any batch. Rows
// that belong to no segment are not touched.
//
// down is stored in blocks of 16 of its rows, in pairs of columns: (ranks / 16, k / 2, 16, 2) bf16.
// up is stored like a weight: (blocks, rank / 2, 32, 2) bf16.
#pragma once
#include <algorithm>

#include "kernels.h"
#include "vectors.h"

namespace {

constexpr long MAX_SHRINK_ROWS = 16;                   // rows of x of one piece of work
constexpr int SHRINK_TILE = REGISTERS == 32 ? 4 : 2;   // rows of x that share a pass over down
constexpr int EXPAND_TILE = REGISTERS == 32 ? 4 : 1;   // rows of sums that share a pass over up
constexpr int SHRINK_SUMS = 4;                         // independent sums, which hide the latency
constexpr long SHRINK_AHEAD = 4096;                    // bytes of down that are prefetched
constexpr int VECTORS_PER_RANKS = RANK_BLOCK / LANES;  // vectors of one block of down

inline long num_chunks(long k) { return (k + SHRINK_COLUMNS - 1) / SHRINK_COLUMNS; }

// Returns the number of elements of down * x of one segment, for all chunks of k columns.
inline long middle_size(const Segment& segment, const Delta& delta, long k) {
  return segment.rows * delta.ranks * num_chunks(k);
}

// Multiplies R rows of x by 16 rows of down, `pairs` pairs of columns of each -> sums (R, 16).
template <int R>
void shrink_tile(const uint16_t* x, long stride, const uint16_t* down, long pairs, float* sums) {
  for (int v = 0; v < VECTORS_PER_RANKS; v++) {
    Floats totals[R][SHRINK_SUMS] = {};
    const auto add = [&](long pair, int sum) __attribute__((always_inline)) {
      const char* address = (const char*)(down + (pair * RANK_BLOCK + v * LANES) * 2);
      __builtin_prefetch(address + SHRINK_AHEAD);
      const Pairs elements = load_pairs(address);
#pragma GCC unroll 4
      for (int r = 0; r < R; r++)
        multiply_add(totals[r][sum], elements, load_pair(x + r * stride + 2 * pair));
    };
    long pair = 0;
    for (; pair + SHRINK_SUMS <= pairs; pair += SHRINK_SUMS)
#pragma GCC unroll 4
      for (int sum = 0; sum < SHRINK_SUMS; sum++) add(pair + sum, sum);
#pragma GCC unroll 4
    for (int sum = 0; sum < SHRINK_SUMS - 1; sum++)
      if (pair + sum < pairs) add(pair + sum, sum);
    for (int r = 0; r < R; r++)
      store(sums + r * RANK_BLOCK + v * LANES,
            (totals[r][0] + totals[r][1]) + (totals[r][2] + totals[r][3]));
  }
}

template <int R>
void shrink_rows(const uint16_t* x, long stride, const uint16_t* down, long pairs, float* sums,
                 long rows) {
  for (; rows >= R; rows -= R, x += R * stride, sums += R * RANK_BLOCK)
    shrink_tile<R>(x, stride, down, pairs, sums);
  if constexpr (R > 1) {
    if (rows) shrink_rows<R / 2>(x, stride, down, pairs, sums, rows);
  }
}

// Computes scale * down * x for all segments, into the memory of `adapters`: for each segment one
// after the other, (chunks, rows, ranks). x (rows, k) are all rows of the step. A piece of work is
// some rows of a segment, one block of ranks and one chunk of columns.
inline void shrink(Worker& worker, const uint16_t* x, long k, const Adapters& adapters,
                   long product) {
  const long chunks = num_chunks(k);
  const auto num_pieces = [&](const Segment& segment) {
    const long row_blocks = (segment.rows + MAX_SHRINK_ROWS - 1) / MAX_SHRINK_ROWS;
    return row_blocks * (segment.deltas[product].ranks / RANK_BLOCK) * chunks;
  };
  long pieces = 0;
  for (long i = 0; i < adapters.count; i++) pieces += num_pieces(adapters.segments[i]);
  if (!pieces) return;
  alignas(64) float sums[MAX_SHRINK_ROWS * RANK_BLOCK];
  float* target = nullptr;
  long ranks = 0, rows = 0;
  float scale = 0;
  const auto compute = [&](long piece) {
    const Segment* segment = adapters.segments;
    float* middle = adapters.middle;
    for (long count; piece >= (count = num_pieces(*segment)); segment++, piece -= count)
      middle += middle_size(*segment, segment->deltas[product], k);
    const Delta& delta = segment->deltas[product];
    const long rank_blocks = delta.ranks / RANK_BLOCK;
    const long chunk = piece % chunks;
    const long rank_block = piece / chunks % rank_blocks;
    const long first_row = piece / chunks / rank_blocks * MAX_SHRINK_ROWS;
    const long first = chunk * SHRINK_COLUMNS;
    rows = std::min(MAX_SHRINK_ROWS, segment->rows - first_row);
    ranks = delta.ranks;
    for (const Delta::Part& part : delta.parts)
      if (part.blocks && part.offset <= rank_block * RANK_BLOCK) scale = (float)part.scale;
    target = middle + (chunk * segment->rows + first_row) * ranks + rank_block * RANK_BLOCK;
    shrink_rows<SHRINK_TILE>(x + (segment->first_row + first_row) * k + first, k,
                             delta.down + (rank_block * k + first) * RANK_BLOCK,
                             std::min(SHRINK_COLUMNS, k - first) / 2, sums, rows);
  };
  worker.run(pieces, compute, [&](long) {
    for (long row = 0; row < rows; row++)
      for (long i = 0; i < RANK_BLOCK; i++)
        target[row * ranks + i] = sums[row * RANK_BLOCK + i] * scale;
  });
}

// Adds up * middle to the sums (R, 32) of one block of outputs. Rows of middle are `stride`
// elements apart. The products of odd ranks have sums of their own, which hide the latency.
template <int R>
void expand_tile(const uint16_t* up, const float* middle, long stride, long rank, float* sums) {
  constexpr int VECTORS = N_BLOCK / LANES;
  for (int first = 0; first < VECTORS; first += 2) {
    Floats even_sums[R][2];
    Floats odd_sums[R][2] = {};
    for (int r = 0; r < R; r++)
      std::memcpy(even_sums[r], sums + r * N_BLOCK + first * LANES, sizeof even_sums[r]);
    for (long i = 0; i < rank; i += 2) {
#pragma GCC unroll 2
      for (int v = 0; v < 2; v++) {
        const UInts pairs = load<UInts>(up + i * N_BLOCK + 2 * (first + v) * LANES);
        const Floats even = widen_even(pairs);
        const Floats odd = widen_odd(pairs);
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
          add_product(even_sums[r][v], even, middle[r * stride + i]);
          add_product(odd_sums[r][v], odd, middle[r * stride + i + 1]);
        }
      }
    }
    for (int r = 0; r < R; r++)
      for (int v = 0; v < 2; v++)
        store(sums + r * N_BLOCK + (first + v) * LANES, even_sums[r][v] + odd_sums[r][v]);
  }
}

// Adds up * middle to `rows` rows of sums (rows, 32).
inline void expand_rows(const uint16_t* up, const float* middle, long stride, long rank,
                        float* sums, long rows) {
  for (; rows >= EXPAND_TILE; rows -= EXPAND_TILE) {
    expand_tile<EXPAND_TILE>(up, middle, stride, rank, sums);
    middle += EXPAND_TILE * stride;
    sums += EXPAND_TILE * N_BLOCK;
  }
  for (; rows; rows--, middle += stride, sums += N_BLOCK)
    expand_tile<1>(up, middle, stride, rank, sums);
}

// Does the same for a product with several chunks of columns, whose sums are `distance` elements
// apart: they are added first, some rows at a time.
inline void expand_chunks(const uint16_t* up, const float* middle, long stride, long chunks,
                          long distance, long rank, float* sums, long rows) {
  alignas(64) float totals[EXPAND_TILE][MAX_RANK];
  for (long first = 0; first < rows; first += EXPAND_TILE) {
    const long count = std::min((long)EXPAND_TILE, rows - first);
    for (long r = 0; r < count; r++) {
      const float* sums_of_row = middle + (first + r) * stride;
      for (long i = 0; i < rank; i += LANES) {
        Floats total = load<Floats>(sums_of_row + i);
        for (long chunk = 1; chunk < chunks; chunk++)
          total += load<Floats>(sums_of_row + chunk * distance + i);
        store(totals[r] + i, total);
      }
    }
    expand_rows(up, totals[0], MAX_RANK, rank, sums + first * N_BLOCK, count);
  }
}

// Adds the updates of a product to the sums (end_row - first_row, 32) of one block of outputs, of
// the rows that belong to segments. The operands of the next block are prefetched.
inline void expand(const Updates& updates, float* sums, long first_row, long end_row, long column) {
  const Adapters& adapters = *updates.adapters;
  const long chunks = num_chunks(updates.k);
  const long block = column / N_BLOCK;
  const float* middle = adapters.middle;
  for (long i = 0; i < adapters.count; i++) {
    const Segment& segment = adapters.segments[i];
    const Delta& delta = segment.deltas[updates.product];
    const long first = std::max(first_row, segment.first_row);
    const long end = std::min(end_row, segment.first_row + segment.rows);
    const long distance = segment.rows * delta.ranks;
    if (first < end && delta.ranks)
      for (const Delta::Part& part : delta.parts) {
        const long index = block - part.first_block;
        if (index < 0 || index >= part.blocks) continue;
        const uint16_t* up = part.up + index * part.rank * N_BLOCK;
        const float* rows = middle + (first - segment.first_row) * delta.ranks + part.offset;
        float* sums_of_rows = sums + (first - first_row) * N_BLOCK;
        if (chunks == 1)
          expand_rows(up, rows, delta.ranks, part.rank, sums_of_rows, end - first);
        else
          expand_chunks(up, rows, delta.ranks, chunks, distance, part.rank, sums_of_rows,
                        end - first);
        if (index + 1 < part.blocks)
          for (long byte = 0; byte < 2 * part.rank * N_BLOCK; byte += 64)
            __builtin_prefetch((const char*)(up + part.rank * N_BLOCK) + byte, 0, 2);
      }
    middle += distance * chunks;
  }
}

}  // namespace
