// Matrix products with packed weights: x (M, K) of bf16 times a weight (N, K) -> (M, N) of bf16 or
// float32, with float32 sums. The method is that of BLIS (Van Zee and van de Geijn, 2015): blocks
// for the caches, packed operands, and a kernel that keeps a tile of sums in registers.
// packed_weight.h has the layouts of a weight. With one row, a product reads 31 of the 35 GB/s that
// the memory delivers (one Zen 4 core); PyTorch's product read 19.
//
// linear.py owns the tensors and checks the shapes. Every sum runs over k in the same order for any
// M and any number of threads, so a row of x gives the same bytes alone as in any batch. AMX tiles
// (amx.h) add bf16 in another order than vectors. Therefore they compute all products with a
// weight, or none.
//
// The file has slightly more than 400 lines, because the kernel, the packing of x and the blocking
// share one layout.
#include <algorithm>
#include <utility>

#include "packed_weight.h"
#include "rounded_rows.h"
#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__)
#include "amx_few_rows.h"
#include "amx_int8.h"
#define HAS_TILES
#endif

namespace {

// A part of a weight block, some k of its 32 rows, and the memory to prefetch meanwhile. All row
// blocks together prefetch it once, so each step fetches only a share of a step's bytes.
struct WeightBlock {
  const char *weights, *prefetch;
  long step_prefetch;  // bytes to prefetch at each step
  long count;          // number of k
};

// The scales and offsets of the groups of such a part, if it consists of whole groups: (G, 2, 32).
struct Groups {
  const Weight& weight;
  const float* scales;
};

// Prefetches a cache line into L1 if R rows are few and the weight is bf16, else into L2.
template <class Kind, int R> void fetch(const char* line) {
  if constexpr (IS_BF16<Kind> && R <= L1_PREFETCH_ROWS)
    __builtin_prefetch(line);
  else
    __builtin_prefetch(line, 0, 2);  // into L2
}

// The place of a pair of x, of row r and k = i and i + 1, in a row block (k / 2, rows). Where
// matrices are multiplied, four k of a row lie together: (k / 4, rows, 2). The last two k of a row
// may be left over.
inline long place_of(long i, long r, long rows, long k) {
#if defined(HAS_MATRICES)
  if (i < (k & -4)) return (i / 4 * rows + r) * 2 + i / 2 % 2;
#endif
  (void)k;
  return i / 2 * rows + r;
}

#if defined(HAS_MATRICES)
// Does what multiply() does, for fours of k, and moves x and w after them.
template <class Kind, int R, int VECTORS>
[[gnu::always_inline]] inline void multiply_fours(const Kind& kind, const Pair*& x, const char*& w,
                                                  long count, const char*& prefetch,
                                                  long step_prefetch, Floats (&sums)[R][VECTORS]) {
  constexpr int STEPS = Kind::PAIRS == 1 ? 2 : 1;  // the fewest that have four k
  to_matrices(sums);
  for (const Pair* end = x + count / 4 * 2 * R; x < end;) {
    typename Kind::Step steps[STEPS][VECTORS];
#pragma GCC unroll 2
    for (int s = 0; s < STEPS; s++, w += Kind::STEP, prefetch += step_prefetch) {
      fetch<Kind, R>(prefetch);
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; v++) steps[s][v] = kind.load(w + v * LANES * Kind::ROW_BYTES);
    }
#pragma GCC unroll 4
    for (int j = 0; j < STEPS * Kind::PAIRS; j += 2, x += 2 * R) {
      UInts first[VECTORS], second[VECTORS], low[VECTORS], high[VECTORS];
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; v++) {
        first[v] = (UInts)kind.pairs(steps[0][v], j);
        second[v] = (UInts)kind.pairs(steps[STEPS - 1][v], j + 1);
        low[v] = low_rows(first[v], second[v]);
        high[v] = high_rows(first[v], second[v]);
      }
#pragma GCC unroll 16
      for (int r = 0; r + 1 < R; r += 2) {
        const UInts two_rows = load<UInts>(x + 2 * r);
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) {
          add_matrix(sums[r][v], low[v], two_rows);
          add_matrix(sums[r + 1][v], high[v], two_rows);
        }
      }
#pragma GCC unroll 4
      for (int v = 0; R % 2 && v < VECTORS; v++) {
        multiply_add(sums[R - 1][v], (Pairs)first[v], x[2 * R - 2]);
        multiply_add(sums[R - 1][v], (Pairs)second[v], x[2 * R - 1]);
      }
    }
  }
  from_matrices(sums);
}
#endif

