// What vectors.h offers, in the instructions of AVX2 and AVX-512. neon.h has the same functions.
#pragma once
#include <immintrin.h>

#include "lanes.h"

#if defined(__AVX512BF16__)
#define HAS_BF16_PRODUCTS  // an instruction multiplies pairs of bf16
#endif

namespace {

// Loads LANES float16 as floats.
inline Floats load_float16(const void* from) {
#if defined(__AVX512F__)
  return (Floats)_mm512_cvtph_ps(load<__m256i>(from));
#else
  return (Floats)_mm256_cvtph_ps(load<__m128i>(from));
#endif
}

// Stores LANES floats as float16, rounded to nearest even.
inline void narrow_float16(void* to, Floats v) {
#if defined(__AVX512F__)
  store(to, _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT));
#else
  store(to, _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
#endif
}

// Converts a float16, given as its bits, to float, and a float to the nearest float16.
inline float float16_to_float(uint16_t value) { return _cvtsh_ss(value); }
inline uint16_t to_float16(float value) { return _cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT); }

// Loads LANES int16 as integers.
inline Ints load_shorts(const void* from) {
#if defined(__AVX512F__)
  return (Ints)_mm512_cvtepi16_epi32(load<__m256i>(from));
#else
  return (Ints)_mm256_cvtepi16_epi32(load<__m128i>(from));
#endif
}

// Converts integers to floats.
inline Floats to_floats(Ints v) {
#if defined(__AVX512F__)
  return (Floats)_mm512_cvtepi32_ps((__m512i)v);
#else
  return (Floats)_mm256_cvtepi32_ps((__m256i)v);
#endif
}

// Rounds floats to integers, ties to even. The low byte of a NaN's is 0.
inline Ints round_to_integers(Floats v) {
#if defined(__AVX512F__)
  return (Ints)_mm512_cvtps_epi32((__m512)v);
#else
  return (Ints)_mm256_cvtps_epi32((__m256)v);
#endif
}

// Loads LANES int8 as floats.
inline Floats load_int8(const void* from) {
#if defined(__AVX512F__)
  return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load<__m128i>(from)));
#else
  return (Floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from)));
#endif
}

// Joins two bytes of each of LANES rows at `low` with the next two, which are at `high`.
inline UInts join_pairs(const char* low, const char* high) {
#if defined(__AVX512F__)
  return (UInts)_mm512_cvtepu16_epi32(load<__m256i>(low)) |
         (UInts)_mm512_cvtepu16_epi32(load<__m256i>(high)) << 16;
#else
  return (UInts)_mm256_cvtepu16_epi32(load<__m128i>(low)) |
         (UInts)_mm256_cvtepu16_epi32(load<__m128i>(high)) << 16;
#endif
}

// Looks up bytes from 0 to 15 in a table of 16 bytes, which is repeated.
inline UInts look_up_bytes(UInts table, UInts indices) {
#if defined(__AVX512F__)
  return (UInts)_mm512_shuffle_epi8((__m512i)table, (__m512i)indices);
#else
  return (UInts)_mm256_shuffle_epi8((__m256i)table, (__m256i)indices);
#endif
}

#if !defined(__AVX512F__)
// Returns the bytes of even index of one vector, and those of odd index of another.
inline UInts blend_bytes(UInts even, UInts odd) {
  const __m256i odd_bytes = _mm256_set1_epi16((short)0xff00);
  return (UInts)_mm256_blendv_epi8((__m256i)even, (__m256i)odd, odd_bytes);
}
#endif

// Returns whether a lane of a mask is set.
inline bool has_set_lane(Ints mask) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask);
#else
  return _mm256_movemask_ps((__m256)mask);
#endif
}

// Adds a * b to the sum with one rounding (fused multiply-add). An explicit instruction is needed:
// the compiler may fuse either product of `sum += a * b` where it knows that the sum is a product
// too, so the result would depend on where the code is inlined.
inline void add_product(Floats& sum, Floats a, Floats b) {
#if defined(__AVX512F__)
  sum = (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum);
#else
  sum = (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum);
#endif
}

inline void add_product(Floats& sum, Floats a, float b) {
#if defined(__AVX512F__)
  add_product(sum, a, (Floats)_mm512_set1_ps(b));
#else
  add_product(sum, a, (Floats)_mm256_set1_ps(b));
#endif
}

// Returns a square root. (std::sqrt may call a library for a negative number.)
inline float square_root(float value) { return _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(value))); }

// Keeps the compiler from fusing the product that gave a value with a sum.
inline void round_here(float& value) { asm("" : "+x"(value)); }

#if defined(HAS_BF16_PRODUCTS)
typedef __m512bh Pairs;
typedef uint32_t Pair;

// Adds both products of each lane to the sums.
inline void multiply_add(Floats& sum, Pairs a, Pair b) {
  sum = (Floats)_mm512_dpbf16_ps((__m512)sum, a, (__m512bh)_mm512_set1_epi32(b));
}

// Stores LANES floats as bf16, rounded to nearest even.
inline void narrow_bf16(void* to, Floats v) { store(to, _mm512_cvtneps_pbh((__m512)v)); }
#endif

}  // namespace
