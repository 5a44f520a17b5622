// Rounds and packs x for integer products: bf16 rows (M, K) go in; quads of int8 and the terms of
// their pieces come out, in the order in which integer_product.cpp reads them.
//
// llama/ops/rounded.py defines the rounding, bit for bit. Each group of 32 k, or each row, has a
// scale. A piece is 32 k, or 16 where the groups of the weight have 16. Sums over a piece begin
// with a first value: the element_offset() of the weight times the sum of the codes.
#pragma once
#include <algorithm>

#include "integer_product.h"
#include "quads.h"

namespace {

// A product of up to IN_PLACE_ROWS rows makes quads where they are used, for row blocks of up to
// IN_PLACE_TILE rows. With more rows, the quads of a K block are made once.
constexpr long IN_PLACE_TILE = REGISTER_ROWS / 2;
constexpr long IN_PLACE_ROWS = 2 * IN_PLACE_TILE;
constexpr long ROUNDED_GROUP = 32;          // k that share a scale of x, if a row has several
constexpr float MIN_MAGNITUDE = 0x1p-100f;  // groups of smaller elements are rounded to zero
constexpr float MAX_CODE = 127;

// How integer sums become float32.
enum class Scaling {
  TOKENS,   // x and the weight have one scale per row: integer sums over all k are scaled
  ROWS,     // the weight has one scale per row, which multiplies the total
  GROUPS,   // the weight has scales for groups
  OFFSETS,  // the weight has scales and offsets for groups
};

inline Scaling scaling_of(const Weight& weight) {
  if (weight.per_group > 1) return Scaling::OFFSETS;
  if (weight.group < weight.k) return Scaling::GROUPS;
  return weight.activations == weight.k ? Scaling::TOKENS : Scaling::ROWS;
}

// The scale of elements whose largest magnitude is known.
struct RoundingScale {
  float scale, inverse;
  explicit RoundingScale(float largest)
      : scale(largest < MIN_MAGNITUDE ? 0 : largest / MAX_CODE),
        inverse(largest < MIN_MAGNITUDE ? 0 : MAX_CODE / largest) {}
};

// Rounds LANES pairs of bf16 to codes, ties to even. The low 16 bits of a lane have the two codes
// of a pair. A NaN becomes the code 0, as the low byte of its integer is 0. (Rounding by an
// addition would let the compiler fuse it with the product.)
inline UInts round_pairs(const uint16_t* x, float inverse) {
  const UInts pairs = load<UInts>(x);
  const Floats even = widen_even(pairs) * inverse;
  const Floats odd = widen_odd(pairs) * inverse;
  const UInts even_codes = (UInts)round_to_integers(even);
  const UInts odd_codes = (UInts)round_to_integers(odd);
  return (even_codes & 0xff) | (odd_codes << 8 & 0xff00);
}

// Codes: 32 codes.
// largest_magnitude(x, count): the largest magnitude of bf16, as many as a multiple of 16; NaN if
// one
//     of them is NaN. Without their signs, bf16 are in the order of their bits.
// round_group(x, inverse): rounds 32 bf16 to codes.
// reorder(codes, order): each half in another order; `order` has the indices in the half.
// HalfSums: the sums of the first 16 codes, and of the others.
#if defined(__aarch64__)
typedef int8x16x2_t Codes;

inline float largest_magnitude(const uint16_t* x, long count) {
  uint16x8_t largest = vdupq_n_u16(0);
  for (long i = 0; i < count; i += 8)
    largest = vmaxq_u16(largest, vandq_u16(load<uint16x8_t>(x + i), vdupq_n_u16(0x7fff)));
  return widen(vmaxvq_u16(largest));
}

inline Codes round_group(const uint16_t* x, float inverse) {
  Codes codes;
  for (int half = 0; half < 2; half++, x += 16)
    codes.val[half] = (int8x16_t)vuzp1q_u16((uint16x8_t)round_pairs(x, inverse),
                                            (uint16x8_t)round_pairs(x + 8, inverse));
  return codes;
}

inline Codes reorder(const Codes& codes, const Codes& order) {
  return {vqtbl1q_s8(codes.val[0], (uint8x16_t)order.val[0]),
          vqtbl1q_s8(codes.val[1], (uint8x16_t)order.val[1])};
}

struct HalfSums {
  int first, second;
  explicit HalfSums(const Codes& codes)
      : first(vaddlvq_s8(codes.val[0])), second(vaddlvq_s8(codes.val[1])) {}
};
#else
typedef __m256i Codes;

inline float largest_magnitude(const uint16_t* x, long count) {
  const __m256i magnitude_bits = _mm256_set1_epi16(0x7fff);
  __m256i largest = {};
  for (long i = 0; i < count; i += 16)
    largest = _mm256_max_epu16(largest, _mm256_and_si256(load<__m256i>(x + i), magnitude_bits));
  const __m128i eight =
      _mm_max_epu16(_mm256_castsi256_si128(largest), _mm256_extracti128_si256(largest, 1));
  // The instruction finds a minimum, so all bits are flipped before and after.
  const __m128i minimum = _mm_minpos_epu16(_mm_xor_si128(eight, _mm_set1_epi16(-1)));
  return widen((uint16_t)~_mm_extract_epi16(minimum, 0));
}

inline Codes round_group(const uint16_t* x, float inverse) {
#if defined(__AVX512F__)
  return _mm512_cvtepi32_epi16((__m512i)round_pairs(x, inverse));
#else
  const __m256i first = (__m256i)round_pairs(x, inverse);
  const __m256i second = (__m256i)round_pairs(x + ROUNDED_GROUP / 2, inverse);
  return _mm256_permute4x64_epi64(_mm256_packus_epi32(first, second), 0xd8);
#endif
}

inline Codes reorder(Codes codes, Codes order) { return _mm256_shuffle_epi8(codes, order); }

struct HalfSums {
  int first, second;
  explicit HalfSums(Codes codes) {
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), codes);
    int32_t fours[8];
    store(fours, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    first = fours[0] + fours[1] + fours[2] + fours[3];
    second = fours[4] + fours[5] + fours[6] + fours[7];
  }
};
#endif

