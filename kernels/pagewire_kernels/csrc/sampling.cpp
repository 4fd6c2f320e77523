// Choosing tokens: each row is one thread's work from start to end, so that its result can't
// depend on the rows beside it. Same semantics as pagewire_kernels/sampling.py.

#include <algorithm>
#include <array>
#include <cfloat>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include "errors.h"
#include "philox.h"
#include "team.h"
#include "vec.h"

namespace pagewire {
namespace {

constexpr int W = kWidth;
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kMinusInfinity = -kInfinity;
constexpr float kMinTemperature = 1e-30f;
// What is told in place of a token; see pagewire_kernels/sampling.py.
constexpr int64_t kNotANumber = -1;
constexpr int64_t kNothingAllowed = -2;

using Int = typename Vec<W>::Int;

struct RowParameters {
  float temperature;  // 0: greedy
  float floor;        // log(min_p); scores below it are removed
  double top_p;
  int64_t top_k;  // vocab_size: all
  NoiseKey key;
};

struct Candidate {
  float score;
  int64_t token_id;
  bool operator<(const Candidate& other) const {
    return score != other.score ? score > other.score : token_id < other.token_id;
  }
};

// The larger sum wins, the lower id among equals.
struct Best {
  double value;
  int64_t token_id;
  void offer(double other, int64_t other_id) {
    if (other > value || (other == value && other_id < token_id)) {
      value = other;
      token_id = other_id;
    }
  }
};

// Tokens that share a word of a mask; rows are read a block at a time.
constexpr int64_t kBlock = 32;

// The logits whose bits are set in `word`, from its `part`-th vector on. In integers: of a choice
// between floats by integers the compiler makes one lane after the other.
FloatV<W> allowed(FloatV<W> logits, uint32_t word, int part) {
#if defined(__AVX512F__)
  if constexpr (W == 16) {
    const __mmask16 mask = static_cast<__mmask16>(word >> (part * W));
    const __m512 nothing = _mm512_set1_ps(kMinusInfinity);
    return (FloatV<W>)_mm512_mask_mov_ps(nothing, mask, (__m512)logits);
  }
#endif
  Int lane_bits{};
  for (int lane = 0; lane < W; ++lane) lane_bits[lane] = int32_t{1} << lane;
  const Int word_bits = Int{} + static_cast<int32_t>(word >> (part * W));
  const Int kept = (word_bits & lane_bits) == lane_bits;
  const Int nothing = (Int)broadcast<W>(kMinusInfinity);
  return (FloatV<W>)(((Int)logits & kept) | (nothing & ~kept));
}

// Logits, -inf where the mask forbids a token.
template <bool kMasked>
class Row {
 public:
  // `bits` are read if kMasked: bit t % 32 of word t / 32 is set where token t is allowed.
  Row(const float* logits, const uint32_t* bits) : logits_(logits), bits_(bits) {}

  // As they are, whatever is forbidden.
  float raw_at(int64_t i) const { return logits_[i]; }
  FloatV<W> raw_vector_at(int64_t i) const { return load<W>(logits_ + i); }

  float at(int64_t i) const {
    if (kMasked && !(bits_[i / kBlock] >> (i % kBlock) & 1)) return kMinusInfinity;
    return logits_[i];
  }
  // Within one block.
  FloatV<W> vector_at(int64_t i) const {
    const FloatV<W> logits = raw_vector_at(i);
    if constexpr (!kMasked) return logits;
    return allowed(logits, bits_[i / kBlock], static_cast<int>(i % kBlock / W));
  }
  // Whether one of so many, all of one block, is at least as large.
  template <int kCount>
  bool reaches(int64_t begin, float least) const {
    if (kMasked && bits_[begin / kBlock] == 0) return false;
    Int reached{};
    for (int64_t i = begin; i < begin + kCount; i += W) {
      reached |= vector_at(i) >= broadcast<W>(least);
    }
    return any(reached);
  }

