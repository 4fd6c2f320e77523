// Paged attention on CPUs: decodes read keys and values in place through the block table, prefill
// chunks pack a tile of them and multiply as small matrices. Online softmax (Milakov and
// Gimelshein, arXiv:1805.02867) in fp32 whatever the element type.
//
// A query row's arithmetic depends on its own position and context only: tiles start at multiples
// of kTile from the sequence's start. So results are bit for bit the same alone, in a batch, and
// under any chunking that keeps a row a prefill row.

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "vec.h"

namespace pagewire {
namespace {

constexpr int kTile = 64;           // keys looked at together
constexpr int kRowsPerTask = 64;    // prefill: query rows (tokens x sharing heads) of one task
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

struct Layer {
  const void* query;
  const void* key_cache;
  const void* value_cache;
  void* output;
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

// Asks for what a task reads of some rows. A decode waits for memory above all, and its blocks lie
// anywhere: the hardware can't guess the next one.
template <typename T>
void prefetch(const T* const* rows, int64_t count, int64_t offset, int64_t elements) {
  for (int64_t t = 0; t < count; ++t) {
    const char* line = reinterpret_cast<const char*>(rows[t] + offset);
    for (size_t i = 0; i < elements * sizeof(T); i += 64) __builtin_prefetch(line + i, 0, 2);
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

// ---------------------------------------------------------------------------------- decodes

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
void score_tile(const float* query, const T* const* keys, int64_t offset, int64_t head_dim,
                int64_t count, float* scores) {
  int64_t t = 0;
  for (; t + 4 <= count; t += 4) {
    dot_products<T, W, HEADS, 4>(query, keys + t, offset, head_dim, scores + t);
  }
  for (; t < count; ++t) {
    dot_products<T, W, HEADS, 1>(query, keys + t, offset, head_dim, scores + t);
  }
}

// output[g] += sum over t of weights[g][t] * values[t], for NV vectors from element d on.
template <typename T, int W, int HEADS, int NV>
inline void add_columns(const float* weights, const T* const* values, int64_t offset, int64_t d,
                        int64_t head_dim, int64_t count, float* output) {
  FloatV<W> sums[HEADS][NV];
  for (int g = 0; g < HEADS; ++g) {
    for (int v = 0; v < NV; ++v) sums[g][v] = load<W>(output + g * head_dim + d + v * W);
  }
  for (int64_t t = 0; t < count; ++t) {
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
void add_values(const float* weights, const T* const* values, int64_t offset, int64_t head_dim,
                int64_t count, float* output) {
  int64_t d = 0;
  for (; d + 4 * W <= head_dim; d += 4 * W) {
    add_columns<T, W, HEADS, 4>(weights, values, offset, d, head_dim, count, output);
  }
  for (; d < head_dim; d += W) {
    add_columns<T, W, HEADS, 1>(weights, values, offset, d, head_dim, count, output);
  }
}

// Turns a row of scores into weights relative to the row's best so far; returns the factor that
// what was summed before must be multiplied by. `scores` is kTile wide, -inf from `count` on.
template <int W>
float softmax_tile(float* scores, float& best, float& total) {
  FloatV<W> top = load<W>(scores);
  for (int i = W; i < kTile; i += W) {
    const FloatV<W> x = load<W>(scores + i);
    top = x > top ? x : top;
  }
  float tile_best = top[0];
  for (int i = 1; i < W; ++i) tile_best = std::max(tile_best, top[i]);
  const float new_best = std::max(best, tile_best);
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
  const float factor = best == kMinusInfinity ? 0.0f : std::exp(best - new_best);
  total = total * factor + horizontal_sum<W>(sum);
  best = new_best;
  return factor;
}

template <int W>
void multiply_row(float* row, int64_t size, float factor) {
  for (int64_t i = 0; i < size; i += W) store<W>(row + i, load<W>(row + i) * factor);
}

template <typename Q, int W>
void load_query(const Q* query, int64_t head_dim, float scale, float* out) {
  for (int64_t d = 0; d < head_dim; d += W) store<W>(out + d, load<W>(query + d) * scale);
}

template <typename Q>
void store_output(const float* row, int64_t head_dim, float total, Q* out) {
  const float factor = 1.0f / total;
  for (int64_t d = 0; d < head_dim; ++d) store_scalar(out + d, row[d] * factor);
}

// Heads that share a kv head go by threes: 3 x 4 sums fill the registers of AVX2.
template <typename T, int W>
void score_heads(const float* query, const T* const* keys, int64_t offset, int64_t head_dim,
                 int64_t count, int64_t heads, float* scores) {
  for (; heads >= 3; heads -= 3, query += 3 * head_dim, scores += 3 * kTile) {
    score_tile<T, W, 3>(query, keys, offset, head_dim, count, scores);
  }
  if (heads == 2) score_tile<T, W, 2>(query, keys, offset, head_dim, count, scores);
  if (heads == 1) score_tile<T, W, 1>(query, keys, offset, head_dim, count, scores);
}

template <typename T, int W>
void add_heads(const float* weights, const T* const* values, int64_t offset, int64_t head_dim,
               int64_t count, int64_t heads, float* output) {
  for (; heads >= 3; heads -= 3, weights += 3 * kTile, output += 3 * head_dim) {
    add_values<T, W, 3>(weights, values, offset, head_dim, count, output);
  }
  if (heads == 2) add_values<T, W, 2>(weights, values, offset, head_dim, count, output);
  if (heads == 1) add_values<T, W, 1>(weights, values, offset, head_dim, count, output);
}

template <typename T, int W>
void decode(const Layer& layer, const Task& task) {
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
  const T* query_in =
      static_cast<const T*>(layer.query) + token * layer.query_stride + first_head * dim;
  load_query<T, W>(query_in, rows * dim, layer.scale, query);
  std::fill(sums, sums + rows * dim, 0.0f);
  std::fill(best, best + rows, kMinusInfinity);
  std::fill(total, total + rows, 0.0f);

  const int64_t context = layer.context_lengths[task.sequence];
  const int64_t task_offset = task.first_kv_head * dim, task_width = task.num_kv_heads * dim;
  const T* key_rows[kTile];
  const T* value_rows[kTile];
  for (int64_t begin = layer.first_visible(context - 1); begin < context; begin += kTile) {
    const int64_t count = std::min<int64_t>(kTile, context - begin);
    locate(layer, static_cast<const T*>(layer.key_cache), task.sequence, begin, count, key_rows);
    locate(layer, static_cast<const T*>(layer.value_cache), task.sequence, begin, count,
           value_rows);
    prefetch(key_rows, count, task_offset, task_width);
    prefetch(value_rows, count, task_offset, task_width);
    for (int64_t h = 0; h < task.num_kv_heads; ++h) {
      const int64_t offset = (task.first_kv_head + h) * dim;
      float* head_sums = sums + h * group * dim;
      score_heads<T, W>(query + h * group * dim, key_rows, offset, dim, count, group, scores);
      for (int64_t g = 0; g < group; ++g) {
        float* row = scores + g * kTile;
        std::fill(row + count, row + kTile, kMinusInfinity);
        const float factor = softmax_tile<W>(row, best[h * group + g], total[h * group + g]);
        if (factor != 1.0f) multiply_row<W>(head_sums + g * dim, dim, factor);
      }
      add_heads<T, W>(scores, value_rows, offset, dim, count, group, head_sums);
    }
  }
  T* out = static_cast<T*>(layer.output) + (token * layer.num_heads + first_head) * dim;
  for (int64_t row = 0; row < rows; ++row) {
    store_output(sums + row * dim, dim, total[row], out + row * dim);
  }
}

// ---------------------------------------------------------------------------------- prefill

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
    const T* in = static_cast<const T*>(layer.query) +
                  (task.first_token + t) * layer.query_stride + task.first_kv_head * group * dim;
    load_query<T, 8>(in, group * dim, layer.scale, query + t * group * dim);
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
    T* out = static_cast<T*>(layer.output) + (token * layer.num_heads + head) * dim;
    store_output(sums + row * dim, dim, total[row], out);
  }
}

// ---------------------------------------------------------------------------------- the batch

std::vector<Task> plan_tasks(const Layer& layer, int64_t num_sequences, int64_t num_decodes,
                             int64_t num_threads) {
  std::vector<Task> tasks;
  const auto kv_heads = static_cast<int32_t>(layer.num_kv_heads);
  const auto tokens_per_task =
      static_cast<int32_t>(std::max<int64_t>(1, kRowsPerTask / layer.group()));
  // Longest first, so that the threads end together.
  for (auto s = static_cast<int32_t>(num_sequences) - 1; s >= num_decodes; --s) {
    const int32_t begin = layer.query_starts[s], end = layer.query_starts[s + 1];
    const int32_t pieces = (end - begin + tokens_per_task - 1) / tokens_per_task;
    for (int32_t piece = pieces - 1; piece >= 0; --piece) {
      const int32_t first = begin + piece * tokens_per_task;
      for (int32_t h = 0; h < kv_heads; ++h) {
        tasks.push_back({s, first, std::min(tokens_per_task, end - first), h, 1});
      }
    }
  }
  // A decode's kv heads lie side by side in a block: one task reads them all, while that keeps
  // every thread busy.
  const bool whole = num_decodes >= 4 * num_threads;
  for (int32_t s = 0; s < num_decodes; ++s) {
    for (int32_t h = 0; h < (whole ? 1 : kv_heads); ++h) {
      tasks.push_back({s, 0, 0, h, whole ? kv_heads : 1});
    }
  }
  return tasks;
}

template <typename T, int W>
void run(const Layer& layer, const std::vector<Task>& tasks, int64_t num_threads) {
  const auto count = static_cast<int64_t>(tasks.size());
  const int threads = static_cast<int>(std::max<int64_t>(1, std::min(num_threads, count)));
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1)
  for (int64_t i = 0; i < count; ++i) {
    if (tasks[i].num_tokens) {
      prefill<T, kWidth>(layer, tasks[i]);
    } else {
      decode<T, W>(layer, tasks[i]);
    }
  }
}

template <typename T>
void dispatch_width(const Layer& layer, const std::vector<Task>& tasks, int64_t num_threads) {
  if (layer.head_dim % kWidth == 0) {
    run<T, kWidth>(layer, tasks, num_threads);
  } else {
    run<T, 8>(layer, tasks, num_threads);
  }
}

}  // namespace
}  // namespace pagewire

extern "C" {

// See pagewire_kernels/cpu.py for shapes; head_dim is a multiple of 8.
void pagewire_paged_attention(int32_t dtype, const void* query, const void* key_cache,
                              const void* value_cache, void* output, const int32_t* query_starts,
                              const int32_t* context_lengths, const int32_t* block_tables,
                              int64_t num_sequences, int64_t num_decodes, int64_t query_stride,
                              int64_t table_width, int64_t block_size, int64_t num_heads,
                              int64_t num_kv_heads, int64_t head_dim, int64_t sliding_window,
                              float scale, int64_t num_threads) {
  using namespace pagewire;
  const Layer layer{query,        key_cache,    value_cache, output,       query_starts,
                    context_lengths, block_tables, query_stride, table_width, block_size,
                    num_heads,    num_kv_heads, head_dim,    sliding_window, scale};
  const auto tasks = plan_tasks(layer, num_sequences, num_decodes, num_threads);
  switch (static_cast<DType>(dtype)) {
    case DType::kFloat:
      return dispatch_width<float>(layer, tasks, num_threads);
    case DType::kBFloat16:
      return dispatch_width<bfloat16>(layer, tasks, num_threads);
    case DType::kHalf:
      return dispatch_width<half>(layer, tasks, num_threads);
  }
}

// Copies rows of `row_bytes` bytes to their slots; strides in bytes.
void pagewire_write_kv(const char* key, const char* value, char* key_cache, char* value_cache,
                       const int64_t* slots, int64_t num_tokens, int64_t key_stride,
                       int64_t value_stride, int64_t row_bytes) {
  for (int64_t t = 0; t < num_tokens; ++t) {
    std::memcpy(key_cache + slots[t] * row_bytes, key + t * key_stride, row_bytes);
    std::memcpy(value_cache + slots[t] * row_bytes, value + t * value_stride, row_bytes);
  }
}
}
