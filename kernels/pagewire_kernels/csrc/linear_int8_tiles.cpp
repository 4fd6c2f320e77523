// y = x W^T + b with int8 weights by matrix registers, in integers. Inputs of 16 bits go as two
// planes of bytes, x = 256 * upper + lower, whose products with the weights are summed apart: with
// as many products as bfloat16 takes, and exactly. The sums of stretches (linear_int8_inputs.h) are
// added in fp32, in order.

#if defined(__AMX_TILE__)

#include "linear_int8_inputs.h"
#include "linear_tiles.h"

namespace pagewire {
namespace {

constexpr int64_t kTileDepth = kTileBytes;
static_assert(kTileDepth == kInt8Unit);
constexpr int64_t kPanelTile = kTileRows * kPanelBytes;

// Inputs of some tokens, rounded.
struct Rounded {
  Stretches cut;
  int64_t stride;               // bytes between tokens
  Lines<uint8_t> upper, lower;  // [tokens][stride], zero behind the depth
  std::vector<float> scales;    // [tokens][stretches]
};

using TileSums = int32_t[kTileRows][kPanel];

void round_row(const float* in, int64_t token, Rounded& rounded) {
  const Stretches& cut = rounded.cut;
  for (int64_t i = 0; i < cut.count; ++i) {
    const int64_t begin = i * cut.length * kTileDepth;
    const int64_t count = std::min(cut.length * kTileDepth, cut.depth - begin);
    const int64_t at = token * rounded.stride + begin;
    const auto write = [&](int64_t k, IntV<kWidth> x) {
      const __m128i lower = _mm512_cvtepi32_epi8((__m512i)x);
      const __m128i upper = _mm512_cvtepi32_epi8((__m512i)(x >> 8));
      std::memcpy(rounded.lower.data() + at + k, &lower, sizeof(lower));
      std::memcpy(rounded.upper.data() + at + k, &upper, sizeof(upper));
    };
    rounded.scales[token * cut.count + i] = round_stretch(in + begin, count, write);
    for (int64_t k = count / kWidth * kWidth + kWidth; k < rounded_up(count, kTileDepth);
         k += kWidth) {
      write(k, IntV<kWidth>{});
    }
  }
}

// Sums of one stretch: up to 16 tokens by a panel.
inline void multiply_stretch(const int8_t* weights, int64_t num_tiles, const uint8_t* upper,
                             const uint8_t* lower, int64_t stride, TileSums& upper_sums,
                             TileSums& lower_sums) {
  clear_sums();
  for (int64_t i = 0; i < num_tiles; ++i, weights += kPanelTile) {
    _tile_loadd(4, upper + i * kTileDepth, stride);
    _tile_loadd(6, weights, kPanelBytes);
    _tile_loadd(7, weights + kTileBytes, kPanelBytes);
    _tile_loadd(5, lower + i * kTileDepth, stride);
    _tile_dpbssd(0, 4, 6);
    _tile_dpbssd(1, 4, 7);
    _tile_dpbusd(2, 5, 6);
    _tile_dpbusd(3, 5, 7);
  }
  store_sums(upper_sums, lower_sums);
}

// Up to 16 tokens by a panel.
void multiply(const Linear& l, const Rounded& rounded, int64_t token, int64_t rows,
              int64_t panel) {
  using Int = IntV<kWidth>;
  const Stretches& cut = rounded.cut;
  const auto* weights =
      static_cast<const int8_t*>(l.panels) + panel * cut.units * kTileDepth * kPanel;
  const float* scales = rounded.scales.data() + token * cut.count;
  alignas(64) TileSums upper, lower;
  alignas(64) float sums[kTileRows][kPanel] = {};
  for (int64_t stretch = 0; stretch < cut.count; ++stretch) {
    const int64_t first = stretch * cut.length;
    const int64_t at = token * rounded.stride + first * kTileDepth;
    multiply_stretch(weights + first * kPanelTile, std::min(cut.length, cut.units - first),
                     rounded.upper.data() + at, rounded.lower.data() + at, rounded.stride, upper,
                     lower);
    for (int64_t r = 0; r < rows; ++r) {
      const FloatV<kWidth> scale = broadcast<kWidth>(scales[r * cut.count + stretch]);
      for (int64_t i = 0; i < kPanel; i += kWidth) {
        Int high, low;
        std::memcpy(&high, upper[r] + i, sizeof(high));
        std::memcpy(&low, lower[r] + i, sizeof(low));
        const auto whole = __builtin_convertvector(high * 256 + low, FloatV<kWidth>);
        store<kWidth>(sums[r] + i, load<kWidth>(sums[r] + i) + whole * scale);
      }
    }
  }
  finish_rows<true>(l, sums, rows, token, panel);
}

void multiply_piece(const Linear& l, const Rounded& rounded, const Piece& piece,
                    TileRegisters& registers) {
  const Parts<kTileRows> parts{piece.num_tokens};
  for (int64_t panel = piece.first_panel; panel < piece.last_panel; ++panel) {
    for (int64_t part = 0; part < parts.count(); ++part) {
      const int64_t first = parts.begin(part), rows = parts.begin(part + 1) - first;
      const auto r = static_cast<uint8_t>(rows);
      registers.shape({r, r, r, r, r, r, kTileRows, kTileRows});
      multiply(l, rounded, piece.first_token + first, rows, panel);
    }
  }
}

}  // namespace

void multiply_int8(const Linear& linear, int64_t num_threads) {
  static thread_local Rounded rounded;
  Rounded& inputs = rounded;  // this thread's, in the others too
  inputs.cut = Stretches(linear.depth, kTileDepth, kMostDepth / kTileDepth);
  inputs.stride = inputs.cut.units * kTileDepth + 2 * kSpread;
  multiply_parts(
      linear, num_threads, 1,
      [&](const Linear& part) {
        inputs.upper.resize(part.num_tokens * inputs.stride);
        inputs.lower.resize(part.num_tokens * inputs.stride);
        inputs.scales.resize(part.num_tokens * inputs.cut.count);
      },
      [&](int64_t token, const float* in) { round_row(in, token, inputs); },
      [&](const Linear& part, Pieces& pieces, int thread) {
        work_by_tiles(part, inputs, pieces, thread, multiply_piece);
      });
}

}  // namespace pagewire

#endif