 private:
  const float* logits_;
  const uint32_t* bits_;
};

struct Largest {
  float logit;  // -inf: nothing is left
  int64_t token_id;
  bool all_numbers;  // those that are forbidden too
};

template <bool kMasked>
Largest largest_of(const Row<kMasked>& row, int64_t size) {
  FloatV<W> top = broadcast<W>(kMinusInfinity);
  Int ids{}, id{}, faults{};
  for (int lane = 0; lane < W; ++lane) id[lane] = lane;
  int64_t i = 0;
  for (; i + kBlock <= size; i += kBlock) {
    for (int64_t at = i; at < i + kBlock; at += W) {
      faults |= ~(row.raw_vector_at(at) < broadcast<W>(kInfinity));
      const FloatV<W> logits = row.vector_at(at);
      ids = logits > top ? id : ids;
      top = logits > top ? logits : top;
      id += W;
    }
  }
  Largest best{kMinusInfinity, 0, !any(faults)};
  for (int lane = 0; lane < W; ++lane) {
    if (top[lane] > best.logit || (top[lane] == best.logit && ids[lane] < best.token_id)) {
      best.logit = top[lane];
      best.token_id = ids[lane];
    }
  }
  for (; i < size; ++i) {
    best.all_numbers &= row.raw_at(i) < kInfinity;
    if (row.at(i) > best.logit) {
      best.logit = row.at(i);
      best.token_id = i;
    }
  }
  return best;
}

constexpr float kSlack = 1e-3f;  // covers the rounding of comparisons in float

// Scores relative to the best logit, over the temperature.
template <bool kMasked>
class Scores {
 public:
  Scores(const Row<kMasked>& row, float best, const RowParameters& parameters)
      : row_(row),
        best_(best),
        temperature_(std::max(parameters.temperature, kMinTemperature)),
        floor_(parameters.floor) {}

  float at(int64_t i) const {
    const float score = (row_.at(i) - best_) / temperature_;
    return score < floor_ ? kMinusInfinity : score;
  }
  FloatV<W> vector_at(int64_t i) const {
    const FloatV<W> score = (row_.vector_at(i) - best_) / temperature_;
    return score < floor_ ? broadcast<W>(kMinusInfinity) : score;
  }
  // False only if none of so many scores is at least as large: most are passed over by this.
  template <int kCount>
  bool may_reach(int64_t begin, float score) const {
    return row_.template reaches<kCount>(begin, best_ + temperature_ * (score - kSlack));
  }

