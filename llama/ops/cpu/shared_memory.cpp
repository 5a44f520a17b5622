// What ranks of one machine do together over memory that all of them have mapped: all-reduce,
// all-gather and broadcast of tensors, and a ring of messages from rank 0 to the rest.
//
// A channel has, for each rank, a count of the turns that the rank has come to, and two buffers.
// A rank writes its part into a buffer, then raises its count (release); the others wait for the
// count (acquire), then read. A rank writes turn k only when all others have come to turn k - 1,
// and so have read turn k - 2, which lay in the same buffer: one wait per message is enough. Sums
// are in float32, in the order of the ranks, by the same code on each: all ranks hold the same
// bits.
//
// ranks/shared_memory.py owns the memory, and decides how long to wait: each function returns
// PENDING after at most 100 ms, and goes on where it was when it is called again with its ticket.
#include <errno.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>

#include "constants.h"
#include "vectors.h"

namespace {

enum Kind { ALL_REDUCE = 1, ALL_GATHER, BROADCAST };

constexpr long SLICE_NS = 100'000'000;    // the longest sleep before Python looks at the peers
constexpr long MIN_SHARED_SUM = 1 << 15;  // bytes: below, each rank sums all of it
constexpr long BLOCK = 512;               // numbers that are summed at once, in the first cache

// A number that others wait for. It wraps: only differences count.
struct Count {
  std::atomic<uint32_t> value;
  std::atomic<uint32_t> sleepers;
};

// One per rank at the start of a channel; a ring has one for its head, then one per rank.
struct alignas(128) Place {
  Count arrived;
  uint64_t calls[2];  // what the rank does in its last two turns, to find ranks that differ
};

// One rank's end of a channel, in its own memory. Python sets the first five; the rest begin as 0.
struct Channel {
  char* base;
  long rank, ranks;
  long size;  // bytes: of one buffer, or of the ring
  long spin_ns;
  long turn;               // to which this rank has come; of a ring: bytes sent or received
  long half;               // the buffer of the present chunk
  long ticket, completed;  // of the operation under way, and of the last that ended
  long stage, offset;      // how far it is
  long awaited;            // what the last wait was for
  long length, has_more;   // of the message received

  Place& place(long r) const { return reinterpret_cast<Place*>(base)[r]; }
  char* buffer(long r) const { return base + ranks * sizeof(Place) + (2 * r + half) * size; }
};

bool reached(const Count& count, uint32_t target) {
  return (int32_t)(count.value.load(std::memory_order_acquire) - target) >= 0;
}

long now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1'000'000'000L + t.tv_nsec;
}

long futex(std::atomic<uint32_t>* word, int operation, uint32_t value, const timespec* limit) {
  return syscall(SYS_futex, word, operation, value, limit, nullptr, 0);
}

// Sleeping ranks are woken only if there are any. The fence orders the new value before the look at
// `sleepers`, as a sleeper counts itself before it looks at the value: one of the two sees the
// other.
void raise(Count& count, uint32_t value) {
  count.value.store(value, std::memory_order_release);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (count.sleepers.load(std::memory_order_relaxed)) {
    futex(&count.value, FUTEX_WAKE, MAX_RANKS, nullptr);
  }
}

bool sleep_until(Count& count, uint32_t target) {
  const long end = now_ns() + SLICE_NS;
  count.sleepers.fetch_add(1);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  bool is_there;
  while (true) {
    const uint32_t value = count.value.load(std::memory_order_acquire);
    is_there = (int32_t)(value - target) >= 0;
    const long left = end - now_ns();
    if (is_there || left <= 0) break;
    const timespec limit = {left / 1'000'000'000, left % 1'000'000'000};
    if (futex(&count.value, FUTEX_WAIT, value, &limit) < 0 && errno == EINTR) break;
  }
  count.sleepers.fetch_sub(1);
  return is_there || reached(count, target);
}

