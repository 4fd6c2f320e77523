// y = x W^T + b with bfloat16 weights, where the processor multiplies pairs of bfloat16 (AVX-512
// BF16): twice the products of a multiply-add in fp32. Inputs are rounded to bfloat16, products are
// exact, and each sum is one chain in fp32: a row gives the same bits in any batch.

#if defined(__AVX512BF16__) && !defined(__AMX_TILE__)

#include "linear_pairs.h"

namespace pagewire {
namespace {

struct BFloat16Pairs {
  using Weight = bfloat16;
  using Input = bfloat16;
  using Sum = FloatV<W>;
  static constexpr bool kWhole = true;
  static constexpr int64_t kMostPairs = int64_t{1} << 40;

  static float round(const float* in, int64_t count, bfloat16* out) {
    alignas(64) float tail[W] = {};
    const int64_t whole = count / W * W;
    std::copy(in + whole, in + count, tail);
    for (int64_t i = 0; i <= whole; i += W) {
      const FloatV<W> x = load<W>(i < whole ? in + i : tail);
      store(out + i, x);
    }
    return 1.0f;
  }
  static __m512bh load_weights(const bfloat16* p) {
    return (__m512bh)_mm512_loadu_si512(p);
  }
  static __m512bh broadcast(const bfloat16* p) {
    int32_t pair;
    std::memcpy(&pair, p, sizeof(pair));
    return (__m512bh)_mm512_set1_epi32(pair);
  }
  static FloatV<W> add(FloatV<W> sum, __m512bh a, __m512bh b) {
    return (FloatV<W>)_mm512_dpbf16_ps((__m512)sum, a, b);
  }
};

}  // namespace

void multiply_bfloat16(const Linear& linear, int64_t num_threads) {
  multiply_pairs<BFloat16Pairs>(linear, num_threads);
}

}  // namespace pagewire

#endif
