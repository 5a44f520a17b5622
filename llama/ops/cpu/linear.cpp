// Matrix products with packed weights: bf16 rows in, bf16 or float32 rows out, float32 sums. The
// method is BLIS's (Van Zee and van de Geijn, 2015): blocks for the caches, packed operands, and a
// kernel that keeps a tile of sums in registers. The layout of a weight is in packed_weight.h. At
// one row it reads 31 of 35 GB/s that the memory gives; torch's product read 19.
//
// linear.py owns the tensors and checks the shapes. Every sum runs over k in the same order for any
// M and any number of threads: a row of x gives the same bytes alone as in any batch. AMX tiles
// (amx.h) add in another order than vectors; so they do all products with a weight, or none.
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
template <class Kind, int R> void tile(const Pair* x, WeightBlock k_block, float* totals) {
  constexpr long STEP = 2 * N_BLOCK * Kind::BYTES;  // from one pair of k to the next
  for (int first = 0; first < N_BLOCK; first += 2 * LANES) {
    Floats sums[R][2];
    for (int r = 0; r < R; r++) std::memcpy(sums[r], totals + r * N_BLOCK + first, sizeof sums[r]);
    const char *w = k_block.weights + first * 2 * Kind::BYTES, *next = k_block.next;
    for (const Pair *in = x, *end = x + k_block.pairs * R; in < end; in += R, w += STEP) {
      fetch<R>(next);
      if constexpr (STEP > 64) fetch<R>(next + k_block.fetched / 2);
      next += k_block.fetched;
      const Pairs left = Kind::pairs(w), right = Kind::pairs(w + LANES * 2 * Kind::BYTES);
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

template <class Kind, int... R> Tile pick(long rows, std::integer_sequence<int, R...>) {
  static constexpr Tile TILES[] = {tile<Kind, R + 1>...};
  return TILES[rows - 1];
}

// A row block of x, bf16 (R, K) -> (K/2, R) pairs, for k from begin to end.
void pack_rows(const uint16_t* x, Pair* to, long rows, long k, long begin, long end) {
  for (long r = 0; r < rows; r++)
    for (long i = begin; i < end; i += 2) to[i / 2 * rows + r] = load_pair(x + r * k + i);
}

// Row blocks `from` to `to` of x, times one weight block -> their rows of 32 sums, in `totals`.
template <class Kind>
void block_sums(const Pair* x, const Parts& row_blocks, long from, long to, const char* block,
                long k, float* totals) {
  const long first_row = row_blocks.first(from);
  std::memset(totals, 0, (row_blocks.first(to) - first_row) * N_BLOCK * sizeof(float));
  for (long begin = 0; begin < k; begin += K_BLOCK) {
    const long pairs = (k - begin < K_BLOCK ? k - begin : K_BLOCK) / 2;
    const long fetched = 2 * N_BLOCK * Kind::BYTES / (to - from);
    const char* weights = block + begin * N_BLOCK * Kind::BYTES;
    const bool is_near = to - from == 1 && row_blocks.size(from) <= L1_PREFETCH_ROWS;
    const char* next = weights + (is_near ? PREFETCH_BYTES : K_BLOCK * N_BLOCK * Kind::BYTES);
    for (long b = from; b < to; b++) {
      const long row = row_blocks.first(b), rows = row_blocks.size(b);
      const WeightBlock k_block{weights, next + (b - from) * fetched * pairs, pairs, fetched};
      pick<Kind>(rows, std::make_integer_sequence<int, ROWS>())(
          x + row * (k / 2) + begin / 2 * rows, k_block, totals + (row - first_row) * N_BLOCK);
    }
  }
}

// The layout of x as packed pairs: the row blocks one after the other, each (K/2, R).
struct PackedPairs {
  long k;
  Parts row_blocks, m_blocks, k_blocks;
  PackedPairs(long m, long k)
      : k(k), row_blocks(m, ROWS), m_blocks(row_blocks.count, M_BLOCK / ROWS),
        k_blocks(k / 2, K_BLOCK / 2) {}

  long pieces() const { return row_blocks.count * k_blocks.count; }
  void pack(const uint16_t* x, char* to, long piece) const {
    const long block = piece / k_blocks.count, k_block = piece % k_blocks.count;
    const long row = row_blocks.first(block), begin = 2 * k_blocks.first(k_block);
    pack_rows(x + row * k, (Pair*)to + row * (k / 2), row_blocks.size(block), k, begin,
              begin + 2 * k_blocks.size(k_block));
  }
};

// packed() gives the packed rows; it is called by each thread, when it comes to its first piece.
template <class Kind, class Packed>
void multiply_all(Worker& member, const PackedPairs& x, Packed packed, const Weight& weight,
                  const Outputs& out) {
  const long blocks = weight.n / N_BLOCK;
  alignas(64) float totals[M_BLOCK * N_BLOCK];
  const auto compute = [&](long item) {
    const long m_block = item / blocks, column = item % blocks * N_BLOCK;
    block_sums<Kind>((const Pair*)packed(), x.row_blocks, x.m_blocks.first(m_block),
                     x.m_blocks.first(m_block + 1),
                     weight.data + column * weight.k * Kind::BYTES, weight.k, totals);
  };
  const auto write_out = [&](long item) {
    const long m_block = item / blocks, column = item % blocks * N_BLOCK;
    write(out, weight, totals, x.row_blocks.first(x.m_blocks.first(m_block)),
          x.row_blocks.first(x.m_blocks.first(m_block + 1)), column);
  };
  member.run(x.m_blocks.count * blocks, compute, write_out);
}

long align(long bytes) { return (bytes + 63) & -64; }

// Rows packed for a product, and before that normalised: two places in a workspace.
long packed_bytes(long m, long k) { return align(m * k * sizeof(float)); }
long rows_bytes(long m, long k) { return packed_bytes(m, k) + align(m * k * 2); }

// Few rows are normalised and packed by each thread for itself: it takes less than to wait.
bool are_few(long m) { return m <= 16; }

template <class Kind, class Layout>
void product(Worker& member, const Rows& x, const Layout& layout, const Weight& weight,
             const Outputs& out, char* workspace) {
  const long m = x.count, k = weight.k;
  char* own = workspace + (are_few(m) ? member.index * rows_bytes(m, k) : 0);
  uint16_t* normed = (uint16_t*)(own + packed_bytes(m, k));
  const uint16_t* rows = x.norm ? normed : x.data;
  const auto normalise = [&](long row) {
    rms_norm(x.data + row * k, x.norm, normed + row * k, k, x.eps);
  };
  const auto pack = [&](long piece) { layout.pack(rows, own, piece); };
  bool is_packed = !are_few(m);
  const auto packed = [&] {
    if (!is_packed) {
      for (long row = 0; row < m && x.norm; row++) normalise(row);
      for (long piece = 0; piece < layout.pieces(); piece++) pack(piece);
      is_packed = true;
    }
    return own;
  };
  if (is_packed) {
    if (x.norm) member.run(m, normalise);
    member.run(layout.pieces(), pack);
  }
  multiply_all<Kind>(member, layout, packed, weight, out);
}

template <class Kind>
void linear_of(Worker& member, const Rows& x, const Weight& weight, const Outputs& out,
               char* workspace) {
#if defined(HAS_TILES)
  if (weight.k % TILE_K == 0 && tiles_work())
    return product<Kind>(member, x, PackedX(x.count, weight.k), weight, out, workspace);
#endif
  product<Kind>(member, x, PackedPairs(x.count, weight.k), weight, out, workspace);
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

long linear_bytes(long m, long k, long threads) {
  return rows_bytes(m, k) * (are_few(m) ? std::min(threads, MAX_THREADS) : 1);
}

void linear(Worker& member, Rows x, Weight weight, Outputs out, char* workspace) {
  const auto run = weight.scales ? linear_of<Int8> : linear_of<Bf16>;
  run(member, x, weight, out, workspace);
}

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

// Bytes of workspace for linear_bf16 and linear_int8.
long linear_workspace(long m, long k, long threads) { return linear_bytes(m, k, threads); }

// x (m, k) is bf16; out (m, n) too, or float32 if is_wide; n is a multiple of 32, k of 2.
void linear_int8(const uint16_t* x, const char* weight, const float* scales, void* out,
                 char* workspace, long m, long n, long k, bool is_wide, int threads) {
  const Outputs outputs = {out, is_wide ? Outputs::FLOAT32 : Outputs::BF16};
  run_team(threads, [&](Worker& member) {
    linear(member, {x, m}, {weight, scales, n, k}, outputs, workspace);
  });
}

void linear_bf16(const uint16_t* x, const char* weight, void* out, char* workspace, long m, long n,
                 long k, bool is_wide, int threads) {
  linear_int8(x, weight, nullptr, out, workspace, m, n, k, is_wide, threads);
}
}
