// Runs the layers of a model over the batch of one step, in one parallel region.
//
// In: the activations x (T, E) bf16, a table of half layers, and the KV cache. Out: the updated
// activations, or the result of one half layer. A half layer is attention or the feed-forward block
// with its norm and its residual sum. The operators are those that Python calls one by one, in the
// same order (see kernels.h), so the bytes are the same.
//
// llama/model/execution.py owns the tensors, makes the table of half layers and checks the shapes.
// With several ranks, Python calls this for one half layer at a time, and the ranks sum their
// partial results between the calls.
//
// Shapes: T tokens, E elements of an activation, H query heads, K kv heads, D head dim, F features
// of the feed-forward block on this rank, L layers, P pages, S slots per page, B sequences, M pages
// per sequence.
#include "kernels.h"
#include "vectors.h"

namespace {

constexpr long SILU_STEP = 1024;  // elements that one work item computes

// A half layer, one row of the table: x + second(body(first(norm(x)) + bias)).
struct Half {
  BodyKind kind;         // selects the body
  int64_t kv_plane;      // index of its layer in the KV cache, if the body stores keys and values
  const uint16_t* norm;  // (E) bf16
  const uint16_t* bias;  // bf16, as wide as the outputs of the first product; null without a bias
  Matrix first;
  Matrix second;
};
static_assert(sizeof(Half) == HALF_FIELDS * sizeof(int64_t));

struct Sizes {
  long rows;       // T
  long dim;        // E
  long ffn;        // F
  long num_pages;  // P
};

// The buffers between the operators of a half layer; each holds all rows of the step.
struct Scratch {
  uint16_t* qkv;       // (T, H + 2 K, D)
  uint16_t* queries;   // (T, H, D), rotated
  uint16_t* attended;  // (T, H, D)
  uint16_t* gate_up;   // (T, 2 F)
  uint16_t* gated;     // (T, F)
  char* attention_workspace;
  char* linear_workspace;
};

// Divides a workspace into buffers that are aligned to cache lines. With a null pointer it only
// counts the bytes.
class WorkspaceAllocator {
 public:
  explicit WorkspaceAllocator(char* start) : start(start) {}

  char* allocate(long bytes) {
    char* buffer = start + used;
    used += (bytes + 63) & -64;
    return buffer;
  }

  uint16_t* allocate_rows(long rows, long width) { return (uint16_t*)allocate(2 * rows * width); }

  long bytes() const { return used; }

 private:
  char* start;
  long used = 0;
};

Scratch allocate_scratch(WorkspaceAllocator& allocator, const Attention& attention,
                         const Sizes& sizes, long threads) {
  const long rows = sizes.rows;
  const long query_width = attention.heads * attention.dim;
  const long kv_width = attention.kv_heads * attention.dim;
  const long max_width = std::max({sizes.dim, sizes.ffn, query_width});
  Scratch scratch;
  scratch.qkv = allocator.allocate_rows(rows, query_width + 2 * kv_width);
  scratch.queries = allocator.allocate_rows(rows, query_width);
  scratch.attended = allocator.allocate_rows(rows, query_width);
  scratch.gate_up = allocator.allocate_rows(rows, 2 * sizes.ffn);
  scratch.gated = allocator.allocate_rows(rows, sizes.ffn);
  scratch.attention_workspace = allocator.allocate(attention_bytes(attention));
  scratch.linear_workspace = allocator.allocate(linear_bytes(rows, max_width, threads));
  return scratch;
}

// The arguments of layers_bf16 that all half layers share.
struct Call {
  const Half* halves;
  uint16_t* x;
  Outputs out;
  const float* freqs_cis;
  char* kv_cache;
  const int64_t* slots;
  Attention attention;  // keys and values are set per half layer
  Sizes sizes;
  Scratch scratch;
  Adapters adapters;
  float eps;

