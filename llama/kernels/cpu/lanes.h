// SIMD vectors of the CPU's full width, 64 bytes with AVX-512, 32 with AVX2, 16 with NEON, and what
// needs no instruction of one machine. vectors.h adds the rest.
//
// The functions take and return vectors of LANES 32-bit elements. In memory, bf16 and float16
// elements have 2 bytes and are contiguous. A 32-bit lane often holds two bf16: the element of even
// index in its low half, the element of odd index in its high half.
#pragma once
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>

namespace {

#if defined(__AVX512F__)
constexpr int VECTOR_BYTES = 64, REGISTERS = 32;
#elif defined(__x86_64__)
constexpr int VECTOR_BYTES = 32, REGISTERS = 16;  // AVX2
#else
constexpr int VECTOR_BYTES = 16, REGISTERS = 32;  // NEON
#endif
constexpr int LANES = VECTOR_BYTES / 4;
// The maximum number of rows of a register tile: with two vectors of sums per row, they use 28 of
// the 32 registers of AVX-512, 24 of those of NEON, whose products read no memory, or 12 of the 16
// of AVX2.
constexpr int REGISTER_ROWS = REGISTERS == 16 ? 6 : LANES == 16 ? 14 : 12;

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

struct FloatPairs {
  Floats even, odd;
};

inline FloatPairs widen_pairs(UInts bf16_pairs) {
  return {widen_even(bf16_pairs), widen_odd(bf16_pairs)};
}

}  // namespace
