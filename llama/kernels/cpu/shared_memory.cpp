// Communication between the ranks of one machine over memory that all of them have mapped:
// all-reduce, all-gather and broadcast of tensors, and a ring buffer of messages from rank 0 to all
// other ranks.
//
// In: a Channel, the state of this rank's end, and a tensor or a message. Out: the tensor of the
// result, and a ChannelState. ranks/shared_memory.py owns the memory and decides how long to wait:
// each function returns PENDING after at most 100 ms, and continues when it is called again with
// the same ticket.
//
// A channel of R ranks with buffers of `size` bytes is laid out as
//     R x Slot (128 bytes), R x 2 buffers
// and a ring as
//     Slot of the head (rank 0), R x Slot, `size` bytes of messages
// A message is a header of 8 bytes (uint32 length, uint32 has_more), its bytes, and padding to a
// multiple of 8.
//
// The slot of a rank has the sequence number of the exchange that the rank has reached. A rank
// writes its data into a buffer, then stores its sequence number (release); the others wait for
// that number (acquire), then read. Chunks of a tensor use the two buffers of a rank in turn. A
// rank writes a chunk only when all others have reached its own number: they have then read the
// chunk before the last one, which was in the same buffer, so one wait per chunk is enough.
//
// Sums are computed in float32, in the order of the ranks, by the same code on each rank, so all
// ranks get the same bits.
#include <errno.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <numeric>

#include "constants.h"
#include "pause.h"
#include "vectors.h"

namespace {

enum Kind { ALL_REDUCE = 1, ALL_GATHER, BROADCAST };

constexpr long MAX_SLEEP_NS = 100'000'000;  // after it, Python looks whether other ranks failed
constexpr long MIN_SHARED_SUM = 1 << 15;    // bytes; below, each rank sums the whole chunk
constexpr long BLOCK = 512;                 // elements summed at once, in the L1 cache
constexpr long HEADER_BYTES = 8;            // header of a message

// A sequence number that other ranks wait for. It wraps: only differences are compared.
struct Counter {
  std::atomic<uint32_t> value;
  std::atomic<uint32_t> sleepers;  // ranks that sleep or are about to
};

// The published state of one rank, or of the head of a ring.
struct alignas(128) Slot {
  Counter reached;         // sequence number; in a ring, the bytes sent (head) or received (rank)
  uint64_t signatures[2];  // signatures of the last two exchanges, see Call::signature()
};

// One rank's end of a channel or of a ring, in its own memory. Each field is an int64, in the order
// of _STATE in ranks/shared_memory.py. Python sets the first five; the others begin as 0.
struct Channel {
  char* base;         // start of the shared memory
  long rank;          // this rank
  long ranks;         // number of ranks
  long size;          // bytes of one buffer, or of the ring
  long spin_ns;       // time of spinning before a sleep
  long sequence;      // the number that this rank has reached; of a ring: bytes sent or received
  long buffer_index;  // which of a rank's two buffers the current chunk uses
  long ticket;        // the current operation
  long completed;     // ticket of the last completed operation
  long stage;         // 0: data not written; 1: written; 2: partial sums written
  long offset;        // bytes of the tensor that are done
  long awaited;       // the sequence number that the last wait was for
  long length;        // bytes of the last received message
  long has_more;      // whether another message continues it

  Slot& slot(long r) const { return reinterpret_cast<Slot*>(base)[r]; }
  char* buffer(long r) const { return base + ranks * sizeof(Slot) + (2 * r + buffer_index) * size; }
};

bool has_reached(const Counter& counter, uint32_t target) {
  return (int32_t)(counter.value.load(std::memory_order_acquire) - target) >= 0;
}

long now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1'000'000'000L + t.tv_nsec;
}

long futex(std::atomic<uint32_t>* word, int operation, uint32_t value, const timespec* limit) {
  return syscall(SYS_futex, word, operation, value, limit, nullptr, 0);
}

