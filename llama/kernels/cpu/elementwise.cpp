// The operators of a layer between its matrix products: RMSNorm (Zhang and Sennrich, 2019), RoPE
// (Su et al., 2021) with the store into the KV cache, SwiGLU (Shazeer, 2020), and the Hadamard
// transform of rotated weights.
//
// In: contiguous rows of bf16, each a multiple of 32 elements. Out: rows of bf16, or keys and
// values in pages of the KV cache (bf16 or int8). Arithmetic is in float32. Each operator is one
// pass over memory, whereas PyTorch makes a pass for each elementary operation.
//
// norm.py, rope.py, swiglu.py and kv_cache.py own the tensors and contain the definitions in
// PyTorch. Intermediate results are rounded to bf16 where the definitions round them.
//
// A UInts vector holds pairs of bf16 (see vectors.h). `even` is the vector of the even elements as
// float32, and `odd` the vector of the odd elements.
#include "kernels.h"
#include "vectors.h"

namespace {

constexpr long STEP = 2 * LANES;             // bf16 elements per vector
constexpr long MIN_PARALLEL_WORK = 1 << 16;  // elements; below, waking the threads takes longer

Floats silu(Floats x) { return x / (exp(-x) + 1); }

// Returns the even elements of a, then those of b.
template <uint32_t... I>
Floats evens_of(Floats a, Floats b, std::integer_sequence<uint32_t, I...>) {
  return __builtin_shuffle(a, b, UInts{(2 * I)...});
}

// Returns the odd elements of a, then those of b.
template <uint32_t... I> Floats odds_of(Floats a, Floats b, std::integer_sequence<uint32_t, I...>) {
  return __builtin_shuffle(a, b, UInts{(2 * I + 1)...});
}

// Rotates `count` heads of one token: heads (count, dim) bf16 and freqs_cis (dim / 2, 2), the
// cosine and sine for each pair -> out (count, dim). It is not inlined, so that all callers get the
// same rounding: the compiler chooses which products it fuses.
__attribute__((noinline)) void apply_rope(const uint16_t* heads, const float* freqs_cis,
                                          uint16_t* out, long count, long dim) {
  for (long i = 0; i < dim; i += STEP) {
    const Floats left = load<Floats>(freqs_cis + i);
    const Floats right = load<Floats>(freqs_cis + i + LANES);
    const Floats cosine = evens_of(left, right, Lanes());
    const Floats sine = odds_of(left, right, Lanes());
    for (long offset = i; offset < count * dim; offset += dim) {
      const UInts pairs = load<UInts>(heads + offset);
      const Floats even = widen_even(pairs);
      const Floats odd = widen_odd(pairs);
      store(out + offset, to_bf16(even * cosine - odd * sine, even * sine + odd * cosine));
    }
  }
}

// Quantizes one row of the KV cache: x (dim) bf16 -> int8 elements from -127 to 127, and their bf16
// scale. The scale is the largest magnitude over 127, but at least 2^-100. Magnitudes are compared
// as integers, in which a NaN is larger than any number, so the scale of a row with a NaN is NaN.
void quantize(const uint16_t* x, char* elements, char* scale_out, long dim) {
  UInts max_bits = {};
  for (long i = 0; i < dim; i += STEP) {
    const UInts pairs = load<UInts>(x + i);
    const UInts even = pairs << 16 & 0x7fffffffu;
    const UInts odd = pairs & 0x7fff0000u;
    max_bits = even > max_bits ? even : max_bits;
    max_bits = odd > max_bits ? odd : max_bits;
  }
  uint32_t bits = 0;
  for (int lane = 0; lane < LANES; lane++) bits = std::max(bits, (uint32_t)max_bits[lane]);
  const float exact_scale = widen(bits >> 16) / 127;
  const float min_scale = 0x1p-100f;
  const uint16_t scale = to_bf16(exact_scale < min_scale ? min_scale : exact_scale);
  std::memcpy(scale_out, &scale, 2);
  for (long i = 0; i < dim; i += STEP) {
    const UInts pairs = load<UInts>(x + i);
    const Floats even = widen_even(pairs) / widen(scale);
    const Floats odd = widen_odd(pairs) / widen(scale);
    store_int8(elements + i, interleave_low(even, odd, Lanes()));
    store_int8(elements + i + LANES, interleave_high(even, odd, Lanes()));
  }
}

// Multiplies x (count) by Sylvester's Hadamard matrix in place, as the fast Walsh-Hadamard
// transform does: log2(count) passes of sums and differences. The count is a power of two and at
// least LANES.
template <uint32_t... I>
void transform(float* x, long count, std::integer_sequence<uint32_t, I...>) {
  const UInts lanes = {I...};
  for (long i = 0; i < count; i += LANES) {
    Floats v = load<Floats>(x + i);
    for (uint32_t distance = 1; distance < LANES; distance *= 2) {
      // The sign bit is set in the lanes that get a difference.
      const UInts signs = lanes * (0x80000000u / distance) & 0x80000000u;
      v = __builtin_shuffle(v, lanes ^ distance) + (Floats)((UInts)v ^ signs);
    }
    store(x + i, v);
  }
  for (long distance = LANES; distance < count; distance *= 2)
    for (long begin = 0; begin < count; begin += 2 * distance)
      for (long i = begin; i < begin + distance; i += LANES) {
        const Floats first = load<Floats>(x + i);
        const Floats second = load<Floats>(x + i + distance);
        store(x + i, first + second);
        store(x + i + distance, first - second);
      }
}

}  // namespace

