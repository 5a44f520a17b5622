// Matrix products in AMX tiles (Sapphire Rapids and later): x (M, K) of bf16 times a packed weight
// (N, K), with float32 sums. linear.cpp asks tiles_work(), and then leaves whole products to the
// overloads of multiply_all() here; it knows nothing of tiles. Weights of 4 to 8 bits are widened
// to bf16 first. amx_few_rows.h has faster ways to the same bits for a few rows of x, and
// amx_int8.h has products of rounded rows. On two cores
// of a Xeon, 512 rows and a weight (16384, 2048) take 38 ms.
//
// A tile has 16 rows of 64 bytes. One instruction adds to C (16 rows of x, 16 outputs) the product
// of A (16 rows of x, 32 k) and B (16 pairs of k, 16 outputs, 2). B is half of a weight block, in
// the order that it has in memory, for the 32 k of one step. Tiles 0 and 1 are the sums of the
// first 16 rows of x, 2 and 3 those of the next 16; 4 and 5 are these rows of x; 6 and 7 are the
// weights.
#pragma once
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>

#include "packed_weight.h"

namespace {

constexpr long TILE_ROWS = 16;
constexpr long TILE_K = 32;
// The k of a K block for more than 32 rows: 16 KiB of x and 16 KiB of a weight block fit into L1.
// The K block of M_BLOCK rows of x stays in L2 for a panel of weight blocks.
constexpr long TILE_K_BLOCK = 256;
constexpr long PANEL_BLOCKS = 8;  // weight blocks of a panel, at most

// Keeps the compiler from moving loads and stores across this point. gcc's tile intrinsics do not
// say that they access memory: without it, gcc may move stores past them, or drop the stores.
inline void compiler_barrier() { asm volatile("" ::: "memory"); }

// The operand of LDTILECFG.
struct alignas(64) TileConfiguration {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};  // of each tile
  uint8_t rows[16] = {};        // of each tile
};

// Sets the shapes of this thread's tiles, until _tile_release(). Tiles of x have `height` rows:
// with fewer rows, there is less to load.
inline void configure_tiles(long height) {
  TileConfiguration shapes;
  for (int tile = 0; tile < 8; tile++) {
    shapes.row_bytes[tile] = 64;
    shapes.rows[tile] = tile < 6 ? height : TILE_K / 2;
  }
  compiler_barrier();
  _tile_loadconfig(&shapes);
}

// Copies `count_k` k of `rows` rows of x (rows, k) into tiles (count_k / 32, height, 32), one per
// step. Rows from `rows` up to `height` are not written: their sums are not used. (In x itself, the
// rows of a tile would often share one set of a cache.)
inline void fill_tiles(const uint16_t* x, uint16_t* out, long rows, long height, long k,
                       long count_k) {
  for (long r = 0; r < rows; r++)
    for (long i = 0; i < count_k; i += TILE_K)
      std::memcpy(out + i * height + r * TILE_K, x + r * k + i, 2 * TILE_K);
}

// Whether a weight has scales that must be applied before the product. bf16 has none, and one scale
// per row is applied to the sums.
constexpr bool has_groups(const Weight& weight) {
  return weight.per_group > 1 || weight.group < weight.k;
}

// Returns the bits of element * scale + offset, with 0x8000 added: the upper half is the nearest
// bf16, ties away from zero. That takes half as many instructions as ties to even.
inline UInts scaled_bits(Floats elements, Floats scale, Floats offset) {
  add_product(offset, elements, scale);
  return (UInts)offset + 0x8000;
}

inline void prefetch_lines(const char* from, long bytes, bool into_l1) {
  for (const char* line = from; line < from + bytes; line += 64)
    if (into_l1)
      __builtin_prefetch(line);
    else
      __builtin_prefetch(line, 0, 2);  // into L2
}

