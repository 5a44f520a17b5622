// Attention over a paged KV cache (PagedAttention, Kwon et al., 2023), computed as in
// Flash-Decoding: the context is split into parts, each part is computed with the online softmax of
// FlashAttention (Dao et al., 2022), and the partial results are merged.
//
// In: queries (T, H, D) of bf16, and the pages with keys and values in bf16 or int8. Out: (T, H, D)
// of bf16. Scores, softmax and sums are float32. With AVX512_BF16, except on CPUs with AMX, the
// softmax weights are rounded to bf16 before they multiply the values, as in FlashAttention, which
// takes 0.79 of the time for a prompt of 2,048. On one Zen 4 core, 4 layers at batch 8 and context
// 512 take 2.7 ms; PyTorch took 18.2 ms of a step of 42.2 ms.
//
// attention.py owns the tensors, checks the shapes and explains their letters. The rows of a
// sequence and a kv head are its queries times the G heads that share the kv head: row = query * G
// + head. A block of rows goes over the keys together. The context is cut by position into splits
// of SPLIT keys. Each split gives a row its partial result: D sums of value * e^(score - m), m, the
// maximum score, and l, the sum of e^(score - m). Partial results are merged in order of position.
// A sequence with one block of rows has one work item per split, so that a single long context uses
// every thread; a longer one has one work item per block.
//
// Borders of the splits and the order of every sum depend on positions only. So a query gives the
// same bytes alone as in any batch, in a prefill as in a decode step, on any number of threads.
//
// The file has more than 400 lines because all of its steps share the layout of these rows.
#include <algorithm>

#include "kernels.h"
#include "vectors.h"

