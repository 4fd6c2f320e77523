// y = x W^T + b by instructions that multiply pairs of 16-bit numbers and add both products to a
// sum of 32 bits: for int8 weights (linear_int8.cpp) and for bfloat16 ones (linear_bfloat16.cpp).
// Inputs are rounded to 16 bits first.
//
// A `Kind` says what the pairs are:
//   Weight, Input      element types; two inputs fill 32 bits
//   Sum                a vector of W sums
//   kWhole             whether one sum may take any depth, and needs no scale
//   kMostPairs         of depth that one sum may take; sums of such stretches are added in fp32
//   round(in, n, out)  rounds a stretch of inputs; returns what their sums must be multiplied by.
//                      Writes whole vectors, with zeros behind the inputs
//   load_weights(p)    W pairs
//   broadcast(p)       the same pair W times
//   add(sum, a, b)     sum + a[0] * b[0] + a[1] * b[1]
#pragma once

#include <vector>

#include "linear.h"
#include "team.h"

namespace pagewire {
namespace {

constexpr int W = kWidth;
constexpr int kRows = kWidth == 16 ? 12 : 6;  // tokens whose sums fit the registers
constexpr int64_t kAhead = 512;               // bytes asked for before they are needed
constexpr int64_t kParallelInputs = 1 << 14;  // fewer are rounded by one thread
// Elements more than needed between rows, which would meet in the same sets of the cache if they
// lay a power of two apart; and room for whole vectors.
constexpr int64_t kSpread = 32;

// The depth of a weight in pairs, cut into stretches: near-equal ones, since each costs something.
struct Stretches {
  int64_t depth = 0, pairs = 0, count = 0, length = 0;

