// The processor's matrix registers (Intel AMX). Each holds a tile of up to 16 rows of 64 bytes. One
// instruction multiplies a tile of inputs, a row each, by a tile of 16 outputs, and adds to a tile
// of sums. A row's sums do not depend on the other rows, nor on how many there are.
#pragma once

#if defined(__AMX_TILE__)

#include <immintrin.h>

#include <array>
#include <cstdint>

namespace pagewire {
namespace {

constexpr int kTileRows = 16;
constexpr int kTileBytes = 64;  // of a row

// To be called between what writes memory and the tiles that are loaded from there: GCC's
// intrinsics do not tell it that they read.
inline void finish_writes() { asm volatile("" : : : "memory"); }

// Of registers 0 to 3, which hold sums everywhere.
inline void clear_sums() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

// The shape of the registers, while in scope. To leave them set would make every switch of threads
// save them.
class TileRegisters {
 public:
  using Rows = std::array<uint8_t, 8>;

  ~TileRegisters() {
    if (rows_[0]) _tile_release();
  }

  // The rows of each register; their contents are lost where these change.
  void shape(const Rows& rows) {
    if (rows == rows_) return;
    rows_ = rows;
    alignas(64) Shape shape{};
    shape.palette = 1;
    for (int i = 0; i < 8; ++i) {
      shape.row_bytes[i] = kTileBytes;
      shape.rows[i] = rows[i];
    }
    // The intrinsic tells the compiler of the first bytes alone.
    asm volatile("ldtilecfg %0" : : "m"(shape) : "memory");
  }

 private:
  struct Shape {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
  };
  static_assert(sizeof(Shape) == 64);

  Rows rows_{};
};

}  // namespace
}  // namespace pagewire

#endif
