// Matrix products with packed weights: bf16 rows in, bf16 or float32 rows out, float32 sums. The
// method is BLIS's (Van Zee and van de Geijn, 2015): blocks for the caches, packed operands, and a
// kernel that keeps a tile of sums in registers. The layout of a weight is in packed_weight.h. At
// one row it reads 31 of 35 GB/s that the memory gives; torch's product read 19.
//
// linear.py owns the tensors and checks the shapes. Every sum runs over k in the same order for any
// M and any number of threads: a row of x gives the same bytes alone as in any batch. AMX tiles
// (amx.h) add in another order than vectors; so they do all products with a weight, or none.
#include <algorithm>
#include <utility>

#include "packed_weight.h"
#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512BF16__)
#include "amx.h"
#define HAS_TILES
#endif

namespace {

// One K block of a weight block, from k = `begin` to `end`: the weights, what to prefetch, and how
// many bytes of that at each step, since all row blocks together fetch it once.
struct WeightBlock {
  const Weight& weight;
  const float* scales;  // and offsets (groups, 2, 32), of the group that `begin` is in and on
  const char *weights, *next;
  long fetched, begin, end;
};

// What a row block of x leaves: 32 sums a row, over the group that is not complete yet, and over
// those that are.
struct Sums {
  float *group, *totals;
};

template <int R> void fetch(const char* line) {
  if constexpr (R <= L1_PREFETCH_ROWS)
    __builtin_prefetch(line);
  else
    __builtin_prefetch(line, 0, 2);  // into L2
}

// A group is complete: its sums, of R rows of x and 2 LANES rows of the weight, go to the totals,
// and begin again from zero. x_sums (R): of x over this group, where there are offsets. Inlined, so
// that the sums stay in their registers.
template <int R>
[[gnu::always_inline]] inline void add_group(Floats (&sums)[R][2], const float* scales,
                                             const float* x_sums, bool has_offsets, float* totals) {
#pragma GCC unroll 2
  for (int half = 0; half < 2; half++) {
    const Floats scale = load<Floats>(scales + half * LANES);
    const Floats offset = load<Floats>(scales + N_BLOCK + half * LANES);
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
      Floats total = load<Floats>(totals + r * N_BLOCK + half * LANES);
      add_product(total, sums[r][half], scale);
      if (has_offsets) add_product(total, offset, x_sums[r]);
      store(totals + r * N_BLOCK + half * LANES, total);
      sums[r][half] = Floats{};
    }
  }
}

// R rows of x as (K/2, R) pairs, times one K block of a weight block. x_sums (G, R): x over each
// group.
template <class Kind, int R>
void tile(const Pair* x, const float* x_sums, const WeightBlock& block, Sums to) {
  const Kind kind(block.weight.table);
  const long width = block.weight.group;
  for (int first = 0; first < N_BLOCK; first += 2 * LANES) {
    Floats sums[R][2];
    for (int r = 0; r < R; r++) std::memcpy(sums[r], to.group + r * N_BLOCK + first, sizeof sums[r]);
    const char *w = block.weights + first * Kind::ROW_BYTES, *next = block.next;
    const Pair* in = x;
    const float *scales = block.scales + first, *x_sums_of = x_sums + block.begin / width * R;
    long group_end = (block.begin / width + 1) * width;
    for (long k = block.begin, stop; k < block.end; k = stop) {
      stop = std::min(group_end, block.end);
      for (const Pair* end = in + (stop - k) / 2 * R; in < end; w += Kind::STEP) {
        fetch<R>(next);
        if constexpr (Kind::STEP > 64) fetch<R>(next + block.fetched / 2);
        next += block.fetched;
#pragma GCC unroll 4
        for (int j = 0; j < Kind::PAIRS; j++, in += R) {
          const Pairs left = kind.pairs(w, j), right = kind.pairs(w + LANES * Kind::ROW_BYTES, j);
#pragma GCC unroll 16
          for (int r = 0; r < R; r++) {
            multiply_add(sums[r][0], left, in[r]);
            multiply_add(sums[r][1], right, in[r]);
          }
        }
      }
      if (stop < group_end || !block.weight.per_group) continue;
      add_group<R>(sums, scales, x_sums_of, block.weight.per_group > 1, to.totals + first);
      scales += 2 * N_BLOCK, x_sums_of += R, group_end += width;
    }
    for (int r = 0; r < R; r++) std::memcpy(to.group + r * N_BLOCK + first, sums[r], sizeof sums[r]);
  }
}

