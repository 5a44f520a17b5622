// Products of x in int8 with packed weights whose elements are whole numbers: packed x of
// rounded_rows.h and a weight go in, and float32 sums go to the rows of the output.
//
// llama/ops/rounded.py defines the result, bit for bit: exact integer sums over pieces of k, and
// floating-point operations after them in one order, per output. So a row has the same bits alone
// and in any batch, on every instruction set and number of threads. linear.cpp decides which
// weights are multiplied so, and packs x. The file is separate from linear.cpp, so that the two
// compile in parallel: each takes seconds.
#include <type_traits>
#include <utility>

#include "rounded_rows.h"

namespace {

// A part of a weight block, some k of its 32 rows, and the memory to prefetch meanwhile. All row
// blocks together prefetch it once, so each step fetches only a share of a step's bytes.
struct QuadBlock {
  const char *weights, *prefetch;
  long step_prefetch;   // bytes to prefetch at each step
  long count;           // number of k
  const float* scales;  // of the groups, from the first on: (G, 2, 32)
  long group;           // k of a group
  long left_in_group;   // k of the first group that belong to this part
  long piece;           // k of a piece, 32 or 16
};

// Adds the products of a step of VECTORS vectors of rows and R rows of x to the sums. Two sets of
// sums are independent, which hides the latency of an instruction if there are few sums.
template <class Source, int R, int VECTORS, int SETS>
[[gnu::always_inline]] inline void multiply_step(const Source& source, const char* w, const char* x,
                                                 Ints (&sums)[SETS][R][VECTORS]) {
  typename Source::Step steps[VECTORS];
#pragma GCC unroll 4
  for (int v = 0; v < VECTORS; v++) steps[v] = source.load(w + v * LANES * Source::ROW_BYTES);
#if defined(HAS_MATRICES)
#pragma GCC unroll 2
  for (int j = 0; j < STEP_QUADS; j += 2, x += 8 * R) {
    UInts first[VECTORS], second[VECTORS], low[VECTORS], high[VECTORS];
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++) {
      first[v] = source.quad(steps[v], j);
      second[v] = source.quad(steps[v], j + 1);
      low[v] = low_rows(first[v], second[v]);
      high[v] = high_rows(first[v], second[v]);
    }
    auto& set = sums[j / 2 % SETS];
#pragma GCC unroll 16
    for (int r = 0; r + 1 < R; r += 2)
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; v++) {
        add_matrix(set[r][v], low[v], load<UInts>(x + 8 * r));
        add_matrix(set[r + 1][v], high[v], load<UInts>(x + 8 * r));
      }
#pragma GCC unroll 4
    for (int v = 0; R % 2 && v < VECTORS; v++) {
      add_dot(set[R - 1][v], first[v], load_quad(x + 8 * R - 8));
      add_dot(set[R - 1][v], second[v], load_quad(x + 8 * R - 4));
    }
  }
#elif defined(HAS_DOT)
#pragma GCC unroll 4
  for (int j = 0; j < STEP_QUADS; j++, x += 4 * R) {
    UInts quads[VECTORS];
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++) quads[v] = source.quad(steps[v], j);
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; v++)
        add_dot(sums[j % SETS][r][v], quads[v], load_quad(x + 4 * r));
  }
#else
#pragma GCC unroll 4
  for (int v = 0; v < VECTORS; v++) {
    UInts quads[STEP_QUADS];
#pragma GCC unroll 4
    for (int j = 0; j < STEP_QUADS; j++) quads[j] = source.quad(steps[v], j);
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) add_dots<Source::BITS>(sums[0][r][v], quads, x + 4 * r, 4 * R);
  }
#endif
}

#if defined(__x86_64__) && !defined(HAS_DOT)
// The same for bytes in the order of memory. Two neighbouring k of a row in 16 bits need fewer
// instructions than a quad, which is joined first, and whose magnitudes are multiplied.
template <int R, int VECTORS, int SETS>
[[gnu::always_inline]] inline void multiply_step(const ByteQuads&, const char* w, const char* x,
                                                 Ints (&sums)[SETS][R][VECTORS]) {
  int16_t pairs[STEP_QUADS * R * 4];
#pragma GCC unroll 16
  for (int r = 0; r < R; r++)
    store(pairs + 16 * r, _mm256_cvtepi8_epi16(load<__m128i>(x + 16 * r)));
#pragma GCC unroll 8
  for (int i = 0; i < 2 * STEP_QUADS; i++, w += Int8::STEP) {
    const int16_t* pairs_of_rows = pairs + i / 2 * 4 * R + i % 2 * 2;
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++) {
      const Shorts elements = load_widened(w + v * LANES * ByteQuads::ROW_BYTES);
#pragma GCC unroll 16
      for (int r = 0; r < R; r++) {
        const Ints pair = broadcast_quad((const char*)(pairs_of_rows + 4 * r));
        sums[i % SETS][r][v] += multiply_pairs(elements, pair);
      }
    }
  }
}
#endif

