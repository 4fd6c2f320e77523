// y = x W^T + b with the weight packed once, in panels that the inner loop reads front to back.
//
// Why not BLAS: a library call packs the weight anew every time, which for the few rows of a
// decode step costs more than the product. And its order of additions depends on the number of
// rows; here each output is one chain of fused multiply-adds over k, so that a row gives the same
// bits alone, in a batch and in a prefill chunk of any length.

#include <algorithm>
#include <atomic>
#include <vector>

#include "vec.h"

namespace pagewire {
namespace {

constexpr int W = kWidth;
constexpr int kPanel = 2 * W;                   // outputs (rows of the weight) of a panel
constexpr int kRows = kWidth == 16 ? 12 : 6;    // tokens whose sums fit the registers
constexpr int64_t kTokensAtOnce = 96;           // their inputs stay in the second-level cache
constexpr int64_t kTokensToPack = 64;           // from here on it pays to reorder the inputs too
constexpr int64_t kPiecesPerThread = 6;
constexpr int64_t kParallelFlops = 1 << 20;     // below it a second thread costs more than it saves

struct Linear {
  const float* input;
  const float* panels;
  const float* bias;  // or null
  float* output;
  int64_t num_tokens, outputs, depth, input_stride, output_stride;
};

// Inputs of ROWS tokens: as they lie in memory, or reordered so that a step over k reads kRows
// neighbours. The arithmetic is the same.
template <bool PACKED>
struct Inputs {
  const float* first;
  int64_t stride;
  float at(int64_t row, int64_t k) const {
    return PACKED ? first[k * kRows + row] : first[row * stride + k];
  }
};

template <int ROWS, bool PACKED>
void multiply(const Linear& l, Inputs<PACKED> inputs, int64_t token, int64_t panel) {
  const float* weights = l.panels + panel * kPanel * l.depth;
  FloatV<W> sums[ROWS][2] = {};
  for (int64_t k = 0; k < l.depth; ++k) {
    const FloatV<W> left = load<W>(weights + k * kPanel);
    const FloatV<W> right = load<W>(weights + k * kPanel + W);
    for (int r = 0; r < ROWS; ++r) {
      const FloatV<W> x = broadcast<W>(inputs.at(r, k));
      sums[r][0] += x * left;
      sums[r][1] += x * right;
    }
  }
  const int64_t column = panel * kPanel;
  const int64_t count = std::min<int64_t>(kPanel, l.outputs - column);
  for (int r = 0; r < ROWS; ++r) {
    float* out = l.output + (token + r) * l.output_stride + column;
    if (count == kPanel) {
      if (l.bias) {
        sums[r][0] += load<W>(l.bias + column);
        sums[r][1] += load<W>(l.bias + column + W);
      }
      store<W>(out, sums[r][0]);
      store<W>(out + W, sums[r][1]);
    } else {
      for (int64_t i = 0; i < count; ++i) {
        out[i] = sums[r][i / W][i % W] + (l.bias ? l.bias[column + i] : 0.0f);
      }
    }
  }
}

template <int ROWS, bool PACKED>
void multiply_rows(const Linear& l, Inputs<PACKED> inputs, int64_t rows, int64_t token,
                   int64_t panel) {
  if (rows == ROWS) return multiply<ROWS, PACKED>(l, inputs, token, panel);
  if constexpr (ROWS > 1) multiply_rows<ROWS - 1, PACKED>(l, inputs, rows, token, panel);
}

// Tokens are worked through in near-equal parts of at most kRows.
struct Parts {
  int64_t tokens;
  int64_t count() const { return (tokens + kRows - 1) / kRows; }
  int64_t begin(int64_t part) const { return tokens * part / count(); }
};

void pack_inputs(const Linear& l, int64_t start, Parts parts, float* packed) {
  for (int64_t part = 0; part < parts.count(); ++part) {
    float* out = packed + part * l.depth * kRows;
    for (int64_t token = parts.begin(part); token < parts.begin(part + 1); ++token, ++out) {
      const float* in = l.input + (start + token) * l.input_stride;
      for (int64_t k = 0; k < l.depth; ++k) out[k * kRows] = in[k];
    }
  }
}

// Some tokens by some panels.
struct Piece {
  int64_t first_token, num_tokens, first_panel, last_panel;
};

void multiply_piece(const Linear& l, const Piece& piece, const float* packed) {
  const Parts parts{piece.num_tokens};
  for (int64_t panel = piece.first_panel; panel < piece.last_panel; ++panel) {
    for (int64_t part = 0; part < parts.count(); ++part) {
      const int64_t token = piece.first_token + parts.begin(part);
      const int64_t rows = parts.begin(part + 1) - parts.begin(part);
      if (packed) {
        const Inputs<true> inputs{packed + part * l.depth * kRows, 0};
        multiply_rows<kRows, true>(l, inputs, rows, token, panel);
      } else {
        const Inputs<false> inputs{l.input + token * l.input_stride, l.input_stride};
        multiply_rows<kRows, false>(l, inputs, rows, token, panel);
      }
    }
  }
}

// The pieces of a product, which threads take one by one: a thread that the machine holds up
// (the frontend shares the cores) does not hold up the work of the others.
class Pieces {
 public:
  Pieces(const Linear& l, int64_t panels, int64_t threads)
      : linear_(l),
        panels_(panels),
        columns_(std::min(panels, threads == 1 ? 1 : kPiecesPerThread * threads)),
        blocks_((l.num_tokens + kTokensAtOnce - 1) / kTokensAtOnce) {}

