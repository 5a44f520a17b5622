// Packed weights: their memory layouts, the conversions of their elements, and the parts that the
// matrix products of linear.cpp (vectors) and amx.h (AMX tiles) share. A `Weight` of kernels.h goes
// in; pairs of elements, scales or bf16 come out, and sums go back to the rows of the output.
//
// All layouts are blocked by N: a block of 32 rows of the weight (N, K) is contiguous in memory and
// reordered, so that one vector holds the same few k of neighbouring rows. If N is not a multiple
// of 32, the last block is padded. Layouts are written as shapes of C-contiguous arrays, in which
// N/32 is the number of blocks.
//
// bf16 (and int8 and fp8 with half the bytes) use the VNNI-2 layout (N/32, K/2, 32, 2). For K = 4,
//     row 0: a0 a1 a2 a3,  row 1: b0 b1 b2 b3,  ...  is stored as
//     a0 a1 b0 b1 c0 c1 ... | a2 a3 b2 b3 c2 c3 ...
// The instruction that multiplies pairs of bf16 (AVX512_BF16) takes such a vector as it is. Without
// it, a shift converts the elements of even k to float, and a mask those of odd k.
//
// Nibbles: 32-bit integers of 8 codes, (N/32, K/8, 32). The codes of k = 0, 2, 4, 6 are in the low
// half of an integer, the lowest k in the lowest bits; those of k = 1, 3, 5, 7 are in the high
// half. So after a right shift by 4 j bits, both halves end with the codes of the pair k = 2 j, 2 j
// + 1. A code is an index into a table of 16 values.
//
// Six bits: 32-bit integers, three for 16 codes, (N/32, K/16, 3, 32). Integer i holds the codes of
// k = 4 i to 4 i + 3: the low half has those of even k in its low 12 bits, the high half those of
// odd k. The upper four bits of each half, over the three integers, are two more codes: k = 12 and
// 14 in the low halves, 13 and 15 in the high halves.
//
// Scales: an element is either the weight itself, or a group of neighbouring k of a row shares a
// scale, or a scale and an offset: weight = element * scale + offset. They are stored as (N/32, G,
// per_group, 32), see Parameters. Vectors multiply the sum over a group by the scale and add the
// offset times the sum of x over the group, so no weight is rounded. AMX tiles need bf16 operands:
// there, weights with more than one scale per row are rounded to bf16 first.
//
// x may be multiplied by a Hadamard matrix before the product, and the product of a LoRA adapter be
// added afterwards, see kernels.h.
#pragma once
#include <type_traits>

#include "adapters.h"
#include "kernels.h"
#include "vectors.h"

namespace {

constexpr long K_BLOCK = 1024;  // k of a pass over x: 64 KiB of a weight block, which fit into L2
constexpr long M_BLOCK = 256;   // approximate number of rows of x that share a pass over a block
// Products of up to 4 rows are bound by memory bandwidth. They prefetch bf16 4 KiB ahead into L1
// (one Zen 4 core, M = 1: 29 GB/s; into L2: 25; without: 24). The other formats need more
// instructions per byte, which would wait for lines on their way to L1, so they prefetch 16 KiB
// ahead into L2 (Q4_0: 23.5 GB/s; 4 KiB ahead into L1: 18). Products of more rows prefetch the next
// K block into L2 (M = 8: 25 GB/s; without: 21).
constexpr int L1_PREFETCH_ROWS = 4;
// The vectors of rows of a weight block that one row of x is multiplied with in one pass. AVX2 and
// AVX-512 have the whole block, and read it in the order of memory: in two passes, each would read
// every other line.
constexpr int ROW_VECTORS = std::min(N_BLOCK / LANES, 4);

// The element kinds: Bf16, Int8, Fp8, Nibbles and SixBits convert packed elements to pairs. Every
// element of every kind is exactly a bf16.
//
// FORMAT: the kind's number in ElementFormat.
// PAIRS: pairs of neighbouring k in one step, the smallest number of k that is contiguous.
// STEP: bytes of a step for all 32 rows.
// ROW_BYTES: bytes from one row of a step to the next.
// Kind(table): takes the table of the weight (see Matrix), for kinds that look up their codes.
// load(address): loads a step of LANES rows, whose first row is at the address.
// pairs(step, j): the j-th pair of each of these rows, as operands of multiply_add().
// floats(step, j): the same pair as floats.
struct InMemory {  // kinds whose steps are read from memory only when they are converted
  struct Step {
    const char* address;
  };
  static Step load(const char* address) { return {address}; }
};

struct Bf16 : InMemory {
  static constexpr ElementFormat FORMAT = ElementFormat::BF16;
  static constexpr long PAIRS = 1, ROW_BYTES = 4, STEP = N_BLOCK * ROW_BYTES;
  explicit Bf16(const float*) {}
  Pairs pairs(Step step, int) const { return load_pairs(step.address); }
};

struct Int8 : InMemory {
  static constexpr ElementFormat FORMAT = ElementFormat::INT8;
  static constexpr long PAIRS = 1, ROW_BYTES = 2, STEP = N_BLOCK * ROW_BYTES;
  FloatPairs floats(Step step, int) const { return load_int8_pairs(step.address); }
#if defined(__AVX512BF16__)
  UInts odd_halves;  // indices of the upper halves of 32 floats, as 16-bit integers
  explicit Int8(const float*) {
    for (uint32_t i = 0; i < LANES; i++) odd_halves[i] = 0x00030001 + i * 0x00040004;
  }
  static __m512i widen_int8(const char* address) {
    return (__m512i)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(::load<__m128i>(address)));
  }
  // The upper half of the float of an int8 is its bf16; the lower half is zero.
  Pairs pairs(Step step, int) const {
    return (__m512bh)_mm512_permutex2var_epi16(widen_int8(step.address), (__m512i)odd_halves,
                                               widen_int8(step.address + 16));
  }
#else
  explicit Int8(const float*) {}
  Pairs pairs(Step step, int j) const { return to_pairs(floats(step, j)); }
#endif
};