// Adds the products of R rows of x, as (count / 2, R) pairs, and `count` k of VECTORS vectors of
// rows of the weight to the sums. It moves `prefetch` forward by `step_prefetch` bytes at each
// step. Inlined, so that the sums stay in registers.
template <class Kind, int R, int VECTORS>
[[gnu::always_inline]] inline void multiply(const Kind& kind, const Pair* x, const char* w,
                                            long count, const char*& prefetch, long step_prefetch,
                                            Floats (&sums)[R][VECTORS]) {
  constexpr long LINES = std::max(Kind::STEP * VECTORS * LANES / (64 * N_BLOCK), 1L);
  const Pair* end = x + count / 2 * R;
#if defined(HAS_MATRICES)
  if constexpr (R > 1) multiply_fours(kind, x, w, count, prefetch, step_prefetch, sums);
#endif
  for (; x < end; w += Kind::STEP, prefetch += step_prefetch) {
    for (int line = 0; line < LINES; line++)
      fetch<Kind, R>(prefetch + line * step_prefetch / LINES);
    typename Kind::Step steps[VECTORS];
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++) steps[v] = kind.load(w + v * LANES * Kind::ROW_BYTES);
#pragma GCC unroll 8
    for (int j = 0; j < Kind::PAIRS; j++, x += R) {
      Pairs elements[VECTORS];
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; v++) elements[v] = kind.pairs(steps[v], j);
#pragma GCC unroll 16
      for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) multiply_add(sums[r][v], elements[v], x[r]);
    }
  }
}

// Adds the sums of one group, of R rows of x and VECTORS vectors of rows of the weight, to the
// totals: scale * sum + offset * x_sum. x_sums (R) are the sums of x over the group; they are read
// only if the weight has offsets.
template <int R, int VECTORS>
[[gnu::always_inline]] inline void add_group(const Floats (&sums)[R][VECTORS], const float* scales,
                                             const float* x_sums, bool has_offsets,
                                             Floats (&totals)[R][VECTORS]) {
#pragma GCC unroll 4
  for (int v = 0; v < VECTORS; v++) {
    const Floats scale = load<Floats>(scales + v * LANES);
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) add_product(totals[r][v], sums[r][v], scale);
    if (!has_offsets) continue;
    const Floats offset = load<Floats>(scales + N_BLOCK + v * LANES);
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) add_product(totals[r][v], offset, x_sums[r]);
  }
}

// The vectors of rows that a tile of R rows of x multiplies in one pass over a weight block. One
// row is bound by memory, so it takes ROW_VECTORS, and so do two rows of bf16: on AVX2 with
// bf16, 31.6 of the 34.9 GB/s of two Zen 4 cores; with two vectors, 21.3. Six bits on AVX2 are
// bound by instructions, and four vectors of their steps do not fit into the registers. Short
// vectors need four so that sums do not wait for the sums before them. With groups, the sums of a
// group and the totals must both fit into the 32 registers.
template <class Kind, int R, bool HAS_GROUPS> constexpr int tile_vectors() {
  constexpr bool IS_WIDE = LANES == 4 ? R <= 2
                           : R == 1   ? !std::is_same_v<Kind, SixBits>
                                      : IS_BF16<Kind> && R == 2;
  if (IS_WIDE) return ROW_VECTORS;
  return HAS_GROUPS && REGISTERS == 32 && R > 6 ? 1 : 2;
}

