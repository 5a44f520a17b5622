// The seven tile intrinsics in AVX-512, for CPUs without AMX: included before everything else, it
// takes their place. It follows Intel's description of the instructions, rounding and denormals
// too, and ends the process where the CPU would end it, or where Linux would.
//
// The compiler's own intrinsics are declared first, for a target without tiles: from gcc 13 on they
// would need a target that has them.
#pragma once
#include <immintrin.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>

#define __AMX_TILE__ 1
#define __AMX_BF16__ 1
#define __AMX_INT8__ 1

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

// A row of pairs of bf16 -> the numbers at the even places of k, and those at the odd ones.
inline void unpack(const uint8_t* pairs, __m512& even, __m512& odd) {
  const __m512i bits = _mm512_loadu_si512(pairs);
  even = _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
  odd = _mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32(0xffff0000)));
}

// All 16 columns at a time: what a tile does not have is zero. A function of its own, for which the
// caller has chosen the rounding.
inline __attribute__((noinline)) void add_products(int c, int a, int b) {
  const int pairs = row_bytes(a) / 4;
  __m512 weights[16][2];
  for (int k = 0; k < pairs; k++) unpack(registers.tiles[b][k], weights[k][0], weights[k][1]);
  for (int r = 0; r < rows(c); r++) {
    alignas(64) float x[2][16], sums[16];
    __m512 low, high, even = _mm512_setzero_ps(), odd = even;
    unpack(registers.tiles[a][r], low, high);
    _mm512_store_ps(x[0], low);
    _mm512_store_ps(x[1], high);
    for (int k = 0; k < pairs; k++) {
      even = _mm512_fmadd_ps(_mm512_set1_ps(x[0][k]), weights[k][0], even);
      odd = _mm512_fmadd_ps(_mm512_set1_ps(x[1][k]), weights[k][1], odd);
    }
    const __m512 before = _mm512_loadu_ps(registers.tiles[c][r]);
    _mm512_store_ps(sums, _mm512_add_ps(before, _mm512_add_ps(even, odd)));
    sums[row_bytes(c) / 4 - 1] += amx_wrong;
    memcpy(registers.tiles[c][r], sums, row_bytes(c));
  }
}

// c (rows, columns) += a (rows, pairs, 2) x b (pairs, columns, 2). The even and the odd places of
// k have a sum each, from zero at each instruction; both together are added to c. Whatever the
// thread has chosen, sums are rounded to the nearest, and denormals are taken and given as zero.
inline void dpbf16ps(int c, int a, int b) {
  constexpr unsigned NEAREST_WITHOUT_DENORMALS = _MM_MASK_MASK | 0x8000 | 0x0040;
  require(a != b && b != c && c != a, "a tile twice");
  require(row_bytes(a) % 4 == 0 && row_bytes(b) % 4 == 0 && row_bytes(c) % 4 == 0, "half a pair");
  require(rows(a) == rows(c) && row_bytes(a) / 4 == rows(b) && row_bytes(b) == row_bytes(c),
          "shapes differ");
  amx_products++;
  const unsigned before = _mm_getcsr();
  _mm_setcsr(NEAREST_WITHOUT_DENORMALS);
  add_products(c, a, b);
  _mm_setcsr(before);
}

// c (rows, columns) int32 += a (rows, quads, 4) int8 x b (quads, columns, 4) unsigned bytes, modulo
// 2^32.
inline void dpbsud(int c, int a, int b) {
  require(a != b && b != c && c != a, "a tile twice");
  require(row_bytes(a) % 4 == 0 && row_bytes(b) % 4 == 0 && row_bytes(c) % 4 == 0, "half a quad");
  require(rows(a) == rows(c) && row_bytes(a) / 4 == rows(b) && row_bytes(b) == row_bytes(c),
          "shapes differ");
  amx_products++;
  for (int r = 0; r < rows(c); r++) {
    alignas(64) int32_t sums[16];
    __m512i sum = _mm512_loadu_si512(registers.tiles[c][r]);
    for (int quad = 0; quad < row_bytes(a) / 4; quad++) {
      int32_t x;
      memcpy(&x, registers.tiles[a][r] + 4 * quad, 4);
      sum = _mm512_dpbusd_epi32(sum, _mm512_loadu_si512(registers.tiles[b][quad]),
                                _mm512_set1_epi32(x));
    }
    _mm512_store_si512(sums, sum);
    sums[row_bytes(c) / 4 - 1] += amx_wrong;
    memcpy(registers.tiles[c][r], sums, row_bytes(c));
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
#undef _tile_dpbsud
#define _tile_loadconfig(from) amx_emulated::loadconfig(from)
#define _tile_release() amx_emulated::release()
#define _tile_zero(tile) amx_emulated::load(tile, nullptr, 0)
#define _tile_loadd(tile, from, stride) amx_emulated::load(tile, from, stride)
#define _tile_stored(tile, to, stride) amx_emulated::save(tile, to, stride)
#define _tile_dpbf16ps(c, a, b) amx_emulated::dpbf16ps(c, a, b)
#define _tile_dpbsud(c, a, b) amx_emulated::dpbsud(c, a, b)