// Widens `count` k of a weight block, from k = `begin` at the address `packed` on, to bf16 in the
// layout of bf16 (count / 2, 32, 2); with HAS_GROUPS, scales are applied. Meanwhile it prefetches
// as many bytes from `prefetch` on, unless that is null.
template <class Kind, bool HAS_GROUPS>
void widen_block_as(const Weight& weight, const Parameters& parameters, const char* packed,
                    uint16_t* out, long begin, long count, const char* prefetch, bool into_l1) {
  alignas(64) float scales[HAS_GROUPS ? (TILE_K_BLOCK / MIN_GROUP + 1) * 2 * N_BLOCK : 1] = {};
  const float* group_scales = scales;
  const char* start = packed;
  const Kind kind(weight.table);
  const long width = HAS_GROUPS ? weight.group : weight.k, end = begin + count;
  if (HAS_GROUPS) parameters.unpack(begin / width, (end - 1) / width + 1, scales);
  for (long k = begin, group_end; k < end; k = group_end, group_scales += 2 * N_BLOCK) {
    group_end = std::min((k / width + 1) * width, end);
    Floats vectors[4];  // scales of the first 16 rows and the last 16, then their offsets
    for (int i = 0; i < 4 && HAS_GROUPS; i++) vectors[i] = load<Floats>(group_scales + i * LANES);
    for (; k < group_end; k += 2 * Kind::PAIRS, packed += Kind::STEP) {
      if (prefetch) prefetch_lines(prefetch + (packed - start), Kind::STEP, into_l1);
#pragma GCC unroll 4
      for (int j = 0; j < Kind::PAIRS; j++)
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++, out += 2 * LANES) {
          const auto step = kind.load(packed + half * LANES * Kind::ROW_BYTES);
          if (HAS_GROUPS) {
            const FloatPairs elements = kind.floats(step, j);
            const UInts even = scaled_bits(elements.even, vectors[half], vectors[2 + half]);
            const UInts odd = scaled_bits(elements.odd, vectors[half], vectors[2 + half]);
            store(out, even >> 16 | (odd & 0xffff0000u));
          } else {
            store(out, kind.pairs(step, j));
          }
        }
    }
  }
}

// Calls widen_block_as() for a weight with or without groups.
template <class Kind>
void widen_block(const Weight& weight, const Parameters& parameters, const char* packed,
                 uint16_t* out, long begin, long count, const char* prefetch, bool into_l1) {
  compiler_barrier();  // the tiles must have loaded the previous contents of `out`
  const auto run = has_groups(weight) ? widen_block_as<Kind, true> : widen_block_as<Kind, false>;
  run(weight, parameters, packed, out, begin, count, prefetch, into_l1);
  compiler_barrier();
}

// Some steps over k of a weight block in bf16, and the memory to prefetch meanwhile.
struct Steps {
  const char *weights, *prefetch;
  long count;
  long step_prefetch;  // bytes to prefetch at each step
  bool into_l1;        // prefetches into L1, otherwise into L2
};

// The elements of a step, which have the same bytes: 32 k of bf16, with float32 sums; or 64 k of
// int8 in x and of unsigned bytes in the weights, with int32 sums, which are stored as they are.
enum class TileElements { BF16, INT8 };

// Multiplies one or two tiles of rows of x by some steps of a weight block, and adds the products
// to `sums` (TILES * height, 32), or replaces them if is_first. The second tile begins `distance`
// times two bytes after the first.
template <int TILES, TileElements ELEMENTS = TileElements::BF16>
void multiply_tiles(const uint16_t* x, long height, long distance, Steps steps, float* sums,
                    bool is_first) {
  constexpr long STRIDE = N_BLOCK * sizeof(float);
  float* lower_sums = sums + height * N_BLOCK;
  if (is_first) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  } else {
    _tile_loadd(0, sums, STRIDE);
    _tile_loadd(1, sums + 16, STRIDE);
    if (TILES == 2) _tile_loadd(2, lower_sums, STRIDE);
    if (TILES == 2) _tile_loadd(3, lower_sums + 16, STRIDE);
  }
  for (long i = 0; i < steps.count; i++, x += height * TILE_K) {
    prefetch_lines(steps.prefetch + i * steps.step_prefetch, steps.step_prefetch, steps.into_l1);
    const char* w = steps.weights + i * TILE_K * K_BYTES<Bf16>;
    _tile_loadd(6, w, 4 * N_BLOCK);
    _tile_loadd(7, w + 64, 4 * N_BLOCK);
    _tile_loadd(4, x, 2 * TILE_K);
    if (TILES == 2) _tile_loadd(5, x + distance, 2 * TILE_K);
    if constexpr (ELEMENTS == TileElements::INT8) {
      _tile_dpbsud(0, 4, 6);
      _tile_dpbsud(1, 4, 7);
      if (TILES == 2) _tile_dpbsud(2, 5, 6);
      if (TILES == 2) _tile_dpbsud(3, 5, 7);
    } else {
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      if (TILES == 2) _tile_dpbf16ps(2, 5, 6);
      if (TILES == 2) _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, sums, STRIDE);
  _tile_stored(1, sums + 16, STRIDE);
  if (TILES == 2) _tile_stored(2, lower_sums, STRIDE);
  if (TILES == 2) _tile_stored(3, lower_sums + 16, STRIDE);
}

