// Matrix products with packed weights: bf16 rows in, bf16 rows out, float32 sums. native.py
// compiles this file for the CPU that it runs on; linear.py owns the tensors and checks the shapes.
//
// A panel is 32 rows of the weight (N, K), in their old place in memory, but turned so that one
// vector holds the same two k of neighbouring rows, (N/32, K/2, 32, 2): for K = 4,
//     row 0: a0 a1 a2 a3,  row 1: b0 b1 b2 b3,  ...  is stored as
//     a0 a1 b0 b1 c0 c1 ... | a2 a3 b2 b3 c2 c3 ...
// The CPU's own product of bf16 pairs takes such a vector as it is; without one, a shift makes
// floats of the even k, and a mask of the odd. int8 weights lie in the same order at half the size;
// a row's sum is multiplied by its scale.
//
// Every sum runs over k in order, in one accumulator, whatever M and the number of threads are: a
// row of x gives the same bytes alone as in any batch.
#include <utility>

#include "vectors.h"

namespace {

#if defined(__AVX512F__)
constexpr int ROWS = 14;  // 14 x 2 sums of the 32 registers
#else
constexpr int ROWS = 6;  // AVX2: 6 x 2 of 16
#endif
constexpr int WIDTH = 32;
constexpr long CHUNK = 112 / ROWS;  // blocks of x that share one pass over a panel
constexpr long SLICE = 512;         // places of k that a thread rearranges at a time
constexpr long AHEAD = 4096;        // bytes; without it 13 to 28 % slower at M = 1 to 8 (one Xeon)

// Two neighbouring k of LANES rows of the weight, and of one row of x.
#if defined(__AVX512BF16__)
typedef __m512bh Weights;
typedef uint32_t Inputs;

void multiply_add(Floats& sum, Weights w, Inputs x) {
  sum = (Floats)_mm512_dpbf16_ps((__m512)sum, w, (__m512bh)_mm512_set1_epi32(x));
}

Inputs inputs(const uint16_t* x) { return load<Inputs>(x); }

struct Bf16 {
  static constexpr long BYTES = 2;
  static Weights pairs(const char* w) { return load<Weights>(w); }
};

struct Int8 {
  static constexpr long BYTES = 1;
  static __m512 widened(const char* w) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load<__m128i>(w)));
  }
  static Weights pairs(const char* w) { return _mm512_cvtne2ps_pbh(widened(w + 16), widened(w)); }
};
#else
struct Weights {
  Floats even, odd;
};
struct Inputs {
  float even, odd;
};

void multiply_add(Floats& sum, Weights w, Inputs x) {
  sum += w.even * x.even;
  sum += w.odd * x.odd;
}

Inputs inputs(const uint16_t* x) { return {widen(x[0]), widen(x[1])}; }

struct Bf16 {
  static constexpr long BYTES = 2;
  static Weights pairs(const char* w) {
    const Words words = load<Words>(w);
    return {first_of(words), second_of(words)};
  }
};

struct Int8 {
  static constexpr long BYTES = 1;
  typedef int32_t Integers __attribute__((vector_size(VECTOR_BYTES)));
  static Weights pairs(const char* w) {  // gcc makes poor code of a portable conversion
#if defined(__AVX512F__)
    const __m512i both = _mm512_cvtepi16_epi32(load<__m256i>(w));
    const Integers even = (Integers)_mm512_slli_epi32(both, 24) >> 24, odd = (Integers)both >> 8;
    return {(Floats)_mm512_cvtepi32_ps((__m512i)even), (Floats)_mm512_cvtepi32_ps((__m512i)odd)};
#else
    const __m256i both = _mm256_cvtepi16_epi32(load<__m128i>(w));
    const Integers even = (Integers)_mm256_slli_epi32(both, 24) >> 24, odd = (Integers)both >> 8;
    return {(Floats)_mm256_cvtepi32_ps((__m256i)even), (Floats)_mm256_cvtepi32_ps((__m256i)odd)};
#endif
  }
};
#endif

// R rows of x as (K/2, R) inputs, times one panel -> R rows of 32 outputs, n apart.
template <class Weight, int R>
void tile(const Inputs* x, const char* panel, const float* scales, uint16_t* out, long n, long k) {
  constexpr long STEP = 2 * WIDTH * Weight::BYTES;  // from two places of k to the next two
  for (int first = 0; first < WIDTH; first += 2 * LANES) {
    Floats sums[R][2] = {};
    const Inputs* in = x;
    const char* w = panel + first * 2 * Weight::BYTES;
    for (const char* end = w + k / 2 * STEP; w < end; w += STEP, in += R) {
      for (long line = 0; line < STEP; line += 64) __builtin_prefetch(w + AHEAD + line);
      const Weights left = Weight::pairs(w), right = Weight::pairs(w + LANES * 2 * Weight::BYTES);
#pragma GCC unroll 16
      for (int r = 0; r < R; r++) {
        multiply_add(sums[r][0], left, in[r]);
        multiply_add(sums[r][1], right, in[r]);
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

using Tile = void (*)(const Inputs*, const char*, const float*, uint16_t*, long, long);

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

// A block of x, bf16 (R, K) -> (K/2, R) inputs, for k from begin to end.
void rearrange(const uint16_t* x, Inputs* to, long rows, long k, long begin, long end) {
  for (long r = 0; r < rows; r++)
    for (long i = begin; i < end; i += 2) to[i / 2 * rows + r] = inputs(x + r * k + i);
}

template <class Weight>
void linear(const uint16_t* x, const char* weight, const float* scales, uint16_t* out,
            Inputs* turned, long m, long n, long k, int threads) {
  const Blocks blocks(m);
  const long slices = (k + SLICE - 1) / SLICE, panels = n / WIDTH;
  const long chunks = (blocks.count + CHUNK - 1) / CHUNK;
#pragma omp parallel num_threads(threads)
  {
#pragma omp for
    for (long item = 0; item < blocks.count * slices; item++) {
      const long block = item / slices, begin = item % slices * SLICE, row = blocks.first(block);
      const long end = begin + SLICE < k ? begin + SLICE : k;
      rearrange(x + row * k, turned + row * (k / 2), blocks.size(block), k, begin, end);
    }
    // Guided: long runs of panels first, as the prefetchers like it; single ones at the end, so
    // that nobody waits long for a thread that was interrupted or sits on a slower core.
#pragma omp for schedule(guided)
    for (long item = 0; item < chunks * panels; item++) {
      const long chunk = item / panels, panel = item % panels, column = panel * WIDTH;
      for (long b = chunk * CHUNK; b < blocks.count && b < (chunk + 1) * CHUNK; b++) {
        const long row = blocks.first(b);
        const Tile run = pick<Weight>(blocks.size(b), std::make_integer_sequence<int, ROWS>());
        run(turned + row * (k / 2), weight + column * k * Weight::BYTES,
            scales ? scales + column : nullptr, out + row * n + column, n, k);
      }
    }
  }
}

}  // namespace

extern "C" {

// x (m, k) and out (m, n) are bf16; turned is scratch for m * k floats; n is a multiple of 32, k
// of 2.
void linear_bf16(const uint16_t* x, const char* weight, uint16_t* out, void* turned, long m, long n,
                 long k, int threads) {
  linear<Bf16>(x, weight, nullptr, out, (Inputs*)turned, m, n, k, threads);
}

void linear_int8(const uint16_t* x, const char* weight, const float* scales, uint16_t* out,
                 void* turned, long m, long n, long k, int threads) {
  linear<Int8>(x, weight, scales, out, (Inputs*)turned, m, n, k, threads);
}
}
