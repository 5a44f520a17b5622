// Packed weights as quads of bytes, for integer products. A weight of kernels.h goes in; vectors of
// the operands of dot.h come out. What x is must not be known here.
//
// A quad is four bytes of neighbouring k. The packed layouts of a weight (packed_weight.h) are read
// as they are: a vector of LANES rows becomes vectors of quads by masks and shifts alone, in an
// order of k that depends on the format. rounded_rows.h packs x in the same order.
//
//     bytes      k = 0 1 2 3
//     nibbles    k = 0 4 1 5, 2 6 3 7
//     six bits   k = 0 2 1 3
//
// The stored codes are unsigned, so the elements differ from them by an offset, see
// element_offset().
#pragma once
#include "dot.h"
#include "packed_weight.h"

namespace {

constexpr long STEP_K = 4 * STEP_QUADS;  // k of a step

// The sources of quads.
//
// BITS: 4 or 6 for unsigned codes of so many bits, 8 for whole bytes.
// ROW_BYTES: bytes from one row of a step to the next.
// STEP: bytes of a step for all 32 rows.
// load(address): loads a step of LANES rows, whose first row is at the address.
// quad(step, j): the j-th quad of each of these rows.
// PREFETCH_LINES: cache lines that a product prefetches at each step.

struct ByteQuads : InMemory {
  static constexpr int BITS = 8;
  static constexpr long ROW_BYTES = 2, STEP = STEP_K * K_BYTES<Int8>;
  static constexpr int PREFETCH_LINES = 8;
  explicit ByteQuads(const Weight&) {}
  UInts quad(Step step, int j) const {
    const char* pairs = step.address + 2 * j * Int8::STEP;
    const UInts signed_bytes = join_pairs(pairs, pairs + Int8::STEP);
    return BYTE_OFFSET ? signed_bytes ^ 0x80808080 : signed_bytes;
  }
};

struct NibbleQuads {
  static constexpr int BITS = 4;
  static constexpr long ROW_BYTES = 4, STEP = STEP_K * K_BYTES<Nibbles>;
  static constexpr int PREFETCH_LINES = 4;
  struct Step {
    UInts codes[2];
  };
  explicit NibbleQuads(const Weight&) {}
  static Step load(const char* address) {
    return {{::load<UInts>(address), ::load<UInts>(address + Nibbles::STEP)}};
  }
  UInts quad(const Step& step, int j) const { return step.codes[j / 2] >> j % 2 * 4 & 0x0f0f0f0f; }
};

// Nibbles that index a table of whole numbers which are not consecutive.
struct TableQuads : NibbleQuads {
  static constexpr int BITS = 8;
  UInts table;  // the 16 elements as bytes, again and again
  explicit TableQuads(const Weight& weight) : NibbleQuads(weight) {
    char bytes[VECTOR_BYTES];
    for (int i = 0; i < VECTOR_BYTES; i++) bytes[i] = (char)(weight.table[i % 16] + BYTE_OFFSET);
    table = ::load<UInts>(bytes);
  }
  UInts quad(const Step& step, int j) const {
    return look_up_bytes(table, NibbleQuads::quad(step, j));
  }
};

struct SixBitQuads {
  static constexpr int BITS = 6;
  static constexpr long ROW_BYTES = 4, STEP = STEP_K * K_BYTES<SixBits>;
  static constexpr int PREFETCH_LINES = 6;
  using Step = SixBits::Step;
  explicit SixBitQuads(const Weight&) {}
  static Step load(const char* address) { return SixBits::load(address); }
  // A half of a lane has two codes in its low 12 bits, which become its two bytes.
  UInts quad(const Step& step, int j) const {
    return (step.codes[j] & 0x003f003f) | (step.codes[j] << 2 & 0x3f003f00);
  }
};

// Quads that were made before: (K/4, 32, 4).
template <int BITS_> struct ReadyQuads : InMemory {
  static constexpr int BITS = BITS_;
  static constexpr long ROW_BYTES = 4, STEP = STEP_K * N_BLOCK;
  static constexpr int PREFETCH_LINES = 4;
  explicit ReadyQuads(const Weight&) {}
  UInts quad(Step step, int j) const { return ::load<UInts>(step.address + j * 4 * N_BLOCK); }
};
// The same quads, made before. With one instruction the number of bits does not matter, so one
// instance is enough.
#if defined(HAS_DOT)
template <class Source> using Ready = ReadyQuads<8>;
#else
template <class Source> using Ready = ReadyQuads<Source::BITS>;
#endif

// Makes the quads of `count` k of a weight block: out (count / 4, 32, 4). Prefetches as many bytes
// into L2, from `prefetch` on, unless it is null because the product does so meanwhile.
template <class Source>
void make_quads(const Source& source, const char* weights, long count, char* out,
                const char* prefetch = nullptr) {
  for (long k = 0; k < count; k += STEP_K, weights += Source::STEP) {
    for (long line = 0; prefetch && line < Source::STEP; line += 64, prefetch += 64)
      __builtin_prefetch(prefetch, 0, 2);
    for (long row = 0; row < N_BLOCK; row += LANES) {
      const auto step = source.load(weights + row * Source::ROW_BYTES);
      for (int j = 0; j < STEP_QUADS; j++)
        store(out + 4 * (j * N_BLOCK + row), source.quad(step, j));
    }
    out += STEP_K * N_BLOCK;
  }
}

// Returns whether the codes of a weight are whole bytes as quads: the elements themselves, or
// nibbles that index numbers which are not consecutive.
inline bool has_whole_bytes(const Weight& weight) {
  if (weight.format != ElementFormat::NIBBLES) return weight.format == ElementFormat::INT8;
  for (int i = 1; i < 16; i++)
    if (weight.table[i] != weight.table[0] + (float)i) return true;
  return false;
}

// Returns what must be added to a code to get the element.
inline int element_offset(const Weight& weight) {
  return has_whole_bytes(weight) ? -BYTE_OFFSET : (int)weight.table[0];
}

// The order of k within 8 k of quads.
struct QuadOrder {
  int8_t k[8];
};

inline QuadOrder quad_order(ElementFormat format) {
  if (format == ElementFormat::NIBBLES) return {{0, 4, 1, 5, 2, 6, 3, 7}};
  if (format == ElementFormat::SIX_BITS) return {{0, 2, 1, 3, 4, 6, 5, 7}};
  return {{0, 1, 2, 3, 4, 5, 6, 7}};
}

}  // namespace
