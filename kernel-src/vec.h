// Vectors of LK_WIDTH floats and what the kernels need of them, written with the compiler's vector extension; the few
// conversions it does badly use intrinsics of the level being compiled.
//
// Everything here has internal linkage: one level is compiled with instructions another processor may lack, so no
// function may be merged with another file's by the linker. For the same reason no standard template is used.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

constexpr int64_t W = LK_WIDTH;

typedef float VF __attribute__((vector_size(LK_WIDTH * 4)));
typedef int32_t VI __attribute__((vector_size(LK_WIDTH * 4)));
typedef uint32_t VU __attribute__((vector_size(LK_WIDTH * 4)));
typedef uint16_t VH __attribute__((vector_size(LK_WIDTH * 2)));

struct BF16 {
  uint16_t bits;
};
struct F16 {
  uint16_t bits;
};

#define LK_INLINE static inline __attribute__((always_inline))

LK_INLINE VF set1(float v) { return VF{} + v; }
LK_INLINE VU bits_of(VF v) { return (VU)v; }
LK_INLINE VF float_of(VU v) { return (VF)v; }
LK_INLINE VF select(VI mask, VF yes, VF no) { return mask ? yes : no; }
LK_INLINE VU select(VI mask, VU yes, VU no) { return mask ? yes : no; }
// The second operand where one is NaN, as the processor's instructions have it.
#if defined(__AVX512F__)
LK_INLINE VF vmin(VF a, VF b) { return (VF)_mm512_min_ps((__m512)a, (__m512)b); }
LK_INLINE VF vmax(VF a, VF b) { return (VF)_mm512_max_ps((__m512)a, (__m512)b); }
#elif defined(__AVX2__)
LK_INLINE VF vmin(VF a, VF b) { return (VF)_mm256_min_ps((__m256)a, (__m256)b); }
LK_INLINE VF vmax(VF a, VF b) { return (VF)_mm256_max_ps((__m256)a, (__m256)b); }
#else
LK_INLINE VF vmin(VF a, VF b) { return a < b ? a : b; }
LK_INLINE VF vmax(VF a, VF b) { return a > b ? a : b; }
#endif

template <class T>
LK_INLINE T load_as(const void* p) {
  T v;
  memcpy(&v, p, sizeof v);
  return v;
}

#if defined(__AVX512F__)
LK_INLINE VF widen_bf16(VH h) { return (VF)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)h), 16); }
#elif defined(__AVX2__)
LK_INLINE VF widen_bf16(VH h) { return (VF)_mm256_slli_epi32(_mm256_cvtepu16_epi32((__m128i)h), 16); }
#else
LK_INLINE VF widen_bf16(VH h) { return float_of(__builtin_convertvector(h, VU) << 16); }
#endif

// Round to nearest even; a NaN keeps its sign and becomes quiet.
LK_INLINE VU bf16_bits(VF v) {
  VU u = bits_of(v);
  VU rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  return select(v == v, rounded, (u >> 16) | 0x40u);
}
#if defined(__AVX512F__)
LK_INLINE VH narrow_bf16_exactly(VF v) { return (VH)_mm512_cvtepi32_epi16((__m512i)bf16_bits(v)); }
#if defined(__AVX512BF16__)
// The instruction does the same but takes subnormals for 0.
LK_INLINE VH narrow_bf16(VF v) {
  constexpr int subnormal = 0x20;
  if (__builtin_expect(_mm512_fpclass_ps_mask((__m512)v, subnormal), 0)) return narrow_bf16_exactly(v);
  return (VH)_mm512_cvtneps_pbh((__m512)v);
}
#else
LK_INLINE VH narrow_bf16(VF v) { return narrow_bf16_exactly(v); }
#endif
#elif defined(__AVX2__)
LK_INLINE VH narrow_bf16(VF v) {
  __m256i u = (__m256i)bf16_bits(v);
  return (VH)_mm_packus_epi32(_mm256_castsi256_si128(u), _mm256_extracti128_si256(u, 1));
}
#else
LK_INLINE VH narrow_bf16(VF v) { return __builtin_convertvector(bf16_bits(v), VH); }
#endif

