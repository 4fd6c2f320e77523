// What decodes and prefill chunks share: a layer's description, addresses through the block table,
// online softmax (Milakov and Gimelshein, arXiv:1805.02867).
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "vec.h"

namespace pagewire {
namespace {

constexpr int kTile = 64;  // keys looked at together
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

struct Layer {
  const float* query;
  const void* key_cache;
  const void* value_cache;
  float* output;
  const int32_t* query_starts;
  const int32_t* context_lengths;
  const int32_t* block_tables;
  int64_t query_stride;  // elements between tokens
  int64_t table_width;
  int64_t block_size;
  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t head_dim;
  int64_t sliding_window;  // 0: none
  float scale;

  int64_t group() const { return num_heads / num_kv_heads; }
  int64_t token_stride() const { return num_kv_heads * head_dim; }
  int64_t first_visible(int64_t position) const {
    return sliding_window ? std::max<int64_t>(0, position - sliding_window + 1) : 0;
  }
};

struct Task {
  int32_t sequence;
  int32_t first_token;  // prefill: rows of the batch; unused by decodes
  int32_t num_tokens;   // 0: a decode
  int32_t first_kv_head;
  int32_t num_kv_heads;
};

// Addresses of the rows of up to kTile tokens of one sequence, at kv head 0.
template <typename T>
void locate(const Layer& layer, const T* cache, int64_t sequence, int64_t begin, int64_t count,
            const T** rows) {
  const int32_t* table = layer.block_tables + sequence * layer.table_width;
  int64_t block = begin / layer.block_size;
  int64_t offset = begin % layer.block_size;
  for (int64_t i = 0; i < count;) {
    const T* row = cache + (table[block] * layer.block_size + offset) * layer.token_stride();
    const int64_t run = std::min(count - i, layer.block_size - offset);
    for (int64_t end = i + run; i < end; ++i, row += layer.token_stride()) rows[i] = row;
    ++block;
    offset = 0;
  }
}

// Scratch memory of one thread, kept between calls.
class Scratch {
 public:
  float* take(size_t floats) {
    const size_t start = used_;
    used_ += (floats + 15) / 16 * 16;
    return base_ + start;
  }
  void reset(size_t floats) {
    if (memory_.size() < floats + 16) memory_.resize(floats + 16);
    const auto address = reinterpret_cast<uintptr_t>(memory_.data());
    base_ = memory_.data() + (64 - address % 64) % 64 / 4;
    used_ = 0;
  }

 private:
  std::vector<float> memory_;
  float* base_ = nullptr;
  size_t used_ = 0;
};

thread_local Scratch scratch;

// Turns a row of scores into weights relative to the row's best so far; returns the factor that
// what was summed before must be multiplied by. `scores` is kTile wide, -inf from `count` on.
template <int W>
float softmax_tile(float* scores, float& best, float& total) {
  FloatV<W> top = load<W>(scores);
  for (int i = W; i < kTile; i += W) top = larger(load<W>(scores + i), top);
  const float new_best = std::max(best, horizontal_max(top));
  if (new_best == kMinusInfinity) {  // nothing of this tile is visible to the row
    std::fill(scores, scores + kTile, 0.0f);
    return 1.0f;
  }
  FloatV<W> sum{};
  for (int i = 0; i < kTile; i += W) {
    const FloatV<W> weight = exp_negative<W>(load<W>(scores + i) - new_best);
    store<W>(scores + i, weight);
    sum += weight;
  }
  const float factor =
      best == new_best ? 1.0f : exp_negative<8>(broadcast<8>(best - new_best))[0];
  total = total * factor + horizontal_sum<W>(sum);
  best = new_best;
  return factor;
}

template <int W>
void multiply_row(float* row, int64_t size, float factor) {
  for (int64_t i = 0; i < size; i += W) store<W>(row + i, load<W>(row + i) * factor);
}

template <int W>
void load_query(const float* query, int64_t head_dim, float scale, float* out) {
  for (int64_t d = 0; d < head_dim; d += W) store<W>(out + d, load<W>(query + d) * scale);
}

inline void store_output(const float* row, int64_t head_dim, float total, float* out) {
  const float factor = 1.0f / total;
  for (int64_t d = 0; d < head_dim; ++d) out[d] = row[d] * factor;
}

}  // namespace
}  // namespace pagewire
