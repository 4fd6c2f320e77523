// y = x W^T + b with int8 weights, in integers: inputs are rounded to 16 bits, products and their
// sums are exact. A multiply-add of 16-bit pairs does twice the work of one in fp32, and an exact
// sum does not depend on its order: a row gives the same bits in any batch.
//
// Depth is cut into stretches (linear_int8_inputs.h), whose sums are added in fp32, in order.

#if !defined(__AMX_TILE__)

#include "linear_int8_inputs.h"
#include "linear_pairs.h"

namespace pagewire {
namespace {

using Int = IntV<W>;

struct Int8Pairs {
  using Weight = int8_t;
  using Input = int16_t;
  using Sum = Int;
  static constexpr bool kWhole = false;
  static constexpr int64_t kMostPairs = kMostDepth / 2;

  static float round(const float* in, int64_t count, int16_t* out) {
    return round_stretch(in, count, [&](int64_t i, Int x) { store_low_halves<W>(out + i, x); });
  }
  static Int load_weights(const int8_t* p) { return load_pairs<W>(p); }
  static Int broadcast(const int16_t* p) { return broadcast_pair<W>(p); }
  static Int add(Int sum, Int a, Int b) { return add_products<W>(sum, a, b); }
};

}  // namespace

void multiply_int8(const Linear& linear, int64_t num_threads) {
  multiply_pairs<Int8Pairs>(linear, num_threads);
}

}  // namespace pagewire

#endif
