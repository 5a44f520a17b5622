// From the matrices of a checkpoint to packed ones: reordered, or rounded to int8 or to 4 bits. The
// layouts are in packed_weight.h. Python's llama/weights owns the tensors and checks the shapes.
#include <algorithm>
#include <cmath>

#include "codes.h"

namespace {

constexpr long PAD = 64;  // bytes between rows of workspace, or all fall into one set of a cache

// Bytes of workspace that one thread packs in: 32 rows of `row_bytes`.
long pack_bytes(long row_bytes) { return N_BLOCK * (row_bytes + PAD); }

// 32 rows of `count` pairs, in the workspace -> pairs of rows, one cache line per row at a time.
template <class Pair> void transpose(const char* rows, Pair* to, long count) {
  constexpr long LINE = 64 / sizeof(Pair);
  const long stride = count * sizeof(Pair) + PAD;
  for (long begin = 0; begin < count; begin += LINE)
    for (long i = begin; i < begin + LINE && i < count; i++)
      for (long row = 0; row < N_BLOCK; row++)
        to[i * N_BLOCK + row] = load<Pair>(rows + row * stride + i * sizeof(Pair));
}

// Rows of codes (n, k) -> the words of a kind, see write_codes().
template <class Kind>
void pack_codes(const uint8_t* codes, char* words, long n, long k, int threads) {
  constexpr long LINE = 64;  // codes of a row at a time
#pragma omp parallel for num_threads(threads)
  for (long block = 0; block < n / N_BLOCK; block++)
    for (long begin = 0; begin < k; begin += LINE) {
      uint8_t lines[N_BLOCK * LINE];
      const long count = std::min(LINE, k - begin);
      for (long row = 0; row < N_BLOCK; row++)
        std::memcpy(lines + row * LINE, codes + (block * N_BLOCK + row) * k + begin, count);
      write_codes<Kind>(lines, LINE, count, words + (block * k + begin) * K_BYTES<Kind>);
    }
}

// A row of k bf16 -> int8 in units of its scale, which is returned: the largest becomes 127.
float quantize(const uint16_t* row, int8_t* to, long k) {
  uint16_t largest = 0;  // without their signs, bf16 are in the order of their bits
  for (long i = 0; i < k; i++) largest = std::max<uint16_t>(largest, row[i] & 0x7fff);
  const float scale = widen(largest) / 127, unit = scale == 0 ? 1 : scale;
  for (long i = 0; i < k; i++) to[i] = (int8_t)std::nearbyint(widen(row[i]) / unit);
  return scale;
}

// The search for 16 numbers, evenly apart, that stand for the 32 numbers of a group: LANES groups
// at once, of as many rows.
constexpr long GROUP = 32;
constexpr int WIDTHS = 21;  // that are tried: their steps differ by 0.1

inline Floats least(Floats a, Floats b) { return a < b ? a : b; }
inline Floats most(Floats a, Floats b) { return a > b ? a : b; }
inline Floats inverse(Floats v) { return v == 0 ? v : 1 / v; }
inline bool any(Ints mask) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask);
#else
  return _mm256_movemask_ps((__m256)mask);
#endif
}
inline Floats nearest(Floats v) { return v + 12582912 - 12582912; }  // below 2^22, ties to even

// The number in the middle is that many scales above the offset: 0 to 15.
inline Floats code_of(Floats x, Floats offset, Floats per_scale) {
  return least(most(nearest((x - offset) * per_scale), Floats{}), Floats{} + 15);
}

struct Line {
  Floats scale, offset;  // the numbers are scale * code + offset; the offset is not above 0
};

// The line with the least sum of squared errors that any of the widths leads to: each gives codes,
// and these their best line (as the k-quants of llama.cpp do; here all errors count the same).
inline Line fit_line(const Floats* x) {
  Floats low = {}, high = x[0], sum_x = {}, sum_xx = {};
  for (long i = 0; i < GROUP; i++) {
    low = least(low, x[i]), high = most(high, x[i]);
    sum_x += x[i], sum_xx += x[i] * x[i];
  }
  const Floats width = high - low;
  Line best = {width / 15, low};
  Floats best_gain = Floats{} - INFINITE;
  for (int i = 0; i < WIDTHS; i++) {
    const Floats per_scale = (14 + 0.1f * i) * inverse(width);
    Floats sum_c = {}, sum_cc = {}, sum_cx = {};
    for (long j = 0; j < GROUP; j++) {
      const Floats code = code_of(x[j], low, per_scale);
      sum_c += code, sum_cc += code * code, sum_cx += code * x[j];
    }
    const Floats spread = GROUP * sum_cc - sum_c * sum_c;
    Line line = {(GROUP * sum_cx - sum_c * sum_x) * inverse(spread), {}};
    line.offset = (sum_x - line.scale * sum_c) / GROUP;
    line.scale = line.offset > 0 ? sum_cx * inverse(sum_cc) : line.scale;
    line.offset = least(line.offset, Floats{});
    // The sum of squared errors, without that of x, which all have: 2 x y - y y.
    const Floats gain = 2 * (line.scale * sum_cx + line.offset * sum_x) -
                        line.scale * line.scale * sum_cc - GROUP * line.offset * line.offset -
                        2 * line.scale * line.offset * sum_c;
    best.scale = gain > best_gain ? line.scale : best.scale;
    best.offset = gain > best_gain ? line.offset : best.offset;
    best_gain = most(gain, best_gain);
  }
  return best;
}

