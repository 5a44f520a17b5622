// The six tile intrinsics in plain C++, for CPUs without AMX: included before everything else, it
// takes their place. It follows Intel's description of the instructions, rounding and denormals
// too, and ends the process where the CPU would end it, or where Linux would.
#pragma once
#include <immintrin.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cfloat>
#include <cstdint>

// What the tests see and set, by name.
extern "C" {
inline __attribute__((used)) std::atomic<long> amx_products{0};  // of tiles, so far
inline __attribute__((used)) int amx_refused = 0;                // 1: no permission
inline __attribute__((used)) int amx_wrong = 0;                  // 1: a sum is off
}

namespace amx_emulated {

struct Configuration {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};

struct Registers {
  Configuration shapes;  // palette 0: none is loaded
  uint8_t tiles[8][16][64];
};

inline thread_local Registers registers;
inline std::atomic<bool> is_permitted{false};

inline void require(bool holds, const char* what) {
  if (holds) return;
  fprintf(stderr, "emulated AMX: %s\n", what);
  abort();
}

inline long permission(long number, long request, long feature) {
  require(number == SYS_arch_prctl && request == 0x1023 && feature == 18, "another system call");
  is_permitted = !amx_refused;
  return amx_refused ? -1 : 0;
}

inline void loadconfig(const void* from) {
  require(is_permitted, "no permission");
  require(registers.shapes.palette == 0, "the last configuration was not released");
  memset(&registers, 0, sizeof registers);
  memcpy(&registers.shapes, from, 64);
  const Configuration& c = registers.shapes;
  require(c.palette == 1 && c.start_row == 0, "palette or first row");
  for (uint8_t byte : c.reserved) require(byte == 0, "reserved byte");
  for (int t = 0; t < 16; t++) {
    require(t < 8 || (c.rows[t] == 0 && c.row_bytes[t] == 0), "more than 8 tiles");
    require(c.rows[t] <= 16 && c.row_bytes[t] <= 64, "a tile is too large");
    require((c.rows[t] == 0) == (c.row_bytes[t] == 0), "a tile has half a shape");
  }
}

inline void release() { memset(&registers, 0, sizeof registers); }

inline int rows(int t) {
  require(registers.shapes.palette == 1, "no configuration");
  require(registers.shapes.rows[t] > 0, "a tile without a shape");
  return registers.shapes.rows[t];
}

inline int row_bytes(int t) { return registers.shapes.row_bytes[t]; }

inline void load(int t, const void* from, long stride) {
  const int count = rows(t);
  memset(registers.tiles[t], 0, sizeof registers.tiles[t]);
  for (int r = 0; r < count && from; r++)
    memcpy(registers.tiles[t][r], (const char*)from + r * stride, row_bytes(t));
}

inline void save(int t, void* to, long stride) {
  for (int r = 0; r < rows(t); r++)
    memcpy((char*)to + r * stride, registers.tiles[t][r], row_bytes(t));
}

inline float flushed(float value) {
  return __builtin_fabsf(value) < FLT_MIN ? __builtin_copysignf(0, value) : value;
}

inline float number(const uint8_t* bf16) {
  const uint32_t bits = (uint32_t)(bf16[0] | bf16[1] << 8) << 16;
  float value;
  memcpy(&value, &bits, 4);
  return flushed(value);
}

// c (rows, columns) += a (rows, pairs, 2) x b (pairs, columns, 2). The even and the odd places of
// k have a sum each, from zero at each instruction; both together are added to c.
inline void dpbf16ps(int c, int a, int b) {
  const int columns = row_bytes(c) / 4, pairs = row_bytes(a) / 4;
  require(a != b && b != c && c != a, "a tile twice");
  require(row_bytes(a) % 4 == 0 && row_bytes(b) % 4 == 0 && row_bytes(c) % 4 == 0, "half a pair");
  require(rows(a) == rows(c) && pairs == rows(b) && row_bytes(b) == row_bytes(c), "shapes differ");
  amx_products++;
  for (int r = 0; r < rows(c); r++) {
    float sums[16][2] = {}, into[16];
    for (int k = 0; k < pairs; k++)
      for (int n = 0; n < columns; n++)
        for (int odd = 0; odd < 2; odd++)
          sums[n][odd] = flushed(__builtin_fmaf(number(registers.tiles[a][r] + 4 * k + 2 * odd),
                                                number(registers.tiles[b][k] + 4 * n + 2 * odd),
                                                sums[n][odd]));
    memcpy(into, registers.tiles[c][r], sizeof into);
    for (int n = 0; n < columns; n++)
      into[n] = flushed(flushed(into[n]) + flushed(sums[n][0] + sums[n][1]));
    into[columns - 1] += amx_wrong;
    memcpy(registers.tiles[c][r], into, columns * 4);
  }
}

// Only the call with two arguments asks for the tiles; that of futexes has six.
inline long system_call(long number, long request, long feature) {
  return permission(number, request, feature);
}
template <class... Arguments>
long system_call(long number, Arguments... arguments) {
  return ::syscall(number, arguments...);
}

}  // namespace amx_emulated

#define syscall(...) amx_emulated::system_call(__VA_ARGS__)
#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig(from) amx_emulated::loadconfig(from)
#define _tile_release() amx_emulated::release()
#define _tile_zero(tile) amx_emulated::load(tile, nullptr, 0)
#define _tile_loadd(tile, from, stride) amx_emulated::load(tile, from, stride)
#define _tile_stored(tile, to, stride) amx_emulated::save(tile, to, stride)
#define _tile_dpbf16ps(c, a, b) amx_emulated::dpbf16ps(c, a, b)