#if defined(__AVX512F__)
LK_INLINE VF widen_f16(VH h) { return (VF)_mm512_cvtph_ps((__m256i)h); }
LK_INLINE VH narrow_f16(VF v) { return (VH)_mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT); }
#elif defined(__AVX2__)
LK_INLINE VF widen_f16(VH h) { return (VF)_mm256_cvtph_ps((__m128i)h); }
LK_INLINE VH narrow_f16(VF v) { return (VH)_mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT); }
#else
// fp16 by integer arithmetic: move the exponent, then let one fp32 subtraction normalise subnormals.
LK_INLINE VF widen_f16(VH h) {
  VU u = __builtin_convertvector(h, VU);
  VU magnitude = (u & 0x7fffu) << 13;
  VU exponent = magnitude & 0x0f800000u;
  VU moved = magnitude + (112u << 23);
  VU special = moved + (112u << 23);
  VU subnormal = bits_of(float_of(moved + (1u << 23)) - float_of(VU{} + (113u << 23)));
  VU value = select(exponent == 0x0f800000u, special, select(exponent == 0u, subnormal, moved));
  return float_of(value | ((u & 0x8000u) << 16));
}
LK_INLINE VH narrow_f16(VF v) {
  VU u = bits_of(v);
  VU sign = u & 0x80000000u;
  VU a = u ^ sign;
  VU magic = VU{} + (126u << 23);
  VU subnormal = bits_of(float_of(a) + float_of(magic)) - magic;
  VU normal = (a - (112u << 23) + 0xfffu + ((a >> 13) & 1u)) >> 13;
  VU special = select(a > 0x7f800000u, VU{} + 0x7e00u, VU{} + 0x7c00u);
  VU value = select(a >= 0x47800000u, special, select(a < (113u << 23), subnormal, normal));
  return __builtin_convertvector(value | (sign >> 16), VH);
}
#endif

LK_INLINE VF load(const float* p) { return load_as<VF>(p); }
LK_INLINE VF load(const BF16* p) { return widen_bf16(load_as<VH>(p)); }
LK_INLINE VF load(const F16* p) { return widen_f16(load_as<VH>(p)); }
LK_INLINE void store(float* p, VF v) { memcpy(p, &v, sizeof v); }
LK_INLINE void store(BF16* p, VF v) {
  VH h = narrow_bf16(v);
  memcpy(p, &h, sizeof h);
}
LK_INLINE void store(F16* p, VF v) {
  VH h = narrow_f16(v);
  memcpy(p, &h, sizeof h);
}

// Fewer bytes than `room`, an even number: a call of memcpy takes longer than what it is for here.
template <int64_t room>
LK_INLINE void copy_some(void* to, const void* from, int64_t bytes) {
  char* t = (char*)to;
  const char* f = (const char*)from;
  if (room > 32 && (bytes & 32)) memcpy(t, f, 32), t += 32, f += 32;
  if (room > 16 && (bytes & 16)) memcpy(t, f, 16), t += 16, f += 16;
  if (room > 8 && (bytes & 8)) memcpy(t, f, 8), t += 8, f += 8;
  if (room > 4 && (bytes & 4)) memcpy(t, f, 4), t += 4, f += 4;
  if (bytes & 2) memcpy(t, f, 2);
}

