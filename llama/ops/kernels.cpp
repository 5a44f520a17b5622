// Matrix products with packed weights: bf16 rows in, bf16 rows out, float32 sums. native.py
// compiles this file for the CPU that it runs on; linear.py owns the tensors and checks the shapes.
//
// A panel is 32 rows of the weight (N, K), in their old place in memory, but turned so that one
// vector holds the same k of neighbouring rows. bf16 goes by pairs, (N/32, K/2, 32, 2): for K = 4,
//     row 0: a0 a1 a2 a3,  row 1: b0 b1 b2 b3,  ...  is stored as
//     a0 a1 b0 b1 c0 c1 ... | a2 a3 b2 b3 c2 c3 ...
// so that one load is 16 rows, a shift makes floats of the even k, and a mask of the odd one.
// int8 is (N/32, K, 32): a0 b0 c0 ... | a1 b1 c1 ...; a row's sum is multiplied by its scale.
//
// Every sum runs over k in order, in one accumulator, whatever M and the number of threads are: a
// row of x gives the same bytes alone as in any batch.
#include <immintrin.h>

#include <cstdint>
#include <cstring>
#include <utility>

namespace {

#if defined(__AVX512F__)
constexpr int VECTOR_BYTES = 64, ROWS = 14;  // 14 x 2 sums of the 32 registers
#else
constexpr int VECTOR_BYTES = 32, ROWS = 6;  // AVX2: 6 x 2 of 16
#endif
constexpr int WIDTH = 32, LANES = VECTOR_BYTES / 4;
constexpr long CHUNK = 112 / ROWS;  // blocks of x that share one pass over a panel
constexpr long SLICE = 512;         // places of k that a thread widens at a time
constexpr long AHEAD = 4096;        // bytes; without it 13 to 28 % slower at M = 1 to 8 (one Xeon)

typedef float Floats __attribute__((vector_size(VECTOR_BYTES)));
typedef uint32_t Words __attribute__((vector_size(VECTOR_BYTES)));

template <class Vector> Vector load(const void* from) {
  Vector v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

// What differs between the two kinds of weight: how LANES of a panel's 32 rows, from `first` on,
// become floats at k and at k + 1.
struct Bf16 {
  static constexpr long BYTES = 2;
  static void pair(const char* w, int first, Floats& even, Floats& odd) {
    const Words words = load<Words>(w + 4 * first);
    even = (Floats)(words << 16);
    odd = (Floats)(words & 0xffff0000u);
  }
};

struct Int8 {
  static constexpr long BYTES = 1;
  static Floats widen(const char* w) {  // gcc makes poor code of a portable conversion
#if defined(__AVX512F__)
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load<__m128i>(w)));
#else
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)w)));
#endif
  }
  static void pair(const char* w, int first, Floats& even, Floats& odd) {
    even = widen(w + first);
    odd = widen(w + first + WIDTH);
  }
};

