// What the kernels share: vectors as wide as the CPU's, bf16 <-> float32, and e^x.
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
constexpr int REGISTER_ROWS = LANES == 16 ? 14 : 6;  // times 2 sums of the 32 registers, or 16

typedef float Floats __attribute__((vector_size(VECTOR_BYTES)));
typedef uint32_t UInts __attribute__((vector_size(VECTOR_BYTES)));  // each holds two bf16
typedef int32_t Ints __attribute__((vector_size(VECTOR_BYTES)));
using Lanes = std::make_integer_sequence<uint32_t, LANES>;
constexpr float INFINITE = std::numeric_limits<float>::infinity();

template <class Vector> Vector load(const void* from) {
  Vector v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

template <class Vector> void store(void* to, const Vector& v) { std::memcpy(to, &v, sizeof v); }

// The first and the second bf16 of each word, as floats.
inline Floats widen_even(UInts words) { return (Floats)(words << 16); }
inline Floats widen_odd(UInts words) { return (Floats)(words & 0xffff0000u); }

inline float widen(uint16_t value) {
  const uint32_t bits = (uint32_t)value << 16;
  float wide;
  std::memcpy(&wide, &bits, 4);
  return wide;
}

// To the nearest, ties to even. The carry cannot turn a NaN into a number: one that comes from bf16
// inputs has an empty low half.
inline uint16_t to_bf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

// LANES float16, or whole numbers of one byte, as floats.
inline Floats load_float16(const void* from) {
#if defined(__AVX512F__)
  return (Floats)_mm512_cvtph_ps(load<__m256i>(from));
#else
  return (Floats)_mm256_cvtph_ps(load<__m128i>(from));
#endif
}
// Rounded to float16, which it returns.
inline Floats store_float16(void* to, Floats v) {
#if defined(__AVX512F__)
  store(to, _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT));
#else
  store(to, _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
#endif
  return load_float16(to);
}
inline Floats round_to_float16(Floats v) {
  char memory[2 * LANES];
  return store_float16(memory, v);
}
inline Floats load_int8(const void* from) {
#if defined(__AVX512F__)
  return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load<__m128i>(from)));
#else
  return (Floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from)));
#endif
}

// 2 LANES whole numbers of one byte: the first of each pair, and the second.
inline void load_int8_pairs(const void* from, Floats& first, Floats& second) {
#if defined(__AVX512F__)
  const Ints pairs = (Ints)_mm512_cvtepi16_epi32(load<__m256i>(from));
#else
  const Ints pairs = (Ints)_mm256_cvtepi16_epi32(load<__m128i>(from));
#endif
  first = __builtin_convertvector((Ints)((UInts)pairs << 24) >> 24, Floats);
  second = __builtin_convertvector(pairs >> 8, Floats);
}
// Rounded to whole numbers, ties to even, each below 128.
inline void store_int8(char* to, Floats v) {
  constexpr float ROUND = 12582912;  // 1.5 * 2^23: the sum's last bits are a whole number
  const UInts whole = (UInts)(v + ROUND);
  for (int i = 0; i < LANES; i++) to[i] = (char)whole[i];
}

// One rounding, and the same wherever it is inlined: of `sum += a * b` the compiler may round
// either product where it knows that the sum is another one.
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

// Two neighbouring numbers of each of LANES rows, and of one row that all are multiplied with. The
// CPU's own product of bf16 pairs takes them as they lie.
struct FloatPairs {
  Floats first, second;
};
inline FloatPairs widen_pairs(UInts words) { return {widen_even(words), widen_odd(words)}; }
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
  float first, second;
};

inline Pairs load_pairs(const void* from) { return widen_pairs(load<UInts>(from)); }
inline Pair load_pair(const uint16_t* from) { return {widen(from[0]), widen(from[1])}; }
inline void store_pairs(void* to, Pairs pairs) {  // of numbers that are bf16
  store(to, (UInts)pairs.first >> 16 | (UInts)pairs.second);
}

inline void multiply_add(Floats& sum, Pairs a, Pair b) {
  add_product(sum, a.first, b.first);
  add_product(sum, a.second, b.second);
}
#endif

// `whole` things in parts of at most `most`, as even as possible: 16 rows are 8 and 8.
struct Partition {
  long whole, count;
  Partition(long whole, long most) : whole(whole), count((whole + most - 1) / most) {}
  long first(long part) const { return part * whole / count; }
  long size(long part) const { return first(part + 1) - first(part); }
};

// to_bf16() of each lane, kept as a float; and of two vectors of lanes, into words.
inline UInts rounded_bits(Floats v) {
  const UInts bits = (UInts)v;
  return bits + 0x7fff + (bits >> 16 & 1);
}
inline Floats round_to_bf16(Floats v) { return (Floats)(rounded_bits(v) & 0xffff0000u); }
inline UInts to_bf16(Floats first, Floats second) {
  return rounded_bits(first) >> 16 | (rounded_bits(second) & 0xffff0000u);
}

// Interleaved lanes, a0 b0 a1 b1 ..., from the lower halves of both vectors, or the upper ones.
template <class Vector, uint32_t... I>
Vector interleave_low(Vector a, Vector b, std::integer_sequence<uint32_t, I...>) {
  return __builtin_shuffle(a, b, UInts{(I / 2 + I % 2 * LANES)...});
}

template <class Vector, uint32_t... I>
Vector interleave_high(Vector a, Vector b, std::integer_sequence<uint32_t, I...>) {
  return __builtin_shuffle(a, b, UInts{(LANES / 2 + I / 2 + I % 2 * LANES)...});
}

// Every second lane of both vectors, from the first or (odd: 1) the second on.
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

// e^x within 2e-7 of itself; exactly 1 at 0, 0 below -86, infinite above 88.7, NaN for NaN.
inline Floats exp(Floats x) {
  constexpr float ROUND = 12582912;  // 1.5 * 2^23: the sum's last bits are a whole number
  const Floats shifted = x * 1.44269504f + ROUND, n = shifted - ROUND;
  const Floats f = x - n * 0.693145752f - n * 1.42860677e-6f;  // ln 2 in two parts
  // (e^f - 1 - f) / f^2 for |f| <= ln 2 / 2, fitted for the least relative error of e^f.
  Floats q = f * 1.38143206e-3f + 8.36885069e-3f;
  q = q * f + 4.16684002e-2f;
  q = q * f + 1.66665196e-1f;
  q = q * f + 4.9999994e-1f;
  const Floats near = q * f * f + f + 1;
  const Floats half_power = (Floats)(((UInts)shifted + 126) << 23);  // 2^(n - 1): 2^128 is no float
  const Floats result = near * half_power * 2;
  const Floats none = {};
  return x < -86 ? none : x > 88.7228f ? none + INFINITE : result;
}

}  // namespace
