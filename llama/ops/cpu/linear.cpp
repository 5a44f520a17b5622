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

// A part of a weight block: the weights, what to prefetch, and how many bytes of that at each step,
// since all row blocks together fetch it once.
struct WeightBlock {
  const char *weights, *next;
  long fetched, count;  // how many k
};

// The groups of such a part, where it has whole ones; scales, and offsets: (groups, 2, 32).
struct Groups {
  const Weight& weight;
  const float* scales;
};

template <class Kind, int R> void fetch(const char* line) {
  if constexpr (IS_BF16<Kind> && R <= L1_PREFETCH_ROWS)
    __builtin_prefetch(line);
  else
    __builtin_prefetch(line, 0, 2);  // into L2
}

// R rows of x as (K/2, R) pairs, times `count` k of SIDE vectors of the weight's rows, onto their
// sums. Inlined, so that these stay in their registers.
template <class Kind, int R, int SIDE>
[[gnu::always_inline]] inline void multiply(const Kind& kind, const Pair* x, const char* w,
                                            long count, const char*& next, long fetched,
                                            Floats (&sums)[R][SIDE]) {
  constexpr long LINES = std::max(Kind::STEP * SIDE * LANES / (64 * N_BLOCK), 1L);
  for (const Pair* end = x + count / 2 * R; x < end; w += Kind::STEP, next += fetched) {
    for (int line = 0; line < LINES; line++) fetch<Kind, R>(next + line * fetched / LINES);
    typename Kind::Step steps[SIDE];
#pragma GCC unroll 2
    for (int s = 0; s < SIDE; s++) steps[s] = kind.load(w + s * LANES * Kind::ROW_BYTES);
#pragma GCC unroll 8
    for (int j = 0; j < Kind::PAIRS; j++, x += R) {
      Pairs numbers[SIDE];
#pragma GCC unroll 2
      for (int s = 0; s < SIDE; s++) numbers[s] = kind.pairs(steps[s], j);
#pragma GCC unroll 16
      for (int r = 0; r < R; r++)
#pragma GCC unroll 2
        for (int s = 0; s < SIDE; s++) multiply_add(sums[r][s], numbers[s], x[r]);
    }
  }
}

// One group's sums, of R rows of x and SIDE vectors of the weight's, go to the totals. x_sums (R):
// of x over this group, where there are offsets.
template <int R, int SIDE>
[[gnu::always_inline]] inline void add_group(const Floats (&sums)[R][SIDE], const float* scales,
                                             const float* x_sums, bool has_offsets,
                                             Floats (&totals)[R][SIDE]) {
#pragma GCC unroll 2
  for (int s = 0; s < SIDE; s++) {
    const Floats scale = load<Floats>(scales + s * LANES);
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) add_product(totals[r][s], sums[r][s], scale);
    if (!has_offsets) continue;
    const Floats offset = load<Floats>(scales + N_BLOCK + s * LANES);
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) add_product(totals[r][s], offset, x_sums[r]);
  }
}

// R rows of x, times a part of a weight block, onto R rows of 32 sums. Of whole groups, x_sums (G,
// R) is x over each of them; without, all k are one sum.
template <class Kind, int R, bool HAS_GROUPS>
void tile(const Pair* x, const float* x_sums, const WeightBlock& block, const Groups& groups,
          float* to) {
  // The sums of a group and the totals both stay in the 32 registers.
  constexpr int SIDE = HAS_GROUPS && LANES == 16 && R > 6 ? 1 : 2;
  const Kind kind(groups.weight.table);
  const long width = groups.weight.group;
  for (int first = 0; first < N_BLOCK; first += SIDE * LANES) {
    Floats totals[R][SIDE];
    for (int r = 0; r < R; r++) std::memcpy(totals[r], to + r * N_BLOCK + first, sizeof totals[r]);
    const char* w = block.weights + first * Kind::ROW_BYTES;
    const char* next = block.next + first * block.fetched / N_BLOCK;
    if constexpr (HAS_GROUPS) {
      for (long group = 0; group < block.count / width; group++) {
        Floats sums[R][SIDE] = {};
        multiply(kind, x + group * width / 2 * R, w + group * width * K_BYTES<Kind>, width, next,
                 block.fetched, sums);
        add_group(sums, groups.scales + group * 2 * N_BLOCK + first, x_sums + group * R,
                  groups.weight.per_group > 1, totals);
      }
    } else {
      multiply(kind, x, w, block.count, next, block.fetched, totals);
    }
    for (int r = 0; r < R; r++) std::memcpy(to + r * N_BLOCK + first, totals[r], sizeof totals[r]);
  }
}

using Tile = void (*)(const Pair*, const float*, const WeightBlock&, const Groups&, float*);

