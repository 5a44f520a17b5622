// A replacement for the instruction of AVX_VNNI, for CPUs that have it in AVX-512 alone: the same
// instruction in its other encoding.
#pragma once
#include <immintrin.h>

#define _mm256_dpbusd_avx_epi32 dpbusd_of_avx512

static inline __m256i dpbusd_of_avx512(__m256i sums, __m256i weights, __m256i x) {
  asm("%{evex%} vpdpbusd %2, %1, %0" : "+x"(sums) : "x"(weights), "x"(x));
  return sums;
}
