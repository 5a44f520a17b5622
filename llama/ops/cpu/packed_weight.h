// What the products with packed weights share: the layouts of a weight, its vectors, block sizes.
// linear.cpp multiplies in vectors, amx.h in tiles.
//
// All layouts are blocked by N: 32 rows of the weight (N, K) stay in their place in memory, but
// reordered so that one vector holds the same few k of neighbouring rows.
//
// bf16, and bytes at half the size, lie as VNNI-2 has it, (N/32, K/2, 32, 2). For K = 4,
//     row 0: a0 a1 a2 a3,  row 1: b0 b1 b2 b3,  ...  is stored as
//     a0 a1 b0 b1 c0 c1 ... | a2 a3 b2 b3 c2 c3 ...
// The CPU's own product of bf16 pairs takes such a vector as it is; without one, a shift makes
// floats of the even k, and a mask of the odd.
//
// Nibbles lie as words of 8 k, (N/32, K/8, 32): the low half of a word holds, from its low end, the
// codes of k 0, 2, 4, 6, and the high half those of 1, 3, 5, 7. So the word shifted by 4 j ends, in
// both halves, with the codes of the pair 2 j, 2 j + 1. A code is the place of a number in a table.
//
// Six bits lie as three such words for 16 k, (N/32, K/16, 3, 32): a half has two codes, and above
// them four bits. Those of the three words are two codes more, in the order of the words.
//
// A weight is its number, or a group of k of a row has a scale, or a scale and an offset: (N/32, G,
// 1 or 2, 32), see Parameters. The sum over a group is multiplied by the scale, and the offset by
// the sum of the group's x: no weight is rounded. With tiles it is, to bf16, if there is more than
// one scale a row.
//
// x may be rotated before, and an adapter's product added to the sums after: see kernels.h.
#pragma once
#include <type_traits>

#include "kernels.h"
#include "vectors.h"

namespace {

constexpr long K_BLOCK = 1024;  // k of a pass over x: 64 KiB of a weight block, which L2 holds
constexpr long M_BLOCK = 256;   // rows of x, about, that share one pass over a weight block
// Up to 4 rows are bound by memory: they prefetch bf16 4 KiB ahead into L1 (one Zen 4 core, M = 1:
// 29 GB/s, without 24; into L2 25). Other kinds take more instructions a byte, which wait for lines
// on their way to L1: these prefetch 16 KiB ahead into L2 (Q4_0 23.5 GB/s, 4 KiB ahead into L1 18).
// More rows prefetch the next K block into L2 (M = 8: 25 GB/s, without 21).
constexpr int L1_PREFETCH_ROWS = 4;

// What the kinds of numbers differ in. A step is the PAIRS of neighbouring k that lie together,
// with STEP bytes for all 32 rows, ROW_BYTES from one row to the next. `load` takes LANES rows of a
// step from where they begin, and `pairs` makes one of the pairs of these. All numbers of a kind
// are bf16.
struct InMemory {
  struct Step {
    const char* at;
  };
  static Step load(const char* w) { return {w}; }
};

struct Bf16 : InMemory {
  static constexpr ElementFormat FORMAT = ElementFormat::BF16;
  static constexpr long PAIRS = 1, ROW_BYTES = 4, STEP = N_BLOCK * ROW_BYTES;
  explicit Bf16(const float*) {}
  Pairs pairs(Step w, int) const { return load_pairs(w.at); }
};

struct Int8 : InMemory {
  static constexpr ElementFormat FORMAT = ElementFormat::INT8;
  static constexpr long PAIRS = 1, ROW_BYTES = 2, STEP = N_BLOCK * ROW_BYTES;
  typedef int32_t Integers __attribute__((vector_size(VECTOR_BYTES)));
  FloatPairs floats(Step w, int) const {  // gcc makes poor code of a portable conversion
#if defined(__AVX512F__)
    const __m512i both = _mm512_cvtepi16_epi32(::load<__m256i>(w.at));
    const Integers even = (Integers)_mm512_slli_epi32(both, 24) >> 24, odd = (Integers)both >> 8;
    return {(Floats)_mm512_cvtepi32_ps((__m512i)even), (Floats)_mm512_cvtepi32_ps((__m512i)odd)};
#else
    const __m256i both = _mm256_cvtepi16_epi32(::load<__m128i>(w.at));
    const Integers even = (Integers)_mm256_slli_epi32(both, 24) >> 24, odd = (Integers)both >> 8;
    return {(Floats)_mm256_cvtepi32_ps((__m256i)even), (Floats)_mm256_cvtepi32_ps((__m256i)odd)};
#endif
  }
#if defined(__AVX512BF16__)
  UInts odd_halves;
  explicit Int8(const float*) {
    for (uint32_t i = 0; i < LANES; i++) odd_halves[i] = 0x00030001 + i * 0x00040004;
  }
  static __m512i widened(const char* w) {
    return (__m512i)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(::load<__m128i>(w)));
  }
  Pairs pairs(Step w, int) const {  // the upper halves of the floats: all that they have
    return (__m512bh)_mm512_permutex2var_epi16(widened(w.at), (__m512i)odd_halves,
                                               widened(w.at + 16));
  }
#else
  explicit Int8(const float*) {}
  Pairs pairs(Step w, int j) const { return floats(w, j); }
#endif
};

