// Computes the largest products of rounded rows again, with the rows as they are.
//
// In: rows (m, k) in float32, a packed weight (n, k) of whole numbers, and their integer products
// (m, n). Out: the same products, of which those in the blocks of 32 outputs with each row's
// largest ones are replaced. llama/ops/rounded.py defines the result, bit for bit: every output has
// one order of floating-point operations, so the bits do not depend on the instruction set, the
// other rows or the number of threads. A block costs the same as one of its outputs, because all of
// them lie in the same cache lines.
#include <omp.h>

#include <algorithm>
#include <limits>

#include "packed_weight.h"

namespace {

constexpr long PREFETCH_DISTANCE = 2048;  // bytes

// Returns whether one of `count` products, 1 to 32, is larger than a number. NaN is not.
bool has_larger(const float* products, long count, float number) {
  if (count < N_BLOCK)
    return std::any_of(products, products + count, [&](float x) { return x > number; });
  Ints is_larger = {};
  for (int i = 0; i < N_BLOCK; i += LANES) is_larger |= load<Floats>(products + i) > number;
  return has_set_lane(is_larger);
}

// Writes the indices of the `count` blocks of a row (n) with the largest products, the largest
// first; of equal ones, the first in the row. NaN counts as the smallest product. The row has at
// least `count` blocks.
void choose_blocks(const float* row, long n, int64_t* chosen, float* largest, long count) {
  for (long block = 0; block < num_blocks(n); block++) {
    const float* products = row + block * N_BLOCK;
    const long width = std::min<long>(N_BLOCK, n - block * N_BLOCK);
    if (block >= count && !has_larger(products, width, largest[count - 1])) continue;
    float value = -std::numeric_limits<float>::infinity();
    for (long i = 0; i < width; i++) value = products[i] > value ? products[i] : value;
    long place = std::min(block, count - 1);
    for (; place > 0 && value > largest[place - 1]; place--) {
      largest[place] = largest[place - 1];
      chosen[place] = chosen[place - 1];
    }
    largest[place] = value;
    chosen[place] = block;
  }
}

// Multiplies a row of x (k) by one weight block: sums (32).
template <class Kind, bool HAS_OFFSETS>
void multiply_row(const Weight& weight, long block, const float* x, float* sums) {
  constexpr int VECTORS = N_BLOCK / LANES;
  alignas(64) float parameters_of_part[(K_BLOCK / MIN_GROUP + 1) * 2 * N_BLOCK];
  const Kind kind(weight.table);
  const Parameters parameters(weight, block);
  const long k = weight.k, group = weight.group;
  const char* packed = weight.block(block);
  FloatPairs totals[VECTORS] = {};
  for (long begin = 0, end; begin < k; begin = end) {
    end = std::min(begin + K_BLOCK, k);
    parameters.unpack(begin / group, (end - 1) / group + 1, parameters_of_part);
    const float* next = parameters_of_part;
    for (long i = begin, group_end; i < end; next += 2 * N_BLOCK) {
      Floats scales[VECTORS], offsets[VECTORS];
      for (int v = 0; v < VECTORS; v++) {
        scales[v] = load<Floats>(next + v * LANES);
        if (HAS_OFFSETS) offsets[v] = load<Floats>(next + N_BLOCK + v * LANES);
      }
      group_end = std::min((i / group + 1) * group, end);
      for (; i < group_end; i += 2 * Kind::PAIRS, packed += Kind::STEP) {
        for (long line = 0; line < Kind::STEP; line += 64)
          __builtin_prefetch(packed + PREFETCH_DISTANCE + line);
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) {
          const auto step = kind.load(packed + v * LANES * Kind::ROW_BYTES);
#pragma GCC unroll 8
          for (int j = 0; j < Kind::PAIRS; j++) {
            const FloatPairs elements = widen_pairs(kind.pairs(step, j));
            FloatPairs weights;
            if (HAS_OFFSETS) {
              weights.even = weights.odd = offsets[v];
              add_product(weights.even, elements.even, scales[v]);
              add_product(weights.odd, elements.odd, scales[v]);
            } else {
              weights = {elements.even * scales[v], elements.odd * scales[v]};
            }
            add_product(totals[v].even, weights.even, x[i + 2 * j]);
            add_product(totals[v].odd, weights.odd, x[i + 2 * j + 1]);
          }
        }
      }
    }
  }
  for (int v = 0; v < VECTORS; v++) store(sums + v * LANES, totals[v].even + totals[v].odd);
}

using MultiplyRow = void(const Weight& weight, long block, const float* x, float* sums);

template <class Kind> MultiplyRow* multiplier_of(const Weight& weight) {
  return weight.per_group > 1 ? multiply_row<Kind, true> : multiply_row<Kind, false>;
}

MultiplyRow* multiplier_of(const Weight& weight) {
  if (weight.format == ElementFormat::INT8) return multiplier_of<Int8>(weight);
  if (weight.format == ElementFormat::NIBBLES) return multiplier_of<Nibbles>(weight);
  return multiplier_of<SixBits>(weight);
}

}  // namespace

extern "C" {

// x (m, k) and products (m, n), of which `count` blocks a row are computed again. `matrix`
// describes a weight (n, k) of int8, nibbles or six bits with scales, without an adapter or a
// rotation, in MATRIX_FIELDS integers. `chosen` and `largest` (m, count) are memory to work in.
void exact_top(const float* x, const int64_t* matrix, float* products, int64_t* chosen,
               float* largest, long m, long n, long k, long count, int threads) {
  const Weight weight = {*(const Matrix*)matrix, n, k};
  MultiplyRow* const multiply = multiplier_of(weight);
#pragma omp parallel for num_threads(std::min<long>(m, threads)) if (m > 1)
  for (long r = 0; r < m; r++)
    choose_blocks(products + r * n, n, chosen + r * count, largest + r * count, count);
#pragma omp parallel for num_threads(std::min<long>(m * count, threads)) if (m * count > 1)
  for (long i = 0; i < m * count; i++) {
    alignas(64) float sums[N_BLOCK];
    const long row = i / count, column = chosen[i] * N_BLOCK;
    multiply(weight, chosen[i], x + row * k, sums);
    std::copy_n(sums, std::min<long>(N_BLOCK, n - column), products + row * n + column);
  }
}

}  // extern "C"
