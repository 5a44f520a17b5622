// Integer dot products: for each lane of a vector, the products of four bytes of a weight (a quad)
// and four bytes of x are added to a 32-bit sum.
//
// x is signed, from -127 to 127. The bytes of a weight depend on the instruction set: with VNNI
// (AVX512_VNNI or AVX_VNNI) they are unsigned, and a whole byte is its value plus 128. With ARM's
// dot product they are signed. Without these instructions, whole bytes are signed, and products are
// added in 16 bits as far as they fit. All sums are exact, so every instruction set gives the same
// ones.
#pragma once
#include "vectors.h"

namespace {

constexpr int STEP_QUADS = 4;  // quads of neighbouring k that are multiplied in one step
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__) || defined(__ARM_FEATURE_DOTPROD)
#define HAS_DOT  // an instruction makes a dot product, see add_dot()
#endif
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
constexpr int BYTE_OFFSET = 128;  // a whole byte is stored as its value plus this
#else
constexpr int BYTE_OFFSET = 0;
#endif

// Copies the quad at an address to all lanes.
inline Ints broadcast_quad(const char* quad) { return Ints{} + load<int32_t>(quad); }

#if defined(__ARM_FEATURE_DOTPROD)
typedef int8x8_t Quad;  // in the first four bytes
inline Quad load_quad(const char* from) {
  return vreinterpret_s8_s32(int32x2_t{load<int32_t>(from), 0});
}
inline void add_dot(Ints& sums, UInts weights, Quad x) {
  sums = (Ints)vdotq_lane_s32((int32x4_t)sums, (int8x16_t)weights, x, 0);
}
#elif defined(HAS_DOT)
inline Ints load_quad(const char* from) { return broadcast_quad(from); }
#endif

#if defined(__AVX512VNNI__)
inline void add_dot(Ints& sums, UInts weights, Ints x) {
  sums = (Ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)weights, (__m512i)x);
}
#elif defined(__AVXVNNI__)
inline void add_dot(Ints& sums, UInts weights, Ints x) {
  sums = (Ints)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)weights, (__m256i)x);
}
#elif !defined(HAS_DOT)
typedef int16_t Shorts __attribute__((vector_size(VECTOR_BYTES)));

// Multiplies bytes and adds neighbouring products in 16 bits. Codes of BITS bits are unsigned,
// whole bytes (8 bits) signed; their magnitudes are multiplied by x with the sign of the weight.
// The largest sum of two products is 2 * 128 * 127, which fits.
template <int BITS> [[gnu::always_inline]] inline Shorts multiply_bytes(UInts weights, Ints x) {
#if defined(__AVX512F__)
  if constexpr (BITS == 8) {
    const __mmask64 is_negative = _mm512_movepi8_mask((__m512i)weights);
    x = (Ints)_mm512_mask_sub_epi8((__m512i)x, is_negative, __m512i{}, (__m512i)x);
    weights = (UInts)_mm512_abs_epi8((__m512i)weights);
  }
  return (Shorts)_mm512_maddubs_epi16((__m512i)weights, (__m512i)x);
#elif defined(__aarch64__)
  const int8x16_t w = (int8x16_t)weights, y = (int8x16_t)x;
  return (Shorts)vpaddq_s16(vmull_s8(vget_low_s8(w), vget_low_s8(y)), vmull_high_s8(w, y));
#else
  if constexpr (BITS == 8) {
    x = (Ints)_mm256_sign_epi8((__m256i)x, (__m256i)weights);
    weights = (UInts)_mm256_abs_epi8((__m256i)weights);
  }
  return (Shorts)_mm256_maddubs_epi16((__m256i)weights, (__m256i)x);
#endif
}

// Adds neighbouring sums of 16 bits.
inline Ints add_pairs(Shorts pairs) {
#if defined(__AVX512F__)
  return (Ints)_mm512_madd_epi16((__m512i)pairs, _mm512_set1_epi16(1));
#elif defined(__aarch64__)
  return (Ints)vpaddlq_s16((int16x8_t)pairs);
#else
  return (Ints)_mm256_madd_epi16((__m256i)pairs, _mm256_set1_epi16(1));
#endif
}

#if defined(__x86_64__)
// Loads 2 * LANES int8 as 16 bits.
inline Shorts load_widened(const char* from) {
#if defined(__AVX512F__)
  return (Shorts)_mm512_cvtepi8_epi16(load<__m256i>(from));
#else
  return (Shorts)_mm256_cvtepi8_epi16(load<__m128i>(from));
#endif
}

// Multiplies 16 bits and adds neighbouring products.
inline Ints multiply_pairs(Shorts weights, Ints x) {
#if defined(__AVX512F__)
  return (Ints)_mm512_madd_epi16((__m512i)weights, (__m512i)x);
#else
  return (Ints)_mm256_madd_epi16((__m256i)weights, (__m256i)x);
#endif
}
#endif

// Adds the dot products of a step. Sums of 16 bits hold four quads of 4 bits (4 * 2 * 15 * 127),
// two of 6 bits (2 * 2 * 63 * 127 = 32,004), or one of whole bytes.
template <int BITS>
[[gnu::always_inline]] inline void add_dots(Ints& sums, const UInts (&weights)[STEP_QUADS],
                                            const char* x, long stride) {
  constexpr int QUADS = BITS == 4 ? 4 : BITS == 6 ? 2 : 1;
#pragma GCC unroll 4
  for (int first = 0; first < STEP_QUADS; first += QUADS) {
    Shorts pairs = multiply_bytes<BITS>(weights[first], broadcast_quad(x + first * stride));
#pragma GCC unroll 4
    for (int j = first + 1; j < first + QUADS; j++)
      pairs += multiply_bytes<BITS>(weights[j], broadcast_quad(x + j * stride));
    sums += add_pairs(pairs);
  }
}
#endif

}  // namespace