// Adds the product of R rows of x, as (count / 2, R) pairs, and a part of a weight block to `sums`
// (R, 32). With HAS_GROUPS the part consists of whole groups, which are scaled, and x_sums (G, R)
// are the sums of x over each group. Otherwise all k are added up without scales.
template <class Kind, int R, bool HAS_GROUPS>
void multiply_tile(const Pair* x, const float* x_sums, const WeightBlock& block,
                   const Groups& groups, float* sums) {
  constexpr int VECTORS = tile_vectors<Kind, R, HAS_GROUPS>();
  const Kind kind(groups.weight.table);
  const long width = groups.weight.group;
  for (int first = 0; first < N_BLOCK; first += VECTORS * LANES) {
    Floats totals[R][VECTORS];
    for (int r = 0; r < R; r++)
      std::memcpy(totals[r], sums + r * N_BLOCK + first, sizeof totals[r]);
    const char* w = block.weights + first * Kind::ROW_BYTES;
    const char* prefetch = block.prefetch + first * block.step_prefetch / N_BLOCK;
    if constexpr (HAS_GROUPS) {
      for (long group = 0; group < block.count / width; group++) {
        Floats group_sums[R][VECTORS] = {};
        multiply(kind, x + group * width / 2 * R, w + group * width * K_BYTES<Kind>, width,
                 prefetch, block.step_prefetch, group_sums);
        add_group(group_sums, groups.scales + group * 2 * N_BLOCK + first, x_sums + group * R,
                  groups.weight.per_group > 1, totals);
      }
    } else {
      multiply(kind, x, w, block.count, prefetch, block.step_prefetch, totals);
    }
    for (int r = 0; r < R; r++)
      std::memcpy(sums + r * N_BLOCK + first, totals[r], sizeof totals[r]);
  }
}

using MultiplyTile = void (*)(const Pair*, const float*, const WeightBlock&, const Groups&, float*);

// Returns the multiply_tile() for a number of rows, 1 to REGISTER_ROWS.
template <class Kind, bool HAS_GROUPS, int... R>
MultiplyTile select_tile(long rows, std::integer_sequence<int, R...>) {
  static constexpr MultiplyTile TILES[] = {multiply_tile<Kind, R + 1, HAS_GROUPS>...};
  return TILES[rows - 1];
}

template <class Kind> MultiplyTile select_tile(long rows, bool has_groups) {
  constexpr std::make_integer_sequence<int, REGISTER_ROWS> ALL;
  return has_groups ? select_tile<Kind, true>(rows, ALL) : select_tile<Kind, false>(rows, ALL);
}

// Packs the k from `begin` up to, not including, `end` of a row block of x, bf16 (rows, k), into
// pairs (k / 2, rows), see place_of().
void pack_rows(const uint16_t* x, Pair* out, long rows, long k, long begin, long end) {
  for (long r = 0; r < rows; r++)
    for (long i = begin; i < end; i += 2) out[place_of(i, r, rows, k)] = load_pair(x + r * k + i);
}

// Returns the sum of `count` bf16, a multiple of 16, in an order that no instruction set changes.
float sum_bf16(const uint16_t* x, long count) {
  typedef uint32_t UInts8 __attribute__((vector_size(32)));
  typedef float Floats8 __attribute__((vector_size(32)));
  Floats8 even = {}, odd = {};
  for (long i = 0; i < count; i += 16) {
    const UInts8 pairs = load<UInts8>(x + i);
    even += (Floats8)(pairs << 16);
    odd += (Floats8)(pairs & 0xffff0000u);
  }
  even += odd;
  return ((even[0] + even[4]) + (even[1] + even[5])) + ((even[2] + even[6]) + (even[3] + even[7]));
}

// The layout of x as packed pairs: row blocks of up to REGISTER_ROWS rows one after the other, each
// (K/2, R). If the weight has offsets, the sums of x over each group follow, (G, R) for each row
// block.
struct PackedPairs {
  long m, k;
  long group;  // k of a group, 0 without offsets
  Partition row_blocks, m_blocks, k_blocks;
  PackedPairs(long m, const Weight& weight)
      : m(m),
        k(weight.k),
        group(weight.per_group > 1 ? weight.group : 0),
        row_blocks(m, REGISTER_ROWS),
        m_blocks(row_blocks.count, M_BLOCK / REGISTER_ROWS),
        k_blocks(k / 2, K_BLOCK / 2) {}

  // A piece of work is one K block of one row block.
  long pieces() const { return row_blocks.count * k_blocks.count; }
  void pack(const uint16_t* x, char* packed, long piece) const {
    const long block = piece / k_blocks.count;
    const long k_block = piece % k_blocks.count;
    const long row = row_blocks.first(block);
    const long rows = row_blocks.size(block);
    const long begin = 2 * k_blocks.first(k_block);
    pack_rows(x + row * k, (Pair*)packed + row * (k / 2), rows, k, begin,
              begin + 2 * k_blocks.size(k_block));
    if (group) sum_groups(x, packed, row, rows, k_block);
  }

