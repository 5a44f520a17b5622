// Helpers that all kernels share: SIMD vectors of the CPU's full width (64 bytes with AVX-512, else
// the 32 bytes of AVX2), conversions between bf16, float16, int8 and float32, and the exponential.
//
// The functions take and return vectors of LANES 32-bit elements. In memory, bf16 and float16
// elements have 2 bytes and are contiguous. A 32-bit lane often holds two bf16: the element of even
// index in its low half, the element of odd index in its high half.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>

namespace {

#if defined(__AVX512F__)
constexpr int VECTOR_BYTES = 64;
#else
constexpr int VECTOR_BYTES = 32;  // AVX2
#endif
constexpr int LANES = VECTOR_BYTES / 4;
// The maximum number of rows of a register tile: with two vectors of sums per row, they use 28 of
// the 32 registers of AVX-512, or 12 of the 16 of AVX2.
constexpr int REGISTER_ROWS = LANES == 16 ? 14 : 6;

typedef float Floats __attribute__((vector_size(VECTOR_BYTES)));
typedef uint32_t UInts __attribute__((vector_size(VECTOR_BYTES)));  // often two bf16 per lane
typedef int32_t Ints __attribute__((vector_size(VECTOR_BYTES)));
using Lanes = std::make_integer_sequence<uint32_t, LANES>;
constexpr float INFINITE = std::numeric_limits<float>::infinity();

// Adding and subtracting 1.5 * 2^23 rounds a float of magnitude below 2^22 to an integer, ties to
// even; the low bits of the sum are that integer.
constexpr float ROUNDING_SHIFT = 12582912;

// Loads a vector or an integer from an address of any alignment.
template <class Vector> Vector load(const void* from) {
  Vector v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

template <class Vector> void store(void* to, const Vector& v) { std::memcpy(to, &v, sizeof v); }

// Converts one bf16 of each 32-bit lane to float: the element of even index, or of odd index.
inline Floats widen_even(UInts bf16_pairs) { return (Floats)(bf16_pairs << 16); }
inline Floats widen_odd(UInts bf16_pairs) { return (Floats)(bf16_pairs & 0xffff0000u); }

// Converts a bf16, given as its bits, to float.
inline float widen(uint16_t value) {
  const uint32_t bits = (uint32_t)value << 16;
  float wide;
  std::memcpy(&wide, &bits, 4);
  return wide;
}

// Rounds a float to the nearest bf16, ties to even, and returns its bits. The carry cannot turn a
// NaN into a finite value as long as the NaN comes from bf16 inputs: its low half is zero then.
inline uint16_t to_bf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

// Loads LANES float16 as floats.
inline Floats load_float16(const void* from) {
#if defined(__AVX512F__)
  return (Floats)_mm512_cvtph_ps(load<__m256i>(from));
#else
  return (Floats)_mm256_cvtph_ps(load<__m128i>(from));
#endif
}

// Stores LANES floats as float16, rounded to nearest even, and returns the rounded values.
inline Floats store_float16(void* to, Floats v) {
#if defined(__AVX512F__)
  store(to, _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT));
#else
  store(to, _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
#endif
  return load_float16(to);
}

// Rounds each lane to float16 and returns the result as floats.
inline Floats round_to_float16(Floats v) {
  char memory[2 * LANES];
  return store_float16(memory, v);
}

// Loads LANES int8 as floats.
inline Floats load_int8(const void* from) {
#if defined(__AVX512F__)
  return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load<__m128i>(from)));
#else
  return (Floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from)));
#endif
}

// Loads 2 * LANES int8 as floats: the elements of even index into `even`, the others into `odd`.
inline void load_int8_pairs(const void* from, Floats& even, Floats& odd) {
#if defined(__AVX512F__)
  const Ints pairs = (Ints)_mm512_cvtepi16_epi32(load<__m256i>(from));
#else
  const Ints pairs = (Ints)_mm256_cvtepi16_epi32(load<__m128i>(from));
#endif
  even = __builtin_convertvector((Ints)((UInts)pairs << 24) >> 24, Floats);
  odd = __builtin_convertvector(pairs >> 8, Floats);
}

