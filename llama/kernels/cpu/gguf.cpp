// Unpacks the quantized blocks of GGUF.
//
// In: blocks of one GGUF type, in memory or in a file. Out: codes, scales and offsets, as the
// functions of gguf_blocks.py return them, with the same roundings; or, from a file, a packed
// weight (packed_weight.h) without an intermediate. The Python module owns the tensors, checks
// their sizes and knows what the codes of a type stand for. It describes the same layouts in the
// same order.
//
// The layouts are those of ggml-common.h in https://github.com/ggml-org/llama.cpp. A block has 32
// or 256 elements of one row, in groups that share a scale and, in some types, an offset:
//     element = scale * table[code] + offset
// In a block of several groups, scales are integers times one float16 of the block, and so are
// offsets. llama.cpp calls these float16 d and dmin.
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <iterator>

#include "codes.h"

namespace {

// Splits bytes into fields of BITS bits and combines each field, shifted left by `left_shift`, with
// a code by OR. RUN bytes give RUN fields from their lowest bits, then RUN from the next ones, as
// in _bit_fields() of gguf_blocks.py: data (num_bytes) -> codes (num_bytes * 8 / BITS).
template <int BITS, int RUN>
void add_bit_fields(const uint8_t* data, int num_bytes, uint8_t* codes, int left_shift = 0) {
  for (const uint8_t* end = data + num_bytes; data < end; data += RUN)
    for (int shift = 0; shift < 8; shift += BITS, codes += RUN) {
      uint8_t fields[RUN];  // a local array cannot alias the data, so both loops are vectorized
      for (int i = 0; i < RUN; i++)
        fields[i] = (data[i] >> shift & ((1 << BITS) - 1)) << left_shift;
      for (int i = 0; i < RUN; i++) codes[i] |= fields[i];
    }
}

constexpr int SCALE = 0;   // first index of the arrays of GroupParameters
constexpr int OFFSET = 1;  // second index, used by types that have offsets

// The scales and the offsets of the groups of one block: a group's value is its factor times the
// float16 of the block.
struct GroupParameters {
  uint16_t block_values[2] = {};  // float16
  int8_t factors[2][16] = {};