// Packs x in the layout.
struct RoundedX : RoundedLayout {
  bool has_row_scale;  // a row has one scale
  bool has_row_sums;   // the sums run over all k: a K block has one first value
  int offset;          // element_offset()
  Codes order;         // the indices of the codes in the order of quads, in each half
  RoundedX(long m, const Weight& weight)
      : RoundedLayout{m, weight.k, std::min(weight.group, ROUNDED_GROUP),
                      Partition(m, m <= IN_PLACE_ROWS ? IN_PLACE_TILE : REGISTER_ROWS),
                      Partition(0, 1)},
        has_row_scale(weight.activations == weight.k),
        has_row_sums(scaling_of(weight) == Scaling::TOKENS),
        offset(element_offset(weight)),
        order(indices_of(quad_order(weight.format))) {
    m_blocks = Partition(row_blocks.count, M_BLOCK / REGISTER_ROWS);
  }

  long k_blocks() const { return (k + K_BLOCK - 1) / K_BLOCK; }

  // A piece of work is one K block of one row block.
  long pieces() const { return row_blocks.count * k_blocks(); }
  void pack(const uint16_t* x, char* packed, long work) const {
    const long block = work / k_blocks();
    const long begin = work % k_blocks() * K_BLOCK;
    const long row = row_blocks.first(block);
    const long rows = row_blocks.size(block);
    const QuadRows to = part(packed, row, rows, begin);
    for (long r = 0; r < rows; r++) {
      const QuadRows of_row = {to.quads + sizeof(PackedQuads) * r, to.terms + r};
      pack_row(x + (row + r) * k, of_row, rows, begin, std::min(begin + K_BLOCK, k));
    }
  }

 private:
  static Codes indices_of(const QuadOrder& order) {
    int8_t indices[32];
    for (int i = 0; i < 32; i++) indices[i] = (int8_t)(order.k[i % 8] + i % 16 / 8 * 8);
    return load<Codes>(indices);
  }

  // Packs the k from `begin` up to, not including, `end` of a row of a block of `rows` rows.
  void pack_row(const uint16_t* x, const QuadRows& to, long rows, long begin, long end) const {
    char* quads = (char*)to.quads;
    float* terms = (float*)to.terms;
    RoundingScale scale(has_row_scale ? largest_magnitude(x, k) : 0);
    int sum_of_block = 0;
    for (long i = begin; i < end; i += ROUNDED_GROUP) {
      if (!has_row_scale) scale = RoundingScale(largest_magnitude(x + i, ROUNDED_GROUP));
      const Codes codes = round_group(x + i, scale.inverse);
      PackedQuads ordered[ROUNDED_GROUP / sizeof(PackedQuads)];
      store(ordered, reorder(codes, order));
      for (PackedQuads packed : ordered) {
        store(quads, packed);
        quads += sizeof packed * rows;
      }
      const HalfSums sums(codes);
      sum_of_block += sums.first + sums.second;
      const bool is_halved = piece < ROUNDED_GROUP;
      terms = write_terms(terms, rows, is_halved ? sums.first : sums.first + sums.second, scale);
      if (is_halved) terms = write_terms(terms, rows, sums.second, scale);
    }
    if (has_row_sums) store((float*)to.terms, offset * sum_of_block);
  }

  // Writes the terms of a piece; returns the address of the next ones.
  float* write_terms(float* terms, long rows, int sum, const RoundingScale& scale) const {
    store(terms, offset * sum);
    terms[rows] = scale.scale;
    terms[2 * rows] = (float)sum;
    return terms + 3 * rows;
  }
};

}  // namespace