// The first n of W elements, n below W, the others 0; never touches memory behind them.
#if defined(__AVX512F__)
LK_INLINE uint32_t first(int64_t n) { return (1u << n) - 1u; }
LK_INLINE VF load_part(const float* p, int64_t n) { return (VF)_mm512_maskz_loadu_ps((__mmask16)first(n), p); }
LK_INLINE VF load_part(const BF16* p, int64_t n) {
  return widen_bf16((VH)_mm256_maskz_loadu_epi16((__mmask16)first(n), p));
}
LK_INLINE VF load_part(const F16* p, int64_t n) {
  return widen_f16((VH)_mm256_maskz_loadu_epi16((__mmask16)first(n), p));
}
LK_INLINE void store_part(float* p, VF v, int64_t n) { _mm512_mask_storeu_ps(p, (__mmask16)first(n), (__m512)v); }
LK_INLINE void store_part(BF16* p, VF v, int64_t n) {
  _mm256_mask_storeu_epi16(p, (__mmask16)first(n), (__m256i)narrow_bf16(v));
}
LK_INLINE void store_part(F16* p, VF v, int64_t n) {
  _mm256_mask_storeu_epi16(p, (__mmask16)first(n), (__m256i)narrow_f16(v));
}
#else
template <class T>
LK_INLINE VF load_part(const T* p, int64_t n) {
  T part[W] = {};
  copy_some<sizeof part>(part, p, n * (int64_t)sizeof(T));
  return load(part);
}
template <class T>
LK_INLINE void store_part(T* p, VF v, int64_t n) {
  T part[W];
  store(part, v);
  copy_some<sizeof part>(p, part, n * (int64_t)sizeof(T));
}
#endif

LK_INLINE VF round_to(VF v, const float*) { return v; }
#if defined(__AVX512BF16__)
LK_INLINE VF round_to(VF v, const BF16*) { return widen_bf16(narrow_bf16(v)); }
#else
LK_INLINE VF round_to(VF v, const BF16*) { return float_of(bf16_bits(v) << 16); }
#endif
LK_INLINE VF round_to(VF v, const F16*) { return widen_f16(narrow_f16(v)); }
template <class T>
LK_INLINE VF round_to(VF v) {
  return round_to(v, static_cast<const T*>(nullptr));
}

// Rounding that leaves the values which need more to the caller: `rare` tells whether v has some, and round_to and
// store are what they need.
#if defined(__AVX512F__)
typedef __mmask16 Mask;
LK_INLINE bool any(Mask m) { return m != 0; }
#else
typedef VI Mask;
#if defined(__AVX2__)
LK_INLINE bool any(Mask m) { return !_mm256_testz_si256((__m256i)m, (__m256i)m); }
#else
LK_INLINE bool any(Mask m) {
  int32_t all = 0;
  for (int64_t i = 0; i < W; ++i) all |= m[i];
  return all != 0;
}
#endif
#endif
template <class T>
constexpr bool has_rare() {
  return __is_same(T, BF16);
}
LK_INLINE Mask rare(VF v) {
#if defined(__AVX512BF16__)
  return _mm512_fpclass_ps_mask((__m512)v, 0x20);  // subnormals
#elif defined(__AVX512F__)
  return _mm512_cmp_ps_mask((__m512)v, (__m512)v, _CMP_UNORD_Q);
#else
  return v != v;
#endif
}
template <class T>
LK_INLINE VF quick_round_to(VF v) {
  if constexpr (!has_rare<T>()) return round_to<T>(v);
#if defined(__AVX512BF16__)
  return widen_bf16((VH)_mm512_cvtneps_pbh((__m512)v));
#else
  VU u = bits_of(v);
  return float_of((u + 0x7fffu + ((u >> 16) & 1u)) & 0xffff0000u);
#endif
}

// Non-temporal stores: a result that the caches cannot hold is then not read from memory before it is written. The
// address is a multiple of the vector; who reads it next needs end_of_streams between.
#if defined(__AVX2__)
constexpr bool kStreams = true;
LK_INLINE void stream(void* p, __m128i v) { _mm_stream_si128(static_cast<__m128i*>(p), v); }
LK_INLINE void stream(void* p, __m256i v) { _mm256_stream_si256(static_cast<__m256i*>(p), v); }
#if defined(__AVX512F__)
LK_INLINE void stream(void* p, __m512i v) { _mm512_stream_si512(static_cast<__m512i*>(p), v); }
#endif
LK_INLINE void end_of_streams() { _mm_sfence(); }
#else
constexpr bool kStreams = false;
LK_INLINE void end_of_streams() {}
#endif

