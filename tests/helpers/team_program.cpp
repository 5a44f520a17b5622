// What tests/ops/test_team.py runs: teams of real threads, some of which the program puts aside.
// Prints nothing and returns 0 where every piece of every phase was written once and in its phase.
#include "team.h"

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>

#include <thread>
#include <vector>

namespace {

constexpr int PHASES = 60, MANY_PHASES = 2000;
constexpr long PIECES = 40;
std::atomic<int> written[MANY_PHASES][PIECES];

void fail(const char* what, long phase, long piece) {
  fprintf(stderr, "%s: phase %ld, piece %ld\n", what, phase, piece);
  exit(1);
}

template <class Work> void run_threads(long threads, long present, Work work) {
  ThreadTeam team(threads);
  std::vector<std::thread> all;
  for (long i = 0; i < present; i++)
    all.emplace_back([&team, &work, i] {
      Worker member(team, i);
      work(member);
    });
  for (std::thread& thread : all) thread.join();
}

void check(int phase, long pieces) {
  for (long i = 0; i < pieces; i++)
    if (written[phase][i] != 1) fail("not written once", phase, i);
}

// Random pauses in computing and writing; each phase looks at the one before. Fewer threads may
// come than the team is for. A phase has fewer than `most` pieces.
void stress(long threads, long present, unsigned seed, int phases = PHASES, long most = PIECES) {
  const auto pieces_of = [&](int phase) { return (seed + phase * 7) % most; };
  for (auto& phase : written)
    for (auto& count : phase) count = 0;
  run_threads(threads, present, [&](Worker& member) {
    unsigned state = seed + 97 * member.index;
    const auto pause = [&] {
      const int kind = rand_r(&state) % 64;
      if (kind == 0) usleep(rand_r(&state) % (100'000 / phases));
      if (kind < 8) sched_yield();
    };
    for (int phase = 0; phase < phases; phase++) {
      const long pieces = pieces_of(phase);
      const auto write = [&](long i) {
        if (phase > 0) check(phase - 1, pieces_of(phase - 1));
        pause();
        written[phase][i]++;
      };
      if (phase % 3) member.run(pieces, [&](long) { pause(); }, write);
      else member.run(pieces, write);
      check(phase, pieces);
    }
  });
  for (int phase = 0; phase < phases; phase++) check(phase, pieces_of(phase));
}

// One thread is put aside in a piece until the others have done all phases: they do not wait for
// it, and what it brings then is not written.
void leave_one_behind(long threads) {
  std::atomic<bool> all_done{false};
  std::atomic<int> stalled{0}, old{0};
  run_threads(threads, threads, [&](Worker& member) {
    for (int phase = 0; phase < PHASES; phase++) {
      if (phase == 3 && member.index != 0)
        while (!stalled) sched_yield();  // so that the first thread has come to its piece
      member.run(
          PIECES,
          [&](long) {
            if (phase != 3 || member.index != 0 || stalled.exchange(1)) return;
            for (int ms = 0; ms < 20'000 && !all_done; ms++) usleep(1000);
            if (!all_done) fail("the others wait", phase, 0);
            old = 1;
          },
          [&](long) {
            if (phase == 3 && old && member.index == 0) fail("an old piece was written", phase, 0);
          });
    }
    all_done = true;
  });
}

}  // namespace

int main() {
  for (unsigned seed = 0; seed < 24; seed++) stress(1 + seed % 5, 1 + seed % (1 + seed % 5), seed);
  for (unsigned seed = 0; seed < 20; seed++) stress(8, 8, seed, MANY_PHASES, 5);  // parts are empty
  for (long threads = 2; threads < 5; threads++) leave_one_behind(threads);
}