// e4m3. With one more bit before its exponent's four, and zeros behind its fraction, it is a bf16
// that is 2^8 times smaller: the scales have the 2^8. But where the four are zeros, it is not: a
// vector with such a small number is taken for float16, which has them too.
struct Fp8 : InMemory {
  static constexpr ElementFormat FORMAT = ElementFormat::FP8;
  static constexpr long PAIRS = 1, ROW_BYTES = 2, STEP = N_BLOCK * ROW_BYTES;
  explicit Fp8(const float*) {}
  static UInts words(const char* w) {
#if defined(__AVX512F__)
    const __m512i wide = _mm512_cvtepi8_epi16(::load<__m256i>(w));
    if (__builtin_expect(_mm512_testn_epi16_mask(wide, _mm512_set1_epi16(0x78)), 0)) {
      const __m512i halves = (__m512i)((UInts)_mm512_slli_epi16(wide, 7) & 0xbfffbfff);
      return upper_halves((Floats)_mm512_cvtph_ps(_mm512_castsi512_si256(halves)),
                          (Floats)_mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1)));
    }
    return ((UInts)_mm512_slli_epi16(wide, 4) & 0x87f087f0) | 0x38003800;
#else
    const __m256i wide = _mm256_cvtepi8_epi16(::load<__m128i>(w));
    const __m256i exponent = (__m256i)((UInts)wide & 0x00780078);
    if (__builtin_expect(_mm256_movemask_epi8(_mm256_cmpeq_epi16(exponent, __m256i{})), 0)) {
      const __m256i halves = (__m256i)((UInts)_mm256_slli_epi16(wide, 7) & 0xbfffbfff);
      return upper_halves((Floats)_mm256_cvtph_ps(_mm256_castsi256_si128(halves)),
                          (Floats)_mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1)));
    }
    return ((UInts)_mm256_slli_epi16(wide, 4) & 0x87f087f0) | 0x38003800;
#endif
  }
  static UInts upper_halves(Floats first, Floats second) {  // of numbers that are bf16, in order
    return (UInts)deinterleave(first, second, 0, Lanes()) >> 16 |
           (UInts)deinterleave(first, second, 1, Lanes());
  }
  FloatPairs floats(Step w, int) const { return widen_pairs(words(w.at)); }
#if defined(__AVX512BF16__)
  Pairs pairs(Step w, int) const { return (Pairs)words(w.at); }
#else
  Pairs pairs(Step w, int j) const { return floats(w, j); }
#endif
};

struct Nibbles {
  static constexpr ElementFormat FORMAT = ElementFormat::NIBBLES;
  static constexpr long PAIRS = 4, ROW_BYTES = 4, STEP = N_BLOCK * ROW_BYTES;
  typedef UInts Step;
  static Step load(const char* w) { return ::load<UInts>(w); }
#if defined(__AVX512BF16__)
  __m512i table;  // twice, as five bits are looked at, and nothing need be masked
  explicit Nibbles(const float* numbers)
      : table((__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(numbers), _mm512_loadu_ps(numbers))) {}
  Pairs pairs(Step words, int j) const {
    return (__m512bh)_mm512_permutexvar_epi16((__m512i)(words >> 4 * j), table);
  }
  FloatPairs floats(Step words, int j) const { return widen_pairs((UInts)pairs(words, j)); }
#elif defined(__AVX512F__)
  __m512 table;
  explicit Nibbles(const float* numbers) : table(_mm512_loadu_ps(numbers)) {}
  Floats number(UInts words, int shift) const {
    return (Floats)_mm512_permutexvar_ps((__m512i)(words >> shift), table);
  }
  Pairs pairs(Step words, int j) const { return {number(words, 4 * j), number(words, 16 + 4 * j)}; }
#else
  __m256i lower, upper;  // bytes of the numbers as bf16, the 16 twice
  explicit Nibbles(const float* numbers) {
    uint8_t bytes[2][32];
    for (int i = 0; i < 32; i++) {
      const uint16_t bits = to_bf16(numbers[i % 16]);
      bytes[0][i] = (uint8_t)bits, bytes[1][i] = bits >> 8;
    }
    lower = ::load<__m256i>(bytes[0]), upper = ::load<__m256i>(bytes[1]);
  }
  // Of a word, j and j + 2 look up the same bytes, and take every second of them.
  Pairs pairs(Step words, int j) const {
    const __m256i codes = (__m256i)(words >> 4 * (j % 2) & 0x0f0f0f0f);
    const UInts low = (UInts)_mm256_shuffle_epi8(lower, codes);
    const UInts high = (UInts)_mm256_shuffle_epi8(upper, codes);
    const __m256i odd_bytes = _mm256_set1_epi16((short)0xff00);
    return widen_pairs((UInts)_mm256_blendv_epi8((__m256i)(j < 2 ? low : low >> 8),
                                                 (__m256i)(j < 2 ? high << 8 : high), odd_bytes));
  }
#endif
};