 private:
  Row<kMasked> row_;
  float best_;
  float temperature_;
  float floor_;
};

// Noise never exceeds 17.33, and rarely much less: noise >= 4 needs a uniform number in the top
// 1.8%, noise >= 8 in the top 0.034%. So a token far below the best sum so far is passed over by
// its integer alone, and few logarithms are computed.
constexpr float kMaxNoise = 17.34f;
constexpr int32_t kWordForNoise4 = 16472700;  // 2^24 * exp(-exp(-4)), less a margin
constexpr int32_t kWordForNoise8 = 16771580;

template <bool kMasked>
int64_t sample_all(const Scores<kMasked>& scores, int64_t size, int64_t best_id,
                   const NoiseKey& key) {
  Best best{token_gumbel(key, best_id), best_id};
  constexpr int kStep = 4 * kGroupsAtOnce;
  static_assert(kBlock % kStep == 0 && kStep % W == 0);
  alignas(64) uint32_t words[kStep];
  int64_t i = 0;
  for (; i + kBlock <= size; i += kBlock) {
    for (int64_t step = i; step < i + kBlock; step += kStep) {
      const float least = static_cast<float>(best.value) - kMaxNoise;
      if (!scores.template may_reach<kStep>(step, least)) continue;
      philox_groups(key, static_cast<uint32_t>(step / 4), words);
      for (int v = 0; v < kStep; v += W) {
        const FloatV<W> score = scores.vector_at(step + v);
        const FloatV<W> needed = static_cast<float>(best.value) - kSlack - score;
        Int word;
        std::memcpy(&word, words + v, sizeof(word));
        word = (word >> 8) & 0xFFFFFF;
        const Int enough = needed < 4.0f   ? Int{}
                           : needed < 8.0f ? Int{} + kWordForNoise4
                                           : Int{} + kWordForNoise8;
        const Int hopeful = (needed < kMaxNoise) & (word >= enough);
        if (!any(hopeful)) continue;
        for (int lane = 0; lane < W; ++lane) {
          if (hopeful[lane]) best.offer(gumbel(words[v + lane]) + score[lane], step + v + lane);
        }
      }
    }
  }
  for (; i < size; ++i) {
    const float score = scores.at(i);
    if (score != kMinusInfinity) best.offer(token_gumbel(key, i) + score, i);
  }
  return best.token_id;
}

// Candidates for top_p are the tokens down to a score, first to one that few tokens reach; lower
// ones are looked for where those are not enough.
constexpr float kCuts[] = {-8.0f, -12.0f, -20.0f, -FLT_MAX};
// exp of lower scores is not added up: of a million it is less than exp in float errs by for one.
constexpr float kLeastMass = -32.0f;

// A score's bucket: sign-free exponent and four bits of its float, so that buckets rise as
// scores fall. Of many candidates only those up to the bucket of the cut are sorted.
constexpr int kBuckets = 4096;
constexpr size_t kFewCandidates = 512;

int bucket_of(float score) {
  uint32_t bits;
  std::memcpy(&bits, &score, 4);
  return static_cast<int>((bits & 0x7FFFFFFF) >> 19);
}

struct Workspace {
  std::vector<Candidate> candidates;
  std::vector<float> maxima;
  std::array<double, kBuckets> masses;
};

thread_local Workspace workspace;

// Makes those with at least this score the candidates. Adds up exp of all scores, if asked.
template <bool kMasked>
void collect(const Scores<kMasked>& scores, int64_t size, float least, double* total) {
  typedef double Doubles __attribute__((vector_size(W * 8)));
  auto& candidates = workspace.candidates;
  candidates.clear();
  Doubles sums{};
  const float least_read = total ? std::min(least, kLeastMass) : least;
  int64_t i = 0;
  for (; i + kBlock <= size; i += kBlock) {
    if (!scores.template may_reach<kBlock>(i, least_read)) continue;
    for (int64_t at = i; at < i + kBlock; at += W) {
      const FloatV<W> score = scores.vector_at(at);
      if (total) sums += __builtin_convertvector(exp_negative<W>(score), Doubles);
      const Int kept = score >= broadcast<W>(least);
      if (!any(kept)) continue;
      for (int lane = 0; lane < W; ++lane) {
        if (kept[lane]) candidates.push_back({score[lane], at + lane});
      }
    }
  }
  if (total) {
    for (int lane = 0; lane < W; ++lane) *total += sums[lane];
  }
  for (; i < size; ++i) {
    const float score = scores.at(i);
    if (score >= least) candidates.push_back({score, i});
    if (total) *total += exp_negative<8>(broadcast<8>(score))[0];
  }
}

// A score that at least so many tokens reach, and few more: of all blocks' largest scores the one
// of that rank.
template <bool kMasked>
float reached_by(int64_t count, const Scores<kMasked>& scores, int64_t size) {
  auto& maxima = workspace.maxima;
  maxima.clear();
  int64_t i = 0;
  for (; i + kBlock <= size; i += kBlock) {
    FloatV<W> top = scores.vector_at(i);
    for (int64_t at = i + W; at < i + kBlock; at += W) {
      const FloatV<W> score = scores.vector_at(at);
      top = score > top ? score : top;
    }
    maxima.push_back(horizontal_max(top));
  }
  for (; i < size; ++i) maxima.push_back(scores.at(i));
  if (static_cast<int64_t>(maxima.size()) < count) return -FLT_MAX;
  const auto rank = maxima.begin() + (count - 1);
  std::nth_element(maxima.begin(), rank, maxima.end(), std::greater<float>());
  return std::max(*rank, -FLT_MAX);
}

// Drops candidates that are behind as many as make up that mass.
void drop_behind(double mass) {
  auto& candidates = workspace.candidates;
  auto& masses = workspace.masses;
  if (candidates.size() <= kFewCandidates) return;
  masses.fill(0.0);
  for (const Candidate& candidate : candidates) {
    masses[bucket_of(candidate.score)] += std::exp(candidate.score);
  }
  // Mass is summed in another order afterwards, hence the margin.
  int last = 0;
  const double wanted = mass * (1.0 + 1e-5);
  for (double sum = masses[0]; last + 1 < kBuckets && sum < wanted; sum += masses[last]) ++last;
  std::erase_if(candidates, [&](const Candidate& c) { return bucket_of(c.score) > last; });
}

// Keeps of sorted candidates those before which not all of that mass is; the best always stays.
// Returns whether that mass was reached.
bool cut_by_mass(double mass) {
  auto& candidates = workspace.candidates;
  double before = 0.0;
  size_t kept = 0;
  while (kept < candidates.size() && (kept == 0 || before < mass)) {
    before += std::exp(static_cast<double>(candidates[kept].score));
    ++kept;
  }
  candidates.resize(kept);
  return before >= mass;
}

template <bool kMasked>
void filter_by_count(const Scores<kMasked>& scores, int64_t size, const RowParameters& row) {
  auto& candidates = workspace.candidates;
  collect(scores, size, reached_by(row.top_k, scores, size), nullptr);
  const auto most = static_cast<size_t>(row.top_k);
  if (candidates.size() > most) {
    std::nth_element(candidates.begin(), candidates.begin() + most, candidates.end());
    candidates.resize(most);
  }
  std::sort(candidates.begin(), candidates.end());
  if (row.top_p >= 1.0) return;
  double total = 0.0;
  for (const Candidate& candidate : candidates) {
    total += std::exp(static_cast<double>(candidate.score));
  }
  cut_by_mass(row.top_p * total);
}

// The candidates after both filters, likeliest first, in workspace.candidates.
template <bool kMasked>
void filter(const Scores<kMasked>& scores, int64_t size, const RowParameters& row) {
  if (row.top_k < size) return filter_by_count(scores, size, row);
  double total = 0.0;
  for (const float least : kCuts) {
    collect(scores, size, least, total > 0.0 ? nullptr : &total);
    drop_behind(row.top_p * total);
    std::sort(workspace.candidates.begin(), workspace.candidates.end());
    if (cut_by_mass(row.top_p * total) || least <= row.floor) return;
  }
}

template <bool kMasked>
int64_t sample_filtered(const Scores<kMasked>& scores, int64_t size, const RowParameters& row) {
  filter(scores, size, row);
  Best best{-std::numeric_limits<double>::infinity(), std::numeric_limits<int64_t>::max()};
  for (const Candidate& candidate : workspace.candidates) {
    // In falling order: what follows can't make up for it.
    if (candidate.score + kMaxNoise < best.value) break;
    best.offer(token_gumbel(row.key, candidate.token_id) + candidate.score, candidate.token_id);
  }
  return best.token_id;
}

template <bool kMasked>
int64_t choose(const Row<kMasked>& logits, int64_t size, const RowParameters& row) {
  const Largest best = largest_of(logits, size);
  if (!best.all_numbers) return kNotANumber;
  if (best.logit == kMinusInfinity) return kNothingAllowed;
  if (row.temperature == 0.0f) return best.token_id;
  const Scores<kMasked> scores(logits, best.logit, row);
  if (row.top_k >= size && row.top_p >= 1.0) {
    return sample_all(scores, size, best.token_id, row.key);
  }
  return sample_filtered(scores, size, row);
}

}  // namespace
}  // namespace pagewire

