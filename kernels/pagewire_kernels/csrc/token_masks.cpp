// Rows of logits less the tokens that masks forbid: one pass over memory. See
// pagewire_kernels/token_masks.py.

#include <algorithm>
#include <cstring>
#include <limits>

#include "team.h"
#include "vec.h"

namespace pagewire {
namespace {

constexpr int W = kWidth;
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();
constexpr int kWordBits = 32;
// Below it a second thread saves less than waiting for it may cost.
constexpr int64_t kParallelElements = 1 << 17;

using Int = typename Vec<W>::Int;

// The logits whose bits are set in `word`, from its `part`-th vector on. In integers: of a choice
// between floats by integers the compiler makes one lane after the other.
FloatV<W> allowed(FloatV<W> logits, uint32_t word, int part) {
#if defined(__AVX512F__)
  if constexpr (W == 16) {
    const __mmask16 mask = static_cast<__mmask16>(word >> (part * W));
    const __m512 nothing = _mm512_set1_ps(kMinusInfinity);
    return (FloatV<W>)_mm512_mask_mov_ps(nothing, mask, (__m512)logits);
  }
#endif
  Int lane_bits{};
  for (int lane = 0; lane < W; ++lane) lane_bits[lane] = int32_t{1} << lane;
  const Int word_bits = Int{} + static_cast<int32_t>(word >> (part * W));
  const Int kept = (word_bits & lane_bits) == lane_bits;
  const Int nothing = (Int)broadcast<W>(kMinusInfinity);
  return (FloatV<W>)(((Int)logits & kept) | (nothing & ~kept));
}

float take_row(const float* logits, int64_t size, const uint32_t* bits, float* taken) {
  FloatV<W> top = broadcast<W>(kMinusInfinity);
  int64_t i = 0;
  for (; i + kWordBits <= size; i += kWordBits) {
    for (int part = 0; part < kWordBits / W; ++part) {
      const int64_t at = i + part * W;
      const FloatV<W> kept = allowed(load<W>(logits + at), bits[i / kWordBits], part);
      store<W>(taken + at, kept);
      top = kept > top ? kept : top;
    }
  }
  float largest = kMinusInfinity;
  for (int lane = 0; lane < W; ++lane) largest = std::max(largest, top[lane]);
  for (; i < size; ++i) {
    const bool is_allowed = bits[i / kWordBits] >> (i % kWordBits) & 1;
    taken[i] = is_allowed ? logits[i] : kMinusInfinity;
    largest = std::max(largest, taken[i]);
  }
  return largest;
}

}  // namespace
}  // namespace pagewire

// Row i of `taken` is row `rows[i]` of `logits` under row `masks[i]` of `bits`, or as it is where
// that is negative; it may be that very row. `largest[i]` is its largest logit, where it is masked.
extern "C" void pagewire_take_allowed(const float* logits, int64_t row_stride, int64_t vocab_size,
                                      const int64_t* rows, const int64_t* masks, int64_t num_rows,
                                      const uint32_t* bits, int64_t num_words, float* taken,
                                      int64_t taken_stride, float* largest, int64_t num_threads) {
  using namespace pagewire;
  const int64_t threads = num_rows * vocab_size < kParallelElements ? 1 : num_threads;
  split_evenly(num_rows, threads, [&](int64_t i) {
    const float* row = logits + rows[i] * row_stride;
    float* out = taken + i * taken_stride;
    if (masks[i] >= 0) {
      largest[i] = take_row(row, vocab_size, bits + masks[i] * num_words, out);
    } else if (out != row) {
      std::memcpy(out, row, vocab_size * sizeof(float));
    }
  });
}