// The 32 k of a group from `k` on, of LANES rows, as floats.
inline void load_group(const uint16_t* rows, long k, long count_k, Floats* x) {
  for (int lane = 0; lane < LANES; lane++)
    for (long i = 0; i < GROUP; i++) x[i][lane] = widen(rows[lane * count_k + k + i]);
}

// What 8 numbers are whole numbers of, from -128 to 127; 0 where no float16 is that. The largest is
// a negative one of them: Q6_K has -128 there, of a scale below 0 where the product is above. Of
// several units the smallest is taken.
inline Floats common_unit(const Floats* numbers) {
  Floats largest = {}, unit = {};
  Ints open = Ints{} - 1;  // the lanes that have none yet
  for (long g = 0; g < 8; g++)
    largest = numbers[g] * numbers[g] > largest * largest ? numbers[g] : largest;
  for (int count = 128; count && any(open); count--) {
    const Floats tried = round_to_float16(-largest * (1.0f / count)), per_unit = inverse(tried);
    Ints fits = open & (tried * (float)count == -largest);
    for (long g = 0; g < 8 && any(fits); g++) {
      const Floats code = nearest(numbers[g] * per_unit);
      fits &= (code * tried == numbers[g]) & (code <= 127) & (code >= -128);
    }
    unit = fits ? tried : unit;
    open &= ~fits;
  }
  return unit;
}

// Parameters of `groups` groups of LANES rows, rounded to how they are kept at `to` (see Parameters
// in packed_weight.h): one group as float16, or eight as float16 times whole numbers.
inline void store_lines(Line* lines, long groups, char* to, long first) {
  for (int which = 0; which < 2; which++) {
    const auto part = [&](long g) -> Floats& { return which ? lines[g].offset : lines[g].scale; };
    char* unit_at = to + 2 * (which * N_BLOCK + first);
    if (groups == 1) {
      part(0) = store_float16(unit_at, part(0));
      continue;
    }
    Floats largest = {};
    for (long g = 0; g < groups; g++) largest = most(largest, most(part(g), -part(g)));
    const Floats unit = store_float16(unit_at, largest / 127), per_unit = inverse(unit);
    for (long g = 0; g < groups; g++) {
      const Floats code = least(most(nearest(part(g) * per_unit), Floats{} - 127), Floats{} + 127);
      int8_t* codes = (int8_t*)to + (2 + g) * 2 * N_BLOCK + which * N_BLOCK + first;
      for (int lane = 0; lane < LANES; lane++) codes[lane] = (int8_t)code[lane];
      part(g) = code * unit;
    }
  }
}

// As words of 8 k, at `to`, of a group.
inline void store_codes(const Floats* x, Line line, uint32_t* to) {
  const Floats per_scale = inverse(line.scale);
  for (long i = 0; i < GROUP; i += 8, to += N_BLOCK) {
    UInts words = {};
    for (int j = 0; j < 8; j++) {
      const Floats code = code_of(x[i + j], line.offset, per_scale);
      words |= __builtin_convertvector(code, UInts) << (j / 2 * 4 + j % 2 * 16);
    }
    store(to, words);
  }
}

}  // namespace

