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
  return __builtin_shuffle(a, b, UInts{(2 * I)...});
}

template <uint32_t... I> Floats odds_of(Floats a, Floats b, std::integer_sequence<uint32_t, I...>) {
  return __builtin_shuffle(a, b, UInts{(2 * I + 1)...});
}

// Rotates the pairs of `count` heads of one token by their cosine and sine. Not inlined: all
// callers must round alike.
__attribute__((noinline)) void apply_rope(const uint16_t* heads, const float* freqs_cis,
                                          uint16_t* out, long count, long dim) {
  for (long i = 0; i < dim; i += STEP) {
    const Floats left = load<Floats>(freqs_cis + i), right = load<Floats>(freqs_cis + i + LANES);
    const Floats cosine = evens_of(left, right, Lanes()), sine = odds_of(left, right, Lanes());
    for (long at = i; at < count * dim; at += dim) {
      const UInts words = load<UInts>(heads + at);
      const Floats first = widen_even(words), second = widen_odd(words);
      store(out + at, to_bf16(first * cosine - second * sine, first * sine + second * cosine));
    }
  }
}

// D bf16 -> whole numbers from -127 to 127, and the unit that they count, a bf16. The largest
// magnitude is found among bits, where NaN is above all.
void quantize(const uint16_t* from, char* to, char* unit_to, long dim) {
  UInts top = {};
  for (long i = 0; i < dim; i += STEP) {
    const UInts words = load<UInts>(from + i);
    const UInts first = words << 16 & 0x7fffffffu, second = words & 0x7fff0000u;
    top = first > top ? first : top;
    top = second > top ? second : top;
  }
  uint32_t bits = 0;
  for (int i = 0; i < LANES; i++) bits = std::max(bits, (uint32_t)top[i]);
  const float exact = widen(bits >> 16) / 127, least = 0x1p-100f;
  const uint16_t unit = to_bf16(exact < least ? least : exact);
  std::memcpy(unit_to, &unit, 2);
  for (long i = 0; i < dim; i += STEP) {
    const UInts words = load<UInts>(from + i);
    const Floats first = widen_even(words) / widen(unit), second = widen_odd(words) / widen(unit);
    store_int8(to + i, interleave_low(first, second, Lanes()));
    store_int8(to + i + LANES, interleave_high(first, second, Lanes()));
  }
}

// Sylvester's Hadamard matrix times `count` floats, in place: a power of two, at least LANES.
template <uint32_t... I>
void transform(float* x, long count, std::integer_sequence<uint32_t, I...>) {
  const UInts lanes = {I...};
  for (long i = 0; i < count; i += LANES) {
    Floats v = load<Floats>(x + i);
    for (uint32_t apart = 1; apart < LANES; apart *= 2) {
      const UInts signs = lanes * (0x80000000u / apart) & 0x80000000u;  // of the second of two
      v = __builtin_shuffle(v, lanes ^ apart) + (Floats)((UInts)v ^ signs);
    }
    store(x + i, v);
  }
  for (long apart = LANES; apart < count; apart *= 2)
    for (long from = 0; from < count; from += 2 * apart)
      for (long i = from; i < from + apart; i += LANES) {
        const Floats first = load<Floats>(x + i), second = load<Floats>(x + i + apart);
        store(x + i, first + second);
        store(x + i + apart, first - second);
      }
}

}  // namespace

void hadamard(const uint16_t* x, float* sums, uint16_t* out, long width) {
  const long half = width / 2;
  const float scale = 1 / _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(width)));
  float* differences = sums + half;  // of the pairs
  for (long i = 0; i < half; i += LANES) {
    const UInts words = load<UInts>(x + 2 * i);
    store(sums + i, widen_even(words) + widen_odd(words));
    store(differences + i, widen_even(words) - widen_odd(words));
  }
  transform(sums, half, Lanes());
  transform(differences, half, Lanes());
  for (long i = 0; i < half; i += LANES)
    store(out + 2 * i,
          to_bf16(load<Floats>(sums + i) * scale, load<Floats>(differences + i) * scale));
}

