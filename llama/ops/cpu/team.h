// The threads of one parallel region, and how they share work: phase after phase, each of them cut
// into pieces. No phase begins before all pieces of the last one are done.
//
// OpenMP's barrier waits for threads. This one waits for pieces: where the system puts a thread
// aside, as beside other processes, the others do its pieces and go on without it, and it catches
// up later. A piece is computed into the thread's own memory, then taken, then written. So two
// threads can compute the same piece, and one of them writes it: a thread that was put aside in the
// middle, and comes back phases later, finds its piece taken and drops what it has.
//
// Each thread begins with a range of neighbouring pieces, which suits the hardware's prefetchers. A
// thread without work takes all pieces of one that has not come to the phase, else half of
// another's rest (work stealing; Blumofe and Leiserson, 1999). The last piece of a range it
// computes a second time, if its owner does not come soon (as the backup tasks of MapReduce; Dean
// and Ghemawat, 2004). Then it sleeps.
#pragma once
#include <immintrin.h>
#include <linux/futex.h>
#include <omp.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

constexpr long MAX_THREADS = 256;
constexpr int PAUSES = 400;  // before a piece is done twice: 20 us of a Xeon at 3 GHz
constexpr int ROUNDS = 3;    // of so many pauses, before a thread sleeps
#ifndef TEAM_MAX_PIECES
#define TEAM_MAX_PIECES ((1 << 24) - 1)  // as many as a Range counts
#endif
constexpr long MAX_PIECES = TEAM_MAX_PIECES;
static_assert(MAX_PIECES < 1 << 24, "a Range has 24 bits for a piece");
constexpr long SLEEP_NS = 200'000;  // then it looks again, as others may have taken more work

// What is left of a thread's range, in one word: others change it too.
struct Range {
  uint64_t phase : 16, first : 24, end : 24;
  long size() const { return (long)end - (long)first; }
};

class AtomicRange {
 public:
  Range load() const { return unpack(value.load(std::memory_order_acquire)); }
  void store(Range range) { value.store(pack(range), std::memory_order_release); }
  bool exchange(Range& expected, Range wanted) {
    uint64_t old = pack(expected);
    const bool done = value.compare_exchange_strong(old, pack(wanted), std::memory_order_acq_rel);
    if (!done) expected = unpack(old);
    return done;
  }

 private:
  static uint64_t pack(Range range) { return load_bits<uint64_t>(range); }
  static Range unpack(uint64_t bits) { return load_bits<Range>(bits); }
  template <class To, class From> static To load_bits(const From& from) {
    To to;
    __builtin_memcpy(&to, &from, sizeof to);
    return to;
  }
  alignas(64) std::atomic<uint64_t> value{0};
};

// What the threads share.
struct ThreadTeam {
  explicit ThreadTeam(long threads) : threads(std::min(threads, MAX_THREADS)) {}

  const long threads;
  alignas(64) std::atomic<uint32_t> completed{0};  // phases
  std::atomic<uint32_t> sleepers{0};
  alignas(64) std::atomic<uint32_t> done{0};  // pieces of the present phase
  AtomicRange ranges[MAX_THREADS];
};

// One thread's place in the team. All members run the same phases in the same order.
class Worker {
 public:
  Worker(ThreadTeam& team, long index) : index(index), team(team) {}

  const long index;
  long threads() const { return team.threads; }

  // compute(piece) may write only what this thread alone reads; write(piece) follows, on one thread
  // for each piece. Returns when all pieces are written.
  template <class Compute, class Write> void run(long pieces, Compute compute, Write write) {
    for (long first = 0; first < pieces; first += MAX_PIECES)
      run_phase(
          std::min(pieces - first, MAX_PIECES), [&](long piece) { compute(first + piece); },
          [&](long piece) { write(first + piece); });
  }

  // The same with pieces of which each is written by who takes it, and never twice: small ones.
  template <class Write> void run(long pieces, Write write) {
    run(pieces, [](long) {}, write);
  }

 private:
  template <class Compute, class Write> void run_phase(long pieces, Compute compute, Write write) {
    phase++;
    for (int idle = 0; !is_over();) {
      Range next;
      if (find(pieces, idle > 0, &next)) {
        compute(next.first);
        if (!take(owner, next)) continue;
        write(next.first);
        finish(pieces);
        idle = 0;
      } else {
        wait(&idle);
      }
    }
  }