// Whole numbers that follow one another, from table[0] on, in six bits.
struct SixBits {
  static constexpr ElementFormat FORMAT = ElementFormat::SIX_BITS;
  static constexpr long PAIRS = 8, ROW_BYTES = 4, STEP = 3 * N_BLOCK * ROW_BYTES;
  struct Step {
    UInts
        words[4];  // two pairs each; the last is made of the upper four bits of the others' halves
  };
  static Step load(const char* w) {
    Step step;
    for (int i = 0; i < 3; i++) step.words[i] = ::load<UInts>(w + i * N_BLOCK * ROW_BYTES);
    step.words[3] = (step.words[0] >> 12 & 0x000f000f) | (step.words[1] >> 8 & 0x00f000f0) |
                    (step.words[2] >> 4 & 0x0f000f00);
    return step;
  }
#if defined(__AVX512F__)
  __m512i table[2];
  explicit SixBits(const float* numbers) {
    uint16_t all[64];
    for (int i = 0; i < 64; i++) all[i] = to_bf16(numbers[0] + (float)i);
    table[0] = ::load<__m512i>(all), table[1] = ::load<__m512i>(all + 32);
  }
  UInts looked_up(const Step& step, int j) const {  // of each half, six bits are looked at
    const UInts codes = j % 2 ? step.words[j / 2] >> 6 : step.words[j / 2];
    return (UInts)_mm512_permutex2var_epi16(table[0], (__m512i)codes, table[1]);
  }
  FloatPairs floats(const Step& step, int j) const { return widen_pairs(looked_up(step, j)); }
#else
  float first;
  explicit SixBits(const float* numbers) : first(numbers[0]) {}
  Floats number(UInts codes) const {
    return (Floats)_mm256_cvtepi32_ps((__m256i)(codes & 63)) + first;
  }
  FloatPairs floats(const Step& step, int j) const {
    const UInts codes = step.words[j / 2] >> 6 * (j % 2);
    return {number(codes), number(codes >> 16)};
  }
#endif
#if defined(__AVX512BF16__)
  Pairs pairs(const Step& step, int j) const { return (Pairs)looked_up(step, j); }
#else
  Pairs pairs(const Step& step, int j) const { return floats(step, j); }
#endif
};

// All kinds of elements, in the order of ElementFormat: it is the index of a table of functions.
#define EACH_FORMAT(FUNCTION) \
  {FUNCTION<Bf16>, FUNCTION<Int8>, FUNCTION<Fp8>, FUNCTION<Nibbles>, FUNCTION<SixBits>}
template <class Kind> constexpr ElementFormat FORMAT_OF = Kind::FORMAT;
constexpr ElementFormat FORMATS[] = EACH_FORMAT(FORMAT_OF);
constexpr bool are_in_order() {
  constexpr int64_t count = sizeof FORMATS / sizeof *FORMATS;
  for (int64_t i = 0; i < count; i++) {
    if (FORMATS[i] != (ElementFormat)i) return false;
  }
  return count == (int64_t)ElementFormat::SIX_BITS + 1;
}
static_assert(are_in_order(), "EACH_FORMAT lists the kinds in another order than ElementFormat");

template <class Kind> constexpr bool IS_BF16 = std::is_same_v<Kind, Bf16>;
template <class Kind> constexpr long PREFETCH_BYTES = IS_BF16<Kind> ? 4096 : 16384;

// Bytes of one k of a weight block.
template <class Kind> constexpr long K_BYTES = Kind::STEP / (2 * Kind::PAIRS);

// The parameters of a weight block: as floats, as float16, or, for each 8 groups, a float16 per
// parameter and row, and then whole numbers from -128 to 127, that it is multiplied with.
struct Parameters {
  const char* data;
  ScaleFormat format;
  int count;
  long group_bytes;

