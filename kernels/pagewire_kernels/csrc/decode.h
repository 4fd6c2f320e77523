// Attention of one query token a sequence: reads keys and values in place, row by row.
#pragma once

#include "attention.h"

namespace pagewire {
namespace {

// Up to kTile tokens of one sequence: where their keys and values lie, at kv head 0.
template <typename T>
struct Tile {
  const T* keys[kTile];
  const T* values[kTile];
  int64_t begin, count;
};

template <typename T>
void locate_tile(const Layer& layer, int32_t sequence, int64_t begin, Tile<T>& tile) {
  tile.begin = begin;
  tile.count = std::min<int64_t>(kTile, layer.context_lengths[sequence] - begin);
  locate(layer, static_cast<const T*>(layer.key_cache), sequence, begin, tile.count, tile.keys);
  locate(layer, static_cast<const T*>(layer.value_cache), sequence, begin, tile.count, tile.values);
}

// Asks for the tile after the one that is computed with, a few lines at a time and in the order
// they lie in. A decode waits for memory above all, and its blocks lie anywhere: the hardware
// can't guess the next one.
template <typename T>
class Prefetch {
 public:
  Prefetch(const Tile<T>& tile, int64_t offset, int64_t row_size)
      : tile_(tile), offset_(offset), row_bytes_(row_size * sizeof(T)) {}

  // As many lines as so many elements fill.
  void ask(int64_t elements) {
    for (int64_t bytes = elements * sizeof(T); bytes > 0; bytes -= kLine, left_ -= kLine) {
      if (left_ <= 0 && !next_row()) return;
      __builtin_prefetch(line_, 0, 2);
      line_ += kLine;
    }
  }

 private:
  static constexpr int64_t kLine = 64;

  bool next_row() {
    if (row_ == 2 * tile_.count) return false;
    const T* row = row_ < tile_.count ? tile_.keys[row_] : tile_.values[row_ - tile_.count];
    line_ = reinterpret_cast<const char*>(row + offset_);
    left_ = row_bytes_;
    ++row_;
    return true;
  }

