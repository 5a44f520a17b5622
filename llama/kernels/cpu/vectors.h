// Helpers that all kernels share: SIMD vectors (lanes.h), conversions between bf16, float16, int8
// and float32, products of pairs, and the exponential. x86.h and neon.h have the functions that
// consist of instructions of one machine.
#pragma once
#if defined(__x86_64__)
#include "x86.h"
#else
#include "neon.h"
#endif

namespace {

// Rounds a float to the nearest bf16, ties to even, and returns its bits. The carry cannot turn a
// NaN into a finite value as long as the NaN comes from bf16 inputs: its low half is zero then.
inline uint16_t to_bf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

// Stores LANES floats as float16, rounded to nearest even, and returns the rounded values.
inline Floats store_float16(void* to, Floats v) {
  narrow_float16(to, v);
  return load_float16(to);
}

// Rounds each lane to float16 and returns the result as floats.
inline Floats round_to_float16(Floats v) {
  char memory[2 * LANES];
  return store_float16(memory, v);
}

// Loads 2 * LANES int8 as floats: the elements of even index, and the others.
inline FloatPairs load_int8_pairs(const void* from) {
  const Ints pairs = load_shorts(from);
  return {to_floats((Ints)((UInts)pairs << 24) >> 24), to_floats(pairs >> 8)};
}

// Stores LANES floats as int8, rounded to nearest even. Their magnitudes must be below 128.
inline void store_int8(char* to, Floats v) {
  const UInts integers = (UInts)(v + ROUNDING_SHIFT);
  for (int i = 0; i < LANES; i++) to[i] = (char)integers[i];
}

// The operands of a product of pairs. `Pairs` has two elements of neighbouring k for each of LANES
// rows of one matrix. `Pair` has the two elements of the same k for one row of the other matrix.
// With HAS_BF16_PRODUCTS both are bf16 as they are in memory, otherwise floats. multiply_add() adds
// both products of each lane to the sums.
#if defined(HAS_BF16_PRODUCTS)
inline Pairs to_pairs(UInts bf16_pairs) { return (Pairs)bf16_pairs; }
// Every element must be exactly a bf16.
inline Pairs to_pairs(const FloatPairs& pairs) {
  return (Pairs)((UInts)pairs.even >> 16 | (UInts)pairs.odd);
}
inline FloatPairs widen_pairs(Pairs pairs) { return widen_pairs((UInts)pairs); }
inline Pair load_pair(const uint16_t* from) { return load<Pair>(from); }
inline void store_pairs(void* to, Pairs pairs) { store(to, pairs); }
#else
typedef FloatPairs Pairs;
struct Pair {
  float even, odd;
};

inline Pairs to_pairs(UInts bf16_pairs) { return widen_pairs(bf16_pairs); }
inline Pairs to_pairs(const FloatPairs& pairs) { return pairs; }
inline FloatPairs widen_pairs(const Pairs& pairs) { return pairs; }
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

inline Pairs load_pairs(const void* from) { return to_pairs(load<UInts>(from)); }

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