  // Returns the pairs of the row block of `rows` rows from `row` on, from k = `begin` on.
  const Pair* pairs(const char* packed, long row, long rows, long begin) const {
    return (const Pair*)packed + row * (k / 2) + begin / 2 * rows;
  }
  // Returns the sums over groups of the row block from `row` on.
  float* sums(const char* packed, long row) const {
    return (float*)(packed + m * k * sizeof(float)) + (group ? row * (k / group) : 0);
  }

 private:
  void sum_groups(const uint16_t* x, char* packed, long row, long rows, long k_block) const {
    const long groups = k / group;
    const long end = (k_block + 1) * groups / k_blocks.count;
    for (long g = k_block * groups / k_blocks.count; g < end; g++)
      for (long r = 0; r < rows; r++)
        sums(packed, row)[g * rows + r] = sum_bf16(x + (row + r) * k + g * group, group);
  }
};

// Adds the sums (rows, 32) of a group that is longer than a K block to the totals (rows, 32), as
// add_group() does, and sets the sums to zero.
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

// The row blocks for which elements are converted where they are multiplied. With AVX-512, whose
// tables have all elements, that is faster for any number of them: it takes 0.69 (six bits) to 0.92
// of the time with 16 rows, 0.96 to 1.00 with 256 (Zen 4, one thread). On AVX2 it takes 0.83 to
// 0.97 with two blocks, but 1.25 with six.
constexpr long IN_PLACE_BLOCKS = LANES == 16 ? M_BLOCK : 2;

// Multiplies the row blocks from `first_block` up to, not including, `end_block` of x by one weight
// block. Returns their sums (rows, 32), which are in one half of `memory`.
//
// For more than IN_PLACE_BLOCKS row blocks, the elements of other kinds are unpacked to bf16 once:
// the elements are the same, so the sums are the same. The product runs over parts of K. A part
// consists of whole groups, or lies in one group that is longer than K_BLOCK, whose sums are added
// to the totals when the group is complete.
template <class Kind>
float* multiply_block(const PackedPairs& x, const char* packed, long first_block, long end_block,
                      const Weight& weight, long block, float (*memory)[M_BLOCK * N_BLOCK]) {
  alignas(64) uint16_t unpacked[IS_BF16<Kind> ? 1 : K_BLOCK * N_BLOCK];
  alignas(64) float scales[IS_BF16<Kind> ? 1 : K_BLOCK / MIN_GROUP * 2 * N_BLOCK];
  const long first_row = x.row_blocks.first(first_block);
  const long row_blocks = end_block - first_block;
  const long k = weight.k;
  const long rows_of_all = x.row_blocks.first(end_block) - first_row;
  const long group = weight.group;
  const bool is_unpacked = !IS_BF16<Kind> && row_blocks > IN_PLACE_BLOCKS;
  const bool is_memory_bound = row_blocks == 1 && rows_of_all <= L1_PREFETCH_ROWS;
  const bool is_scaled = !IS_BF16<Kind> && weight.per_group;
  const bool has_groups = is_scaled && group <= K_BLOCK;
  const long step_prefetch = (is_unpacked ? 2 * K_BYTES<Kind> : Kind::STEP) / row_blocks;
  const long step_k = is_unpacked ? 2 : 2 * Kind::PAIRS;
  float* sums = memory[0];
  float* totals = memory[is_scaled ? 1 : 0];
  std::memset(sums, 0, rows_of_all * N_BLOCK * sizeof(float));
  std::memset(totals, 0, rows_of_all * N_BLOCK * sizeof(float));
  const Parameters parameters(weight, block);
  const long prefetch_k = is_memory_bound ? PREFETCH_BYTES<Kind> / K_BYTES<Kind> : K_BLOCK;
  // The address of the i-th k of this block; after the last k, the next block follows.
  const auto address = [&](long i) { return weight.block(block + i / k) + i % k * K_BYTES<Kind>; };
  for (long begin = 0, end; begin < k; begin = end) {
    end = std::min(begin + (has_groups ? K_BLOCK / group * group : K_BLOCK), k);
    if (!has_groups) end = std::min(end, (begin / group + 1) * group);
    const char* weights = address(begin);
    if (is_unpacked) unpack<Kind>(weight, weights, unpacked, end - begin);
    parameters.unpack(begin / group, end / group, scales);
    parameters.prefetch(end / group, (2 * end - begin) / group);
    WeightBlock part{is_unpacked ? (const char*)unpacked : weights, address(begin + prefetch_k),
                     step_prefetch, end - begin};
    for (long b = first_block; b < end_block; b++) {
      const long row = x.row_blocks.first(b);
      const long rows = x.row_blocks.size(b);
      float* out = (has_groups ? totals : sums) + (row - first_row) * N_BLOCK;
      const float* x_sums = x.sums(packed, row) + begin / group * rows;
      (is_unpacked ? select_tile<Bf16>(rows, has_groups) : select_tile<Kind>(rows, has_groups))(
          x.pairs(packed, row, rows, begin), x_sums, part, {weight, scales}, out);
      part.prefetch += step_prefetch * (part.count / step_k);
      if (is_scaled && !has_groups && end % group == 0)
        add_long_group(out, scales, x_sums, rows, weight.per_group > 1,
                       totals + (row - first_row) * N_BLOCK);
    }
  }
  return totals;
}