using Tile = void (*)(const Pair*, const float*, const WeightBlock&, Sums);

template <class Kind, int... R> Tile pick(long rows, std::integer_sequence<int, R...>) {
  static constexpr Tile TILES[] = {tile<Kind, R + 1>...};
  return TILES[rows - 1];
}

template <class Kind> Tile pick(long rows) {
  return pick<Kind>(rows, std::make_integer_sequence<int, ROWS>());
}

// A row block of x, bf16 (R, K) -> (K/2, R) pairs, for k from begin to end.
void pack_rows(const uint16_t* x, Pair* to, long rows, long k, long begin, long end) {
  for (long r = 0; r < rows; r++)
    for (long i = begin; i < end; i += 2) to[i / 2 * rows + r] = load_pair(x + r * k + i);
}

// The sum of `count` bf16, a multiple of 16.
float sum_of_row(const uint16_t* x, long count) {
  typedef uint32_t Words8 __attribute__((vector_size(32)));
  typedef float Floats8 __attribute__((vector_size(32)));
  Floats8 first = {}, second = {};
  for (long i = 0; i < count; i += 16) {
    const Words8 words = load<Words8>(x + i);
    first += (Floats8)(words << 16);
    second += (Floats8)(words & 0xffff0000u);
  }
  first += second;
  return ((first[0] + first[4]) + (first[1] + first[5])) +
         ((first[2] + first[6]) + (first[3] + first[7]));
}

// The layout of x as packed pairs: the row blocks one after the other, each (K/2, R); and behind
// them, where a weight has offsets, the sums over each group of k, (G, R) of each row block.
struct PackedPairs {
  long m, k, group;
  Parts row_blocks, m_blocks, k_blocks;
  PackedPairs(long m, const Weight& weight)
      : m(m), k(weight.k), group(weight.per_group > 1 ? weight.group : 0), row_blocks(m, ROWS),
        m_blocks(row_blocks.count, M_BLOCK / ROWS), k_blocks(k / 2, K_BLOCK / 2) {}

  long pieces() const { return row_blocks.count * k_blocks.count; }
  void pack(const uint16_t* x, char* to, long piece) const {
    const long block = piece / k_blocks.count, k_block = piece % k_blocks.count;
    const long row = row_blocks.first(block), rows = row_blocks.size(block);
    const long begin = 2 * k_blocks.first(k_block);
    pack_rows(x + row * k, (Pair*)to + row * (k / 2), rows, k, begin,
              begin + 2 * k_blocks.size(k_block));
    if (group) sum_groups(x, to, row, rows, k_block);
  }

  const Pair* pairs(const char* packed, long row, long rows, long begin) const {
    return (const Pair*)packed + row * (k / 2) + begin / 2 * rows;
  }
  float* sums(const char* packed, long row) const {
    return (float*)(packed + m * k * sizeof(float)) + (group ? row * (k / group) : 0);
  }

 private:
  void sum_groups(const uint16_t* x, char* to, long row, long rows, long k_block) const {
    const long groups = k / group, end = (k_block + 1) * groups / k_blocks.count;
    for (long g = k_block * groups / k_blocks.count; g < end; g++)
      for (long r = 0; r < rows; r++)
        sums(to, row)[g * rows + r] = sum_of_row(x + (row + r) * k + g * group, group);
  }
};

