// What adapters add to linears. See lora.cpp.
#pragma once

#include <cstdint>
#include <vector>

namespace pagewire {

// As cpu_lora.py lays them out: 8 bytes a field.
struct LoraSlot {
  const void* down;       // [sum of ranks][inputs], of an embedding [inputs][sum of ranks]; or null
  const void* up;         // part after part [rank][outputs of the part]
  const int64_t* ranks;   // of each part, 0: it has none
  const float* scales;    // of each part
  int64_t dtype;
};

struct LoraLinear {
  const LoraSlot* slots;
  const int64_t* sizes;  // outputs of each part
  int64_t num_parts, inputs;
};

// The rows of a step by adapter, in blocks that one thread takes.
class LoraPlan {
 public:
  // `slots` has one a row, below 0 for none.
  LoraPlan(const int32_t* slots, int64_t num_rows);

  // output += what the adapters make of input; rows are strides apart.
  void add(const LoraLinear& linear, const float* input, int64_t input_stride, float* output,
           int64_t output_stride, int64_t num_threads) const;

  // The same of an embedding's ids.
  void add_embedded(const LoraLinear& table, const int64_t* ids, float* output,
                    int64_t output_stride, int64_t num_threads) const;

 private:
  struct Block {
    int32_t slot, first, count;  // of `rows_`
  };
  std::vector<int32_t> rows_;
  std::vector<Block> blocks_;

  template <typename Shrink>
  void run(const LoraLinear& linear, float* output, int64_t output_stride, int64_t num_threads,
           Shrink shrink) const;

  template <typename Shrink>
  void run_block(const LoraLinear& linear, const Block& block, float* output,
                 int64_t output_stride, Shrink shrink) const;
};

}  // namespace pagewire