// fp8 (e4m3: sign, 4 bits of exponent, 3 of fraction). Placing the exponent and the fraction into a
// bf16, below the constant exponent bits 0111, gives 2^-8 times the value; the scales contain the
// factor 2^8. That fails for subnormal numbers (exponent bits of zero). A vector that has one is
// converted as float16 instead, whose subnormal numbers also have 2^-8 times the value.
struct Fp8 : InMemory {
  static constexpr ElementFormat FORMAT = ElementFormat::FP8;
  static constexpr long PAIRS = 1, ROW_BYTES = 2, STEP = N_BLOCK * ROW_BYTES;
  explicit Fp8(const float*) {}
  // Converts 2 * LANES fp8 to bf16, two in each lane.
  static UInts to_bf16_pairs(const char* address) {
#if defined(__AVX512F__)
    const __m512i wide = _mm512_cvtepi8_epi16(::load<__m256i>(address));
    if (__builtin_expect(_mm512_testn_epi16_mask(wide, _mm512_set1_epi16(0x78)), 0)) {
      const __m512i halves = (__m512i)((UInts)_mm512_slli_epi16(wide, 7) & 0xbfffbfff);
      return upper_halves((Floats)_mm512_cvtph_ps(_mm512_castsi512_si256(halves)),
                          (Floats)_mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1)));
    }
    return ((UInts)_mm512_slli_epi16(wide, 4) & 0x87f087f0) | 0x38003800;
#elif defined(__aarch64__)
    const int16x8_t wide = vmovl_s8(::load<int8x8_t>(address));
    const uint16x8_t exponent = (uint16x8_t)((UInts)wide & 0x00780078);
    if (__builtin_expect(vminvq_u16(exponent) == 0, 0)) {
      const UInts halves = (UInts)vshlq_n_s16(wide, 7) & 0xbfffbfff;
      return upper_halves(load_float16(&halves), load_float16((const char*)&halves + 8));
    }
    return ((UInts)vshlq_n_s16(wide, 4) & 0x87f087f0) | 0x38003800;
#else
    const __m256i wide = _mm256_cvtepi8_epi16(::load<__m128i>(address));
    const __m256i exponent = (__m256i)((UInts)wide & 0x00780078);
    if (__builtin_expect(_mm256_movemask_epi8(_mm256_cmpeq_epi16(exponent, __m256i{})), 0)) {
      const __m256i halves = (__m256i)((UInts)_mm256_slli_epi16(wide, 7) & 0xbfffbfff);
      return upper_halves((Floats)_mm256_cvtph_ps(_mm256_castsi256_si128(halves)),
                          (Floats)_mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1)));
    }
    return ((UInts)_mm256_slli_epi16(wide, 4) & 0x87f087f0) | 0x38003800;