// Spin for a while, then sleep; false where the count was not reached within a slice.
bool wait_for(Count& count, uint32_t target, long spin_ns) {
  if (reached(count, target)) return true;
  const long end = now_ns() + spin_ns;
  do {
    for (int i = 0; i < 16; i++) {
      if (reached(count, target)) return true;
      _mm_pause();
    }
  } while (now_ns() < end);
  return sleep_until(count, target);
}

bool wait_for_all(Channel* c, uint32_t turn) {
  c->awaited = turn;
  for (long r = 0; r < c->ranks; r++) {
    if (r != c->rank && !wait_for(c->place(r).arrived, turn, c->spin_ns)) return false;
  }
  return true;
}

void arrive(Channel* c, uint64_t call) {
  c->turn = (uint32_t)(c->turn + 1);
  Place& own = c->place(c->rank);
  own.calls[c->turn & 1] = call;
  raise(own.arrived, c->turn);
}

bool all_make(const Channel* c, uint64_t call) {
  for (long r = 0; r < c->ranks; r++) {
    if (c->place(r).calls[c->turn & 1] != call) return false;
  }
  return true;
}

// --- sums ---

void to_floats(const uint16_t* from, float* to, long count, bool is_half) {
  if (!is_half) {
    for (long i = 0; i < count; i++) to[i] = widen(from[i]);
    return;
  }
  long i = 0;
  for (; i + 8 <= count; i += 8) {
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(load<__m128i>(from + i)));
  }
  for (; i < count; i++) to[i] = _cvtsh_ss(from[i]);
}