template <class Kind, bool HAS_GROUPS, int... R>
Tile pick(long rows, std::integer_sequence<int, R...>) {
  static constexpr Tile TILES[] = {tile<Kind, R + 1, HAS_GROUPS>...};
  return TILES[rows - 1];
}

template <class Kind> Tile pick(long rows, bool has_groups) {
  constexpr std::make_integer_sequence<int, REGISTER_ROWS> ALL;
  return has_groups ? pick<Kind, true>(rows, ALL) : pick<Kind, false>(rows, ALL);
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
  Partition row_blocks, m_blocks, k_blocks;
  PackedPairs(long m, const Weight& weight)
      : m(m),
        k(weight.k),
        group(weight.per_group > 1 ? weight.group : 0),
        row_blocks(m, REGISTER_ROWS),
        m_blocks(row_blocks.count, M_BLOCK / REGISTER_ROWS),
        k_blocks(k / 2, K_BLOCK / 2) {}

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

// As add_group(), of a group whose sums (rows, 32) were in memory; they begin again from zero.
void add_long_group(float* sums, const float* scales, const float* x_sums, long rows,
                    bool has_offsets, float* totals) {
  for (long i = 0; i < rows * N_BLOCK; i += LANES) {
    Floats total[1][1] = {{load<Floats>(totals + i)}};
    const Floats sum[1][1] = {{load<Floats>(sums + i)}};
    add_group(sum, scales + i % N_BLOCK, x_sums + i / N_BLOCK, has_offsets, total);
    store(totals + i, total[0][0]);
    store(sums + i, Floats{});
  }
}

// Row blocks `from` to `to` of x, times one weight block -> their rows of 32 sums, which it
// returns. Several row blocks have the numbers unpacked once: the same numbers, so the same sums.
// Part by part: of whole groups, or of one that is longer, which is added to the totals when it is
// complete.
template <class Kind>
float* block_sums(const PackedPairs& x, const char* packed, long from, long to,
                  const Weight& weight, long block, float (*memory)[M_BLOCK * N_BLOCK]) {
  alignas(64) uint16_t wide[IS_BF16<Kind> ? 1 : K_BLOCK * N_BLOCK];
  alignas(64) float scales[IS_BF16<Kind> ? 1 : K_BLOCK / MIN_GROUP * 2 * N_BLOCK];
  const long first_row = x.row_blocks.first(from), row_blocks = to - from, k = weight.k;
  const long all_rows = x.row_blocks.first(to) - first_row, group = weight.group;
  const bool is_unpacked = !IS_BF16<Kind> && row_blocks > 1;
  const bool is_near = row_blocks == 1 && all_rows <= L1_PREFETCH_ROWS;
  const bool is_scaled = !IS_BF16<Kind> && weight.per_group;
  const bool has_groups = is_scaled && group <= K_BLOCK;
  const long fetched = (is_unpacked ? 2 * K_BYTES<Kind> : Kind::STEP) / row_blocks;
  const long steps_of = is_unpacked ? 2 : 2 * Kind::PAIRS;  // k of a step
  float *sums = memory[0], *totals = memory[is_scaled ? 1 : 0];
  std::memset(sums, 0, all_rows * N_BLOCK * sizeof(float));
  std::memset(totals, 0, all_rows * N_BLOCK * sizeof(float));
  const Parameters parameters(weight, block);
  const long ahead = is_near ? PREFETCH_BYTES<Kind> / K_BYTES<Kind> : K_BLOCK;
  const auto at_k = [&](long number) {  // behind the last k of a block comes the next block
    return weight.block(block + number / k) + number % k * K_BYTES<Kind>;
  };
  for (long begin = 0, end; begin < k; begin = end) {
    end = std::min(begin + (has_groups ? K_BLOCK / group * group : K_BLOCK), k);
    if (!has_groups) end = std::min(end, (begin / group + 1) * group);
    const char* weights = at_k(begin);
    if (is_unpacked) unpack<Kind>(weight, weights, wide, end - begin);
    parameters.unpack(begin / group, end / group, scales);
    parameters.prefetch(end / group, (2 * end - begin) / group);
    WeightBlock part{is_unpacked ? (const char*)wide : weights, at_k(begin + ahead), fetched,
                     end - begin};
    for (long b = from; b < to; b++) {
      const long row = x.row_blocks.first(b), rows = x.row_blocks.size(b);
      float* at = (has_groups ? totals : sums) + (row - first_row) * N_BLOCK;
      const float* x_sums = x.sums(packed, row) + begin / group * rows;
      (is_unpacked ? pick<Bf16>(rows, has_groups) : pick<Kind>(rows, has_groups))(
          x.pairs(packed, row, rows, begin), x_sums, part, {weight, scales}, at);
      part.next += fetched * (part.count / steps_of);
      if (is_scaled && !has_groups && end % group == 0)
        add_long_group(at, scales, x_sums, rows, weight.per_group > 1,
                       totals + (row - first_row) * N_BLOCK);
    }
  }
  return totals;
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
long packed_bytes(long m, long k) { return align(m * (k + k / MIN_GROUP) * sizeof(float)); }
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
    if constexpr (std::is_same_v<Kind, Nibbles>)
      if (x.count && x.count <= TILE_ROWS && has_groups(weight) && weight.group % TILE_K == 0)
        return product<Kind>(member, x, RowsAsPairs{x.count, weight.k}, weight, out, workspace);
    if constexpr (!IS_BF16<Kind>)
      if (x.count && x.count <= FEW_ROWS)
        return product<Kind>(member, x, FewRows{x.count, weight.k}, weight, out, workspace);
    return product<Kind>(member, x, PackedX(x.count, weight), weight, out, workspace);
  }
#endif
  product<Kind>(member, x, PackedPairs(x.count, weight), weight, out, workspace);
}

