// Blocks of GGUF -> codes, scales and offsets: what gguf_blocks.py says of each kind, in the same
// order, with the same roundings. Or, from a file, straight to a packed weight (packed_weight.h).
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <iterator>

#include "codes.h"

namespace {

// `fields` of gguf_blocks.py: from `bytes` bytes, put over what the codes have, `up` bits higher.
template <int BITS, int RUN> void fields(const uint8_t* from, int bytes, uint8_t* to, int up = 0) {
  for (const uint8_t* end = from + bytes; from < end; from += RUN)
    for (int shift = 0; shift < 8; shift += BITS, to += RUN) {
      uint8_t some[RUN];  // nothing else points to it, so that all are made at once
      for (int i = 0; i < RUN; i++) some[i] = (from[i] >> shift & ((1 << BITS) - 1)) << up;
      for (int i = 0; i < RUN; i++) to[i] |= some[i];
    }
}

// What the groups of a block have: the scale of each is a whole number times the first unit, a
// float16, and its offset one times the second.
struct Lines {
  uint16_t units[2] = {};
  int8_t numbers[2][16] = {};
  float of(int which, int group) const {
    return _cvtsh_ss(units[which]) * (float)numbers[which][group];
  }
};

// A kind: the weights of a block, its bytes, its groups, and whether these have offsets. Codes and
// lines begin as zeros.
template <int WEIGHTS, int BYTES, int GROUPS, bool OFFSETS = false> struct Block {
  static constexpr int weights = WEIGHTS, bytes = BYTES, groups = GROUPS;
  static constexpr bool offsets = OFFSETS;
};

template <bool OFFSET, bool FIFTH>  // Q4_0, Q4_1, Q5_0, Q5_1, IQ4_NL
struct Simple : Block<32, 18 + 2 * OFFSET + 4 * FIFTH, 1, OFFSET> {
  static void unpack(const uint8_t* b, uint8_t* codes, Lines& lines) {
    const uint8_t* parts = b + 2 + 2 * OFFSET;
    fields<4, 16>(parts + 4 * FIFTH, 16, codes);
    if (FIFTH) fields<1, 1>(parts, 4, codes, 4);
    for (int which = 0; which <= OFFSET; which++) {
      lines.units[which] = load<uint16_t>(b + 2 * which);
      lines.numbers[which][0] = 1;
    }
  }
};

struct Q8_0 : Block<32, 34, 1> {
  static void unpack(const uint8_t* b, uint8_t* codes, Lines& lines) {
    for (int i = 0; i < 32; i++) codes[i] = b[2 + i] ^ 128;
    lines.units[0] = load<uint16_t>(b);
    lines.numbers[0][0] = 1;
  }
};

struct Q2K : Block<256, 84, 16, true> {
  static void unpack(const uint8_t* b, uint8_t* codes, Lines& lines) {
    fields<2, 32>(b + 16, 64, codes);
    std::memcpy(lines.units, b + 80, 4);
    for (int i = 0; i < 16; i++) {
      lines.numbers[0][i] = b[i] & 15;
      lines.numbers[1][i] = -(b[i] >> 4);
    }
  }
};

struct Q3K : Block<256, 110, 16> {
  static void unpack(const uint8_t* b, uint8_t* codes, Lines& lines) {
    uint8_t scales[16] = {};
    fields<2, 32>(b + 32, 64, codes);
    fields<1, 32>(b, 32, codes, 2);
    fields<4, 8>(b + 96, 8, scales);
    fields<2, 4>(b + 104, 4, scales, 4);
    lines.units[0] = load<uint16_t>(b + 108);
    for (int i = 0; i < 16; i++) lines.numbers[0][i] = scales[i] - 32;
  }
};

template <bool FIFTH> struct Q4K : Block<256, 144 + 32 * FIFTH, 8, true> {
  static void unpack(const uint8_t* b, uint8_t* codes, Lines& lines) {
    fields<4, 32>(b + 16 + 32 * FIFTH, 128, codes);
    if (FIFTH) fields<1, 32>(b + 16, 32, codes, 4);
    const uint8_t *low = b + 4, *middle = b + 8, *high = b + 12;
    std::memcpy(lines.units, b, 4);
    for (int i = 0; i < 4; i++) {
      lines.numbers[0][i] = low[i] & 63;
      lines.numbers[0][i + 4] = (high[i] & 15) | low[i] >> 6 << 4;
      lines.numbers[1][i] = -(middle[i] & 63);
      lines.numbers[1][i + 4] = -(high[i] >> 4 | middle[i] >> 6 << 4);
    }
  }
};

struct Q6K : Block<256, 210, 16> {
  static void unpack(const uint8_t* b, uint8_t* codes, Lines& lines) {
    fields<4, 64>(b, 128, codes);
    fields<2, 32>(b + 128, 64, codes, 4);
    std::memcpy(lines.numbers[0], b + 192, 16);
    lines.units[0] = load<uint16_t>(b + 208);
  }
};

struct IQ4XS : Block<256, 136, 8> {
  static void unpack(const uint8_t* b, uint8_t* codes, Lines& lines) {
    uint8_t scales[8] = {};
    fields<4, 16>(b + 8, 128, codes);
    fields<4, 1>(b + 4, 4, scales);
    fields<2, 1>(b + 2, 2, scales, 4);
    lines.units[0] = load<uint16_t>(b);
    for (int i = 0; i < 8; i++) lines.numbers[0][i] = scales[i] - 32;
  }
};

template <class Kind>
void unpack_all(const uint8_t* blocks, uint8_t* codes, float* scales, float* offsets, long count,
                int threads) {
#pragma omp parallel for num_threads(threads)
  for (long i = 0; i < count; i++) {
    uint8_t* own = codes + i * Kind::weights;
    std::memset(own, 0, Kind::weights);
    Lines lines;
    Kind::unpack(blocks + i * Kind::bytes, own, lines);
    for (int g = 0; g < Kind::groups; g++) {
      scales[i * Kind::groups + g] = lines.of(0, g);
      if (Kind::offsets) offsets[i * Kind::groups + g] = lines.of(1, g);
    }
  }
}

// Where rows of blocks are: in a file, `stride` bytes apart.
struct Source {
  int file;
  long offset, stride;

