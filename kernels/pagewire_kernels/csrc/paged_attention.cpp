// Paged attention on CPUs: decodes read keys and values in place through the block table, prefill
// chunks pack a tile of them and multiply as small matrices. Queries, sums and outputs are fp32,
// whatever the caches' element type (prefill_tiles.h: queries as two bfloat16 each).
//
// A query row's arithmetic depends on its own position and context only: tiles start at multiples
// of kTile from the sequence's start. So results are bit for bit the same alone, in a batch, and
// under any chunking that keeps a row a prefill row.

#include <type_traits>

#include "decode.h"
#include "errors.h"
#include "kernels.h"
#include "prefill.h"
#include "prefill_tiles.h"
#include "team.h"

namespace pagewire {
namespace {

constexpr int64_t kParallelElements = 1 << 16;  // of what is written to a cache
// Query rows (tokens x sharing heads) of one prefill task. By tiles they are more, to share the
// packing of keys and values, which takes longer than a product.
constexpr int64_t kRowsPerTask = 64, kRowsPerTaskByTiles = 192;

template <typename T>
bool goes_by_tiles(const Layer& layer) {
#if defined(__AMX_TILE__)
  return std::is_same_v<T, bfloat16> && layer.head_dim % kDepth == 0;
#else
  return false;
#endif
}

std::vector<Task> plan_tasks(const Layer& layer, int64_t num_sequences, int64_t num_decodes,
                             int64_t num_threads, int64_t rows_per_task) {
  std::vector<Task> tasks;
  const auto kv_heads = static_cast<int32_t>(layer.num_kv_heads);
  const auto tokens_per_task =
      static_cast<int32_t>(std::max<int64_t>(1, rows_per_task / layer.group()));
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

template <typename T>
void attend_chunk(const Layer& layer, const Task& task) {
#if defined(__AMX_TILE__)
  if constexpr (std::is_same_v<T, bfloat16>) {
    if (goes_by_tiles<T>(layer)) return prefill_by_tiles(layer, task);
  }
#endif
  prefill<T, kWidth>(layer, task);
}

template <typename T, int W>
void run(const Layer& layer, const std::vector<Task>& tasks, int64_t num_threads) {
  const auto count = static_cast<int64_t>(tasks.size());
  const int64_t threads = std::min(num_threads, count);
  OutOfMemory failure;
  share_out(count, threads, [&](int64_t i) {
    failure.watch([&] {
      if (tasks[i].num_tokens) {
        attend_chunk<T>(layer, tasks[i]);
      } else {
        decode<T, W>(layer, tasks[i], i + threads < count ? &tasks[i + threads] : nullptr);
      }
    });
  });
  failure.rethrow();
}

template <typename T>
void attend(const Layer& layer, int64_t num_sequences, int64_t num_decodes, int64_t num_threads) {
  const auto tasks = plan_tasks(layer, num_sequences, num_decodes, num_threads,
                                goes_by_tiles<T>(layer) ? kRowsPerTaskByTiles : kRowsPerTask);
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
int32_t pagewire_paged_attention(
    int32_t dtype, const float* query, const void* key_cache, const void* value_cache,
    float* output, const int32_t* query_starts, const int32_t* context_lengths,
    const int32_t* block_tables, int64_t num_sequences, int64_t num_decodes, int64_t query_stride,
    int64_t table_width, int64_t block_size, int64_t num_heads, int64_t num_kv_heads,
    int64_t head_dim, int64_t sliding_window, float scale, int64_t num_threads) {
  using namespace pagewire;
  const Layer layer{query,        key_cache,    value_cache, output,       query_starts,
                    context_lengths, block_tables, query_stride, table_width, block_size,
                    num_heads,    num_kv_heads, head_dim,    sliding_window, scale};
  return status_of([&] {
    switch (static_cast<DType>(dtype)) {
      case DType::kFloat:
        return attend<float>(layer, num_sequences, num_decodes, num_threads);
      case DType::kBFloat16:
        return attend<bfloat16>(layer, num_sequences, num_decodes, num_threads);
      case DType::kHalf:
        return attend<half>(layer, num_sequences, num_decodes, num_threads);
      case DType::kInt8:
        return;  // not a cache's; the Python side refuses it
    }
  });
}

// Stores fp32 rows of `size` elements, rounded to the caches' type, at their slots.
void pagewire_write_kv(int32_t dtype, const float* key, const float* value, void* key_cache,
                       void* value_cache, const int64_t* slots, int64_t num_tokens,
                       int64_t key_stride, int64_t value_stride, int64_t size,
                       int64_t num_threads) {
  const bool small = num_tokens * size < pagewire::kParallelElements;
  const auto write = [&]<typename T>(T* keys, T* values) {
    pagewire::split_evenly(num_tokens, small ? 1 : num_threads, [&](int64_t t) {
      for (int64_t i = 0; i < size; ++i) {
        pagewire::store_scalar(keys + slots[t] * size + i, key[t * key_stride + i]);
        pagewire::store_scalar(values + slots[t] * size + i, value[t * value_stride + i]);
      }
    });
  };
  switch (static_cast<pagewire::DType>(dtype)) {
    case pagewire::DType::kFloat:
      return write(static_cast<float*>(key_cache), static_cast<float*>(value_cache));
    case pagewire::DType::kBFloat16:
      return write(static_cast<pagewire::bfloat16*>(key_cache),
                   static_cast<pagewire::bfloat16*>(value_cache));
    case pagewire::DType::kHalf:
      return write(static_cast<pagewire::half*>(key_cache),
                   static_cast<pagewire::half*>(value_cache));
    case pagewire::DType::kInt8:
      return;
  }
}
}
