// Packs the codes of 32 rows of a weight into the memory layouts of packed_weight.h: nibbles, six
// bits, or bytes. The input has one byte per code; the functions read eight codes of a row at once,
// as an integer of 64 bits with the code of the lowest k in the lowest byte.
#pragma once
#include "packed_weight.h"

namespace {

// Returns the low nibbles of bytes 0, 2, 4 and 6 as 16 contiguous bits.
inline uint32_t even_nibbles(uint64_t bytes) {
  bytes &= 0x000f000f000f000f;
  return (bytes | bytes >> 12 | bytes >> 24 | bytes >> 36) & 0xffff;
}

// Packs 8 nibbles of each row: eight (32) -> out (32).
inline void write_nibbles(const uint64_t* eight, uint32_t* out) {
  for (long row = 0; row < N_BLOCK; row++)
    out[row] = even_nibbles(eight[row]) | even_nibbles(eight[row] >> 8) << 16;
}

// Packs 8 bytes of each row: eight (32) -> out (4, 32), two bytes of a row in each element.
inline void write_bytes(const uint64_t* eight, uint16_t* out) {
  for (int shift = 0; shift < 64; shift += 16)
    for (long row = 0; row < N_BLOCK; row++) *out++ = (uint16_t)(eight[row] >> shift);
}

// Packs four codes of six bits, a byte each: codes 0 and 2 into the low 12 bits of the low half, 1
// and 3 into those of the high half. The upper four bits of each half remain zero.
inline uint32_t pack_four_codes(uint32_t four) {
  return (four & 0x3f) | (four >> 10 & 0xfc0) | (four << 8 & 0x3f0000) | (four >> 2 & 0xfc00000);
}

// Packs 16 codes of six bits of each row, the lower eight k in `low` (32), the upper eight in
// `high` (32) -> out (3, 32). The last four codes fill the upper four bits of each half.
inline void write_six_bits(const uint64_t* low, const uint64_t* high, uint32_t* out) {
  for (long row = 0; row < N_BLOCK; row++) {
    const uint32_t last = pack_four_codes((uint32_t)(high[row] >> 32));
    out[row] = pack_four_codes((uint32_t)low[row]) | (last & 0x000f000f) << 12;
    out[row + N_BLOCK] = pack_four_codes((uint32_t)(low[row] >> 32)) | (last & 0x00f000f0) << 8;
    out[row + 2 * N_BLOCK] = pack_four_codes((uint32_t)high[row]) | (last & 0x0f000f00) << 4;
  }
}

// Packs the codes of 32 rows into the layout of a kind.
//
// codes: 32 rows of `count` bytes, which begin `stride` bytes apart. `count` is a multiple of 8,
//     and of 16 for six bits.
// out: count * K_BYTES<Kind> bytes.
template <class Kind> void write_codes(const uint8_t* codes, long stride, long count, char* out) {
  constexpr bool IS_SIX_BITS = std::is_same_v<Kind, SixBits>;
  constexpr long EIGHTS = IS_SIX_BITS ? 2 : 1;  // integers of eight codes per row and step
  for (long k = 0; k < count; k += 8 * EIGHTS, out += 8 * EIGHTS * K_BYTES<Kind>) {
    uint64_t eights[EIGHTS][N_BLOCK];
    for (long part = 0; part < EIGHTS; part++)
      for (long row = 0; row < N_BLOCK; row++)
        eights[part][row] = load<uint64_t>(codes + row * stride + k + 8 * part);
    if constexpr (IS_SIX_BITS)
      write_six_bits(eights[0], eights[1], (uint32_t*)out);
    else if constexpr (std::is_same_v<Kind, Nibbles>)
      write_nibbles(eights[0], (uint32_t*)out);
    else
      write_bytes(eights[0], (uint16_t*)out);
  }
}

}  // namespace