void from_floats(const float* from, uint16_t* to, long count, bool is_half) {
  if (!is_half) {
    for (long i = 0; i < count; i++) to[i] = to_bf16(from[i]);
    return;
  }
  long i = 0;
  for (; i + 8 <= count; i += 8) {
    store(to + i, _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
  }
  for (; i < count; i++) to[i] = _cvtss_sh(from[i], _MM_FROUND_TO_NEAREST_INT);
}

// `out` can be one of the inputs: a block is read before it is written.
void add_halves(uint16_t* out, const char* const* parts, long ranks, long count, bool is_half) {
  float sums[BLOCK], part[BLOCK];
  for (long first = 0; first < count; first += BLOCK) {
    const long n = std::min(BLOCK, count - first);
    to_floats((const uint16_t*)parts[0] + first, sums, n, is_half);
    for (long r = 1; r < ranks; r++) {
      to_floats((const uint16_t*)parts[r] + first, part, n, is_half);
      for (long i = 0; i < n; i++) sums[i] += part[i];
    }
    from_floats(sums, out + first, n, is_half);
  }
}

void add_floats(float* out, const char* const* parts, long ranks, long count) {
  float sums[BLOCK];
  for (long first = 0; first < count; first += BLOCK) {
    const long n = std::min(BLOCK, count - first);
    std::memcpy(sums, (const float*)parts[0] + first, n * sizeof(float));
    for (long r = 1; r < ranks; r++) {
      const float* part = (const float*)parts[r] + first;
      for (long i = 0; i < n; i++) sums[i] += part[i];
    }
    std::memcpy(out + first, sums, n * sizeof(float));
  }
}

void add_up(char* out, const char* const* parts, long ranks, long bytes, SumType type) {
  if (type == SumType::FP32) return add_floats((float*)out, parts, ranks, bytes / 4);
  add_halves((uint16_t*)out, parts, ranks, bytes / 2, type == SumType::FP16);
}

// --- the operations: one chunk, as far as it goes without waiting longer than a slice ---

struct Call {
  Kind kind;
  SumType type;
  char* x;     // this rank's part; all-reduce and broadcast put the result there
  char* out;   // of all-gather: (rows, ranks * row_bytes)
  long bytes;  // of x
  long row_bytes;

  uint64_t name() const { return (uint64_t)bytes << 16 | (uint64_t)type << 8 | kind; }
};

// The part of a chunk that rank r sums for all.
long slice_start(long bytes, long r, long ranks) {
  const long each = (bytes / ranks + 63) & -64;
  return std::min(bytes, r * each);
}

void sum_slice(const Channel* c, long bytes, SumType type) {
  const char* parts[MAX_RANKS];
  const long start = slice_start(bytes, c->rank, c->ranks);
  for (long r = 0; r < c->ranks; r++) parts[r] = c->buffer(r) + start;
  const long end = c->rank + 1 == c->ranks ? bytes : slice_start(bytes, c->rank + 1, c->ranks);
  add_up(c->buffer(c->rank) + start, parts, c->ranks, end - start, type);
}

ChannelState reduce_chunk(Channel* c, const Call& call, long bytes) {
  char* x = call.x + c->offset;
  if (c->stage == 1) {
    if (!wait_for_all(c, c->turn)) return ChannelState::PENDING;
    if (!all_make(c, call.name())) return ChannelState::MISMATCH;
    if (c->ranks == 2 || bytes < MIN_SHARED_SUM) {
      const char* parts[MAX_RANKS];
      for (long r = 0; r < c->ranks; r++) parts[r] = r == c->rank ? x : c->buffer(r);
      add_up(x, parts, c->ranks, bytes, call.type);
      return ChannelState::DONE;
    }
    sum_slice(c, bytes, call.type);
    arrive(c, call.name());
    c->stage = 2;
  }
  if (!wait_for_all(c, c->turn)) return ChannelState::PENDING;
  for (long r = 0; r < c->ranks; r++) {
    const long start = slice_start(bytes, r, c->ranks);
    const long end = r + 1 == c->ranks ? bytes : slice_start(bytes, r + 1, c->ranks);
    std::memcpy(x + start, c->buffer(r) + start, end - start);
  }
  return ChannelState::DONE;
}

ChannelState gather_chunk(Channel* c, const Call& call, long bytes) {
  if (!wait_for_all(c, c->turn)) return ChannelState::PENDING;
  if (!all_make(c, call.name())) return ChannelState::MISMATCH;
  for (long r = 0; r < c->ranks; r++) {
    const char* part = r == c->rank ? call.x + c->offset : c->buffer(r);
    for (long done = 0; done < bytes;) {
      const long row = (c->offset + done) / call.row_bytes;
      const long within = (c->offset + done) % call.row_bytes;
      const long n = std::min(bytes - done, call.row_bytes - within);
      std::memcpy(call.out + (row * c->ranks + r) * call.row_bytes + within, part + done, n);
      done += n;
    }
  }
  return ChannelState::DONE;
}

ChannelState broadcast_chunk(Channel* c, const Call& call, long bytes) {
  if (c->rank == 0) return ChannelState::DONE;
  c->awaited = c->turn;
  if (!wait_for(c->place(0).arrived, c->turn, c->spin_ns)) return ChannelState::PENDING;
  if (c->place(0).calls[c->turn & 1] != call.name()) return ChannelState::MISMATCH;
  std::memcpy(call.x + c->offset, c->buffer(0), bytes);
  return ChannelState::DONE;
}

ChannelState run_chunk(Channel* c, const Call& call, long bytes) {
  if (c->stage == 0) {
    if (!wait_for_all(c, c->turn))
      return ChannelState::PENDING;  // they have read what lay in this buffer
    if (call.kind != BROADCAST || c->rank == 0) {
      std::memcpy(c->buffer(c->rank), call.x + c->offset, bytes);
    }
    arrive(c, call.name());
    c->stage = 1;
  }
  if (call.kind == ALL_REDUCE) return reduce_chunk(c, call, bytes);
  if (call.kind == ALL_GATHER) return gather_chunk(c, call, bytes);
  return broadcast_chunk(c, call, bytes);
}

ChannelState run(Channel* c, const Call& call, long ticket) {
  if (c->completed == ticket) return ChannelState::DONE;
  if (c->ticket != c->completed && c->ticket != ticket) return ChannelState::BROKEN;
  if (c->ticket != ticket) c->stage = c->offset = 0;
  c->ticket = ticket;
  while (c->offset < call.bytes) {
    const long bytes = std::min(c->size, call.bytes - c->offset);
    const ChannelState state = run_chunk(c, call, bytes);
    if (state != ChannelState::DONE) return state;
    c->offset += bytes;
    c->stage = 0;
    c->half ^= 1;
  }
  c->completed = ticket;
  return ChannelState::DONE;
}

// --- the ring: messages of a header of 8 bytes (length, whether more belongs to it) and a body ---

// Copy to or from the ring at a position, which wraps at its end.
template <class Copy> void each_part(const Channel* c, uint32_t position, long bytes, Copy copy) {
  char* data = c->base + (c->ranks + 1) * sizeof(Place);
  const long start = position % c->size, first = std::min(bytes, c->size - start);
  copy(data + start, 0, first);
  if (first < bytes) copy(data, first, bytes - first);
}

}  // namespace