namespace {

constexpr long SPLIT = 256;                // keys of a split
constexpr long M_BLOCK = 56;               // maximum number of rows that go over the keys together
constexpr int KEY_BLOCK = 2 * LANES;       // keys that are scored together
constexpr long PREFETCH_KEYS = 64;         // without prefetch it took twice as long (Zen 4)
constexpr double MIN_PARALLEL_WORK = 3e5;  // multiplications; below, waking threads takes longer
constexpr long PARTIAL_EXTRA = 2;          // floats of a partial result after its D sums: m, l

// The positions of a sequence in the list of work items and in the list of partial results.
struct SequenceStart {
  int64_t item, partial;
};

// An attention call, with the layout of its workspace.
struct Call : Attention {
  // (num_seqs + 1) starts; the last has the totals.
  SequenceStart* starts() const { return (SequenceStart*)workspace; }
  float* partials() const { return (float*)(starts() + num_seqs + 1); }
  long group() const { return heads / kv_heads; }
  long num_queries(long seq) const { return query_starts[seq + 1] - query_starts[seq]; }
  long rows(long seq) const { return num_queries(seq) * group(); }
  long blocks(long seq) const { return (rows(seq) + M_BLOCK - 1) / M_BLOCK; }
  long splits(long seq) const { return (seq_lens[seq] + SPLIT - 1) / SPLIT; }
  bool is_split(long seq) const { return blocks(seq) == 1; }
};

// A block of rows of one sequence and one kv head.
struct Block {
  long seq, kv_head, first_query, first_row, rows;
};

// Returns the address of the i-th row of a block in a tensor (T, H, D).
uint16_t* row_address(const Call& call, uint16_t* tensor, const Block& block, long i) {
  const long row = block.first_row + i, group = call.group();
  const long query = block.first_query + row / group, head = block.kv_head * group + row % group;
  return tensor + (query * call.heads + head) * call.dim;
}

// Returns the number of tokens that the i-th row of a block attends to.
long num_visible(const Call& call, const Block& block, long i) {
  if (call.is_bidirectional) return call.seq_lens[block.seq];
  const long query = (block.first_row + i) / call.group();
  return call.seq_lens[block.seq] - call.num_queries(block.seq) + query + 1;
}

// Packs the queries of a block, one register tile of R rows after the other: (D/2, R) pairs each.
void pack_rows(const Call& call, const Block& block, Pair* out) {
  const Partition tiles(block.rows, REGISTER_ROWS);
  for (long tile = 0; tile < tiles.count; tile++) {
    const long first = tiles.first(tile), size = tiles.size(tile);
    for (long r = 0; r < size; r++) {
      const uint16_t* query = row_address(call, (uint16_t*)call.queries, block, first + r);
      for (long i = 0; i < call.dim / 2; i++) out[i * size + r] = load_pair(query + 2 * i);
    }
    out += size * (call.dim / 2);
  }
}

// Writes the offsets in bytes, within the keys or the values of a layer, of the rows of one kv head
// at the positions from `begin` up to, not including, `end`. Unless scale_offsets is null, it also
// writes the offsets of their scales. kernels.h describes a page.
void locate_keys(const Call& call, const Block& block, long begin, long end, long* offsets,
                 long* scale_offsets) {
  const long rows = call.page_size * call.kv_heads, head = block.kv_head;
  const long page_bytes = rows * kv_row_bytes(call.dim, call.kv_format);
  const long row_bytes = call.dim * kv_element_bytes(call.kv_format);
  const int64_t* pages = call.table + block.seq * call.pages_per_seq;
  while (begin < end) {
    const long slot = begin % call.page_size, page = pages[begin / call.page_size] * page_bytes;
    const long count = std::min(call.page_size - slot, end - begin);
    for (long i = slot; i < slot + count; i++)
      *offsets++ = page + (i * call.kv_heads + head) * row_bytes;
    for (long i = slot; scale_offsets && i < slot + count; i++)
      *scale_offsets++ = page + rows * row_bytes + 2 * (head * call.page_size + i);
    begin += count;
  }
}

// Transposes LANES rows of LANES 32-bit elements in place, by log2(LANES) rounds of interleaving.
void transpose(UInts (&rows)[LANES]) {
  for (int round = 1; round < LANES; round *= 2) {
    UInts interleaved[LANES];
#pragma GCC unroll 16
    for (int i = 0; i < LANES / 2; i++) {
      interleaved[2 * i] = interleave_low(rows[i], rows[i + LANES / 2], Lanes());
      interleaved[2 * i + 1] = interleave_high(rows[i], rows[i + LANES / 2], Lanes());
    }
    std::memcpy(rows, interleaved, sizeof interleaved);
  }
}

// The formats of a row of the KV cache. bf16_pairs() returns 2 * LANES elements from the i-th on as
// bf16, two in each lane. int8 elements become integers; the scale of the row, a bf16, multiplies
// the scores of a key, or the softmax weights of a value.
struct Bf16Row {
  static constexpr bool HAS_SCALE = false;
  static UInts bf16_pairs(const char* row, long i) { return load<UInts>(row + 2 * i); }
};

struct Int8Row {
  static constexpr bool HAS_SCALE = true;
  static UInts bf16_pairs(const char* row, long i) {
    const FloatPairs pairs = load_int8_pairs(row + i);
    return (UInts)pairs.even >> 16 | (UInts)pairs.odd;
  }
};

// Loads the scales of the keys from `begin` up to, not including, `end` into out[begin] and after.
void load_scales(const char* pages, const long* offsets, long begin, long end, float* out) {
  for (long key = begin; key < end; key++) out[key] = widen(load<uint16_t>(pages + offsets[key]));
}

// Multiplies a row of scores or weights by the scales of its keys or values. Both have a capacity
// of whole vectors.
void multiply_by_scales(float* row, const float* scales, long count) {
  for (long i = 0; i < count; i += LANES)
    store(row + i, load<Floats>(row + i) * load<Floats>(scales + i));
}

// Transposes up to KEY_BLOCK keys: out (D/2, KEY_BLOCK), where each 32-bit element is a pair of
// neighbouring bf16 of a key. Missing keys become zeros.
template <class Row>
void transpose_keys(const char* keys, const long* offsets, long count, long dim, UInts* out) {
  for (int side = 0; side < 2; side++, out++) {
    const long first = side * LANES;
    for (long i = 0; i < dim / 2; i += LANES) {
      UInts rows[LANES] = {};
      for (long key = first; key < count && key < first + LANES; key++)
        rows[key - first] = Row::bf16_pairs(keys + offsets[key], 2 * i);
      transpose(rows);
      for (int j = 0; j < LANES; j++) out[2 * (i + j)] = rows[j];
    }
  }
}

// Prefetches up to KEY_BLOCK keys or values into L2. In L1 they would evict one another.
void prefetch_keys(const char* pages, const long* offsets, long begin, long count, long row_bytes) {
  for (long key = begin; key < count && key < begin + KEY_BLOCK; key++)
    for (long i = 0; i < row_bytes; i += 64) __builtin_prefetch(pages + offsets[key] + i, 0, 2);
}

// Computes the scores of R rows, as (D/2, R) pairs, and KEY_BLOCK keys (D/2, KEY_BLOCK): R rows of
// KEY_BLOCK scores, which begin SPLIT floats apart.
template <int R>
void score_keys(const Pair* queries, const UInts* keys, long dim, float scale, float* scores) {
  Floats sums[R][2] = {};
  for (const Pair* end = queries + dim / 2 * R; queries < end; queries += R, keys += 2) {
    const Pairs left = load_pairs(keys), right = load_pairs(keys + 1);
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
      multiply_add(sums[r][0], left, queries[r]);
      multiply_add(sums[r][1], right, queries[r]);
    }
  }
  for (int r = 0; r < R; r++)
    for (int side = 0; side < 2; side++)
      store(scores + r * SPLIT + side * LANES, sums[r][side] * scale);
}