extern "C" {

// Bytes of workspace for pack_bf16 (row_bytes = 2 k) and pack_rows (row_bytes = k).
long pack_workspace(long row_bytes, long threads) { return threads * pack_bytes(row_bytes); }

// weight (n, k) is packed in place. The largest of its numbers, without their signs, as bits: above
// those of infinity if one is NaN; and 2^16 more if a row has nothing but zeros.
long pack_bf16(char* weight, char* workspace, long n, long k, long threads) {
  uint16_t found = 0, least = 0xffff;  // of the largest of each row
#pragma omp parallel for num_threads(threads) reduction(max : found) reduction(min : least)
  for (long block = 0; block < n / N_BLOCK; block++) {
    char* own = workspace + omp_get_thread_num() * pack_bytes(2 * k);
    char* rows = weight + block * N_BLOCK * 2 * k;
    for (long r = 0; r < N_BLOCK; r++) {
      uint16_t largest = 0;
      const auto* from = (const uint16_t*)(rows + r * 2 * k);
      auto* to = (uint16_t*)(own + r * (2 * k + PAD));
      for (long i = 0; i < k; i++) {
        to[i] = from[i];
        largest = std::max<uint16_t>(largest, from[i] & 0x7fff);
      }
      found = std::max(found, largest), least = std::min(least, largest);
    }
    transpose(own, (uint32_t*)rows, k / 2);
  }
  return found + (least == 0 ? 1 << 16 : 0);
}

// weight (n, k) -> values in int8, packed, and scales (n).
void pack_rows(const uint16_t* weight, int8_t* values, float* scales, char* workspace, long n,
               long k, int threads) {
#pragma omp parallel for num_threads(threads)
  for (long block = 0; block < n / N_BLOCK; block++) {
    char* own = workspace + omp_get_thread_num() * pack_bytes(k);
    for (long row = 0; row < N_BLOCK; row++) {
      const long n = block * N_BLOCK + row;
      scales[n] = quantize(weight + n * k, (int8_t*)own + row * (k + PAD), k);
    }
    transpose(own, (uint16_t*)(values + block * N_BLOCK * k), k / 2);
  }
}

// codes (n, k), each below 16 -> words, packed.
void pack_nibbles(const uint8_t* codes, char* words, long n, long k, int threads) {
  pack_codes<Nibbles>(codes, words, n, k, threads);
}

// codes (n, k), k a multiple of 16, each below 64 -> words, packed.
void pack_six_bits(const uint8_t* codes, char* words, long n, long k, int threads) {
  pack_codes<SixBits>(codes, words, n, k, threads);
}

// codes (n, k), k a multiple of 8 -> the same bytes, packed.
void pack_bytes(const uint8_t* codes, char* values, long n, long k, int threads) {
  pack_codes<Int8>(codes, values, n, k, threads);
}

// weight (n, k) -> words and parameters, packed: groups of 32 with a scale and an offset in
// float16; or, where k is a multiple of 256, in eight bits each, times a float16 for each 8 groups.
// Returns the same as pack_bf16.
long pack_int4(const uint16_t* weight, uint32_t* words, char* parameters, long n, long k,
               long threads) {
  const long groups = k % (8 * GROUP) ? 1 : 8;
  const long bytes = 2 * N_BLOCK * (groups == 1 ? 2 : 10);  // of so many groups
  uint16_t found = 0, least = 0xffff;
#pragma omp parallel for num_threads(threads) schedule(dynamic) reduction(max : found) \
    reduction(min : least)
  for (long block = 0; block < n / N_BLOCK; block++) {
    for (long row = block * N_BLOCK; row < (block + 1) * N_BLOCK; row++) {
      uint16_t largest = 0;
      for (long i = row * k; i < (row + 1) * k; i++)
        largest = std::max<uint16_t>(largest, weight[i] & 0x7fff);
      found = std::max(found, largest), least = std::min(least, largest);
    }
    for (long first = 0; first < N_BLOCK; first += LANES)
      for (long i = 0; i < k; i += groups * GROUP) {
        Floats x[8][GROUP];
        Line lines[8];
        for (long g = 0; g < groups; g++) {
          load_group(weight + (block * N_BLOCK + first) * k, i + g * GROUP, k, x[g]);
          lines[g] = fit_line(x[g]);
        }
        const long at = block * k + i;
        store_lines(lines, groups, parameters + at / (groups * GROUP) * bytes, first);
        for (long g = 0; g < groups; g++)
          store_codes(x[g], lines[g], words + (at + g * GROUP) / 8 * N_BLOCK + first);
      }
  }
  return found + (least == 0 ? 1 << 16 : 0);
}

// Scales as floats (n / 32, groups, per_group, 32) -> the same as whole numbers of a float16 that 8
// groups share (see Parameters); is_same becomes 0 where that would change one.
void pack_scales(const float* scales, char* to, int64_t* is_same, long blocks, long groups,
                 long per_group, int threads) {
  const long width = per_group * N_BLOCK;  // of a group
#pragma omp parallel for num_threads(threads)
  for (long eight = 0; eight < blocks * groups / 8; eight++)
    for (long at = 0; at < width; at += LANES) {
      Floats numbers[8];
      for (long g = 0; g < 8; g++) numbers[g] = load<Floats>(scales + (eight * 8 + g) * width + at);
      const Floats unit = common_unit(numbers);
      char* record = to + eight * 10 * width;
      store_float16(record + 2 * at, unit);
      for (long g = 0; g < 8; g++) {
        const Floats code = nearest(numbers[g] * inverse(unit));
        store_int8(record + (2 + g) * width + at, code);
        if (any(code * unit != numbers[g])) *is_same = 0;
      }
    }
}
}
