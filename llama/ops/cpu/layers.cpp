// Runs the layers of a model over the batch of one step, in one parallel region: half layers, such
// as attention and the feed-forward block, with their norms and residual sums. It calls the same
// operators as Python does, in the same order (see kernels.h), so the bytes are the same.
//
// llama/model/execution.py owns the tensors, makes the table of half layers and checks the shapes.
// Between half layers the ranks sum their parts of the result.
#include "kernels.h"
#include "vectors.h"

namespace {

constexpr long SILU_STEP = 1024;  // elements that one work item computes

// A row of the table: a half layer, x + second(body(first(norm(x)) + bias)). `kind` is its body.
struct Half {
  BodyKind kind;
  int64_t kv_plane;  // index of its keys and values in the KV cache, if the kind stores them
  const uint16_t* norm;
  const uint16_t* bias;  // null: nothing is added
  Matrix first, second;
};
static_assert(sizeof(Half) == HALF_FIELDS * sizeof(int64_t));

struct Sizes {
  long rows, dim, ffn, num_pages;
};

// The buffers between the operators of a half layer; each holds all rows of the step.
struct Scratch {
  uint16_t *qkv, *queries, *attended, *gate_up, *gated;
  char *attention, *linear;
};

// Divides a workspace into buffers. With a null pointer it only counts the bytes.
class Cutter {
 public:
  explicit Cutter(char* start) : start(start) {}
  char* cut(long bytes) {
    char* part = start + used;
    used += (bytes + 63) & -64;
    return part;
  }
  uint16_t* cut_rows(long rows, long width) { return (uint16_t*)cut(2 * rows * width); }
  long bytes() const { return used; }

 private:
  char* start;
  long used = 0;
};

Scratch cut(Cutter& cutter, const Attention& a, const Sizes& sizes, long threads) {
  const long rows = sizes.rows, q = a.heads * a.dim, widest = std::max({sizes.dim, sizes.ffn, q});
  Scratch s;
  s.qkv = cutter.cut_rows(rows, q + 2 * a.kv_heads * a.dim);
  s.queries = cutter.cut_rows(rows, q);
  s.attended = cutter.cut_rows(rows, q);
  s.gate_up = cutter.cut_rows(rows, 2 * sizes.ffn);
  s.gated = cutter.cut_rows(rows, sizes.ffn);
  s.attention = cutter.cut(attention_bytes(a));
  s.linear = cutter.cut(linear_bytes(rows, widest, threads));
  return s;
}

struct Call {
  const Half* halves;
  uint16_t* x;
  Outputs out;
  const float* freqs_cis;
  char* kv_cache;
  const int64_t* slots;
  Attention attention;  // without keys and values
  Sizes sizes;
  Scratch scratch;
  float eps;
};

// Computes the first product of a half layer, of normalised x, into out (rows, width), and adds the
// bias. The product is rounded to bf16 before the sum is, as in Python.
void run_first(Worker& member, const Call& call, const Half& half, uint16_t* out, long width) {
  const long rows = call.sizes.rows;
  linear(member, {call.x, rows, half.norm, call.eps}, {half.first, width, call.sizes.dim},
         {out, Outputs::BF16}, call.scratch.linear);
  if (!half.bias) return;
  member.run(rows, [&](long row) {
    uint16_t* sums = out + row * width;
    for (long i = 0; i < width; i++) sums[i] = to_bf16(widen(sums[i]) + widen(half.bias[i]));
  });
}

void run_attention(Worker& member, const Call& call, const Half& half) {
  const Scratch& s = call.scratch;
  const long rows = call.sizes.rows, dim = call.sizes.dim;
  Attention a = call.attention;
  const Heads heads = {a.heads, a.kv_heads, a.dim, call.sizes.num_pages, a.page_size, a.kv_format};
  const long q = a.heads * a.dim, all = q + 2 * a.kv_heads * a.dim;
  const long keys_bytes =
      heads.num_pages * a.page_size * a.kv_heads * kv_row_bytes(a.dim, a.kv_format);
  char* pages = call.kv_cache + 2 * keys_bytes * half.kv_plane;
  a.keys = pages, a.values = pages + keys_bytes;
  run_first(member, call, half, s.qkv, all);
  member.run(rows, [&](long row) {
    rope_and_store(s.qkv + row * all, call.freqs_cis + row * a.dim, pages, call.slots[row],
                   s.queries + row * q, heads);
  });
  attend(member, a);
  linear(member, {s.attended, rows}, {half.second, dim, q}, call.out, s.linear);
}

void run_feed_forward(Worker& member, const Call& call, const Half& half) {
  const Scratch& s = call.scratch;
  const long rows = call.sizes.rows, dim = call.sizes.dim, ffn = call.sizes.ffn;
  run_first(member, call, half, s.gate_up, 2 * ffn);
  const long steps = (ffn + SILU_STEP - 1) / SILU_STEP;
  member.run(rows * steps, [&](long piece) {
    const long row = piece / steps, begin = piece % steps * SILU_STEP;
    const uint16_t* gate = s.gate_up + row * 2 * ffn + begin;
    silu_mul(gate, gate + ffn, s.gated + row * ffn + begin, std::min(SILU_STEP, ffn - begin));
  });
  linear(member, {s.gated, rows}, {half.second, dim, ffn}, call.out, s.linear);
}

// The bodies in the order of BodyKind.
constexpr decltype(&run_attention) BODIES[] = {run_attention, run_feed_forward};

}  // namespace