// The operands of the product of weights and values. Where the CPU multiplies pairs of bf16 fast,
// two neighbouring keys are multiplied at once, with weights that are rounded to bf16. Intel's CPUs
// with AMX multiply pairs slowly (see build.py), so they use floats.
//
// KEYS_AT_ONCE: keys that are multiplied at once.
// SoftmaxWeights: the weights of these keys for one row.
// even_values(a, b), odd_values(a, b): the elements of even or odd index of the values of one key,
//     or of two neighbouring keys.
// round_weights(row, count): rounds a row of weights in place, if it is to be rounded.
#if defined(HAS_BF16_PRODUCTS) && !defined(__AMX_TILE__)
constexpr int KEYS_AT_ONCE = 2;
typedef Pair SoftmaxWeights;
Pairs even_values(UInts a, UInts b) { return (Pairs)(a & 0xffffu | b << 16); }
Pairs odd_values(UInts a, UInts b) { return (Pairs)(a >> 16 | (b & 0xffff0000u)); }
void round_weights(float* row, long count) {
  for (long i = 0; i < count; i += LANES) narrow_bf16((uint16_t*)row + i, load<Floats>(row + i));
}
#else
constexpr int KEYS_AT_ONCE = 1;
typedef float SoftmaxWeights;
Floats even_values(UInts a, UInts) { return widen_even(a); }
Floats odd_values(UInts a, UInts) { return widen_odd(a); }
void multiply_add(Floats& sum, Floats a, float b) { add_product(sum, a, b); }
void round_weights(float*, long) {}
#endif

// Multiplies R rows of weights, which begin SPLIT floats apart, by the values of `count` keys: R
// rows of D sums, which begin D + PARTIAL_EXTRA floats apart.
template <class Row, int R>
void sum_values(const float* weights, const char* values, const long* offsets, long count, long dim,
                float* out) {
  for (long i = 0; i < dim; i += 2 * LANES) {
    Floats sums[R][2] = {};
    const char* key_weights = (const char*)weights;
    for (long key = 0; key < count; key += KEYS_AT_ONCE, key_weights += sizeof(SoftmaxWeights)) {
      const bool has_next = KEYS_AT_ONCE > 1 && key + 1 < count;
      const UInts value = Row::bf16_pairs(values + offsets[key], i);
      const UInts next = has_next ? Row::bf16_pairs(values + offsets[key + 1], i) : UInts{};
      const auto even = even_values(value, next), odd = odd_values(value, next);
#pragma GCC unroll 16
      for (int r = 0; r < R; r++) {
        const SoftmaxWeights weight = load<SoftmaxWeights>(key_weights + r * SPLIT * sizeof(float));
        multiply_add(sums[r][0], even, weight);
        multiply_add(sums[r][1], odd, weight);
      }
    }
    for (int r = 0; r < R; r++) {
      float* row = out + r * (dim + PARTIAL_EXTRA) + i;
      store(row, interleave_low(sums[r][0], sums[r][1], Lanes()));
      store(row + LANES, interleave_high(sums[r][0], sums[r][1], Lanes()));
    }
  }
}

using ScoreKeys = void (*)(const Pair*, const UInts*, long, float, float*);
using SumValues = void (*)(const float*, const char*, const long*, long, long, float*);

// Return the score_keys() or the sum_values() for a number of rows, 1 to REGISTER_ROWS.
template <int... R> ScoreKeys select_score(long rows, std::integer_sequence<int, R...>) {
  static constexpr ScoreKeys ALL[] = {score_keys<R + 1>...};
  return ALL[rows - 1];
}

