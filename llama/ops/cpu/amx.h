// Products of bf16 in a CPU's tiles (AMX: Sapphire Rapids and later): up to 32 rows of x, times a
// packed weight block of 32 outputs, onto float32 sums. On two cores of a Xeon, 512 rows take 38 ms
// for a weight (16384, 2048). Weights of 4 to 8 bits are widened to bf16 before. A few rows of x
// have a faster way to the same bits: nibbles that look up numbers row by row, the others in
// vectors. linear.cpp asks tiles_work(), and then has multiply_all() do whole products; it knows
// nothing of tiles.
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

// Number * scale + offset. Cut off behind its upper half it is a bf16, rounded to the nearest, away
// from zero at ties: that takes half as many instructions as ties to even.
inline UInts scaled(Floats numbers, Floats scale, Floats offset) {
  add_product(offset, numbers, scale);
  return (UInts)offset + 0x8000;
}

inline void fetch(const char* from, long bytes, bool is_near) {
  for (const char* line = from; line < from + bytes; line += 64)
    if (is_near)
      __builtin_prefetch(line);
    else
      __builtin_prefetch(line, 0, 2);
}

// Some k of a weight block, from k = `begin` on, as bf16; and as many bytes from `next` on, if
// it is there, are fetched on the way.
template <class Kind, bool HAS_GROUPS>
void widen_as(const Weight& weight, const Parameters& parameters, const char* from, uint16_t* to,
              long begin, long count, const char* next, bool is_near) {
  alignas(64) float scales[HAS_GROUPS ? (TILE_K_BLOCK / MIN_GROUP + 1) * 2 * N_BLOCK : 1] = {};
  const float* of = scales;
  const char* start = from;
  const Kind kind(weight.table);
  const long width = HAS_GROUPS ? weight.group : weight.k, end = begin + count;
  if (HAS_GROUPS) parameters.unpack(begin / width, (end - 1) / width + 1, scales);
  for (long k = begin, stop; k < end; k = stop, of += 2 * N_BLOCK) {
    stop = std::min((k / width + 1) * width, end);
    Floats parts[4];  // scales, and offsets, of the first rows and the second
    for (int i = 0; i < 4 && HAS_GROUPS; i++) parts[i] = load<Floats>(of + i * LANES);
    for (; k < stop; k += 2 * Kind::PAIRS, from += Kind::STEP) {
      if (next) fetch(next + (from - start), Kind::STEP, is_near);
#pragma GCC unroll 4
      for (int j = 0; j < Kind::PAIRS; j++)
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++, to += 2 * LANES) {
          const auto w = kind.load(from + half * LANES * Kind::ROW_BYTES);
          if (HAS_GROUPS) {
            const FloatPairs numbers = kind.floats(w, j);
            const UInts first = scaled(numbers.first, parts[half], parts[2 + half]);
            const UInts second = scaled(numbers.second, parts[half], parts[2 + half]);
            store(to, first >> 16 | (second & 0xffff0000u));
          } else {
            store(to, kind.pairs(w, j));
          }
        }
    }
  }
}

template <class Kind>
void widen_block(const Weight& weight, const Parameters& parameters, const char* from, uint16_t* to,
                 long begin, long count, const char* next, bool is_near) {
  finish_stores();  // and loads, of what was there before
  const auto run = has_groups(weight) ? widen_as<Kind, true> : widen_as<Kind, false>;
  run(weight, parameters, from, to, begin, count, next, is_near);
  finish_stores();
}

// Some steps over k of a weight block in bf16, and what comes later, of which each step fetches a
// part.
struct Steps {
  const char *weights, *next;
  long count, fetched;
  bool is_near;  // to be fetched into L1, and not L2
};

// One or two tiles of rows of x, the second `apart` numbers behind the first, times some steps of a
// weight block, onto their rows of 32 sums, which start from zero at the first step of all.
template <int TILES>
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
    const char* w = steps.weights + i * TILE_K * K_BYTES<Bf16>;
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
  for (long i = 0; i < K; i += TILE_K)
    multiply<2>(tiles + i * TILE_ROWS, TILE_ROWS, TILE_ROWS * K,
                {(const char*)(block + i * N_BLOCK), nullptr, 1, 0, false}, sums, i == 0);
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
  if (answer < 0) answer = syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0 && product_is_right();
  return answer;
}

