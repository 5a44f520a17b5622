// What the products with packed weights share: the layout of a weight, its vectors, block sizes.
// linear.cpp multiplies in vectors, amx.h in tiles.
//
// The layout is VNNI-2, blocked by N: 32 rows of the weight (N, K) stay in their place in memory,
// but reordered so that one vector holds the same two k of neighbouring rows, (N/32, K/2, 32, 2).
// For K = 4,
//     row 0: a0 a1 a2 a3,  row 1: b0 b1 b2 b3,  ...  is stored as
//     a0 a1 b0 b1 c0 c1 ... | a2 a3 b2 b3 c2 c3 ...
// The CPU's own product of bf16 pairs takes such a vector as it is; without one, a shift makes
// floats of the even k, and a mask of the odd. int8 weights lie in the same order at half the size;
// a row's sum is multiplied by its scale.
#pragma once
#include "kernels.h"
#include "vectors.h"

namespace {

constexpr int N_BLOCK = 32;
constexpr long K_BLOCK = 1024;  // k of a pass over x: 64 KiB of a weight block, which L2 holds
constexpr long M_BLOCK = 256;   // rows of x, about, that share one pass over a weight block
// Up to 4 rows are bound by memory: they prefetch 4 KiB ahead into L1 (one Zen 4 core, M = 1: 29
// GB/s, without 24). More rows prefetch the next K block into L2 (M = 8: 25 GB/s, without 21).
constexpr int L1_PREFETCH_ROWS = 4;
constexpr long PREFETCH_BYTES = 4096;

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

// The 32 sums of rows `from` to `to`, columns from `column` on, to outputs of n columns; int8 has
// one scale per column.
template <Outputs::Kind KIND>
void write_as(void* data, long n, const float* sums, const float* scales, long from, long to,
              long column) {
  for (long row = from; row < to; row++)
    for (long at = row * n + column, i = 0; i < N_BLOCK; i++, at++) {
      const float value = *sums++ * (scales ? scales[column + i] : 1);
      uint16_t* narrow = (uint16_t*)data + at;
      if (KIND == Outputs::FLOAT32)
        ((float*)data)[at] = value;
      else if (KIND == Outputs::BF16)
        *narrow = to_bf16(value);
      else
        *narrow = to_bf16(widen(*narrow) + widen(to_bf16(value)));
    }
}

inline void write(const Outputs& out, const Weight& weight, const float* sums, long from, long to,
                  long column) {
  const auto run = out.kind == Outputs::BF16      ? write_as<Outputs::BF16>
                   : out.kind == Outputs::FLOAT32 ? write_as<Outputs::FLOAT32>
                                                  : write_as<Outputs::ADDED>;
  run(out.data, weight.n, sums, weight.scales, from, to, column);
}

}  // namespace