// Whether a product of 32 rows of integers in two steps gives the same sums as a plain loop.
inline bool check_product() {
  constexpr long ROWS = 2 * TILE_ROWS, K = 2 * TILE_K;
  const auto integer = [](uint32_t i) { return (float)(int)((i * 2654435761u >> 28) - 8); };
  alignas(64) uint16_t x[ROWS * K], tiles[ROWS * K], block[N_BLOCK * K];
  alignas(64) float sums[ROWS * N_BLOCK];
  for (long i = 0; i < ROWS * K; i++) x[i] = to_bf16(integer(i));
  for (long i = 0; i < N_BLOCK * K; i++) block[i] = to_bf16(integer(i + 5000));
  for (long i = 0; i < ROWS * K; i += TILE_ROWS * K)
    fill_tiles(x + i, tiles + i, TILE_ROWS, TILE_ROWS, K, K);
  configure_tiles(TILE_ROWS);
  for (long i = 0; i < K; i += TILE_K)
    multiply_tiles<2>(tiles + i * TILE_ROWS, TILE_ROWS, TILE_ROWS * K,
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

// Whether a product of 32 rows of bytes in one step gives the same sums as a plain loop.
inline bool check_byte_product() {
  constexpr long ROWS = 2 * TILE_ROWS, K = 2 * TILE_K;
  alignas(64) int8_t x[ROWS * K];
  alignas(64) uint8_t block[N_BLOCK * K];
  alignas(64) int32_t sums[ROWS * N_BLOCK];
  for (uint32_t i = 0; i < ROWS * K; i++) x[i] = (int8_t)(i * 2654435761u >> 24);
  for (uint32_t i = 0; i < N_BLOCK * K; i++) block[i] = (uint8_t)((i + 5000) * 2654435761u >> 24);
  configure_tiles(TILE_ROWS);
  multiply_tiles<2, TileElements::INT8>((const uint16_t*)x, TILE_ROWS, TILE_ROWS * K / 2,
                                        {(const char*)block, nullptr, 1, 0, false}, (float*)sums,
                                        true);
  _tile_release();
  bool is_right = true;
  for (long r = 0; r < ROWS; r++)
    for (long n = 0; n < N_BLOCK; n++) {
      int32_t sum = 0;
      for (long i = 0; i < K; i++) sum += x[r * K + i] * block[i / 4 * 4 * N_BLOCK + 4 * n + i % 4];
      is_right &= sum == sums[r * N_BLOCK + n];
    }
  return is_right;
}

// Whether this process may use the tiles, which Linux grants on request, and they multiply
// correctly.
inline bool tiles_work() {
  constexpr long REQUEST = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  static std::atomic<int> answer{-1};  // threads that come here at once all compute the same answer
  if (answer < 0)
    answer =
        syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0 && check_product() && check_byte_product();
  return answer;
}

// The layout of x in tiles: K blocks one after the other, each with the tiles of all rows, each
// tile (K/32, height, 32). Up to 32 rows with a bf16 weight have a single K block, so that their
// sums never leave the tiles. The other formats are widened to bf16 one K block after another.
struct PackedX {
  long m, k;
  long height;   // rows of a tile
  long tiles;    // tiles that cover the m rows
  long block_k;  // k of a K block
  PackedX(long m, const Weight& weight)
      : m(m),
        k(weight.k),
        height(std::clamp(m, 1L, TILE_ROWS)),  // a tile without rows would be a fault
        tiles(Partition(m, TILE_ROWS).count),
        block_k(tiles > 2 || weight.format != ElementFormat::BF16 ? TILE_K_BLOCK : k) {}
  long k_blocks() const { return (k + block_k - 1) / block_k; }
  // The k of the K block that begins with k = `begin`.
  long count_k(long begin) const { return std::min(k - begin, block_k); }
  // The index of the first element of a tile of that K block.
  long index(long tile, long begin) const {
    return (begin * tiles + tile * count_k(begin)) * height;
  }
  // A piece of work is one K block of one tile.
  long pieces() const { return tiles * k_blocks(); }
  void pack(const uint16_t* x, char* packed, long piece) const {
    const long tile = piece / k_blocks();
    const long row = tile * TILE_ROWS;
    const long begin = piece % k_blocks() * block_k;
    fill_tiles(x + row * k + begin, (uint16_t*)packed + index(tile, begin),
               std::min(m - row, height), height, k, count_k(begin));
  }
};

// Returns the rows of the tiles of row blocks.
template <class Layout>
long count_rows(const Layout& x, const Partition& row_blocks, long first_row_block,
                long end_row_block) {
  return (row_blocks.first(end_row_block) - row_blocks.first(first_row_block)) * x.height;
}

// Multiplies row blocks of x, of one tile or two each, from `first_row_block` up to, not including,
// `end_row_block`, by the `blocks` weight blocks of a panel from `first_block` on: totals (blocks,
// rows, 32).
template <class Kind>
void multiply_panel(const uint16_t* x, const PackedX& packed_x, const Partition& row_blocks,
                    long first_row_block, long end_row_block, const Weight& weight,
                    long first_block, long blocks, float* totals) {
  const long k = packed_x.k, height = packed_x.height;
  const long first_tile = row_blocks.first(first_row_block);
  const long rows = count_rows(packed_x, row_blocks, first_row_block, end_row_block);
  const auto address = [&](long block, long k) {
    return weight.block(first_block + block) + k * K_BYTES<Kind>;
  };
  const bool is_alone = packed_x.tiles <= 2;  // no other row block uses the weights
  const bool into_l1 = is_alone && height <= L1_PREFETCH_ROWS;
  alignas(64) uint16_t widened[IS_BF16<Kind> ? 1 : TILE_K_BLOCK * N_BLOCK];
  // Elements that are widened for one row block are prefetched then, others while tiles multiply.
  const bool is_single = !IS_BF16<Kind> && end_row_block - first_row_block == 1;
  const long step_prefetch =
      is_single ? 0 : TILE_K * K_BYTES<Kind> / (end_row_block - first_row_block);
  for (long begin = 0; begin < k; begin += packed_x.block_k)
    for (long block = 0; block < blocks; block++) {
      const long count_k = packed_x.count_k(begin), steps = count_k / TILE_K;
      const char* weights = address(block, begin);
      const char* prefetch = address(0, begin + packed_x.block_k);
      if (is_alone)
        prefetch = weights + (into_l1 ? PREFETCH_BYTES<Bf16> : K_BLOCK * K_BYTES<Kind>);
      else if (block + 1 < blocks)
        prefetch = address(block + 1, begin);
      if constexpr (!IS_BF16<Kind>) {
        widen_block<Kind>(weight, Parameters(weight, first_block + block), weights, widened, begin,
                          count_k, is_single ? prefetch : nullptr, into_l1);
        weights = (const char*)widened;
      }
      for (long b = first_row_block; b < end_row_block; b++, prefetch += step_prefetch * steps) {
        const long tile = row_blocks.first(b);
        const auto run = row_blocks.size(b) == 2 ? multiply_tiles<2> : multiply_tiles<1>;
        float* sums = totals + (block * rows + (tile - first_tile) * height) * N_BLOCK;
        run(x + packed_x.index(tile, begin), height, height * count_k,
            {weights, prefetch, steps, step_prefetch, into_l1}, sums, begin == 0);
      }
    }
}

// Multiplies sums (rows, 32) by the scales of a weight block that has one scale per row.
inline void scale_sums(const Weight& weight, long block, long rows, float* sums) {
  alignas(64) float scales[2 * N_BLOCK];
  Parameters(weight, block).unpack(0, 1, scales);
  for (long row = 0; row < rows; row++)
    for (long i = 0; i < N_BLOCK; i++) *sums++ *= scales[i];
}

// Makes vector instructions treat subnormal inputs and results as zero while the object exists, as
// tiles always do (DAZ and FTZ of MXCSR).
struct FlushDenormals {
  const unsigned before = _mm_getcsr();
  FlushDenormals() { _mm_setcsr(before | 0x8040); }
  ~FlushDenormals() { _mm_setcsr(before); }
};

// Multiplies all rows of x, in a layout of tiles, by the weight, and writes the outputs.
// multiply(packed_rows, row_blocks, first_row_block, end_row_block, first_block, blocks, totals)
// writes the totals (blocks, rows, 32) of row blocks of one tile or two each, and of the weight
// blocks of a panel.
template <class Layout, class Packed, class Multiply>
void multiply_panels(Worker& worker, const Layout& x, Packed packed, const Weight& weight,
                     const Outputs& out, Multiply multiply) {
  const long blocks = num_blocks(weight.n), height = x.height;
  const Partition row_blocks(x.tiles, 2);
  const Partition m_blocks(row_blocks.count, M_BLOCK / (2 * TILE_ROWS));
  // Each thread gets several panels, so that all threads have about the same amount of work.
  const Partition panels(
      blocks, x.tiles > 2 ? std::clamp(blocks / (4 * worker.threads()), 1L, PANEL_BLOCKS) : 1);
  alignas(64) float totals[PANEL_BLOCKS * M_BLOCK * N_BLOCK];
  bool is_configured = false;
  // Neighbouring pieces are the M blocks of one panel, so its weights are read from memory once.
  const auto compute = [&](long piece) {
    const long panel = piece / m_blocks.count, m_block = piece % m_blocks.count;
    const char* packed_rows = packed();
    if (!is_configured) configure_tiles(height);
    is_configured = true;
    multiply(packed_rows, row_blocks, m_blocks.first(m_block), m_blocks.first(m_block + 1),
             panels.first(panel), panels.size(panel), totals);
  };
  const auto write_out = [&](long piece) {
    const long panel = piece / m_blocks.count, m_block = piece % m_blocks.count;
    const long row = row_blocks.first(m_blocks.first(m_block)) * TILE_ROWS;
    const long rows =
        count_rows(x, row_blocks, m_blocks.first(m_block), m_blocks.first(m_block + 1));
    // Row by row, because the outputs of neighbouring blocks of a row are contiguous.
    for (long r = 0; r < std::min(rows, x.m - row); r++)
      for (long p = 0; p < panels.size(panel); p++)
        write(out, weight.n, totals + (p * rows + r) * N_BLOCK, row + r, row + r + 1,
              (panels.first(panel) + p) * N_BLOCK);
  };
  worker.run(m_blocks.count * panels.count, compute, write_out);
  if (is_configured) _tile_release();
}

// Multiplies all rows of x by the weight, see the overload in linear.cpp.
template <class Kind, class Packed>
void multiply_all(Worker& worker, const PackedX& x, Packed packed, const Weight& weight,
                  const Outputs& out) {
  const auto multiply = [&](const char* packed_rows, const Partition& row_blocks,
                            long first_row_block, long end_row_block, long first_block, long blocks,
                            float* totals) {
    const FlushDenormals flush;  // for widening and scaling, as with few rows
    const long rows = count_rows(x, row_blocks, first_row_block, end_row_block);
    multiply_panel<Kind>((const uint16_t*)packed_rows, x, row_blocks, first_row_block,
                         end_row_block, weight, first_block, blocks, totals);
    for (long p = 0; p < blocks && weight.per_group && !has_groups(weight); p++)
      scale_sums(weight, first_block + p, rows, totals + p * rows * N_BLOCK);
  };
  multiply_panels(worker, x, packed, weight, out, multiply);
}

}  // namespace
