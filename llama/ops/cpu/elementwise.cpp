// What a layer does between its matrix products: RMSNorm (Zhang and Sennrich, 2019), RoPE (Su et
// al., 2021) with the store into the KV cache, and SwiGLU (Shazeer, 2020). Each is one pass over
// bf16 rows, with float32 inside; torch makes a pass over memory for each elementary operation.
//
// norm.py, rope.py and swiglu.py own the tensors and have the definitions. Results are rounded to
// bf16 where theirs are. Rows are multiples of 32 numbers.
#include "vectors.h"

namespace {

constexpr long STEP = 2 * LANES;             // numbers in a vector of words
constexpr long MIN_PARALLEL_WORK = 1 << 16;  // numbers; below, waking the threads takes longer

void rms_norm(const uint16_t* x, const uint16_t* weight, uint16_t* out, long width, float eps) {
  Floats sums[2] = {};
  for (long i = 0; i < width; i += STEP) {
    const Words words = load<Words>(x + i);
    sums[0] += first_of(words) * first_of(words);
    sums[1] += second_of(words) * second_of(words);
  }
  const float mean = sum_of(sums[0] + sums[1]) / width;
  const float scale = 1 / _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(mean + eps)));
  for (long i = 0; i < width; i += STEP) {
    const Words words = load<Words>(x + i), w = load<Words>(weight + i);
    const Floats first = rounded(first_of(words) * scale) * first_of(w);
    const Floats second = rounded(second_of(words) * scale) * second_of(w);
    store(out + i, to_bf16(first, second));
  }
}

Floats silu(Floats x) { return x / (exp(-x) + 1); }

void silu_mul(const uint16_t* x, uint16_t* out, long width) {
  for (long i = 0; i < width; i += STEP) {
    const Words words = load<Words>(x + i), up = load<Words>(x + width + i);
    const Floats first = rounded(silu(first_of(words))) * first_of(up);
    const Floats second = rounded(silu(second_of(words))) * second_of(up);
    store(out + i, to_bf16(first, second));
  }
}

template <uint32_t... I>
Floats evens_of(Floats a, Floats b, std::integer_sequence<uint32_t, I...>) {
  return __builtin_shuffle(a, b, Words{(2 * I)...});
}

template <uint32_t... I>
Floats odds_of(Floats a, Floats b, std::integer_sequence<uint32_t, I...>) {
  return __builtin_shuffle(a, b, Words{(2 * I + 1)...});
}

// Rotates the pairs of `count` heads of one token by their cosine and sine.
void apply_rope(const uint16_t* heads, const float* freqs_cis, uint16_t* out, long count,
                long dim) {
  for (long i = 0; i < dim; i += STEP) {
    const Floats left = load<Floats>(freqs_cis + i), right = load<Floats>(freqs_cis + i + LANES);
    const Floats cosine = evens_of(left, right, Lanes()), sine = odds_of(left, right, Lanes());
    for (long at = i; at < count * dim; at += dim) {
      const Words words = load<Words>(heads + at);
      const Floats first = first_of(words), second = second_of(words);
      store(out + at, to_bf16(first * cosine - second * sine, first * sine + second * cosine));
    }
  }
}

}  // namespace

extern "C" {

// x and out (rows, width), weight (width).
void rms_norm_bf16(const uint16_t* x, const uint16_t* weight, uint16_t* out, long rows, long width,
                   float eps, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * width >= MIN_PARALLEL_WORK)
  for (long row = 0; row < rows; row++)
    rms_norm(x + row * width, weight, out + row * width, width, eps);
}

// x (rows, 2 * width), out (rows, width).
void silu_mul_bf16(const uint16_t* x, uint16_t* out, long rows, long width, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * width >= MIN_PARALLEL_WORK)
  for (long row = 0; row < rows; row++) silu_mul(x + row * 2 * width, out + row * width, width);
}

// qkv (rows, heads + 2 * kv_heads, dim), freqs_cis (rows, dim / 2, 2), slots (rows),
// pages (2, num_slots, kv_heads, dim), queries (rows, heads, dim).
void rope_and_store_bf16(const uint16_t* qkv, const float* freqs_cis, uint16_t* pages,
                         const int64_t* slots, uint16_t* queries, long rows, long heads,
                         long kv_heads, long dim, long num_slots, int threads) {
  const long q = heads * dim, kv = kv_heads * dim;
#pragma omp parallel for num_threads(threads) if (rows * (q + 2 * kv) >= MIN_PARALLEL_WORK)
  for (long row = 0; row < rows; row++) {
    const uint16_t* from = qkv + row * (q + 2 * kv);
    uint16_t* keys = pages + slots[row] * kv;
    apply_rope(from, freqs_cis + row * dim, queries + row * q, heads, dim);
    apply_rope(from + q, freqs_cis + row * dim, keys, kv_heads, dim);
    std::memcpy(keys + num_slots * kv, from + q + kv, kv * 2);
  }
}
}
