// Matrix products, fp32 accumulation, for one level. Included by level.inl.
//
// The weight's rows lie along k, so a register tile of MR x NR vectors runs along k and is summed at the end: nothing
// is transposed or packed (but for AVX2's many rows, packed.inl), and a weight is widened in registers. With few rows
// of x it is then read at the speed of memory; with many the widening hides behind the multiplications, so that a
// widened copy in the cache gained nothing at any number of rows.

namespace {

// The k of one pass: the fp32 rows of a register tile stay in the first-level cache.
constexpr int64_t kDepth = 1024;
constexpr int64_t kTileM = 256;
#ifdef LK_PACKED
constexpr int64_t kTileN = 128;
#else
constexpr int64_t kTileN = 32;
#endif

template <class WT>
struct Widening {  // x in fp32, w widened in registers
  typedef float X;
  typedef WT Weight;
  typedef VF Part;
  static constexpr int64_t step = W;
  LK_INLINE VF x(const X* p) { return load(p); }
  LK_INLINE VF x(const X* p, int64_t n) { return load_part(p, n); }
  LK_INLINE VF w(const Weight* p) { return load(p); }
  LK_INLINE VF w(const Weight* p, int64_t n) { return load_part(p, n); }
  LK_INLINE VF add(VF sum, VF a, VF b) { return sum + a * b; }
};

#if defined(__AVX512BF16__)
struct Pairing {  // x and w in bf16, products of pairs by the processor
  typedef BF16 X;
  typedef BF16 Weight;
  typedef __m512bh Part;
  static constexpr int64_t step = 2 * W;
  LK_INLINE Part x(const X* p) { return load_as<Part>(p); }
  LK_INLINE Part x(const X* p, int64_t n) { return (Part)_mm512_maskz_loadu_epi16((__mmask32)((1u << n) - 1u), p); }
  LK_INLINE Part w(const Weight* p) { return x(p); }
  LK_INLINE Part w(const Weight* p, int64_t n) { return x(p, n); }
  LK_INLINE VF add(VF sum, Part a, Part b) { return (VF)_mm512_dpbf16_ps((__m512)sum, a, b); }
};
#endif

template <class E>
constexpr int64_t depth_of() {
  return kDepth * 4 / (int64_t)sizeof(typename E::X);
}

template <class E, int MR, int NR>
LK_INLINE void register_step(const typename E::X* x, int64_t ldx, const typename E::Weight* w, int64_t ldw,
                             VF (&acc)[MR][NR]) {
  typename E::Part wv[NR];
#pragma GCC unroll 8
  for (int n = 0; n < NR; ++n) wv[n] = E::w(w + n * ldw);
#pragma GCC unroll 8
  for (int m = 0; m < MR; ++m) {
    typename E::Part xv = E::x(x + m * ldx);
#pragma GCC unroll 8
    for (int n = 0; n < NR; ++n) acc[m][n] = E::add(acc[m][n], xv, wv[n]);
  }
}

template <class E, int MR, int NR>
LK_INLINE void register_tile(const typename E::X* x, int64_t ldx, const typename E::Weight* w, int64_t ldw, int64_t k,
                             float* c, int64_t ldc, bool first) {
  VF acc[MR][NR] = {};
  int64_t i = 0;
  constexpr int64_t bytes = sizeof(typename E::Weight), half_line = E::step * bytes > 32 ? E::step : 32 / bytes;
  for (; i + half_line <= k; i += half_line) {
    // Ask for the rows that come next, for a row ends before the processor sees that it is read in order; twice for a
    // line, for some requests are dropped. A prefetch may name memory behind the weight: it reads nothing there.
#pragma GCC unroll 8
    for (int n = 0; n < NR; ++n) {
      __builtin_prefetch((const void*)((uintptr_t)(w + n * ldw + i) + (uintptr_t)(NR * ldw * bytes)), 0, 2);
    }
#pragma GCC unroll 8
    for (int64_t at = 0; at < half_line; at += E::step)
      register_step<E, MR, NR>(x + i + at, ldx, w + i + at, ldw, acc);
  }
  for (; i + E::step <= k; i += E::step) register_step<E, MR, NR>(x + i, ldx, w + i, ldw, acc);
  if (i < k) {
#pragma GCC unroll 8
    for (int m = 0; m < MR; ++m) {
      typename E::Part xv = E::x(x + m * ldx + i, k - i);
#pragma GCC unroll 8
      for (int n = 0; n < NR; ++n) acc[m][n] = E::add(acc[m][n], xv, E::w(w + n * ldw + i, k - i));
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < MR; ++m) {
#pragma GCC unroll 8
    for (int n = 0; n < NR; n += 4) {
      constexpr VF none = {};
      Four v = sums(acc[m][n], n + 1 < NR ? acc[m][n + 1] : none, n + 2 < NR ? acc[m][n + 2] : none,
                    n + 3 < NR ? acc[m][n + 3] : none);
      float* to = c + m * ldc + n;
      constexpr int64_t size = (NR < 4 ? NR : 4) * sizeof(float);
      if (!first) {
        Four old = {};
        memcpy(&old, to, size);
        v += old;
      }
      memcpy(to, &v, size);
    }
  }
}

template <class E, int MR>
__attribute__((noinline)) void strip(const typename E::X* x, int64_t ldx, const typename E::Weight* w, int64_t ldw,
                                     int64_t nw, int64_t k, float* c, int64_t ldc, bool first) {
  // With one or two rows of x registers are left: more rows of w at once keep more of memory's requests under way.
  // Where 4 x 3 sums fill the registers, 2 x 4 are what two rows have.
  constexpr int NR = MR == 1 ? 8 : MR > 2 ? LK_NR : LK_MR > 4 ? 8 : 4;
  static_assert(NR <= 4 || NR % 4 == 0, "sums of four");
  constexpr int64_t depth = depth_of<E>();
  int64_t n = 0;
  for (; n + NR <= nw; n += NR) {
    for (int64_t i = 0; i < k; i += depth) {
      int64_t part = k - i < depth ? k - i : depth;
      register_tile<E, MR, NR>(x + i, ldx, w + n * ldw + i, ldw, part, c + n, ldc, first && i == 0);
    }
  }
  for (; n < nw; ++n) {
    for (int64_t i = 0; i < k; i += depth) {
      int64_t part = k - i < depth ? k - i : depth;
      register_tile<E, MR, 1>(x + i, ldx, w + n * ldw + i, ldw, part, c + n, ldc, first && i == 0);
    }
  }
}

// c[m, nw] (+)= x[m, k] w[nw, k]^T, in strips of about the same height: a low one loads as much of w as a high one.
template <class E>
void block(const typename E::X* x, int64_t ldx, int64_t m, const typename E::Weight* w, int64_t ldw, int64_t nw,
           int64_t k, float* c, int64_t ldc, bool first) {
  int64_t strips = (m + LK_MR - 1) / LK_MR;
  for (int64_t r = 0, left = m; left > 0; --strips) {
    int64_t rows = (left + strips - 1) / strips;
    const typename E::X* xr = x + r * ldx;
    float* cr = c + r * ldc;
    switch (rows) {
      case 1:
        strip<E, 1>(xr, ldx, w, ldw, nw, k, cr, ldc, first);
        break;
      case 2:
        strip<E, 2>(xr, ldx, w, ldw, nw, k, cr, ldc, first);
        break;
      case 3:
        strip<E, 3>(xr, ldx, w, ldw, nw, k, cr, ldc, first);
        break;
      case 4:
        strip<E, 4>(xr, ldx, w, ldw, nw, k, cr, ldc, first);
        break;
#if LK_MR > 4
      case 5:
        strip<E, 5>(xr, ldx, w, ldw, nw, k, cr, ldc, first);
        break;
      case 6:
        strip<E, 6>(xr, ldx, w, ldw, nw, k, cr, ldc, first);
        break;
#endif
    }
    r += rows;
    left -= rows;
  }
}

// Some rows of the weight against the tile's rows of x. With one strip the weight is read along its rows, with several
// in passes that leave the strips of x in the cache; sums are cut at the same places.
template <class E>
void direct(const ProductArgs& a, int64_t m0, int64_t m, int64_t n0, int64_t nw, float* c) {
  const typename E::X* x = static_cast<const typename E::X*>(a.x) + m0 * a.ldx;
  const typename E::Weight* w = static_cast<const typename E::Weight*>(a.w) + n0 * a.ldw;
  const int64_t pass = m <= LK_MR ? a.k : depth_of<E>();
  for (int64_t k = 0; k < a.k; k += pass) {
    block<E>(x + k, a.ldx, m, w + k, a.ldw, nw, a.k - k < pass ? a.k - k : pass, c, kTileN, k == 0);
  }
}

}  // namespace

#ifdef LK_PACKED
#include "packed.inl"
#endif

namespace {

LK_INLINE VF bias_part(const ProductArgs& a, int64_t at, int64_t n) {
  if (a.bias == nullptr) return VF{};
  if (a.bias_type == DType::bf16) return get(static_cast<const BF16*>(a.bias) + at, n);
  if (a.bias_type == DType::f16) return get(static_cast<const F16*>(a.bias) + at, n);
  return get(static_cast<const float*>(a.bias) + at, n);
}

template <class WT, class Y>
void finish_plain(const ProductArgs& a, int64_t m0, int64_t m, int64_t n0, int64_t nw, const float* c) {
  for (int64_t r = 0; r < m; ++r) {
    Y* y = static_cast<Y*>(a.y) + (m0 + r) * a.ldy + n0;
    each_vector(nw, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
      put(y + i, round_to<WT>(get(c + r * kTileN + i, n) + bias_part(a, n0 + i, n)), n);
    });
  }
}

template <class WT, class Y, Activation act>
void finish_pair(const ProductArgs& a, int64_t m0, int64_t m, int64_t n0, int64_t nw, const float* c) {
  const float* up = c + kTileN / 2;
  for (int64_t r = 0; r < m; ++r) {
    Y* y = static_cast<Y*>(a.y) + (m0 + r) * a.ldy + n0;
    each_vector(nw, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
      VF g = round_to<WT>(get(c + r * kTileN + i, n) + bias_part(a, n0 + i, n));
      VF u = round_to<WT>(get(up + r * kTileN + i, n) + bias_part(a, a.pair + n0 + i, n));
      put(y + i, round_to<WT>(round_to<WT>(activate<act>(g)) * u), n);
    });
  }
}