template <class Row, int... R> SumValues select_sum(long rows, std::integer_sequence<int, R...>) {
  static constexpr SumValues ALL[] = {sum_values<Row, R + 1>...};
  return ALL[rows - 1];
}

// Replaces a row of scores by the weights e^(score - m), with m, the maximum, and l, the sum of the
// weights. The first `visible` of `count` scores count; the other weights are zero.
void softmax(float* row, long visible, long count, float* m, float* l) {
  const long padded = (count + LANES - 1) / LANES * LANES;
  if (visible <= 0) {
    std::fill(row, row + padded, 0);
    *m = -INFINITE;
    *l = 0;
    return;
  }
  std::fill(row + std::min(visible, padded), row + padded, -INFINITE);
  Floats maxima = load<Floats>(row), sums = {};
  for (long i = LANES; i < padded; i += LANES) {
    const Floats scores = load<Floats>(row + i);
    maxima = scores > maxima ? scores : maxima;
  }
  *m = reduce_max(maxima);
  for (long i = 0; i < padded; i += LANES) {
    const Floats weights = exp(load<Floats>(row + i) - *m);
    store(row + i, weights);
    sums += weights;
  }
  *l = reduce_add(sums);
}

// Computes the partial results of a block of rows over one split: out (rows, D + PARTIAL_EXTRA).
template <class Row>
void attend_split(const Call& call, const Block& block, const Pair* queries, long split,
                  float* out) {
  const long dim = call.dim, begin = split * SPLIT;
  const long end = std::min(begin + SPLIT, num_visible(call, block, block.rows - 1));
  const long count = end - begin, row_bytes = dim * kv_element_bytes(call.kv_format);
  const Partition tiles(block.rows, REGISTER_ROWS);
  long offsets[SPLIT], scale_offsets[Row::HAS_SCALE ? SPLIT : 1];
  alignas(64) float scores[M_BLOCK * SPLIT], key_scales[Row::HAS_SCALE ? SPLIT : 1] = {};
  locate_keys(call, block, begin, end, offsets, Row::HAS_SCALE ? scale_offsets : nullptr);
  for (long key = 0; key < PREFETCH_KEYS; key += KEY_BLOCK)
    prefetch_keys(call.keys, offsets, key, count, row_bytes);
  for (long key = 0; key < count; key += KEY_BLOCK) {
    UInts keys_t[MAX_HEAD_DIM];
    transpose_keys<Row>(call.keys, offsets + key, count - key, dim, keys_t);
    if (Row::HAS_SCALE)
      load_scales(call.keys, scale_offsets, key, std::min(key + KEY_BLOCK, count), key_scales);
    prefetch_keys(call.keys, offsets, key + PREFETCH_KEYS, count, row_bytes);
    prefetch_keys(call.values, offsets, key, count, row_bytes);
    for (long tile = 0; tile < tiles.count; tile++) {
      const long first = tiles.first(tile);
      const ScoreKeys run =
          select_score(tiles.size(tile), std::make_integer_sequence<int, REGISTER_ROWS>());
      run(queries + first * (dim / 2), keys_t, dim, call.scale, scores + first * SPLIT + key);
    }
  }
  alignas(64) float value_scales[Row::HAS_SCALE ? SPLIT : 1] = {};
  if (Row::HAS_SCALE) load_scales(call.values, scale_offsets, 0, count, value_scales);
  for (long r = 0; r < block.rows; r++) {
    float* partial = out + r * (dim + PARTIAL_EXTRA);
    if (Row::HAS_SCALE) multiply_by_scales(scores + r * SPLIT, key_scales, count);
    softmax(scores + r * SPLIT, num_visible(call, block, r) - begin, count, partial + dim,
            partial + dim + 1);
    if (Row::HAS_SCALE) multiply_by_scales(scores + r * SPLIT, value_scales, count);
    round_weights(scores + r * SPLIT, count);
  }
  for (long tile = 0; tile < tiles.count; tile++) {
    const long first = tiles.first(tile);
    const SumValues run =
        select_sum<Row>(tiles.size(tile), std::make_integer_sequence<int, REGISTER_ROWS>());
    run(scores + first * SPLIT, call.values, offsets, count, dim,
        out + first * (dim + PARTIAL_EXTRA));
  }
}

