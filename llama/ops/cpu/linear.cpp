// Matrix products with packed weights: bf16 rows in, bf16 rows out, float32 sums. native.py
// compiles this file for the CPU that it runs on; linear.py owns the tensors and checks the shapes.
// Weights are packed in panels, as panels.h shows.
//
// Every sum runs over k in the same order, whatever M and the number of threads are: a row of x
// gives the same bytes alone as in any batch. Tiles (amx.h) have another order than vectors, and so
// they do all products with a weight, or none.
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "panels.h"
#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512BF16__)
#include "amx.h"
#define HAS_TILES
#endif

namespace {

// What a block of x does with one slice of a panel: the weights, where the next slice lies, and how
// much of it to fetch at each pair of k, as all blocks together fetch it once.
struct Slice {
  const char *weights, *next;
  long pairs, fetched;
};

template <int R> void fetch(const char* line) {
  if constexpr (R <= FEW)
    __builtin_prefetch(line);
  else
    __builtin_prefetch(line, 0, 2);  // into the second cache
}

// R rows of x as (K/2, R) pairs, times one slice of a panel, onto R rows of 32 sums.
template <class Weight, int R> void tile(const Pair* x, Slice slice, float* totals) {
  constexpr long STEP = 2 * WIDTH * Weight::BYTES;  // from two places of k to the next two
  for (int first = 0; first < WIDTH; first += 2 * LANES) {
    Floats sums[R][2];
    for (int r = 0; r < R; r++) std::memcpy(sums[r], totals + r * WIDTH + first, sizeof sums[r]);
    const char *w = slice.weights + first * 2 * Weight::BYTES, *next = slice.next;
    for (const Pair *in = x, *end = x + slice.pairs * R; in < end; in += R, w += STEP) {
      fetch<R>(next);
      if constexpr (STEP > 64) fetch<R>(next + slice.fetched / 2);
      next += slice.fetched;
      const Pairs left = Weight::pairs(w), right = Weight::pairs(w + LANES * 2 * Weight::BYTES);
#pragma GCC unroll 16
      for (int r = 0; r < R; r++) {
        multiply_add(sums[r][0], left, in[r]);
        multiply_add(sums[r][1], right, in[r]);
      }
    }
    for (int r = 0; r < R; r++) std::memcpy(totals + r * WIDTH + first, sums[r], sizeof sums[r]);
  }
}

using Tile = void (*)(const Pair*, Slice, float*);

template <class Weight, int... R> Tile pick(long rows, std::integer_sequence<int, R...>) {
  static constexpr Tile TILES[] = {tile<Weight, R + 1>...};
  return TILES[rows - 1];
}

// A block of x, bf16 (R, K) -> (K/2, R) pairs, for k from begin to end.
void rearrange(const uint16_t* x, Pair* to, long rows, long k, long begin, long end) {
  for (long r = 0; r < rows; r++)
    for (long i = begin; i < end; i += 2) to[i / 2 * rows + r] = load_pair(x + r * k + i);
}

// Blocks of x from one to another, times one panel -> their rows of 32 sums, in `totals`.
template <class Weight>
void panel_sums(const Pair* x, const Parts& blocks, long from, long to, const char* panel,
                long k, float* totals) {
  const long first_row = blocks.first(from);
  std::memset(totals, 0, (blocks.first(to) - first_row) * WIDTH * sizeof(float));
  for (long begin = 0; begin < k; begin += SLICE) {
    const long pairs = (k - begin < SLICE ? k - begin : SLICE) / 2;
    const long fetched = 2 * WIDTH * Weight::BYTES / (to - from);
    const char* weights = panel + begin * WIDTH * Weight::BYTES;
    const bool is_near = to - from == 1 && blocks.size(from) <= FEW;
    const char* next = weights + (is_near ? AHEAD : SLICE * WIDTH * Weight::BYTES);
    for (long b = from; b < to; b++) {
      const long row = blocks.first(b), rows = blocks.size(b);
      const Slice slice{weights, next + (b - from) * fetched * pairs, pairs, fetched};
      pick<Weight>(rows, std::make_integer_sequence<int, ROWS>())(
          x + row * (k / 2) + begin / 2 * rows, slice, totals + (row - first_row) * WIDTH);
    }
  }
}

template <class Weight>
void linear_in_vectors(const uint16_t* x, const char* weight, const float* scales, Outputs out,
                       Pair* turned, long m, long k, int threads) {
  const Parts blocks(m, ROWS), slices(k / 2, SLICE / 2), chunks(blocks.count, CHUNK / ROWS);
  const long panels = out.n / WIDTH;
#pragma omp parallel num_threads(threads)
  {
#pragma omp for
    for (long item = 0; item < blocks.count * slices.count; item++) {
      const long block = item / slices.count, slice = item % slices.count;
      const long row = blocks.first(block), begin = 2 * slices.first(slice);
      rearrange(x + row * k, turned + row * (k / 2), blocks.size(block), k, begin,
                begin + 2 * slices.size(slice));
    }
    // Guided: long runs of panels first, as the prefetchers like it; single ones at the end, so
    // that nobody waits long for a thread that was interrupted or sits on a slower core.
#pragma omp for schedule(guided)
    for (long item = 0; item < chunks.count * panels; item++) {
      const long chunk = item / panels, column = item % panels * WIDTH;
      const long from = chunks.first(chunk), to = chunks.first(chunk + 1);
      alignas(64) float totals[CHUNK * WIDTH];
      panel_sums<Weight>(turned, blocks, from, to, weight + column * k * Weight::BYTES, k, totals);
      out.write(totals, scales, blocks.first(from), blocks.first(to), column);
    }
  }
}

template <class Weight>
void linear(const uint16_t* x, const char* weight, const float* scales, Outputs out, void* turned,
            long m, long k, int threads) {
#if defined(HAS_TILES)
  if (k % TILE_K == 0 && tiles_work())
    return linear_in_tiles<Weight>(x, weight, scales, out, (uint16_t*)turned, m, k, threads);
#endif
  linear_in_vectors<Weight>(x, weight, scales, out, (Pair*)turned, m, k, threads);
}

constexpr long PAD = 64;  // bytes between rows of scratch, or all fall into one set of a cache

// 32 rows of `count` pairs, in scratch -> pairs of rows, a cache line of each row at a time.
template <class Pair> void turn(const char* rows, Pair* to, long count) {
  constexpr long LINE = 64 / sizeof(Pair);
  const long stride = count * sizeof(Pair) + PAD;
  for (long begin = 0; begin < count; begin += LINE)
    for (long i = begin; i < begin + LINE && i < count; i++)
      for (long row = 0; row < WIDTH; row++)
        to[i * WIDTH + row] = load<Pair>(rows + row * stride + i * sizeof(Pair));
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

// weight (n, k) is packed in place; scratch has 32 rows of 2 k + 64 bytes a thread.
void pack_bf16(char* weight, char* scratch, long n, long k, int threads) {
#pragma omp parallel for num_threads(threads)
  for (long panel = 0; panel < n / WIDTH; panel++) {
    char* own = scratch + omp_get_thread_num() * WIDTH * (2 * k + PAD);
    char* rows = weight + panel * WIDTH * 2 * k;
    for (long r = 0; r < WIDTH; r++) std::memcpy(own + r * (2 * k + PAD), rows + r * 2 * k, 2 * k);
    turn(own, (uint32_t*)rows, k / 2);
  }
}

// weight (n, k) -> values, packed, and scales (n); scratch has 32 rows of k + 64 bytes a thread.
void pack_int8(const uint16_t* weight, int8_t* values, float* scales, char* scratch, long n, long k,
               int threads) {
#pragma omp parallel for num_threads(threads)
  for (long panel = 0; panel < n / WIDTH; panel++) {
    char* own = scratch + omp_get_thread_num() * WIDTH * (k + PAD);
    for (long row = 0; row < WIDTH; row++) {
      const long n = panel * WIDTH + row;
      scales[n] = quantize(weight + n * k, (int8_t*)own + row * (k + PAD), k);
    }
    turn(own, (uint16_t*)(values + panel * WIDTH * k), k / 2);
  }
}

// x (m, k) is bf16, out (m, n) too, or float32 if it is wide; turned is scratch for m * k floats; n
// is a multiple of 32, k of 2.
void linear_bf16(const uint16_t* x, const char* weight, void* out, void* turned, long m, long n,
                 long k, long is_wide, int threads) {
  linear<Bf16>(x, weight, nullptr, {out, n, is_wide}, turned, m, k, threads);
}

void linear_int8(const uint16_t* x, const char* weight, const float* scales, void* out,
                 void* turned, long m, long n, long k, long is_wide, int threads) {
  linear<Int8>(x, weight, scales, {out, n, is_wide}, turned, m, k, threads);
}
}