// Sets sums to the first values of R rows of x, in the form in which multiply_step() adds to them.
template <int R, int VECTORS>
[[gnu::always_inline]] inline void begin_sums(Ints (&sums)[R][VECTORS], const float* first_values) {
#pragma GCC unroll 16
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++)
#if defined(HAS_MATRICES)
      if (r + 1 < R || r % 2)
        sums[r][v] = (Ints)vdupq_n_s64(load<int64_t>(first_values + r / 2 * 2));
      else
#endif
        sums[r][v] = broadcast_quad((const char*)(first_values + r));
}

// Turns sums to which multiply_step() added into those of the rows of x.
template <int R, int VECTORS>
[[gnu::always_inline]] inline void end_sums(Ints (&sums)[R][VECTORS]) {
#if defined(HAS_MATRICES)
  from_matrices(sums);
#else
  (void)sums;
#endif
}

// Adds the integer sums of a piece to the totals, in the order of rounded.py. The operations are
// written one by one, because the compiler may fuse `a * b + c`.
template <Scaling SCALING, int R, int VECTORS, int SETS>
[[gnu::always_inline]] inline void add_piece(const Ints (&sums)[SETS][R][VECTORS],
                                             const float* scales, const float* terms,
                                             Floats (&totals)[R][VECTORS]) {
#pragma GCC unroll 4
  for (int v = 0; v < VECTORS; v++) {
    Floats scale = {}, offset = {};
    if constexpr (SCALING >= Scaling::GROUPS) scale = load<Floats>(scales + v * LANES);
    if constexpr (SCALING == Scaling::OFFSETS) offset = load<Floats>(scales + N_BLOCK + v * LANES);
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
      Ints sum = sums[0][r][v];
      if constexpr (SETS > 1) sum += sums[1][r][v];
      Floats term = __builtin_convertvector(sum, Floats);
      if constexpr (SCALING >= Scaling::GROUPS) term *= scale;
      if constexpr (SCALING == Scaling::OFFSETS) add_product(term, offset, terms[2 * R + r]);
      add_product(totals[r][v], term, terms[R + r]);
    }
  }
}

// Prefetches into L2, from an address on, the share of a step's `bytes` that belongs to one pass
// over VECTORS vectors of rows: a few lines at equal distances. Not for one row of x and bytes in
// vectors of 512 bits: the loads alone run far enough ahead then, and one row takes 0.85 to 0.92 of
// the time on Zen 4. Two rows and more, and six bits, are faster with it.
template <class Source, int R, int VECTORS> void prefetch_step(const char* address, long bytes) {
  if constexpr (std::is_same_v<Source, ByteQuads> && R == 1 && VECTOR_BYTES == 64) return;
  constexpr int PASSES = N_BLOCK / (VECTORS * LANES);
  constexpr int LINES = std::max(Source::PREFETCH_LINES / PASSES, 1);
  for (int line = 0; line < LINES; line++)
    __builtin_prefetch(address + line * bytes / (PASSES * LINES), 0, 2);
}

// Adds the integer products of R rows of x and a part of a weight block to the sums (R, 32).
template <class Source, int R>
void multiply_tokens(const Source& source, const QuadRows& x, const QuadBlock& block,
                     void* sums_of_block) {
  constexpr int VECTORS = R == 1 ? ROW_VECTORS : 2;
  for (int first = 0; first < N_BLOCK; first += VECTORS * LANES) {
    Ints sums[1][R][VECTORS];
    begin_sums(sums[0], x.terms);
    const char* w = block.weights + first * Source::ROW_BYTES;
    const char* prefetch = block.prefetch + first * block.step_prefetch / N_BLOCK;
    const char* quads = x.quads;
    for (long k = 0; k < block.count; k += STEP_K, w += Source::STEP, quads += STEP_K * R) {
      prefetch_step<Source, R, VECTORS>(prefetch, block.step_prefetch);
      prefetch += block.step_prefetch;
      multiply_step(source, w, quads, sums);
    }
    end_sums(sums[0]);
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; v++) {
        int32_t* stored = (int32_t*)sums_of_block + r * N_BLOCK + first + v * LANES;
        store(stored, load<Ints>(stored) + sums[0][r][v]);
      }
  }
}