#endif
  }
  // Packs 2 * LANES consecutive floats, which are exactly bf16, as bf16.
  static UInts upper_halves(Floats first, Floats second) {
    return (UInts)deinterleave(first, second, 0, Lanes()) >> 16 |
           (UInts)deinterleave(first, second, 1, Lanes());
  }
  FloatPairs floats(Step step, int) const { return widen_pairs(to_bf16_pairs(step.address)); }
  Pairs pairs(Step step, int) const { return to_pairs(to_bf16_pairs(step.address)); }
};

// Codes of 4 bits, which index a table of 16 values.
struct Nibbles {
  static constexpr ElementFormat FORMAT = ElementFormat::NIBBLES;
  static constexpr long PAIRS = 4, ROW_BYTES = 4, STEP = N_BLOCK * ROW_BYTES;
  typedef UInts Step;
  static Step load(const char* address) { return ::load<UInts>(address); }
#if defined(__AVX512BF16__)
  // The 16 values twice: the permutation reads five bits of an index, so the bit above a code must
  // not matter, and nothing needs to be masked.
  __m512i table;
  explicit Nibbles(const float* values)
      : table((__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(values), _mm512_loadu_ps(values))) {}
  Pairs pairs(Step codes, int j) const {
    return (__m512bh)_mm512_permutexvar_epi16((__m512i)(codes >> 4 * j), table);
  }
  FloatPairs floats(Step codes, int j) const { return widen_pairs((UInts)pairs(codes, j)); }
#elif defined(__AVX512F__)
  __m512 table;
  explicit Nibbles(const float* values) : table(_mm512_loadu_ps(values)) {}
  // Looks up the four bits from `shift` on of each lane; the permutation ignores those above.
  Floats look_up(UInts codes, int shift) const {
    return (Floats)_mm512_permutexvar_ps((__m512i)(codes >> shift), table);
  }
  Pairs pairs(Step codes, int j) const {
    return {look_up(codes, 4 * j), look_up(codes, 16 + 4 * j)};
  }
#else
  UInts lower, upper;  // the lower and upper bytes of the 16 values as bf16, again and again
  explicit Nibbles(const float* values) {
    uint8_t bytes[2][VECTOR_BYTES];
    for (int i = 0; i < VECTOR_BYTES; i++) {
      const uint16_t bits = to_bf16(values[i % 16]);
      bytes[0][i] = (uint8_t)bits;
      bytes[1][i] = bits >> 8;
    }
    lower = ::load<UInts>(bytes[0]);
    upper = ::load<UInts>(bytes[1]);
  }
  // The pairs j and j + 2 look up the same bytes: the codes of pair j are in the even bytes after
  // the mask, those of pair j + 2 in the odd bytes.
  Pairs pairs(Step packed, int j) const {
    const UInts codes = packed >> 4 * (j % 2) & 0x0f0f0f0f;
    const UInts low = look_up_bytes(lower, codes);
    const UInts high = look_up_bytes(upper, codes);
    return to_pairs(blend_bytes(j < 2 ? low : low >> 8, j < 2 ? high << 8 : high));
  }
#endif
};

// Codes of 6 bits: consecutive integers, so that element = table[0] + code.
struct SixBits {
  static constexpr ElementFormat FORMAT = ElementFormat::SIX_BITS;
  static constexpr long PAIRS = 8, ROW_BYTES = 4, STEP = 3 * N_BLOCK * ROW_BYTES;
  struct Step {
    // Two pairs each. The last vector consists of the upper four bits of the others' halves.
    UInts codes[4];
  };
  static Step load(const char* address) {
    Step step;
    for (int i = 0; i < 3; i++) step.codes[i] = ::load<UInts>(address + i * N_BLOCK * ROW_BYTES);
    step.codes[3] = (step.codes[0] >> 12 & 0x000f000f) | (step.codes[1] >> 8 & 0x00f000f0) |
                    (step.codes[2] >> 4 & 0x0f000f00);
    return step;
  }
#if defined(__AVX512F__)
  __m512i table[2];  // the 64 elements as bf16
  explicit SixBits(const float* values) {
    uint16_t elements[64];
    for (int i = 0; i < 64; i++) elements[i] = to_bf16(values[0] + (float)i);
    table[0] = ::load<__m512i>(elements);
    table[1] = ::load<__m512i>(elements + 32);
  }
  // Looks up the j-th pair; the permutation ignores all but the low six bits of each half.
  UInts look_up(const Step& step, int j) const {
    const UInts codes = j % 2 ? step.codes[j / 2] >> 6 : step.codes[j / 2];
    return (UInts)_mm512_permutex2var_epi16(table[0], (__m512i)codes, table[1]);
  }
  FloatPairs floats(const Step& step, int j) const { return widen_pairs(look_up(step, j)); }
#else
  float first;  // the element of code 0
  explicit SixBits(const float* values) : first(values[0]) {}
  FloatPairs floats(const Step& step, int j) const {
    const UInts codes = step.codes[j / 2] >> 6 * (j % 2);
    return {to_floats((Ints)(codes & 63)) + first, to_floats((Ints)(codes >> 16 & 63)) + first};
  }
#endif
#if defined(__AVX512BF16__)
  Pairs pairs(const Step& step, int j) const { return (Pairs)look_up(step, j); }
#else
  Pairs pairs(const Step& step, int j) const { return to_pairs(floats(step, j)); }
#endif
};

