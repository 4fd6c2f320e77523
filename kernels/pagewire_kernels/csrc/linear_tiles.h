// What linears by matrix registers share (linear_bfloat16_tiles.cpp, linear_int8_tiles.cpp).
#pragma once

#if defined(__AMX_TILE__)

#include "linear_groups.h"
#include "matrix_registers.h"

namespace pagewire {
namespace {

constexpr int64_t kPanelBytes = 2 * kTileBytes;  // of a row: a panel is two tiles wide

// Registers 0 and 1 to the rows of a panel from `upper` on, 2 and 3 to those from `lower` on.
template <typename T>
inline void store_sums(T (*upper)[kPanel], T (*lower)[kPanel]) {
  _tile_stored(0, upper[0], sizeof(upper[0]));
  _tile_stored(1, upper[0] + kWidth, sizeof(upper[0]));
  _tile_stored(2, lower[0], sizeof(lower[0]));
  _tile_stored(3, lower[0] + kWidth, sizeof(lower[0]));
}

// Finished sums of tokens by a panel; SCALED: the weights have scales.
template <bool SCALED>
inline void finish_rows(const Linear& l, const float (*sums)[kPanel], int64_t rows, int64_t token,
                        int64_t panel) {
  for (int64_t r = 0; r < rows; ++r) {
    const FloatV<kWidth> both[] = {load<kWidth>(sums[r]), load<kWidth>(sums[r] + kWidth)};
    finish<SCALED>(l, both, token + r, panel);
  }
}

// A thread's part of a product: its pieces, one after the other.
template <typename Inputs, typename Multiply>
void work_by_tiles(const Linear& l, const Inputs& inputs, Pieces& pieces, int thread,
                   const Multiply& multiply_piece) {
  TileRegisters registers;
  finish_writes();
  for (Piece piece; pieces.take(thread, piece);) multiply_piece(l, inputs, piece, registers);
}

}  // namespace
}  // namespace pagewire

#endif