// Adds the product of R rows of x and a part of a weight block to the totals (R, 32).
template <class Source, int R, Scaling SCALING>
void multiply_quads(const Source& source, const QuadRows& x, const QuadBlock& block,
                    void* totals_of_block) {
  // One row is bound by memory. With more, the sums of a piece and the totals must both fit into
  // the registers.
  constexpr int VECTORS = R == 1 ? ROW_VECTORS : R <= REGISTER_ROWS / 2 ? 2 : 1;
  constexpr int SETS = VECTORS < 4 && R * VECTORS <= 4 ? 2 : 1;
  for (int first = 0; first < N_BLOCK; first += VECTORS * LANES) {
    Floats totals[R][VECTORS];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; v++)
        totals[r][v] = load<Floats>((float*)totals_of_block + r * N_BLOCK + first + v * LANES);
    const char* w = block.weights + first * Source::ROW_BYTES;
    const char* prefetch = block.prefetch + first * block.step_prefetch / N_BLOCK;
    const char* quads = x.quads;
    const float* terms = x.terms;
    const float* scales = block.scales + first;
    long left_in_group = block.left_in_group;
    for (long k = 0; k < block.count; k += block.piece, terms += 3 * R) {
      Ints sums[SETS][R][VECTORS] = {};
      begin_sums(sums[0], terms);
      // The number of steps is no template argument: that would double the instances, and a loop
      // of one or two steps is as fast.
      for (long i = 0; i < block.piece; i += STEP_K, w += Source::STEP, quads += STEP_K * R) {
        prefetch_step<Source, R, VECTORS>(prefetch, block.step_prefetch);
        prefetch += block.step_prefetch;
        multiply_step(source, w, quads, sums);
      }
#pragma GCC unroll 4
      for (int set = 0; set < SETS; set++) end_sums(sums[set]);
      add_piece<SCALING>(sums, scales, terms, totals);
      if constexpr (SCALING >= Scaling::GROUPS) {
        left_in_group -= block.piece;
        if (!left_in_group) {
          left_in_group = block.group;
          scales += 2 * N_BLOCK;
        }
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; v++)
        store((float*)totals_of_block + r * N_BLOCK + first + v * LANES, totals[r][v]);
  }
}

template <class Source>
using QuadTile = void (*)(const Source&, const QuadRows&, const QuadBlock&, void*);

// Returns the tile for a number of rows, MIN_ROWS + R, and a scaling.
template <class Source, int MIN_ROWS, int... R>
QuadTile<Source> select_quad_tile(long rows, Scaling scaling, std::integer_sequence<int, R...>) {
  static constexpr QuadTile<Source> TILES[][sizeof...(R)] = {
      {multiply_tokens<Source, MIN_ROWS + R>...},
      {multiply_quads<Source, MIN_ROWS + R, Scaling::ROWS>...},
      {multiply_quads<Source, MIN_ROWS + R, Scaling::GROUPS>...},
      {multiply_quads<Source, MIN_ROWS + R, Scaling::OFFSETS>...},
  };
  return TILES[(int)scaling][rows - MIN_ROWS];
}

// Returns the tile for a number of rows from MIN_ROWS to MAX_ROWS.
template <class Source, int MIN_ROWS, int MAX_ROWS>
QuadTile<Source> select_quad_tile(long rows, Scaling scaling) {
  return select_quad_tile<Source, MIN_ROWS>(
      rows, scaling, std::make_integer_sequence<int, MAX_ROWS - MIN_ROWS + 1>());
}

// Scales the totals (rows, 32) of rows of x by the scales of the rows of the weight. Integer sums
// over all k become floats, and are scaled by the scales of x first.
inline void scale_rows(void* totals, const QuadRows& x, long rows, const float* scales,
                       bool are_integers) {
  for (long i = 0; i < rows * N_BLOCK; i += LANES) {
    Floats total = load<Floats>((float*)totals + i);
    if (are_integers)
      total = __builtin_convertvector((Ints)total, Floats) * x.terms[rows + i / N_BLOCK];
    store((float*)totals + i, total * load<Floats>(scales + i % N_BLOCK));
  }
}

