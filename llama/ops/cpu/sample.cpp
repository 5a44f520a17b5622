// One draw a row: probabilities over that of the likeliest token in, ids out. draw.py owns the
// tensors, and has the same in torch, which is the definition: all numbers here are whole, so that
// the ids are the same. native.py compiles this file for the CPU that it runs on.
//
// A row is read whole once, for the sum and the largest weight of each block of 256 tokens. Filters
// then read only the blocks that hold a candidate, and nothing is sorted.
#include <omp.h>

#include <algorithm>
#include <numeric>

namespace {

constexpr long BLOCK = 256;
constexpr float UNIT = 0x1p40f;  // the weight of a row's likeliest token
constexpr int DIGIT = 11;        // bits of a weight that are looked at together
constexpr int HIGHEST = 33;      // where the first of four digits begins: weights are below 2**44

struct Rule {
  long floor;   // the least weight that min_p keeps; 0 without one
  long top_k;   // 0 without one
  long top_p;   // of 2**62, as `number` is
  long number;  // which part of what is kept comes before the token drawn
};

// What one thread needs for one row.
struct Scratch {
  long *sums, *tops;           // of the weights of each block
  long *weights, *ids, *pool;  // of candidates
};

struct Cut {
  long weight;
  long above;  // the amounts of all weights above it
};

long weigh(float p) { return p > 0 ? (long)(p * UNIT) : 0; }  // NaN weighs nothing

long part(long whole, long share) { return (long)((__int128)whole * share >> 62); }

// The sum of a row's weights; `own` learns those of its blocks, and their largest.
long measure(const float* p, long v, const Scratch& own) {
  long total = 0;
  for (long first = 0; first < v; first += BLOCK) {
    const long end = std::min(first + BLOCK, v);
    long sum = 0, top = 0;
    for (long i = first; i < end; i++) {
      const long weight = weigh(p[i]);
      sum += weight;
      top = std::max(top, weight);
    }
    own.sums[first / BLOCK] = sum;
    own.tops[first / BLOCK] = top;
    total += sum;
  }
  return total;
}

long draw_from_all(const float* p, long v, long total, long number, const long* sums) {
  long rest = part(total, number), i = 0;
  for (; rest >= *sums; i += BLOCK) rest -= *sums++;
  while ((rest -= weigh(p[i])) >= 0) i++;
  return i;
}

// The least weight with amounts of at most `limit` above it, where all n have more than that. An
// amount is the weight itself, or 1 to count. Digit by digit: those above, and then those that
// have the same digit, in `pool`.
template <bool COUNT> Cut cut(const long* weights, long n, long limit, long* pool) {
  constexpr long mask = (1 << DIGIT) - 1;
  Cut found = {0, 0};
  for (int shift = HIGHEST; shift >= 0; shift -= DIGIT) {
    long amounts[mask + 1] = {};
    for (long i = 0; i < n; i++) amounts[weights[i] >> shift & mask] += COUNT ? 1 : weights[i];
    long digit = mask;
    while (found.above + amounts[digit] <= limit) found.above += amounts[digit--];
    long same = 0;
    for (long i = 0; i < n; i++) {
      const long weight = weights[i];
      pool[same] = weight;
      same += (weight >> shift & mask) == digit;
    }
    found.weight |= digit << shift;
    weights = pool;
    n = same;
  }
  return found;
}

// Tokens that weigh at least `lowest`, in the order of their ids -> how many.
long gather(const float* p, long v, long lowest, const Scratch& own) {
  long n = 0;
  for (long first = 0; first < v; first += BLOCK) {
    if (own.tops[first / BLOCK] < lowest) continue;
    for (long i = first, end = std::min(first + BLOCK, v); i < end; i++) {
      const long weight = weigh(p[i]);
      own.weights[n] = weight;
      own.ids[n] = i;
      n += weight >= lowest;
    }
  }
  return n;
}

// A weight below which no token reaches into the nucleus, as all of them come to less than the mass
// `beyond` it. From 1 it is doubled while that is certain of the blocks, without reading them.
long reach(long blocks, long beyond, const Scratch& own) {
  for (long lowest = 1;; lowest *= 2) {
    long mass = 0;  // at most, of tokens below 2 * lowest
    for (long b = 0; b < blocks; b++) {
      const long most = own.tops[b] < 2 * lowest ? own.sums[b] : 2 * lowest * BLOCK;
      mass += std::min(own.sums[b], most);
    }
    if (mass >= beyond) return lowest;
  }
}

// What min_p and top_k leave, or all that top_p can reach; `total` becomes the sum of the former.
long candidates(const float* p, long v, const Rule& rule, long& total, const Scratch& own) {
  const long blocks = (v + BLOCK - 1) / BLOCK, k = rule.top_k;
  if (!rule.floor && !k)
    return gather(p, v, reach(blocks, total - part(total, rule.top_p), own), own);
  long lowest = std::max(1L, rule.floor);
  if (k && k <= blocks)  // the k-th largest of some tokens is at most that of all
    lowest = std::max(lowest, cut<true>(own.tops, blocks, k - 1, own.pool).weight);
  long n = gather(p, v, lowest, own);
  if (k && k < n) {
    lowest = cut<true>(own.weights, n, k - 1, own.pool).weight;
    long kept = 0;
    for (long i = 0; i < n; i++) {
      const long weight = own.weights[i];
      own.weights[kept] = weight;
      own.ids[kept] = own.ids[i];
      kept += weight >= lowest;
    }
    n = kept;
  }
  total = std::accumulate(own.weights, own.weights + n, 0L);
  return n;
}

long draw_from_kept(const float* p, long v, const Rule& rule, long total, const Scratch& own) {
  const long n = candidates(p, v, rule, total, own);
  const long limit = part(total, rule.top_p);
  Cut last = {0, total};
  long ties = 0;  // that are kept, of those that weigh what the last one of the nucleus does
  if (limit < total) {
    last = cut<false>(own.weights, n, limit, own.pool);
    ties = (limit - last.above) / last.weight + 1;
  }
  long rest = part(last.above + ties * last.weight, rule.number);
  for (long i = 0; i < n; i++) {
    const long weight = own.weights[i];
    if (weight < last.weight || (weight == last.weight && --ties < 0)) continue;
    if ((rest -= weight) < 0) return own.ids[i];
  }
  return 0;  // not reached
}

}  // namespace

extern "C" {

// probs (b, v), rules (b) -> ids (b); room has 3 v + 2 ceil(v / 256) numbers a thread, or a row if
// those are fewer.
void draw(const float* probs, const Rule* rules, long* ids, long* room, long b, long v,
          int threads) {
  const long blocks = (v + BLOCK - 1) / BLOCK;
#pragma omp parallel for num_threads(std::min<long>(b, threads)) schedule(dynamic)
  for (long row = 0; row < b; row++) {
    long* sums = room + omp_get_thread_num() * (3 * v + 2 * blocks);
    long* weights = sums + 2 * blocks;
    const Scratch own = {sums, sums + blocks, weights, weights + v, weights + 2 * v};
    const float* p = probs + row * v;
    const Rule& rule = rules[row];
    const long total = measure(p, v, own);
    const bool narrow = rule.floor || rule.top_k || rule.top_p < 1L << 62;
    if (total == 0) ids[row] = 0;  // NaN everywhere
    else if (narrow) ids[row] = draw_from_kept(p, v, rule, total, own);
    else ids[row] = draw_from_all(p, v, total, rule.number, own.sums);
  }
}

}  // extern "C"
