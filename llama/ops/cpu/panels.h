// What the products with packed weights share: how a weight lies, its vectors, and how the work is
// cut. linear.cpp multiplies in vectors, amx.h in tiles.
//
// A panel is 32 rows of the weight (N, K), in their old place in memory, but turned so that one
// vector holds the same two k of neighbouring rows, (N/32, K/2, 32, 2): for K = 4,
//     row 0: a0 a1 a2 a3,  row 1: b0 b1 b2 b3,  ...  is stored as
//     a0 a1 b0 b1 c0 c1 ... | a2 a3 b2 b3 c2 c3 ...
// The CPU's own product of bf16 pairs takes such a vector as it is; without one, a shift makes
// floats of the even k, and a mask of the odd. int8 weights lie in the same order at half the size;
// a row's sum is multiplied by its scale.
#pragma once
#include "vectors.h"

namespace {

constexpr int WIDTH = 32;
constexpr long SLICE = 1024;  // places of k: 64 KiB of a panel, which the second cache holds
constexpr long CHUNK = 256;   // rows of x, about, that share one pass over a panel
// So few rows are bound by memory alone, and fetch what comes next into the first cache, this many
// bytes ahead (on one Zen 4 core, 29 GB/s at M = 1 and not 24); more rows fetch the next slice into
// the second (at M = 8, 25 GB/s and not 21).
constexpr int FEW = 4;
constexpr long AHEAD = 4096;

// What the two kinds of weight differ in: how many bytes a number has, and how LANES rows of two
// neighbouring k are made of them.
struct Bf16 {
  static constexpr long BYTES = 2;
  static Pairs pairs(const char* w) { return load_pairs(w); }
};

#if defined(__AVX512BF16__)
struct Int8 {
  static constexpr long BYTES = 1;
  static __m512 widened(const char* w) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load<__m128i>(w)));
  }
  static Pairs pairs(const char* w) { return _mm512_cvtne2ps_pbh(widened(w + 16), widened(w)); }
};
#else
struct Int8 {
  static constexpr long BYTES = 1;
  typedef int32_t Integers __attribute__((vector_size(VECTOR_BYTES)));
  static Pairs pairs(const char* w) {  // gcc makes poor code of a portable conversion
#if defined(__AVX512F__)
    const __m512i both = _mm512_cvtepi16_epi32(load<__m256i>(w));
    const Integers even = (Integers)_mm512_slli_epi32(both, 24) >> 24, odd = (Integers)both >> 8;
    return {(Floats)_mm512_cvtepi32_ps((__m512i)even), (Floats)_mm512_cvtepi32_ps((__m512i)odd)};
#else
    const __m256i both = _mm256_cvtepi16_epi32(load<__m128i>(w));
    const Integers even = (Integers)_mm256_slli_epi32(both, 24) >> 24, odd = (Integers)both >> 8;
    return {(Floats)_mm256_cvtepi32_ps((__m256i)even), (Floats)_mm256_cvtepi32_ps((__m256i)odd)};
#endif
  }
};
#endif

// Where the outputs go: (m, n), bf16 or, as logits do, float32.
struct Outputs {
  void* data;
  long n;
  long is_wide;

  // The 32 sums of some rows of x, a panel's columns from `column` on; int8 has a scale for each.
  void write(const float* sums, const float* scales, long from, long to, long column) const {
    for (long row = from; row < to; row++)
      for (long at = row * n + column, i = 0; i < WIDTH; i++, at++) {
        const float value = *sums++ * (scales ? scales[column + i] : 1);
        if (is_wide)
          ((float*)data)[at] = value;
        else
          ((uint16_t*)data)[at] = narrow(value);
      }
  }
};

}  // namespace
