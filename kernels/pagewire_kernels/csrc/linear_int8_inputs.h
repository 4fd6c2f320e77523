// The inputs of linears with int8 weights: rounded to 16 bits, with a scale for each token and
// stretch of depth, which is as long as an int32 can sum the products of. Rounding errs by at most
// 2^-16 of the stretch's largest input, where bfloat16 errs by 2^-9 of each.
#pragma once

#include <algorithm>
#include <limits>

#include "vec.h"

namespace pagewire {
namespace {

constexpr int64_t kMostDepth = 512;   // of a stretch: 512 * 127 * 32767 < 2^31
constexpr float kLargest = 32767.0f;  // of a rounded input
constexpr float kLeast = 1e-30f;      // inputs all smaller than this count as zeros

// Rounds inputs to multiples of the returned scale: NaN where an input is not finite, so that all
// outputs of the token are. Calls write(i, integers) for whole vectors of them, in the lower halves
// of int32, with zeros behind the inputs.
template <typename Write>
float round_stretch(const float* in, int64_t count, const Write& write) {
  constexpr int W = kWidth;
  using Int = IntV<W>;
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
    write(i, (Int)x);
  }
  if (bits >= 0x7f800000) return std::numeric_limits<float>::quiet_NaN();
  return largest < kLeast ? 0.0f : largest / kLargest;
}

}  // namespace
}  // namespace pagewire
