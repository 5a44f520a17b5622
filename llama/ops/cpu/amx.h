// Products of bf16 in a CPU's tiles (AMX: Sapphire Rapids and later): up to 32 rows of x, times a
// packed panel of 32 outputs, onto float32 sums. linear.cpp asks tiles_work(), and then
// linear_in_tiles() for whole products; it knows nothing of tiles.
//
// A tile is 16 rows of 64 bytes. One instruction adds to C (16 rows of x, 16 outputs) the product
// of A (16 rows of x, 32 places of k) and B (16 pairs of k, 16 outputs, 2): B is half of a panel as
// it lies, for 32 places of k, a step. Tiles 0 and 1 hold the sums of the first 16 rows of x and 2
// and 3 those of the next; 4 and 5 are these rows, 6 and 7 the weights.
#pragma once
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>

#include "panels.h"

namespace {

constexpr long TILE_ROWS = 16;
constexpr long TILE_K = 32;
// The places of k that more than 32 rows pass over at once: 16 KiB of x and 16 of a panel, which the
// first cache holds. Such a slice of a chunk of x stays in the second for a group of panels.
constexpr long DEPTH = 256;
constexpr long GROUP = 8;

// gcc's intrinsics do not say that they read memory: without this, it may move stores past them, or
// drop the stores.
inline void finish_stores() { asm volatile("" ::: "memory"); }

struct alignas(64) Configuration {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// The shapes of this thread's tiles, until _tile_release(). Lower tiles of x are less to load.
inline void configure(long height) {
  Configuration shapes;
  for (int tile = 0; tile < 8; tile++) {
    shapes.row_bytes[tile] = 64;
    shapes.rows[tile] = tile < 6 ? height : TILE_K / 2;
  }
  finish_stores();
  _tile_loadconfig(&shapes);
}

// Some rows of x, `height` at most, for some places of k -> tiles (K/32, height, 32), one for each
// step. Rows that x does not have stay as they are: their sums are not used. (Where they lie, K
// apart, the rows of a tile would share one set of a cache.)
inline void fill_tiles(const uint16_t* x, uint16_t* to, long rows, long height, long k,
                       long places) {
  for (long r = 0; r < rows; r++)
    for (long i = 0; i < places; i += TILE_K)
      std::memcpy(to + i * height + r * TILE_K, x + r * k + i, 2 * TILE_K);
}

// Some places of k of a panel, as bf16.
template <class Weight> void widen_panel(const char* from, uint16_t* to, long k) {
  finish_stores();  // and loads, of what was there before
  for (long i = 0; i < k * WIDTH; i += 2 * LANES)
    store(to + i, Weight::pairs(from + i * Weight::BYTES));
  finish_stores();
}

// Some steps of a panel, and what comes later, of which each step fetches a part.
struct Steps {
  const char *weights, *next;
  long count, fetched;
  bool is_near;  // to be fetched into the first cache, and not the second
};

inline void fetch(const char* from, long bytes, bool is_near) {
  for (const char* line = from; line < from + bytes; line += 64)
    if (is_near)
      __builtin_prefetch(line);
    else
      __builtin_prefetch(line, 0, 2);
}

// One or two tiles of rows of x, the second `apart` numbers behind the first, times some steps of a
// panel, onto their rows of 32 sums. These start from zero at the first step of all.
template <class Weight, int TILES>
void multiply(const uint16_t* x, long height, long apart, Steps steps, float* sums, bool is_first) {
  constexpr long STRIDE = WIDTH * sizeof(float);
  float* lower = sums + height * WIDTH;
  if (is_first) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  } else {
    _tile_loadd(0, sums, STRIDE);
    _tile_loadd(1, sums + 16, STRIDE);
    if (TILES == 2) _tile_loadd(2, lower, STRIDE);
    if (TILES == 2) _tile_loadd(3, lower + 16, STRIDE);
  }
  for (long i = 0; i < steps.count; i++, x += height * TILE_K) {
    fetch(steps.next + i * steps.fetched, steps.fetched, steps.is_near);
    const char* w = steps.weights + i * TILE_K * WIDTH * Weight::BYTES;
    alignas(64) uint16_t wide[TILE_K * WIDTH];
    if (Weight::BYTES == 1) {
      widen_panel<Weight>(w, wide, TILE_K);
      w = (const char*)wide;
    }
    _tile_loadd(6, w, 4 * WIDTH);
    _tile_loadd(7, w + 64, 4 * WIDTH);
    _tile_loadd(4, x, 2 * TILE_K);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (TILES == 2) {
      _tile_loadd(5, x + apart, 2 * TILE_K);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, sums, STRIDE);
  _tile_stored(1, sums + 16, STRIDE);
  if (TILES == 2) _tile_stored(2, lower, STRIDE);
  if (TILES == 2) _tile_stored(3, lower + 16, STRIDE);
}

// Whether 32 rows of whole numbers give, in two parts, the sums that a plain loop gives.
inline bool product_is_right() {
  constexpr long ROWS = 2 * TILE_ROWS, K = 2 * TILE_K;
  const auto number = [](uint32_t i) { return (float)(int)((i * 2654435761u >> 28) - 8); };
  alignas(64) uint16_t x[ROWS * K], tiles[ROWS * K], panel[WIDTH * K];
  alignas(64) float sums[ROWS * WIDTH];
  for (long i = 0; i < ROWS * K; i++) x[i] = narrow(number(i));
  for (long i = 0; i < WIDTH * K; i++) panel[i] = narrow(number(i + 5000));
  for (long i = 0; i < ROWS * K; i += TILE_ROWS * K)
    fill_tiles(x + i, tiles + i, TILE_ROWS, TILE_ROWS, K, K);
  configure(TILE_ROWS);
  for (long i = 0; i < K; i += TILE_K)
    multiply<Bf16, 2>(tiles + i * TILE_ROWS, TILE_ROWS, TILE_ROWS * K,
                      {(const char*)(panel + i * WIDTH), nullptr, 1, 0, false}, sums, i == 0);
  _tile_release();
  bool is_right = true;
  for (long r = 0; r < ROWS; r++)
    for (long n = 0; n < WIDTH; n++) {
      float sum = 0;
      for (long i = 0; i < K; i++)
        sum += widen(x[r * K + i]) * widen(panel[i / 2 * 2 * WIDTH + 2 * n + i % 2]);
      is_right &= sum == sums[r * WIDTH + n];
    }
  return is_right;
}

// Whether this process may use the tiles, which Linux grants on request, and they multiply.
inline bool tiles_work() {
  constexpr long REQUEST = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  static std::atomic<int> answer{-1};               // threads that come here at once all find it
  if (answer < 0)
    answer = syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0 && product_is_right();
  return answer;
}

// How x lies in tiles: one slice of k after another, in each the tiles of all rows, each of them
// (K/32, height, 32). A single block has one slice, and its sums never leave the tiles.
struct Turned {
  long k, height, tiles, depth;
  Turned(long m, long k)
      : k(k),
        height(std::clamp(m, 1L, TILE_ROWS)),  // none would be a fault
        tiles(Parts(m, TILE_ROWS).count),
        depth(tiles > 2 ? DEPTH : k) {}
  long slices() const { return (k + depth - 1) / depth; }
  long places(long begin) const { return std::min(k - begin, depth); }
  long at(long tile, long begin) const {
    return (begin * tiles + tile * places(begin)) * height;
  }
};

// Blocks of x, of one tile or two, times the panels of a group -> each panel's rows of 32 sums, one
// panel after another, in `totals`. `group` is the first panel.
template <class Weight>
void group_sums_in_tiles(const uint16_t* x, const Turned& turned, const Parts& blocks, long from,
                         long to, const char* group, long panels, float* totals) {
  constexpr long BYTES = WIDTH * Weight::BYTES;  // of a place of k
  const long k = turned.k, height = turned.height, first = blocks.first(from);
  const long rows = (blocks.first(to) - first) * height;
  const bool is_alone = turned.tiles <= 2, is_near = is_alone && height <= FEW;
  const bool is_shared = Weight::BYTES == 1 && to - from > 1;  // then int8 is widened once for all
  alignas(64) uint16_t wide[Weight::BYTES == 1 ? DEPTH * WIDTH : 1];
  for (long begin = 0; begin < k; begin += turned.depth)
    for (long panel = 0; panel < panels; panel++) {
      const long places = turned.places(begin), steps = places / TILE_K;
      const char* weights = group + (panel * k + begin) * BYTES;
      const char* next = is_alone             ? weights + (is_near ? AHEAD : SLICE * BYTES)
                         : panel + 1 < panels ? weights + k * BYTES
                                              : group + (begin + turned.depth) * BYTES;
      const long fetched = TILE_K * BYTES / (to - from);
      if (is_shared) widen_panel<Weight>(weights, wide, places);
      for (long b = from; b < to; b++, next += fetched * steps) {
        const long tile = blocks.first(b), pair = blocks.size(b) == 2;
        const Steps todo{is_shared ? (const char*)wide : weights, next, steps, fetched, is_near};
        const auto run = is_shared ? (pair ? multiply<Bf16, 2> : multiply<Bf16, 1>)
                                   : (pair ? multiply<Weight, 2> : multiply<Weight, 1>);
        run(x + turned.at(tile, begin), height, height * places, todo,
            totals + (panel * rows + (tile - first) * height) * WIDTH, begin == 0);
      }
    }
}

template <class Weight>
void linear_in_tiles(const uint16_t* x, const char* weight, const float* scales, Outputs out,
                     uint16_t* scratch, long m, long k, int threads) {
  const Turned turned(m, k);
  const long panels = out.n / WIDTH, slices = turned.slices();
  const Parts blocks(turned.tiles, 2), chunks(blocks.count, CHUNK / (2 * TILE_ROWS));
  // Some groups for each thread, at least, so that all have as much to do.
  const Parts groups(panels,
                     turned.tiles > 2 ? std::clamp(panels / (4 * threads), 1L, GROUP) : 1);
#pragma omp parallel num_threads(threads)
  {
#pragma omp for
    for (long item = 0; item < turned.tiles * slices; item++) {
      const long tile = item / slices, row = tile * TILE_ROWS;
      const long begin = item % slices * turned.depth;
      fill_tiles(x + row * k + begin, scratch + turned.at(tile, begin),
                 std::min(m - row, turned.height), turned.height, k, turned.places(begin));
    }
    configure(turned.height);
    // Chunk by chunk with the same group: its weights come from memory once.
#pragma omp for schedule(guided)
    for (long item = 0; item < chunks.count * groups.count; item++) {
      const long group = item / chunks.count, chunk = item % chunks.count;
      const long from = chunks.first(chunk), to = chunks.first(chunk + 1);
      const long first = groups.first(group), count = groups.size(group);
      const long tile = blocks.first(from), row = tile * TILE_ROWS;
      alignas(64) float totals[GROUP * CHUNK * WIDTH];
      group_sums_in_tiles<Weight>(scratch, turned, blocks, from, to,
                                  weight + first * WIDTH * k * Weight::BYTES, count, totals);
      const long rows = (blocks.first(to) - tile) * turned.height;
      for (long r = 0; r < std::min(rows, m - row); r++)  // a row's panels are neighbours
        for (long p = 0; p < count; p++)
          out.write(totals + (p * rows + r) * WIDTH, scales, row + r, row + r + 1,
                    (first + p) * WIDTH);
    }
    _tile_release();
  }
}

}  // namespace