// To the nearest, ties to even. The carry cannot turn a NaN into a number: one that comes from bf16
// inputs has an empty low half.
uint16_t narrow(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

// R rows of x as floats (K, R), times one panel -> R rows of 32 outputs, n apart.
template <class Weight, int R>
void tile(const float* x, const char* panel, const float* scales, uint16_t* out, long n, long k) {
  constexpr long STEP = 2 * WIDTH * Weight::BYTES;  // from two places of k to the next two
  for (int first = 0; first < WIDTH; first += 2 * LANES) {
    Floats sums[R][2] = {};
    const float* wide = x;
    for (const char *w = panel, *end = w + k / 2 * STEP; w < end; w += STEP, wide += 2 * R) {
      for (long line = 0; line < STEP; line += 64) __builtin_prefetch(w + AHEAD + line);
      Floats even[2], odd[2];
      Weight::pair(w, first, even[0], odd[0]);
      Weight::pair(w, first + LANES, even[1], odd[1]);
#pragma GCC unroll 16
      for (int r = 0; r < R; r++) {
        sums[r][0] += even[0] * wide[r];
        sums[r][1] += even[1] * wide[r];
      }
#pragma GCC unroll 16
      for (int r = 0; r < R; r++) {
        sums[r][0] += odd[0] * wide[R + r];
        sums[r][1] += odd[1] * wide[R + r];
      }
    }
    for (int r = 0; r < R; r++) {
      float row[2 * LANES];
      std::memcpy(row, sums[r], sizeof row);
      for (int i = 0; i < 2 * LANES; i++) {
        const float scale = scales ? scales[first + i] : 1;
        out[r * n + first + i] = narrow(row[i] * scale);
      }
    }
  }
}

using Tile = void (*)(const float*, const char*, const float*, uint16_t*, long, long);

template <class Weight, int... R> Tile pick(long rows, std::integer_sequence<int, R...>) {
  static constexpr Tile TILES[] = {tile<Weight, R + 1>...};
  return TILES[rows - 1];
}

// The rows of x in blocks of at most ROWS, as even as can be: 16 rows are 8 and 8.
struct Blocks {
  long rows, count;
  explicit Blocks(long m) : rows(m), count((m + ROWS - 1) / ROWS) {}
  long first(long block) const { return block * rows / count; }
  long size(long block) const { return first(block + 1) - first(block); }
};

// A block of x, bf16 (R, K) -> floats (K, R), for k from begin to end.
void widen(const uint16_t* x, float* wide, long rows, long k, long begin, long end) {
  for (long r = 0; r < rows; r++)
    for (long i = begin; i < end; i++) {
      const uint32_t bits = (uint32_t)x[r * k + i] << 16;
      std::memcpy(wide + i * rows + r, &bits, 4);
    }
}

template <class Weight>
void linear(const uint16_t* x, const char* weight, const float* scales, uint16_t* out, float* wide,
            long m, long n, long k, int threads) {
  const Blocks blocks(m);
  const long slices = (k + SLICE - 1) / SLICE, panels = n / WIDTH;
  const long chunks = (blocks.count + CHUNK - 1) / CHUNK;
#pragma omp parallel num_threads(threads)
  {
#pragma omp for
    for (long item = 0; item < blocks.count * slices; item++) {
      const long block = item / slices, begin = item % slices * SLICE, row = blocks.first(block);
      const long end = begin + SLICE < k ? begin + SLICE : k;
      widen(x + row * k, wide + row * k, blocks.size(block), k, begin, end);
    }
    // Guided: long runs of panels first, as the prefetchers like it; single ones at the end, so
    // that nobody waits long for a thread that was interrupted or sits on a slower core.
#pragma omp for schedule(guided)
    for (long item = 0; item < chunks * panels; item++) {
      const long chunk = item / panels, panel = item % panels, column = panel * WIDTH;
      for (long b = chunk * CHUNK; b < blocks.count && b < (chunk + 1) * CHUNK; b++) {
        const long row = blocks.first(b);
        const Tile run = pick<Weight>(blocks.size(b), std::make_integer_sequence<int, ROWS>());
        run(wide + row * k, weight + column * k * Weight::BYTES, scales ? scales + column : nullptr,
            out + row * n + column, n, k);
      }
    }
  }
}

}  // namespace

extern "C" {

// x (m, k) and out (m, n) are bf16; wide is scratch for m * k floats; n is a multiple of 32, k of 2.
void linear_bf16(const uint16_t* x, const char* weight, uint16_t* out, float* wide, long m, long n,
                 long k, int threads) {
  linear<Bf16>(x, weight, nullptr, out, wide, m, n, k, threads);
}

void linear_int8(const uint16_t* x, const char* weight, const float* scales, uint16_t* out,
                 float* wide, long m, long n, long k, int threads) {
  linear<Int8>(x, weight, scales, out, wide, m, n, k, threads);
}
}