template <class WT, class Y>
void finish(const ProductArgs& a, int64_t m0, int64_t m, int64_t n0, int64_t nw, const float* c) {
  if (a.pair == 0) return finish_plain<WT, Y>(a, m0, m, n0, nw, c);
  if (a.activation == Activation::silu) return finish_pair<WT, Y, Activation::silu>(a, m0, m, n0, nw, c);
  if (a.activation == Activation::gelu) return finish_pair<WT, Y, Activation::gelu>(a, m0, m, n0, nw, c);
  finish_pair<WT, Y, Activation::gelu_tanh>(a, m0, m, n0, nw, c);
}

template <class WT>
void multiply(const ProductArgs& a, int64_t m0, int64_t m, int64_t n0, int64_t nw, float* c, float* panel) {
#ifdef LK_PACKED
  // By the rows of the whole product, not of the tile, whose height depends on the number of threads.
  if (a.m >= kPackedRows) return packed<WT>(a, m0, m, n0, nw, c, panel);
#elif defined(__AVX512BF16__)
  if (a.w_type == DType::bf16) return direct<Pairing>(a, m0, m, n0, nw, c);
#endif
  (void)panel;
  direct<Widening<WT>>(a, m0, m, n0, nw, c);
}

template <class WT>
void product_from(const ProductArgs& a, int64_t task, float* scratch) {
  int64_t tiles_m = (a.m + a.tile_m - 1) / a.tile_m;
  int64_t m0 = task % tiles_m * a.tile_m, m = a.m - m0 < a.tile_m ? a.m - m0 : a.tile_m;
  int64_t columns = a.pair ? a.pair : a.n, tile = a.pair ? a.tile_n / 2 : a.tile_n;
  int64_t n0 = task / tiles_m * tile, nw = columns - n0 < tile ? columns - n0 : tile;
  float *c = scratch, *panel = scratch + kTileM * kTileN;
  multiply<WT>(a, m0, m, n0, nw, c, panel);
  if (a.pair) multiply<WT>(a, m0, m, a.pair + n0, nw, c + kTileN / 2, panel);
  if (a.y_type == DType::f32) {
    finish<WT, float>(a, m0, m, n0, nw, c);
  } else {
    finish<WT, WT>(a, m0, m, n0, nw, c);
  }
}

