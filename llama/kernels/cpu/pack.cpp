// Packs matrices of a checkpoint into the layouts of packed_weight.h: a bf16 matrix (n, k) is only
// reordered, or quantized to int8 or to 4 bits with scales and offsets; codes and scales that are
// already quantized are reordered. The last block of n rows repeats the last row as its padding, so
// that padding is never the largest, the smallest or the least exact of the rows. llama/weights
// owns the tensors and checks the shapes.
//
// The quantization to 4 bits follows the k-quants of llama.cpp: a search over scales, with a
// least-squares fit for each, and eight groups that share float16 super-scales.
#include <algorithm>
#include <cmath>

#include "codes.h"

namespace {

// Bytes between the rows of the workspace. Without them, rows whose length is a power of two would
// all map to one set of a cache.
constexpr long PAD = 64;

// Returns the bytes of workspace in which one thread packs 32 rows of `row_bytes`.
long thread_workspace(long row_bytes) { return N_BLOCK * (row_bytes + PAD); }

// Transposes 32 rows of `count` pairs, which lie PAD bytes apart in the workspace: out (count, 32).
// It reads one cache line of each row at a time.
template <class Pair> void transpose(const char* rows, Pair* out, long count) {
  constexpr long LINE = 64 / sizeof(Pair);
  const long stride = count * sizeof(Pair) + PAD;
  for (long begin = 0; begin < count; begin += LINE)
    for (long i = begin; i < begin + LINE && i < count; i++)
      for (long row = 0; row < N_BLOCK; row++)
        out[i * N_BLOCK + row] = load<Pair>(rows + row * stride + i * sizeof(Pair));
}

// Returns the index of the row of a matrix of n rows that becomes a row of a block.
inline long row_in_file(long block, long row, long n) {
  return std::min(block * N_BLOCK + row, n - 1);
}

// Packs codes (n, k), one byte each, into the layout of a kind, see write_codes().
template <class Kind>
void pack_codes(const uint8_t* codes, char* values, long n, long k, int threads) {
  constexpr long LINE = 64;  // codes of a row that are copied at once
#pragma omp parallel for num_threads(threads)
  for (long block = 0; block < num_blocks(n); block++)
    for (long begin = 0; begin < k; begin += LINE) {
      uint8_t lines[N_BLOCK * LINE];
      const long count = std::min(LINE, k - begin);
      for (long row = 0; row < N_BLOCK; row++)
        std::memcpy(lines + row * LINE, codes + row_in_file(block, row, n) * k + begin, count);
      write_codes<Kind>(lines, LINE, count, values + (block * k + begin) * K_BYTES<Kind>);
    }
}

// Quantizes a row of k bf16 to int8. Returns the scale, with which the largest magnitude is 127.
float quantize(const uint16_t* row, int8_t* out, long k) {
  uint16_t largest = 0;  // without their signs, bf16 are in the order of their bits
  for (long i = 0; i < k; i++) largest = std::max<uint16_t>(largest, row[i] & 0x7fff);
  const float scale = widen(largest) / 127;
  const float divisor = scale == 0 ? 1 : scale;
  for (long i = 0; i < k; i++) out[i] = (int8_t)std::nearbyint(widen(row[i]) / divisor);
  return scale;
}

// The quantization to 4 bits. A group is 32 neighbouring k of a row. The functions below compute
// LANES groups at once, which are the same k of LANES rows.
constexpr long GROUP = 32;
constexpr int NUM_TRIALS = 21;  // scales that are tried: range / 14, range / 14.1, ... range / 16

inline Floats minimum(Floats a, Floats b) { return a < b ? a : b; }
inline Floats maximum(Floats a, Floats b) { return a > b ? a : b; }
inline Floats inverse(Floats v) { return v == 0 ? v : 1 / v; }

// Rounds to integers, ties to even. Magnitudes must be below 2^22.
inline Floats nearest(Floats v) { return v + ROUNDING_SHIFT - ROUNDING_SHIFT; }

// Returns the code, 0 to 15, whose element is nearest to x.
inline Floats nearest_code(Floats x, Floats offset, Floats inverse_scale) {
  return minimum(maximum(nearest((x - offset) * inverse_scale), Floats{}), Floats{} + 15);
}

// The parameters of a group: element = scale * code + offset. The offset is never above 0.
struct Affine {
  Floats scale, offset;
};

// Returns the parameters of a group with the smallest sum of squared errors among NUM_TRIALS. Each
// trial rounds x (32) to codes with its scale, and then fits the parameters to these codes by least
// squares. (The k-quants of llama.cpp do this with weighted errors; here all weights are 1.)
inline Affine fit_group(const Floats* x) {
  Floats low = {}, high = x[0], sum_x = {}, sum_xx = {};
  for (long i = 0; i < GROUP; i++) {
    low = minimum(low, x[i]);
    high = maximum(high, x[i]);
    sum_x += x[i];
    sum_xx += x[i] * x[i];
  }
  const Floats range = high - low;
  Affine best = {range / 15, low};
  Floats best_gain = Floats{} - INFINITE;
  for (int i = 0; i < NUM_TRIALS; i++) {
    const Floats inverse_scale = (14 + 0.1f * i) * inverse(range);
    Floats sum_c = {}, sum_cc = {}, sum_cx = {};
    for (long j = 0; j < GROUP; j++) {
      const Floats code = nearest_code(x[j], low, inverse_scale);
      sum_c += code;
      sum_cc += code * code;
      sum_cx += code * x[j];
    }
    const Floats determinant = GROUP * sum_cc - sum_c * sum_c;
    Affine fit = {(GROUP * sum_cx - sum_c * sum_x) * inverse(determinant), {}};
    fit.offset = (sum_x - fit.scale * sum_c) / GROUP;
    fit.scale = fit.offset > 0 ? sum_cx * inverse(sum_cc) : fit.scale;
    fit.offset = minimum(fit.offset, Floats{});
    // With y = scale * code + offset, the sum of squared errors is sum(x x) - sum(2 x y - y y). The
    // first term is the same for all trials, so the largest second term wins.
    const Floats gain = 2 * (fit.scale * sum_cx + fit.offset * sum_x) -
                        fit.scale * fit.scale * sum_cc - GROUP * fit.offset * fit.offset -
                        2 * fit.scale * fit.offset * sum_c;
    best.scale = gain > best_gain ? fit.scale : best.scale;
    best.offset = gain > best_gain ? fit.offset : best.offset;
    best_gain = maximum(gain, best_gain);
  }
  return best;
}

// Loads a group of LANES rows as floats: x (32), a row per lane. rows (LANES): where it begins.
inline void load_group(const uint16_t* const* rows, Floats* x) {
  for (int lane = 0; lane < LANES; lane++)
    for (long i = 0; i < GROUP; i++) x[i][lane] = widen(rows[lane][i]);
}

// Returns a float16 super-scale such that each of 8 values is an integer from -128 to 127 times it;
// 0 in lanes that have none, and the smallest magnitude where there are several. The value of the
// largest magnitude becomes a negative integer: Q6_K has -128 there, with a negative super-scale
// where the value is positive.
inline Floats common_super_scale(const Floats* values) {
  Floats largest = {}, super_scale = {};
  Ints unsolved = Ints{} - 1;  // lanes that have no super-scale yet
  for (long g = 0; g < 8; g++)
    largest = values[g] * values[g] > largest * largest ? values[g] : largest;
  for (int integer = 128; integer && has_set_lane(unsolved); integer--) {
    const Floats trial = round_to_float16(-largest * (1.0f / integer));
    const Floats inverse_trial = inverse(trial);
    Ints fits = unsolved & (trial * (float)integer == -largest);
    for (long g = 0; g < 8 && has_set_lane(fits); g++) {
      const Floats code = nearest(values[g] * inverse_trial);
      fits &= (code * trial == values[g]) & (code <= 127) & (code >= -128);
    }
    super_scale = fits ? trial : super_scale;
    unsolved &= ~fits;
  }
  return super_scale;
}

// Stores the parameters of `groups` groups, 1 or 8, of LANES rows, of which `first_row` is the
// first in its block, and replaces them by what was stored: one group as float16, eight groups as
// int8 with float16 super-scales (see Parameters in packed_weight.h). `out` is the address of these
// groups for the whole block.
inline void store_parameters(Affine* parameters, long groups, char* out, long first_row) {
  for (int which = 0; which < 2; which++) {
    const auto parameter = [&](long g) -> Floats& {
      return which ? parameters[g].offset : parameters[g].scale;
    };
    char* float16_out = out + 2 * (which * N_BLOCK + first_row);
    if (groups == 1) {
      parameter(0) = store_float16(float16_out, parameter(0));
      continue;
    }
    Floats largest = {};
    for (long g = 0; g < groups; g++)
      largest = maximum(largest, maximum(parameter(g), -parameter(g)));
    const Floats super_scale = store_float16(float16_out, largest / 127);
    const Floats inverse_super_scale = inverse(super_scale);
    for (long g = 0; g < groups; g++) {
      const Floats rounded = nearest(parameter(g) * inverse_super_scale);
      const Floats code = minimum(maximum(rounded, Floats{} - 127), Floats{} + 127);
      int8_t* codes = (int8_t*)out + (2 + g) * 2 * N_BLOCK + which * N_BLOCK + first_row;
      for (int lane = 0; lane < LANES; lane++) codes[lane] = (int8_t)code[lane];
      parameter(g) = code * super_scale;
    }
  }
}

// Quantizes a group x (32) of LANES rows to nibbles: out (4, 32), of which LANES columns are
// written.
inline void store_codes(const Floats* x, Affine parameters, uint32_t* out) {
  const Floats inverse_scale = inverse(parameters.scale);
  for (long i = 0; i < GROUP; i += 8, out += N_BLOCK) {
    UInts codes = {};
    for (int j = 0; j < 8; j++) {
      const Floats code = nearest_code(x[i + j], parameters.offset, inverse_scale);
      codes |= __builtin_convertvector(code, UInts) << (j / 2 * 4 + j % 2 * 16);
    }
    store(out, codes);
  }
}

}  // namespace

