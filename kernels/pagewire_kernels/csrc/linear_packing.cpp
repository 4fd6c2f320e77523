// Weights in the order in which instructions read them that multiply groups of neighbours along the
// depth: pairs, or what fills 32 bits of a matrix register's row.

#include "linear.h"
#include "team.h"

namespace pagewire {
namespace {

constexpr int kInt8Group = kInt8Unit > 2 ? 4 : 2, kBFloat16Group = 2;

// panels[ceil(outputs / kPanel)][ceil(depth / UNIT) * UNIT / GROUP][kPanel][GROUP]; zero where
// there is no output or no depth.
template <int GROUP, int64_t UNIT, typename T>
void pack_groups(const T* weight, T* panels, int64_t outputs, int64_t depth, int64_t stride,
                 int64_t num_threads) {
  const int64_t count = (outputs + kPanel - 1) / kPanel, padded = rounded_up(depth, UNIT);
  split_evenly(count, num_threads, [&](int64_t panel) {
    T* out = panels + panel * kPanel * padded;
    for (int64_t i = 0; i < kPanel; ++i) {
      const int64_t row = panel * kPanel + i;
      const T* in = weight + row * stride;
      for (int64_t k = 0; k < padded; ++k) {
        out[(k / GROUP * kPanel + i) * GROUP + k % GROUP] =
            row < outputs && k < depth ? in[k] : T{};
      }
    }
  });
}

// `scales` has one for each output, or is null.
template <int GROUP, int64_t UNIT, typename T>
void unpack_groups(const T* panels, const float* scales, const int64_t* rows, float* output,
                   int64_t num_rows, int64_t depth) {
  const int64_t size = rounded_up(depth, UNIT) * kPanel;
  for (int64_t r = 0; r < num_rows; ++r) {
    const T* in = panels + rows[r] / kPanel * size + rows[r] % kPanel * GROUP;
    const float scale = scales ? scales[rows[r]] : 1.0f;
    for (int64_t k = 0; k < depth; ++k) {
      output[r * depth + k] = to_float(in[k / GROUP * kPanel * GROUP + k % GROUP]) * scale;
    }
  }
}

}  // namespace

void pack_int8(const int8_t* weight, int8_t* panels, int64_t outputs, int64_t depth,
               int64_t stride, int64_t num_threads) {
  pack_groups<kInt8Group, kInt8Unit>(weight, panels, outputs, depth, stride, num_threads);
}

void unpack_int8(const int8_t* panels, const float* scales, const int64_t* rows, float* output,
                 int64_t num_rows, int64_t depth) {
  unpack_groups<kInt8Group, kInt8Unit>(panels, scales, rows, output, num_rows, depth);
}

void pack_bfloat16(const bfloat16* weight, bfloat16* panels, int64_t outputs, int64_t depth,
                   int64_t stride, int64_t num_threads) {
  pack_groups<kBFloat16Group, kBFloat16Unit>(weight, panels, outputs, depth, stride, num_threads);
}

void unpack_bfloat16(const bfloat16* panels, const int64_t* rows, float* output, int64_t num_rows,
                     int64_t depth) {
  unpack_groups<kBFloat16Group, kBFloat16Unit>(panels, nullptr, rows, output, num_rows, depth);
}

}  // namespace pagewire
