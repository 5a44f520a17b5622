// Chooses one token id per row.
//
// In: logits (B, V) float32, or probabilities (B, V) float32 divided by that of the row's most
// probable token, and the filters of each row. Out: ids (B). sample.py owns the tensors and
// contains the definition in PyTorch, which gives the same ids. A draw is an exponential race, see
// Race.
//
// Probabilities are fixed-point integers, so their sums are exact in any order. Thresholds are
// found by radix select: nothing is sorted. A row is read as a whole once, for the sum and the
// maximum of each block of 256 tokens; filters and the race then read only the blocks that have
// candidates. For 32 rows of 128,256 tokens with top_p this takes 5.8 ms, and PyTorch takes 26 ms;
// if all tokens are equally likely, it takes 30 ms, and PyTorch takes 664 ms.
//
// Letters: p, the probabilities of a row; v, the size of the vocabulary; b, the number of rows.
#include <omp.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <numeric>

#include "vectors.h"

namespace {

constexpr long BLOCK = 256;             // tokens; the groups of sample.py
constexpr float FIXED_ONE = 0x1p40f;    // fixed-point probability of a row's most probable token
constexpr int DIGIT_BITS = 11;          // bits per digit of the radix select
constexpr int HIGHEST_SHIFT = 33;       // first bit of the highest of four digits: 44 bits in all
constexpr long SHARE_ONE = 1L << 62;    // a share of 1, see share_of()
constexpr long FIRST_BLOCK = 1L << 32;  // random number of block 0; those below are of single ids

// The parameters of a row, as sample.py packs them.
struct SamplingRow {
  long min_prob;  // minimum fixed-point probability by min_p; 0 without min_p
  long top_k;     // 0 without top_k
  long top_p;     // times 2^62
  long uniform;   // seed of the row's random times, below 2^62
};

// The workspace of one thread, in longs.
struct Scratch {
  long* sums;         // (blocks), sum of each block
  long* maxima;       // (blocks), maximum of each block
  long* fixed_probs;  // (v), probabilities of the candidates
  long* ids;          // (v), ids of the candidates
  long* ties;         // (v), remaining values of a radix select
};

struct Threshold {
  long prob;
  long above;  // sum, or number, of the values above `prob`
};

// Returns p times 2^40, rounded down; a NaN becomes 0.
long to_fixed(float p) { return p > 0 ? (long)(p * FIXED_ONE) : 0; }

// Returns floor(whole * share / 2^62).
long share_of(long whole, long share) { return (long)((__int128)whole * share >> 62); }

// Returns the sum of a row, and writes the sums and maxima of its blocks.
long sum_blocks(const float* p, long v, const Scratch& scratch) {
  long total = 0;
  for (long first = 0; first < v; first += BLOCK) {
    const long end = std::min(first + BLOCK, v);
    long sum = 0;
    long maximum = 0;
    for (long i = first; i < end; i++) {
      const long prob = to_fixed(p[i]);
      sum += prob;
      maximum = std::max(maximum, prob);
    }
    scratch.sums[first / BLOCK] = sum;
    scratch.maxima[first / BLOCK] = maximum;
    total += sum;
  }
  return total;
}

// The exponential race of a row: the token with the smallest random time over probability wins.
//
// A block has one random time, the time of its earliest token, and each other token adds a time of
// its own (see _finishes() in sample.py). So one number decides whether a block can win at all.
// Blocks are entered one after the other, each followed by its tokens.
class Race {
 public:
  Race(long uniform) : uniform_(uniform) {}

  // Makes `block` the current block; returns the id of its earliest token. Every token of the block
  // is equally likely to be that one.
  long enter_block(long block) {
    const uint64_t bits = split_mix(block + FIRST_BLOCK);
    block_time_ = exponential(bits);
    return earliest_id_ = block * BLOCK + (bits >> 23) % BLOCK;
  }

  // Returns whether a token of the current block with at most this probability can win.
  bool can_win(long prob) const { return block_time_ / (double)prob <= best_; }

  // Enters a token of the current block. Of equal finishing times, the smaller id wins.
  void enter(long id, long prob) {
    if (!can_win(prob)) return;
    const long delay = id == earliest_id_ ? 0 : exponential(split_mix(id)) * BLOCK;
    const double finish = (block_time_ + delay) / (double)prob;
    if (finish < best_ || (finish == best_ && id < winner_)) {
      best_ = finish;
      winner_ = id;
    }
  }

  long winner() const { return winner_; }

 private:
  // Returns the n-th number of SplitMix64 (Steele, Lea and Flood, 2014), counted from 0.
  uint64_t split_mix(uint64_t n) const {
    uint64_t z = uniform_ + (n + 1) * 0x9E3779B97F4A7C15;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9;
    z = (z ^ z >> 27) * 0x94D049BB133111EB;
    return z ^ z >> 31;
  }

