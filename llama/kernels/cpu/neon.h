// What vectors.h offers, in the instructions of ARM's NEON (aarch64). x86.h has the same functions,
// and says what they do.
#pragma once
#include <arm_neon.h>

#include "lanes.h"

#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define HAS_BF16_PRODUCTS
#endif
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC) && defined(__ARM_FEATURE_MATMUL_INT8)
#define HAS_MATRICES  // instructions multiply two rows by two rows, see add_matrix()
#endif

namespace {

inline Floats load_float16(const void* from) {
  return (Floats)vcvt_f32_f16(load<float16x4_t>(from));
}

inline void narrow_float16(void* to, Floats v) { store(to, vcvt_f16_f32((float32x4_t)v)); }

inline float float16_to_float(uint16_t value) { return load<__fp16>(&value); }
inline uint16_t to_float16(float value) {
  const __fp16 narrow = value;
  return load<uint16_t>(&narrow);
}

inline Ints load_shorts(const void* from) { return (Ints)vmovl_s16(load<int16x4_t>(from)); }

inline Floats to_floats(Ints v) { return (Floats)vcvtq_f32_s32((int32x4_t)v); }

inline Ints round_to_integers(Floats v) { return (Ints)vcvtnq_s32_f32((float32x4_t)v); }

inline Floats load_int8(const void* from) {
  const int8x8_t bytes = vreinterpret_s8_u32(vdup_n_u32(load<uint32_t>(from)));
  return to_floats((Ints)vmovl_s16(vget_low_s16(vmovl_s8(bytes))));
}

inline UInts join_pairs(const char* low, const char* high) {
  const uint16x8_t first = vcombine_u16(load<uint16x4_t>(low), vdup_n_u16(0));
  const uint16x8_t second = vcombine_u16(load<uint16x4_t>(high), vdup_n_u16(0));
  return (UInts)vzip1q_u16(first, second);
}

inline UInts look_up_bytes(UInts table, UInts indices) {
  return (UInts)vqtbl1q_u8((uint8x16_t)table, (uint8x16_t)indices);
}

inline UInts blend_bytes(UInts even, UInts odd) {
  return (UInts)vbslq_u8(vreinterpretq_u8_u16(vdupq_n_u16(0xff00)), (uint8x16_t)odd,
                         (uint8x16_t)even);
}

inline bool has_set_lane(Ints mask) { return vmaxvq_u32((uint32x4_t)mask); }

inline void add_product(Floats& sum, Floats a, Floats b) {
  sum = (Floats)vfmaq_f32((float32x4_t)sum, (float32x4_t)a, (float32x4_t)b);
}

inline void add_product(Floats& sum, Floats a, float b) {
  sum = (Floats)vfmaq_n_f32((float32x4_t)sum, (float32x4_t)a, b);
}

inline float square_root(float value) { return vget_lane_f32(vsqrt_f32(vdup_n_f32(value)), 0); }

inline void round_here(float& value) { asm("" : "+w"(value)); }

#if defined(HAS_BF16_PRODUCTS)
typedef bfloat16x8_t Pairs;
typedef uint32_t Pair;

inline void multiply_add(Floats& sum, Pairs a, Pair b) {
  const bfloat16x4_t pair = vreinterpret_bf16_u32(uint32x2_t{b, 0});
  sum = (Floats)vbfdotq_lane_f32((float32x4_t)sum, a, pair, 0);
}

inline void narrow_bf16(void* to, Floats v) { store(to, vcvt_bf16_f32((float32x4_t)v)); }
#endif

#if defined(HAS_MATRICES)
// Multiplies two rows of a weight by two rows of x, of four bf16 or eight int8 each, and adds the
// products to the sums, (weight rows, x rows). It adds in the order of k, and so gives the bits of
// two multiply_add().
inline void add_matrix(Floats& sums, UInts weight, UInts x) {
  sums = (Floats)vbfmmlaq_f32((float32x4_t)sums, (bfloat16x8_t)weight, (bfloat16x8_t)x);
}
inline void add_matrix(Ints& sums, UInts weight, UInts x) {
  sums = (Ints)vmmlaq_s32((int32x4_t)sums, (int8x16_t)weight, (int8x16_t)x);
}

// Half of the rows of one vector of a weight, for add_matrix(): each row has a lane of `first` and
// then one of `second`.
inline UInts low_rows(UInts first, UInts second) {
  return (UInts)vzip1q_u32((uint32x4_t)first, (uint32x4_t)second);
}
inline UInts high_rows(UInts first, UInts second) {
  return (UInts)vzip2q_u32((uint32x4_t)first, (uint32x4_t)second);
}

// Two vectors of sums, one after the other, belong to two rows of x, or to the low and the high
// rows of a weight, as add_matrix() has them. The functions turn one into the other. The last of an
// odd number of rows stays as it is.
template <class Vector, int R, int VECTORS>
[[gnu::always_inline]] inline void to_matrices(Vector (&sums)[R][VECTORS]) {
#pragma GCC unroll 16
  for (int r = 0; r + 1 < R; r += 2)
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++) {
      const UInts first = (UInts)sums[r][v], second = (UInts)sums[r + 1][v];
      sums[r][v] = (Vector)low_rows(first, second);
      sums[r + 1][v] = (Vector)high_rows(first, second);
    }
}
template <class Vector, int R, int VECTORS>
[[gnu::always_inline]] inline void from_matrices(Vector (&sums)[R][VECTORS]) {
#pragma GCC unroll 16
  for (int r = 0; r + 1 < R; r += 2)
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++) {
      const uint32x4_t low = (uint32x4_t)sums[r][v], high = (uint32x4_t)sums[r + 1][v];
      sums[r][v] = (Vector)vuzp1q_u32(low, high);
      sums[r + 1][v] = (Vector)vuzp2q_u32(low, high);
    }
}
#endif

}  // namespace