// Sets partial results to those of an empty context: sums of zero, and a maximum of -infinity.
void clear_partials(float* partials, long rows, long dim) {
  for (long r = 0; r < rows; r++) {
    float* partial = partials + r * (dim + PARTIAL_EXTRA);
    std::fill(partial, partial + dim + PARTIAL_EXTRA, 0);
    partial[dim] = -INFINITE;
  }
}

// Merges the partial results `next` of a later split into `partials`. Not inlined: the compiler
// must not round differently in different callers.
__attribute__((noinline)) void merge_partials(float* partials, const float* next, long rows,
                                              long dim) {
  for (long r = 0; r < rows; r++, partials += dim + PARTIAL_EXTRA, next += dim + PARTIAL_EXTRA) {
    const float m = std::max(partials[dim], next[dim]);
    const Floats factors = exp(Floats{partials[dim] - m, next[dim] - m});
    const float factor = factors[0], next_factor = factors[1];
    partials[dim] = m;
    for (long i = 0; i < dim; i++) partials[i] = partials[i] * factor + next[i] * next_factor;
    partials[dim + 1] = partials[dim + 1] * factor + next[dim + 1] * next_factor;
  }
}

// Divides the sums of a block's rows by l and writes them to the output.
void write_normalized(const Call& call, const Block& block, const float* partials) {
  for (long r = 0; r < block.rows; r++, partials += call.dim + PARTIAL_EXTRA) {
    uint16_t* out = row_address(call, call.out, block, r);
    for (long i = 0; i < call.dim; i++) out[i] = to_bf16(partials[i] / partials[call.dim + 1]);
  }
}

// Returns the address of the partial results of a block and a split in the workspace. They are
// stored as (splits, kv_heads, rows, D + PARTIAL_EXTRA) for each sequence that is split.
float* partials_address(const Call& call, const Block& block, const SequenceStart& start,
                        long split) {
  const long rows = start.partial + split * call.kv_heads * block.rows + block.kv_head * block.rows;
  return call.partials() + rows * (call.dim + PARTIAL_EXTRA);
}

// Returns all rows of a sequence that is split, for one kv head, as one block.
Block whole_block(const Call& call, long seq, long kv_head) {
  return {seq, kv_head, call.query_starts[seq], 0, call.rows(seq)};
}

// A work item: one split of the context of a sequence that is split, or a block of rows and its
// whole context.
struct Item {
  Block block;
  SequenceStart start;  // of the block's sequence
  long split;           // -1: the whole context
};

// Returns the i-th work item of a call.
Item find_item(const Call& call, long i) {
  const SequenceStart* starts = call.starts();
  const SequenceStart* after =
      std::upper_bound(starts, starts + call.num_seqs, i,
                       [](long i, const SequenceStart& start) { return i < start.item; });
  const long seq = after - 1 - starts, item = i - after[-1].item;
  const long blocks = call.blocks(seq), rows = call.rows(seq), query = call.query_starts[seq];
  if (call.is_split(seq))  // neighbouring items are neighbouring kv heads, as in memory
    return {whole_block(call, seq, item % call.kv_heads), after[-1], item / call.kv_heads};
  const long first = (blocks - 1 - item % blocks) * M_BLOCK;  // blocks with most keys come first
  return {{seq, item / blocks, query, first, std::min(M_BLOCK, rows - first)}, after[-1], -1};
}

constexpr long MAX_SUMS = M_BLOCK * (MAX_HEAD_DIM + PARTIAL_EXTRA);

// Computes the partial results of a work item's rows: sums (rows, D + PARTIAL_EXTRA).
void compute_item(const Call& call, const Item& item, float* sums) {
  const Block& block = item.block;
  Pair queries[M_BLOCK * MAX_HEAD_DIM / 2];
  pack_rows(call, block, queries);
  const auto attend =
      call.kv_format == KvFormat::INT8 ? attend_split<Int8Row> : attend_split<Bf16Row>;
  if (item.split >= 0) return attend(call, block, queries, item.split, sums);
  alignas(64) float next[MAX_SUMS];
  clear_partials(sums, block.rows, call.dim);
  for (long split = 0; split * SPLIT < num_visible(call, block, block.rows - 1); split++) {
    attend(call, block, queries, split, next);
    merge_partials(sums, next, block.rows, call.dim);
  }
}

// Writes a work item's results to the output, or its partial results to the workspace.
void write_item(const Call& call, const Item& item, const float* sums) {
  const Block& block = item.block;
  if (item.split < 0) return write_normalized(call, block, sums);
  std::memcpy(partials_address(call, block, item.start, item.split), sums,
              block.rows * (call.dim + PARTIAL_EXTRA) * sizeof(float));
}