// Chooses a token for each row; see pagewire_kernels/cpu.py for shapes. Row r is held to row
// `masks[r]` of `bits`, if that is not negative; `masks` may be null. 1 where memory runs out.
extern "C" int32_t pagewire_choose(
    const float* logits, int64_t num_rows, int64_t vocab_size, int64_t row_stride,
    const float* temperatures, const float* floors, const int64_t* top_ks, const double* top_ps,
    const int64_t* seeds, const int64_t* sequence_indexes, const int64_t* positions,
    const int64_t* masks, const uint32_t* bits, int64_t num_words, int64_t* chosen,
    int64_t num_threads) {
  using namespace pagewire;
  OutOfMemory failure;
  share_out(num_rows, num_threads, [&](int64_t r) {
    const RowParameters row{
        temperatures[r], floors[r], top_ps[r], top_ks[r],
        {static_cast<uint64_t>(seeds[r]), static_cast<uint32_t>(sequence_indexes[r]),
         static_cast<uint32_t>(positions[r])}};
    const float* at = logits + r * row_stride;
    failure.watch([&] {
      chosen[r] = masks && masks[r] >= 0
                      ? choose(Row<true>(at, bits + masks[r] * num_words), vocab_size, row)
                      : choose(Row<false>(at, nullptr), vocab_size, row);
    });
  });
  return status_of([&] { failure.rethrow(); });
}
