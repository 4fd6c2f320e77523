// y = x W^T + b with int8 weights, in integers: inputs are rounded to 16 bits, products and their
// sums are exact. A multiply-add of 16-bit pairs does twice the work of one in fp32, and an exact
// sum does not depend on its order: a row gives the same bits in any batch.
//
// The inputs of a token share a scale in each stretch of depth, which is as long as an int32 can
// sum. Rounding errs by at most 2^-16 of the stretch's largest input, where bfloat16 errs by 2^-9
// of each. The sums of stretches are added in fp32, in order.

#include <limits>
#include <vector>

#include "linear.h"

namespace pagewire {
namespace {

constexpr int W = kWidth;
constexpr int kRows = kWidth == 16 ? 12 : 6;  // tokens whose sums fit the registers
constexpr int64_t kAhead = 512;               // bytes asked for before they are needed
constexpr float kLargest = 32767.0f;          // of a rounded input
constexpr int64_t kMostPairs = 256;           // of a stretch: 2 * 256 * 127 * 32767 < 2^31
constexpr float kLeast = 1e-30f;              // inputs all smaller than this count as zeros
constexpr int64_t kParallelInputs = 1 << 14;  // fewer are rounded by one thread
// Elements more than needed between rows, which would meet in the same sets of the cache if they
// lay a power of two apart; and room for whole vectors.
constexpr int64_t kSpread = 32;

using Int = typename Vec<W>::Int;

// The depth of a weight in pairs, cut into stretches: near-equal ones, since each costs something.
struct Stretches {
  int64_t depth = 0, pairs = 0, count = 0, length = 0;