extern "C" {

// Bytes of a channel with buffers of `size` bytes; a ring has one buffer, and a place for its head.
long shared_channel_bytes(long ranks, long size) {
  return ranks * (long)sizeof(Place) + 2 * ranks * size;
}
long shared_ring_bytes(long ranks, long size) { return (ranks + 1) * (long)sizeof(Place) + size; }

// x (bytes) becomes the sum over the ranks.
long shared_all_reduce(long* channel, char* x, long bytes, long type, long ticket) {
  const Call call = {ALL_REDUCE, (SumType)type, x, nullptr, bytes, 0};
  return (long)run((Channel*)channel, call, ticket);
}

// x (rows, row_bytes) of each rank becomes out (rows, ranks * row_bytes).
long shared_all_gather(long* channel, char* x, char* out, long bytes, long row_bytes, long ticket) {
  const Call call = {ALL_GATHER, SumType::NONE, x, out, bytes, row_bytes};
  return (long)run((Channel*)channel, call, ticket);
}

// x (bytes) becomes rank 0's.
long shared_broadcast(long* channel, char* x, long bytes, long ticket) {
  const Call call = {BROADCAST, SumType::NONE, x, nullptr, bytes, 0};
  return (long)run((Channel*)channel, call, ticket);
}

// Rank 0: put a message of `bytes` into the ring, once there is room: all of it or nothing.
long shared_send(long* ring, char* message, long bytes, long has_more) {
  Channel* c = (Channel*)ring;
  const long needed = 8 + ((bytes + 7) & -8);
  c->awaited = (uint32_t)(c->turn + needed - c->size);
  for (long r = 1; r < c->ranks; r++) {
    if (!wait_for(c->place(r + 1).arrived, c->awaited, c->spin_ns))
      return (long)ChannelState::PENDING;
  }
  const uint32_t header[2] = {(uint32_t)bytes, (uint32_t)has_more};
  each_part(c, c->turn, 8, [&](char* at, long, long n) { std::memcpy(at, header, n); });
  each_part(c, c->turn + 8, bytes,
            [&](char* at, long from, long n) { std::memcpy(at, message + from, n); });
  c->turn = (uint32_t)(c->turn + needed);
  raise(c->place(0).arrived, c->turn);
  return (long)ChannelState::DONE;
}

// Other ranks: take the next message; its length and has_more are then in the ring's state.
long shared_receive(long* ring, char* message) {
  Channel* c = (Channel*)ring;
  c->awaited = (uint32_t)(c->turn + 1);
  if (!wait_for(c->place(0).arrived, c->awaited, c->spin_ns)) return (long)ChannelState::PENDING;
  uint32_t header[2];
  each_part(c, c->turn, 8, [&](char* at, long, long n) { std::memcpy(header, at, n); });
  each_part(c, c->turn + 8, header[0],
            [&](char* at, long from, long n) { std::memcpy(message + from, at, n); });
  c->length = header[0];
  c->has_more = header[1];
  c->turn = (uint32_t)(c->turn + 8 + ((header[0] + 7) & -8));
  raise(c->place(c->rank + 1).arrived, c->turn);
  return (long)ChannelState::DONE;
}

// Whether a place (a rank's, or of a ring one more) is behind what the last wait was for.
long shared_is_behind(long* channel, long place) {
  const Channel* c = (Channel*)channel;
  return !reached(c->place(place).arrived, c->awaited);
}
}