// The instances of a function template for all kinds, as a table that ElementFormat indexes.
#define TABLE_BY_FORMAT(FUNCTION) \
  {FUNCTION<Bf16>, FUNCTION<Int8>, FUNCTION<Fp8>, FUNCTION<Nibbles>, FUNCTION<SixBits>}
template <class Kind> constexpr ElementFormat FORMAT_OF = Kind::FORMAT;
constexpr ElementFormat FORMATS[] = TABLE_BY_FORMAT(FORMAT_OF);
constexpr bool are_in_order() {
  constexpr int64_t count = sizeof FORMATS / sizeof *FORMATS;
  for (int64_t i = 0; i < count; i++) {
    if (FORMATS[i] != (ElementFormat)i) return false;
  }
  return count == (int64_t)ElementFormat::SIX_BITS + 1;
}
static_assert(are_in_order(),
              "TABLE_BY_FORMAT lists the kinds in another order than ElementFormat");

template <class Kind> constexpr bool IS_BF16 = std::is_same_v<Kind, Bf16>;
template <class Kind> constexpr long PREFETCH_BYTES = IS_BF16<Kind> ? 4096 : 16384;

// Bytes of one k of a weight block, which has 32 rows.
template <class Kind> constexpr long K_BYTES = Kind::STEP / (2 * Kind::PAIRS);

// The scales and offsets of one weight block, (G, per_group, 32). Formats:
// FLOAT32, FLOAT16: contiguous floats.
// EIGHTS: for every 8 groups, first the super-scales (per_group, 32) in float16, then integers (8,
//     per_group, 32) in int8. A parameter is the integer times its super-scale.
struct Parameters {
  const char* data;
  ScaleFormat format;
  int per_group;     // 0: no scales; 1: a scale; 2: a scale and an offset
  long group_bytes;  // with EIGHTS the average over 8 groups

  Parameters(const Weight& weight, long block)
      : format(weight.scale_format), per_group((int)weight.per_group) {
    const long count = per_group * N_BLOCK;
    group_bytes = format == ScaleFormat::FLOAT32   ? 4 * count
                  : format == ScaleFormat::FLOAT16 ? 2 * count
                                                   : count + count / 4;
    data = weight.parameters + weight.stored_index(block) * (weight.k / weight.group) * group_bytes;
  }

  // Prefetches the groups from `first` up to, not including, `end` into L2: one Zen 4 core reads
  // Q4_0 at 25.5 GB/s with it, at 20.5 without (M = 1). The groups of the next block follow the
  // last group of a block.
  void prefetch(long first, long end) const {
    for (const char* line = data + first * group_bytes; line < data + end * group_bytes; line += 64)
      __builtin_prefetch(line, 0, 2);
  }

  // Converts the groups from `first` up to, not including, `end` to floats (end - first, 2, 32):
  // scales, then offsets. Offsets are not written if the weight has none.
  void unpack(long first, long end, float* out) const {
    const auto run = per_group == 1 ? unpack_as<1> : unpack_as<2>;
    if (per_group) run(*this, first, end, out);
  }

