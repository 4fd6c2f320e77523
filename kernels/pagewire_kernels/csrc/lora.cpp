// LoRA on CPU: rows of one adapter are taken together, so that its weights are read once for them.
// Each sum runs in one order, whichever rows are taken together: a row's result has the same bits
// alone and in any batch.

#include "lora.h"

#include <algorithm>

#include "errors.h"
#include "team.h"
#include "vec.h"

namespace pagewire {
namespace {

constexpr int W = kWidth;
constexpr int kRowsAtOnce = 4;
// As many accumulators as registers hold beside what is loaded.
constexpr int kRanksAtOnce = kWidth == 16 ? 4 : 2;
// Few enough that several threads share the rows of one adapter.
constexpr int32_t kBlockRows = 16;

// out[m][k] = x[m] . down[k], for M rows and K ranks.
template <typename T, int M, int K>
void dot_products(const float* const* x, const T* down, int64_t inputs, float* const* out) {
  FloatV<W> sums[M][K] = {};
  int64_t i = 0;
  for (; i + W <= inputs; i += W) {
    FloatV<W> weights[K];
    for (int k = 0; k < K; ++k) weights[k] = load<W>(down + k * inputs + i);
    for (int m = 0; m < M; ++m) {
      const FloatV<W> value = load<W>(x[m] + i);
      for (int k = 0; k < K; ++k) sums[m][k] += value * weights[k];
    }
  }
  for (int m = 0; m < M; ++m) {
    for (int k = 0; k < K; ++k) {
      float sum = horizontal_sum<W>(sums[m][k]);
      for (int64_t rest = i; rest < inputs; ++rest) {
        sum += x[m][rest] * to_float(down[k * inputs + rest]);
      }
      out[m][k] = sum;
    }
  }
}

template <typename T, int M>
void shrink_rows(const float* const* x, const T* down, int64_t inputs, int64_t rank,
                 float* const* shrunk) {
  float* out[M];
  int64_t k = 0;
  for (; k + kRanksAtOnce <= rank; k += kRanksAtOnce) {
    for (int m = 0; m < M; ++m) out[m] = shrunk[m] + k;
    dot_products<T, M, kRanksAtOnce>(x, down + k * inputs, inputs, out);
  }
  for (; k < rank; ++k) {
    for (int m = 0; m < M; ++m) out[m] = shrunk[m] + k;
    dot_products<T, M, 1>(x, down + k * inputs, inputs, out);
  }
}

// out[m][o] += sum over k of shrunk[m][k] * up[k][o], for M rows and N vectors of outputs.
template <typename T, int M, int N>
void expand_columns(const float* const* shrunk, const T* up, int64_t rank, int64_t size, int64_t at,
                    float* const* out) {
  FloatV<W> sums[M][N] = {};
  for (int64_t k = 0; k < rank; ++k) {
    FloatV<W> weights[N];
    for (int n = 0; n < N; ++n) weights[n] = load<W>(up + k * size + at + n * W);
    for (int m = 0; m < M; ++m) {
      const FloatV<W> factor = broadcast<W>(shrunk[m][k]);
      for (int n = 0; n < N; ++n) sums[m][n] += factor * weights[n];
    }
  }
  for (int m = 0; m < M; ++m) {
    for (int n = 0; n < N; ++n) {
      float* place = out[m] + at + n * W;
      store<W>(place, load<W>(place) + sums[m][n]);
    }
  }
}

template <typename T, int M>
void expand_rows(const float* const* shrunk, const T* up, int64_t rank, int64_t size,
                 float* const* out) {
  int64_t at = 0;
  for (; at + 2 * W <= size; at += 2 * W) expand_columns<T, M, 2>(shrunk, up, rank, size, at, out);
  for (; at + W <= size; at += W) expand_columns<T, M, 1>(shrunk, up, rank, size, at, out);
  for (; at < size; ++at) {
    for (int m = 0; m < M; ++m) {
      float sum = 0.0f;
      for (int64_t k = 0; k < rank; ++k) sum += shrunk[m][k] * to_float(up[k * size + at]);
      out[m][at] += sum;
    }
  }
}

// Calls `rows.operator()<M>(first)` for groups of 4, 2 and 1 rows.
template <typename Rows>
void in_groups(int32_t count, Rows rows) {
  int32_t first = 0;
  for (; first + kRowsAtOnce <= count; first += kRowsAtOnce) {
    rows.template operator()<kRowsAtOnce>(first);
  }
  for (; first + 2 <= count; first += 2) rows.template operator()<2>(first);
  for (; first < count; ++first) rows.template operator()<1>(first);
}

template <typename T>
void expand(const LoraLinear& linear, const LoraSlot& slot, int32_t count, int64_t total_rank,
            float* const* shrunk, float* const* out) {
  const T* up = static_cast<const T*>(slot.up);
  int64_t rank_start = 0, output_start = 0;
  for (int64_t part = 0; part < linear.num_parts; ++part) {
    const int64_t rank = slot.ranks[part], size = linear.sizes[part];
    if (rank > 0) {
      in_groups(count, [&]<int M>(int32_t first) {
        const float* from[M];
        float* to[M];
        for (int m = 0; m < M; ++m) {
          from[m] = shrunk[first + m] + rank_start;
          to[m] = out[first + m] + output_start;
        }
        expand_rows<T, M>(from, up, rank, size, to);
      });
      up += rank * size;
    }
    rank_start += rank;
    output_start += size;
  }
}

int64_t total_rank_of(const LoraLinear& linear, const LoraSlot& slot) {
  int64_t total = 0;
  for (int64_t part = 0; part < linear.num_parts; ++part) total += slot.ranks[part];
  return total;
}

void scale(const LoraLinear& linear, const LoraSlot& slot, float* shrunk) {
  for (int64_t part = 0; part < linear.num_parts; ++part) {
    for (int64_t k = 0; k < slot.ranks[part]; ++k) *shrunk++ *= slot.scales[part];
  }
}

template <typename Function>
void for_dtype(int64_t dtype, Function function) {
  switch (static_cast<DType>(dtype)) {
    case DType::kBFloat16:
      return function.template operator()<bfloat16>();
    case DType::kHalf:
      return function.template operator()<half>();
    default:
      return function.template operator()<float>();
  }
}

}  // namespace

LoraPlan::LoraPlan(const int32_t* slots, int64_t num_rows) {
  rows_.reserve(num_rows);
  for (int64_t row = 0; row < num_rows; ++row) {
    if (slots[row] >= 0) rows_.push_back(static_cast<int32_t>(row));
  }
  std::stable_sort(rows_.begin(), rows_.end(),
                   [&](int32_t a, int32_t b) { return slots[a] < slots[b]; });
  for (size_t at = 0; at < rows_.size(); ++at) {
    const int32_t slot = slots[rows_[at]];
    if (blocks_.empty() || blocks_.back().slot != slot || blocks_.back().count == kBlockRows) {
      blocks_.push_back({slot, static_cast<int32_t>(at), 0});
    }
    ++blocks_.back().count;
  }
}

template <typename Shrink>
void LoraPlan::run(const LoraLinear& linear, float* output, int64_t output_stride,
                   int64_t num_threads, Shrink shrink) const {
  OutOfMemory failure;
  share_out(static_cast<int64_t>(blocks_.size()), num_threads, [&](int64_t index) {
    failure.watch([&] { run_block(linear, blocks_[index], output, output_stride, shrink); });
  });
  failure.rethrow();
}

template <typename Shrink>
void LoraPlan::run_block(const LoraLinear& linear, const Block& block, float* output,
                         int64_t output_stride, Shrink shrink) const {
  const LoraSlot& slot = linear.slots[block.slot];
  if (slot.down == nullptr) return;
  const int64_t total_rank = total_rank_of(linear, slot);
  thread_local std::vector<float> memory;
  memory.resize(block.count * total_rank);
  float* shrunk[kBlockRows];
  float* out[kBlockRows];
  for (int32_t m = 0; m < block.count; ++m) {
    shrunk[m] = memory.data() + m * total_rank;
    out[m] = output + rows_[block.first + m] * output_stride;
  }
  for_dtype(slot.dtype, [&]<typename T>() {
    shrink.template operator()<T>(slot, &rows_[block.first], block.count, total_rank, shrunk);
    for (int32_t m = 0; m < block.count; ++m) scale(linear, slot, shrunk[m]);
    expand<T>(linear, slot, block.count, total_rank, shrunk, out);
  });
}

void LoraPlan::add(const LoraLinear& linear, const float* input, int64_t input_stride,
                   float* output, int64_t output_stride, int64_t num_threads) const {
  run(linear, output, output_stride, num_threads,
      [&]<typename T>(const LoraSlot& slot, const int32_t* rows, int32_t count, int64_t rank,
                      float* const* shrunk) {
        const T* down = static_cast<const T*>(slot.down);
        in_groups(count, [&]<int M>(int32_t first) {
          const float* x[M];
          for (int m = 0; m < M; ++m) x[m] = input + rows[first + m] * input_stride;
          shrink_rows<T, M>(x, down, linear.inputs, rank, shrunk + first);
        });
      });
}

void LoraPlan::add_embedded(const LoraLinear& table, const int64_t* ids, float* output,
                            int64_t output_stride, int64_t num_threads) const {
  run(table, output, output_stride, num_threads,
      [&]<typename T>(const LoraSlot& slot, const int32_t* rows, int32_t count, int64_t rank,
                      float* const* shrunk) {
        for (int32_t m = 0; m < count; ++m) {
          const T* row = static_cast<const T*>(slot.down) + ids[rows[m]] * rank;
          for (int64_t k = 0; k < rank; ++k) shrunk[m][k] = to_float(row[k]);
        }
      });
}

}  // namespace pagewire

extern "C" {

// output[r] += scale * up (down input[r]) by the adapter in slots[r], below 0: none. 1 where memory
// runs out.
int32_t pagewire_lora_add(const void* linear, const int32_t* slots, const float* input,
                          float* output, int64_t num_rows, int64_t input_stride,
                          int64_t output_stride, int64_t num_threads) {
  using namespace pagewire;
  return status_of([&] {
    LoraPlan(slots, num_rows)
        .add(*static_cast<const LoraLinear*>(linear), input, input_stride, output, output_stride,
             num_threads);
  });
}

// The same with what `down` holds for ids[r] in place of a product.
int32_t pagewire_lora_add_embedded(const void* table, const int32_t* slots, const int64_t* ids,
                                   float* output, int64_t num_rows, int64_t output_stride,
                                   int64_t num_threads) {
  using namespace pagewire;
  return status_of([&] {
    LoraPlan(slots, num_rows)
        .add_embedded(*static_cast<const LoraLinear*>(table), ids, output, output_stride,
                      num_threads);
  });
}
}