// Stores a new sequence number and wakes sleeping ranks, if there are any.
//
// The fence orders the store of the value before the load of `sleepers`. A sleeper increments
// `sleepers` before it loads the value, so at least one of the two sees the other.
void publish(Counter& counter, uint32_t value) {
  counter.value.store(value, std::memory_order_release);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (counter.sleepers.load(std::memory_order_relaxed)) {
    futex(&counter.value, FUTEX_WAKE, MAX_RANKS, nullptr);
  }
}

// Sleeps until the counter has reached the target, for MAX_SLEEP_NS at most or until a signal.
// Returns whether it has reached it.
bool sleep_until(Counter& counter, uint32_t target) {
  const long end = now_ns() + MAX_SLEEP_NS;
  counter.sleepers.fetch_add(1);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  bool is_reached;
  while (true) {
    const uint32_t value = counter.value.load(std::memory_order_acquire);
    is_reached = (int32_t)(value - target) >= 0;
    const long remaining = end - now_ns();
    if (is_reached || remaining <= 0) break;
    const timespec limit = {remaining / 1'000'000'000, remaining % 1'000'000'000};
    if (futex(&counter.value, FUTEX_WAIT, value, &limit) < 0 && errno == EINTR) break;
  }
  counter.sleepers.fetch_sub(1);
  return is_reached || has_reached(counter, target);
}

// Spins for spin_ns, then sleeps. Returns whether the counter has reached the target.
bool wait_for(Counter& counter, uint32_t target, long spin_ns) {
  if (has_reached(counter, target)) return true;
  const long end = now_ns() + spin_ns;
  do {
    for (int i = 0; i < 16; i++) {
      if (has_reached(counter, target)) return true;
      pause_briefly();
    }
  } while (now_ns() < end);
  return sleep_until(counter, target);
}

// Waits until all other ranks have reached a sequence number. Returns whether they have.
bool wait_for_all(Channel* c, uint32_t sequence) {
  c->awaited = sequence;
  for (long r = 0; r < c->ranks; r++) {
    if (r != c->rank && !wait_for(c->slot(r).reached, sequence, c->spin_ns)) return false;
  }
  return true;
}

// Publishes that this rank has reached the next sequence number, in a call of this signature.
void arrive(Channel* c, uint64_t signature) {
  c->sequence = (uint32_t)(c->sequence + 1);
  Slot& slot = c->slot(c->rank);
  slot.signatures[c->sequence & 1] = signature;
  publish(slot.reached, c->sequence);
}

// Returns whether all ranks make a call of this signature.
bool signatures_match(const Channel* c, uint64_t signature) {
  for (long r = 0; r < c->ranks; r++) {
    if (c->slot(r).signatures[c->sequence & 1] != signature) return false;
  }
  return true;
}

// --- sums ---

// Converts `count` elements of bf16, or of fp16, to float32.
void to_floats(const uint16_t* x, float* out, long count, bool is_fp16) {
  long i = 0;
  for (; is_fp16 && i + LANES <= count; i += LANES) store(out + i, load_float16(x + i));
  for (; i < count; i++) out[i] = is_fp16 ? float16_to_float(x[i]) : widen(x[i]);
}

// Rounds `count` elements of float32 to bf16, or to fp16.
void from_floats(const float* x, uint16_t* out, long count, bool is_fp16) {
  long i = 0;
  for (; is_fp16 && i + LANES <= count; i += LANES) narrow_float16(out + i, load<Floats>(x + i));
  for (; i < count; i++) out[i] = is_fp16 ? to_float16(x[i]) : to_bf16(x[i]);
}

// Sums parts (ranks, count) of 16-bit elements -> out (count). `out` may be one of the parts,
// because a block is read before it is written.
void sum_16_bit(uint16_t* out, const char* const* parts, long ranks, long count, bool is_fp16) {
  float sums[BLOCK], part[BLOCK];
  for (long first = 0; first < count; first += BLOCK) {
    const long n = std::min(BLOCK, count - first);
    to_floats((const uint16_t*)parts[0] + first, sums, n, is_fp16);
    for (long r = 1; r < ranks; r++) {
      to_floats((const uint16_t*)parts[r] + first, part, n, is_fp16);
      for (long i = 0; i < n; i++) sums[i] += part[i];
    }
    from_floats(sums, out + first, n, is_fp16);
  }
}

