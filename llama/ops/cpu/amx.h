// Products of bf16 in a CPU's tiles (AMX: Sapphire Rapids and later): up to 32 rows of x, times a
// packed weight block of 32 outputs, onto float32 sums. On two cores of a Xeon, 512 rows take 38 ms
// for a weight (16384, 2048). linear.cpp asks tiles_work(), and then has multiply_all() do
// whole products; it knows nothing of tiles.
//
// A tile is 16 rows of 64 bytes. One instruction adds to C (16 rows of x, 16 outputs) the product
// of A (16 rows of x, 32 k) and B (16 pairs of k, 16 outputs, 2): B is half of a weight block in
// memory order, for the 32 k of one step. Tiles 0 and 1 hold the sums of the first 16 rows of x, 2
// and 3 those of the next; 4 and 5 are these rows, 6 and 7 the weights.
#pragma once
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>

#include "packed_weight.h"

namespace {

constexpr long TILE_ROWS = 16;
constexpr long TILE_K = 32;
// The K block of more than 32 rows: 16 KiB of x and 16 of a weight block, which L1 holds. The K
// block of M_BLOCK rows of x stays in L2 for a group of weight blocks.
constexpr long TILE_K_BLOCK = 256;
constexpr long N_GROUP = 8;

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

// Up to `height` rows of x, for some k -> tiles (K/32, height, 32), one per step. Rows that x does
// not have stay as they are: their sums are not used. (In x itself, K apart, the rows of a tile
// would share one set of a cache.)
inline void fill_tiles(const uint16_t* x, uint16_t* to, long rows, long height, long k,
                       long count_k) {
  for (long r = 0; r < rows; r++)
    for (long i = 0; i < count_k; i += TILE_K)
      std::memcpy(to + i * height + r * TILE_K, x + r * k + i, 2 * TILE_K);
}

// bf16 as they are, rows that are scaled after the product, or weights that are made before it.
constexpr bool has_groups(const Weight& weight) {
  return weight.per_group > 1 || weight.group < weight.k;
}

// LANES rows of pairs of numbers -> of weights, rounded to bf16.
inline Pairs scaled(Pairs numbers, Floats scale, Floats offset) {
  const Words words = (Words)numbers;
  return (Pairs)to_bf16(first_of(words) * scale + offset, second_of(words) * scale + offset);
}

// Some k of a weight block, from k = `begin` on, as bf16.
template <class Kind>
void widen_block(const Weight& weight, const Parameters& parameters, const char* from, uint16_t* to,
                 long begin, long count) {
  constexpr long STEP_K = 2 * Kind::PAIRS;
  finish_stores();  // and loads, of what was there before
  const Kind kind(weight.table);
  if (!has_groups(weight)) unpack<Kind>(weight, from, to, count);
  alignas(64) float scales[2 * N_BLOCK] = {};
  for (long k = begin, stop; has_groups(weight) && k < begin + count; k = stop) {
    const long group = k / weight.group;
    stop = std::min((group + 1) * weight.group, begin + count);
    parameters.unpack(group, group + 1, scales);
    for (long row = 0; row < N_BLOCK; row += LANES) {
      const Floats scale = load<Floats>(scales + row), offset = load<Floats>(scales + N_BLOCK + row);
      for (long i = k - begin; i < stop - begin; i += STEP_K)
        for (int j = 0; j < Kind::PAIRS; j++)
          store(to + (i + 2 * j) * N_BLOCK + 2 * row,
                scaled(kind.pairs(from + i * K_BYTES<Kind> + row * Kind::ROW_BYTES, j), scale,
                       offset));
    }
  }
  finish_stores();
}

// Some steps over k of a weight block, from k = `begin` on, and what comes later, of which each step
// fetches a part.
struct Steps {
  const Weight& weight;
  Parameters parameters;
  const char *weights, *next;
  long begin, count, fetched;
  bool is_near;  // to be fetched into L1, and not L2
};

inline void fetch(const char* from, long bytes, bool is_near) {
  for (const char* line = from; line < from + bytes; line += 64)
    if (is_near)
      __builtin_prefetch(line);
    else
      __builtin_prefetch(line, 0, 2);
}

// One or two tiles of rows of x, the second `apart` numbers behind the first, times some steps of a
// weight block, onto their rows of 32 sums, which start from zero at the first step of all.
template <class Kind, int TILES>
void multiply(const uint16_t* x, long height, long apart, Steps steps, float* sums, bool is_first) {
  constexpr long STRIDE = N_BLOCK * sizeof(float);
  float* lower = sums + height * N_BLOCK;
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
    const char* w = steps.weights + i * TILE_K * K_BYTES<Kind>;
    alignas(64) uint16_t wide[TILE_K * N_BLOCK];
    if (!IS_BF16<Kind>) {
      widen_block<Kind>(steps.weight, steps.parameters, w, wide, steps.begin + i * TILE_K, TILE_K);
      w = (const char*)wide;
    }
    _tile_loadd(6, w, 4 * N_BLOCK);
    _tile_loadd(7, w + 64, 4 * N_BLOCK);
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

// Whether 32 rows of whole numbers, in two steps, give the sums that a plain loop gives.
inline bool product_is_right() {
  constexpr long ROWS = 2 * TILE_ROWS, K = 2 * TILE_K;
  const auto number = [](uint32_t i) { return (float)(int)((i * 2654435761u >> 28) - 8); };
  alignas(64) uint16_t x[ROWS * K], tiles[ROWS * K], block[N_BLOCK * K];
  alignas(64) float sums[ROWS * N_BLOCK];
  for (long i = 0; i < ROWS * K; i++) x[i] = to_bf16(number(i));
  for (long i = 0; i < N_BLOCK * K; i++) block[i] = to_bf16(number(i + 5000));
  for (long i = 0; i < ROWS * K; i += TILE_ROWS * K)
    fill_tiles(x + i, tiles + i, TILE_ROWS, TILE_ROWS, K, K);
  configure(TILE_ROWS);
  const Weight weight{{(const char*)block, nullptr, nullptr, Matrix::BF16, 0, 0, K}, N_BLOCK, K};
  for (long i = 0; i < K; i += TILE_K)
    multiply<Bf16, 2>(tiles + i * TILE_ROWS, TILE_ROWS, TILE_ROWS * K,
                      {weight, Parameters(weight, 0), (const char*)(block + i * N_BLOCK), nullptr,
                       i, 1, 0, false},
                      sums, i == 0);
  _tile_release();
  bool is_right = true;
  for (long r = 0; r < ROWS; r++)
    for (long n = 0; n < N_BLOCK; n++) {
      float sum = 0;
      for (long i = 0; i < K; i++)
        sum += widen(x[r * K + i]) * widen(block[i / 2 * 2 * N_BLOCK + 2 * n + i % 2]);
      is_right &= sum == sums[r * N_BLOCK + n];
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

// The layout of x in tiles: one K block after another, in each the tiles of all rows, each of them
// (K/32, height, 32). A single row block has one K block, and its sums never leave the tiles.
struct PackedX {
  long m, k, height, tiles, depth;
  PackedX(long m, long k)
      : m(m),
        k(k),
        height(std::clamp(m, 1L, TILE_ROWS)),  // none would be a fault
        tiles(Parts(m, TILE_ROWS).count),
        depth(tiles > 2 ? TILE_K_BLOCK : k) {}
  long k_blocks() const { return (k + depth - 1) / depth; }
  long count_k(long begin) const { return std::min(k - begin, depth); }
  long at(long tile, long begin) const {
    return (begin * tiles + tile * count_k(begin)) * height;
  }
  long pieces() const { return tiles * k_blocks(); }
  void pack(const uint16_t* x, char* to, long piece) const {
    const long tile = piece / k_blocks(), row = tile * TILE_ROWS;
    const long begin = piece % k_blocks() * depth;
    fill_tiles(x + row * k + begin, (uint16_t*)to + at(tile, begin), std::min(m - row, height),
               height, k, count_k(begin));
  }
};

// Row blocks of x, of one tile or two, times a group of weight blocks -> the rows of 32 sums of one
// weight block after another, in `totals`. `first_block` is the first weight block.
template <class Kind>
void group_sums_in_tiles(const uint16_t* x, const PackedX& packed_x, const Parts& row_blocks,
                         long from, long to, const Weight& weight, long first_block, long blocks,
                         float* totals) {
  const long k = packed_x.k, height = packed_x.height, first = row_blocks.first(from);
  const long rows = (row_blocks.first(to) - first) * height;
  const char* group = weight.data + first_block * k * K_BYTES<Kind>;
  const bool is_alone = packed_x.tiles <= 2, is_near = is_alone && height <= L1_PREFETCH_ROWS;
  const bool is_shared = !IS_BF16<Kind> && to - from > 1;  // then it is widened once for all
  alignas(64) uint16_t wide[IS_BF16<Kind> ? 1 : TILE_K_BLOCK * N_BLOCK];
  for (long begin = 0; begin < k; begin += packed_x.depth)
    for (long block = 0; block < blocks; block++) {
      const Parameters parameters(weight, first_block + block);
      const long count_k = packed_x.count_k(begin), steps = count_k / TILE_K;
      const char* weights = group + (block * k + begin) * K_BYTES<Kind>;
      const char* next = group + (begin + packed_x.depth) * K_BYTES<Kind>;
      if (is_alone) next = weights + (is_near ? PREFETCH_BYTES : K_BLOCK * K_BYTES<Kind>);
      else if (block + 1 < blocks) next = weights + k * K_BYTES<Kind>;
      const long fetched = TILE_K * K_BYTES<Kind> / (to - from);
      if (is_shared) widen_block<Kind>(weight, parameters, weights, wide, begin, count_k);
      for (long b = from; b < to; b++, next += fetched * steps) {
        const long tile = row_blocks.first(b), pair = row_blocks.size(b) == 2;
        const Steps todo{weight, parameters, is_shared ? (const char*)wide : weights, next, begin,
                         steps,  fetched,    is_near};
        const auto run = is_shared ? (pair ? multiply<Bf16, 2> : multiply<Bf16, 1>)
                                   : (pair ? multiply<Kind, 2> : multiply<Kind, 1>);
        run(x + packed_x.at(tile, begin), height, height * count_k, todo,
            totals + (block * rows + (tile - first) * height) * N_BLOCK, begin == 0);
      }
    }
}

// Rows of 32 sums, where a weight has one scale a row.
inline void scale_rows(const Weight& weight, long block, long rows, float* sums) {
  alignas(64) float scales[2 * N_BLOCK];
  Parameters(weight, block).unpack(0, 1, scales);
  for (long row = 0; row < rows; row++)
    for (long i = 0; i < N_BLOCK; i++) *sums++ *= scales[i];
}

// As multiply_all() in linear.cpp, which has vectors.
template <class Kind, class Packed>
void multiply_all(Worker& member, const PackedX& x, Packed packed, const Weight& weight,
                  const Outputs& out) {
  const long blocks = weight.n / N_BLOCK, height = x.height;
  const Parts row_blocks(x.tiles, 2), m_blocks(row_blocks.count, M_BLOCK / (2 * TILE_ROWS));
  // At least some groups per thread, so that all have as much to do.
  const Parts groups(blocks,
                     x.tiles > 2 ? std::clamp(blocks / (4 * member.threads()), 1L, N_GROUP) : 1);
  alignas(64) float totals[N_GROUP * M_BLOCK * N_BLOCK];
  bool is_configured = false;
  const auto rows_of = [&](long from, long to) {
    return (row_blocks.first(to) - row_blocks.first(from)) * height;
  };
  // One M block after another with the same group: its weights come from memory once.
  const auto compute = [&](long item) {
    const long group = item / m_blocks.count, m_block = item % m_blocks.count;
    const long from = m_blocks.first(m_block), to = m_blocks.first(m_block + 1);
    const long first = groups.first(group), rows = rows_of(from, to);
    const char* packed_rows = packed();
    if (!is_configured) configure(height);
    is_configured = true;
    group_sums_in_tiles<Kind>((const uint16_t*)packed_rows, x, row_blocks, from, to, weight, first,
                              groups.size(group), totals);
    for (long p = 0; p < groups.size(group) && weight.per_group && !has_groups(weight); p++)
      scale_rows(weight, first + p, rows, totals + p * rows * N_BLOCK);
  };
  const auto write_out = [&](long item) {
    const long group = item / m_blocks.count, m_block = item % m_blocks.count;
    const long row = row_blocks.first(m_blocks.first(m_block)) * TILE_ROWS;
    const long rows = rows_of(m_blocks.first(m_block), m_blocks.first(m_block + 1));
    for (long r = 0; r < std::min(rows, x.m - row); r++)  // a row's blocks are neighbours
      for (long p = 0; p < groups.size(group); p++)
        write(out, weight.n, totals + (p * rows + r) * N_BLOCK, row + r, row + r + 1,
              (groups.first(group) + p) * N_BLOCK);
  };
  member.run(m_blocks.count * groups.count, compute, write_out);
  if (is_configured) _tile_release();
}

}  // namespace