 private:
  template <int PER_GROUP>
  static void unpack_as(const Parameters& source, long first, long end, float* out) {
    constexpr int WIDTH = PER_GROUP * N_BLOCK;  // parameters of a group
    constexpr int VECTORS = WIDTH / LANES;
    // convert(v, i): the parameters of vector v of a group; i is the index of its first one.
    const auto write_groups = [&](long first, long end, auto convert) {
      for (long group = first; group < end; group++, out += 2 * N_BLOCK)
        for (int v = 0; v < VECTORS; v++)
          store(out + v * LANES, convert(v, group * WIDTH + v * LANES));
    };
    if (source.format == ScaleFormat::FLOAT32)
      return write_groups(first, end,
                          [&](int, long i) { return load<Floats>(source.data + 4 * i); });
    if (source.format == ScaleFormat::FLOAT16)
      return write_groups(first, end,
                          [&](int, long i) { return load_float16(source.data + 2 * i); });
    for (long next; first < end; first = next) {
      next = std::min(end, (first / 8 + 1) * 8);
      const char* eight = source.data + first / 8 * 10 * WIDTH;
      Floats super_scales[VECTORS];
      for (int v = 0; v < VECTORS; v++) super_scales[v] = load_float16(eight + 2 * v * LANES);
      // The address that the integer of index 0 of the block would have.
      const char* integers = eight + 2 * WIDTH - first / 8 * 8 * WIDTH;
      write_groups(first, next,
                   [&](int v, long i) { return super_scales[v] * load_int8(integers + i); });
    }
  }
};

// Converts `count` k of a weight block, a whole number of steps from `packed` on, to bf16 in the
// layout of bf16, without scales: out (count / 2, 32, 2).
template <class Kind>
void unpack(const Weight& weight, const char* packed, uint16_t* out, long count) {
  const Kind kind(weight.table);
  for (const char* end = packed + count * K_BYTES<Kind>; packed < end; packed += Kind::STEP)
    for (int j = 0; j < Kind::PAIRS; j++)
      for (long row = 0; row < N_BLOCK; row += LANES, out += 2 * LANES)
        store_pairs(out, kind.pairs(kind.load(packed + row * Kind::ROW_BYTES), j));
}

// Writes the first `width` of each row of sums (end_row - first_row, 32) to the columns from
// `column` on of an output (M, n).
template <Outputs::Kind KIND>
[[gnu::always_inline]] inline void write_columns(void* data, long n, const float* sums,
                                                 long first_row, long end_row, long column,
                                                 long width) {
  for (long row = first_row; row < end_row; row++, sums += N_BLOCK)
    for (long index = row * n + column, i = 0; i < width; i++, index++) {
      const float value = sums[i];
      uint16_t* narrow = (uint16_t*)data + index;
      if (KIND == Outputs::FLOAT32)
        ((float*)data)[index] = value;
      else if (KIND == Outputs::BF16)
        *narrow = to_bf16(value);
      else
        *narrow = to_bf16(widen(*narrow) + widen(to_bf16(value)));
    }
}

// Writes sums (end_row - first_row, 32) to the columns from `column` on of an output (M, n), up to
// the last column: the padding of the last block has none.
template <Outputs::Kind KIND>
void write_as(void* data, long n, const float* sums, long first_row, long end_row, long column) {
  if (n - column >= N_BLOCK)  // a constant width is faster
    write_columns<KIND>(data, n, sums, first_row, end_row, column, N_BLOCK);
  else
    write_columns<KIND>(data, n, sums, first_row, end_row, column, n - column);
}

// Adds the adapter's product to sums (end_row - first_row, 32): for each output, the products of
// `down_outputs` and `up` in the order of the rank.
inline void add_adapter(const Outputs& out, float* sums, long first_row, long end_row,
                        long column) {
  const uint16_t* up = out.up + column * out.rank;
  const float* down_outputs = out.down_outputs + first_row * out.rank;
  for (; first_row < end_row; first_row++, down_outputs += out.rank)
    for (long i = 0; i < N_BLOCK; i += LANES, sums += LANES) {
      Floats total = load<Floats>(sums);
      for (long r = 0; r < out.rank; r += 2) {
        const UInts pairs = load<UInts>(up + r * N_BLOCK + 2 * i);
        add_product(total, widen_even(pairs), down_outputs[r]);
        add_product(total, widen_odd(pairs), down_outputs[r + 1]);
      }
      store(sums, total);
    }
}

// Completes the sums (end_row - first_row, 32) of one weight block, whose first output is `column`,
// and writes them to the rows of the output (M, n).
inline void write(const Outputs& out, long n, float* sums, long first_row, long end_row,
                  long column) {
  if (out.rank) add_adapter(out, sums, first_row, end_row, column);
  if (out.updates) expand(*out.updates, sums, first_row, end_row, column);
  const auto run = out.kind == Outputs::BF16      ? write_as<Outputs::BF16>
                   : out.kind == Outputs::FLOAT32 ? write_as<Outputs::FLOAT32>
                                                  : write_as<Outputs::ADDED>;
  run(out.data, n, sums, first_row, end_row, column);
}

}  // namespace
