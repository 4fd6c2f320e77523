// y = x W^T + b with the weight packed once, in panels that the inner loop reads front to back.
//
// Why not BLAS: a library call packs the weight anew every time, which for the few rows of a
// decode step costs more than the product. And its order of additions depends on the number of
// rows; here each output is one chain of fused multiply-adds over k, so that a row gives the same
// bits alone, in a batch and in a prefill chunk of any length.
//
// Weights are fp32, bfloat16 or float16 (int8: linear_int8.cpp; bfloat16 too, where the processor
// multiplies it: linear_bfloat16.cpp; either by matrix registers: linear_*_tiles.cpp); inputs, sums
// and outputs are fp32. Every weight widens to fp32 exactly. So it is a question of speed alone
// where that happens: few tokens wait for memory, and widen in the registers what they read once;
// many tokens find each panel widened in the first-level cache.

#include "linear.h"

#include <type_traits>
#include <vector>

#include "errors.h"
#include "kernels.h"
#include "team.h"

namespace pagewire {
namespace {

constexpr int W = kWidth;
constexpr int kRows = kWidth == 16 ? 12 : 6;  // tokens whose sums fit the registers
constexpr int64_t kTokensToPack = 64;  // from here on it pays to reorder the inputs too
constexpr int64_t kPartsToWiden = 3;   // from here on it pays to widen a panel first
constexpr int64_t kAhead = 512;        // bytes asked for before they are needed

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

// ROWS tokens by PANELS panels. A multiply-add takes some cycles, and the next of its chain waits
// for it: few tokens go through several panels together, so that there are chains enough.
template <typename T, int ROWS, int PANELS, bool PACKED>
void multiply(const Linear& l, const T* weights, Inputs<PACKED> inputs, int64_t token,
              int64_t panel) {
  const int64_t size = l.depth * kPanel;
  FloatV<W> sums[ROWS][PANELS][2] = {};
  for (int64_t k = 0; k < l.depth; ++k) {
    if constexpr (ROWS == 1 && sizeof(T) < sizeof(float)) {
      // One token waits for memory, and a panel is too short for the hardware to guess far ahead.
      for (int p = 0; p < PANELS; ++p) {
        __builtin_prefetch(reinterpret_cast<const char*>(weights + p * size + k * kPanel) + kAhead);
      }
    }
    for (int p = 0; p < PANELS; ++p) {
      const FloatV<W> left = load<W>(weights + p * size + k * kPanel);
      const FloatV<W> right = load<W>(weights + p * size + k * kPanel + W);
      for (int r = 0; r < ROWS; ++r) {
        const FloatV<W> x = broadcast<W>(inputs.at(r, k));
        sums[r][p][0] += x * left;
        sums[r][p][1] += x * right;
      }
    }
  }
  for (int r = 0; r < ROWS; ++r) {
    for (int p = 0; p < PANELS; ++p) finish<false>(l, sums[r][p], token + r, panel + p);
  }
}

template <typename T, int ROWS, int PANELS, bool PACKED>
void multiply_panels(const Linear& l, const T* weights, Inputs<PACKED> inputs, int64_t token,
                     int64_t panel, int64_t last_panel) {
  for (; panel + PANELS <= last_panel; panel += PANELS, weights += PANELS * l.depth * kPanel) {
    multiply<T, ROWS, PANELS, PACKED>(l, weights, inputs, token, panel);
  }
  if constexpr (PANELS > 1) {
    multiply_panels<T, ROWS, PANELS / 2, PACKED>(l, weights, inputs, token, panel, last_panel);
  }
}

template <typename T, int ROWS, bool PACKED>
void multiply_rows(const Linear& l, const T* weights, Inputs<PACKED> inputs, int64_t rows,
                   int64_t token, int64_t panel, int64_t last_panel) {
  if (rows == ROWS) {
    constexpr int kPanels = ROWS == 1 ? kMostPanels : ROWS <= 3 ? 2 : 1;
    multiply_panels<T, ROWS, kPanels, PACKED>(l, weights, inputs, token, panel, last_panel);
  } else if constexpr (ROWS > 1) {
    multiply_rows<T, ROWS - 1, PACKED>(l, weights, inputs, rows, token, panel, last_panel);
  }
}

void pack_inputs(const Linear& l, int64_t start, Parts<kRows> parts, float* packed) {
  for (int64_t part = 0; part < parts.count(); ++part) {
    float* out = packed + part * l.depth * kRows;
    for (int64_t token = parts.begin(part); token < parts.begin(part + 1); ++token, ++out) {
      const float* in = l.input + (start + token) * l.input_stride;
      for (int64_t k = 0; k < l.depth; ++k) out[k * kRows] = in[k];
    }
  }
}

// All tokens of the piece by panels [panel, last_panel), whose weights are given.
template <typename T>
void multiply_tokens(const Linear& l, const Piece& piece, const float* packed, const T* weights,
                     int64_t panel, int64_t last_panel) {
  const Parts<kRows> parts{piece.num_tokens};
  for (int64_t part = 0; part < parts.count(); ++part) {
    const int64_t token = piece.first_token + parts.begin(part);
    const int64_t rows = parts.begin(part + 1) - parts.begin(part);
    if constexpr (std::is_same_v<T, float>) {
      if (packed) {
        const Inputs<true> inputs{packed + part * l.depth * kRows, 0};
        multiply_rows<T, kRows, true>(l, weights, inputs, rows, token, panel, last_panel);
        continue;
      }
    }
    const Inputs<false> inputs{l.input + token * l.input_stride, l.input_stride};
    multiply_rows<T, kRows, false>(l, weights, inputs, rows, token, panel, last_panel);
  }
}

template <typename T>
void multiply_piece(const Linear& l, const Piece& piece, const float* packed,
                    std::vector<float>& wide) {
  const int64_t size = l.depth * kPanel;
  const int64_t parts = Parts<kRows>{piece.num_tokens}.count();
  const T* weights = static_cast<const T*>(l.panels);
  const bool widen = !std::is_same_v<T, float> && parts >= kPartsToWiden;
  const int64_t step = parts == 1 ? kMostPanels : 1;
  for (int64_t panel = piece.first_panel; panel < piece.last_panel; panel += step) {
    const T* from = weights + panel * size;
    const int64_t last = std::min(panel + step, piece.last_panel);
    if (widen) {
      wide.resize(size);
      for (int64_t i = 0; i < size; i += W) store<W>(wide.data() + i, load<W>(from + i));
      multiply_tokens<float>(l, piece, packed, wide.data(), panel, last);
    } else {
      multiply_tokens<T>(l, piece, packed, from, panel, last);
    }
  }
}

template <typename T>
void work(const Linear& l, Pieces& pieces, int thread) {
  static thread_local std::vector<float> packed, wide;
  int64_t packed_token = -1;
  for (Piece piece; pieces.take(thread, piece);) {
    const bool pack = piece.num_tokens >= kTokensToPack;
    if (pack && packed_token != piece.first_token) {
      const Parts<kRows> parts{piece.num_tokens};
      packed.resize(parts.count() * l.depth * kRows);
      pack_inputs(l, piece.first_token, parts, packed.data());
      packed_token = piece.first_token;
    }
    multiply_piece<T>(l, piece, pack ? packed.data() : nullptr, wide);
  }
}

template <typename T>
void run(const Linear& linear, int64_t num_threads) {
  Pieces pieces(linear, num_threads, kMostPanels);
  OutOfMemory failure;
  Team::instance().run(pieces.threads(),
                       [&](int thread) {
    failure.watch([&] { work<T>(linear, pieces, thread); });
  });
  failure.rethrow();
}

// panels[ceil(outputs / kPanel)][depth][kPanel]; what is beyond `outputs` is zero.
template <typename T>
void pack(const T* weight, T* panels, int64_t outputs, int64_t depth, int64_t stride,
          int64_t num_threads) {
  const int64_t count = (outputs + kPanel - 1) / kPanel;
  split_evenly(count, num_threads, [&](int64_t panel) {
    T* out = panels + panel * kPanel * depth;
    for (int64_t i = 0; i < kPanel; ++i) {
      const int64_t row = panel * kPanel + i;
      const T* in = weight + row * stride;
      for (int64_t k = 0; k < depth; ++k) out[k * kPanel + i] = row < outputs ? in[k] : T{};
    }
  });
}

template <typename T>
void unpack(const T* panels, const int64_t* rows, float* output, int64_t num_rows, int64_t depth) {
  for (int64_t r = 0; r < num_rows; ++r) {
    const T* in = panels + rows[r] / kPanel * kPanel * depth + rows[r] % kPanel;
    for (int64_t k = 0; k < depth; ++k) output[r * depth + k] = to_float(in[k * kPanel]);
  }
}

// Calls `function` with a null pointer of the element type.
template <typename Function>
void with_type(DType dtype, Function function) {
  switch (dtype) {
    case DType::kFloat:
      return function(static_cast<float*>(nullptr));
    case DType::kBFloat16:
      return function(static_cast<bfloat16*>(nullptr));
    case DType::kHalf:
      return function(static_cast<half*>(nullptr));
    case DType::kInt8:
      return;  // has kernels of its own
  }
}

}  // namespace
}  // namespace pagewire