  float value(int parameter, int group) const {
    return float16_to_float(block_values[parameter]) * (float)factors[parameter][group];
  }
};

// The sizes of a type: elements, bytes and groups of a block, and whether groups have offsets. A
// type also has a function unpack(block, codes, parameters), which gets codes and parameters that
// are zeros, and writes a byte per code.
template <int ELEMENTS, int BYTES, int GROUPS, bool HAS_OFFSETS = false> struct BlockType {
  static constexpr int elements = ELEMENTS;
  static constexpr int bytes = BYTES;
  static constexpr int groups = GROUPS;
  static constexpr bool has_offsets = HAS_OFFSETS;
};

// Q4_0, Q4_1, Q5_0, Q5_1 and IQ4_NL: scale (2 bytes), offset (2, or absent), fifth bits (4, or
// absent), lower four bits of the codes (16).
template <bool HAS_OFFSET, bool HAS_FIFTH_BIT>
struct Block32 : BlockType<32, 18 + 2 * HAS_OFFSET + 4 * HAS_FIFTH_BIT, 1, HAS_OFFSET> {
  static void unpack(const uint8_t* block, uint8_t* codes, GroupParameters& parameters) {
    const uint8_t* bits = block + 2 + 2 * HAS_OFFSET;
    add_bit_fields<4, 16>(bits + 4 * HAS_FIFTH_BIT, 16, codes);
    if (HAS_FIFTH_BIT) add_bit_fields<1, 1>(bits, 4, codes, 4);
    for (int parameter = SCALE; parameter <= HAS_OFFSET; parameter++) {
      parameters.block_values[parameter] = load<uint16_t>(block + 2 * parameter);
      parameters.factors[parameter][0] = 1;
    }
  }
};

// Q8_0: scale (2 bytes), signed elements (32). The codes count from -128.
struct Q8_0 : BlockType<32, 34, 1> {
  static void unpack(const uint8_t* block, uint8_t* codes, GroupParameters& parameters) {
    for (int i = 0; i < 32; i++) codes[i] = block[2 + i] ^ 128;
    parameters.block_values[SCALE] = load<uint16_t>(block);
    parameters.factors[SCALE][0] = 1;
  }
};

// Q2_K: scale and minimum of each group, four bits each (16 bytes), codes of two bits (64), block
// scale (2), scale of the minima (2). An offset is a minimum times -1.
struct Q2K : BlockType<256, 84, 16, true> {
  static void unpack(const uint8_t* block, uint8_t* codes, GroupParameters& parameters) {
    add_bit_fields<2, 32>(block + 16, 64, codes);
    std::memcpy(parameters.block_values, block + 80, 4);
    for (int i = 0; i < 16; i++) {
      parameters.factors[SCALE][i] = block[i] & 15;
      parameters.factors[OFFSET][i] = -(block[i] >> 4);
    }
  }
};

// Q3_K: third bits of the codes (32 bytes), their lower two bits (64), lower four bits of the
// scales (8), their upper two bits (4), block scale (2). The scales count from -32.
struct Q3K : BlockType<256, 110, 16> {
  static void unpack(const uint8_t* block, uint8_t* codes, GroupParameters& parameters) {
    uint8_t scales[16] = {};
    add_bit_fields<2, 32>(block + 32, 64, codes);
    add_bit_fields<1, 32>(block, 32, codes, 2);
    add_bit_fields<4, 8>(block + 96, 8, scales);
    add_bit_fields<2, 4>(block + 104, 4, scales, 4);
    parameters.block_values[SCALE] = load<uint16_t>(block + 108);
    for (int i = 0; i < 16; i++) parameters.factors[SCALE][i] = scales[i] - 32;
  }
};

// Q4_K and Q5_K: block scale (2 bytes), scale of the minima (2), scales and minima of six bits
// (12), fifth bits (32, or absent), lower four bits of the codes (128). Of the 12 bytes, the first
// four have scales 0 to 3 and the next four minima 0 to 3, in their lower six bits; their upper two
// bits belong to scales and minima 4 to 7, whose lower four bits are the halves of the last four.
template <bool HAS_FIFTH_BIT> struct Q4K : BlockType<256, 144 + 32 * HAS_FIFTH_BIT, 8, true> {
  static void unpack(const uint8_t* block, uint8_t* codes, GroupParameters& parameters) {
    add_bit_fields<4, 32>(block + 16 + 32 * HAS_FIFTH_BIT, 128, codes);
    if (HAS_FIFTH_BIT) add_bit_fields<1, 32>(block + 16, 32, codes, 4);
    const uint8_t* low = block + 4;
    const uint8_t* middle = block + 8;
    const uint8_t* high = block + 12;
    std::memcpy(parameters.block_values, block, 4);
    for (int i = 0; i < 4; i++) {
      parameters.factors[SCALE][i] = low[i] & 63;
      parameters.factors[SCALE][i + 4] = (high[i] & 15) | low[i] >> 6 << 4;
      parameters.factors[OFFSET][i] = -(middle[i] & 63);
      parameters.factors[OFFSET][i + 4] = -(high[i] >> 4 | middle[i] >> 6 << 4);
    }
  }
};

// Q6_K: lower four bits of the codes (128 bytes), their upper two bits (64), signed scales (16),
// block scale (2).
struct Q6K : BlockType<256, 210, 16> {
  static void unpack(const uint8_t* block, uint8_t* codes, GroupParameters& parameters) {
    add_bit_fields<4, 64>(block, 128, codes);
    add_bit_fields<2, 32>(block + 128, 64, codes, 4);
    std::memcpy(parameters.factors[SCALE], block + 192, 16);
    parameters.block_values[SCALE] = load<uint16_t>(block + 208);
  }
};

// IQ4_XS: block scale (2 bytes), upper two bits of the scales (2), their lower four bits (4), codes
// of four bits (128). The scales count from -32.
struct IQ4XS : BlockType<256, 136, 8> {
  static void unpack(const uint8_t* block, uint8_t* codes, GroupParameters& parameters) {
    uint8_t scales[8] = {};
    add_bit_fields<4, 16>(block + 8, 128, codes);
    add_bit_fields<4, 1>(block + 4, 4, scales);
    add_bit_fields<2, 1>(block + 2, 2, scales, 4);
    parameters.block_values[SCALE] = load<uint16_t>(block);
    for (int i = 0; i < 8; i++) parameters.factors[SCALE][i] = scales[i] - 32;
  }
};

// Unpacks `count` blocks, see unpack_gguf().
template <class Type>
void unpack_all(const uint8_t* blocks, uint8_t* codes, float* scales, float* offsets, long count,
                int threads) {
#pragma omp parallel for num_threads(threads)
  for (long i = 0; i < count; i++) {
    uint8_t* block_codes = codes + i * Type::elements;
    std::memset(block_codes, 0, Type::elements);
    GroupParameters parameters;
    Type::unpack(blocks + i * Type::bytes, block_codes, parameters);
    for (int group = 0; group < Type::groups; group++) {
      scales[i * Type::groups + group] = parameters.value(SCALE, group);
      if (Type::has_offsets) offsets[i * Type::groups + group] = parameters.value(OFFSET, group);
    }
  }
}

// Rows of blocks in a file.
struct FileRows {
  int file;     // file descriptor
  long offset;  // bytes before the first row
  long stride;  // bytes from one row to the next

