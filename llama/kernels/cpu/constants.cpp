// Returns the constants of constants.h by name, so that Python can check that its own are equal.
//
// In: a name as constants.py spells it, such as "KvFormat::INT8". Out: the value. Every constant of
// constants.h is listed here; tests/ops/test_native.py compares the lists.
#include "constants.h"

#include <cstring>

namespace {

struct Constant {
  const char* name;
  long value;
};

#define CONSTANT(name) {#name, (long)name}

constexpr Constant CONSTANTS[] = {
    CONSTANT(ElementFormat::BF16),
    CONSTANT(ElementFormat::INT8),
    CONSTANT(ElementFormat::FP8),
    CONSTANT(ElementFormat::NIBBLES),
    CONSTANT(ElementFormat::SIX_BITS),
    CONSTANT(ScaleFormat::FLOAT32),
    CONSTANT(ScaleFormat::FLOAT16),
    CONSTANT(ScaleFormat::EIGHTS),
    CONSTANT(KvFormat::BF16),
    CONSTANT(KvFormat::INT8),
    CONSTANT(BodyKind::ATTENTION),
    CONSTANT(BodyKind::FEED_FORWARD),
    CONSTANT(BodyKind::BIDIRECTIONAL_ATTENTION),
    CONSTANT(PackState::PACKED),
    CONSTANT(PackState::NOT_FINITE),
    CONSTANT(PackState::FILE_TOO_SHORT),
    CONSTANT(ChannelState::DONE),
    CONSTANT(ChannelState::PENDING),
    CONSTANT(ChannelState::MISMATCH),
    CONSTANT(ChannelState::BROKEN),
    CONSTANT(SumType::BF16),
    CONSTANT(SumType::FP16),
    CONSTANT(SumType::FP32),
    CONSTANT(SumType::NONE),
    CONSTANT(N_BLOCK),
    CONSTANT(MIN_GROUP),
    CONSTANT(MAX_RANK),
    CONSTANT(MAX_HEAD_DIM),
    CONSTANT(MAX_RANKS),
    CONSTANT(RANK_BLOCK),
    CONSTANT(SHRINK_COLUMNS),
    CONSTANT(MATRIX_FIELDS),
    CONSTANT(DELTA_FIELDS),
    CONSTANT(SEGMENT_FIELDS),
    CONSTANT(HALF_FIELDS),
};

}  // namespace

extern "C" {

// Returns the value of a constant, or -1 if no constant has this name.
long constant_value(const char* name) {
  for (const Constant& constant : CONSTANTS) {
    if (std::strcmp(constant.name, name) == 0) return constant.value;
  }
  return -1;
}
}
