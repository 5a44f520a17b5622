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

// Rows of `count` codes, a multiple of 8, `stride` bytes apart -> words of PER_WORD neighbours, the rows
// side by side.
template <int PER_WORD, class Word>
void write_codes(const uint8_t* codes, long stride, long count, Word* to) {
  for (long i = 0; i < count; i += 8, to += 8 / PER_WORD * N_BLOCK) {
    uint64_t eight[N_BLOCK];
    for (long row = 0; row < N_BLOCK; row++) eight[row] = load<uint64_t>(codes + row * stride + i);
    if constexpr (PER_WORD == 8)
      write_nibbles(eight, to);
    else
      write_bytes(eight, to);
  }
}

}  // namespace