  // Reads the first `width` bytes of each of `count` rows -> out (count, width). Returns false if
  // the file is too short. Rows that are consecutive in the file are read at once.
  bool read(long first, long count, long width, uint8_t* out) const {
    const long chunk = width == stride ? count * width : width;
    for (long at = offset + first * stride; count > 0; at += stride, count -= chunk / width)
      for (const uint8_t* end = out + chunk; out < end;) {
        const long num_read = pread(file, out, end - out, at + chunk - (end - out));
        if (num_read <= 0) return false;
        out += num_read;
      }
    return true;
  }
};

// The packed weight (n, k) that pack_gguf() fills. An element of NIBBLES is a code, one of INT8 is
// table[code], and one of SIX_BITS is table[code] - first.
struct PackTarget {
  char* values;        // elements, in the layout of the format
  char* parameters;    // scales and offsets, in the layout of Parameters
  const float* table;  // element of each code
  ElementFormat format;
  long first;  // first entry of the weight's own table
  long k;
  long group;      // k of a group
  long per_group;  // parameters of a group: 1, or 2 with offsets
};

constexpr long STEP = 256;  // k that are packed at once: one block of 256, or eight of 32

inline bool is_finite(const GroupParameters& parameters) {
  constexpr uint16_t EXPONENT = 0x7c00;  // all of these bits are set in inf and NaN
  return (parameters.block_values[SCALE] & EXPONENT) != EXPONENT &&
         (parameters.block_values[OFFSET] & EXPONENT) != EXPONENT;
}

// Writes the parameters of 32 rows and `count` k, from k = `begin` on: rows (32, blocks per STEP).
// A type with one group per block gives float16, and any other gives EIGHTS: for each eight groups,
// the float16 of the block, then eight integers, each per parameter and row.
template <class Type>
void pack_parameters(const GroupParameters (*rows)[STEP / Type::elements], const PackTarget& target,
                     long block, long begin, long count) {
  constexpr long FILE_GROUP = Type::elements / Type::groups;  // k of a group of the file
  const long width = target.per_group * N_BLOCK;
  const long first = (block * target.k + begin) / target.group;
  for (long g = 0; g < count / target.group; g++) {
    const long k = g * target.group;
    const long file_block = k / Type::elements;
    const long file_group = k % Type::elements / FILE_GROUP;
    char* group = target.parameters + (first + g) * 2 * width;
    char* eight_groups = target.parameters + (first + g) / 8 * 10 * width;
    for (long parameter = 0; parameter < target.per_group; parameter++)
      for (long row = 0, column = parameter * N_BLOCK; row < N_BLOCK; row++, column++) {
        const GroupParameters& from = rows[row][file_block];
        if (Type::groups == 1)
          store(group + 2 * column, from.block_values[parameter]);
        else {
          if (g % 8 == 0) store(eight_groups + 2 * column, from.block_values[parameter]);
          eight_groups[(2 + g % 8) * width + column] = from.factors[parameter][file_group];
        }
      }
  }
}

// Replaces codes by the elements of INT8 or SIX_BITS, in place. If the entries of the table are
// consecutive integers, this is one addition.
inline void look_up(uint8_t* codes, long count, const PackTarget& target, long last_code) {
  const bool is_consecutive = target.table[last_code] - target.table[0] == last_code;
  const int zero = target.format == ElementFormat::SIX_BITS ? (int)target.first : 0;
  const int first = (int)target.table[0] - zero;
  if (is_consecutive)
    for (long i = 0; i < count; i++) codes[i] += first;
  else
    for (long i = 0; i < count; i++) codes[i] = (uint8_t)((int)target.table[codes[i]] - zero);
}

// Packs one block of the weight: blocks (32 rows, k / elements) of the file -> target.
template <class Type>
PackState pack_block(const uint8_t* blocks, const PackTarget& target, long block, long last_code) {
  PackState state = PackState::PACKED;
  for (long begin = 0; begin < target.k; begin += STEP) {
    const long count = std::min(STEP, target.k - begin);
    uint8_t codes[N_BLOCK * STEP] = {};
    GroupParameters parameters[N_BLOCK][STEP / Type::elements];
    for (long row = 0; row < N_BLOCK; row++)
      for (long i = 0; i < count / Type::elements; i++) {
        const uint8_t* from = blocks + (row * target.k + begin) / Type::elements * Type::bytes;
        Type::unpack(from + i * Type::bytes, codes + row * STEP + i * Type::elements,
                     parameters[row][i]);
        if (!is_finite(parameters[row][i])) state = PackState::NOT_FINITE;
      }
    const long k = block * target.k + begin;
    if (target.format != ElementFormat::NIBBLES) look_up(codes, N_BLOCK * STEP, target, last_code);
    if (target.format == ElementFormat::NIBBLES)
      write_codes<Nibbles>(codes, STEP, count, target.values + k * K_BYTES<Nibbles>);
    else if (target.format == ElementFormat::SIX_BITS)
      write_codes<SixBits>(codes, STEP, count, target.values + k * K_BYTES<SixBits>);
    else
      write_codes<Int8>(codes, STEP, count, target.values + k * K_BYTES<Int8>);
    pack_parameters<Type>(parameters, target, block, begin, count);
  }
  return state;
}

// Packs n rows of a file. If several blocks fail, FILE_TOO_SHORT takes precedence.
template <class Type>
PackState pack_all(const FileRows& source, const PackTarget& target, long n, long last_code,
                   int threads) {
  const long width = target.k / Type::elements * Type::bytes;
  int64_t states = 0;  // the states of all blocks, combined by OR
#pragma omp parallel num_threads(threads) reduction(| : states)
  {
    uint8_t* rows = (uint8_t*)std::malloc(N_BLOCK * width);
#pragma omp for schedule(dynamic)
    for (long block = 0; block < num_blocks(n); block++) {
      const long count = std::min<long>(N_BLOCK, n - block * N_BLOCK);
      const bool is_read = rows && source.read(block * N_BLOCK, count, width, rows);
      for (long row = count; row < N_BLOCK && is_read; row++)  // padding, as in pack.cpp
        std::memcpy(rows + row * width, rows + (count - 1) * width, width);
      states |= (int64_t)(is_read ? pack_block<Type>(rows, target, block, last_code)
                                  : PackState::FILE_TOO_SHORT);
    }
    std::free(rows);
  }
  const bool is_short = states & (int64_t)PackState::FILE_TOO_SHORT;
  return is_short ? PackState::FILE_TOO_SHORT : (PackState)states;
}

// A GGUF type: its name in llama/storage/gguf.py, and its functions.
struct GgufType {
  const char* name;
  decltype(&unpack_all<Q8_0>) unpack;
  decltype(&pack_all<Q8_0>) pack;
};

template <class Type> constexpr GgufType type_of(const char* name) {
  return {name, unpack_all<Type>, pack_all<Type>};
}

constexpr GgufType TYPES[] = {
    type_of<Block32<false, false>>("Q4_0"),
    type_of<Block32<true, false>>("Q4_1"),
    type_of<Block32<false, true>>("Q5_0"),
    type_of<Block32<true, true>>("Q5_1"),
    type_of<Q8_0>("Q8_0"),
    type_of<Q2K>("Q2_K"),
    type_of<Q3K>("Q3_K"),
    type_of<Q4K<false>>("Q4_K"),
    type_of<Q4K<true>>("Q5_K"),
    type_of<Q6K>("Q6_K"),
    type_of<Block32<false, false>>("IQ4_NL"),
    type_of<IQ4XS>("IQ4_XS"),
};

}  // namespace