// Sums parts (ranks, count) of float32 -> out (count), which may be one of the parts.
void sum_fp32(float* out, const char* const* parts, long ranks, long count) {
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

void sum_parts(char* out, const char* const* parts, long ranks, long bytes, SumType type) {
  if (type == SumType::FP32) return sum_fp32((float*)out, parts, ranks, bytes / 4);
  sum_16_bit((uint16_t*)out, parts, ranks, bytes / 2, type == SumType::FP16);
}

// --- operations: each function processes one chunk, and returns PENDING if a wait takes longer
// than MAX_SLEEP_NS ---

struct Call {
  Kind kind;
  SumType type;
  char* x;                // this rank's tensor; all-reduce and broadcast write the result there
  char* out;              // all-gather: (rows, the sum of row_bytes)
  long bytes;             // bytes of x; all-gather: of the largest tensor of all ranks
  long rows;              // all-gather: rows of every tensor
  const long* row_bytes;  // all-gather: bytes of a row of each rank's tensor
  uint64_t signature;     // a number by which ranks detect that they make different calls

  // Returns how many bytes of rank r's tensor lie in a chunk.
  long part(long r, long offset, long chunk_bytes) const {
    if (kind != ALL_GATHER) return chunk_bytes;
    return std::clamp(rows * row_bytes[r] - offset, 0L, chunk_bytes);
  }
};

uint64_t signature_of(Kind kind, SumType type, long bytes) {
  return (uint64_t)bytes << 16 | (uint64_t)type << 8 | kind;
}

// Returns the signature of an all-gather, which depends on the sizes of all tensors.
uint64_t gather_signature(long rows, const long* row_bytes, long ranks) {
  uint64_t hash = rows;
  for (long r = 0; r < ranks; r++) hash = (hash ^ row_bytes[r]) * 0x100000001b3;  // FNV-1
  return hash << 8 | ALL_GATHER;
}

// Returns where the slice of a chunk begins that rank r sums for all ranks.
long slice_start(long bytes, long r, long ranks) {
  const long slice_bytes = (bytes / ranks + 63) & -64;
  return std::min(bytes, r * slice_bytes);
}

// Sums this rank's slice of all buffers into its own buffer.
void sum_slice(const Channel* c, long bytes, SumType type) {
  const char* parts[MAX_RANKS];
  const long start = slice_start(bytes, c->rank, c->ranks);
  for (long r = 0; r < c->ranks; r++) parts[r] = c->buffer(r) + start;
  const long end = c->rank + 1 == c->ranks ? bytes : slice_start(bytes, c->rank + 1, c->ranks);
  sum_parts(c->buffer(c->rank) + start, parts, c->ranks, end - start, type);
}

// All-reduce. Each rank sums a small chunk as a whole. For a larger chunk, each rank sums a slice,
// then all ranks copy the slices.
ChannelState reduce_chunk(Channel* c, const Call& call, long bytes) {
  char* x = call.x + c->offset;
  if (c->stage == 1) {
    if (!wait_for_all(c, c->sequence)) return ChannelState::PENDING;
    if (!signatures_match(c, call.signature)) return ChannelState::MISMATCH;
    if (c->ranks == 2 || bytes < MIN_SHARED_SUM) {
      const char* parts[MAX_RANKS];
      for (long r = 0; r < c->ranks; r++) parts[r] = r == c->rank ? x : c->buffer(r);
      sum_parts(x, parts, c->ranks, bytes, call.type);
      return ChannelState::DONE;
    }
    sum_slice(c, bytes, call.type);
    arrive(c, call.signature);
    c->stage = 2;
  }
  if (!wait_for_all(c, c->sequence)) return ChannelState::PENDING;
  for (long r = 0; r < c->ranks; r++) {
    const long start = slice_start(bytes, r, c->ranks);
    const long end = r + 1 == c->ranks ? bytes : slice_start(bytes, r + 1, c->ranks);
    std::memcpy(x + start, c->buffer(r) + start, end - start);
  }
  return ChannelState::DONE;
}

// All-gather: a chunk may begin and end within a row. Ranks with smaller tensors than others have
// less or nothing in the last chunks.
ChannelState gather_chunk(Channel* c, const Call& call, long bytes) {
  if (!wait_for_all(c, c->sequence)) return ChannelState::PENDING;
  if (!signatures_match(c, call.signature)) return ChannelState::MISMATCH;
  const long out_row_bytes = std::accumulate(call.row_bytes, call.row_bytes + c->ranks, 0L);
  char* out = call.out;  // where the first row of rank r begins
  for (long r = 0; r < c->ranks; r++) {
    const char* part = r == c->rank ? call.x + c->offset : c->buffer(r);
    const long row_bytes = call.row_bytes[r];
    const long part_bytes = call.part(r, c->offset, bytes);
    for (long done = 0; done < part_bytes;) {
      const long row = (c->offset + done) / row_bytes;
      const long column = (c->offset + done) % row_bytes;
      const long n = std::min(part_bytes - done, row_bytes - column);
      std::memcpy(out + row * out_row_bytes + column, part + done, n);
      done += n;
    }
    out += row_bytes;
  }
  return ChannelState::DONE;
}

ChannelState broadcast_chunk(Channel* c, const Call& call, long bytes) {
  if (c->rank == 0) return ChannelState::DONE;
  c->awaited = c->sequence;
  if (!wait_for(c->slot(0).reached, c->sequence, c->spin_ns)) return ChannelState::PENDING;
  if (c->slot(0).signatures[c->sequence & 1] != call.signature) return ChannelState::MISMATCH;
  std::memcpy(call.x + c->offset, c->buffer(0), bytes);
  return ChannelState::DONE;
}

ChannelState run_chunk(Channel* c, const Call& call, long bytes) {
  if (c->stage == 0) {
    // After this wait, all ranks have read the previous data of this buffer.
    if (!wait_for_all(c, c->sequence)) return ChannelState::PENDING;
    const long own_bytes = call.part(c->rank, c->offset, bytes);
    if (own_bytes && (call.kind != BROADCAST || c->rank == 0)) {
      std::memcpy(c->buffer(c->rank), call.x + c->offset, own_bytes);
    }
    arrive(c, call.signature);
    c->stage = 1;
  }
  if (call.kind == ALL_REDUCE) return reduce_chunk(c, call, bytes);
  if (call.kind == ALL_GATHER) return gather_chunk(c, call, bytes);
  return broadcast_chunk(c, call, bytes);
}

// Runs an operation chunk by chunk, from where the previous call with this ticket returned. BROKEN:
// an operation with another ticket was not completed.
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
    c->buffer_index ^= 1;
  }
  c->completed = ticket;
  return ChannelState::DONE;
}