  void work() {
    static thread_local std::vector<float> packed;
    int64_t packed_block = -1;
    for (int64_t i; (i = next_.fetch_add(1)) < blocks_ * columns_;) {
      const int64_t block = i / columns_, column = i % columns_;
      const Piece piece{block * kTokensAtOnce,
                        std::min(kTokensAtOnce, linear_.num_tokens - block * kTokensAtOnce),
                        panels_ * column / columns_, panels_ * (column + 1) / columns_};
      const bool pack = piece.num_tokens >= kTokensToPack;
      if (pack && packed_block != block) {
        const Parts parts{piece.num_tokens};
        packed.resize(parts.count() * linear_.depth * kRows);
        pack_inputs(linear_, piece.first_token, parts, packed.data());
        packed_block = block;
      }
      multiply_piece(linear_, piece, pack ? packed.data() : nullptr);
    }
  }

 private:
  const Linear& linear_;
  int64_t panels_, columns_, blocks_;
  std::atomic<int64_t> next_{0};
};

int64_t num_panels(int64_t outputs) { return (outputs + kPanel - 1) / kPanel; }

}  // namespace
}  // namespace pagewire

extern "C" {

// Outputs that share a panel; a packed weight has whole panels.
int64_t pagewire_panel_size() { return pagewire::kPanel; }

// panels[ceil(outputs / kPanel)][depth][kPanel]; what is beyond `outputs` is zero.
void pagewire_pack_weight(const float* weight, float* panels, int64_t outputs, int64_t depth,
                          int64_t weight_stride, int64_t num_threads) {
  using namespace pagewire;
  const int64_t count = num_panels(outputs);
#pragma omp parallel for num_threads(static_cast<int>(num_threads))
  for (int64_t panel = 0; panel < count; ++panel) {
    float* out = panels + panel * kPanel * depth;
    for (int64_t i = 0; i < kPanel; ++i) {
      const int64_t row = panel * kPanel + i;
      const float* in = weight + row * weight_stride;
      for (int64_t k = 0; k < depth; ++k) out[k * kPanel + i] = row < outputs ? in[k] : 0.0f;
    }
  }
}

// Rows of the weight as they were before packing: an embedding that a head shares.
void pagewire_unpack_rows(const float* panels, const int64_t* rows, float* output,
                          int64_t num_rows, int64_t depth) {
  using namespace pagewire;
  for (int64_t r = 0; r < num_rows; ++r) {
    const float* in = panels + rows[r] / kPanel * kPanel * depth + rows[r] % kPanel;
    for (int64_t k = 0; k < depth; ++k) output[r * depth + k] = in[k * kPanel];
  }
}

void pagewire_linear(const float* input, const float* panels, const float* bias, float* output,
                     int64_t num_tokens, int64_t outputs, int64_t depth, int64_t input_stride,
                     int64_t output_stride, int64_t num_threads) {
  using namespace pagewire;
  const Linear linear{input,   panels, bias,         output,       num_tokens,
                      outputs, depth,  input_stride, output_stride};
  const int64_t count = num_panels(outputs);
  const bool small = 2 * num_tokens * outputs * depth < kParallelFlops;
  const int threads = static_cast<int>(small ? 1 : std::min(num_threads, count));
  Pieces pieces(linear, count, threads);
#pragma omp parallel num_threads(threads) if (threads > 1)
  pieces.work();
}
}