extern "C" {

// Returns the index of a type in TYPES, which the functions below take; -1 if the name is unknown.
long gguf_type(const char* name) {
  const auto* end = std::end(TYPES);
  const auto* type = std::find_if(
      TYPES, end, [&](const GgufType& type) { return std::strcmp(type.name, name) == 0; });
  return type == end ? -1 : type - TYPES;
}

// Unpacks `count` blocks of a type -> codes (count, elements) uint8, scales and offsets (count,
// groups) float32. Types without offsets do not write any.
void unpack_gguf(const uint8_t* blocks, uint8_t* codes, float* scales, float* offsets, long type,
                 long count, int threads) {
  TYPES[type].unpack(blocks, codes, scales, offsets, count, threads);
}

// Packs rows (n, k) of a type from an open file -> values and parameters of a packed weight, and a
// PackState. k is a multiple of the elements of a block.
//
// table: (num_codes), the element of each code. file, offset, stride: see FileRows. group,
// per_group, format, first: see PackTarget.
void pack_gguf(char* values, char* parameters, const float* table, int64_t* state, long file,
               long offset, long stride, long n, long k, long group, long per_group, long type,
               long num_codes, long format, long first, int threads) {
  // clang-format off
  const PackTarget target = {
      values, parameters, table, (ElementFormat)format, first, k, group, per_group};
  // clang-format on
  *state =
      (int64_t)TYPES[type].pack({(int)file, offset, stride}, target, n, num_codes - 1, threads);
}
}