// Multiplies all rows of x by the weight and writes the outputs. packed() returns the packed rows;
// each thread calls it when it comes to its first piece of work. amx.h has overloads for its
// layouts of x.
template <class Kind, class Packed>
void multiply_all(Worker& worker, const PackedPairs& x, Packed packed, const Weight& weight,
                  const Outputs& out) {
  const long blocks = num_blocks(weight.n);
  alignas(64) float memory[2][M_BLOCK * N_BLOCK];
  float* sums = nullptr;
  const auto compute = [&](long piece) {
    const long m_block = piece / blocks;
    sums = multiply_block<Kind>(x, packed(), x.m_blocks.first(m_block),
                                x.m_blocks.first(m_block + 1), weight, piece % blocks, memory);
  };
  const auto write_out = [&](long piece) {
    const long m_block = piece / blocks;
    const long column = piece % blocks * N_BLOCK;
    write(out, weight.n, sums, x.row_blocks.first(x.m_blocks.first(m_block)),
          x.row_blocks.first(x.m_blocks.first(m_block + 1)), column);
  };
  worker.run(x.m_blocks.count * blocks, compute, write_out);
}

// Whether the elements of a kind may be whole numbers, see rounded_multiplier().
template <class Kind>
constexpr bool HAS_INTEGERS =
    std::is_same_v<Kind, Int8> || std::is_same_v<Kind, Nibbles> || std::is_same_v<Kind, SixBits>;

// Multiplies rounded rows by a weight whose elements are whole numbers.
template <class Kind, class Packed>
void multiply_all(Worker& worker, const RoundedX& x, Packed packed, const Weight& weight,
                  const Outputs& out) {
  const long blocks = num_blocks(weight.n);
  alignas(64) float totals[(M_BLOCK + REGISTER_ROWS) * N_BLOCK];
  MultiplyRounded* const multiply = rounded_multiplier(weight);
  const auto compute = [&](long piece) {
    multiply(x, packed(), piece / blocks, weight, piece % blocks, totals);
  };
  const auto write_out = [&](long piece) {
    const long m_block = piece / blocks;
    write(out, weight.n, totals, x.row_blocks.first(x.m_blocks.first(m_block)),
          x.row_blocks.first(x.m_blocks.first(m_block + 1)), piece % blocks * N_BLOCK);
  };
  worker.run(x.m_blocks.count * blocks, compute, write_out);
}

long align(long bytes) { return (bytes + 63) & -64; }

// A workspace has two parts: the packed rows with their sums over groups, and the rows (m, k) after
// RMSNorm or the Hadamard matrix, as bf16.
long packed_bytes(long m, long k) { return align(m * (k + k / MIN_GROUP) * sizeof(float)); }
long rows_bytes(long m, long k) { return packed_bytes(m, k) + align(m * k * 2); }

// Whether each thread normalizes and packs all rows for itself, which takes less time for a few
// rows than waiting for other threads. The Hadamard matrix takes longer, so threads share that
// work.
bool are_few(long m) { return m <= 16; }
bool are_few(long m, const Weight& weight) { return are_few(m) && !weight.is_rotated; }