  Stretches() = default;
  explicit Stretches(int64_t depth)
      : depth(depth),
        pairs((depth + 1) / 2),
        count((pairs + kMostPairs - 1) / kMostPairs),
        length((pairs + count - 1) / std::max<int64_t>(1, count)) {}
};

// Inputs of some tokens, rounded.
struct Rounded {
  Stretches cut;
  int64_t stride;               // elements between tokens
  std::vector<int16_t> values;  // [tokens][stride]
  std::vector<float> scales;    // [tokens][stretches]
};

// Rounds inputs to multiples of the returned scale: NaN where an input is not finite, so that all
// outputs of the token are. Writes whole vectors, with zeros behind the inputs.
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

void round_inputs(const Linear& l, int64_t num_threads, Rounded& rounded) {
  const Stretches cut(l.depth);
  rounded.cut = cut;
  rounded.stride = (cut.pairs + W - 1) / W * W * 2 + kSpread;
  rounded.values.resize(l.num_tokens * rounded.stride);
  rounded.scales.resize(l.num_tokens * cut.count);
  const bool small = l.num_tokens * l.depth < kParallelInputs;
#pragma omp parallel for num_threads(static_cast<int>(num_threads)) if (!small)
  for (int64_t token = 0; token < l.num_tokens; ++token) {
    const float* in = l.input + token * l.input_stride;
    int16_t* out = rounded.values.data() + token * rounded.stride;
    float* scales = rounded.scales.data() + token * cut.count;
    for (int64_t i = 0; i < cut.count; ++i) {
      const int64_t begin = 2 * i * cut.length;
      scales[i] = round_stretch(in + begin, std::min(2 * cut.length, l.depth - begin), out + begin);
    }
  }
}

// ROWS tokens by PANELS panels; few tokens go through several panels together, so that there are
// sums enough to keep the multipliers busy.
template <int ROWS, int PANELS>
void multiply(const Linear& l, const Rounded& rounded, int64_t token, int64_t panel) {
  const Stretches& cut = rounded.cut;
  const int64_t size = cut.pairs * 2 * kPanel;
  const int8_t* weights = static_cast<const int8_t*>(l.panels) + panel * size;
  const int16_t* inputs = rounded.values.data() + token * rounded.stride;
  const float* scales = rounded.scales.data() + token * cut.count;
  FloatV<W> sums[ROWS][PANELS][2] = {};
  for (int64_t stretch = 0; stretch < cut.count; ++stretch) {
    Int whole[ROWS][PANELS][2] = {};
    const int64_t first = stretch * cut.length, last = std::min(first + cut.length, cut.pairs);
    for (int64_t i = first; i < last; ++i) {
      for (int p = 0; p < PANELS; ++p) {
        const int8_t* at = weights + p * size + i * 2 * kPanel;
        // Few tokens wait for memory, and a panel is too short for the hardware to guess far ahead.
        if constexpr (PANELS > 1) __builtin_prefetch(at + kAhead);
        const Int left = load_pairs<W>(at);
        const Int right = load_pairs<W>(at + kPanel);
        for (int r = 0; r < ROWS; ++r) {
          const Int x = broadcast_pair<W>(inputs + r * rounded.stride + 2 * i);
          whole[r][p][0] = add_products<W>(whole[r][p][0], left, x);
          whole[r][p][1] = add_products<W>(whole[r][p][1], right, x);
        }
      }
    }
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
    for (int p = 0; p < PANELS; ++p) finish(l, sums[r][p], token + r, panel + p);
  }
}

template <int ROWS, int PANELS>
void multiply_panels(const Linear& l, const Rounded& rounded, int64_t token, int64_t panel,
                     int64_t last_panel) {
  for (; panel + PANELS <= last_panel; panel += PANELS) {
    multiply<ROWS, PANELS>(l, rounded, token, panel);
  }
  if constexpr (PANELS > 1) {
    multiply_panels<ROWS, PANELS / 2>(l, rounded, token, panel, last_panel);
  }
}

template <int ROWS>
void multiply_rows(const Linear& l, const Rounded& rounded, int64_t rows, int64_t token,
                   int64_t panel, int64_t last_panel) {
  if (rows == ROWS) {
    constexpr int kPanels = ROWS == 1 ? kMostPanels : ROWS <= kRows / 2 ? 2 : 1;
    multiply_panels<ROWS, kPanels>(l, rounded, token, panel, last_panel);
  } else if constexpr (ROWS > 1) {
    multiply_rows<ROWS - 1>(l, rounded, rows, token, panel, last_panel);
  }
}

int64_t panels_together(const Linear& l) { return l.num_tokens <= kRows ? kMostPanels : 1; }

void multiply_piece(const Linear& l, const Rounded& rounded, const Piece& piece) {
  const Parts<kRows> parts{piece.num_tokens};
  const int64_t step = panels_together(l);
  for (int64_t panel = piece.first_panel; panel < piece.last_panel; panel += step) {
    const int64_t last = std::min(panel + step, piece.last_panel);
    for (int64_t part = 0; part < parts.count(); ++part) {
      const int64_t first = parts.begin(part);
      multiply_rows<kRows>(l, rounded, parts.begin(part + 1) - first, first, panel, last);
    }
  }
}

}  // namespace

// panels[ceil(outputs / kPanel)][ceil(depth / 2)][kPanel][2]: pairs of depth; zero where there is
// no output or no depth.
void pack_int8(const int8_t* weight, int8_t* panels, int64_t outputs, int64_t depth,
               int64_t stride, int64_t num_threads) {
  const int64_t count = (outputs + kPanel - 1) / kPanel, padded = (depth + 1) / 2 * 2;
#pragma omp parallel for num_threads(static_cast<int>(num_threads))
  for (int64_t panel = 0; panel < count; ++panel) {
    int8_t* out = panels + panel * kPanel * padded;
    for (int64_t i = 0; i < kPanel; ++i) {
      const int64_t row = panel * kPanel + i;
      const int8_t* in = weight + row * stride;
      for (int64_t k = 0; k < padded; ++k) {
        out[(k / 2 * kPanel + i) * 2 + k % 2] = row < outputs && k < depth ? in[k] : 0;
      }
    }
  }
}

void unpack_int8(const int8_t* panels, const float* scales, const int64_t* rows, float* output,
                 int64_t num_rows, int64_t depth) {
  const int64_t size = (depth + 1) / 2 * 2 * kPanel;
  for (int64_t r = 0; r < num_rows; ++r) {
    const int8_t* in = panels + rows[r] / kPanel * size + rows[r] % kPanel * 2;
    const float scale = scales[rows[r]];
    for (int64_t k = 0; k < depth; ++k) {
      output[r * depth + k] = static_cast<float>(in[k / 2 * kPanel * 2 + k % 2]) * scale;
    }
  }
}

void multiply_int8(const Linear& linear, int64_t num_threads) {
  static thread_local Rounded rounded;
  for (int64_t first = 0; first < linear.num_tokens; first += kTokensAtOnce) {
    Linear part = linear;
    part.num_tokens = std::min(kTokensAtOnce, linear.num_tokens - first);
    part.input += first * part.input_stride;
    part.output += first * part.output_stride;
    Rounded& inputs = rounded;  // this thread's, in the others too
    round_inputs(part, num_threads, inputs);
    Pieces pieces(part, num_threads, panels_together(part));
#pragma omp parallel num_threads(pieces.threads()) if (pieces.threads() > 1)
    for (Piece piece; pieces.take(piece);) multiply_piece(part, inputs, piece);
  }
}

}  // namespace pagewire
