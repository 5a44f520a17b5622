// Faster ways to the sums of amx.h for a few rows of x and weights of 4 to 8 bits, for CPUs with
// AMX tiles. FewRows multiplies up to 4 rows in vectors; RowsAsPairs multiplies up to 16 rows by
// nibbles in tiles whose operands are swapped. Both give the same bits as PackedX of amx.h: they
// add the same products, rounded alike, in the same order.
#pragma once
#include "amx.h"

namespace {

// Products of up to 4 rows are bound by memory, and vectors read ahead of it better than tiles. As
// a tile does, a step of 32 k has one sum over its even k and one over its odd k, and adds both to
// the total.
constexpr int FEW_ROWS = 4;

// The layout of x for vectors: floats (K, m).
struct FewRows {
  long m, k;
  long pieces() const { return 1; }
  void pack(const uint16_t* x, char* packed, long) const {
    for (long r = 0; r < m; r++)
      for (long i = 0; i < k; i++) ((float*)packed)[i * m + r] = widen(x[r * k + i]);
  }
};

// Multiplies R rows of x, as floats (K, R), by a weight block: out (R, 32).
template <class Kind, bool HAS_GROUPS, int R>
void multiply_few_rows(const float* x, const Weight& weight, long block, float* out) {
  constexpr long STEP_K = 2 * Kind::PAIRS;
  alignas(64) float scales[HAS_GROUPS ? (TILE_K_BLOCK / MIN_GROUP + 1) * 2 * N_BLOCK : 1] = {};
  const Parameters parameters(weight, block);
  const Kind kind(weight.table);
  const char* w = weight.block(block);
  const long width = HAS_GROUPS ? weight.group : weight.k;
  Floats totals[R][2] = {};
  for (long k = 0, first_group = 0; k < weight.k; k += TILE_K) {
    if (HAS_GROUPS && k % TILE_K_BLOCK == 0) {
      first_group = k / width;
      const long end = std::min(k + TILE_K_BLOCK, weight.k);
      parameters.unpack(first_group, (end - 1) / width + 1, scales);
    }
    Floats sums[R][2][2] = {};  // of the first and the last 16 outputs, over even and odd k
    for (long i = k; i < k + TILE_K; i += MIN_GROUP) {
      Floats vectors[4];  // scales of the first and the last 16 outputs, then their offsets
      const float* group_scales =
          scales + (HAS_GROUPS ? (i / width - first_group) * 2 * N_BLOCK : 0);
      for (int v = 0; v < 4 && HAS_GROUPS; v++) vectors[v] = load<Floats>(group_scales + v * LANES);
#pragma GCC unroll 2
      for (long step = 0; step < MIN_GROUP; step += STEP_K, w += Kind::STEP) {
        prefetch_lines(w + PREFETCH_BYTES<Bf16>, Kind::STEP, true);
#pragma GCC unroll 4
        for (int j = 0; j < Kind::PAIRS; j++, x += 2 * R)
#pragma GCC unroll 2
          for (int half = 0; half < 2; half++) {
            FloatPairs v = kind.floats(kind.load(w + half * LANES * Kind::ROW_BYTES), j);
            if (HAS_GROUPS) {
              v.even =
                  (Floats)(scaled_bits(v.even, vectors[half], vectors[2 + half]) & 0xffff0000u);
              v.odd = (Floats)(scaled_bits(v.odd, vectors[half], vectors[2 + half]) & 0xffff0000u);
            }
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) {
              add_product(sums[r][half][0], v.even, x[r]);
              add_product(sums[r][half][1], v.odd, x[R + r]);
            }
          }
      }
    }
    for (int r = 0; r < R; r++)
      for (int half = 0; half < 2; half++) totals[r][half] += sums[r][half][0] + sums[r][half][1];
  }
  std::memcpy(out, totals, sizeof totals);
}

