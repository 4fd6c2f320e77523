// The kernels that others are made of. See the Python side for what each reads. Those that return
// something allocate memory: 1 where that runs out, else 0.
#pragma once

#include <cstdint>

extern "C" {

int32_t pagewire_paged_attention(
    int32_t dtype, const float* query, const void* key_cache, const void* value_cache,
    float* output, const int32_t* query_starts, const int32_t* context_lengths,
    const int32_t* block_tables, int64_t num_sequences, int64_t num_decodes, int64_t query_stride,
    int64_t table_width, int64_t block_size, int64_t num_heads, int64_t num_kv_heads,
    int64_t head_dim, int64_t sliding_window, float scale, int64_t num_threads);

void pagewire_write_kv(int32_t dtype, const float* key, const float* value, void* key_cache,
                       void* value_cache, const int64_t* slots, int64_t num_tokens,
                       int64_t key_stride, int64_t value_stride, int64_t size,
                       int64_t num_threads);

// With `accumulate`, the product is added to what `output` holds.
int32_t pagewire_linear(int32_t dtype, const float* input, const void* panels, const float* scales,
                        const float* bias, float* output, int64_t num_tokens, int64_t outputs,
                        int64_t depth, int64_t input_stride, int64_t output_stride,
                        int32_t accumulate, int64_t num_threads);

void pagewire_rms_norm(const float* input, const float* weight, float* output, int64_t rows,
                       int64_t size, int64_t input_stride, float eps, int64_t num_threads);

// Reads and writes rows of `heads` heads, `stride` elements apart; may work in place.
void pagewire_rotate(const float* input, const float* cos, const float* sin, float* output,
                     int64_t tokens, int64_t heads, int64_t dim, int64_t input_stride,
                     int64_t output_stride, int64_t num_threads);

void pagewire_silu_and_mul(const float* input, float* output, int64_t rows, int64_t size,
                           int64_t input_stride, int64_t num_threads);
}