// Multiplies the row blocks of one M block of x by one weight block: totals (rows, 32).
template <class Source>
void multiply_rounded(const RoundedLayout& x, const char* packed, long m_block,
                      const Weight& weight, long block, float* totals) {
  alignas(64) char quads[K_BLOCK * N_BLOCK];
  alignas(64) float scales[(K_BLOCK / MIN_GROUP + 1) * 2 * N_BLOCK];
  const Source source(weight);
  const Scaling scaling = scaling_of(weight);
  const long first_block = x.m_blocks.first(m_block), end_block = x.m_blocks.first(m_block + 1);
  const long first_row = x.row_blocks.first(first_block);
  const long rows_of_all = x.row_blocks.first(end_block) - first_row;
  const bool is_in_place = x.m <= IN_PLACE_ROWS;
  const long step_prefetch = is_in_place ? Source::STEP : Source::STEP / (end_block - first_block);
  const long k = weight.k, group = weight.group;
  const Parameters parameters(weight, block);
  // The address of the i-th k of this block; after the last k, the next block follows.
  const auto address = [&](long i) {
    return weight.block(block + i / k) + i % k / STEP_K * Source::STEP;
  };
  std::memset(totals, 0, rows_of_all * N_BLOCK * sizeof(float));
  for (long begin = 0, end; begin < k; begin = end) {
    end = std::min(begin + K_BLOCK, k);
    if (scaling >= Scaling::GROUPS) {
      parameters.unpack(begin / group, (end - 1) / group + 1, scales);
      parameters.prefetch(end / group, (2 * end - begin) / group);
    }
    const long prefetch_k = is_in_place ? 16384 / Source::STEP * STEP_K : end - begin;
    QuadBlock part = {is_in_place ? address(begin) : quads,
                      address(begin + prefetch_k),
                      step_prefetch,
                      end - begin,
                      scales,
                      group,
                      group - begin % group,
                      x.piece};
    if (!is_in_place) make_quads(source, address(begin), part.count, quads);
    for (long b = first_block; b < end_block; b++) {
      const long row = x.row_blocks.first(b), rows = x.row_blocks.size(b);
      const QuadRows x_part = x.part(packed, row, rows, begin);
      float* out = totals + (row - first_row) * N_BLOCK;
      // A partition of more than IN_PLACE_ROWS rows has no block smaller than IN_PLACE_TILE.
      if (is_in_place)
        select_quad_tile<Source, 1, IN_PLACE_TILE>(rows, scaling)(source, x_part, part, out);
      else
        select_quad_tile<Ready<Source>, IN_PLACE_TILE, REGISTER_ROWS>(rows, scaling)(
            Ready<Source>(weight), x_part, part, out);
      if (is_in_place)
        part.prefetch = part.weights;  // the first row block has prefetched all that follows
      else
        part.prefetch += step_prefetch * (part.count / STEP_K);
    }
  }
  if (scaling >= Scaling::GROUPS) return;
  parameters.unpack(0, 1, scales);
  for (long b = first_block; b < end_block; b++) {
    const long row = x.row_blocks.first(b), rows = x.row_blocks.size(b);
    scale_rows(totals + (row - first_row) * N_BLOCK, x.part(packed, row, rows, 0), rows, scales,
               scaling == Scaling::TOKENS);
  }
}

// The sources of quads of each kind whose elements may be whole numbers.
template <class Kind> struct SourcesOf;
template <> struct SourcesOf<Int8> {
  using Codes = ByteQuads;
  using WholeBytes = ByteQuads;
};
template <> struct SourcesOf<Nibbles> {
  using Codes = NibbleQuads;
  using WholeBytes = TableQuads;
};
template <> struct SourcesOf<SixBits> {
  using Codes = SixBitQuads;
  using WholeBytes = SixBitQuads;
};

// Returns rounded_multiplier() for a weight of one kind.
template <class Kind> MultiplyRounded* multiplier_of(const Weight& weight) {
  return has_whole_bytes(weight) ? multiply_rounded<typename SourcesOf<Kind>::WholeBytes>
                                 : multiply_rounded<typename SourcesOf<Kind>::Codes>;
}

}  // namespace

MultiplyRounded* rounded_multiplier(const Weight& weight) {
  if (weight.format == ElementFormat::INT8) return multiplier_of<Int8>(weight);
  if (weight.format == ElementFormat::NIBBLES) return multiplier_of<Nibbles>(weight);
  return multiplier_of<SixBits>(weight);
}