  // Returns an exponentially distributed integer of mean log2(e) * 2^44, made of 64 random bits:
  // see exponential() in fixed_point.py. The leading zeros of the low 23 bits are the halvings.
  static long exponential(uint64_t bits) {
    const long halvings = __builtin_clz((bits & 0x7fffff) | 1) - 9;
    const long rest = bits >> 23 | 1;
    long log = 20484697;
    for (long coefficient : {-15056127, 39049523, 60738888, 193981894, 774535977})
      log = coefficient + (log * (rest >> 21) >> 20);
    return (halvings << 44) + (rest * (log >> 10) >> 17);
  }

  long uniform_;
  long block_time_ = 0;
  long earliest_id_ = 0;
  long winner_ = 0;
  double best_ = std::numeric_limits<double>::infinity();  // finishing time of the winner
};

// Returns an id of a row without filters. The earliest tokens of all blocks race first, so that
// most blocks cannot win any more and are skipped.
long sample_from_all(const float* p, long v, long uniform, const long* maxima) {
  Race race(uniform);
  for (long block = 0; block * BLOCK < v; block++) {
    const long id = race.enter_block(block);
    if (id < v) race.enter(id, to_fixed(p[id]));
  }
  for (long block = 0; block * BLOCK < v; block++) {
    race.enter_block(block);
    if (!race.can_win(maxima[block])) continue;
    for (long i = block * BLOCK, end = std::min(i + BLOCK, v); i < end; i++)
      race.enter(i, to_fixed(p[i]));
  }
  return race.winner();
}

// Returns the smallest of n values whose greater values sum to at most `limit`; with COUNT, whose
// greater values are at most `limit` many. The sum (or number) of all n values exceeds the limit.
//
// This is a radix select, one digit at a time from the highest. `ties` gets the values that have
// the same digits as the result so far.
template <bool COUNT>
Threshold radix_select(const long* fixed_probs, long n, long limit, long* ties) {
  constexpr long MASK = (1 << DIGIT_BITS) - 1;
  Threshold threshold = {0, 0};
  for (int shift = HIGHEST_SHIFT; shift >= 0; shift -= DIGIT_BITS) {
    long amounts[MASK + 1] = {};  // sum, or number, of the values with each digit
    for (long i = 0; i < n; i++)
      amounts[fixed_probs[i] >> shift & MASK] += COUNT ? 1 : fixed_probs[i];
    long digit = MASK;
    while (threshold.above + amounts[digit] <= limit) threshold.above += amounts[digit--];
    long num_ties = 0;
    for (long i = 0; i < n; i++) {
      const long prob = fixed_probs[i];
      ties[num_ties] = prob;
      num_ties += (prob >> shift & MASK) == digit;
    }
    threshold.prob |= digit << shift;
    fixed_probs = ties;
    n = num_ties;
  }
  return threshold;
}

// Gathers the tokens of at least `min_prob`, in ascending order of ids; returns their number.
long gather(const float* p, long v, long min_prob, const Scratch& scratch) {
  long n = 0;
  for (long first = 0; first < v; first += BLOCK) {
    if (scratch.maxima[first / BLOCK] < min_prob) continue;
    for (long i = first, end = std::min(first + BLOCK, v); i < end; i++) {
      const long prob = to_fixed(p[i]);
      scratch.fixed_probs[n] = prob;
      scratch.ids[n] = i;
      n += prob >= min_prob;
    }
  }
  return n;
}

// Returns a lower bound of the probabilities in the nucleus: all tokens below it sum to less than
// `beyond`, the mass outside top_p. The bound is doubled from 1 while the sums and maxima of the
// blocks prove that.
long nucleus_bound(long blocks, long beyond, const Scratch& scratch) {
  for (long bound = 1;; bound *= 2) {
    long mass = 0;  // upper bound of the mass of tokens below 2 * bound
    for (long b = 0; b < blocks; b++) {
      const bool is_below = scratch.maxima[b] < 2 * bound;
      const long max_mass = is_below ? scratch.sums[b] : 2 * bound * BLOCK;
      mass += std::min(scratch.sums[b], max_mass);
    }
    if (mass >= beyond) return bound;
  }
}

// Gathers the tokens that min_p and top_k keep, and sets `total` to their sum. Without these two
// filters, gathers the tokens that top_p can keep. Returns the number of gathered tokens.
long gather_candidates(const float* p, long v, const SamplingRow& row, long& total,
                       const Scratch& scratch) {
  const long blocks = (v + BLOCK - 1) / BLOCK;
  const long k = row.top_k;
  if (!row.min_prob && !k) {
    const long beyond = total - share_of(total, row.top_p);
    return gather(p, v, nucleus_bound(blocks, beyond, scratch), scratch);
  }
  long min_prob = std::max(1L, row.min_prob);
  if (k && k <= blocks) {
    // The k-th largest of the maxima of blocks is a lower bound of the k-th largest of all tokens.
    const Threshold kth = radix_select<true>(scratch.maxima, blocks, k - 1, scratch.ties);
    min_prob = std::max(min_prob, kth.prob);
  }
  long n = gather(p, v, min_prob, scratch);
  if (k && k < n) {
    min_prob = radix_select<true>(scratch.fixed_probs, n, k - 1, scratch.ties).prob;
    long num_kept = 0;
    for (long i = 0; i < n; i++) {
      const long prob = scratch.fixed_probs[i];
      scratch.fixed_probs[num_kept] = prob;
      scratch.ids[num_kept] = scratch.ids[i];
      num_kept += prob >= min_prob;
    }
    n = num_kept;
  }
  total = std::accumulate(scratch.fixed_probs, scratch.fixed_probs + n, 0L);
  return n;
}

// Returns an id of a row with filters. Of tokens that are as likely as the last one of the nucleus,
// top_p keeps those with the smallest ids.
long sample_from_kept(const float* p, long v, const SamplingRow& row, long total,
                      const Scratch& scratch) {
  const long n = gather_candidates(p, v, row, total, scratch);
  const long limit = share_of(total, row.top_p);
  Threshold last = {0, total};
  long num_ties = 0;  // kept tokens that are as likely as the last one of the nucleus
  if (limit < total) {
    last = radix_select<false>(scratch.fixed_probs, n, limit, scratch.ties);
    num_ties = (limit - last.above) / last.prob + 1;
  }
  Race race(row.uniform);
  long block = -1;
  for (long i = 0; i < n; i++) {
    const long prob = scratch.fixed_probs[i];
    const long id = scratch.ids[i];
    if (prob < last.prob || (prob == last.prob && --num_ties < 0)) continue;
    if (id / BLOCK != block) {
      block = id / BLOCK;
      race.enter_block(block);
    }
    race.enter(id, prob);
  }
  return race.winner();
}

constexpr float NOT_A_NUMBER = std::numeric_limits<float>::quiet_NaN();

// Returns the larger number, or NaN if one of them is NaN.
float larger(float a, float b) { return a >= b || a != a ? a : b; }

// Returns the largest of x (count), or NaN if one is NaN.
float largest_of(const float* x, long count) {
  Floats maxima = Floats{} - INFINITE;
  Ints is_nan = {};  // kept apart, because comparisons skip a NaN
  long i = 0;
  for (; i + LANES <= count; i += LANES) {
    const Floats v = load<Floats>(x + i);
    maxima = v > maxima ? v : maxima;
    is_nan |= v != v;
  }
  float maximum = -INFINITE;
  for (int lane = 0; lane < LANES; lane++)
    maximum = larger(maximum, is_nan[lane] ? NOT_A_NUMBER : maxima[lane]);
  for (; i < count; i++) maximum = larger(maximum, x[i]);
  return maximum;
}

// Returns the size of Scratch, in longs.
long scratch_size(long v) { return 3 * v + 2 * ((v + BLOCK - 1) / BLOCK); }

}  // namespace

