// Choosing tokens: each row is one thread's work from start to end, so that its result can't
// depend on the rows beside it. Same semantics as pagewire_kernels/sampling.py.

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <vector>

#include "errors.h"
#include "philox.h"
#include "team.h"
#include "vec.h"

namespace pagewire {
namespace {

constexpr int W = kWidth;
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();
constexpr float kMinTemperature = 1e-30f;

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

int64_t argmax(const float* logits, int64_t size) {
  FloatV<W> top = broadcast<W>(kMinusInfinity);
  int64_t i = 0;
  for (; i + W <= size; i += W) {
    const FloatV<W> x = load<W>(logits + i);
    top = x > top ? x : top;
  }
  float best = kMinusInfinity;
  for (int lane = 0; lane < W; ++lane) best = std::max(best, top[lane]);
  for (; i < size; ++i) best = std::max(best, logits[i]);
  return std::find(logits, logits + size, best) - logits;
}

// Scores relative to the best logit, over the temperature.
class Scores {
 public:
  Scores(const float* logits, float best, const RowParameters& row)
      : logits_(logits),
        best_(best),
        temperature_(std::max(row.temperature, kMinTemperature)),
        floor_(row.floor) {}

  float at(int64_t i) const {
    const float score = (logits_[i] - best_) / temperature_;
    return score < floor_ ? kMinusInfinity : score;
  }
  FloatV<W> vector_at(int64_t i) const {
    const FloatV<W> score = (load<W>(logits_ + i) - best_) / temperature_;
    return score < floor_ ? broadcast<W>(kMinusInfinity) : score;
  }