// The layout of x in tiles: one K block after another, in each the tiles of all rows, each of them
// (K/32, height, 32). A single row block has one K block where the weights are bf16, and its sums
// never leave the tiles; others are widened to bf16 one K block after another.
struct PackedX {
  long m, k, height, tiles, depth;
  PackedX(long m, const Weight& weight)
      : m(m),
        k(weight.k),
        height(std::clamp(m, 1L, TILE_ROWS)),  // none would be a fault
        tiles(Partition(m, TILE_ROWS).count),
        depth(tiles > 2 || weight.format != ElementFormat::BF16 ? TILE_K_BLOCK : k) {}
  long k_blocks() const { return (k + depth - 1) / depth; }
  long count_k(long begin) const { return std::min(k - begin, depth); }
  long at(long tile, long begin) const { return (begin * tiles + tile * count_k(begin)) * height; }
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
void group_sums_in_tiles(const uint16_t* x, const PackedX& packed_x, const Partition& row_blocks,
                         long from, long to, const Weight& weight, long first_block, long blocks,
                         float* totals) {
  const long k = packed_x.k, height = packed_x.height, first = row_blocks.first(from);
  const long rows = (row_blocks.first(to) - first) * height;
  const auto at = [&](long block, long k) {
    return weight.block(first_block + block) + k * K_BYTES<Kind>;
  };
  const bool is_alone = packed_x.tiles <= 2, is_near = is_alone && height <= L1_PREFETCH_ROWS;
  alignas(64) uint16_t wide[IS_BF16<Kind> ? 1 : TILE_K_BLOCK * N_BLOCK];
  // Numbers that are widened for one row block are fetched then, else while the tiles multiply.
  const bool is_single = !IS_BF16<Kind> && to - from == 1;
  const long fetched = is_single ? 0 : TILE_K * K_BYTES<Kind> / (to - from);
  for (long begin = 0; begin < k; begin += packed_x.depth)
    for (long block = 0; block < blocks; block++) {
      const long count_k = packed_x.count_k(begin), steps = count_k / TILE_K;
      const char* weights = at(block, begin);
      const char* next = at(0, begin + packed_x.depth);
      if (is_alone)
        next = weights + (is_near ? PREFETCH_BYTES<Bf16> : K_BLOCK * K_BYTES<Kind>);
      else if (block + 1 < blocks)
        next = at(block + 1, begin);
      if constexpr (!IS_BF16<Kind>) {
        widen_block<Kind>(weight, Parameters(weight, first_block + block), weights, wide, begin,
                          count_k, is_single ? next : nullptr, is_near);
        weights = (const char*)wide;
      }
      for (long b = from; b < to; b++, next += fetched * steps) {
        const long tile = row_blocks.first(b);
        const auto run = row_blocks.size(b) == 2 ? multiply<2> : multiply<1>;
        float* sums = totals + (block * rows + (tile - first) * height) * N_BLOCK;
        run(x + packed_x.at(tile, begin), height, height * count_k,
            {weights, next, steps, fetched, is_near}, sums, begin == 0);
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

// Tiles take what is smaller than a normal number as zero, and make it zero.
struct FlushDenormals {
  const unsigned before = _mm_getcsr();
  FlushDenormals() { _mm_setcsr(before | 0x8040); }
  ~FlushDenormals() { _mm_setcsr(before); }
};

// As multiply_all() in linear.cpp, which has vectors.
template <class Kind, class Packed>
void multiply_all(Worker& member, const PackedX& x, Packed packed, const Weight& weight,
                  const Outputs& out) {
  const long blocks = weight.n / N_BLOCK, height = x.height;
  const Partition row_blocks(x.tiles, 2), m_blocks(row_blocks.count, M_BLOCK / (2 * TILE_ROWS));
  // At least some groups per thread, so that all have as much to do.
  const Partition groups(
      blocks, x.tiles > 2 ? std::clamp(blocks / (4 * member.threads()), 1L, N_GROUP) : 1);
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
    const FlushDenormals flush;  // of what widens and scales, as with few rows
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

// One to a few rows of x as floats, (K, rows), for weights of few bytes: their products are bound
// by memory, which vectors read ahead of better than tiles. The sums are those of the tiles to the
// bit: within a step one over the even k, one over the odd, and both are added to what was before.
constexpr int FEW_ROWS = 4;

struct FewRows {
  long m, k;
  long pieces() const { return 1; }
  void pack(const uint16_t* x, char* to, long) const {
    for (long r = 0; r < m; r++)
      for (long i = 0; i < k; i++) ((float*)to)[i * m + r] = widen(x[r * k + i]);
  }
};

template <class Kind, bool HAS_GROUPS, int R>
void few_sums(const float* x, const Weight& weight, long block, float* out) {
  constexpr long STEP_K = 2 * Kind::PAIRS;
  alignas(64) float scales[HAS_GROUPS ? (TILE_K_BLOCK / MIN_GROUP + 1) * 2 * N_BLOCK : 1] = {};
  const Parameters parameters(weight, block);
  const Kind kind(weight.table);
  const char* w = weight.block(block);
  const long width = HAS_GROUPS ? weight.group : weight.k;
  Floats totals[R][2] = {};
  for (long k = 0, first = 0; k < weight.k; k += TILE_K) {
    if (HAS_GROUPS && k % TILE_K_BLOCK == 0) {
      first = k / width;
      const long end = std::min(k + TILE_K_BLOCK, weight.k);
      parameters.unpack(first, (end - 1) / width + 1, scales);
    }
    Floats sums[R][2][2] = {};  // of the first outputs and the second, over even k and odd
    for (long i = k; i < k + TILE_K; i += MIN_GROUP) {
      Floats parts[4];
      const float* of = scales + (HAS_GROUPS ? (i / width - first) * 2 * N_BLOCK : 0);
      for (int p = 0; p < 4 && HAS_GROUPS; p++) parts[p] = load<Floats>(of + p * LANES);
#pragma GCC unroll 2
      for (long step = 0; step < MIN_GROUP; step += STEP_K, w += Kind::STEP) {
        fetch(w + PREFETCH_BYTES<Bf16>, Kind::STEP, true);
#pragma GCC unroll 4
        for (int j = 0; j < Kind::PAIRS; j++, x += 2 * R)
#pragma GCC unroll 2
          for (int half = 0; half < 2; half++) {
            FloatPairs v = kind.floats(kind.load(w + half * LANES * Kind::ROW_BYTES), j);
            if (HAS_GROUPS) {
              v.first = (Floats)(scaled(v.first, parts[half], parts[2 + half]) & 0xffff0000u);
              v.second = (Floats)(scaled(v.second, parts[half], parts[2 + half]) & 0xffff0000u);
            }
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) {
              add_product(sums[r][half][0], v.first, x[r]);
              add_product(sums[r][half][1], v.second, x[R + r]);
            }
          }
      }
    }
    for (int r = 0; r < R; r++)
      for (int half = 0; half < 2; half++) totals[r][half] += sums[r][half][0] + sums[r][half][1];
  }
  std::memcpy(out, totals, sizeof totals);
}

template <class Kind, bool HAS_GROUPS, int... R>
auto pick_few(long rows, std::integer_sequence<int, R...>) {
  static constexpr decltype(&few_sums<Kind, HAS_GROUPS, 1>) RUN[] = {
      few_sums<Kind, HAS_GROUPS, R + 1>...};
  return RUN[rows - 1];
}

template <class Kind, class Packed>
void multiply_all(Worker& member, const FewRows& x, Packed packed, const Weight& weight,
                  const Outputs& out) {
  constexpr std::make_integer_sequence<int, FEW_ROWS> ROWS;
  const auto run =
      has_groups(weight) ? pick_few<Kind, true>(x.m, ROWS) : pick_few<Kind, false>(x.m, ROWS);
  alignas(64) float sums[FEW_ROWS * N_BLOCK];
  const auto compute = [&](long block) {
    const float* rows = (const float*)packed();
    const FlushDenormals flush;
    run(rows, weight, block, sums);
    if (weight.per_group && !has_groups(weight)) scale_rows(weight, block, x.m, sums);
  };
  const auto write_out = [&](long block) { write(out, weight.n, sums, 0, x.m, block * N_BLOCK); };
  member.run(weight.n / N_BLOCK, compute, write_out);
}

// Nibbles in groups, for up to 16 rows of x. For each row of the weight, its 16 numbers are made
// once a group, and all codes of the group look their number up: half the instructions of
// widen_as(). The numbers of a row lie side by side then, so the tiles take the weight as A, and x
// as B. The sums are the same: of the same products, in the same order.
struct RowsAsPairs {
  long m, k;
  long pieces() const { return 1; }
  void pack(const uint16_t* x, char* to, long) const {  // (K/2, m) pairs
    for (long r = 0; r < m; r++)
      for (long i = 0; i < k; i += 2) std::memcpy(to + 2 * (i * m + 2 * r), x + r * k + i, 4);
  }
  // Tiles 0 and 1 are the sums of 32 outputs, 4 and 5 their weights, 6 is x.
  void configure() const {
    Configuration shapes;
    for (int tile = 0; tile < 7; tile++) {
      shapes.row_bytes[tile] = tile == 4 || tile == 5 ? 2 * TILE_K : 4 * m;
      shapes.rows[tile] = TILE_ROWS;
    }
    finish_stores();
    _tile_loadconfig(&shapes);
  }
};

// 32 k of 16 rows -> their weights (16, 32). scales: of each row, and behind 32 of them its offset.
// 256 bytes from `next` on are fetched into L2, a line at a time: several at once would wait.
inline void look_up(const char* from, Floats numbers, const float* scales, uint16_t* to,
                    const char* next) {
  __m512i words[4], halves[4], rows[4];  // rows: four words of a row in each quarter
  for (int i = 0; i < 4; i++) words[i] = ::load<__m512i>(from + i * Nibbles::STEP);
  for (int i = 0; i < 4; i += 2) {
    halves[i] = _mm512_unpacklo_epi32(words[i], words[i + 1]);
    halves[i + 1] = _mm512_unpackhi_epi32(words[i], words[i + 1]);
  }
  for (int i = 0; i < 2; i++) {
    rows[2 * i] = _mm512_unpacklo_epi64(halves[i], halves[i + 2]);
    rows[2 * i + 1] = _mm512_unpackhi_epi64(halves[i], halves[i + 2]);
  }
  // Each word four times, turned so that another code of each half is one bit above its lowest. The
  // numbers are the odd halves of their table: five bits are looked at, of which the lowest is set.
  const UInts turns = {31, 3, 7, 11, 31, 3, 7, 11, 31, 3, 7, 11, 31, 3, 7, 11};
  const UInts fourfold = {0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3};
#pragma GCC unroll 16
  for (int row = 0; row < TILE_ROWS; row++) {
    if (row % 4 == 0) __builtin_prefetch(next + row / 4 * 64, 0, 2);
    const Floats scale = (Floats)_mm512_set1_ps(scales[row]);
    const UInts table = scaled(numbers, scale, (Floats)_mm512_set1_ps(scales[N_BLOCK + row]));
    const __m512i places = (__m512i)(fourfold + row / 4 * 4);
    const __m512i all = _mm512_permutexvar_epi32(places, rows[row % 4]);
    const UInts codes = (UInts)_mm512_rorv_epi32(all, (__m512i)turns) | 0x00010001;
    store(to + row * TILE_K, _mm512_permutexvar_epi16((__m512i)codes, (__m512i)table));
  }
}

template <class Kind, class Packed>
void multiply_all(Worker& member, const RowsAsPairs& x, Packed packed, const Weight& weight,
                  const Outputs& out) {
  constexpr long DELAY = 2;  // steps from a store to the tile's load, which waits for it
  constexpr long STEP = TILE_K * K_BYTES<Kind>, AHEAD = 16 * STEP;
  constexpr long GROUPS = TILE_K_BLOCK / TILE_K;
  alignas(64) uint16_t wide[2 * DELAY][N_BLOCK * TILE_K];
  alignas(64) float by_output[N_BLOCK * TILE_ROWS], sums[N_BLOCK * TILE_ROWS];
  alignas(64) float scales[(GROUPS + 1) * 2 * N_BLOCK] = {};  // one more for the first rows' half
  const Floats numbers = load<Floats>(weight.table);
  bool is_configured = false;
  const auto compute = [&](long block) {
    const char *pairs = packed(), *w = weight.block(block);
    if (!is_configured) x.configure();
    is_configured = true;
    const FlushDenormals flush;
    const Parameters parameters(weight, block);
    const auto add = [&](long step) {
      const uint16_t* weights = wide[step % (2 * DELAY)];
      _tile_loadd(6, pairs + step * TILE_K * 2 * x.m, 4 * x.m);
      _tile_loadd(4, weights, 2 * TILE_K);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(5, weights + TILE_ROWS * TILE_K, 2 * TILE_K);
      _tile_dpbf16ps(1, 5, 6);
    };
    _tile_zero(0);
    _tile_zero(1);
    long step = 0;
    for (long group = 0; group < weight.k / weight.group; group++) {
      const float* of = scales + group % GROUPS * 2 * N_BLOCK;
      if (group % GROUPS == 0)
        parameters.unpack(group, std::min(group + GROUPS, weight.k / weight.group), scales);
      for (long end = step + weight.group / TILE_K; step < end; step++, w += STEP) {
        if (step >= DELAY) add(step - DELAY);
        uint16_t* to = wide[step % (2 * DELAY)];
        finish_stores();
        look_up(w, numbers, of, to, w + AHEAD);
        look_up(w + VECTOR_BYTES, numbers, of + TILE_ROWS, to + TILE_ROWS * TILE_K,
                w + AHEAD + STEP / 2);
        finish_stores();
      }
    }
    for (long last = std::max(step - DELAY, 0L); last < step; last++) add(last);
    _tile_stored(0, by_output, 4 * x.m);
    _tile_stored(1, by_output + TILE_ROWS * x.m, 4 * x.m);
    finish_stores();
    for (long row = 0; row < x.m; row++)
      for (long i = 0; i < N_BLOCK; i++) sums[row * N_BLOCK + i] = by_output[i * x.m + row];
  };
  const auto write_out = [&](long block) { write(out, weight.n, sums, 0, x.m, block * N_BLOCK); };
  member.run(weight.n / N_BLOCK, compute, write_out);
  if (is_configured) _tile_release();
}

}  // namespace
