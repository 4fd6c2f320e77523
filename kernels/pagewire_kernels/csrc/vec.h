// Vectors of W floats by the compiler's vector extension: the same code becomes AVX2, AVX-512 or
// NEON by -march=native.
#pragma once

#include <cstdint>
#include <cstring>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace pagewire {

#if defined(__AVX512F__)
constexpr int kWidth = 16;
#else
constexpr int kWidth = 8;
#endif

// Element types of weights and caches, as the Python side numbers them.
enum class DType : int32_t { kFloat = 0, kBFloat16 = 1, kHalf = 2, kInt8 = 3 };
struct bfloat16 {
  uint16_t bits;
};
struct half {
  uint16_t bits;
};

inline int64_t rounded_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

// Vectors at any address: rows of a cache are aligned to their elements only.
template <int W>
struct Vec {
  typedef float Float __attribute__((vector_size(W * 4)));
  typedef float FloatAt __attribute__((vector_size(W * 4), aligned(4), may_alias));
  typedef int32_t Int __attribute__((vector_size(W * 4)));
  typedef uint32_t UInt __attribute__((vector_size(W * 4)));
  typedef uint16_t Short __attribute__((vector_size(W * 2)));
  typedef uint16_t ShortAt __attribute__((vector_size(W * 2), aligned(2), may_alias));
  typedef int8_t BytesAt __attribute__((vector_size(W * 2), aligned(1), may_alias));
  typedef int16_t Halves __attribute__((vector_size(W * 2)));
  typedef int16_t Pairs __attribute__((vector_size(W * 4)));
};

template <int W>
using FloatV = typename Vec<W>::Float;

template <int W>
inline FloatV<W> broadcast(float x) {
  return x - FloatV<W>{};
}

template <int W>
inline FloatV<W> load(const float* p) {
  return *reinterpret_cast<const typename Vec<W>::FloatAt*>(p);
}

template <int W>
inline FloatV<W> load(const bfloat16* p) {
#if defined(__AVX512F__)
  if constexpr (W == 16) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return (FloatV<W>)_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16);
  }
#endif
#if defined(__AVX2__)
  if constexpr (W == 8) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return (FloatV<W>)_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16);
  }
#endif
  typename Vec<W>::Short bits = *reinterpret_cast<const typename Vec<W>::ShortAt*>(p);
  typename Vec<W>::UInt wide = __builtin_convertvector(bits, typename Vec<W>::UInt) << 16;
  return (FloatV<W>)wide;
}

inline float to_float(float x) { return x; }

inline float to_float(int8_t x) { return x; }

inline float to_float(bfloat16 x) {
  uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float result;
  std::memcpy(&result, &bits, 4);
  return result;
}

inline float to_float(half x) {
#if defined(__F16C__)
  return _cvtsh_ss(x.bits);
#else
  // Shifting the exponent into place leaves a power of two to make good; subnormals come out
  // exact, infinity and NaN are set apart.
  uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000) << 16;
  uint32_t rest = static_cast<uint32_t>(x.bits & 0x7fff) << 13;
  if (rest >= (0x7c00u << 13)) {
    rest |= 0x7f800000u;
  } else {
    float scaled;
    std::memcpy(&scaled, &rest, 4);
    scaled *= 0x1p112f;
    std::memcpy(&rest, &scaled, 4);
  }
  uint32_t bits = sign | rest;
  float result;
  std::memcpy(&result, &bits, 4);
  return result;
#endif
}

template <int W>
inline FloatV<W> load(const half* p) {
#if defined(__F16C__)
  if constexpr (W == 8) {
    return (FloatV<W>)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
#endif
#if defined(__AVX512F__)
  if constexpr (W == 16) {
    return (FloatV<W>)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
#endif
  FloatV<W> result;
  for (int i = 0; i < W; ++i) result[i] = to_float(p[i]);
  return result;
}

template <int W>
inline void store(float* p, FloatV<W> x) {
  *reinterpret_cast<typename Vec<W>::FloatAt*>(p) = x;
}

inline void store_scalar(float* p, float x) { *p = x; }

inline void store_scalar(bfloat16* p, float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if (x != x) {
    p->bits = 0x7fc0;
  } else {
    p->bits = static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
  }
}

inline void store_scalar(half* p, float x) {
#if defined(__F16C__)
  p->bits = static_cast<uint16_t>(_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT));
#else
  _Float16 narrow = static_cast<_Float16>(x);
  std::memcpy(&p->bits, &narrow, 2);
#endif
}

#if defined(__AVX512BF16__)
inline void store(bfloat16* p, FloatV<16> x) {
  const __m256bh narrow = _mm512_cvtneps_pbh((__m512)x);
  std::memcpy(p, &narrow, sizeof(narrow));
}
#endif

// The sums of four vectors' lanes, in two rounds of pairwise additions and one across halves.
inline Vec<4>::Float sum_lanes(FloatV<8> a, FloatV<8> b, FloatV<8> c, FloatV<8> d) {
  const FloatV<8> ab = __builtin_shufflevector(a, b, 0, 8, 1, 9, 4, 12, 5, 13) +
                       __builtin_shufflevector(a, b, 2, 10, 3, 11, 6, 14, 7, 15);
  const FloatV<8> cd = __builtin_shufflevector(c, d, 0, 8, 1, 9, 4, 12, 5, 13) +
                       __builtin_shufflevector(c, d, 2, 10, 3, 11, 6, 14, 7, 15);
  const FloatV<8> abcd = __builtin_shufflevector(ab, cd, 0, 1, 8, 9, 4, 5, 12, 13) +
                         __builtin_shufflevector(ab, cd, 2, 3, 10, 11, 6, 7, 14, 15);
  return __builtin_shufflevector(abcd, abcd, 0, 1, 2, 3) +
         __builtin_shufflevector(abcd, abcd, 4, 5, 6, 7);
}

inline FloatV<8> fold(FloatV<16> x) {
  return __builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7) +
         __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15);
}