  // `count` rows of `width` bytes, from row `first` on; false where the file ends before.
  bool read(long first, long count, long width, uint8_t* to) const {
    const long each = width == stride ? count * width : width;  // bytes that lie together
    for (long at = offset + first * stride; count > 0; at += stride, count -= each / width)
      for (const uint8_t* end = to + each; to < end;) {
        const long part = pread(file, to, end - to, at + each - (end - to));
        if (part <= 0) return false;
        to += part;
      }
    return true;
  }
};

// A packed weight (n, k) of one of ElementFormat: nibbles, or bytes, which are numbers[code], or
// six bits, which are what these are above `first`; of groups of `group` k, with `per_group`
// parameters.
struct Target {
  char *values, *parameters;
  const float* numbers;
  ElementFormat format;
  long first, k, group, per_group;
};

constexpr long STEP = 256;  // k at a time: one block, or eight

inline bool is_finite(const Lines& lines) {
  return (lines.units[0] & 0x7c00) != 0x7c00 && (lines.units[1] & 0x7c00) != 0x7c00;
}

// The parameters of 32 rows and `count` k, from k = `begin` on: float16 where a block is one group,
// or eight groups as whole numbers of the block's unit (see Parameters in packed_weight.h).
template <class Kind>
void pack_lines(const Lines (*lines)[STEP / Kind::weights], const Target& to, long block,
                long begin, long count) {
  constexpr long OWN = Kind::weights / Kind::groups;  // k of a group of the file
  const long width = to.per_group * N_BLOCK, first = (block * to.k + begin) / to.group;
  for (long g = 0; g < count / to.group; g++) {
    const long at = g * to.group, i = at / Kind::weights, own = at % Kind::weights / OWN;
    char* group = to.parameters + (first + g) * 2 * width;
    char* eight = to.parameters + (first + g) / 8 * 10 * width;
    for (long which = 0; which < to.per_group; which++)
      for (long row = 0, column = which * N_BLOCK; row < N_BLOCK; row++, column++) {
        const Lines& line = lines[row][i];
        if (Kind::groups == 1)
          store(group + 2 * column, line.units[which]);
        else {
          if (g % 8 == 0) store(eight + 2 * column, line.units[which]);
          eight[(2 + g % 8) * width + column] = line.numbers[which][own];
        }
      }
  }
}

// Codes in place -> what stands for them in a byte, or in six bits.
inline void look_up(uint8_t* codes, long count, const Target& to, long last) {
  const bool follow = to.numbers[last] - to.numbers[0] == last;
  const int zero = to.format == ElementFormat::SIX_BITS ? (int)to.first : 0,
            first = (int)to.numbers[0] - zero;
  if (follow)
    for (long i = 0; i < count; i++) codes[i] += first;
  else
    for (long i = 0; i < count; i++) codes[i] = (uint8_t)((int)to.numbers[codes[i]] - zero);
}

// 32 rows of a packed weight, of blocks that lie row after row.
template <class Kind>
PackState pack_rows_of(const uint8_t* blocks, const Target& to, long block, long last) {
  PackState state = PackState::PACKED;
  for (long begin = 0; begin < to.k; begin += STEP) {
    const long count = std::min(STEP, to.k - begin);
    uint8_t codes[N_BLOCK * STEP] = {};
    Lines lines[N_BLOCK][STEP / Kind::weights];
    for (long row = 0; row < N_BLOCK; row++)
      for (long i = 0; i < count / Kind::weights; i++) {
        const uint8_t* own = blocks + (row * to.k + begin) / Kind::weights * Kind::bytes;
        Kind::unpack(own + i * Kind::bytes, codes + row * STEP + i * Kind::weights, lines[row][i]);
        if (!is_finite(lines[row][i])) state = PackState::NOT_FINITE;
      }
    const long at = block * to.k + begin;
    if (to.format != ElementFormat::NIBBLES) look_up(codes, N_BLOCK * STEP, to, last);
    if (to.format == ElementFormat::NIBBLES)
      write_codes<Nibbles>(codes, STEP, count, to.values + at * K_BYTES<Nibbles>);
    else if (to.format == ElementFormat::SIX_BITS)
      write_codes<SixBits>(codes, STEP, count, to.values + at * K_BYTES<SixBits>);
    else
      write_codes<Int8>(codes, STEP, count, to.values + at * K_BYTES<Int8>);
    pack_lines<Kind>(lines, to, block, begin, count);
  }
  return state;
}

template <class Kind>
PackState pack_all(const Source& from, const Target& to, long n, long last, int threads) {
  const long width = to.k / Kind::weights * Kind::bytes;
  int64_t states = 0;
#pragma omp parallel num_threads(threads) reduction(| : states)
  {
    uint8_t* rows = (uint8_t*)std::malloc(N_BLOCK * width);
#pragma omp for schedule(dynamic)
    for (long block = 0; block < n / N_BLOCK; block++) {
      const bool is_there = rows && from.read(block * N_BLOCK, N_BLOCK, width, rows);
      states |= (int64_t)(is_there ? pack_rows_of<Kind>(rows, to, block, last)
                                   : PackState::FILE_TOO_SHORT);
    }
    std::free(rows);
  }
  const bool is_short = states & (int64_t)PackState::FILE_TOO_SHORT;
  return is_short ? PackState::FILE_TOO_SHORT : (PackState)states;
}

// A type of blocks: its name in gguf.py, and its functions.
struct GgufType {
  const char* name;
  decltype(&unpack_all<Q8_0>) unpack;
  decltype(&pack_all<Q8_0>) pack;
};

template <class Kind> constexpr GgufType type_of(const char* name) {
  return {name, unpack_all<Kind>, pack_all<Kind>};
}

constexpr GgufType TYPES[] = {
    type_of<Simple<false, false>>("Q4_0"),
    type_of<Simple<true, false>>("Q4_1"),
    type_of<Simple<false, true>>("Q5_0"),
    type_of<Simple<true, true>>("Q5_1"),
    type_of<Q8_0>("Q8_0"),
    type_of<Q2K>("Q2_K"),
    type_of<Q3K>("Q3_K"),
    type_of<Q4K<false>>("Q4_K"),
    type_of<Q4K<true>>("Q5_K"),
    type_of<Q6K>("Q6_K"),
    type_of<Simple<false, false>>("IQ4_NL"),
    type_of<IQ4XS>("IQ4_XS"),
};

}  // namespace