// Prepares the rows of x (RMSNorm or the Hadamard matrix, if requested), packs them in a layout,
// and multiplies them.
template <class Kind, class Layout>
void product(Worker& worker, const Rows& x, const Layout& layout, const Weight& weight,
             const Outputs& out, char* workspace) {
  const long m = x.count, k = weight.k;
  const bool is_transformed = x.norm || weight.is_rotated;  // never both
  char* buffer = workspace + (are_few(m, weight) ? worker.index * rows_bytes(m, k) : 0);
  uint16_t* transformed = (uint16_t*)(buffer + packed_bytes(m, k));
  const uint16_t* rows = is_transformed ? transformed : x.data;
  const auto transform = [&](long row) {
    if (x.norm)
      rms_norm(x.data + row * k, x.norm, transformed + row * k, k, x.eps);
    else
      hadamard(x.data + row * k, (float*)buffer + row * k, transformed + row * k, k);
  };
  const auto pack = [&](long piece) { layout.pack(rows, buffer, piece); };
  bool is_packed = !are_few(m, weight);
  const auto packed = [&] {
    if (!is_packed) {
      for (long row = 0; row < m && is_transformed; row++) transform(row);
      for (long piece = 0; piece < layout.pieces(); piece++) pack(piece);
      is_packed = true;
    }
    return buffer;
  };
  if (is_packed) {
    if (is_transformed) worker.run(m, transform);
    worker.run(layout.pieces(), pack);
  }
  multiply_all<Kind>(worker, layout, packed, weight, out);
}

// Chooses the layout of x, and with it the method, for a weight of one kind.
template <class Kind>
void linear_of(Worker& worker, const Rows& x, const Weight& weight, const Outputs& out,
               char* workspace) {
#if defined(HAS_TILES)
  if constexpr (std::is_same_v<Kind, Int8>)
    if (weight.activations && scaling_of(weight) == Scaling::TOKENS && x.count > FEW_ROWS &&
        tiles_work())
      return product<Kind>(worker, x, ByteTiles(x.count, weight), weight, out, workspace);
#endif
  if constexpr (HAS_INTEGERS<Kind>)
    if (weight.activations)
      return product<Kind>(worker, x, RoundedX(x.count, weight), weight, out, workspace);
#if defined(HAS_TILES)
  if (weight.k % TILE_K == 0 && tiles_work()) {
    if constexpr (std::is_same_v<Kind, Nibbles>)
      if (x.count && x.count <= TILE_ROWS && has_groups(weight) && weight.group % TILE_K == 0)
        return product<Kind>(worker, x, RowsAsPairs{x.count, weight.k}, weight, out, workspace);
    if constexpr (!IS_BF16<Kind>)
      if (x.count && x.count <= FEW_ROWS)
        return product<Kind>(worker, x, FewRows{x.count, weight.k}, weight, out, workspace);
    return product<Kind>(worker, x, PackedX(x.count, weight), weight, out, workspace);
  }
#endif
  product<Kind>(worker, x, PackedPairs(x.count, weight), weight, out, workspace);
}

// Converts a row of a weight to bf16 (k). The product with the scale and the sum with the offset
// are rounded separately.
template <class Kind> void unpack_row(const Weight& weight, long row, uint16_t* out) {
  alignas(64) uint16_t unpacked[K_BLOCK * N_BLOCK];
  alignas(64) float scales[(K_BLOCK / MIN_GROUP + 1) * 2 * N_BLOCK];
  const Parameters parameters(weight, row / N_BLOCK);
  for (long begin = 0, end; begin < weight.k; begin = end) {
    end = std::min(begin + K_BLOCK, weight.k);
    unpack<Kind>(weight, weight.block(row / N_BLOCK) + begin * K_BYTES<Kind>, unpacked,
                 end - begin);
    const long first = begin / weight.group;
    parameters.unpack(first, (end - 1) / weight.group + 1, scales);
    for (long i = begin; i < end; i++) {
      float value = widen(unpacked[((i - begin) / 2 * N_BLOCK + row % N_BLOCK) * 2 + i % 2]);
      const float* scale = scales + (i / weight.group - first) * 2 * N_BLOCK + row % N_BLOCK;
      if (parameters.per_group) value *= scale[0];
      round_here(value);
      out[i] = to_bf16(parameters.per_group > 1 ? value + scale[N_BLOCK] : value);
    }
  }
}

}  // namespace