// Returns the multiply_few_rows() for a number of rows, 1 to FEW_ROWS.
template <class Kind, bool HAS_GROUPS, int... R>
auto select_few_rows(long rows, std::integer_sequence<int, R...>) {
  static constexpr decltype(&multiply_few_rows<Kind, HAS_GROUPS, 1>) RUN[] = {
      multiply_few_rows<Kind, HAS_GROUPS, R + 1>...};
  return RUN[rows - 1];
}

template <class Kind, class Packed>
void multiply_all(Worker& worker, const FewRows& x, Packed packed, const Weight& weight,
                  const Outputs& out) {
  constexpr std::make_integer_sequence<int, FEW_ROWS> ROWS;
  const auto run = has_groups(weight) ? select_few_rows<Kind, true>(x.m, ROWS)
                                      : select_few_rows<Kind, false>(x.m, ROWS);
  alignas(64) float sums[FEW_ROWS * N_BLOCK];
  const auto compute = [&](long block) {
    const float* rows = (const float*)packed();
    const FlushDenormals flush;
    run(rows, weight, block, sums);
    if (weight.per_group && !has_groups(weight)) scale_sums(weight, block, x.m, sums);
  };
  const auto write_out = [&](long block) { write(out, weight.n, sums, 0, x.m, block * N_BLOCK); };
  worker.run(num_blocks(weight.n), compute, write_out);
}

// The layout of x for products with nibbles in groups, for up to 16 rows: pairs (K/2, m).
//
// For each row of the weight, the 16 values of its table are scaled once per group, and all codes
// of the group look up their scaled value. That takes half the instructions of widen_block_as().
// The widened elements of a row are contiguous then, so the tiles take the weight as A and x as B.
struct RowsAsPairs {
  long m, k;
  long pieces() const { return 1; }
  void pack(const uint16_t* x, char* packed, long) const {
    for (long r = 0; r < m; r++)
      for (long i = 0; i < k; i += 2) std::memcpy(packed + 2 * (i * m + 2 * r), x + r * k + i, 4);
  }
  // Tiles 0 and 1 are the sums of 32 outputs, 4 and 5 their weights, 6 is x.
  void configure() const {
    TileConfiguration shapes;
    for (int tile = 0; tile < 7; tile++) {
      shapes.row_bytes[tile] = tile == 4 || tile == 5 ? 2 * TILE_K : 4 * m;
      shapes.rows[tile] = TILE_ROWS;
    }
    compiler_barrier();
    _tile_loadconfig(&shapes);
  }
};

// Looks up 32 k of 16 rows of nibbles: out (16, 32) of bf16.
//
// packed: the first of the 16 rows in the layout of nibbles.
// values: the 16 values of the table.
// scales: the scales of the rows; their offsets follow 32 floats later.
// prefetch: 256 bytes from this address on are prefetched into L2, a line after every four rows,
//     because several at once would stall.
inline void look_up_rows(const char* packed, Floats values, const float* scales, uint16_t* out,
                         const char* prefetch) {
  // A transpose of 32-bit integers: rows[i] has four integers, 32 k, of a row in each quarter.
  __m512i codes[4], halves[4], rows[4];
  for (int i = 0; i < 4; i++) codes[i] = ::load<__m512i>(packed + i * Nibbles::STEP);
  for (int i = 0; i < 4; i += 2) {
    halves[i] = _mm512_unpacklo_epi32(codes[i], codes[i + 1]);
    halves[i + 1] = _mm512_unpackhi_epi32(codes[i], codes[i + 1]);
  }
  for (int i = 0; i < 2; i++) {
    rows[2 * i] = _mm512_unpacklo_epi64(halves[i], halves[i + 2]);
    rows[2 * i + 1] = _mm512_unpackhi_epi64(halves[i], halves[i + 2]);
  }
  // Each integer is repeated four times and rotated, so that in each half another code is one bit
  // above the lowest. The table is indexed in 16-bit elements: scaled_bits() has the bf16 in the
  // odd elements, so an index is twice the code plus one. The permutation reads five bits of it.
  const UInts rotations = {31, 3, 7, 11, 31, 3, 7, 11, 31, 3, 7, 11, 31, 3, 7, 11};
  const UInts fourfold = {0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3};
#pragma GCC unroll 16
  for (int row = 0; row < TILE_ROWS; row++) {
    if (row % 4 == 0) __builtin_prefetch(prefetch + row / 4 * 64, 0, 2);
    const Floats scale = (Floats)_mm512_set1_ps(scales[row]);
    const UInts table = scaled_bits(values, scale, (Floats)_mm512_set1_ps(scales[N_BLOCK + row]));
    const __m512i lanes = (__m512i)(fourfold + row / 4 * 4);
    const __m512i repeated = _mm512_permutexvar_epi32(lanes, rows[row % 4]);
    const UInts indices = (UInts)_mm512_rorv_epi32(repeated, (__m512i)rotations) | 0x00010001;
    store(out + row * TILE_K, _mm512_permutexvar_epi16((__m512i)indices, (__m512i)table));
  }
}