extern "C" {

// The number of a type, by which the functions below take it; -1 where there is none of this name.
long gguf_type(const char* name) {
  const auto* end = std::end(TYPES);
  const auto* found = std::find_if(
      TYPES, end, [&](const GgufType& type) { return std::strcmp(type.name, name) == 0; });
  return found == end ? -1 : found - TYPES;
}

// `count` blocks of a type -> codes (count, weights), scales and offsets (count, groups); types
// without offsets write none.
void unpack_gguf(const uint8_t* blocks, uint8_t* codes, float* scales, float* offsets, long type,
                 long count, int threads) {
  TYPES[type].unpack(blocks, codes, scales, offsets, count, threads);
}

// Rows (n, k) of a type in an open file, `stride` bytes apart -> a packed weight, see Target. The
// type has `codes` codes, which stand for these numbers; the weight's begin with `first`. k is of
// whole blocks. state: a PackState.
void pack_gguf(char* values, char* parameters, const float* numbers, int64_t* state, long file,
               long offset, long stride, long n, long k, long group, long per_group, long type,
               long codes, long format, long first, int threads) {
  const Target to = {values, parameters, numbers, (ElementFormat)format,
                     first,  k,          group,   per_group};
  *state = (int64_t)TYPES[type].pack({(int)file, offset, stride}, to, n, codes - 1, threads);
}
}