void rms_norm(const uint16_t* x, const uint16_t* weight, uint16_t* out, long width, float eps) {
  Floats sums[2] = {};
  for (long i = 0; i < width; i += STEP) {
    const UInts words = load<UInts>(x + i);
    sums[0] += widen_even(words) * widen_even(words);
    sums[1] += widen_odd(words) * widen_odd(words);
  }
  const float mean = reduce_add(sums[0] + sums[1]) / width;
  const float scale = 1 / _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(mean + eps)));
  for (long i = 0; i < width; i += STEP) {
    const UInts words = load<UInts>(x + i), w = load<UInts>(weight + i);
    const Floats first = round_to_bf16(widen_even(words) * scale) * widen_even(w);
    const Floats second = round_to_bf16(widen_odd(words) * scale) * widen_odd(w);
    store(out + i, to_bf16(first, second));
  }
}

void silu_mul(const uint16_t* gate, const uint16_t* up, uint16_t* out, long width) {
  for (long i = 0; i < width; i += STEP) {
    const UInts words = load<UInts>(gate + i), others = load<UInts>(up + i);
    const Floats first = round_to_bf16(silu(widen_even(words))) * widen_even(others);
    const Floats second = round_to_bf16(silu(widen_odd(words))) * widen_odd(others);
    store(out + i, to_bf16(first, second));
  }
}

void rope_and_store(const uint16_t* qkv, const float* freqs_cis, char* pages, int64_t slot,
                    uint16_t* queries, const Heads& heads) {
  const long q = heads.queries * heads.dim, kv = heads.kv * heads.dim;
  const long rows = heads.page_size * heads.kv, page = slot / heads.page_size;
  const long page_bytes = rows * kv_row_bytes(heads.dim, heads.kv_format);
  const long row_bytes = heads.dim * kv_element_bytes(heads.kv_format);
  slot %= heads.page_size, pages += page * page_bytes;
  char *keys = pages + slot * heads.kv * row_bytes, *units = pages + rows * row_bytes;
  char* values = keys + heads.num_pages * page_bytes;
  apply_rope(qkv, freqs_cis, queries, heads.queries, heads.dim);
  if (heads.kv_format == KvFormat::BF16) {
    apply_rope(qkv + q, freqs_cis, (uint16_t*)keys, heads.kv, heads.dim);
    std::memcpy(values, qkv + q + kv, kv * 2);
    return;
  }
  for (long head = 0; head < heads.kv; head++) {
    const uint16_t* key = qkv + q + head * heads.dim;
    uint16_t rotated[MAX_HEAD_DIM];
    apply_rope(key, freqs_cis, rotated, 1, heads.dim);
    char* unit = units + 2 * (head * heads.page_size + slot);
    quantize(rotated, keys + head * row_bytes, unit, heads.dim);
    quantize(key + kv, values + head * row_bytes, unit + heads.num_pages * page_bytes, heads.dim);
  }
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
// pages two times num_pages, queries (rows, heads, dim).
void rope_and_store_bf16(const uint16_t* qkv, const float* freqs_cis, char* pages,
                         const int64_t* slots, uint16_t* queries, long rows, long heads,
                         long kv_heads, long dim, long num_pages, long page_size, long kv_format,
                         int threads) {
  const long width = heads * dim, all = width + 2 * kv_heads * dim;
#pragma omp parallel for num_threads(threads) if (rows * all >= MIN_PARALLEL_WORK)
  for (long row = 0; row < rows; row++)
    rope_and_store(qkv + row * all, freqs_cis + row * dim, pages, slots[row], queries + row * width,
                   {heads, kv_heads, dim, num_pages, page_size, (KvFormat)kv_format});
}
}
