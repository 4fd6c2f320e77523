// All decoder layers of a Llama-like model in one call. A layer is a dozen kernels; called one by
// one from Python, a step of few tokens spends as long between them as in them.

#include <algorithm>
#include <memory>
#include <optional>
#include <vector>

#include "errors.h"
#include "kernels.h"
#include "lora.h"

namespace pagewire {
namespace {

// The feed-forward layer goes through its tokens in parts: what lies between its products then
// stays in cache, and takes no memory that grows with the step.
constexpr int64_t kTokensAtOnce = 96;

// As cpu_decoder.py lays them out: 8 bytes a field.
struct Matrix {
  const void* panels;
  const float* scales;  // or null
  const float* bias;    // or null
  int64_t dtype, outputs, depth;
};

struct DecoderLayer {
  const float* input_norm;
  Matrix qkv;
  const float* query_norm;  // of each head, or null
  const float* key_norm;    // likewise
  Matrix output;
  const float* post_norm;
  Matrix gate_up;
  Matrix down;
  void* key_cache;
  void* value_cache;
  int64_t sliding_window;  // 0: none
};

// What adapters add to a layer's linears.
struct LayerAdapters {
  LoraLinear qkv, output, gate_up, down;
};

struct DecoderShape {
  int64_t num_layers, hidden_size, num_heads, num_kv_heads, head_dim;
  double eps, scale;
};

struct Step {
  const float* cos;
  const float* sin;
  const int64_t* slots;
  const int32_t* query_starts;
  const int32_t* context_lengths;
  const int32_t* block_tables;
  int64_t num_tokens, num_sequences, num_decodes, table_width, block_size, cache_dtype, num_threads;
  const LayerAdapters* adapters;   // one a layer, or null
  const int32_t* adapter_slots;    // of each token, where there are adapters
};

// Which tokens have which adapter: of the whole step, and of each part of it that goes through the
// feed-forward layer at once.
struct StepAdapters {
  std::optional<LoraPlan> all;
  std::vector<LoraPlan> parts;

  explicit StepAdapters(const Step& step) {
    if (step.adapters == nullptr) return;
    all.emplace(step.adapter_slots, step.num_tokens);
    for (int64_t first = 0; first < step.num_tokens; first += kTokensAtOnce) {
      parts.emplace_back(step.adapter_slots + first,
                         std::min(kTokensAtOnce, step.num_tokens - first));
    }
  }
};

void multiply(const Matrix& m, const float* input, int64_t num_tokens, float* output,
              int64_t output_stride, bool accumulate, int64_t num_threads) {
  check(pagewire_linear(static_cast<int32_t>(m.dtype), input, m.panels, m.scales, m.bias, output,
                        num_tokens, m.outputs, m.depth, m.depth, output_stride, accumulate,
                        num_threads));
}

// Elements between the rows of a product: a line more where rows would lie whole pages apart, and
// meet in the same sets of the cache.
int64_t spread(int64_t outputs) {
  constexpr int64_t kLine = 16, kPage = 1024;
  return outputs % kPage ? outputs : outputs + kLine;
}

using Floats = std::unique_ptr<float[]>;

Floats floats(int64_t count) { return Floats(new float[count]); }  // as they come, not zeroed

// Memory of one step, for all its layers.
struct Buffers {
  Floats normed, qkv, attended, gate_up, product;