extern "C" {

// Outputs that share a panel; a packed weight has whole panels.
int64_t pagewire_panel_size() { return pagewire::kPanel; }

// The depth of packed panels.
int64_t pagewire_packed_depth(int32_t dtype, int64_t depth) {
  using namespace pagewire;
  const auto kind = static_cast<DType>(dtype);
  const int64_t unit = kind == DType::kInt8       ? kInt8Unit
                       : kind == DType::kBFloat16 ? kBFloat16Unit
                                                  : 1;
  return rounded_up(depth, unit);
}

void pagewire_pack_weight(int32_t dtype, const void* weight, void* panels, int64_t outputs,
                          int64_t depth, int64_t weight_stride, int64_t num_threads) {
  using namespace pagewire;
  const auto kind = static_cast<DType>(dtype);
  if (kind == DType::kInt8) {
    return pack_int8(static_cast<const int8_t*>(weight), static_cast<int8_t*>(panels), outputs,
                     depth, weight_stride, num_threads);
  }
  if constexpr (kMultipliesBFloat16) {
    if (kind == DType::kBFloat16) {
      return pack_bfloat16(static_cast<const bfloat16*>(weight), static_cast<bfloat16*>(panels),
                           outputs, depth, weight_stride, num_threads);
    }
  }
  with_type(kind, [&]<typename T>(T*) {
    pack(static_cast<const T*>(weight), static_cast<T*>(panels), outputs, depth, weight_stride,
         num_threads);
  });
}

// Rows of the weight as they were before packing, in fp32: an embedding that a head shares.
void pagewire_unpack_rows(int32_t dtype, const void* panels, const float* scales,
                          const int64_t* rows, float* output, int64_t num_rows, int64_t depth) {
  using namespace pagewire;
  const auto kind = static_cast<DType>(dtype);
  if (kind == DType::kInt8) {
    return unpack_int8(static_cast<const int8_t*>(panels), scales, rows, output, num_rows, depth);
  }
  if constexpr (kMultipliesBFloat16) {
    if (kind == DType::kBFloat16) {
      return unpack_bfloat16(static_cast<const bfloat16*>(panels), rows, output, num_rows, depth);
    }
  }
  with_type(kind, [&]<typename T>(T*) {
    unpack(static_cast<const T*>(panels), rows, output, num_rows, depth);
  });
}

int32_t pagewire_linear(int32_t dtype, const float* input, const void* panels, const float* scales,
                        const float* bias, float* output, int64_t num_tokens, int64_t outputs,
                        int64_t depth, int64_t input_stride, int64_t output_stride,
                        int32_t accumulate, int64_t num_threads) {
  using namespace pagewire;
  const Linear linear{input,        panels,        scales,         bias,
                      output,       num_tokens,    outputs,        depth,
                      input_stride, output_stride, accumulate != 0};
  const auto kind = static_cast<DType>(dtype);
  return status_of([&] {
    if (kind == DType::kInt8) return multiply_int8(linear, num_threads);
    if constexpr (kMultipliesBFloat16) {
      if (kind == DType::kBFloat16) return multiply_bfloat16(linear, num_threads);
    }
    with_type(kind, [&]<typename T>(T*) { run<T>(linear, num_threads); });
  });
}
}
