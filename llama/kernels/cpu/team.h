// A team of threads that runs phases of work together, within one OpenMP parallel region.
//
// A phase is a number of pieces of work. No phase begins before all pieces of the phase before it
// are written. The barrier of OpenMP waits for threads; this one waits for pieces. If the system
// deschedules a thread, the other threads compute its pieces and continue, and that thread catches
// up later. Each piece is computed into the thread's own memory, then claimed, then written. Two
// threads may therefore compute the same piece, but only the one that claims it writes it: a thread
// that was descheduled in the middle of a piece, and continues phases later, fails to claim the
// piece and drops its result.
//
// A thread begins with a range of consecutive pieces, which suits the hardware prefetchers. A
// thread without work steals: the whole range of a thread that has not entered the phase, otherwise
// half of the remaining range of another thread (work stealing; Blumofe and Leiserson, 1999). If
// the last piece of a range is not written soon, an idle thread computes it as well (as backup
// tasks do in MapReduce; Dean and Ghemawat, 2004). Then the idle thread sleeps.
#pragma once
#include <linux/futex.h>
#include <omp.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "pause.h"

constexpr long MAX_THREADS = 256;
constexpr int PAUSES_PER_ROUND = 400;  // about 20 us on a Xeon at 3 GHz
constexpr int MAX_ROUNDS = 3;          // rounds of pauses before an idle thread sleeps
#ifndef TEAM_MAX_PIECES
#define TEAM_MAX_PIECES ((1 << 24) - 1)  // the maximum of Range::end; a test sets a smaller one
#endif
constexpr long MAX_PIECES = TEAM_MAX_PIECES;  // a run of more pieces is split into phases
static_assert(MAX_PIECES < 1 << 24, "a Range has 24 bits for a piece");
constexpr long SLEEP_NS = 200'000;  // a sleeper looks for work again after this time

// The remaining pieces [first, end) of a thread in a phase, in 64 bits that are exchanged at once,
// because other threads steal from the range.
struct Range {
  uint64_t phase : 16, first : 24, end : 24;
  long size() const { return (long)end - (long)first; }
};

class AtomicRange {
 public:
  Range load() const { return unpack(value.load(std::memory_order_acquire)); }
  void store(Range range) { value.store(pack(range), std::memory_order_release); }

  // Replaces `expected` by `desired` and returns true. If the value is another one, stores that in
  // `expected` and returns false.
  bool compare_exchange(Range& expected, Range desired) {
    uint64_t bits = pack(expected);
    const bool is_replaced =
        value.compare_exchange_strong(bits, pack(desired), std::memory_order_acq_rel);
    if (!is_replaced) expected = unpack(bits);
    return is_replaced;
  }

 private:
  static uint64_t pack(Range range) { return bit_cast<uint64_t>(range); }
  static Range unpack(uint64_t bits) { return bit_cast<Range>(bits); }
  template <class To, class From> static To bit_cast(const From& from) {
    To to;
    __builtin_memcpy(&to, &from, sizeof to);
    return to;
  }
  alignas(64) std::atomic<uint64_t> value{0};
};

// The state that the threads of a team share.
struct ThreadTeam {
  explicit ThreadTeam(long threads) : threads(std::min(threads, MAX_THREADS)) {}

  const long threads;
  alignas(64) std::atomic<uint32_t> completed{0};  // number of the last completed phase, from 1
  std::atomic<uint32_t> sleepers{0};               // threads that sleep or are about to
  alignas(64) std::atomic<uint32_t> done{0};       // written pieces of the current phase
  AtomicRange ranges[MAX_THREADS];
};

// One thread of a team. All workers run the same phases in the same order.
class Worker {
 public:
  Worker(ThreadTeam& team, long index) : index(index), team(team) {}

  const long index;
  long threads() const { return team.threads; }

  // Runs a phase of `pieces` pieces; returns when all of them are written.
  //
  // compute(piece) may run on several threads at once, so it writes only to memory that this thread
  // alone reads. write(piece) follows on one of these threads.
  template <class Compute, class Write> void run(long pieces, Compute compute, Write write) {
    for (long first = 0; first < pieces; first += MAX_PIECES)
      run_phase(
          std::min(pieces - first, MAX_PIECES), [&](long piece) { compute(first + piece); },
          [&](long piece) { write(first + piece); });
  }

  // Runs a phase without a step before the claim: write(piece) does all the work, on one thread.
  // It suits small pieces, as no other thread can finish a piece that is claimed.
  template <class Write> void run(long pieces, Write write) {
    run(pieces, [](long) {}, write);
  }

 private:
  template <class Compute, class Write> void run_phase(long pieces, Compute compute, Write write) {
    phase++;
    for (int idle_rounds = 0; !is_over();) {
      Range range;
      if (find_piece(pieces, idle_rounds > 0, &range)) {
        compute(range.first);
        if (!claim(owner, range)) continue;
        write(range.first);
        finish_piece(pieces);
        idle_rounds = 0;
      } else {
        wait(&idle_rounds);
      }
    }
  }