  const Tile<T>& tile_;
  int64_t offset_, row_bytes_;
  int64_t row_ = 0, left_ = 0;
  const char* line_ = nullptr;
};

// scores[g][t] = query[g] . keys[t] for HEADS query heads and TOKENS keys.
template <typename T, int W, int HEADS, int TOKENS>
inline void dot_products(const float* query, const T* const* keys, int64_t offset,
                         int64_t head_dim, float* scores) {
  FloatV<W> sums[HEADS][TOKENS] = {};
  for (int64_t d = 0; d < head_dim; d += W) {
    for (int t = 0; t < TOKENS; ++t) {
      const FloatV<W> key = load<W>(keys[t] + offset + d);
      for (int g = 0; g < HEADS; ++g) sums[g][t] += key * load<W>(query + g * head_dim + d);
    }
  }
  for (int g = 0; g < HEADS; ++g) {
    if constexpr (TOKENS == 4) {
      store<4>(scores + g * kTile,
               sum_lanes(sums[g][0], sums[g][1], sums[g][2], sums[g][3]));
    } else {
      scores[g * kTile] = horizontal_sum<W>(sums[g][0]);
    }
  }
}

template <typename T, int W, int HEADS>
void score_tile(const float* query, const T* const* keys, Prefetch<T>& ahead, int64_t offset,
                int64_t head_dim, int64_t count, float* scores) {
  int64_t t = 0;
  for (; t + 4 <= count; t += 4) {
    ahead.ask(4 * head_dim);
    dot_products<T, W, HEADS, 4>(query, keys + t, offset, head_dim, scores + t);
  }
  for (; t < count; ++t) {
    ahead.ask(head_dim);
    dot_products<T, W, HEADS, 1>(query, keys + t, offset, head_dim, scores + t);
  }
}

// output[g] += sum over t of weights[g][t] * values[t], for NV vectors from element d on.
template <typename T, int W, int HEADS, int NV>
inline void add_columns(const float* weights, const T* const* values, Prefetch<T>& ahead,
                        int64_t offset, int64_t d, int64_t head_dim, int64_t count,
                        float* output) {
  FloatV<W> sums[HEADS][NV];
  for (int g = 0; g < HEADS; ++g) {
    for (int v = 0; v < NV; ++v) sums[g][v] = load<W>(output + g * head_dim + d + v * W);
  }
  for (int64_t t = 0; t < count; ++t) {
    if (t % 4 == 0) ahead.ask(4 * NV * W);
    for (int v = 0; v < NV; ++v) {
      const FloatV<W> value = load<W>(values[t] + offset + d + v * W);
      for (int g = 0; g < HEADS; ++g) sums[g][v] += value * weights[g * kTile + t];
    }
  }
  for (int g = 0; g < HEADS; ++g) {
    for (int v = 0; v < NV; ++v) store<W>(output + g * head_dim + d + v * W, sums[g][v]);
  }
}

template <typename T, int W, int HEADS>
void add_values(const float* weights, const T* const* values, Prefetch<T>& ahead, int64_t offset,
                int64_t head_dim, int64_t count, float* output) {
  int64_t d = 0;
  for (; d + 4 * W <= head_dim; d += 4 * W) {
    add_columns<T, W, HEADS, 4>(weights, values, ahead, offset, d, head_dim, count, output);
  }
  for (; d < head_dim; d += W) {
    add_columns<T, W, HEADS, 1>(weights, values, ahead, offset, d, head_dim, count, output);
  }
}

// Heads that share a kv head go by threes: 3 x 4 sums fill the registers of AVX2.
template <typename T, int W>
void score_heads(const float* query, const T* const* keys, Prefetch<T>& ahead, int64_t offset,
                 int64_t head_dim, int64_t count, int64_t heads, float* scores) {
  for (; heads >= 3; heads -= 3, query += 3 * head_dim, scores += 3 * kTile) {
    score_tile<T, W, 3>(query, keys, ahead, offset, head_dim, count, scores);
  }
  if (heads == 2) score_tile<T, W, 2>(query, keys, ahead, offset, head_dim, count, scores);
  if (heads == 1) score_tile<T, W, 1>(query, keys, ahead, offset, head_dim, count, scores);
}

template <typename T, int W>
void add_heads(const float* weights, const T* const* values, Prefetch<T>& ahead, int64_t offset,
               int64_t head_dim, int64_t count, int64_t heads, float* output) {
  for (; heads >= 3; heads -= 3, weights += 3 * kTile, output += 3 * head_dim) {
    add_values<T, W, 3>(weights, values, ahead, offset, head_dim, count, output);
  }
  if (heads == 2) add_values<T, W, 2>(weights, values, ahead, offset, head_dim, count, output);
  if (heads == 1) add_values<T, W, 1>(weights, values, ahead, offset, head_dim, count, output);
}

// `following` is what the thread is likely to do next, or null.
template <typename T, int W>
void decode(const Layer& layer, const Task& task, const Task* following) {
  const int64_t group = layer.group(), dim = layer.head_dim;
  const int64_t rows = task.num_kv_heads * group;
  scratch.reset(rows * (2 * dim + 3) + group * kTile + 64);
  float* query = scratch.take(rows * dim);
  float* sums = scratch.take(rows * dim);
  float* best = scratch.take(rows);
  float* total = scratch.take(rows);
  float* scores = scratch.take(group * kTile);

  const int64_t token = layer.query_starts[task.sequence];
  const int64_t first_head = task.first_kv_head * group;
  const float* query_in = layer.query + token * layer.query_stride + first_head * dim;
  load_query<W>(query_in, rows * dim, layer.scale, query);
  std::fill(sums, sums + rows * dim, 0.0f);
  std::fill(best, best + rows, kMinusInfinity);
  std::fill(total, total + rows, 0.0f);

  const int64_t context = layer.context_lengths[task.sequence];
  Tile<T> tiles[2];
  Tile<T>*tile = tiles, *next = tiles + 1;
  locate_tile(layer, task.sequence, layer.first_visible(context - 1), *tile);
  for (bool last = false; !last; std::swap(tile, next)) {
    const int64_t count = tile->count, end = tile->begin + count;
    last = end == context;
    int64_t next_head = task.first_kv_head;
    if (!last) {
      locate_tile(layer, task.sequence, end, *next);
    } else if (following && !following->num_tokens) {
      const int64_t length = layer.context_lengths[following->sequence];
      locate_tile(layer, following->sequence, layer.first_visible(length - 1), *next);
      next_head = following->first_kv_head;
    } else {
      next->count = 0;
    }
    Prefetch<T> ahead(*next, next_head * dim, task.num_kv_heads * dim);
    for (int64_t h = 0; h < task.num_kv_heads; ++h) {
      const int64_t offset = (task.first_kv_head + h) * dim;
      float* head_sums = sums + h * group * dim;
      score_heads<T, W>(query + h * group * dim, tile->keys, ahead, offset, dim, count, group,
                        scores);
      for (int64_t g = 0; g < group; ++g) {
        float* row = scores + g * kTile;
        std::fill(row + count, row + kTile, kMinusInfinity);
        const float factor = softmax_tile<W>(row, best[h * group + g], total[h * group + g]);
        if (factor != 1.0f) multiply_row<W>(head_sums + g * dim, dim, factor);
      }
      add_heads<T, W>(scores, tile->values, ahead, offset, dim, count, group, head_sums);
    }
  }
  float* out = layer.output + (token * layer.num_heads + first_head) * dim;
  for (int64_t row = 0; row < rows; ++row) {
    store_output(sums + row * dim, dim, total[row], out + row * dim);
  }
}

}  // namespace
}  // namespace pagewire
