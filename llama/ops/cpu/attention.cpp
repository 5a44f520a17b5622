// Attention over a paged KV cache (PagedAttention, Kwon et al., 2023) as in Flash-Decoding: the
// context is split, each part is done with the online softmax of FlashAttention (Dao et al., 2022),
// and the parts are merged. bf16 in and out; float32 scores, softmax and sums. The body of
// avx512_bf16 rounds what it multiplies values with to bf16, as FlashAttention does, which takes
// 0.79 of the time for a prompt of 2,048. On one Zen 4 core, 4 layers at batch 8 and context 512
// take 2.7 ms; torch took 18.2 of a step of 42.2.
//
// attention.py owns the tensors, checks the shapes and has the legend of their letters. The rows of
// a sequence and a kv head are its queries times the G heads that share the kv head, row = query *
// G + head. A block of rows goes over the keys together. The context is cut by position into parts
// of SPLIT keys. Each part gives a row its partial: m, the maximum score; l, the sum of
// e^(score - m); and D sums of value times e^(score - m). Partials are merged in order of position.
// A sequence with one block of rows has one item of work per part, so that a single long context
// uses every thread; a longer one has one item per block.
//
// Borders of the parts and the order of every sum depend on positions only. So a query gives the
// same bytes alone as in any batch, in a prefill as in a decode step, on any number of threads.
#include <algorithm>

#include "kernels.h"
#include "vectors.h"