  // Returns the index of the first product of a half layer among those of the table.
  long product(const Half& half) const { return 2 * (&half - halves); }
};

// Computes first(norm(x)) + bias of a half layer -> out (T, width). The product is rounded to bf16
// before the bias is added, as in Python.
void run_first(Worker& worker, const Call& call, const Half& half, uint16_t* out, long width) {
  const long rows = call.sizes.rows;
  linear(worker, {call.x, rows, half.norm, call.eps}, {half.first, width, call.sizes.dim},
         {out, Outputs::BF16}, call.scratch.linear_workspace, call.adapters, call.product(half));
  if (!half.bias) return;
  worker.run(rows, [&](long row) {
    uint16_t* sums = out + row * width;
    for (long i = 0; i < width; i++) sums[i] = to_bf16(widen(sums[i]) + widen(half.bias[i]));
  });
}

// The bodies ATTENTION and BIDIRECTIONAL_ATTENTION: store keys and values, attend to the cache, and
// write the half layer's result to call.out.
void run_attention(Worker& worker, const Call& call, const Half& half) {
  const Scratch& scratch = call.scratch;
  const long rows = call.sizes.rows;
  const long dim = call.sizes.dim;
  Attention attention = call.attention;
  attention.is_bidirectional = half.kind == BodyKind::BIDIRECTIONAL_ATTENTION;
  const QkvShape shape = {attention.heads,      attention.kv_heads,  attention.dim,
                          call.sizes.num_pages, attention.page_size, attention.kv_format};
  const long query_width = attention.heads * attention.dim;
  const long qkv_width = query_width + 2 * attention.kv_heads * attention.dim;
  const long plane_rows = shape.num_pages * attention.page_size * attention.kv_heads;
  const long plane_bytes = plane_rows * kv_row_bytes(attention.dim, attention.kv_format);
  char* pages = call.kv_cache + 2 * plane_bytes * half.kv_plane;
  attention.keys = pages;
  attention.values = pages + plane_bytes;
  run_first(worker, call, half, scratch.qkv, qkv_width);
  worker.run(rows, [&](long row) {
    rope_and_store(scratch.qkv + row * qkv_width, call.freqs_cis + row * attention.dim, pages,
                   call.slots[row], scratch.queries + row * query_width, shape);
  });
  attend(worker, attention);
  linear(worker, {scratch.attended, rows}, {half.second, dim, query_width}, call.out,
         scratch.linear_workspace, call.adapters, call.product(half) + 1);
}

// The body FEED_FORWARD: writes the half layer's result to call.out.
void run_feed_forward(Worker& worker, const Call& call, const Half& half) {
  const Scratch& scratch = call.scratch;
  const long rows = call.sizes.rows;
  const long dim = call.sizes.dim;
  const long ffn = call.sizes.ffn;
  run_first(worker, call, half, scratch.gate_up, 2 * ffn);
  const long steps = (ffn + SILU_STEP - 1) / SILU_STEP;
  worker.run(rows * steps, [&](long item) {
    const long row = item / steps;
    const long begin = item % steps * SILU_STEP;
    const uint16_t* gate = scratch.gate_up + row * 2 * ffn + begin;
    silu_mul(gate, gate + ffn, scratch.gated + row * ffn + begin, std::min(SILU_STEP, ffn - begin));
  });
  linear(worker, {scratch.gated, rows}, {half.second, dim, ffn}, call.out, scratch.linear_workspace,
         call.adapters, call.product(half) + 1);
}

// The bodies in the order of BodyKind.
constexpr decltype(&run_attention) BODIES[] = {run_attention, run_feed_forward, run_attention};

}  // namespace

extern "C" {

// Returns the bytes of workspace that layers_bf16 needs.
long layers_workspace(const int64_t* query_starts, const int64_t* seq_lens, long rows,
                      long num_seqs, long dim, long heads, long kv_heads, long head_dim, long ffn,
                      long threads) {
  const Attention attention =
      attention_shape(query_starts, seq_lens, num_seqs, heads, kv_heads, head_dim);
  WorkspaceAllocator allocator(nullptr);
  allocate_scratch(allocator, attention, {rows, dim, ffn, 0}, threads);
  return allocator.bytes();
}

// Runs the half layers from `first` up to, not including, `last` of the table `halves` (rows of
// Half). x and out are (T, E) bf16. If out is x, each result is added to x; otherwise there is one
// half layer, whose result is written to out. freqs_cis (T, D / 2, 2), kv_cache (L, 2, P, S, K)
// rows of kv_row_bytes(), slots (T), table (B, M) page indices, query_starts (B + 1), seq_lens (B).
// Some rows can have adapters: `segments` (num_segments, SEGMENT_FIELDS), each with a Delta for
// every product of the table, and memory for the normalized rows (T, E) and for shrink().
void layers_bf16(const int64_t* halves, uint16_t* x, uint16_t* out, const float* freqs_cis,
                 char* kv_cache, const int64_t* slots, const int64_t* table,
                 const int64_t* query_starts, const int64_t* seq_lens, char* workspace,
                 const int64_t* segments, uint16_t* normed, float* middle, long num_segments,
                 long first, long last, long rows, long num_seqs, long dim, long heads,
                 long kv_heads, long head_dim, long ffn, long num_pages, long page_size,
                 long pages_per_seq, long kv_format, float eps, float scale, int threads) {
  Attention attention =
      attention_shape(query_starts, seq_lens, num_seqs, heads, kv_heads, head_dim);
  attention.table = table;
  attention.pages_per_seq = pages_per_seq;
  attention.page_size = page_size;
  attention.scale = scale;
  attention.kv_format = (KvFormat)kv_format;
  const Sizes sizes = {rows, dim, ffn, num_pages};
  WorkspaceAllocator allocator(workspace);
  const Scratch scratch = allocate_scratch(allocator, attention, sizes, threads);
  attention.queries = scratch.queries;
  attention.out = scratch.attended;
  attention.workspace = scratch.attention_workspace;
  plan_attention(attention);
  const Outputs outputs = {out, out == x ? Outputs::ADDED : Outputs::BF16};
  const Call call = {
      (const Half*)halves,
      x,
      outputs,
      freqs_cis,
      kv_cache,
      slots,
      attention,
      sizes,
      scratch,
      {(const Segment*)segments, num_segments, middle, normed},
      eps,
  };
  run_team(threads, [&](Worker& worker) {
    for (const Half* half = call.halves + first; half < call.halves + last; half++)
      BODIES[(long)half->kind](worker, call, *half);
  });
}
}