template <class Kind, class Packed>
void multiply_all(Worker& worker, const RowsAsPairs& x, Packed packed, const Weight& weight,
                  const Outputs& out) {
  // Steps between the stores of the widened weights and the tile load that waits for them.
  constexpr long DELAY = 2;
  constexpr long STEP = TILE_K * K_BYTES<Kind>;  // bytes of a step of a weight block
  constexpr long AHEAD = 16 * STEP;              // distance of the prefetch in bytes
  constexpr long GROUPS = TILE_K_BLOCK / TILE_K;
  alignas(64) uint16_t widened[2 * DELAY][N_BLOCK * TILE_K];
  alignas(64) float by_output[N_BLOCK * TILE_ROWS], sums[N_BLOCK * TILE_ROWS];
  // One group more than needed: the last 16 rows read 32 floats from their half of a group on.
  alignas(64) float scales[(GROUPS + 1) * 2 * N_BLOCK] = {};
  const Floats values = load<Floats>(weight.table);
  bool is_configured = false;
  const auto compute = [&](long block) {
    const char *pairs = packed(), *w = weight.block(block);
    if (!is_configured) x.configure();
    is_configured = true;
    const FlushDenormals flush;
    const Parameters parameters(weight, block);
    const auto add_step = [&](long step) {
      const uint16_t* weights = widened[step % (2 * DELAY)];
      _tile_loadd(6, pairs + step * TILE_K * 2 * x.m, 4 * x.m);
      _tile_loadd(4, weights, 2 * TILE_K);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(5, weights + TILE_ROWS * TILE_K, 2 * TILE_K);
      _tile_dpbf16ps(1, 5, 6);
    };
    _tile_zero(0);
    _tile_zero(1);
    long step = 0;
    for (long group = 0; group < weight.k / weight.group; group++) {
      const float* group_scales = scales + group % GROUPS * 2 * N_BLOCK;
      if (group % GROUPS == 0)
        parameters.unpack(group, std::min(group + GROUPS, weight.k / weight.group), scales);
      for (long end = step + weight.group / TILE_K; step < end; step++, w += STEP) {
        if (step >= DELAY) add_step(step - DELAY);
        uint16_t* target = widened[step % (2 * DELAY)];
        compiler_barrier();
        look_up_rows(w, values, group_scales, target, w + AHEAD);
        look_up_rows(w + VECTOR_BYTES, values, group_scales + TILE_ROWS,
                     target + TILE_ROWS * TILE_K, w + AHEAD + STEP / 2);
        compiler_barrier();
      }
    }
    for (long last = std::max(step - DELAY, 0L); last < step; last++) add_step(last);
    _tile_stored(0, by_output, 4 * x.m);
    _tile_stored(1, by_output + TILE_ROWS * x.m, 4 * x.m);
    compiler_barrier();
    for (long row = 0; row < x.m; row++)
      for (long i = 0; i < N_BLOCK; i++) sums[row * N_BLOCK + i] = by_output[i * x.m + row];
  };
  const auto write_out = [&](long block) { write(out, weight.n, sums, 0, x.m, block * N_BLOCK); };
  worker.run(num_blocks(weight.n), compute, write_out);
  if (is_configured) _tile_release();
}

}  // namespace