extern "C" {

// Returns the bytes of workspace that layers_bf16 needs.
long layers_workspace(const int64_t* query_starts, const int64_t* seq_lens, long rows,
                      long num_seqs, long dim, long heads, long kv_heads, long head_dim, long ffn,
                      long threads) {
  Attention a = {};
  a.query_starts = query_starts, a.seq_lens = seq_lens, a.num_seqs = num_seqs;
  a.heads = heads, a.kv_heads = kv_heads, a.dim = head_dim;
  Cutter cutter(nullptr);
  cut(cutter, a, {rows, dim, ffn, 0}, threads);
  return cutter.bytes();
}

// Runs the half layers from `first` up to, not including, `last` of the table (rows of Half). x and
// out are (T, E). If out is x, each result is added to x; otherwise there is one half layer, whose
// result is written to out. freqs_cis (T, D/2, 2), kv_cache (L, 2, P, S, K) rows, slots (T), table
// (B, M), query_starts (B + 1), seq_lens (B).
void layers_bf16(const int64_t* halves, uint16_t* x, uint16_t* out, const float* freqs_cis,
                 char* kv_cache, const int64_t* slots, const int64_t* table,
                 const int64_t* query_starts, const int64_t* seq_lens, char* workspace, long first,
                 long last, long rows, long num_seqs, long dim, long heads, long kv_heads,
                 long head_dim, long ffn, long num_pages, long page_size, long pages_each,
                 long kv_format, float eps, float scale, int threads) {
  Attention a = {};
  a.table = table, a.query_starts = query_starts, a.seq_lens = seq_lens, a.num_seqs = num_seqs;
  a.pages_each = pages_each, a.page_size = page_size;
  a.heads = heads, a.kv_heads = kv_heads, a.dim = head_dim, a.scale = scale;
  a.kv_format = (KvFormat)kv_format;
  const Sizes sizes = {rows, dim, ffn, num_pages};
  Cutter cutter(workspace);
  const Scratch scratch = cut(cutter, a, sizes, threads);
  a.queries = scratch.queries, a.out = scratch.attended, a.workspace = scratch.attention;
  plan_attention(a);
  const Outputs outputs = {out, out == x ? Outputs::ADDED : Outputs::BF16};
  const Call call = {
      (const Half*)halves, x, outputs, freqs_cis, kv_cache, slots, a, sizes, scratch, eps};
  run_team(threads, [&](Worker& member) {
    for (const Half* half = call.halves + first; half < call.halves + last; half++)
      BODIES[(long)half->kind](member, call, *half);
  });
}
}