extern "C" {

// Returns the bytes of workspace for pack_bf16 (row_bytes = 2 k) and pack_rows (row_bytes = k).
long pack_workspace(long row_bytes, long threads) { return threads * thread_workspace(row_bytes); }

// Packs a weight (n, k) of bf16 in place; the memory has whole blocks of rows, of which the last
// may be uninitialised. Returns the largest magnitude of its elements as the bits of a bf16, which
// are above those of infinity if an element is NaN. 2^16 is added if a row has only zeros.
long pack_bf16(char* weight, char* workspace, long n, long k, long threads) {
  uint16_t largest = 0, smallest = 0xffff;  // over the largest magnitude of each row
#pragma omp parallel for num_threads(threads) reduction(max : largest) reduction(min : smallest)
  for (long block = 0; block < num_blocks(n); block++) {
    char* copy = workspace + omp_get_thread_num() * thread_workspace(2 * k);
    char* rows = weight + block * N_BLOCK * 2 * k;
    for (long r = 0; r < N_BLOCK; r++) {
      uint16_t row_max = 0;
      const auto* from = (const uint16_t*)weight + row_in_file(block, r, n) * k;
      auto* to = (uint16_t*)(copy + r * (2 * k + PAD));
      for (long i = 0; i < k; i++) {
        to[i] = from[i];
        row_max = std::max<uint16_t>(row_max, from[i] & 0x7fff);
      }
      largest = std::max(largest, row_max);
      smallest = std::min(smallest, row_max);
    }
    transpose(copy, (uint32_t*)rows, k / 2);
  }
  return largest + (smallest == 0 ? 1 << 16 : 0);
}

// Quantizes a weight (n, k) of bf16 to int8: values, packed, and scales, one per row of the blocks.
void pack_rows(const uint16_t* weight, int8_t* values, float* scales, char* workspace, long n,
               long k, int threads) {
#pragma omp parallel for num_threads(threads)
  for (long block = 0; block < num_blocks(n); block++) {
    char* quantized = workspace + omp_get_thread_num() * thread_workspace(k);
    for (long r = 0; r < N_BLOCK; r++) {
      const uint16_t* row = weight + row_in_file(block, r, n) * k;
      scales[block * N_BLOCK + r] = quantize(row, (int8_t*)quantized + r * (k + PAD), k);
    }
    transpose(quantized, (uint16_t*)(values + block * N_BLOCK * k), k / 2);
  }
}

// Packs codes (n, k), each below 16, as nibbles. k is a multiple of 8.
void pack_nibbles(const uint8_t* codes, char* values, long n, long k, int threads) {
  pack_codes<Nibbles>(codes, values, n, k, threads);
}

// Packs codes (n, k), each below 64, as six bits. k is a multiple of 16.
void pack_six_bits(const uint8_t* codes, char* values, long n, long k, int threads) {
  pack_codes<SixBits>(codes, values, n, k, threads);
}

// Packs codes (n, k) as bytes: it reorders them. k is a multiple of 8.
void pack_bytes(const uint8_t* codes, char* values, long n, long k, int threads) {
  pack_codes<Int8>(codes, values, n, k, threads);
}

// Quantizes a weight (n, k) of bf16 to 4 bits: nibbles, packed, and parameters, a scale and an
// offset per group of 32 k. They are float16; or EIGHTS (see Parameters in packed_weight.h) if k is
// a multiple of 256. Returns the same as pack_bf16.
long pack_int4(const uint16_t* weight, uint32_t* nibbles, char* parameters, long n, long k,
               long threads) {
  const long groups = k % (8 * GROUP) ? 1 : 8;              // groups that are stored together
  const long bytes = 2 * N_BLOCK * (groups == 1 ? 2 : 10);  // of the parameters of these groups
  uint16_t largest = 0, smallest = 0xffff;                  // as in pack_bf16
#pragma omp parallel for num_threads(threads) schedule(dynamic) reduction(max : largest) \
    reduction(min : smallest)
  for (long block = 0; block < num_blocks(n); block++) {
    for (long row = block * N_BLOCK; row < std::min((block + 1) * N_BLOCK, n); row++) {
      uint16_t row_max = 0;
      for (long i = row * k; i < (row + 1) * k; i++)
        row_max = std::max<uint16_t>(row_max, weight[i] & 0x7fff);
      largest = std::max(largest, row_max);
      smallest = std::min(smallest, row_max);
    }
    for (long first_row = 0; first_row < N_BLOCK; first_row += LANES)
      for (long i = 0; i < k; i += groups * GROUP) {
        Floats x[8][GROUP];
        Affine fits[8];
        for (long g = 0; g < groups; g++) {
          const uint16_t* rows[LANES];
          for (int lane = 0; lane < LANES; lane++)
            rows[lane] = weight + row_in_file(block, first_row + lane, n) * k + i + g * GROUP;
          load_group(rows, x[g]);
          fits[g] = fit_group(x[g]);
        }
        const long index = block * k + i;  // of 32 rows each
        store_parameters(fits, groups, parameters + index / (groups * GROUP) * bytes, first_row);
        for (long g = 0; g < groups; g++)
          store_codes(x[g], fits[g], nibbles + (index + g * GROUP) / 8 * N_BLOCK + first_row);
      }
  }
  return largest + (smallest == 0 ? 1 << 16 : 0);
}

// Converts scales of float32 (n / 32, groups, per_group, 32) to EIGHTS (see Parameters in
// packed_weight.h). `groups` is a multiple of 8. Sets is_same to 0 if that changes a scale; it is
// not written otherwise.
void pack_scales(const float* scales, char* out, int64_t* is_same, long blocks, long groups,
                 long per_group, int threads) {
  const long width = per_group * N_BLOCK;  // scales of a group
#pragma omp parallel for num_threads(threads)
  for (long eight = 0; eight < blocks * groups / 8; eight++)
    for (long column = 0; column < width; column += LANES) {
      Floats values[8];
      for (long g = 0; g < 8; g++)
        values[g] = load<Floats>(scales + (eight * 8 + g) * width + column);
      const Floats super_scale = common_super_scale(values);
      char* record = out + eight * 10 * width;
      store_float16(record + 2 * column, super_scale);
      for (long g = 0; g < 8; g++) {
        const Floats code = nearest(values[g] * inverse(super_scale));
        store_int8(record + (2 + g) * width + column, code);
        if (has_set_lane(code * super_scale != values[g])) *is_same = 0;
      }
    }
}
}
