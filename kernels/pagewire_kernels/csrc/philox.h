// Philox4x32-10 (Salmon et al., SC 2011) and the Gumbel noise made of it; the same bits as
// pagewire_kernels/philox.py.
#pragma once

#include <cmath>
#include <cstdint>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace pagewire {

struct NoiseKey {
  uint64_t seed;
  uint32_t sequence_index;
  uint32_t position;
};

constexpr uint64_t kMultiplier0 = 0xD2511F53, kMultiplier1 = 0xCD9E8D57;
constexpr uint32_t kWeyl0 = 0x9E3779B9, kWeyl1 = 0xBB67AE85;
constexpr int kRounds = 10;
constexpr int kGroupsAtOnce = 4;  // counters evaluated together; four tokens each

// words[4] of counter (group, position, sequence_index, 0).
inline void philox(const NoiseKey& key, uint32_t group, uint32_t words[4]) {
  uint32_t c0 = group, c1 = key.position, c2 = key.sequence_index, c3 = 0;
  uint32_t k0 = static_cast<uint32_t>(key.seed), k1 = static_cast<uint32_t>(key.seed >> 32);
  for (int round = 0; round < kRounds; ++round, k0 += kWeyl0, k1 += kWeyl1) {
    const uint64_t p0 = c0 * kMultiplier0, p1 = c2 * kMultiplier1;
    c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
    c1 = static_cast<uint32_t>(p1);
    c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c3 = static_cast<uint32_t>(p0);
  }
  words[0] = c0, words[1] = c1, words[2] = c2, words[3] = c3;
}

// words[i] belongs to token 4 * group + i, for kGroupsAtOnce groups.
inline void philox_groups(const NoiseKey& key, uint32_t group, uint32_t* words) {
#if defined(__AVX2__)
  // Counters sit in the low halves of 64-bit lanes, as the 32 x 32 -> 64 multiplication reads
  // them; what the high halves hold meanwhile does not matter.
  __m256i c0 = _mm256_add_epi64(_mm256_set1_epi64x(group), _mm256_set_epi64x(3, 2, 1, 0));
  __m256i c1 = _mm256_set1_epi64x(key.position);
  __m256i c2 = _mm256_set1_epi64x(key.sequence_index);
  __m256i c3 = _mm256_setzero_si256();
  uint32_t k0 = static_cast<uint32_t>(key.seed), k1 = static_cast<uint32_t>(key.seed >> 32);
  for (int round = 0; round < kRounds; ++round, k0 += kWeyl0, k1 += kWeyl1) {
    const __m256i p0 = _mm256_mul_epu32(c0, _mm256_set1_epi64x(kMultiplier0));
    const __m256i p1 = _mm256_mul_epu32(c2, _mm256_set1_epi64x(kMultiplier1));
    const __m256i high0 = _mm256_srli_epi64(p0, 32), high1 = _mm256_srli_epi64(p1, 32);
    c0 = _mm256_xor_si256(_mm256_xor_si256(high1, c1), _mm256_set1_epi64x(k0));
    c2 = _mm256_xor_si256(_mm256_xor_si256(high0, c3), _mm256_set1_epi64x(k1));
    c1 = p1;
    c3 = p0;
  }
  const __m256i low = _mm256_set1_epi64x(0xFFFFFFFF);
  // Each 64-bit lane becomes (c0, c1) and (c2, c3) of one group: the four words in order.
  const __m256i first = _mm256_or_si256(_mm256_and_si256(c0, low), _mm256_slli_epi64(c1, 32));
  const __m256i second = _mm256_or_si256(_mm256_and_si256(c2, low), _mm256_slli_epi64(c3, 32));
  const __m256i even = _mm256_unpacklo_epi64(first, second);  // groups 0 and 2
  const __m256i odd = _mm256_unpackhi_epi64(first, second);   // groups 1 and 3
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(words), _mm256_permute2x128_si256(even, odd, 0x20));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(words + 8),
                      _mm256_permute2x128_si256(even, odd, 0x31));
#else
  for (int i = 0; i < kGroupsAtOnce; ++i) philox(key, group + i, words + 4 * i);
#endif
}

// u = ((word >> 8) + 0.5) * 2^-24 needs 25 bits: double, as in float the largest would be 1.
inline double gumbel(uint32_t word) {
  return -std::log(-std::log((static_cast<double>(word >> 8) + 0.5) * 0x1p-24));
}

inline double token_gumbel(const NoiseKey& key, int64_t token_id) {
  uint32_t words[4];
  philox(key, static_cast<uint32_t>(token_id >> 2), words);
  return gumbel(words[token_id & 3]);
}

}  // namespace pagewire
