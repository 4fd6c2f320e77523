// What linears of every kind of weight share: the layout of their panels, how a product is cut into
// pieces for threads, and what becomes of a finished sum.
#pragma once

#include <algorithm>
#include <atomic>

#include "vec.h"

namespace pagewire {

constexpr int kPanel = 2 * kWidth;     // outputs (rows of the weight) of a panel
constexpr int kMostPanels = 4;         // read side by side for few tokens
constexpr int64_t kTokensAtOnce = 96;  // their inputs stay in the second-level cache

struct Linear {
  const float* input;
  const void* panels;
  const float* scales;  // an output each, to the end of the last panel; or null
  const float* bias;    // or null
  float* output;
  int64_t num_tokens, outputs, depth, input_stride, output_stride;
  bool accumulate;  // adds to what the output holds

  int64_t num_panels() const { return (outputs + kPanel - 1) / kPanel; }
};

// One token's finished outputs of one panel; SCALED: the weights have scales.
template <bool SCALED>
inline void finish(const Linear& l, const FloatV<kWidth>* sums, int64_t token, int64_t panel) {
  const int64_t column = panel * kPanel;
  const int64_t count = std::min<int64_t>(kPanel, l.outputs - column);
  float* out = l.output + token * l.output_stride + column;
  const float* bias = l.bias ? l.bias + column : nullptr;
  alignas(64) float bias_tail[kPanel], out_tail[kPanel];
  float* to = out;
  if (count < kPanel) {
    if (bias) {
      std::copy_n(bias, count, bias_tail);
      bias = bias_tail;
    }
    if (l.accumulate) std::copy_n(out, count, out_tail);
    to = out_tail;
  }
  for (int v = 0; v < 2; ++v) {
    const int at = v * kWidth;
    FloatV<kWidth> sum = sums[v];
    if constexpr (SCALED) {
      // One multiply-add, with the same rounding wherever this is inlined.
      const FloatV<kWidth> add = bias ? load<kWidth>(bias + at) : FloatV<kWidth>{};
      sum = sum * load<kWidth>(l.scales + column + at) + add;
    } else if (bias) {
      sum = sum + load<kWidth>(bias + at);
    }
    if (l.accumulate) sum = load<kWidth>(to + at) + sum;
    store<kWidth>(to + at, sum);
  }
  if (to == out_tail) std::copy_n(out_tail, count, out);
}

// Tokens are worked through in near-equal parts of at most ROWS.
template <int ROWS>
struct Parts {
  int64_t tokens;
  int64_t count() const { return (tokens + ROWS - 1) / ROWS; }
  int64_t begin(int64_t part) const { return tokens * part / count(); }
};

// Some tokens by some panels.
struct Piece {
  int64_t first_token, num_tokens, first_panel, last_panel;
};

// The pieces of a product. Each thread has a stretch of panels, which it works through in their
// order, so that memory can be asked for ahead; then it helps the others: a thread that the
// machine holds up (the frontend shares the cores) does not hold up the work of all.
class Pieces {
 public:
  // Panels are given out by `panels_together` or more.
  Pieces(const Linear& l, int64_t num_threads, int64_t panels_together)
      : tokens_(l.num_tokens),
        panels_(l.num_panels()),
        together_(panels_together),
        groups_((panels_ + together_ - 1) / together_),
        threads_(2 * l.num_tokens * l.outputs * l.depth < kParallelFlops
                     ? 1
                     : std::min(num_threads, panels_)),
        lanes_(std::min(threads_, kMostLanes)),
        columns_(std::min(groups_, threads_ == 1 ? 1 : kPiecesPerThread * threads_)),
        blocks_((l.num_tokens + kTokensAtOnce - 1) / kTokensAtOnce) {}

  int threads() const { return static_cast<int>(threads_); }

  // The next one for this thread; false where none is left.
  bool take(int thread, Piece& piece) {
    for (int64_t i = 0; i < lanes_; ++i) {
      if (take_of((thread + i) % lanes_, piece)) return true;
    }
    return false;
  }

 private:
  // Many: at the end one thread waits for the other's last piece.
  static constexpr int64_t kPiecesPerThread = 64;
  // Below it a second thread costs more than it saves.
  static constexpr int64_t kParallelFlops = 1 << 19;
  // More threads share these.
  static constexpr int64_t kMostLanes = 64;

  struct alignas(64) Lane {
    std::atomic<int64_t> next{0};
  };

  bool take_of(int64_t lane, Piece& piece) {
    const int64_t begin = columns_ * lane / lanes_;
    const int64_t columns = columns_ * (lane + 1) / lanes_ - begin;
    // An empty lane is left alone: its counter belongs to another thread's cache.
    if (next_[lane].next.load(std::memory_order_relaxed) >= blocks_ * columns) return false;
    const int64_t i = next_[lane].next.fetch_add(1, std::memory_order_relaxed);
    if (i >= blocks_ * columns) return false;
    const int64_t first_token = i / columns * kTokensAtOnce, column = begin + i % columns;
    piece = {first_token, std::min(kTokensAtOnce, tokens_ - first_token), first_panel(column),
             first_panel(column + 1)};
    return true;
  }

  int64_t first_panel(int64_t column) const {
    return std::min(panels_, together_ * (groups_ * column / columns_));
  }

  int64_t tokens_, panels_, together_, groups_, threads_, lanes_, columns_, blocks_;
  Lane next_[kMostLanes];
};

// Packed panels of some kinds of weights are a multiple of so much deep: of pairs that an
// instruction multiplies and adds, or of the tiles of a matrix register.
#if defined(__AMX_TILE__)
constexpr int64_t kInt8Unit = 64, kBFloat16Unit = 32;
#elif defined(__AVX512BF16__)
constexpr int64_t kInt8Unit = 2, kBFloat16Unit = 2;
#else
constexpr int64_t kInt8Unit = 2, kBFloat16Unit = 1;
#endif
constexpr bool kMultipliesBFloat16 = kBFloat16Unit > 1;

// Packing by groups (linear_packing.cpp).
void pack_int8(const int8_t* weight, int8_t* panels, int64_t outputs, int64_t depth,
               int64_t stride, int64_t num_threads);
void unpack_int8(const int8_t* panels, const float* scales, const int64_t* rows, float* output,
                 int64_t num_rows, int64_t depth);
void pack_bfloat16(const bfloat16* weight, bfloat16* panels, int64_t outputs, int64_t depth,
                   int64_t stride, int64_t num_threads);
void unpack_bfloat16(const bfloat16* panels, const int64_t* rows, float* output, int64_t num_rows,
                     int64_t depth);

// The kernels of int8 weights (linear_int8_tiles.cpp, linear_int8.cpp), and of bfloat16 ones where
// the processor multiplies them (linear_bfloat16_tiles.cpp, linear_bfloat16.cpp).
void multiply_int8(const Linear& linear, int64_t num_threads);
void multiply_bfloat16(const Linear& linear, int64_t num_threads);

}  // namespace pagewire