#ifdef LK_PACKED
constexpr int64_t kScratch = (kTileM * kTileN + kPanelDepth * kPanelWidth) * (int64_t)sizeof(float);
#else
constexpr int64_t kScratch = kTileM * kTileN * (int64_t)sizeof(float);
#endif

void product_level(const ProductArgs& a, int64_t task, void* scratch) {
  float* s = static_cast<float*>(scratch);
  if (a.w_type == DType::bf16) return product_from<BF16>(a, task, s);
  if (a.w_type == DType::f16) return product_from<F16>(a, task, s);
  product_from<float>(a, task, s);
}

DType operand_type_level(DType w_type) {
#if defined(__AVX512BF16__)
  return w_type == DType::bf16 ? DType::bf16 : DType::f32;
#else
  (void)w_type;
  return DType::f32;
#endif
}

template <class X, class Y>
void copy_rows(const void* x, int64_t ldx, void* y, int64_t ldy, int64_t width, int64_t rows) {
  for (int64_t r = 0; r < rows; ++r) {
    const X* from = static_cast<const X*>(x) + r * ldx;
    Y* to = static_cast<Y*>(y) + r * ldy;
    each_vector(width, [&](int64_t i, int64_t n) __attribute__((always_inline)) { put(to + i, get(from + i, n), n); });
  }
}

void to_operand_level(const void* x, int64_t ldx, DType x_type, void* operand, int64_t ld, DType operand_type,
                      int64_t width, int64_t rows) {
  if (operand_type == DType::bf16) return copy_rows<BF16, BF16>(x, ldx, operand, ld, width, rows);
  if (x_type == DType::bf16) return copy_rows<BF16, float>(x, ldx, operand, ld, width, rows);
  if (x_type == DType::f16) return copy_rows<F16, float>(x, ldx, operand, ld, width, rows);
  copy_rows<float, float>(x, ldx, operand, ld, width, rows);
}

}  // namespace
