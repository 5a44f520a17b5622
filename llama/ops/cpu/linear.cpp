// Matrix products with packed weights: bf16 rows in, bf16 or float32 rows out, float32 sums. The
// method is BLIS's (Van Zee and van de Geijn, 2015): blocks for the caches, packed operands, and a
// kernel that keeps a tile of sums in registers. The layout of a weight is in packed_weight.h. At
// one row it reads 31 of 35 GB/s that the memory gives; torch's product read 19.
//
// linear.py owns the tensors and checks the shapes. Every sum runs over k in the same order for any
// M and any number of threads: a row of x gives the same bytes alone as in any batch. AMX tiles
// (amx.h) add in another order than vectors; so they do all products with a weight, or none.
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "packed_weight.h"
#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512BF16__)
#include "amx.h"
#define HAS_TILES
#endif

namespace {

// One K block of a weight block: the weights, what to prefetch, and how many bytes of that at each
// pair of k, since all row blocks together fetch it once.
struct WeightBlock {
  const char *weights, *next;
  long pairs, fetched;
};

template <int R> void fetch(const char* line) {
  if constexpr (R <= L1_PREFETCH_ROWS)
    __builtin_prefetch(line);
  else
    __builtin_prefetch(line, 0, 2);  // into L2
}

// R rows of x as (K/2, R) pairs, times one K block of a weight block, onto R rows of 32 sums.
template <class Weight, int R> void tile(const Pair* x, WeightBlock k_block, float* totals) {
  constexpr long STEP = 2 * N_BLOCK * Weight::BYTES;  // from one pair of k to the next
  for (int first = 0; first < N_BLOCK; first += 2 * LANES) {
    Floats sums[R][2];
    for (int r = 0; r < R; r++) std::memcpy(sums[r], totals + r * N_BLOCK + first, sizeof sums[r]);
    const char *w = k_block.weights + first * 2 * Weight::BYTES, *next = k_block.next;
    for (const Pair *in = x, *end = x + k_block.pairs * R; in < end; in += R, w += STEP) {
      fetch<R>(next);
      if constexpr (STEP > 64) fetch<R>(next + k_block.fetched / 2);
      next += k_block.fetched;
      const Pairs left = Weight::pairs(w), right = Weight::pairs(w + LANES * 2 * Weight::BYTES);
#pragma GCC unroll 16
      for (int r = 0; r < R; r++) {
        multiply_add(sums[r][0], left, in[r]);
        multiply_add(sums[r][1], right, in[r]);
      }
    }
    for (int r = 0; r < R; r++) std::memcpy(totals + r * N_BLOCK + first, sums[r], sizeof sums[r]);
  }
}

using Tile = void (*)(const Pair*, WeightBlock, float*);

template <class Weight, int... R> Tile pick(long rows, std::integer_sequence<int, R...>) {
  static constexpr Tile TILES[] = {tile<Weight, R + 1>...};
  return TILES[rows - 1];
}

// A row block of x, bf16 (R, K) -> (K/2, R) pairs, for k from begin to end.
void pack_rows(const uint16_t* x, Pair* to, long rows, long k, long begin, long end) {
  for (long r = 0; r < rows; r++)
    for (long i = begin; i < end; i += 2) to[i / 2 * rows + r] = load_pair(x + r * k + i);
}

// Row blocks `from` to `to` of x, times one weight block -> their rows of 32 sums, in `totals`.
template <class Weight>
void block_sums(const Pair* x, const Parts& row_blocks, long from, long to, const char* block,
                long k, float* totals) {
  const long first_row = row_blocks.first(from);
  std::memset(totals, 0, (row_blocks.first(to) - first_row) * N_BLOCK * sizeof(float));
  for (long begin = 0; begin < k; begin += K_BLOCK) {
    const long pairs = (k - begin < K_BLOCK ? k - begin : K_BLOCK) / 2;
    const long fetched = 2 * N_BLOCK * Weight::BYTES / (to - from);
    const char* weights = block + begin * N_BLOCK * Weight::BYTES;
    const bool is_near = to - from == 1 && row_blocks.size(from) <= L1_PREFETCH_ROWS;
    const char* next = weights + (is_near ? PREFETCH_BYTES : K_BLOCK * N_BLOCK * Weight::BYTES);
    for (long b = from; b < to; b++) {
      const long row = row_blocks.first(b), rows = row_blocks.size(b);
      const WeightBlock k_block{weights, next + (b - from) * fetched * pairs, pairs, fetched};
      pick<Weight>(rows, std::make_integer_sequence<int, ROWS>())(
          x + row * (k / 2) + begin / 2 * rows, k_block, totals + (row - first_row) * N_BLOCK);
    }
  }
}

template <class Weight>
void linear_in_vectors(const uint16_t* x, const char* weight, const float* scales, Outputs out,
                       Pair* packed_x, long m, long k, int threads) {
  const Parts row_blocks(m, ROWS), k_blocks(k / 2, K_BLOCK / 2);
  const Parts m_blocks(row_blocks.count, M_BLOCK / ROWS);
  const long blocks = out.n / N_BLOCK;
#pragma omp parallel num_threads(threads)
  {
#pragma omp for
    for (long item = 0; item < row_blocks.count * k_blocks.count; item++) {
      const long block = item / k_blocks.count, k_block = item % k_blocks.count;
      const long row = row_blocks.first(block), begin = 2 * k_blocks.first(k_block);
      pack_rows(x + row * k, packed_x + row * (k / 2), row_blocks.size(block), k, begin,
                begin + 2 * k_blocks.size(k_block));
    }
    // Guided: long runs of weight blocks first, which the hardware prefetchers like; single ones at
    // the end, so that nobody waits long for a thread that was interrupted or has a slower core.
#pragma omp for schedule(guided)
    for (long item = 0; item < m_blocks.count * blocks; item++) {
      const long m_block = item / blocks, column = item % blocks * N_BLOCK;
      const long from = m_blocks.first(m_block), to = m_blocks.first(m_block + 1);
      alignas(64) float totals[M_BLOCK * N_BLOCK];
      block_sums<Weight>(packed_x, row_blocks, from, to, weight + column * k * Weight::BYTES, k,
                         totals);
      out.write(totals, scales, row_blocks.first(from), row_blocks.first(to), column);
    }
  }
}

template <class Weight>
void linear(const uint16_t* x, const char* weight, const float* scales, Outputs out,
            void* workspace, long m, long k, int threads) {
#if defined(HAS_TILES)
  if (k % TILE_K == 0 && tiles_work())
    return linear_in_tiles<Weight>(x, weight, scales, out, (uint16_t*)workspace, m, k, threads);
#endif
  linear_in_vectors<Weight>(x, weight, scales, out, (Pair*)workspace, m, k, threads);
}

constexpr long PAD = 64;  // bytes between rows of workspace, or all fall into one set of a cache

// Bytes of workspace that one thread packs in: 32 rows of `row_bytes`.
long pack_bytes(long row_bytes) { return N_BLOCK * (row_bytes + PAD); }

// 32 rows of `count` pairs, in the workspace -> pairs of rows, one cache line per row at a time.
template <class Pair> void transpose(const char* rows, Pair* to, long count) {
  constexpr long LINE = 64 / sizeof(Pair);
  const long stride = count * sizeof(Pair) + PAD;
  for (long begin = 0; begin < count; begin += LINE)
    for (long i = begin; i < begin + LINE && i < count; i++)
      for (long row = 0; row < N_BLOCK; row++)
        to[i * N_BLOCK + row] = load<Pair>(rows + row * stride + i * sizeof(Pair));
}

// A row of k bf16 -> int8 in units of its scale, which is returned: the largest becomes 127.
float quantize(const uint16_t* row, int8_t* to, long k) {
  uint16_t largest = 0;  // without their signs, bf16 are in the order of their bits
  for (long i = 0; i < k; i++) largest = std::max<uint16_t>(largest, row[i] & 0x7fff);
  const float scale = widen(largest) / 127, unit = scale == 0 ? 1 : scale;
  for (long i = 0; i < k; i++) to[i] = (int8_t)std::nearbyint(widen(row[i]) / unit);
  return scale;
}

}  // namespace