extern "C" {

// logits (b, v) -> row_max (b), the largest of each row, or NaN if one is NaN; and ids (b), where
// it comes first, or -1 if it is not finite.
void top_tokens(const float* logits, float* row_max, long* ids, long b, long v, int threads) {
#pragma omp parallel for num_threads(std::min<long>(b, threads)) if (b > 1)
  for (long r = 0; r < b; r++) {
    const float* row = logits + r * v;
    float maximum = -INFINITE;
    long i = 0;  // start of the block in which the maximum comes first
    for (long first = 0; first < v && maximum == maximum; first += BLOCK) {
      const float block_max = largest_of(row + first, std::min(BLOCK, v - first));
      if (larger(maximum, block_max) != maximum) {
        maximum = block_max;
        i = first;
      }
    }
    row_max[r] = maximum;
    ids[r] = -1;
    if (maximum - maximum != 0) continue;  // it is infinite or NaN
    while (row[i] != maximum) i++;
    ids[r] = i;
  }
}

// Returns the bytes of workspace that sample_ids needs: one Scratch per thread.
long sample_workspace(long b, long v, long threads) {
  return std::min(b, threads) * scratch_size(v) * sizeof(long);
}

// probs (b, v), rows (b) -> ids (b).
void sample_ids(const float* probs, const SamplingRow* rows, long* ids, long* workspace, long b,
                long v, int threads) {
  const long blocks = (v + BLOCK - 1) / BLOCK;
#pragma omp parallel for num_threads(std::min<long>(b, threads)) schedule(dynamic)
  for (long r = 0; r < b; r++) {
    long* sums = workspace + omp_get_thread_num() * scratch_size(v);
    long* fixed_probs = sums + 2 * blocks;
    const Scratch scratch = {
        sums, sums + blocks, fixed_probs, fixed_probs + v, fixed_probs + 2 * v,
    };
    const float* p = probs + r * v;
    const SamplingRow& row = rows[r];
    const long total = sum_blocks(p, v, scratch);
    const bool is_filtered = row.min_prob || row.top_k || row.top_p < SHARE_ONE;
    if (total == 0)
      ids[r] = 0;  // all probabilities are NaN; sample.py replaces the id
    else if (is_filtered)
      ids[r] = sample_from_kept(p, v, row, total, scratch);
    else
      ids[r] = sample_from_all(p, v, row.uniform, scratch.maxima);
  }
}

}  // extern "C"