inline Vec<4>::Float sum_lanes(FloatV<16> a, FloatV<16> b, FloatV<16> c, FloatV<16> d) {
  return sum_lanes(fold(a), fold(b), fold(c), fold(d));
}

template <int W>
inline float horizontal_sum(FloatV<W> x) {
  return sum_lanes(x, x, x, x)[0];
}

template <typename Float>
inline Float larger(Float a, Float b) {
  return a > b ? a : b;
}

inline float horizontal_max(FloatV<8> x) {
  const auto four = larger(__builtin_shufflevector(x, x, 0, 1, 2, 3),
                           __builtin_shufflevector(x, x, 4, 5, 6, 7));
  const auto two = larger(four, __builtin_shufflevector(four, four, 2, 3, 0, 1));
  return larger<float>(two[0], two[1]);
}

inline float horizontal_max(FloatV<16> x) {
  return horizontal_max(larger(__builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7),
                               __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15)));
}

template <typename Mask>
inline bool any(Mask mask) {
#if defined(__AVX512F__)
  if constexpr (sizeof(Mask) == 64) return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask);
#endif
  uint64_t words[sizeof(Mask) / 8];
  std::memcpy(words, &mask, sizeof(Mask));
  uint64_t all = 0;
  for (uint64_t word : words) all |= word;
  return all != 0;
}

// exp(x - n ln 2) where that is near zero. Cephes' expf polynomial.
template <int W>
inline FloatV<W> exp_of_rest(FloatV<W> x, FloatV<W> n) {
  FloatV<W> r = x - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  FloatV<W> y = broadcast<W>(1.9875691500e-4f);
  y = y * r + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  return y * r * r + r + 1.0f;
}

// exp for x <= 0 within 2 units in the last place; 0 below -87.
template <int W>
inline FloatV<W> exp_negative(FloatV<W> x) {
  using Int = typename Vec<W>::Int;
  constexpr float kLog2E = 1.44269504088896341f;
#if defined(__AVX512F__)
  if constexpr (W == 16) {
    const __mmask16 seen = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-87.0f), _CMP_NLT_UQ);
    const __m512 n = _mm512_roundscale_ps((__m512)(x * kLog2E), _MM_FROUND_TO_NEAREST_INT);
    return (FloatV<W>)_mm512_maskz_scalef_ps(seen, (__m512)exp_of_rest<W>(x, (FloatV<W>)n), n);
  }
#endif
  const Int below = x < broadcast<W>(-87.0f);
  x = below ? broadcast<W>(-87.0f) : x;
  // Rounds to the nearest whole number: truncation after moving away from zero by a half.
  const Int whole = __builtin_convertvector(x * kLog2E - 0.5f, Int);
  const FloatV<W> y = exp_of_rest<W>(x, __builtin_convertvector(whole, FloatV<W>));
  const FloatV<W> power = (FloatV<W>)((whole + 127) << 23);
  return below ? FloatV<W>{} : y * power;
}

// What follows computes with pairs of 16-bit integers, one in each lane of a vector of int32.
template <int W>
using IntV = typename Vec<W>::Int;

// Widens 2 W bytes.
template <int W>
inline IntV<W> load_pairs(const int8_t* p) {
#if defined(__AVX512BW__)
  if constexpr (W == 16) {
    return (IntV<W>)_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
#endif
#if defined(__AVX2__)
  if constexpr (W == 8) {
    return (IntV<W>)_mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
#endif
  const typename Vec<W>::BytesAt bytes = *reinterpret_cast<const typename Vec<W>::BytesAt*>(p);
  return (IntV<W>)__builtin_convertvector(bytes, typename Vec<W>::Pairs);
}

template <int W>
inline IntV<W> broadcast_pair(const int16_t* p) {
  int32_t pair;
  std::memcpy(&pair, p, sizeof(pair));
  return pair - IntV<W>{};
}

// sum + a[0] * b[0] + a[1] * b[1] in each lane.
template <int W>
inline IntV<W> add_products(IntV<W> sum, IntV<W> a, IntV<W> b) {
#if defined(__AVX512VNNI__)
  if constexpr (W == 16) return (IntV<W>)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#elif defined(__AVX512BW__)
  if constexpr (W == 16) return sum + (IntV<W>)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  if constexpr (W == 8) {
    sum += (IntV<W>)_mm256_madd_epi16((__m256i)a, (__m256i)b);
    // In place: GCC spends a second register on each sum otherwise, and has too few.
    asm("" : "+x"(sum));
    return sum;
  }
#elif defined(__SSE2__)
  if constexpr (W == 8) {
    __m128i left[2], right[2];
    std::memcpy(left, &a, sizeof(a));
    std::memcpy(right, &b, sizeof(b));
    for (int i = 0; i < 2; ++i) left[i] = _mm_madd_epi16(left[i], right[i]);
    std::memcpy(&a, left, sizeof(a));
    return sum + a;
  }
#endif
  return sum + (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16);
}

// The lower 16 bits of each lane.
template <int W>
inline void store_low_halves(int16_t* p, IntV<W> x) {
  const typename Vec<W>::Halves halves = __builtin_convertvector(x, typename Vec<W>::Halves);
  std::memcpy(p, &halves, sizeof(halves));
}

}  // namespace pagewire