extern "C" {

// Bytes of workspace for pack_bf16 (row_bytes = 2 k) and pack_int8 (row_bytes = k).
long pack_workspace(long row_bytes, long threads) { return threads * pack_bytes(row_bytes); }

// weight (n, k) is packed in place.
void pack_bf16(char* weight, char* workspace, long n, long k, int threads) {
#pragma omp parallel for num_threads(threads)
  for (long block = 0; block < n / N_BLOCK; block++) {
    char* own = workspace + omp_get_thread_num() * pack_bytes(2 * k);
    char* rows = weight + block * N_BLOCK * 2 * k;
    for (long r = 0; r < N_BLOCK; r++)
      std::memcpy(own + r * (2 * k + PAD), rows + r * 2 * k, 2 * k);
    transpose(own, (uint32_t*)rows, k / 2);
  }
}

// weight (n, k) -> values, packed, and scales (n).
void pack_int8(const uint16_t* weight, int8_t* values, float* scales, char* workspace, long n,
               long k, int threads) {
#pragma omp parallel for num_threads(threads)
  for (long block = 0; block < n / N_BLOCK; block++) {
    char* own = workspace + omp_get_thread_num() * pack_bytes(k);
    for (long row = 0; row < N_BLOCK; row++) {
      const long n = block * N_BLOCK + row;
      scales[n] = quantize(weight + n * k, (int8_t*)own + row * (k + PAD), k);
    }
    transpose(own, (uint16_t*)(values + block * N_BLOCK * k), k / 2);
  }
}

// Bytes of workspace for linear_bf16 and linear_int8: x as packed pairs, which are two floats each
// on a CPU without a product of bf16 pairs.
long linear_workspace(long m, long k) { return m * k * sizeof(float); }

// x (m, k) is bf16; out (m, n) too, or float32 if is_wide; n is a multiple of 32, k of 2.
void linear_bf16(const uint16_t* x, const char* weight, void* out, void* workspace, long m, long n,
                 long k, bool is_wide, int threads) {
  linear<Bf16>(x, weight, nullptr, {out, n, is_wide}, workspace, m, k, threads);
}

void linear_int8(const uint16_t* x, const char* weight, const float* scales, void* out,
                 void* workspace, long m, long n, long k, bool is_wide, int threads) {
  linear<Int8>(x, weight, scales, {out, n, is_wide}, workspace, m, k, threads);
}
}