// --- the ring ---

// Copies `bytes` bytes to or from the ring at a position, in two parts if they wrap at its end.
// copy(address in the ring, offset in the data, bytes) copies one part.
template <class Copy>
void copy_wrapped(const Channel* c, uint32_t position, long bytes, Copy copy) {
  char* data = c->base + (c->ranks + 1) * sizeof(Slot);
  const long start = position % c->size;
  const long first = std::min(bytes, c->size - start);
  copy(data + start, 0, first);
  if (first < bytes) copy(data, first, bytes - first);
}

}  // namespace

extern "C" {

// Returns the bytes of a channel, or of a ring: see the layouts at the top.
long shared_channel_bytes(long ranks, long size) {
  return ranks * (long)sizeof(Slot) + 2 * ranks * size;
}
long shared_ring_bytes(long ranks, long size) { return (ranks + 1) * (long)sizeof(Slot) + size; }

// All-reduce: x (bytes) of a SumType becomes the sum over the ranks.
long shared_all_reduce(long* channel, char* x, long bytes, long type, long ticket) {
  const uint64_t signature = signature_of(ALL_REDUCE, (SumType)type, bytes);
  const Call call = {ALL_REDUCE, (SumType)type, x, nullptr, bytes, 0, nullptr, signature};
  return (long)run((Channel*)channel, call, ticket);
}

// All-gather: x (rows, row_bytes of the rank) of each rank -> out (rows, the sum of row_bytes).
long shared_all_gather(long* channel, char* x, char* out, long rows, long* row_bytes, long ticket) {
  Channel* c = (Channel*)channel;
  const long bytes = rows * *std::max_element(row_bytes, row_bytes + c->ranks);
  const uint64_t signature = gather_signature(rows, row_bytes, c->ranks);
  const Call call = {ALL_GATHER, SumType::NONE, x, out, bytes, rows, row_bytes, signature};
  return (long)run(c, call, ticket);
}

// Broadcast: x (bytes) becomes the tensor of rank 0.
long shared_broadcast(long* channel, char* x, long bytes, long ticket) {
  const uint64_t signature = signature_of(BROADCAST, SumType::NONE, bytes);
  const Call call = {BROADCAST, SumType::NONE, x, nullptr, bytes, 0, nullptr, signature};
  return (long)run((Channel*)channel, call, ticket);
}

// Called by rank 0: writes a message (bytes) into the ring once all other ranks have received
// enough of the earlier ones. If it returns PENDING, nothing is written.
long shared_send(long* ring, char* message, long bytes, long has_more) {
  Channel* c = (Channel*)ring;
  const long needed = HEADER_BYTES + ((bytes + 7) & -8);
  c->awaited = (uint32_t)(c->sequence + needed - c->size);
  for (long r = 1; r < c->ranks; r++) {
    if (!wait_for(c->slot(r + 1).reached, c->awaited, c->spin_ns))
      return (long)ChannelState::PENDING;
  }
  const uint32_t header[2] = {(uint32_t)bytes, (uint32_t)has_more};
  copy_wrapped(c, c->sequence, HEADER_BYTES,
               [&](char* part, long, long n) { std::memcpy(part, header, n); });
  copy_wrapped(c, c->sequence + HEADER_BYTES, bytes,
               [&](char* part, long offset, long n) { std::memcpy(part, message + offset, n); });
  c->sequence = (uint32_t)(c->sequence + needed);
  publish(c->slot(0).reached, c->sequence);
  return (long)ChannelState::DONE;
}

// Called by the other ranks: copies the next message from the ring, and sets `length` and
// `has_more` of the ring's state.
long shared_receive(long* ring, char* message) {
  Channel* c = (Channel*)ring;
  c->awaited = (uint32_t)(c->sequence + 1);
  if (!wait_for(c->slot(0).reached, c->awaited, c->spin_ns)) return (long)ChannelState::PENDING;
  uint32_t header[2];
  copy_wrapped(c, c->sequence, HEADER_BYTES,
               [&](char* part, long, long n) { std::memcpy(header, part, n); });
  copy_wrapped(c, c->sequence + HEADER_BYTES, header[0],
               [&](char* part, long offset, long n) { std::memcpy(message + offset, part, n); });
  c->length = header[0];
  c->has_more = header[1];
  c->sequence = (uint32_t)(c->sequence + HEADER_BYTES + ((header[0] + 7) & -8));
  publish(c->slot(c->rank + 1).reached, c->sequence);
  return (long)ChannelState::DONE;
}

// Returns whether the rank of a slot has not reached the number that the last wait was for. Slot i
// is rank i of a channel; of a ring, slot 0 is the head and slot i + 1 is rank i.
long shared_is_behind(long* channel, long slot) {
  const Channel* c = (Channel*)channel;
  return !has_reached(c->slot(slot).reached, c->awaited);
}
}