  bool is_over() const {
    return (int32_t)(team.completed.load(std::memory_order_acquire) - phase) >= 0;
  }

  bool is_behind(Range range) const {  // of a member that has not come to this phase
    const uint16_t by = phase - range.phase;
    return by > 0 && by < 1 << 15;
  }

  Range part_of(long member, long pieces) const {
    return {(uint16_t)phase, (uint64_t)(member * pieces / team.threads),
            (uint64_t)((member + 1) * pieces / team.threads)};
  }

  // A piece to do, of `owner`: the next of this member's range, or of what it takes from another's;
  // one that another may be at only where this is `late`.
  bool find(long pieces, bool is_late, Range* next) {
    owner = index;
    *next = team.ranges[index].load();
    if (is_behind(*next)) {
      const Range part = part_of(index, pieces);
      if (team.ranges[index].exchange(*next, part)) *next = part;
    }
    if (is_open(*next)) return true;
    for (long i = 1; i < team.threads; i++)
      if (find_at((index + i) % team.threads, pieces, is_late, next)) return true;
    return false;
  }

  bool find_at(long other, long pieces, bool is_late, Range* next) {
    AtomicRange& word = team.ranges[other];
    Range range = word.load();
    if (is_behind(range)) {
      *next = part_of(other, pieces);
      if (word.exchange(range, {next->phase, next->end, next->end})) return publish(*next);
    }
    if (!is_open(range)) return false;
    if (range.size() > 1) {
      const uint64_t middle = (range.first + range.end + 1) / 2;
      *next = {range.phase, middle, range.end};
      return word.exchange(range, {range.phase, range.first, middle}) && publish(*next);
    }
    *next = range;
    owner = other;
    return is_late;
  }

  // Not an empty range: all may be done then, and others in the next phase, where this member's
  // word must not say again that its part is to be had. Until an open one is done nobody goes on.
  bool publish(Range range) {
    if (is_open(range)) team.ranges[index].store(range);
    return is_open(range);
  }

  bool is_open(Range range) const { return range.phase == (uint16_t)phase && range.size() > 0; }

  // Whether this thread may write the first piece of the owner's range, whose end may have moved.
  bool take(long owner, Range range) {
    const Range wanted = range;
    AtomicRange& word = team.ranges[owner];
    while (range.phase == wanted.phase && range.first == wanted.first && range.size() > 0)
      if (word.exchange(range, {range.phase, range.first + 1u, range.end})) return true;
    return false;
  }

  void finish(long pieces) {
    if (team.done.fetch_add(1, std::memory_order_acq_rel) + 1 != pieces) return;
    team.done.store(0, std::memory_order_relaxed);
    team.completed.store(phase, std::memory_order_release);
    std::atomic_thread_fence(std::memory_order_seq_cst);  // before the look at the sleepers
    if (team.sleepers.load(std::memory_order_relaxed))
      syscall(SYS_futex, &team.completed, FUTEX_WAKE_PRIVATE, (int)MAX_THREADS, nullptr, nullptr,
              0);
  }

  void wait(int* idle) {
    if (++*idle > ROUNDS) return sleep();
    for (int i = 0; i < PAUSES && !is_over(); i++) _mm_pause();
  }

  void sleep() {
    const timespec limit = {0, SLEEP_NS};
    team.sleepers.fetch_add(1);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (!is_over())
      syscall(SYS_futex, &team.completed, FUTEX_WAIT_PRIVATE, phase - 1, &limit, nullptr, 0);
    team.sleepers.fetch_sub(1);
  }

  ThreadTeam& team;
  uint32_t phase = 0;
  long owner = 0;  // of the piece that this member is at
};

// Runs work(member) on up to `threads` threads. OpenMP may give fewer: those that are there do all.
template <class Work> void run_team(long threads, Work work) {
  ThreadTeam team(threads);
#pragma omp parallel num_threads((int)team.threads)
  {
    Worker member(team, omp_get_thread_num());
    work(member);
  }
}
