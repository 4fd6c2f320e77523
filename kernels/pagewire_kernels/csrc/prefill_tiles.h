// Attention of a chunk of query tokens by matrix registers (Intel AMX), over keys and values in
// bfloat16. Queries and softmax weights go as two bfloat16 each, x = high + low, so that a prompt
// attends as exactly as a decode does: a sequence that is computed again goes on as before.
// Products are exact, sums, maxima and exponentials fp32. (A decode has too few rows: to bring keys
// and values into a tile's order takes as long as decode.h takes for all of it.)
#pragma once

#if defined(__AMX_TILE__)

#include <array>

#include "attention.h"
#include "matrix_registers.h"

namespace pagewire {
namespace {

constexpr int64_t kDepth = kTileBytes / sizeof(bfloat16);  // of one product of tiles
constexpr int64_t kKeyTiles = kTile / kTileRows;
constexpr int64_t kKeyTile = kTileRows * kDepth;  // elements

constexpr int64_t kRowsTogether = 2 * kTileRows;
constexpr int64_t kWeightBytes = 2 * kTile * sizeof(bfloat16);  // of a row, high and low

// A tile of keys and values of one kv head, and what its query rows make of it.
struct TileBuffers {
  bfloat16* keys;     // [head_dim / kDepth][kKeyTiles][kDepth / 2][kTileRows][2]
  bfloat16* values;   // [kTile / 2][head_dim][2]
  float* scores;      // [kRowsTogether][kTile]
  bfloat16* weights;  // [kRowsTogether][2][kTile]: high, low
};

// The nearest bfloat16, and what it leaves of x.
inline void store_split(FloatV<kWidth> x, bfloat16* high, bfloat16* low) {
  store(high, x);
  store(low, x - load<kWidth>(high));
}

// Turns 16 rows of 16 pairs into 16 rows of the other order.
inline void transpose_pairs(__m512i (&rows)[kTileRows]) {
  __m512i x[kTileRows];
  for (int i = 0; i < 16; i += 2) {
    x[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
    x[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    rows[i] = _mm512_unpacklo_epi64(x[i], x[i + 2]);
    rows[i + 1] = _mm512_unpackhi_epi64(x[i], x[i + 2]);
    rows[i + 2] = _mm512_unpacklo_epi64(x[i + 1], x[i + 3]);
    rows[i + 3] = _mm512_unpackhi_epi64(x[i + 1], x[i + 3]);
  }
  // Now a vector has column i of four rows in each quarter.
  for (int i = 0; i < 4; ++i) {
    const __m512i even = _mm512_shuffle_i32x4(rows[i], rows[i + 4], 0x88);
    const __m512i odd = _mm512_shuffle_i32x4(rows[i], rows[i + 4], 0xdd);
    const __m512i more_even = _mm512_shuffle_i32x4(rows[i + 8], rows[i + 12], 0x88);
    const __m512i more_odd = _mm512_shuffle_i32x4(rows[i + 8], rows[i + 12], 0xdd);
    x[i] = _mm512_shuffle_i32x4(even, more_even, 0x88);
    x[i + 8] = _mm512_shuffle_i32x4(even, more_even, 0xdd);
    x[i + 4] = _mm512_shuffle_i32x4(odd, more_odd, 0x88);
    x[i + 12] = _mm512_shuffle_i32x4(odd, more_odd, 0xdd);
  }
  std::copy_n(x, kTileRows, rows);
}

inline void pack_keys(const bfloat16* const* key_rows, int64_t offset, int64_t dim, int64_t count,
                      bfloat16* keys) {
  for (int64_t t = 0; t < count; t += kTileRows) {
    for (int64_t d = 0; d < dim; d += kDepth) {
      __m512i rows[kTileRows];
      for (int64_t i = 0; i < kTileRows; ++i) {
        rows[i] = t + i < count ? _mm512_loadu_si512(key_rows[t + i] + offset + d)
                                : _mm512_setzero_si512();
      }
      transpose_pairs(rows);
      bfloat16* out = keys + (d / kDepth * kKeyTiles + t / kTileRows) * kKeyTile;
      for (int64_t i = 0; i < kTileRows; ++i) _mm512_store_si512(out + i * kDepth, rows[i]);
    }
  }
}

inline void pack_values(const bfloat16* const* value_rows, int64_t offset, int64_t dim,
                        int64_t count, bfloat16* values) {
  alignas(64) static constexpr auto kOrder = [] {
    std::array<uint16_t, 64> order{};
    for (int i = 0; i < 64; ++i) order[i] = i / 2 + i % 2 * 32;  // of either row in turns
    return order;
  }();
  const __m512i first = _mm512_load_si512(kOrder.data());
  const __m512i second = _mm512_load_si512(kOrder.data() + 32);
  for (int64_t t = 0; t < count; t += 2) {
    for (int64_t d = 0; d < dim; d += kDepth) {
      const __m512i upper = _mm512_loadu_si512(value_rows[t] + offset + d);
      const __m512i lower = t + 1 < count ? _mm512_loadu_si512(value_rows[t + 1] + offset + d)
                                          : _mm512_setzero_si512();
      bfloat16* out = values + t * dim + 2 * d;
      _mm512_store_si512(out, _mm512_permutex2var_epi16(upper, first, lower));
      _mm512_store_si512(out + kDepth, _mm512_permutex2var_epi16(upper, second, lower));
    }
  }
  // Weights of zero must not meet what is no number.
  const int64_t packed = rounded_up(count, 2), needed = rounded_up(count, kDepth);
  std::fill(values + packed * dim, values + needed * dim, bfloat16{});
}

// scores = (high + low) . keys for 16 rows of queries [2][dim].
inline void score_rows(const bfloat16* query, int64_t stride, int64_t dim, const bfloat16* packed,
                       float* scores) {
  clear_sums();
  for (int64_t d = 0; d < 2 * dim; d += kDepth) {
    const bfloat16* keys = packed + d % dim * kTile;
    _tile_loadd(4, query + d, stride * sizeof(bfloat16));
    _tile_loadd(5, keys, kTileBytes);
    _tile_loadd(6, keys + kKeyTile, kTileBytes);
    _tile_loadd(7, keys + 2 * kKeyTile, kTileBytes);
    _tile_dpbf16ps(0, 4, 5);
    _tile_dpbf16ps(1, 4, 6);
    _tile_loadd(5, keys + 3 * kKeyTile, kTileBytes);
    _tile_dpbf16ps(2, 4, 7);
    _tile_dpbf16ps(3, 4, 5);
  }
  constexpr int64_t kRowBytes = kTile * sizeof(float);
  _tile_stored(0, scores, kRowBytes);
  _tile_stored(1, scores + kTileRows, kRowBytes);
  _tile_stored(2, scores + 2 * kTileRows, kRowBytes);
  _tile_stored(3, scores + 3 * kTileRows, kRowBytes);
}

// sums += (high + low) . values for 16 rows of weights [2][kTile].
inline void add_rows(const bfloat16* weights, const bfloat16* values, int64_t dim, int64_t count,
                     float* sums) {
  const auto row_bytes = static_cast<int64_t>(dim * sizeof(float));
  for (int64_t d = 0; d < dim; d += 2 * kTileRows) {
    _tile_loadd(0, sums + d, row_bytes);
    _tile_loadd(1, sums + d + kTileRows, row_bytes);
    for (int64_t t = 0; t < count; t += kDepth) {
      const bfloat16* at = values + t * dim + 2 * d;
      _tile_loadd(4, weights + t, kWeightBytes);
      _tile_loadd(7, weights + kTile + t, kWeightBytes);
      _tile_loadd(5, at, row_bytes);
      _tile_loadd(6, at + kDepth, row_bytes);
      _tile_dpbf16ps(0, 4, 5);
      _tile_dpbf16ps(1, 4, 6);
      _tile_dpbf16ps(0, 7, 5);
      _tile_dpbf16ps(1, 7, 6);
    }
    _tile_stored(0, sums + d, row_bytes);
    _tile_stored(1, sums + d + kTileRows, row_bytes);
  }
}

// Masks what a row may not see, and turns its scores into weights.
inline void weigh_row(const Layer& layer, int64_t position, int64_t begin, float* scores,
                      bfloat16* weights, float* sums, float& best, float& total) {
  const int64_t low = std::clamp<int64_t>(layer.first_visible(position) - begin, 0, kTile);
  const int64_t high = std::clamp<int64_t>(position + 1 - begin, 0, kTile);
  std::fill(scores, scores + low, kMinusInfinity);
  std::fill(scores + high, scores + kTile, kMinusInfinity);
  const float factor = softmax_tile<kWidth>(scores, best, total);
  if (factor != 1.0f) multiply_row<kWidth>(sums, layer.head_dim, factor);
  for (int64_t t = 0; t < kTile; t += kWidth) {
    store_split(load<kWidth>(scores + t), weights + t, weights + kTile + t);
  }
}

// The query rows of a task, token-major: row = token * group + head within the group. What is
// multiplied is a multiple of kTileRows of them.
struct ChunkRows {
  int64_t count, whole, first_position;
  int64_t stride;   // elements between queries
  bfloat16* query;  // [whole][2][dim], high and low
  float* sums;      // [whole][dim]
  float* best;      // [count]
  float* total;     // [count]
};

inline void split_queries(const Layer& layer, const Task& task, const ChunkRows& rows) {
  const int64_t group = layer.group(), dim = layer.head_dim;
  for (int64_t row = 0; row < rows.count; ++row) {
    const float* in = layer.query + (task.first_token + row / group) * layer.query_stride +
                      (task.first_kv_head * group + row % group) * dim;
    bfloat16* out = rows.query + row * rows.stride;
    for (int64_t d = 0; d < dim; d += kWidth) {
      store_split(load<kWidth>(in + d) * layer.scale, out + d, out + dim + d);
    }
  }
  std::fill(rows.query + rows.count * rows.stride, rows.query + rows.whole * rows.stride,
            bfloat16{});
}

// Lets the rows see keys [begin, begin + count), which are packed.
inline void attend_to_tile(const Layer& layer, const ChunkRows& rows, int64_t begin, int64_t count,
                           const TileBuffers& buffers) {
  const int64_t group = layer.group(), dim = layer.head_dim;
  // Rows of tokens before these keys see none of them.
  const int64_t first = std::max<int64_t>(0, begin - rows.first_position) * group;
  // Two tiles of rows in turns: what was just stored can't be loaded as a tile at once.
  for (int64_t row = first / kTileRows * kTileRows; row < rows.whole; row += kRowsTogether) {
    const int64_t last = std::min(row + kRowsTogether, rows.whole);
    finish_writes();
    for (int64_t r = row; r < last; r += kTileRows) {
      score_rows(rows.query + r * rows.stride, rows.stride, dim, buffers.keys,
                 buffers.scores + (r - row) * kTile);
    }
    for (int64_t r = row; r < std::min(last, rows.count); ++r) {
      weigh_row(layer, rows.first_position + r / group, begin, buffers.scores + (r - row) * kTile,
                buffers.weights + (r - row) * 2 * kTile, rows.sums + r * dim, rows.best[r],
                rows.total[r]);
    }
    finish_writes();
    for (int64_t r = row; r < last; r += kTileRows) {
      add_rows(buffers.weights + (r - row) * 2 * kTile, buffers.values, dim, count,
               rows.sums + r * dim);
    }
  }
}

inline void prefill_by_tiles(const Layer& layer, const Task& task) {
  const int64_t group = layer.group(), dim = layer.head_dim, offset = task.first_kv_head * dim;
  const int64_t context = layer.context_lengths[task.sequence];
  ChunkRows rows;
  rows.count = task.num_tokens * group;
  rows.whole = rounded_up(rows.count, kTileRows);
  rows.first_position = context - (layer.query_starts[task.sequence + 1] - task.first_token);
  rows.stride = 2 * dim + kDepth;
  scratch.reset(rows.whole * (dim + rows.stride / 2 + 2) + kTile * dim +
                kRowsTogether * kTile * 2 + 8 * 16);
  const auto take = [](int64_t count) {
    return reinterpret_cast<bfloat16*>(scratch.take(count / 2));
  };
  rows.sums = scratch.take(rows.whole * dim);
  rows.best = scratch.take(rows.whole);
  rows.total = scratch.take(rows.whole);
  rows.query = take(rows.whole * rows.stride);
  const TileBuffers buffers{take(kTile * dim), take(kTile * dim),
                            scratch.take(kRowsTogether * kTile), take(kRowsTogether * 2 * kTile)};
  split_queries(layer, task, rows);
  std::fill(rows.sums, rows.sums + rows.whole * dim, 0.0f);
  std::fill(rows.best, rows.best + rows.count, kMinusInfinity);
  std::fill(rows.total, rows.total + rows.count, 0.0f);

  const int64_t end = rows.first_position + task.num_tokens;
  const auto* keys = static_cast<const bfloat16*>(layer.key_cache);
  const auto* values = static_cast<const bfloat16*>(layer.value_cache);
  const bfloat16 *key_rows[kTile], *value_rows[kTile];
  TileRegisters registers;
  registers.shape({kTileRows, kTileRows, kTileRows, kTileRows, kTileRows, kTileRows, kTileRows,
                   kTileRows});
  for (int64_t begin = layer.first_visible(rows.first_position) / kTile * kTile; begin < end;
       begin += kTile) {
    const int64_t count = std::min<int64_t>(kTile, end - begin);
    locate(layer, keys, task.sequence, begin, count, key_rows);
    locate(layer, values, task.sequence, begin, count, value_rows);
    pack_keys(key_rows, offset, dim, count, buffers.keys);
    pack_values(value_rows, offset, dim, count, buffers.values);
    attend_to_tile(layer, rows, begin, count, buffers);
  }
  for (int64_t row = 0; row < rows.count; ++row) {
    const int64_t token = task.first_token + row / group;
    const int64_t head = task.first_kv_head * group + row % group;
    store_output(rows.sums + row * dim, dim, rows.total[row],
                 layer.output + (token * layer.num_heads + head) * dim);
  }
}

}  // namespace
}  // namespace pagewire

#endif