// Row blocks `from` to `to` of x, times one weight block -> their rows of 32 sums, which it returns.
// Several row blocks have the numbers unpacked once: the same numbers, so the same sums.
template <class Kind>
float* block_sums(const PackedPairs& x, const char* packed, long from, long to,
                        const Weight& weight, long block, float (*memory)[M_BLOCK * N_BLOCK]) {
  alignas(64) uint16_t wide[IS_BF16<Kind> ? 1 : K_BLOCK * N_BLOCK];
  alignas(64) float scales[IS_BF16<Kind> ? 1 : (K_BLOCK / LEAST_GROUP + 1) * 2 * N_BLOCK];
  const long first_row = x.row_blocks.first(from), row_blocks = to - from, k = weight.k;
  const long bytes = (x.row_blocks.first(to) - first_row) * N_BLOCK * sizeof(float);
  const bool is_unpacked = !IS_BF16<Kind> && row_blocks > 1;
  const bool is_near = row_blocks == 1 && x.row_blocks.size(from) <= L1_PREFETCH_ROWS;
  const long fetched = (is_unpacked ? 2 * K_BYTES<Kind> : Kind::STEP) / row_blocks;
  const long steps_of = is_unpacked ? 2 : 2 * Kind::PAIRS;  // k of a step
  std::memset(memory[0], 0, bytes);
  if (weight.per_group) std::memset(memory[1], 0, bytes);
  const Parameters parameters(weight, block);
  WeightBlock part{weight, scales, nullptr, nullptr, fetched, 0, 0};
  for (; part.begin < k; part.begin = part.end) {
    part.end = std::min(part.begin + K_BLOCK, k);
    const char* weights = weight.data + (block * k + part.begin) * K_BYTES<Kind>;
    if (is_unpacked) unpack<Kind>(weight, weights, wide, part.end - part.begin);
    parameters.unpack(part.begin / weight.group, part.end / weight.group, scales);
    part.weights = is_unpacked ? (const char*)wide : weights;
    part.next = weights + (is_near ? PREFETCH_BYTES : K_BLOCK * K_BYTES<Kind>);
    for (long b = from; b < to; b++) {
      const long row = x.row_blocks.first(b), rows = x.row_blocks.size(b);
      const long at = (row - first_row) * N_BLOCK;
      (is_unpacked ? pick<Bf16>(rows) : pick<Kind>(rows))(
          x.pairs(packed, row, rows, part.begin), x.sums(packed, row), part,
          {memory[0] + at, memory[1] + at});
      part.next += fetched * ((part.end - part.begin) / steps_of);
    }
  }
  return memory[weight.per_group ? 1 : 0];
}

// packed() gives the packed rows; it is called by each thread, when it comes to its first piece.
template <class Kind, class Packed>
void multiply_all(Worker& member, const PackedPairs& x, Packed packed, const Weight& weight,
                  const Outputs& out) {
  const long blocks = weight.n / N_BLOCK;
  alignas(64) float memory[2][M_BLOCK * N_BLOCK];
  float* sums = nullptr;
  const auto compute = [&](long item) {
    const long m_block = item / blocks;
    sums = block_sums<Kind>(x, packed(), x.m_blocks.first(m_block), x.m_blocks.first(m_block + 1),
                            weight, item % blocks, memory);
  };
  const auto write_out = [&](long item) {
    const long m_block = item / blocks, column = item % blocks * N_BLOCK;
    write(out, weight.n, sums, x.row_blocks.first(x.m_blocks.first(m_block)),
          x.row_blocks.first(x.m_blocks.first(m_block + 1)), column);
  };
  member.run(x.m_blocks.count * blocks, compute, write_out);
}

long align(long bytes) { return (bytes + 63) & -64; }

// Rows packed for a product, with their sums over groups, and before that normalised: two places in
// a workspace.
long packed_bytes(long m, long k) { return align(m * (k + k / LEAST_GROUP) * sizeof(float)); }
long rows_bytes(long m, long k) { return packed_bytes(m, k) + align(m * k * 2); }

