// y = x W^T + b with bfloat16 weights by matrix registers: eight times the products that the vector
// registers multiply in the same time (linear_bfloat16.cpp). Inputs are rounded to bfloat16,
// products are exact, and a row's sums in fp32 are formed in one order, in any batch.

#if defined(__AMX_TILE__)

#include "linear_tiles.h"

namespace pagewire {
namespace {

constexpr int64_t kTileDepth = kTileBytes / sizeof(bfloat16);
static_assert(kTileDepth == kBFloat16Unit);
constexpr int64_t kPanelTile = kTileRows * kPanel * 2;  // elements of a panel's two tiles
constexpr int64_t kMostTokens = 2 * kTileRows;  // that go through a panel together

// Inputs of some tokens, rounded.
struct Rounded {
  int64_t stride;          // elements between tokens
  Lines<bfloat16> values;  // [tokens][stride], zero behind the depth
};

// Sums of up to two tiles of tokens by one panel, or of one by two panels.
using TileSums = float[kMostTokens][kPanel];

// Writes whole tiles, with zeros behind the inputs.
void round_row(const float* in, int64_t count, bfloat16* out) {
  alignas(64) float tail[kTileDepth] = {};
  const int64_t whole = count / kTileDepth * kTileDepth;
  std::copy(in + whole, in + count, tail);
  for (int64_t i = 0; i < rounded_up(count, kTileDepth); i += kWidth) {
    store(out + i, load<kWidth>(i < whole ? in + i : tail + (i - whole)));
  }
}

// Asks for some of the weights of the panels to come while others are computed with.
class Ahead {
 public:
  Ahead(const bfloat16* weights, int64_t lines_at_once)
      : at_(reinterpret_cast<const char*>(weights)), lines_(lines_at_once) {}

  void ask() {
    for (int64_t i = 0; i < lines_; ++i, at_ += kTileBytes) __builtin_prefetch(at_, 0, 2);
  }

 private:
  const char* at_;
  int64_t lines_;
};

// Tokens in two tiles, of which the first has `upper` rows, by a panel of `size` elements.
inline void multiply_many(const bfloat16* weights, int64_t size, const bfloat16* inputs,
                          int64_t stride, int64_t upper, Ahead ahead, TileSums& sums) {
  const bfloat16* lower = inputs + upper * stride;
  const bfloat16* end = weights + size;
  clear_sums();
  for (; weights < end; weights += kPanelTile, inputs += kTileDepth, lower += kTileDepth) {
    ahead.ask();
    _tile_loadd(4, inputs, stride * sizeof(bfloat16));
    _tile_loadd(6, weights, kPanelBytes);
    _tile_loadd(7, weights + kPanel, kPanelBytes);
    _tile_loadd(5, lower, stride * sizeof(bfloat16));
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  store_sums(sums, sums + upper);
}

// Up to 16 tokens by two panels, so that as many sums are under way at once.
inline void multiply_few(const bfloat16* weights, const bfloat16* next, int64_t size,
                         const bfloat16* inputs, int64_t stride, Ahead ahead, TileSums& sums) {
  const bfloat16* end = weights + size;
  clear_sums();
  for (; weights < end; weights += kPanelTile, next += kPanelTile, inputs += kTileDepth) {
    ahead.ask();
    _tile_loadd(4, inputs, stride * sizeof(bfloat16));
    _tile_loadd(6, weights, kPanelBytes);
    _tile_loadd(7, weights + kPanel, kPanelBytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(6, next, kPanelBytes);
    _tile_loadd(7, next + kPanel, kPanelBytes);
    _tile_dpbf16ps(2, 4, 6);
    _tile_dpbf16ps(3, 4, 7);
  }
  store_sums(sums, sums + kTileRows);
}

int64_t panels_together(const Linear& l) { return l.num_tokens > kTileRows ? 1 : 2; }

void multiply_piece(const Linear& l, const Rounded& rounded, const Piece& piece,
                    TileRegisters& registers) {
  alignas(64) TileSums sums;
  const int64_t size = rounded_up(l.depth, kTileDepth) * kPanel, last = piece.last_panel;
  const auto* weights = static_cast<const bfloat16*>(l.panels);
  const Parts<kMostTokens> parts{piece.num_tokens};
  const int64_t step = panels_together(l);
  const int64_t lines = kPanelTile * sizeof(bfloat16) / kTileBytes * step / parts.count();
  for (int64_t panel = piece.first_panel; panel < last; panel += step) {
    const bfloat16* now = weights + panel * size;
    for (int64_t part = 0; part < parts.count(); ++part) {
      const int64_t token = piece.first_token + parts.begin(part);
      const int64_t rows = parts.begin(part + 1) - parts.begin(part);
      const bfloat16* inputs = rounded.values.data() + token * rounded.stride;
      const Ahead ahead(now + step * size * (parts.count() + part) / parts.count(), lines);
      if (step == 1) {
        const auto upper = static_cast<uint8_t>((rows + 1) / 2);
        const auto lower = static_cast<uint8_t>(rows / 2);
        registers.shape({upper, upper, lower, lower, upper, lower, kTileRows, kTileRows});
        multiply_many(now, size, inputs, rounded.stride, upper, ahead, sums);
        finish_rows<false>(l, sums, rows, token, panel);
      } else {
        const int64_t next = std::min(panel + 1, last - 1);
        const auto r = static_cast<uint8_t>(rows);
        registers.shape({r, r, r, r, r, kTileRows, kTileRows, kTileRows});
        multiply_few(now, weights + next * size, size, inputs, rounded.stride, ahead, sums);
        finish_rows<false>(l, sums, rows, token, panel);
        if (next > panel) finish_rows<false>(l, sums + kTileRows, rows, token, next);
      }
    }
  }
}

}  // namespace

void multiply_bfloat16(const Linear& linear, int64_t num_threads) {
  static thread_local Rounded rounded;
  Rounded& inputs = rounded;  // this thread's, in the others too
  inputs.stride = rounded_up(linear.depth, kTileDepth) + kSpread;
  multiply_parts(
      linear, num_threads, panels_together(linear),
      [&](const Linear& part) { inputs.values.resize(part.num_tokens * inputs.stride); },
      [&](int64_t token, const float* in) {
        round_row(in, linear.depth, inputs.values.data() + token * inputs.stride);
      },
      [&](const Linear& part, Pieces& pieces, int thread) {
        work_by_tiles(part, inputs, pieces, thread, multiply_piece);
      });
}

}  // namespace pagewire

#endif