// Stores LANES floats as int8, rounded to nearest even. Their magnitudes must be below 128.
inline void store_int8(char* to, Floats v) {
  const UInts integers = (UInts)(v + ROUNDING_SHIFT);
  for (int i = 0; i < LANES; i++) to[i] = (char)integers[i];
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

struct FloatPairs {
  Floats even, odd;
};

inline FloatPairs widen_pairs(UInts bf16_pairs) {
  return {widen_even(bf16_pairs), widen_odd(bf16_pairs)};
}

// The operands of a product of pairs. `Pairs` has two elements of neighbouring k for each of LANES
// rows of one matrix. `Pair` has the two elements of the same k for one row of the other matrix.
// With AVX512_BF16 both are bf16 as they are in memory, otherwise floats. multiply_add() adds both
// products of each lane to the sums.
#if defined(__AVX512BF16__)
typedef __m512bh Pairs;
typedef uint32_t Pair;

inline Pairs load_pairs(const void* from) { return load<Pairs>(from); }
inline Pair load_pair(const uint16_t* from) { return load<Pair>(from); }
inline void store_pairs(void* to, Pairs pairs) { store(to, pairs); }

inline void multiply_add(Floats& sum, Pairs a, Pair b) {
  sum = (Floats)_mm512_dpbf16_ps((__m512)sum, a, (__m512bh)_mm512_set1_epi32(b));
}
#else
typedef FloatPairs Pairs;
struct Pair {
  float even, odd;
};

inline Pairs load_pairs(const void* from) { return widen_pairs(load<UInts>(from)); }
inline Pair load_pair(const uint16_t* from) { return {widen(from[0]), widen(from[1])}; }
// Stores pairs as bf16 without rounding: every element must be exactly a bf16.
inline void store_pairs(void* to, Pairs pairs) {
  store(to, (UInts)pairs.even >> 16 | (UInts)pairs.odd);
}

inline void multiply_add(Floats& sum, Pairs a, Pair b) {
  add_product(sum, a.even, b.even);
  add_product(sum, a.odd, b.odd);
}
#endif

}  // namespace

// Divides `total` items into parts of at most `max_size`, as evenly as possible: 16 rows with a
// maximum of 14 become 8 and 8.
struct Partition {
  long total, count;
  Partition(long total, long max_size) : total(total), count((total + max_size - 1) / max_size) {}
  long first(long part) const { return part * total / count; }
  long size(long part) const { return first(part + 1) - first(part); }
};

namespace {

// Rounds the upper half of each float's bits to a bf16, ties to even. The lower half is undefined.
inline UInts rounded_bits(Floats v) {
  const UInts bits = (UInts)v;
  return bits + 0x7fff + (bits >> 16 & 1);
}

// Rounds each lane to bf16 and returns the result as floats.
inline Floats round_to_bf16(Floats v) { return (Floats)(rounded_bits(v) & 0xffff0000u); }

// Rounds two vectors to bf16 and interleaves them: lane i holds even[i] and odd[i].
inline UInts to_bf16(Floats even, Floats odd) {
  return rounded_bits(even) >> 16 | (rounded_bits(odd) & 0xffff0000u);
}

// Interleaves the lower halves of two vectors, or the upper ones: a0 b0 a1 b1 ...
template <class Vector, uint32_t... I>
Vector interleave_low(Vector a, Vector b, std::integer_sequence<uint32_t, I...>) {
  return __builtin_shuffle(a, b, UInts{(I / 2 + I % 2 * LANES)...});
}

template <class Vector, uint32_t... I>
Vector interleave_high(Vector a, Vector b, std::integer_sequence<uint32_t, I...>) {
  return __builtin_shuffle(a, b, UInts{(LANES / 2 + I / 2 + I % 2 * LANES)...});
}

// Returns the lanes of even index of both vectors, a before b; with odd = 1, those of odd index.
template <class Vector, uint32_t... I>
Vector deinterleave(Vector a, Vector b, uint32_t odd, std::integer_sequence<uint32_t, I...>) {
  return __builtin_shuffle(a, b, UInts{2 * I...} + odd);
}

inline float reduce_max(Floats v) {
  float top = v[0];
  for (int i = 1; i < LANES; i++) top = v[i] > top ? v[i] : top;
  return top;
}

inline float reduce_add(Floats v) {
  for (int half = LANES / 2; half; half /= 2)
    for (int i = 0; i < half; i++) v[i] += v[i + half];
  return v[0];
}

// Returns e^x with a relative error of at most 2e-7. It is exactly 1 at 0, 0 below -86, infinity
// above 88.7, and NaN for NaN. With n = x / ln 2 rounded to an integer and f = x - n * ln 2, it is
// 2^n * e^f.
inline Floats exp(Floats x) {
  const Floats shifted = x * 1.44269504f + ROUNDING_SHIFT;
  const Floats n = shifted - ROUNDING_SHIFT;
  const Floats f = x - n * 0.693145752f - n * 1.42860677e-6f;  // ln 2 as a sum of two floats
  // q approximates (e^f - 1 - f) / f^2 for |f| <= ln 2 / 2; the coefficients minimize the maximum
  // relative error of e^f.
  Floats q = f * 1.38143206e-3f + 8.36885069e-3f;
  q = q * f + 4.16684002e-2f;
  q = q * f + 1.66665196e-1f;
  q = q * f + 4.9999994e-1f;
  const Floats exp_f = q * f * f + f + 1;
  // 2^(n - 1), doubled afterwards, because n may be 128 and 2^128 is not a float.
  const Floats half_power = (Floats)(((UInts)shifted + 126) << 23);
  const Floats result = exp_f * half_power * 2;
  const Floats zero = {};
  return x < -86 ? zero : x > 88.7228f ? zero + INFINITE : result;
}

}  // namespace