void hadamard(const uint16_t* x, float* workspace, uint16_t* out, long width) {
  const long half = width / 2;
  const float scale = 1 / square_root(width);
  // The first pass adds and subtracts the elements of each pair; the transform does the others.
  float* sums = workspace;
  float* differences = workspace + half;
  for (long i = 0; i < half; i += LANES) {
    const UInts pairs = load<UInts>(x + 2 * i);
    store(sums + i, widen_even(pairs) + widen_odd(pairs));
    store(differences + i, widen_even(pairs) - widen_odd(pairs));
  }
  transform(sums, half, Lanes());
  transform(differences, half, Lanes());
  for (long i = 0; i < half; i += LANES) {
    const Floats even = load<Floats>(sums + i) * scale;
    const Floats odd = load<Floats>(differences + i) * scale;
    store(out + 2 * i, to_bf16(even, odd));
  }
}

void rms_norm(const uint16_t* x, const uint16_t* weight, uint16_t* out, long width, float eps) {
  Floats sums[2] = {};
  for (long i = 0; i < width; i += STEP) {
    const UInts pairs = load<UInts>(x + i);
    sums[0] += widen_even(pairs) * widen_even(pairs);
    sums[1] += widen_odd(pairs) * widen_odd(pairs);
  }
  const float mean = reduce_add(sums[0] + sums[1]) / width;
  const float scale = 1 / square_root(mean + eps);
  for (long i = 0; i < width; i += STEP) {
    const UInts pairs = load<UInts>(x + i);
    const UInts weight_pairs = load<UInts>(weight + i);
    const Floats even = round_to_bf16(widen_even(pairs) * scale) * widen_even(weight_pairs);
    const Floats odd = round_to_bf16(widen_odd(pairs) * scale) * widen_odd(weight_pairs);
    store(out + i, to_bf16(even, odd));
  }
}

void silu_mul(const uint16_t* gate, const uint16_t* up, uint16_t* out, long width) {
  for (long i = 0; i < width; i += STEP) {
    const UInts gate_pairs = load<UInts>(gate + i);
    const UInts up_pairs = load<UInts>(up + i);
    const Floats even = round_to_bf16(silu(widen_even(gate_pairs))) * widen_even(up_pairs);
    const Floats odd = round_to_bf16(silu(widen_odd(gate_pairs))) * widen_odd(up_pairs);
    store(out + i, to_bf16(even, odd));
  }
}

void rope_and_store(const uint16_t* qkv, const float* freqs_cis, char* pages, int64_t slot,
                    uint16_t* queries, const QkvShape& shape) {
  const long query_width = shape.heads * shape.dim;
  const long kv_width = shape.kv_heads * shape.dim;
  const long page_rows = shape.page_size * shape.kv_heads;
  const long page = slot / shape.page_size;
  const long page_bytes = page_rows * kv_row_bytes(shape.dim, shape.format);
  const long row_bytes = shape.dim * kv_element_bytes(shape.format);
  slot %= shape.page_size;
  pages += page * page_bytes;
  char* keys = pages + slot * shape.kv_heads * row_bytes;
  char* scales = pages + page_rows * row_bytes;  // (kv_heads, page_size)
  char* values = keys + shape.num_pages * page_bytes;
  apply_rope(qkv, freqs_cis, queries, shape.heads, shape.dim);
  if (shape.format == KvFormat::BF16) {
    apply_rope(qkv + query_width, freqs_cis, (uint16_t*)keys, shape.kv_heads, shape.dim);
    std::memcpy(values, qkv + query_width + kv_width, kv_width * 2);
    return;
  }
  for (long head = 0; head < shape.kv_heads; head++) {
    const uint16_t* key = qkv + query_width + head * shape.dim;
    uint16_t rotated[MAX_HEAD_DIM];
    apply_rope(key, freqs_cis, rotated, 1, shape.dim);
    char* key_scale = scales + 2 * (head * shape.page_size + slot);
    quantize(rotated, keys + head * row_bytes, key_scale, shape.dim);
    quantize(key + kv_width, values + head * row_bytes, key_scale + shape.num_pages * page_bytes,
             shape.dim);
  }
}

extern "C" {

// x and out (rows, width), weight (width), all bf16.
void rms_norm_bf16(const uint16_t* x, const uint16_t* weight, uint16_t* out, long rows, long width,
                   float eps, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * width >= MIN_PARALLEL_WORK)
  for (long row = 0; row < rows; row++)
    rms_norm(x + row * width, weight, out + row * width, width, eps);
}

// x (rows, 2 * width), the gate followed by up; out (rows, width); both bf16.
void silu_mul_bf16(const uint16_t* x, uint16_t* out, long rows, long width, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * width >= MIN_PARALLEL_WORK)
  for (long row = 0; row < rows; row++) {
    const uint16_t* gate = x + row * 2 * width;
    silu_mul(gate, gate + width, out + row * width, width);
  }
}

// qkv (rows, heads + 2 * kv_heads, dim) bf16, freqs_cis (rows, dim / 2, 2), slots (rows) -> queries
// (rows, heads, dim), and keys and values in the pages: num_pages pages of keys, then as many of
// values.
void rope_and_store_bf16(const uint16_t* qkv, const float* freqs_cis, char* pages,
                         const int64_t* slots, uint16_t* queries, long rows, long heads,
                         long kv_heads, long dim, long num_pages, long page_size, long kv_format,
                         int threads) {
  const long query_width = heads * dim;
  const long qkv_width = query_width + 2 * kv_heads * dim;
#pragma omp parallel for num_threads(threads) if (rows * qkv_width >= MIN_PARALLEL_WORK)
  for (long row = 0; row < rows; row++)
    rope_and_store(qkv + row * qkv_width, freqs_cis + row * dim, pages, slots[row],
                   queries + row * query_width,
                   {heads, kv_heads, dim, num_pages, page_size, (KvFormat)kv_format});
}
}
