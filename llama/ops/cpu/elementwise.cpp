// What a layer does between its matrix products: RMSNorm (Zhang and Sennrich, 2019), RoPE (Su et
// al., 2021) with the store into the KV cache, and SwiGLU (Shazeer, 2020). Each is one pass over
// bf16 rows, with float32 inside; torch makes a pass over memory for each elementary operation.
//
// norm.py, rope.py and swiglu.py own the tensors and have the definitions. Results are rounded to
// bf16 where theirs are. Rows are multiples of 32 numbers.
#include "kernels.h"
#include "vectors.h"

namespace {

constexpr long STEP = 2 * LANES;             // numbers in a vector of words
constexpr long MIN_PARALLEL_WORK = 1 << 16;  // numbers; below, waking the threads takes longer

Floats silu(Floats x) { return x / (exp(-x) + 1); }

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

void silu_mul(const uint16_t* gate, const uint16_t* up, uint16_t* out, long width) {
  for (long i = 0; i < width; i += STEP) {
    const Words words = load<Words>(gate + i), others = load<Words>(up + i);
    const Floats first = rounded(silu(first_of(words))) * first_of(others);
    const Floats second = rounded(silu(second_of(words))) * second_of(others);
    store(out + i, to_bf16(first, second));
  }
}

void rope_and_store(const uint16_t* qkv, const float* freqs_cis, uint16_t* pages, int64_t slot,
                    uint16_t* queries, const Heads& heads) {
  const long q = heads.queries * heads.dim, kv = heads.kv * heads.dim;
  uint16_t* keys = pages + slot * kv;
  apply_rope(qkv, freqs_cis, queries, heads.queries, heads.dim);
  apply_rope(qkv + q, freqs_cis, keys, heads.kv, heads.dim);
  std::memcpy(keys + heads.num_slots * kv, qkv + q + kv, kv * 2);
}

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
  for (long row = 0; row < rows; row++) {
    const uint16_t* gate = x + row * 2 * width;
    silu_mul(gate, gate + width, out + row * width, width);
  }
}

// qkv (rows, heads + 2 * kv_heads, dim), freqs_cis (rows, dim / 2, 2), slots (rows),
// pages (2, num_slots, kv_heads, dim), queries (rows, heads, dim).
void rope_and_store_bf16(const uint16_t* qkv, const float* freqs_cis, uint16_t* pages,
                         const int64_t* slots, uint16_t* queries, long rows, long heads,
                         long kv_heads, long dim, long num_slots, int threads) {
  const long width = heads * dim, all = width + 2 * kv_heads * dim;
#pragma omp parallel for num_threads(threads) if (rows * all >= MIN_PARALLEL_WORK)
  for (long row = 0; row < rows; row++)
    rope_and_store(qkv + row * all, freqs_cis + row * dim, pages, slots[row],
                   queries + row * width, {heads, kv_heads, dim, num_slots});
}
}