  // Returns whether the current phase is completed. Phase numbers wrap: differences are compared.
  bool is_over() const {
    return (int32_t)(team.completed.load(std::memory_order_acquire) - phase) >= 0;
  }

  // Returns whether a range is of an earlier phase, so that its thread has not entered this one.
  bool is_behind(Range range) const {
    const uint16_t distance = phase - range.phase;
    return distance > 0 && distance < 1 << 15;
  }

  // Returns the range with which a thread begins the current phase.
  Range initial_range(long thread, long pieces) const {
    return {(uint16_t)phase, (uint64_t)(thread * pieces / team.threads),
            (uint64_t)((thread + 1) * pieces / team.threads)};
  }

  // Finds a range whose first piece this worker should compute, and sets `owner` to the thread that
  // has it: this thread, or another one whose only remaining piece is computed a second time.
  // Returns false if there is none. `is_late` allows such second computations.
  bool find_piece(long pieces, bool is_late, Range* range) {
    owner = index;
    *range = team.ranges[index].load();
    if (is_behind(*range)) {
      const Range initial = initial_range(index, pieces);
      if (team.ranges[index].compare_exchange(*range, initial)) *range = initial;
    }
    if (is_open(*range)) return true;
    for (long i = 1; i < team.threads; i++)
      if (steal((index + i) % team.threads, pieces, is_late, range)) return true;
    return false;
  }

  // Tries to move pieces of another thread to this one, see find_piece().
  bool steal(long victim, long pieces, bool is_late, Range* stolen) {
    AtomicRange& shared = team.ranges[victim];
    Range range = shared.load();
    if (is_behind(range)) {
      *stolen = initial_range(victim, pieces);
      if (shared.compare_exchange(range, {stolen->phase, stolen->end, stolen->end}))
        return publish(*stolen);
    }
    if (!is_open(range)) return false;
    if (range.size() > 1) {
      const uint64_t middle = (range.first + range.end + 1) / 2;
      *stolen = {range.phase, middle, range.end};
      return shared.compare_exchange(range, {range.phase, range.first, middle}) && publish(*stolen);
    }
    *stolen = range;
    owner = victim;
    return is_late;
  }

  // Makes a stolen range this thread's own; returns false if it is empty.
  //
  // An empty range is not stored: the phase may be completed then, and this thread's entry may
  // already belong to the next phase, in which the store would offer the initial range again. While
  // a range is open, its phase cannot complete.
  bool publish(Range range) {
    if (is_open(range)) team.ranges[index].store(range);
    return is_open(range);
  }

  // Returns whether a range has pieces of the current phase.
  bool is_open(Range range) const { return range.phase == (uint16_t)phase && range.size() > 0; }

  // Removes the first piece of a range from its owner's entry. Returns whether this succeeded, so
  // that this thread may write the piece. The end of the range may have changed meanwhile.
  bool claim(long owner, Range range) {
    const Range wanted = range;
    AtomicRange& shared = team.ranges[owner];
    while (range.phase == wanted.phase && range.first == wanted.first && range.size() > 0)
      if (shared.compare_exchange(range, {range.phase, range.first + 1u, range.end})) return true;
    return false;
  }

  // Counts a written piece. After the last one, completes the phase and wakes the sleepers.
  void finish_piece(long pieces) {
    if (team.done.fetch_add(1, std::memory_order_acq_rel) + 1 != pieces) return;
    team.done.store(0, std::memory_order_relaxed);
    team.completed.store(phase, std::memory_order_release);
    // The fence orders the store to `completed` before the load of `sleepers`. A sleeper does the
    // reverse, so at least one of the two sees the other.
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (team.sleepers.load(std::memory_order_relaxed))
      syscall(SYS_futex, &team.completed, FUTEX_WAKE_PRIVATE, (int)MAX_THREADS, nullptr, nullptr,
              0);
  }

  // Spins for one round, or sleeps after MAX_ROUNDS of them.
  void wait(int* idle_rounds) {
    if (++*idle_rounds > MAX_ROUNDS) return sleep();
    for (int i = 0; i < PAUSES_PER_ROUND && !is_over(); i++) pause_briefly();
  }

  // Sleeps until the phase is completed, for SLEEP_NS at most: there may be pieces to steal then.
  void sleep() {
    const timespec limit = {0, SLEEP_NS};
    team.sleepers.fetch_add(1);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (!is_over())
      syscall(SYS_futex, &team.completed, FUTEX_WAIT_PRIVATE, phase - 1, &limit, nullptr, 0);
    team.sleepers.fetch_sub(1);
  }

  ThreadTeam& team;
  uint32_t phase = 0;  // number of the current phase, from 1
  long owner = 0;      // thread whose range has the piece that this worker computes
};

// Runs work(worker) on up to `threads` threads. OpenMP may start fewer threads; these do all work.
template <class Work> void run_team(long threads, Work work) {
  ThreadTeam team(threads);
#pragma omp parallel num_threads((int)team.threads)
  {
    Worker worker(team, omp_get_thread_num());
    work(worker);
  }
}