  Stretches() = default;
  Stretches(int64_t depth, int64_t most_pairs)
      : depth(depth),
        pairs((depth + 1) / 2),
        count((pairs + most_pairs - 1) / most_pairs),
        length((pairs + count - 1) / std::max<int64_t>(1, count)) {}
};

// Inputs of some tokens, rounded.
template <typename Kind>
struct Rounded {
  Stretches cut;
  int64_t stride;                            // elements between tokens
  std::vector<typename Kind::Input> values;  // [tokens][stride]
  std::vector<float> scales;                 // [tokens][stretches]
};

template <typename Kind>
void round_inputs(const Linear& l, int64_t num_threads, Rounded<Kind>& rounded) {
  const Stretches cut(l.depth, Kind::kMostPairs);
  rounded.cut = cut;
  rounded.stride = (cut.pairs + W - 1) / W * W * 2 + kSpread;
  rounded.values.resize(l.num_tokens * rounded.stride);
  rounded.scales.resize(l.num_tokens * cut.count);
  const bool small = l.num_tokens * l.depth < kParallelInputs;
  split_evenly(l.num_tokens, small ? 1 : num_threads, [&](int64_t token) {
    const float* in = l.input + token * l.input_stride;
    auto* out = rounded.values.data() + token * rounded.stride;
    float* scales = rounded.scales.data() + token * cut.count;
    for (int64_t i = 0; i < cut.count; ++i) {
      const int64_t begin = 2 * i * cut.length;
      scales[i] = Kind::round(in + begin, std::min(2 * cut.length, l.depth - begin), out + begin);
    }
  });
}

template <typename Kind, int ROWS, int PANELS>
using Sums = typename Kind::Sum[ROWS][PANELS][2];

// Adds the products of pairs [first, last) of ROWS tokens and PANELS panels, which lie `size`
// elements apart; few tokens go through several panels together, so that there are sums enough to
// keep the multipliers busy.
template <typename Kind, int ROWS, int PANELS>
inline void add_pairs(const typename Kind::Weight* weights, int64_t size,
                      const typename Kind::Input* inputs, int64_t stride, int64_t first,
                      int64_t last, Sums<Kind, ROWS, PANELS>& sums) {
  for (int64_t i = first; i < last; ++i) {
    for (int p = 0; p < PANELS; ++p) {
      const typename Kind::Weight* at = weights + p * size + i * 2 * kPanel;
      // Few tokens wait for memory, and a panel is too short for the hardware to guess far ahead.
      if constexpr (PANELS > 1) __builtin_prefetch(at + kAhead / sizeof(*at));
      const auto left = Kind::load_weights(at);
      const auto right = Kind::load_weights(at + kPanel);
      for (int r = 0; r < ROWS; ++r) {
        const auto x = Kind::broadcast(inputs + r * stride + 2 * i);
        sums[r][p][0] = Kind::add(sums[r][p][0], left, x);
        sums[r][p][1] = Kind::add(sums[r][p][1], right, x);
      }
    }
  }
}

// ROWS tokens by PANELS panels.
template <typename Kind, int ROWS, int PANELS>
void multiply(const Linear& l, const Rounded<Kind>& rounded, int64_t token, int64_t panel) {
  const Stretches& cut = rounded.cut;
  const int64_t size = cut.pairs * 2 * kPanel, stride = rounded.stride;
  const auto* weights = static_cast<const typename Kind::Weight*>(l.panels) + panel * size;
  const auto* inputs = rounded.values.data() + token * stride;
  if constexpr (Kind::kWhole) {
    // The registers hold all sums there are.
    Sums<Kind, ROWS, PANELS> sums = {};
    add_pairs<Kind, ROWS, PANELS>(weights, size, inputs, stride, 0, cut.pairs, sums);
    for (int r = 0; r < ROWS; ++r) {
      for (int p = 0; p < PANELS; ++p) finish<false>(l, sums[r][p], token + r, panel + p);
    }
  } else {
    const float* scales = rounded.scales.data() + token * cut.count;
    FloatV<W> sums[ROWS][PANELS][2] = {};
    for (int64_t stretch = 0; stretch < cut.count; ++stretch) {
      Sums<Kind, ROWS, PANELS> whole = {};
      const int64_t first = stretch * cut.length;
      add_pairs<Kind, ROWS, PANELS>(weights, size, inputs, stride, first,
                                    std::min(first + cut.length, cut.pairs), whole);
      for (int r = 0; r < ROWS; ++r) {
        const FloatV<W> scale = broadcast<W>(scales[r * cut.count + stretch]);
        for (int p = 0; p < PANELS; ++p) {
          for (int v = 0; v < 2; ++v) {
            sums[r][p][v] += __builtin_convertvector(whole[r][p][v], FloatV<W>) * scale;
          }
        }
      }
    }
    for (int r = 0; r < ROWS; ++r) {
      for (int p = 0; p < PANELS; ++p) finish<true>(l, sums[r][p], token + r, panel + p);
    }
  }
}

template <typename Kind, int ROWS, int PANELS>
void multiply_panels(const Linear& l, const Rounded<Kind>& rounded, int64_t token, int64_t panel,
                     int64_t last_panel) {
  for (; panel + PANELS <= last_panel; panel += PANELS) {
    multiply<Kind, ROWS, PANELS>(l, rounded, token, panel);
  }
  if constexpr (PANELS > 1) {
    multiply_panels<Kind, ROWS, PANELS / 2>(l, rounded, token, panel, last_panel);
  }
}

template <typename Kind, int ROWS>
void multiply_rows(const Linear& l, const Rounded<Kind>& rounded, int64_t rows, int64_t token,
                   int64_t panel, int64_t last_panel) {
  if (rows == ROWS) {
    constexpr int kPanels = ROWS == 1 ? kMostPanels : ROWS <= kRows / 2 ? 2 : 1;
    multiply_panels<Kind, ROWS, kPanels>(l, rounded, token, panel, last_panel);
  } else if constexpr (ROWS > 1) {
    multiply_rows<Kind, ROWS - 1>(l, rounded, rows, token, panel, last_panel);
  }
}

int64_t panels_together(const Linear& l) { return l.num_tokens <= kRows ? kMostPanels : 1; }

template <typename Kind>
void multiply_piece(const Linear& l, const Rounded<Kind>& rounded, const Piece& piece) {
  const Parts<kRows> parts{piece.num_tokens};
  const int64_t step = panels_together(l);
  for (int64_t panel = piece.first_panel; panel < piece.last_panel; panel += step) {
    const int64_t last = std::min(panel + step, piece.last_panel);
    for (int64_t part = 0; part < parts.count(); ++part) {
      const int64_t first = parts.begin(part);
      multiply_rows<Kind, kRows>(l, rounded, parts.begin(part + 1) - first, first, panel, last);
    }
  }
}

// panels[ceil(outputs / kPanel)][ceil(depth / 2)][kPanel][2]: pairs of depth; zero where there is
// no output or no depth.
template <typename T>
void pack_pairs(const T* weight, T* panels, int64_t outputs, int64_t depth, int64_t stride,
                int64_t num_threads) {
  const int64_t count = (outputs + kPanel - 1) / kPanel, padded = (depth + 1) / 2 * 2;
  split_evenly(count, num_threads, [&](int64_t panel) {
    T* out = panels + panel * kPanel * padded;
    for (int64_t i = 0; i < kPanel; ++i) {
      const int64_t row = panel * kPanel + i;
      const T* in = weight + row * stride;
      for (int64_t k = 0; k < padded; ++k) {
        out[(k / 2 * kPanel + i) * 2 + k % 2] = row < outputs && k < depth ? in[k] : T{};
      }
    }
  });
}

// `scales` has one for each output, or is null.
template <typename T>
void unpack_pairs(const T* panels, const float* scales, const int64_t* rows, float* output,
                  int64_t num_rows, int64_t depth) {
  const int64_t size = (depth + 1) / 2 * 2 * kPanel;
  for (int64_t r = 0; r < num_rows; ++r) {
    const T* in = panels + rows[r] / kPanel * size + rows[r] % kPanel * 2;
    const float scale = scales ? scales[rows[r]] : 1.0f;
    for (int64_t k = 0; k < depth; ++k) {
      output[r * depth + k] = to_float(in[k / 2 * kPanel * 2 + k % 2]) * scale;
    }
  }
}

template <typename Kind>
void multiply_pairs(const Linear& linear, int64_t num_threads) {
  static thread_local Rounded<Kind> rounded;
  for (int64_t first = 0; first < linear.num_tokens; first += kTokensAtOnce) {
    Linear part = linear;
    part.num_tokens = std::min(kTokensAtOnce, linear.num_tokens - first);
    part.input += first * part.input_stride;
    part.output += first * part.output_stride;
    Rounded<Kind>& inputs = rounded;  // this thread's, in the others too
    round_inputs(part, num_threads, inputs);
    Pieces pieces(part, num_threads, panels_together(part));
    Team::instance().run(pieces.threads(), [&](int) {
      for (Piece piece; pieces.take(piece);) multiply_piece(part, inputs, piece);
    });
  }
}

}  // namespace
}  // namespace pagewire
