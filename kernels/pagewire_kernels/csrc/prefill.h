// Attention of a chunk of query tokens: packs a tile of keys and values, then multiplies small
// matrices.
#pragma once

#include "attention.h"

namespace pagewire {
namespace {

// out[ROWS][NV * W] (+)= left[ROWS][depth] . right[depth][NV * W]
template <int W, int NV, int ROWS, bool ADD>
inline void multiply_block(const float* left, int64_t left_stride, const float* right,
                           int64_t right_stride, int64_t depth, float* out, int64_t out_stride) {
  FloatV<W> sums[ROWS][NV];
  for (int r = 0; r < ROWS; ++r) {
    for (int v = 0; v < NV; ++v) {
      sums[r][v] = ADD ? load<W>(out + r * out_stride + v * W) : FloatV<W>{};
    }
  }
  for (int64_t k = 0; k < depth; ++k) {
    FloatV<W> columns[NV];
    for (int v = 0; v < NV; ++v) columns[v] = load<W>(right + k * right_stride + v * W);
    for (int r = 0; r < ROWS; ++r) {
      for (int v = 0; v < NV; ++v) sums[r][v] += columns[v] * left[r * left_stride + k];
    }
  }
  for (int r = 0; r < ROWS; ++r) {
    for (int v = 0; v < NV; ++v) store<W>(out + r * out_stride + v * W, sums[r][v]);
  }
}

template <int W, int NV, bool ADD>
void multiply_columns(const float* left, int64_t left_stride, const float* right,
                      int64_t right_stride, int64_t rows, int64_t depth, float* out,
                      int64_t out_stride) {
  int64_t r = 0;
  for (; r + 6 <= rows; r += 6) {
    multiply_block<W, NV, 6, ADD>(left + r * left_stride, left_stride, right, right_stride, depth,
                                  out + r * out_stride, out_stride);
  }
  for (; r + 2 <= rows; r += 2) {
    multiply_block<W, NV, 2, ADD>(left + r * left_stride, left_stride, right, right_stride, depth,
                                  out + r * out_stride, out_stride);
  }
  if (r < rows) {
    multiply_block<W, NV, 1, ADD>(left + r * left_stride, left_stride, right, right_stride, depth,
                                  out + r * out_stride, out_stride);
  }
}

// out[rows][columns] (+)= left[rows][depth] . right[depth][columns]; columns a multiple of 8.
template <bool ADD>
void multiply(const float* left, int64_t left_stride, const float* right, int64_t right_stride,
              int64_t rows, int64_t columns, int64_t depth, float* out, int64_t out_stride) {
  int64_t c = 0;
  for (; c + 2 * kWidth <= columns; c += 2 * kWidth) {
    multiply_columns<kWidth, 2, ADD>(left, left_stride, right + c, right_stride, rows, depth,
                                     out + c, out_stride);
  }
  for (; c + kWidth <= columns; c += kWidth) {
    multiply_columns<kWidth, 1, ADD>(left, left_stride, right + c, right_stride, rows, depth,
                                     out + c, out_stride);
  }
  for (; c < columns; c += 8) {
    multiply_columns<8, 1, ADD>(left, left_stride, right + c, right_stride, rows, depth, out + c,
                                out_stride);
  }
}

// keys: [head_dim][kTile] (transposed), values: [kTile][head_dim], zero beyond `count`.
template <typename T>
void pack_tile(const T* const* key_rows, const T* const* value_rows, int64_t offset, int64_t dim,
               int64_t count, float* keys, float* values) {
  for (int64_t t = 0; t < count; ++t) {
    const T* key = key_rows[t] + offset;
    for (int64_t d = 0; d < dim; ++d) keys[d * kTile + t] = to_float(key[d]);
    const T* value = value_rows[t] + offset;
    for (int64_t d = 0; d < dim; d += 8) store<8>(values + t * dim + d, load<8>(value + d));
  }
  for (int64_t d = 0; count < kTile && d < dim; ++d) {
    std::fill(keys + d * kTile + count, keys + (d + 1) * kTile, 0.0f);
  }
  std::fill(values + count * dim, values + kTile * dim, 0.0f);
}

template <typename T, int W>
void prefill(const Layer& layer, const Task& task) {
  const int64_t group = layer.group(), dim = layer.head_dim;
  const int64_t rows = task.num_tokens * group;
  scratch.reset(rows * (2 * dim + kTile + 2) + 2 * kTile * dim + 128);
  float* query = scratch.take(rows * dim);
  float* sums = scratch.take(rows * dim);
  float* scores = scratch.take(rows * kTile);
  float* best = scratch.take(rows);
  float* total = scratch.take(rows);
  float* keys = scratch.take(kTile * dim);
  float* values = scratch.take(kTile * dim);

  // Rows are token-major: row = token * group + head within the group.
  const int64_t offset = task.first_kv_head * dim;
  for (int64_t t = 0; t < task.num_tokens; ++t) {
    const float* in = layer.query + (task.first_token + t) * layer.query_stride +
                      task.first_kv_head * group * dim;
    load_query<8>(in, group * dim, layer.scale, query + t * group * dim);
  }
  std::fill(sums, sums + rows * dim, 0.0f);
  std::fill(best, best + rows, kMinusInfinity);
  std::fill(total, total + rows, 0.0f);

  const int64_t sequence_end = layer.query_starts[task.sequence + 1];
  const int64_t context = layer.context_lengths[task.sequence];
  const int64_t first_position = context - (sequence_end - task.first_token);
  const int64_t end = first_position + task.num_tokens;
  const int64_t start = layer.first_visible(first_position) / kTile * kTile;
  const T* key_rows[kTile];
  const T* value_rows[kTile];
  for (int64_t begin = start; begin < end; begin += kTile) {
    const int64_t count = std::min<int64_t>(kTile, end - begin);
    locate(layer, static_cast<const T*>(layer.key_cache), task.sequence, begin, count, key_rows);
    locate(layer, static_cast<const T*>(layer.value_cache), task.sequence, begin, count,
           value_rows);
    pack_tile(key_rows, value_rows, offset, dim, count, keys, values);
    multiply<false>(query, dim, keys, kTile, rows, kTile, dim, scores, kTile);
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t position = first_position + row / group;
      const int64_t low = std::max<int64_t>(0, layer.first_visible(position) - begin);
      const int64_t high = std::min<int64_t>(kTile, position + 1 - begin);
      float* row_scores = scores + row * kTile;
      std::fill(row_scores, row_scores + std::min<int64_t>(low, kTile), kMinusInfinity);
      std::fill(row_scores + std::max<int64_t>(high, 0), row_scores + kTile, kMinusInfinity);
      const float factor = softmax_tile<W>(row_scores, best[row], total[row]);
      if (factor != 1.0f) multiply_row<8>(sums + row * dim, dim, factor);
    }
    multiply<true>(scores, kTile, values, dim, rows, dim, kTile, sums, dim);
  }
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t token = task.first_token + row / group;
    const int64_t head = task.first_kv_head * group + row % group;
    float* out = layer.output + (token * layer.num_heads + head) * dim;
    store_output(sums + row * dim, dim, total[row], out);
  }
}

}  // namespace
}  // namespace pagewire
