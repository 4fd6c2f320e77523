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

#include "linear_groups.h"

namespace pagewire {
namespace {

constexpr int W = kWidth;
constexpr int kRows = kWidth == 16 ? 12 : 6;  // tokens whose sums fit the registers
constexpr int64_t kAhead = 512;               // bytes asked for before they are needed

// Inputs of some tokens, rounded.
template <typename Kind>
struct Rounded {
  Stretches cut;
  int64_t stride;                      // elements between tokens
  Lines<typename Kind::Input> values;  // [tokens][stride]
  std::vector<float> scales;           // [tokens][stretches]
};

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
  const int64_t size = cut.units * 2 * kPanel, stride = rounded.stride;
  const auto* weights = static_cast<const typename Kind::Weight*>(l.panels) + panel * size;
  const auto* inputs = rounded.values.data() + token * stride;
  if constexpr (Kind::kWhole) {
    // The registers hold all sums there are.
    Sums<Kind, ROWS, PANELS> sums = {};
    add_pairs<Kind, ROWS, PANELS>(weights, size, inputs, stride, 0, cut.units, sums);
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
                                    std::min(first + cut.length, cut.units), whole);
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

template <typename Kind>
void multiply_pairs(const Linear& linear, int64_t num_threads) {
  static thread_local Rounded<Kind> rounded;
  Rounded<Kind>& inputs = rounded;  // this thread's, in the others too
  const Stretches cut(linear.depth, 2, Kind::kMostPairs);
  inputs.cut = cut;
  inputs.stride = rounded_up(cut.units, W) * 2 + kSpread;
  multiply_parts(
      linear, num_threads, panels_together(linear),
      [&](const Linear& part) {
        inputs.values.resize(part.num_tokens * inputs.stride);
        inputs.scales.resize(part.num_tokens * cut.count);
      },
      [&](int64_t token, const float* in) {
        auto* out = inputs.values.data() + token * inputs.stride;
        for (int64_t i = 0; i < cut.count; ++i) {
          const int64_t begin = 2 * i * cut.length;
          inputs.scales[token * cut.count + i] =
              Kind::round(in + begin, std::min(2 * cut.length, cut.depth - begin), out + begin);
        }
      },
      [&](const Linear& part, Pieces& pieces, int thread) {
        for (Piece piece; pieces.take(thread, piece);) multiply_piece(part, inputs, piece);
      });
}

}  // namespace
}  // namespace pagewire
