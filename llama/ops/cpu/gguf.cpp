// Blocks of GGUF -> codes, scales and offsets: what gguf_blocks.py says of each kind, in the same
// order, with the same roundings.
#include "vectors.h"

namespace {

// `fields` of gguf_blocks.py: from `bytes` bytes, put over what the codes have, `up` bits higher.
template <int BITS, int RUN>
void fields(const uint8_t* from, int bytes, uint8_t* to, int up = 0) {
  for (const uint8_t* end = from + bytes; from < end; from += RUN)
    for (int shift = 0; shift < 8; shift += BITS, to += RUN) {
      uint8_t some[RUN];  // nothing else points to it, so that all are made at once
      for (int i = 0; i < RUN; i++) some[i] = (from[i] >> shift & ((1 << BITS) - 1)) << up;
      for (int i = 0; i < RUN; i++) to[i] |= some[i];
    }
}

inline float half(const uint8_t* at) { return _cvtsh_ss(load<uint16_t>(at)); }

// A kind: the weights of a block, its bytes, and its groups. Codes begin as zeros.
template <int WEIGHTS, int BYTES, int GROUPS> struct Block {
  static constexpr int weights = WEIGHTS, bytes = BYTES, groups = GROUPS;
};

template <bool OFFSET, bool FIFTH>
struct Simple : Block<32, 18 + 2 * OFFSET + 4 * FIFTH, 1> {  // Q4_0, Q4_1, Q5_0, Q5_1, IQ4_NL
  static void unpack(const uint8_t* b, uint8_t* codes, float* scale, float* offset) {
    const uint8_t* parts = b + 2 + 2 * OFFSET;
    fields<4, 16>(parts + 4 * FIFTH, 16, codes);
    if (FIFTH) fields<1, 1>(parts, 4, codes, 4);
    *scale = half(b);
    if (OFFSET) *offset = half(b + 2);
  }
};

struct Q8_0 : Block<32, 34, 1> {
  static void unpack(const uint8_t* b, uint8_t* codes, float* scale, float*) {
    for (int i = 0; i < 32; i++) codes[i] = b[2 + i] ^ 128;
    *scale = half(b);
  }
};

struct Q2K : Block<256, 84, 16> {
  static void unpack(const uint8_t* b, uint8_t* codes, float* scale, float* offset) {
    fields<2, 32>(b + 16, 64, codes);
    for (int i = 0; i < 16; i++) {
      scale[i] = half(b + 80) * (float)(b[i] & 15);
      offset[i] = -(half(b + 82) * (float)(b[i] >> 4));
    }
  }
};

struct Q3K : Block<256, 110, 16> {
  static void unpack(const uint8_t* b, uint8_t* codes, float* scale, float*) {
    uint8_t scales[16] = {};
    fields<2, 32>(b + 32, 64, codes);
    fields<1, 32>(b, 32, codes, 2);
    fields<4, 8>(b + 96, 8, scales);
    fields<2, 4>(b + 104, 4, scales, 4);
    for (int i = 0; i < 16; i++) scale[i] = half(b + 108) * (float)(scales[i] - 32);
  }
};

template <bool FIFTH> struct Q4K : Block<256, 144 + 32 * FIFTH, 8> {
  static void unpack(const uint8_t* b, uint8_t* codes, float* scale, float* offset) {
    fields<4, 32>(b + 16 + 32 * FIFTH, 128, codes);
    if (FIFTH) fields<1, 32>(b + 16, 32, codes, 4);
    const uint8_t *low = b + 4, *middle = b + 8, *high = b + 12;
    for (int i = 0; i < 4; i++) {
      scale[i] = half(b) * (float)(low[i] & 63);
      scale[i + 4] = half(b) * (float)((high[i] & 15) | low[i] >> 6 << 4);
      offset[i] = -(half(b + 2) * (float)(middle[i] & 63));
      offset[i + 4] = -(half(b + 2) * (float)(high[i] >> 4 | middle[i] >> 6 << 4));
    }
  }
};

struct Q6K : Block<256, 210, 16> {
  static void unpack(const uint8_t* b, uint8_t* codes, float* scale, float*) {
    fields<4, 64>(b, 128, codes);
    fields<2, 32>(b + 128, 64, codes, 4);
    for (int i = 0; i < 16; i++) scale[i] = half(b + 208) * (float)(int8_t)b[192 + i];
  }
};

struct IQ4XS : Block<256, 136, 8> {
  static void unpack(const uint8_t* b, uint8_t* codes, float* scale, float*) {
    uint8_t scales[8] = {};
    fields<4, 16>(b + 8, 128, codes);
    fields<4, 1>(b + 4, 4, scales);
    fields<2, 1>(b + 2, 2, scales, 4);
    for (int i = 0; i < 8; i++) scale[i] = half(b) * (float)(scales[i] - 32);
  }
};

template <class Kind>
void unpack_all(const uint8_t* blocks, uint8_t* codes, float* scales, float* offsets, long count,
                int threads) {
#pragma omp parallel for num_threads(threads)
  for (long i = 0; i < count; i++) {
    uint8_t* own = codes + i * Kind::weights;
    std::memset(own, 0, Kind::weights);
    const long group = i * Kind::groups;
    Kind::unpack(blocks + i * Kind::bytes, own, scales + group, offsets + group);
  }
}

}  // namespace

extern "C" {

// `count` blocks of a kind, by its place in gguf_blocks.py -> codes (count, weights), scales and
// offsets (count, groups); kinds without offsets write none.
void unpack_gguf(const uint8_t* blocks, uint8_t* codes, float* scales, float* offsets, long kind,
                 long count, int threads) {
  constexpr decltype(&unpack_all<Q8_0>) KINDS[] = {
      unpack_all<Simple<false, false>>, unpack_all<Simple<true, false>>,
      unpack_all<Simple<false, true>>, unpack_all<Simple<true, true>>,
      unpack_all<Q8_0>, unpack_all<Q2K>, unpack_all<Q3K>, unpack_all<Q4K<false>>,
      unpack_all<Q4K<true>>, unpack_all<Q6K>, unpack_all<Simple<false, false>>, unpack_all<IQ4XS>};
  KINDS[kind](blocks, codes, scales, offsets, count, threads);
}
}