namespace {

constexpr long SPLIT = 256;   // keys of a part of the context
constexpr long M_BLOCK = 56;  // rows that go over the keys together
constexpr int KEYS = 2 * LANES;
constexpr long PREFETCH_KEYS = 64;  // without prefetch it took twice as long (Zen 4, from memory)
constexpr double MIN_PARALLEL_WORK = 3e5;  // multiplications; below, waking threads takes longer

// Of a sequence: its first item of work and its first partial.
struct Start {
  int64_t item, partial;
};

struct Call : Attention {
  Start* starts() const { return (Start*)workspace; }  // (num_seqs + 1); the last has the sums
  float* partials() const { return (float*)(starts() + num_seqs + 1); }
  long group() const { return heads / kv_heads; }
  long queries_of(long seq) const { return query_starts[seq + 1] - query_starts[seq]; }
  long rows(long seq) const { return queries_of(seq) * group(); }
  long blocks(long seq) const { return (rows(seq) + M_BLOCK - 1) / M_BLOCK; }
  long splits(long seq) const { return (seq_lens[seq] + SPLIT - 1) / SPLIT; }
  bool is_split(long seq) const { return blocks(seq) == 1; }
};

// A block of rows of one sequence and one kv head.
struct Block {
  long seq, kv_head, first_query, first_row, rows;
};

uint16_t* row_at(const Call& call, uint16_t* tensor, const Block& block, long i) {
  const long row = block.first_row + i, group = call.group();
  const long query = block.first_query + row / group, head = block.kv_head * group + row % group;
  return tensor + (query * call.heads + head) * call.dim;
}

// How many tokens the i-th row of a block attends to.
long num_visible(const Call& call, const Block& block, long i) {
  const long query = (block.first_row + i) / call.group();
  return call.seq_lens[block.seq] - call.queries_of(block.seq) + query + 1;
}

// The queries of a block, tile after tile: (D/2, R) pairs each.
void pack_rows(const Call& call, const Block& block, Pair* to) {
  const Partition tiles(block.rows, REGISTER_ROWS);
  for (long tile = 0; tile < tiles.count; tile++) {
    const long first = tiles.first(tile), size = tiles.size(tile);
    for (long r = 0; r < size; r++) {
      const uint16_t* query = row_at(call, (uint16_t*)call.queries, block, first + r);
      for (long i = 0; i < call.dim / 2; i++) to[i * size + r] = load_pair(query + 2 * i);
    }
    to += size * (call.dim / 2);
  }
}

// Offsets in bytes of the keys of positions begin to end, and of their values, for one kv head; and
// of their units, where there is room for them.
void find_keys(const Call& call, const Block& block, long begin, long end, long* offsets,
               long* units) {
  const long rows = call.page_size * call.kv_heads, head = block.kv_head;
  const long page_bytes = rows * kv_row_bytes(call.dim, call.kv_format);
  const long row_bytes = call.dim * kv_element_bytes(call.kv_format);
  const int64_t* pages = call.table + block.seq * call.pages_per_seq;
  while (begin < end) {
    const long slot = begin % call.page_size, page = pages[begin / call.page_size] * page_bytes;
    const long count = std::min(call.page_size - slot, end - begin);
    for (long i = slot; i < slot + count; i++)
      *offsets++ = page + (i * call.kv_heads + head) * row_bytes;
    for (long i = slot; units && i < slot + count; i++)
      *units++ = page + rows * row_bytes + 2 * (head * call.page_size + i);
    begin += count;
  }
}

// LANES rows of LANES words: word j of row i becomes word i of row j.
void transpose(UInts (&rows)[LANES]) {
  for (int done = 1; done < LANES; done *= 2) {
    UInts mixed[LANES];
#pragma GCC unroll 16
    for (int i = 0; i < LANES / 2; i++) {
      mixed[2 * i] = interleave_low(rows[i], rows[i + LANES / 2], Lanes());
      mixed[2 * i + 1] = interleave_high(rows[i], rows[i + LANES / 2], Lanes());
    }
    std::memcpy(rows, mixed, sizeof mixed);
  }
}

// What the numbers of a row are: bf16 as they are, or whole numbers of its unit, a bf16 as well.
// A key's unit multiplies its scores, a value's its weights.
struct Bf16Row {
  static constexpr bool HAS_UNIT = false;
  static UInts words(const char* row, long i) { return load<UInts>(row + 2 * i); }
};

struct Int8Row {
  static constexpr bool HAS_UNIT = true;
  static UInts words(const char* row, long i) {
    Floats first, second;
    load_int8_pairs(row + i, first, second);
    return (UInts)first >> 16 | (UInts)second;
  }
};

void load_units(const char* pages, const long* offsets, long begin, long end, float* to) {
  for (long key = begin; key < end; key++) to[key] = widen(load<uint16_t>(pages + offsets[key]));
}

void multiply(float* row, const float* units, long count) {
  for (long i = 0; i < count; i += LANES)
    store(row + i, load<Floats>(row + i) * load<Floats>(units + i));
}

// Up to KEYS keys -> (D/2, KEYS) words: a vector holds the same pair of numbers of LANES keys.
template <class Row>
void transpose_keys(const char* keys, const long* offsets, long count, long dim, UInts* to) {
  for (int side = 0; side < 2; side++, to++) {
    const long first = side * LANES;
    for (long i = 0; i < dim / 2; i += LANES) {
      UInts rows[LANES] = {};
      for (long key = first; key < count && key < first + LANES; key++)
        rows[key - first] = Row::words(keys + offsets[key], 2 * i);
      transpose(rows);
      for (int j = 0; j < LANES; j++) to[2 * (i + j)] = rows[j];
    }
  }
}

// Prefetches KEYS keys or values into L2: in L1 they would push one another out.
void fetch(const char* from, const long* offsets, long begin, long count, long row_bytes) {
  for (long key = begin; key < count && key < begin + KEYS; key++)
    for (long i = 0; i < row_bytes; i += 64) __builtin_prefetch(from + offsets[key] + i, 0, 2);
}

// R rows times KEYS keys -> R rows of scores, SPLIT apart.
template <int R>
void score(const Pair* queries, const UInts* keys, long dim, float scale, float* scores) {
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

// How many keys are weighed at once. Two neighbours, with weights rounded to bf16, where the CPU is
// fast at pairs of bf16. Intel's are not, see build.py, and those with tiles are Intel's.
#if defined(__AVX512BF16__) && !defined(__AMX_TILE__)
constexpr int AT_ONCE = 2;
typedef Pair Weights;
Pairs firsts_of(UInts a, UInts b) { return (Pairs)(a & 0xffffu | b << 16); }
Pairs seconds_of(UInts a, UInts b) { return (Pairs)(a >> 16 | (b & 0xffff0000u)); }
void round_weights(float* row, long count) {  // in their place
  for (long i = 0; i < count; i += LANES)
    store((uint16_t*)row + i, _mm512_cvtneps_pbh((__m512)load<Floats>(row + i)));
}
#else
constexpr int AT_ONCE = 1;
typedef float Weights;
Floats firsts_of(UInts a, UInts) { return widen_even(a); }
Floats seconds_of(UInts a, UInts) { return widen_odd(a); }
void multiply_add(Floats& sum, Floats a, float b) { add_product(sum, a, b); }
void round_weights(float*, long) {}
#endif

// R rows of weights, SPLIT floats apart, times the values -> R rows of D sums, D + 2 apart.
template <class Row, int R>
void weigh(const float* weights, const char* values, const long* offsets, long count, long dim,
           float* out) {
  for (long i = 0; i < dim; i += 2 * LANES) {
    Floats sums[R][2] = {};
    const char* at = (const char*)weights;
    for (long key = 0; key < count; key += AT_ONCE, at += sizeof(Weights)) {
      const bool has_next = AT_ONCE > 1 && key + 1 < count;
      const UInts one = Row::words(values + offsets[key], i);
      const UInts next = has_next ? Row::words(values + offsets[key + 1], i) : UInts{};
      const auto firsts = firsts_of(one, next), seconds = seconds_of(one, next);
#pragma GCC unroll 16
      for (int r = 0; r < R; r++) {
        const Weights weight = load<Weights>(at + r * SPLIT * sizeof(float));
        multiply_add(sums[r][0], firsts, weight);
        multiply_add(sums[r][1], seconds, weight);
      }
    }
    for (int r = 0; r < R; r++) {
      float* to = out + r * (dim + 2) + i;
      store(to, interleave_low(sums[r][0], sums[r][1], Lanes()));
      store(to + LANES, interleave_high(sums[r][0], sums[r][1], Lanes()));
    }
  }
}

using Score = void (*)(const Pair*, const UInts*, long, float, float*);
using Weigh = void (*)(const float*, const char*, const long*, long, long, float*);

template <int... R> Score pick_score(long rows, std::integer_sequence<int, R...>) {
  static constexpr Score ALL[] = {score<R + 1>...};
  return ALL[rows - 1];
}

template <class Row, int... R> Weigh pick_weigh(long rows, std::integer_sequence<int, R...>) {
  static constexpr Weigh ALL[] = {weigh<Row, R + 1>...};
  return ALL[rows - 1];
}

// A row of scores, of which the first `visible` count -> weights e^(score - m), m and their sum l.
void softmax(float* row, long visible, long count, float* m, float* l) {
  const long padded = (count + LANES - 1) / LANES * LANES;
  if (visible <= 0) {
    std::fill(row, row + padded, 0);
    *m = -INFINITE, *l = 0;
    return;
  }
  std::fill(row + std::min(visible, padded), row + padded, -INFINITE);
  Floats maxima = load<Floats>(row), sums = {};
  for (long i = LANES; i < padded; i += LANES) {
    const Floats next = load<Floats>(row + i);
    maxima = next > maxima ? next : maxima;
  }
  *m = reduce_max(maxima);
  for (long i = 0; i < padded; i += LANES) {
    const Floats weights = exp(load<Floats>(row + i) - *m);
    store(row + i, weights);
    sums += weights;
  }
  *l = reduce_add(sums);
}

// The partials of a block of rows over one part of the context: D sums, m and l per row.
template <class Row>
void attend_to(const Call& call, const Block& block, const Pair* queries, long split, float* out) {
  const long dim = call.dim, begin = split * SPLIT;
  const long end = std::min(begin + SPLIT, num_visible(call, block, block.rows - 1));
  const long count = end - begin, row_bytes = dim * kv_element_bytes(call.kv_format);
  const Partition tiles(block.rows, REGISTER_ROWS);
  long offsets[SPLIT], unit_offsets[Row::HAS_UNIT ? SPLIT : 1];
  alignas(64) float scores[M_BLOCK * SPLIT], units[Row::HAS_UNIT ? SPLIT : 1] = {};
  find_keys(call, block, begin, end, offsets, Row::HAS_UNIT ? unit_offsets : nullptr);
  for (long key = 0; key < PREFETCH_KEYS; key += KEYS)
    fetch(call.keys, offsets, key, count, row_bytes);
  for (long key = 0; key < count; key += KEYS) {
    UInts keys_t[MAX_HEAD_DIM];
    transpose_keys<Row>(call.keys, offsets + key, count - key, dim, keys_t);
    if (Row::HAS_UNIT) load_units(call.keys, unit_offsets, key, std::min(key + KEYS, count), units);
    fetch(call.keys, offsets, key + PREFETCH_KEYS, count, row_bytes);
    fetch(call.values, offsets, key, count, row_bytes);
    for (long tile = 0; tile < tiles.count; tile++) {
      const long first = tiles.first(tile);
      const Score run =
          pick_score(tiles.size(tile), std::make_integer_sequence<int, REGISTER_ROWS>());
      run(queries + first * (dim / 2), keys_t, dim, call.scale, scores + first * SPLIT + key);
    }
  }
  alignas(64) float value_units[Row::HAS_UNIT ? SPLIT : 1] = {};
  if (Row::HAS_UNIT) load_units(call.values, unit_offsets, 0, count, value_units);
  for (long r = 0; r < block.rows; r++) {
    float* partial = out + r * (dim + 2);
    if (Row::HAS_UNIT) multiply(scores + r * SPLIT, units, count);
    softmax(scores + r * SPLIT, num_visible(call, block, r) - begin, count, partial + dim,
            partial + dim + 1);
    if (Row::HAS_UNIT) multiply(scores + r * SPLIT, value_units, count);
    round_weights(scores + r * SPLIT, count);
  }
  for (long tile = 0; tile < tiles.count; tile++) {
    const long first = tiles.first(tile);
    const Weigh run =
        pick_weigh<Row>(tiles.size(tile), std::make_integer_sequence<int, REGISTER_ROWS>());
    run(scores + first * SPLIT, call.values, offsets, count, dim, out + first * (dim + 2));
  }
}

void clear(float* partials, long rows, long dim) {
  for (long r = 0; r < rows; r++) {
    float* partial = partials + r * (dim + 2);
    std::fill(partial, partial + dim + 2, 0);
    partial[dim] = -INFINITE;
  }
}

// Not inlined: all callers must round alike.
__attribute__((noinline)) void merge(float* partials, const float* next, long rows, long dim) {
  for (long r = 0; r < rows; r++, partials += dim + 2, next += dim + 2) {
    const float m = std::max(partials[dim], next[dim]);
    const Floats scales = exp(Floats{partials[dim] - m, next[dim] - m});
    const float old = scales[0], fresh = scales[1];
    partials[dim] = m;
    for (long i = 0; i < dim; i++) partials[i] = partials[i] * old + next[i] * fresh;
    partials[dim + 1] = partials[dim + 1] * old + next[dim + 1] * fresh;
  }
}

void normalise(const Call& call, const Block& block, const float* partials) {
  for (long r = 0; r < block.rows; r++, partials += call.dim + 2) {
    uint16_t* to = row_at(call, call.out, block, r);
    for (long i = 0; i < call.dim; i++) to[i] = to_bf16(partials[i] / partials[call.dim + 1]);
  }
}

float* partials_at(const Call& call, const Block& block, const Start& start, long split) {
  const long rows = start.partial + split * call.kv_heads * block.rows + block.kv_head * block.rows;
  return call.partials() + rows * (call.dim + 2);
}

// All rows of a sequence that is split, for one kv head: one block.
Block whole_block(const Call& call, long seq, long kv_head) {
  return {seq, kv_head, call.query_starts[seq], 0, call.rows(seq)};
}

// Of an item of work: a part of the context of a sequence that is split, else a block of its rows.
struct Item {
  Block block;
  Start start;  // of the sequence
  long split;   // -1: the whole context
};

Item item_of(const Call& call, long i) {
  const Start* starts = call.starts();
  const Start* after = std::upper_bound(starts, starts + call.num_seqs, i,
                                        [](long i, const Start& s) { return i < s.item; });
  const long seq = after - 1 - starts, item = i - after[-1].item;
  const long blocks = call.blocks(seq), rows = call.rows(seq), query = call.query_starts[seq];
  if (call.is_split(seq))  // neighbouring kv heads are neighbours in memory
    return {whole_block(call, seq, item % call.kv_heads), after[-1], item / call.kv_heads};
  const long first = (blocks - 1 - item % blocks) * M_BLOCK;  // the longest first
  return {{seq, item / blocks, query, first, std::min(M_BLOCK, rows - first)}, after[-1], -1};
}

constexpr long MAX_SUMS = M_BLOCK * (MAX_HEAD_DIM + 2);

// The partials of an item's rows, in `sums`.
void compute_item(const Call& call, const Item& item, float* sums) {
  const Block& block = item.block;
  Pair queries[M_BLOCK * MAX_HEAD_DIM / 2];
  pack_rows(call, block, queries);
  const auto attend_to =
      call.kv_format == KvFormat::INT8 ? ::attend_to<Int8Row> : ::attend_to<Bf16Row>;
  if (item.split >= 0) return attend_to(call, block, queries, item.split, sums);
  alignas(64) float next[MAX_SUMS];
  clear(sums, block.rows, call.dim);
  for (long split = 0; split * SPLIT < num_visible(call, block, block.rows - 1); split++) {
    attend_to(call, block, queries, split, next);
    merge(sums, next, block.rows, call.dim);
  }
}

void write_item(const Call& call, const Item& item, const float* sums) {
  const Block& block = item.block;
  if (item.split < 0) return normalise(call, block, sums);
  std::memcpy(partials_at(call, block, item.start, item.split), sums,
              block.rows * (call.dim + 2) * sizeof(float));
}

void merge_splits(const Call& call, const Block& block, float* sums) {
  const Start& start = call.starts()[block.seq];
  clear(sums, block.rows, call.dim);
  for (long split = 0; split < call.splits(block.seq); split++)
    merge(sums, partials_at(call, block, start, split), block.rows, call.dim);
}

// Moves `at` past one sequence.
void advance(const Call& call, long seq, Start* at) {
  const bool split = call.is_split(seq);
  at->item += call.kv_heads * (split ? call.splits(seq) : call.blocks(seq));
  at->partial += split ? call.kv_heads * call.rows(seq) * call.splits(seq) : 0;
}

Start totals(const Call& call) {
  Start at = {};
  for (long seq = 0; seq < call.num_seqs; seq++) advance(call, seq, &at);
  return at;
}

}  // namespace

// The starts of the sequences, then partials of D + 2 floats per row and part of the context, for
// sequences that are split.
long attention_bytes(const Attention& attention) {
  const Call call = {attention};
  return (call.num_seqs + 1) * sizeof(Start) +
         totals(call).partial * (call.dim + 2) * sizeof(float);
}

double plan_attention(const Attention& attention) {
  const Call call = {attention};
  Start at = {};
  double work = 0;
  for (long seq = 0; seq < call.num_seqs; seq++) {
    call.starts()[seq] = at;
    advance(call, seq, &at);
    work += 2.0 * call.queries_of(seq) * call.seq_lens[seq] * call.heads * call.dim;
  }
  call.starts()[call.num_seqs] = at;
  return work;
}

void attend(Worker& member, const Attention& attention) {
  const Call call = {attention};
  alignas(64) float sums[MAX_SUMS];
  member.run(
      call.starts()[call.num_seqs].item,
      [&](long i) { compute_item(call, item_of(call, i), sums); },
      [&](long i) { write_item(call, item_of(call, i), sums); });
  const auto block_of = [&](long i) {
    return whole_block(call, i / call.kv_heads, i % call.kv_heads);
  };
  member.run(
      call.num_seqs * call.kv_heads,
      [&](long i) {
        if (call.is_split(i / call.kv_heads)) merge_splits(call, block_of(i), sums);
      },
      [&](long i) {
        if (call.is_split(i / call.kv_heads)) normalise(call, block_of(i), sums);
      });
}

extern "C" {

// Bytes of workspace of paged_attention_bf16.
long attention_workspace(const int64_t* query_starts, const int64_t* seq_lens, long num_seqs,
                         long heads, long kv_heads, long dim) {
  Attention call = {};
  call.query_starts = query_starts, call.seq_lens = seq_lens, call.num_seqs = num_seqs;
  call.heads = heads, call.kv_heads = kv_heads, call.dim = dim;
  return attention_bytes(call);
}

// queries and out (T, H, D), kv_pages two times P pages, table (B, M), query_starts (B + 1),
// seq_lens (B).
void paged_attention_bf16(const uint16_t* queries, const char* kv_pages, const int64_t* table,
                          const int64_t* query_starts, const int64_t* seq_lens, uint16_t* out,
                          char* workspace, long num_seqs, long heads, long kv_heads, long dim,
                          long num_pages, long page_size, long pages_per_seq, long kv_format,
                          float scale, int threads) {
  const long row_bytes = kv_row_bytes(dim, (KvFormat)kv_format);
  const char* values = kv_pages + num_pages * page_size * kv_heads * row_bytes;
  const Attention call = {queries,  kv_pages,     values,    out,
                          table,    query_starts, seq_lens,  workspace,
                          num_seqs, pages_per_seq,   page_size, heads,
                          kv_heads, dim,          scale,     (KvFormat)kv_format};
  const double work = plan_attention(call);
  run_team(work > MIN_PARALLEL_WORK ? threads : 1, [&](Worker& member) { attend(member, call); });
}
}
