// What the kernels share: vectors as wide as the CPU's, and bf16 <-> float32.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace {

#if defined(__AVX512F__)
constexpr int VECTOR_BYTES = 64;
#else
constexpr int VECTOR_BYTES = 32;  // AVX2
#endif
constexpr int LANES = VECTOR_BYTES / 4;

typedef float Floats __attribute__((vector_size(VECTOR_BYTES)));
typedef uint32_t Words __attribute__((vector_size(VECTOR_BYTES)));  // each holds two bf16

template <class Vector> Vector load(const void* from) {
  Vector v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

template <class Vector> void store(void* to, const Vector& v) { std::memcpy(to, &v, sizeof v); }

// The first and the second bf16 of each word, as floats.
inline Floats first_of(Words words) { return (Floats)(words << 16); }
inline Floats second_of(Words words) { return (Floats)(words & 0xffff0000u); }

inline float widen(uint16_t value) {
  const uint32_t bits = (uint32_t)value << 16;
  float wide;
  std::memcpy(&wide, &bits, 4);
  return wide;
}

// To the nearest, ties to even. The carry cannot turn a NaN into a number: one that comes from bf16
// inputs has an empty low half.
inline uint16_t narrow(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

}  // namespace
