// What happens to a token between its matrix products: norm, rotation, gated activation.
// Rows are independent; one pass over memory each.

#include <algorithm>
#include <cmath>

#include "kernels.h"
#include "team.h"
#include "vec.h"

namespace pagewire {
namespace {

constexpr int W = kWidth;
// Below it a second thread saves less than waiting for it may cost.
constexpr int64_t kParallelElements = 1 << 17;

template <typename Row>
void for_rows(int64_t rows, int64_t size, int64_t num_threads, const Row& row) {
  split_evenly(rows, rows * size < kParallelElements ? 1 : num_threads, row);
}

void norm_row(const float* in, const float* weight, float* out, int64_t size, float eps) {
  FloatV<W> squares{};
  int64_t i = 0;
  for (; i + W <= size; i += W) {
    const FloatV<W> x = load<W>(in + i);
    squares += x * x;
  }
  float sum = horizontal_sum<W>(squares);
  for (; i < size; ++i) sum += in[i] * in[i];
  const float factor = 1.0f / std::sqrt(sum / static_cast<float>(size) + eps);
  for (i = 0; i + W <= size; i += W) store<W>(out + i, load<W>(in + i) * factor * load<W>(weight + i));
  for (; i < size; ++i) out[i] = in[i] * factor * weight[i];
}

template <int N>
FloatV<N> silu(FloatV<N> x) {
  // exp of what is never positive does not overflow.
  const FloatV<N> power = exp_negative<N>(x < 0.0f ? x : -x);
  return x * (x < 0.0f ? power : broadcast<N>(1.0f)) / (power + 1.0f);
}

}  // namespace
}  // namespace pagewire

extern "C" {

void pagewire_rms_norm(const float* input, const float* weight, float* output, int64_t rows,
                       int64_t size, int64_t input_stride, float eps, int64_t num_threads) {
  pagewire::for_rows(rows, size, num_threads, [&](int64_t r) {
    pagewire::norm_row(input + r * input_stride, weight, output + r * size, size, eps);
  });
}

// output[rows][size] = silu(input[:, :size]) * input[:, size:].
void pagewire_silu_and_mul(const float* input, float* output, int64_t rows, int64_t size,
                           int64_t input_stride, int64_t num_threads) {
  using namespace pagewire;
  for_rows(rows, 8 * size, num_threads, [&](int64_t r) {
    const float* gate = input + r * input_stride;
    const float* up = gate + size;
    float* out = output + r * size;
    int64_t i = 0;
    for (; i + W <= size; i += W) {
      store<W>(out + i, silu<W>(load<W>(gate + i)) * load<W>(up + i));
    }
    for (; i < size; ++i) out[i] = silu<8>(broadcast<8>(gate[i]))[0] * up[i];
  });
}

// Rotary positions, i paired with i + dim / 2.
// cos [tokens][dim] holds its half twice, sin [tokens][dim / 2].
void pagewire_rotate(const float* input, const float* cos, const float* sin, float* output,
                     int64_t tokens, int64_t heads, int64_t dim, int64_t input_stride,
                     int64_t output_stride, int64_t num_threads) {
  const int64_t half = dim / 2;
  pagewire::for_rows(tokens, heads * dim, num_threads, [&](int64_t t) {
    const float* c = cos + t * dim;
    const float* s = sin + t * half;
    for (int64_t h = 0; h < heads; ++h) {
      const float* in = input + t * input_stride + h * dim;
      float* out = output + t * output_stride + h * dim;
      for (int64_t i = 0; i < half; ++i) {
        const float low = in[i], high = in[i + half];
        out[i] = low * c[i] - high * s[i];
        out[i + half] = high * c[i] + low * s[i];
      }
    }
  });
}
}