  Buffers(const DecoderShape& s, const DecoderLayer& layer, int64_t tokens)
      : normed(floats(tokens * s.hidden_size)),
        qkv(floats(tokens * spread(layer.qkv.outputs))),
        attended(floats(tokens * layer.output.depth)),
        gate_up(floats(std::min(tokens, kTokensAtOnce) * spread(layer.gate_up.outputs))),
        product(floats(std::min(tokens, kTokensAtOnce) * layer.down.depth)) {}
};

// Norms heads [first, first + count) of each token in place.
void norm_heads(const DecoderShape& s, const float* weight, float* qkv, int64_t width,
                int64_t first, int64_t count, const Step& step) {
  for (int64_t t = 0; t < step.num_tokens; ++t) {
    float* heads = qkv + t * width + first * s.head_dim;
    pagewire_rms_norm(heads, weight, heads, count, s.head_dim, s.head_dim,
                      static_cast<float>(s.eps), 1);
  }
}

// hidden += attention(norm(hidden))
void attend(const DecoderShape& s, const DecoderLayer& layer, const Step& step,
            const StepAdapters& plans, const LayerAdapters* adapters, Buffers& buffers,
            float* hidden) {
  const int64_t width = spread(layer.qkv.outputs), threads = step.num_threads;
  float* qkv = buffers.qkv.get();
  pagewire_rms_norm(hidden, layer.input_norm, buffers.normed.get(), step.num_tokens,
                    s.hidden_size, s.hidden_size, static_cast<float>(s.eps), threads);
  multiply(layer.qkv, buffers.normed.get(), step.num_tokens, qkv, width, false, threads);
  if (adapters) {
    plans.all->add(adapters->qkv, buffers.normed.get(), s.hidden_size, qkv, width, threads);
  }
  if (layer.query_norm) {
    norm_heads(s, layer.query_norm, qkv, width, 0, s.num_heads, step);
    norm_heads(s, layer.key_norm, qkv, width, s.num_heads, s.num_kv_heads, step);
  }
  pagewire_rotate(qkv, step.cos, step.sin, qkv, step.num_tokens, s.num_heads + s.num_kv_heads,
                  s.head_dim, width, width, threads);
  const float* key = qkv + s.num_heads * s.head_dim;
  const auto cache_dtype = static_cast<int32_t>(step.cache_dtype);
  pagewire_write_kv(cache_dtype, key, key + s.num_kv_heads * s.head_dim, layer.key_cache,
                    layer.value_cache, step.slots, step.num_tokens, width, width,
                    s.num_kv_heads * s.head_dim, threads);
  check(pagewire_paged_attention(
      cache_dtype, qkv, layer.key_cache, layer.value_cache, buffers.attended.get(),
      step.query_starts, step.context_lengths, step.block_tables, step.num_sequences,
      step.num_decodes, width, step.table_width, step.block_size, s.num_heads, s.num_kv_heads,
      s.head_dim, layer.sliding_window, static_cast<float>(s.scale), threads));
  multiply(layer.output, buffers.attended.get(), step.num_tokens, hidden, s.hidden_size, true,
           threads);
  if (adapters) {
    plans.all->add(adapters->output, buffers.attended.get(), layer.output.depth, hidden,
                   s.hidden_size, threads);
  }
}

// hidden += feed_forward(norm(hidden))
void feed_forward(const DecoderShape& s, const DecoderLayer& layer, const Step& step,
                  const StepAdapters& plans, const LayerAdapters* adapters, Buffers& buffers,
                  float* hidden) {
  const int64_t width = spread(layer.gate_up.outputs), threads = step.num_threads;
  for (int64_t first = 0; first < step.num_tokens; first += kTokensAtOnce) {
    const int64_t count = std::min(kTokensAtOnce, step.num_tokens - first);
    float* rows = hidden + first * s.hidden_size;
    pagewire_rms_norm(rows, layer.post_norm, buffers.normed.get(), count, s.hidden_size,
                      s.hidden_size, static_cast<float>(s.eps), threads);
    multiply(layer.gate_up, buffers.normed.get(), count, buffers.gate_up.get(), width, false,
             threads);
    if (adapters) {
      plans.parts[first / kTokensAtOnce].add(adapters->gate_up, buffers.normed.get(),
                                             s.hidden_size, buffers.gate_up.get(),
                                             width, threads);
    }
    pagewire_silu_and_mul(buffers.gate_up.get(), buffers.product.get(), count, layer.down.depth,
                          width, threads);
    multiply(layer.down, buffers.product.get(), count, rows, s.hidden_size, true, threads);
    if (adapters) {
      plans.parts[first / kTokensAtOnce].add(adapters->down, buffers.product.get(),
                                             layer.down.depth, rows, s.hidden_size, threads);
    }
  }
}

}  // namespace
}  // namespace pagewire

extern "C" {

// hidden [num_tokens][hidden_size] goes through all layers, in place. 1 where memory runs out.
int32_t pagewire_decoder(const void* shape, const void* layers, const void* step, float* hidden) {
  using namespace pagewire;
  const auto& s = *static_cast<const DecoderShape*>(shape);
  const auto* each = static_cast<const DecoderLayer*>(layers);
  const auto& now = *static_cast<const Step*>(step);
  return status_of([&] {
    Buffers buffers(s, each[0], now.num_tokens);
    const StepAdapters plans(now);
    for (int64_t i = 0; i < s.num_layers; ++i) {
      const LayerAdapters* adapters = now.adapters ? now.adapters + i : nullptr;
      attend(s, each[i], now, plans, adapters, buffers, hidden);
      feed_forward(s, each[i], now, plans, adapters, buffers, hidden);
    }
  });
}
}
