// Codes of 32 rows of a weight, a byte each, into the words in which packed_weight.h has them.
#pragma once
#include "packed_weight.h"

namespace {

// Of bytes 0, 2, 4 and 6 the low halves, side by side.
inline uint32_t low_nibbles(uint64_t bytes) {
  bytes &= 0x000f000f000f000f;
  return (bytes | bytes >> 12 | bytes >> 24 | bytes >> 36) & 0xffff;
}

// Of 8 neighbouring codes of each row, which it has in one number, the words of all rows.
inline void write_nibbles(const uint64_t* eight, uint32_t* to) {
  for (long row = 0; row < N_BLOCK; row++)
    to[row] = low_nibbles(eight[row]) | low_nibbles(eight[row] >> 8) << 16;
}
inline void write_bytes(const uint64_t* eight, uint16_t* to) {
  for (int j = 0; j < 64; j += 16)
    for (long row = 0; row < N_BLOCK; row++) *to++ = (uint16_t)(eight[row] >> j);
}

// Of four codes of six bits, a byte each, two pairs: 0 and 2 in the low half, 1 and 3 in the high.
inline uint32_t two_pairs(uint32_t four) {
  return (four & 0x3f) | (four >> 10 & 0xfc0) | (four << 8 & 0x3f0000) | (four >> 2 & 0xfc00000);
}

// Of 16 codes of each row, the first eight and the last.
inline void write_six_bits(const uint64_t* first, const uint64_t* last, uint32_t* to) {
  for (long row = 0; row < N_BLOCK; row++) {
    const uint32_t rest = two_pairs((uint32_t)(last[row] >> 32));
    to[row] = two_pairs((uint32_t)first[row]) | (rest & 0x000f000f) << 12;
    to[row + N_BLOCK] = two_pairs((uint32_t)(first[row] >> 32)) | (rest & 0x00f000f0) << 8;
    to[row + 2 * N_BLOCK] = two_pairs((uint32_t)last[row]) | (rest & 0x0f000f00) << 4;
  }
}

// Rows of `count` codes, a multiple of 8, of six bits of 16, `stride` bytes apart -> the words of a
// kind, the rows side by side.
template <class Kind> void write_codes(const uint8_t* codes, long stride, long count, char* to) {
  constexpr bool SIX = std::is_same_v<Kind, SixBits>;
  constexpr long EIGHTS = SIX ? 2 : 1;
  for (long i = 0; i < count; i += 8 * EIGHTS, to += 8 * EIGHTS * K_BYTES<Kind>) {
    uint64_t eights[EIGHTS][N_BLOCK];
    for (long part = 0; part < EIGHTS; part++)
      for (long row = 0; row < N_BLOCK; row++)
        eights[part][row] = load<uint64_t>(codes + row * stride + i + 8 * part);
    if constexpr (SIX)
      write_six_bits(eights[0], eights[1], (uint32_t*)to);
    else if constexpr (std::is_same_v<Kind, Nibbles>)
      write_nibbles(eights[0], (uint32_t*)to);
    else
      write_bytes(eights[0], (uint16_t*)to);
  }
}

}  // namespace