template <bool streamed, class V>
LK_INLINE void write(void* p, V v) {
#if defined(__AVX2__)
  if constexpr (streamed) return stream(p, v);
#endif
  memcpy(p, &v, sizeof v);
}

// 2 W values that are not rare.
template <bool streamed>
LK_INLINE void quick_store(float* p, VF a, VF b) {
#if defined(__AVX512F__)
  write<streamed>(p, (__m512i)a);
  write<streamed>(p + W, (__m512i)b);
#elif defined(__AVX2__)
  write<streamed>(p, (__m256i)a);
  write<streamed>(p + W, (__m256i)b);
#else
  store(p, a);
  store(p + W, b);
#endif
}
template <bool streamed>
LK_INLINE void quick_store(F16* p, VF a, VF b) {
#if defined(__AVX512F__)
  write<streamed>(p, (__m256i)narrow_f16(a));
  write<streamed>(p + W, (__m256i)narrow_f16(b));
#elif defined(__AVX2__)
  write<streamed>(p, (__m128i)narrow_f16(a));
  write<streamed>(p + W, (__m128i)narrow_f16(b));
#else
  store(p, a);
  store(p + W, b);
#endif
}
template <bool streamed>
LK_INLINE void quick_store(BF16* p, VF a, VF b) {
#if defined(__AVX512BF16__)
  write<streamed>(p, (__m512i)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a));
#else
  VU u = bits_of(a), v = bits_of(b);
  u = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  v = (v + 0x7fffu + ((v >> 16) & 1u)) >> 16;
#if defined(__AVX512F__)
  write<streamed>(p, _mm512_cvtepi32_epi16((__m512i)u));
  write<streamed>(p + W, _mm512_cvtepi32_epi16((__m512i)v));
#elif defined(__AVX2__)
  write<streamed>(p, _mm256_permute4x64_epi64(_mm256_packus_epi32((__m256i)u, (__m256i)v), 0xd8));
#else
  VH low = __builtin_convertvector(u, VH), high = __builtin_convertvector(v, VH);
  memcpy(p, &low, sizeof low);
  memcpy(p + W, &high, sizeof high);
#endif
#endif
}

// Sums of four vectors at once, and of one, in the same tree: a vector gives the same bits either way.
typedef float Four __attribute__((vector_size(16)));
#if defined(__AVX2__)
LK_INLINE Four sums_of_256(__m256 a, __m256 b, __m256 c, __m256 d) {
  __m256 t = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
  return (Four)_mm_add_ps(_mm256_castps256_ps128(t), _mm256_extractf128_ps(t, 1));
}
#endif
#if defined(__AVX512F__)
LK_INLINE __m256 halved(VF v) {
  return _mm256_add_ps(_mm512_castps512_ps256((__m512)v), _mm512_extractf32x8_ps((__m512)v, 1));
}
LK_INLINE Four sums(VF a, VF b, VF c, VF d) { return sums_of_256(halved(a), halved(b), halved(c), halved(d)); }
#elif defined(__AVX2__)
LK_INLINE Four sums(VF a, VF b, VF c, VF d) { return sums_of_256((__m256)a, (__m256)b, (__m256)c, (__m256)d); }
#else
LK_INLINE float sum_of_four(VF v) { return (v[0] + v[1]) + (v[2] + v[3]); }
LK_INLINE Four sums(VF a, VF b, VF c, VF d) {
  return Four{sum_of_four(a), sum_of_four(b), sum_of_four(c), sum_of_four(d)};
}
#endif
LK_INLINE float sum(VF v) { return sums(v, VF{}, VF{}, VF{})[0]; }