// Merges the partial results of all splits of a block: sums (rows, D + PARTIAL_EXTRA).
void merge_splits(const Call& call, const Block& block, float* sums) {
  const SequenceStart& start = call.starts()[block.seq];
  clear_partials(sums, block.rows, call.dim);
  for (long split = 0; split < call.splits(block.seq); split++)
    merge_partials(sums, partials_address(call, block, start, split), block.rows, call.dim);
}

// Moves a start past one sequence.
void advance(const Call& call, long seq, SequenceStart* start) {
  const bool is_split = call.is_split(seq);
  start->item += call.kv_heads * (is_split ? call.splits(seq) : call.blocks(seq));
  start->partial += is_split ? call.kv_heads * call.rows(seq) * call.splits(seq) : 0;
}

// Returns the numbers of work items and partial results of all sequences.
SequenceStart count_all(const Call& call) {
  SequenceStart total = {};
  for (long seq = 0; seq < call.num_seqs; seq++) advance(call, seq, &total);
  return total;
}

}  // namespace

// The workspace has the starts of the sequences, then the partial results of sequences that are
// split, D + PARTIAL_EXTRA floats per row and split.
long attention_bytes(const Attention& attention) {
  const Call call = {attention};
  return (call.num_seqs + 1) * sizeof(SequenceStart) +
         count_all(call).partial * (call.dim + PARTIAL_EXTRA) * sizeof(float);
}

double plan_attention(const Attention& attention) {
  const Call call = {attention};
  SequenceStart start = {};
  double work = 0;
  for (long seq = 0; seq < call.num_seqs; seq++) {
    call.starts()[seq] = start;
    advance(call, seq, &start);
    work += 2.0 * call.num_queries(seq) * call.seq_lens[seq] * call.heads * call.dim;
  }
  call.starts()[call.num_seqs] = start;
  return work;
}

// The first phase computes the work items; the second merges the partial results of sequences that
// are split, one kv head per piece.
void attend(Worker& worker, const Attention& attention) {
  const Call call = {attention};
  alignas(64) float sums[MAX_SUMS];
  worker.run(
      call.starts()[call.num_seqs].item,
      [&](long i) { compute_item(call, find_item(call, i), sums); },
      [&](long i) { write_item(call, find_item(call, i), sums); });
  const auto block_of = [&](long i) {
    return whole_block(call, i / call.kv_heads, i % call.kv_heads);
  };
  worker.run(
      call.num_seqs * call.kv_heads,
      [&](long i) {
        if (call.is_split(i / call.kv_heads)) merge_splits(call, block_of(i), sums);
      },
      [&](long i) {
        if (call.is_split(i / call.kv_heads)) write_normalized(call, block_of(i), sums);
      });
}

extern "C" {

// Returns the bytes of workspace that paged_attention_bf16 needs.
long attention_workspace(const int64_t* query_starts, const int64_t* seq_lens, long num_seqs,
                         long heads, long kv_heads, long dim) {
  return attention_bytes(attention_shape(query_starts, seq_lens, num_seqs, heads, kv_heads, dim));
}

// Computes attention: queries (T, H, D) -> out (T, H, D). kv_pages are the keys of all P pages,
// then the values (see kernels.h); table (B, M), query_starts (B + 1), seq_lens (B).
void paged_attention_bf16(const uint16_t* queries, const char* kv_pages, const int64_t* table,
                          const int64_t* query_starts, const int64_t* seq_lens, uint16_t* out,
                          char* workspace, long num_seqs, long heads, long kv_heads, long dim,
                          long num_pages, long page_size, long pages_per_seq, long kv_format,
                          long is_bidirectional, float scale, int threads) {
  const long row_bytes = kv_row_bytes(dim, (KvFormat)kv_format);
  const char* values = kv_pages + num_pages * page_size * kv_heads * row_bytes;
  // clang-format off
  const Attention call = {
      queries, kv_pages, values, out,
      table, query_starts, seq_lens, workspace,
      num_seqs, pages_per_seq, page_size, heads, kv_heads, dim,
      scale, (KvFormat)kv_format, (bool)is_bidirectional,
  };
  // clang-format on
  const double work = plan_attention(call);
  run_team(work > MIN_PARALLEL_WORK ? threads : 1, [&](Worker& worker) { attend(worker, call); });
}
}