// A row of a weight as bf16: the product with the scale is rounded, then the sum with the offset.
template <class Kind> void unpack_row(const Weight& weight, long row, uint16_t* out) {
  alignas(64) uint16_t wide[K_BLOCK * N_BLOCK];
  alignas(64) float parameters[(K_BLOCK / MIN_GROUP + 1) * 2 * N_BLOCK];
  const Parameters all(weight, row / N_BLOCK);
  for (long begin = 0, end; begin < weight.k; begin = end) {
    end = std::min(begin + K_BLOCK, weight.k);
    unpack<Kind>(weight, weight.block(row / N_BLOCK) + begin * K_BYTES<Kind>, wide, end - begin);
    const long first = begin / weight.group;
    all.unpack(first, (end - 1) / weight.group + 1, parameters);
    for (long i = begin; i < end; i++) {
      float number = widen(wide[((i - begin) / 2 * N_BLOCK + row % N_BLOCK) * 2 + i % 2]);
      const float* own = parameters + (i / weight.group - first) * 2 * N_BLOCK + row % N_BLOCK;
      if (all.count) number *= own[0];
      asm("" : "+x"(number));  // so that the compiler does not make one operation of both
      out[i] = to_bf16(all.count > 1 ? number + own[N_BLOCK] : number);
    }
  }
}

}  // namespace

long linear_bytes(long m, long k, long threads) {
  return m * MAX_RANK * sizeof(float) +
         rows_bytes(m, k) * (are_few(m) ? std::min(threads, MAX_THREADS) : 1);
}

void linear(Worker& member, Rows x, Weight weight, Outputs out, char* workspace) {
  if (weight.rank) {
    const Matrix down = {(const char*)weight.adapter,
                         nullptr,
                         nullptr,
                         ElementFormat::BF16,
                         ScaleFormat::FLOAT32,
                         0,
                         weight.k,
                         weight.is_rotated,
                         nullptr,
                         0,
                         weight.k * K_BYTES<Bf16>};
    float* down_outputs = (float*)workspace;
    workspace += x.count * MAX_RANK * sizeof(float);
    linear(member, x, {down, weight.rank, weight.k}, {down_outputs, Outputs::FLOAT32}, workspace);
    out.up = weight.adapter + weight.rank * weight.k;
    out.down_outputs = down_outputs;
    out.rank = weight.rank;
  }
  constexpr decltype(&linear_of<Bf16>) RUN[] = TABLE_BY_FORMAT(linear_of);
  RUN[(int64_t)weight.format](member, x, weight, out, workspace);
}

extern "C" {

// Bytes of workspace for linear_packed.
long linear_workspace(long m, long k, long threads) { return linear_bytes(m, k, threads); }

// Rows `ids` (t) of a weight that has no adapter -> out (t, k) bf16; whether all ids are in [0, n).
long weight_rows(const int64_t* ids, const int64_t* matrix, uint16_t* out, long t, long n, long k,
                 long threads) {
  constexpr decltype(&unpack_row<Bf16>) RUN[] = TABLE_BY_FORMAT(unpack_row);
  const Weight weight = {*(const Matrix*)matrix, n, k};
  if (!std::all_of(ids, ids + t, [&](int64_t id) { return id >= 0 && id < n; })) return false;
#pragma omp parallel for num_threads(std::min(t, threads)) if (t > 1)
  for (long i = 0; i < t; i++) RUN[(int64_t)weight.format](weight, ids[i], out + i * k);
  return true;
}

// x (m, k) is bf16; out (m, n) too, or float32 if is_wide; n is a multiple of 32, k of 2.
void linear_packed(const uint16_t* x, const int64_t* matrix, void* out, char* workspace, long m,
                   long n, long k, bool is_wide, int threads) {
  const Outputs outputs = {out, is_wide ? Outputs::FLOAT32 : Outputs::BF16};
  run_team(threads, [&](Worker& member) {
    linear(member, {x, m}, {*(const Matrix*)matrix, n, k}, outputs, workspace);
  });
}
}