  Parameters(const Weight& weight, long block)
      : format(weight.scale_format), count((int)weight.per_group) {
    const long numbers = count * N_BLOCK;
    group_bytes = format == ScaleFormat::FLOAT32   ? 4 * numbers
                  : format == ScaleFormat::FLOAT16 ? 2 * numbers
                                                   : numbers + numbers / 4;
    data = weight.parameters + weight.stored_index(block) * (weight.k / weight.group) * group_bytes;
  }

  // Fetches those of some groups into L2: one Zen 4 core reads Q4_0 at 25.5 GB/s with it, 20.5
  // without (M = 1). Behind the last group of a block come those of the next block.
  void prefetch(long first, long last) const {
    for (const char* line = data + first * group_bytes; line < data + last * group_bytes;
         line += 64)
      __builtin_prefetch(line, 0, 2);
  }

  // Those of some groups as floats (last - first, 2, 32): scales, and offsets if there are.
  void unpack(long first, long last, float* to) const {
    const auto run = count == 1 ? unpack_as<1> : unpack_as<2>;
    if (count) run(*this, first, last, to);
  }

 private:
  template <int COUNT>
  static void unpack_as(const Parameters& from, long first, long last, float* to) {
    constexpr int WIDTH = COUNT * N_BLOCK, VECTORS = WIDTH / LANES;  // of a group
    const auto each = [&](long first, long last, auto number) {
      for (long group = first; group < last; group++, to += 2 * N_BLOCK)
        for (int v = 0; v < VECTORS; v++)
          store(to + v * LANES, number(v, group * WIDTH + v * LANES));
    };
    if (from.format == ScaleFormat::FLOAT32)
      return each(first, last, [&](int, long i) { return load<Floats>(from.data + 4 * i); });
    if (from.format == ScaleFormat::FLOAT16)
      return each(first, last, [&](int, long i) { return load_float16(from.data + 2 * i); });
    for (long next; first < last; first = next) {
      next = std::min(last, (first / 8 + 1) * 8);
      const char* eight = from.data + first / 8 * 10 * WIDTH;
      Floats units[VECTORS];
      for (int v = 0; v < VECTORS; v++) units[v] = load_float16(eight + 2 * v * LANES);
      const char* codes = eight + 2 * WIDTH - first / 8 * 8 * WIDTH;
      each(first, next, [&](int v, long i) { return units[v] * load_int8(codes + i); });
    }
  }
};

// A whole number of steps, from k = `begin` on, as bf16 in the layout of bf16: only the numbers.
template <class Kind>
void unpack(const Weight& weight, const char* from, uint16_t* to, long count) {
  const Kind kind(weight.table);
  for (const char* end = from + count * K_BYTES<Kind>; from < end; from += Kind::STEP)
    for (int j = 0; j < Kind::PAIRS; j++)
      for (long row = 0; row < N_BLOCK; row += LANES, to += 2 * LANES)
        store_pairs(to, kind.pairs(kind.load(from + row * Kind::ROW_BYTES), j));
}

// The 32 sums of rows `from` to `to`, columns from `column` on, to outputs of n columns.
template <Outputs::Kind KIND>
void write_as(void* data, long n, const float* sums, long from, long to, long column) {
  for (long row = from; row < to; row++)
    for (long at = row * n + column, i = 0; i < N_BLOCK; i++, at++) {
      const float value = *sums++;
      uint16_t* narrow = (uint16_t*)data + at;
      if (KIND == Outputs::FLOAT32)
        ((float*)data)[at] = value;
      else if (KIND == Outputs::BF16)
        *narrow = to_bf16(value);
      else
        *narrow = to_bf16(widen(*narrow) + widen(to_bf16(value)));
    }
}

// Adds what an adapter gives for rows `from` to `to` and 32 columns, one product after another.
inline void add_adapter(const Outputs& out, float* sums, long from, long to, long column) {
  const uint16_t* up = out.up + column * out.rank;
  for (const float* middle = out.down_outputs + from * out.rank; from < to;
       from++, middle += out.rank)
    for (long i = 0; i < N_BLOCK; i += LANES, sums += LANES) {
      Floats total = load<Floats>(sums);
      for (long r = 0; r < out.rank; r += 2) {
        const UInts pairs = load<UInts>(up + r * N_BLOCK + 2 * i);
        add_product(total, widen_even(pairs), middle[r]);
        add_product(total, widen_odd(pairs), middle[r + 1]);
      }
      store(sums, total);
    }
}

inline void write(const Outputs& out, long n, float* sums, long from, long to, long column) {
  if (out.rank) add_adapter(out, sums, from, to, column);
  const auto run = out.kind == Outputs::BF16      ? write_as<Outputs::BF16>
                   : out.kind == Outputs::FLOAT32 ? write_as<Outputs::FLOAT32>
                                                  : write_as<Outputs::ADDED>;
  run(out.data, n, sums, from, to, column);
}

}  // namespace
