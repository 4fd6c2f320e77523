// y = x W^T + b with int8 weights, in integers: inputs are rounded to 16 bits, products and their
// sums are exact. A multiply-add of 16-bit pairs does twice the work of one in fp32, and an exact
// sum does not depend on its order: a row gives the same bits in any batch.
//
// The inputs of a token share a scale in each stretch of depth, which is as long as an int32 can
// sum. Rounding errs by at most 2^-16 of the stretch's largest input, where bfloat16 errs by 2^-9
// of each. The sums of stretches are added in fp32, in order.

#include <limits>

#include "linear_pairs.h"

namespace pagewire {
namespace {

constexpr float kLargest = 32767.0f;  // of a rounded input
constexpr float kLeast = 1e-30f;      // inputs all smaller than this count as zeros

using Int = typename Vec<W>::Int;

// Rounds inputs to multiples of the returned scale: NaN where an input is not finite, so that all
// outputs of the token are.
float round_stretch(const float* in, int64_t count, int16_t* out) {
  alignas(64) float tail[W] = {};
  const int64_t whole = count / W * W;
  std::copy(in + whole, in + count, tail);
  Int most{};  // of the magnitudes' bits: they order as magnitudes do, what is not finite on top
  for (int64_t i = 0; i <= whole; i += W) {
    const Int bits = (Int)load<W>(i < whole ? in + i : tail) & 0x7fffffff;
    most = bits > most ? bits : most;
  }
  int32_t bits = 0;
  for (int i = 0; i < W; ++i) bits = std::max<int32_t>(bits, most[i]);
  float largest;
  std::memcpy(&largest, &bits, sizeof(largest));
  const float factor = largest < kLeast ? 0.0f : kLargest / largest;
  // Behind this addition a number's nearest whole number stands in its lowest bits.
  constexpr float kToWhole = 0x1.8p23f;
  for (int64_t i = 0; i <= whole; i += W) {
    const FloatV<W> x = load<W>(i < whole ? in + i : tail) * factor + kToWhole;
    store_low_halves<W>(out + i, (Int)x);
  }
  if (bits >= 0x7f800000) return std::numeric_limits<float>::quiet_NaN();
  return largest < kLeast ? 0.0f : largest / kLargest;
}

struct Int8Pairs {
  using Weight = int8_t;
  using Input = int16_t;
  using Sum = Int;
  static constexpr bool kWhole = false;
  static constexpr int64_t kMostPairs = 256;  // 2 * 256 * 127 * 32767 < 2^31

  static float round(const float* in, int64_t count, int16_t* out) {
    return round_stretch(in, count, out);
  }
  static Int load_weights(const int8_t* p) { return load_pairs<W>(p); }
  static Int broadcast(const int16_t* p) { return broadcast_pair<W>(p); }
  static Int add(Int sum, Int a, Int b) { return add_products<W>(sum, a, b); }
};

}  // namespace

void pack_int8(const int8_t* weight, int8_t* panels, int64_t outputs, int64_t depth,
               int64_t stride, int64_t num_threads) {
  pack_pairs(weight, panels, outputs, depth, stride, num_threads);
}

void unpack_int8(const int8_t* panels, const float* scales, const int64_t* rows, float* output,
                 int64_t num_rows, int64_t depth) {
  unpack_pairs(panels, scales, rows, output, num_rows, depth);
}

void multiply_int8(const Linear& linear, int64_t num_threads) {
  multiply_pairs<Int8Pairs>(linear, num_threads);
}

}  // namespace pagewire