// Few rows are normalised and packed by each thread for itself: it takes less than to wait. To
// rotate them takes more.
bool are_few(long m) { return m <= 16; }
bool are_few(long m, const Weight& weight) { return are_few(m) && !weight.is_rotated; }

template <class Kind, class Layout>
void product(Worker& member, const Rows& x, const Layout& layout, const Weight& weight,
             const Outputs& out, char* workspace) {
  const long m = x.count, k = weight.k;
  const bool is_changed = x.norm || weight.is_rotated;  // one of both
  char* own = workspace + (are_few(m, weight) ? member.index * rows_bytes(m, k) : 0);
  uint16_t* changed = (uint16_t*)(own + packed_bytes(m, k));
  const uint16_t* rows = is_changed ? changed : x.data;
  const auto change = [&](long row) {
    if (x.norm)
      rms_norm(x.data + row * k, x.norm, changed + row * k, k, x.eps);
    else
      hadamard(x.data + row * k, (float*)own + row * k, changed + row * k, k);
  };
  const auto pack = [&](long piece) { layout.pack(rows, own, piece); };
  bool is_packed = !are_few(m, weight);
  const auto packed = [&] {
    if (!is_packed) {
      for (long row = 0; row < m && is_changed; row++) change(row);
      for (long piece = 0; piece < layout.pieces(); piece++) pack(piece);
      is_packed = true;
    }
    return own;
  };
  if (is_packed) {
    if (is_changed) member.run(m, change);
    member.run(layout.pieces(), pack);
  }
  multiply_all<Kind>(member, layout, packed, weight, out);
}

template <class Kind>
void linear_of(Worker& member, const Rows& x, const Weight& weight, const Outputs& out,
               char* workspace) {
#if defined(HAS_TILES)
  if (weight.k % TILE_K == 0 && tiles_work()) {
    if constexpr (!IS_BF16<Kind>)
      if (x.count && x.count <= FEW_ROWS)
        return product<Kind>(member, x, FewRows{x.count, weight.k}, weight, out, workspace);
    return product<Kind>(member, x, PackedX(x.count, weight), weight, out, workspace);
  }
#endif
  product<Kind>(member, x, PackedPairs(x.count, weight), weight, out, workspace);
}

}  // namespace

long linear_bytes(long m, long k, long threads) {
  return m * MAX_RANK * sizeof(float) +
         rows_bytes(m, k) * (are_few(m) ? std::min(threads, MAX_THREADS) : 1);
}

void linear(Worker& member, Rows x, Weight weight, Outputs out, char* workspace) {
  if (weight.rank) {
    const Matrix down = {(const char*)weight.adaptor, nullptr, nullptr, Matrix::BF16, 0, 0,
                         weight.k, weight.is_rotated, nullptr, 0};
    float* middle = (float*)workspace;
    workspace += x.count * MAX_RANK * sizeof(float);
    linear(member, x, {down, weight.rank, weight.k}, {middle, Outputs::FLOAT32}, workspace);
    out.up = weight.adaptor + weight.rank * weight.k, out.middle = middle, out.rank = weight.rank;
  }
  constexpr decltype(&linear_of<Bf16>) RUN[] = {linear_of<Bf16>, linear_of<Int8>, linear_of<Fp8>,
                                                linear_of<Nibbles>};
  RUN[weight.numbers](member, x, weight, out, workspace);
}

extern "C" {

// Bytes of workspace for linear_packed.
long linear_workspace(long m, long k, long threads) { return linear_bytes(m, k, threads); }

// x (m, k) is bf16; out (m, n) too, or float32 if is_wide; n is a multiple of 32, k of 2.
void linear_packed(const uint16_t* x, const int64_t* matrix, void* out, char* workspace, long m,
                   long n, long k, bool is_wide, int threads) {
  const Outputs outputs = {out, is_wide ? Outputs::FLOAT32 : Outputs::BF16};
  run_team(threads, [&](Worker& member) {
    linear(member, {x, m}, {*(const Matrix*)matrix, n, k}, outputs, workspace);
  });
}
}