 private:
  const float* logits_;
  float best_;
  float temperature_;
  float floor_;
};

// ------------------------------------------------------------------ the whole vocabulary

// Noise never exceeds 17.33, and rarely much less: noise >= 4 needs a uniform number in the top
// 1.8%, noise >= 8 in the top 0.034%. So a token far below the best sum so far is passed over by
// its integer alone, and few logarithms are computed.
constexpr float kMaxNoise = 17.34f;
constexpr float kSlack = 1e-3f;  // covers the rounding of the comparison in float
constexpr int32_t kWordForNoise4 = 16472700;  // 2^24 * exp(-exp(-4)), less a margin
constexpr int32_t kWordForNoise8 = 16771580;

int64_t sample_all(const Scores& scores, int64_t size, int64_t best_id, const NoiseKey& key) {
  Best best{token_gumbel(key, best_id), best_id};
  constexpr int kStep = 4 * kGroupsAtOnce;
  alignas(64) uint32_t words[kStep];
  using Int = typename Vec<W>::Int;
  int64_t i = 0;
  for (; i + kStep <= size; i += kStep) {
    philox_groups(key, static_cast<uint32_t>(i / 4), words);
    for (int v = 0; v < kStep; v += W) {
      const FloatV<W> score = scores.vector_at(i + v);
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
        if (hopeful[lane]) best.offer(gumbel(words[v + lane]) + score[lane], i + v + lane);
      }
    }
  }
  for (; i < size; ++i) {
    const float score = scores.at(i);
    if (score != kMinusInfinity) best.offer(token_gumbel(key, i) + score, i);
  }
  return best.token_id;
}

// ------------------------------------------------------------------ top_k and top_p

// A score's bucket: sign-free exponent and four bits of its float, so that buckets rise as
// scores fall. Cuts are found among buckets first; only the tokens up to the cut are sorted.
constexpr int kBuckets = 4096;

int bucket_of(float score) {
  uint32_t bits;
  std::memcpy(&bits, &score, 4);
  return static_cast<int>((bits & 0x7FFFFFFF) >> 19);
}

constexpr int kRemoved = 0xFF0;  // the bucket of -inf

struct Workspace {
  std::vector<float> scores;
  std::vector<Candidate> candidates;
  std::array<int32_t, kBuckets> counts;
  std::array<double, kBuckets> masses;
};

thread_local Workspace workspace;

// Fills scores and histograms; masses too if asked.
void survey(const Scores& scores, int64_t size, bool with_masses) {
  auto& [values, candidates, counts, masses] = workspace;
  values.resize(size);
  counts.fill(0);
  if (with_masses) masses.fill(0.0);
  int64_t i = 0;
  for (; i + W <= size; i += W) {
    const FloatV<W> score = scores.vector_at(i);
    store<W>(values.data() + i, score);
    if (with_masses) {
      const FloatV<W> mass = exp_negative<W>(score);
      for (int lane = 0; lane < W; ++lane) masses[bucket_of(score[lane])] += mass[lane];
    }
    for (int lane = 0; lane < W; ++lane) ++counts[bucket_of(score[lane])];
  }
  for (; i < size; ++i) {
    values[i] = scores.at(i);
    const int bucket = bucket_of(values[i]);
    ++counts[bucket];
    if (with_masses) masses[bucket] += exp_negative<8>(broadcast<8>(values[i]))[0];
  }
}

// The candidates after both filters, likeliest first, in workspace.candidates.
void filter(const Scores& scores, int64_t size, const RowParameters& row) {
  const bool by_count = row.top_k < size;
  const bool by_mass = row.top_p < 1.0;
  survey(scores, size, by_mass && !by_count);
  auto& [values, candidates, counts, masses] = workspace;

  double total = 0.0;
  if (!by_count) {
    for (int b = 0; b < kRemoved; ++b) total += masses[b];
  }
  // The last bucket that can hold a kept token; mass is summed in another order below, hence the
  // margin.
  int last = 0;
  int64_t count = counts[0];
  double mass = by_count ? 0.0 : masses[0];
  const double wanted_mass = row.top_p * total * (1.0 + 1e-9);
  while (last + 1 < kRemoved && (by_count ? count < row.top_k : mass < wanted_mass)) {
    ++last;
    count += counts[last];
    if (!by_count) mass += masses[last];
  }
  candidates.clear();
  candidates.reserve(count);
  for (int64_t i = 0; i < size; ++i) {
    if (bucket_of(values[i]) <= last) candidates.push_back({values[i], i});
  }
  if (by_count && static_cast<int64_t>(candidates.size()) > row.top_k) {
    std::nth_element(candidates.begin(), candidates.begin() + row.top_k, candidates.end());
    candidates.resize(row.top_k);
  }
  std::sort(candidates.begin(), candidates.end());
  if (!by_mass) return;

  if (by_count) {
    for (const Candidate& candidate : candidates) {
      total += std::exp(static_cast<double>(candidate.score));
    }
  }
  // A token stays while those before it have not reached top_p; the best always stays.
  double before = 0.0;
  size_t kept = 0;
  while (kept < candidates.size() && (kept == 0 || before < row.top_p * total)) {
    before += std::exp(static_cast<double>(candidates[kept].score));
    ++kept;
  }
  candidates.resize(kept);
}

int64_t sample_filtered(const Scores& scores, int64_t size, const RowParameters& row) {
  filter(scores, size, row);
  Best best{-std::numeric_limits<double>::infinity(), std::numeric_limits<int64_t>::max()};
  for (const Candidate& candidate : workspace.candidates) {
    // In falling order: what follows can't make up for it.
    if (candidate.score + kMaxNoise < best.value) break;
    best.offer(token_gumbel(row.key, candidate.token_id) + candidate.score, candidate.token_id);
  }
  return best.token_id;
}

int64_t choose(const float* logits, int64_t size, const RowParameters& row) {
  const int64_t best_id = argmax(logits, size);
  if (row.temperature == 0.0f) return best_id;
  const Scores scores(logits, logits[best_id], row);
  if (row.top_k >= size && row.top_p >= 1.0) return sample_all(scores, size, best_id, row.key);
  return sample_filtered(scores, size, row);
}

}  // namespace
}  // namespace pagewire

// Chooses a token for each row; see pagewire_kernels/cpu.py for shapes. 1 where memory runs out.
extern "C" int32_t pagewire_choose(
    const float* logits, int64_t num_rows, int64_t vocab_size, int64_t row_stride,
    const float* temperatures, const float* floors, const int64_t* top_ks, const double* top_ps,
    const int64_t* seeds, const int64_t* sequence_indexes, const int64_t* positions,
    int64_t* chosen, int64_t num_threads) {
  using namespace pagewire;
  OutOfMemory failure;
  share_out(num_rows, num_threads, [&](int64_t r) {
    const RowParameters row{
        temperatures[r], floors[r], top_ps[r], top_ks[r],
        {static_cast<uint64_t>(seeds[r]), static_cast<uint32_t>(sequence_indexes[r]),
         static_cast<uint32_t>(positions[r])}};
    failure.watch([&] { chosen[r] = choose(logits + r * row_stride, vocab_size, row); });
  });
  return status_of([&] { failure.rethrow(); });
}