// In the order of halves: element i and i + n/2 first.
#if defined(__AVX2__)
LK_INLINE double sum_of_256(__m256d v) {
  __m128d half = _mm_add_pd(_mm256_castpd256_pd128(v), _mm256_extractf128_pd(v, 1));
  return _mm_cvtsd_f64(_mm_add_sd(half, _mm_unpackhi_pd(half, half)));
}
#endif
#if defined(__AVX512F__)
LK_INLINE double sum_in_double(VF v) {
  __m512d d = _mm512_add_pd(_mm512_cvtps_pd(_mm512_castps512_ps256((__m512)v)),
                            _mm512_cvtps_pd(_mm512_extractf32x8_ps((__m512)v, 1)));
  return sum_of_256(_mm256_add_pd(_mm512_castpd512_pd256(d), _mm512_extractf64x4_pd(d, 1)));
}
#elif defined(__AVX2__)
LK_INLINE double sum_in_double(VF v) {
  return sum_of_256(_mm256_add_pd(_mm256_cvtps_pd(_mm256_castps256_ps128((__m256)v)),
                                  _mm256_cvtps_pd(_mm256_extractf128_ps((__m256)v, 1))));
}
#else
LK_INLINE double sum_in_double(VF v) {
  typedef double VD __attribute__((vector_size(LK_WIDTH * 4)));
  typedef float Half __attribute__((vector_size(LK_WIDTH * 2)));
  Half half[2];
  memcpy(half, &v, sizeof v);
  VD d = __builtin_convertvector(half[0], VD) + __builtin_convertvector(half[1], VD);
  double part[W / 2];
  memcpy(part, &d, sizeof part);
  for (int64_t n = W / 4; n > 0; n /= 2) {
    for (int64_t i = 0; i < n; ++i) part[i] += part[i + n];
  }
  return part[0];
}
#endif

// e^x: split x = n ln 2 + r, a degree 6 polynomial in r, then the exponent. Relative error below 2 ulp; overflows to
// infinity and underflows through the subnormals to 0 as expf does, NaN stays NaN.
LK_INLINE VF vexp(VF x) {
  // The bounds come first: a NaN passes both, and then every step.
  VF clamped = vmax(set1(-104.0f), vmin(set1(89.0f), x));
  VF n = clamped * 1.44269504088896341f;
  n = (n + 12582912.0f) - 12582912.0f;
  VF r = clamped - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  VF p = set1(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
#if defined(__AVX512F__)
  return (VF)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
  // 2^n in two factors: n reaches 129 and -150, outside one exponent field.
  VI whole = __builtin_convertvector(n, VI);
  VI first = whole >> 1;
  VI second = whole - first;
  return p * float_of((VU)(first + 127) << 23) * float_of((VU)(second + 127) << 23);
#endif
}

LK_INLINE VF sigmoid(VF x) { return 1.0f / (1.0f + vexp(-x)); }

// 1 + erf(x), from the Chebyshev fit of erfc of W. J. Cody's kind in Numerical Recipes ("erfcc", relative
// error 1.2e-7).
LK_INLINE VF one_plus_erf(VF x) {
  VF z = select(x < 0.0f, -x, x);
  VF t = 1.0f / (1.0f + 0.5f * z);
  VF p = set1(0.17087277f);
  p = p * t - 0.82215223f;
  p = p * t + 1.48851587f;
  p = p * t - 1.13520398f;
  p = p * t + 0.27886807f;
  p = p * t - 0.18628806f;
  p = p * t + 0.09678418f;
  p = p * t + 0.37409196f;
  p = p * t + 1.00002368f;
  p = p * t - 1.26551223f;
  VF erfc = t * vexp(p - z * z);
  return select(x < 0.0f, erfc, 2.0f - erfc);
}

}  // namespace