long linear_bytes(long m, long k, long threads) {
  return m * MAX_RANK * sizeof(float) +
         rows_bytes(m, k) * (are_few(m) ? std::min(threads, MAX_THREADS) : 1);
}

// An adapter's product with `down` is computed first, into the beginning of the workspace; write()
// adds the product with `up`.
void linear(Worker& worker, Rows x, Weight weight, Outputs out, char* workspace) {
  if (weight.rank) {
    Matrix down = {};
    down.data = (const char*)weight.adapter;
    down.format = ElementFormat::BF16;
    down.scale_format = ScaleFormat::FLOAT32;
    down.group = weight.k;
    down.is_rotated = weight.is_rotated;
    down.stride = weight.k * K_BYTES<Bf16>;
    float* down_outputs = (float*)workspace;
    workspace += x.count * MAX_RANK * sizeof(float);
    linear(worker, x, {down, weight.rank, weight.k}, {down_outputs, Outputs::FLOAT32}, workspace);
    out.up = weight.adapter + weight.rank * weight.k;
    out.down_outputs = down_outputs;
    out.rank = weight.rank;
  }
  constexpr decltype(&linear_of<Bf16>) RUN[] = TABLE_BY_FORMAT(linear_of);
  RUN[(int64_t)weight.format](worker, x, weight, out, workspace);
}

// The rows are normalized once, in a phase of their own, as both products read them.
void linear(Worker& worker, Rows x, Weight weight, Outputs out, char* workspace,
            const Adapters& adapters, long product) {
  if (!adapters.count) return linear(worker, x, weight, out, workspace);
  if (x.norm) {
    worker.run(x.count, [&](long row) {
      rms_norm(x.data + row * weight.k, x.norm, adapters.normed + row * weight.k, weight.k, x.eps);
    });
    x = {adapters.normed, x.count};
  }
  shrink(worker, x.data, weight.k, adapters, product);
  const Updates updates = {&adapters, product, weight.k};
  out.updates = &updates;
  linear(worker, x, weight, out, workspace);
}

extern "C" {

// Returns the bytes of workspace that linear_packed needs.
long linear_workspace(long m, long k, long threads) { return linear_bytes(m, k, threads); }

// Converts the rows `ids` (t) of a weight without an adapter to bf16: out (t, k). Returns whether
// all ids are in [0, n); otherwise nothing is written.
long weight_rows(const int64_t* ids, const int64_t* matrix, uint16_t* out, long t, long n, long k,
                 long threads) {
  constexpr decltype(&unpack_row<Bf16>) RUN[] = TABLE_BY_FORMAT(unpack_row);
  const Weight weight = {*(const Matrix*)matrix, n, k};
  if (!std::all_of(ids, ids + t, [&](int64_t id) { return id >= 0 && id < n; })) return false;
#pragma omp parallel for num_threads(std::min(t, threads)) if (t > 1)
  for (long i = 0; i < t; i++) RUN[(int64_t)weight.format](weight, ids[i], out + i * k);
  return true;
}

// Multiplies x (m, k) of bf16 by a weight (n, k), which `matrix` describes in MATRIX_FIELDS
// integers: out (m, n) of bf16, or of float32 if is_wide. k is a multiple of 2. Some rows can have
// adapters: `segments` (num_segments, SEGMENT_FIELDS), each with one Delta, and `middle` is the
// memory that shrink() needs.
void linear_packed(const uint16_t* x, const int64_t* matrix, void* out, char* workspace,
                   const int64_t* segments, float* middle, long num_segments, long m, long n,
                   long k, bool is_wide, int threads) {
  const Outputs outputs = {out, is_wide ? Outputs::FLOAT32 : Outputs::BF16};
  const Adapters adapters = {(const Segment*)segments, num_segments, middle, nullptr};
  run_team(threads, [&](Worker& worker) {
    linear(worker, {x, m}, {*(const Matrix*)matrix, n, k}, outputs, workspace, adapters, 0);
  });
}
}
