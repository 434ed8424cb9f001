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
constexpr int64_t kFarBytes = 1024;  // how far ahead of far rows memory is asked
#ifdef LK_PACKED
constexpr int64_t kTileN = 128;
#else
constexpr int64_t kTileN = 32;
#endif

// How one multiplies: what is read of x and w in `step` elements of k, as `parts` pairs of vectors, and how a pair is
// added to a sum. `n` elements are read where fewer are left; x is full.
template <class WT>
struct Widening {  // x in fp32, w widened in registers
  typedef float X;
  typedef WT Weight;
  typedef VF Part;
  typedef VF Sum;
  static constexpr int parts = 1;
  static constexpr int64_t step = W;
  template <int part>
  LK_INLINE Part x(const X* p) {
    return load(p);
  }
  template <int part>
  LK_INLINE Part w(const Weight* p) {
    return load(p);
  }
  template <int part>
  LK_INLINE Part w(const Weight* p, int64_t n) {
    return load_part(p, n);
  }
  LK_INLINE Sum add(Sum sum, Part a, Part b) { return sum + a * b; }
  LK_INLINE VF total(Sum sum) { return sum; }
};

#if defined(__AVX512BF16__)
struct Pairing {  // x and w in bf16, products of pairs by the processor, which takes subnormals for 0
  typedef BF16 X;
  typedef BF16 Weight;
  typedef __m512bh Part;
  typedef VF Sum;
  static constexpr int parts = 1;
  static constexpr int64_t step = 2 * W;
  template <int part>
  LK_INLINE Part x(const X* p) {
    return load_as<Part>(p);
  }
  template <int part>
  LK_INLINE Part w(const Weight* p) {
    return load_as<Part>(p);
  }
  template <int part>
  LK_INLINE Part w(const Weight* p, int64_t n) {
    return (Part)_mm512_maskz_loadu_epi16((__mmask32)first(n), p);
  }
  LK_INLINE Sum add(Sum sum, Part a, Part b) { return (VF)_mm512_dpbf16_ps((__m512)sum, a, b); }
  LK_INLINE VF total(Sum sum) { return sum; }
};
typedef Pairing OfBF16;
#else
// Two bf16 lie in a word of 32 bits: shifting and masking tell them apart, which is cheaper than to widen them in
// order. x lies in the matching order (split_row).
struct Splitting {
  typedef float X;
  typedef BF16 Weight;
  typedef VF Part;
  typedef VF Sum;
  static constexpr int parts = 2;
  static constexpr int64_t step = 2 * W;
  template <int part>
  LK_INLINE Part x(const X* p) {
    return load(p + part * W);
  }
  template <int part>
  LK_INLINE Part w(const Weight* p) {
    return half<part>(load_as<VU>(p));
  }
  template <int part>
  LK_INLINE Part w(const Weight* p, int64_t n) {
#if defined(__AVX512F__)
    return half<part>((VU)_mm512_maskz_loadu_epi16((__mmask32)first(n), p));
#elif defined(__AVX2__)
    const VI lane = {0, 1, 2, 3, 4, 5, 6, 7}, last = VI{} + (int32_t)(n / 2);
    VU pairs = (VU)_mm256_maskload_epi32(reinterpret_cast<const int*>(p), (__m256i)(lane < last));
    if (n & 1) pairs |= (VU)(lane == last) & (VU{} + p[n - 1].bits);
    return half<part>(pairs);
#else
    BF16 all[2 * W] = {};
    copy_some<sizeof all>(all, p, n * (int64_t)sizeof(BF16));
    return w<part>(all);
#endif
  }
  template <int part>
  LK_INLINE Part half(VU pairs) {
    return float_of(part == 0 ? pairs << 16 : pairs & 0xffff0000u);
  }
  LK_INLINE Sum add(Sum sum, Part a, Part b) { return sum + a * b; }
  LK_INLINE VF total(Sum sum) { return sum; }
};
typedef Splitting OfBF16;
#endif

#if defined(__AVX512F__)
// fp16 for one row of x, in halves of a vector: some processors widen 512 bits at a third less. The same sums.
struct WideningHalves {
  typedef float X;
  typedef F16 Weight;
  struct Part {
    __m256 low, high;
  };
  typedef Part Sum;
  static constexpr int parts = 1;
  static constexpr int64_t step = W;
  template <int part>
  LK_INLINE Part x(const X* p) {
    return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)};
  }
  template <int part>
  LK_INLINE Part w(const Weight* p) {
    return {_mm256_cvtph_ps(load_as<__m128i>(p)), _mm256_cvtph_ps(load_as<__m128i>(p + 8))};
  }
  template <int part>
  LK_INLINE Part w(const Weight* p, int64_t n) {
    return {_mm256_cvtph_ps(_mm_maskz_loadu_epi16((__mmask8)first(n), p)),
            _mm256_cvtph_ps(_mm_maskz_loadu_epi16((__mmask8)(first(n) >> 8), p + 8))};
  }
  LK_INLINE Sum add(Sum sum, Part a, Part b) {
    return {_mm256_fmadd_ps(a.low, b.low, sum.low), _mm256_fmadd_ps(a.high, b.high, sum.high)};
  }
  LK_INLINE VF total(Sum sum) { return (VF)_mm512_insertf32x8(_mm512_castps256_ps512(sum.low), sum.high, 1); }
};
#endif

template <class E, int MR>
struct Chosen {
  typedef E type;
};
#if defined(__AVX512F__)
template <>
struct Chosen<Widening<F16>, 1> {
  typedef WideningHalves type;
};
#endif

template <class E>
constexpr int64_t depth_of() {
  return kDepth * 4 / (int64_t)sizeof(typename E::X);
}

// Sums of one row of x and one of w that run side by side: with one row of x and few registers there are too few sums
// to hide how long an addition takes.
template <int MR>
constexpr int chains() {
  return MR == 1 ? LK_CHAINS : 1;
}

// `left`: elements of w that are left, 0 for all of a step.
template <class E, int MR, int NR, int CH, int part>
LK_INLINE void register_part(const typename E::X* x, int64_t ldx, const typename E::Weight* w, int64_t gap,
                             typename E::Sum (&acc)[CH][MR][NR], int chain, int64_t left) {
  typename E::Part wv[NR];
#pragma GCC unroll 8
  for (int n = 0; n < NR; ++n)
    wv[n] = left ? E::template w<part>(w + n * gap, left) : E::template w<part>(w + n * gap);
#pragma GCC unroll 8
  for (int m = 0; m < MR; ++m) {
    typename E::Part xv = E::template x<part>(x + m * ldx);
#pragma GCC unroll 8
    for (int n = 0; n < NR; ++n) acc[chain][m][n] = E::add(acc[chain][m][n], xv, wv[n]);
  }
}

template <class E, int MR, int NR, int CH>
LK_INLINE void register_step(const typename E::X* x, int64_t ldx, const typename E::Weight* w, int64_t gap,
                             typename E::Sum (&acc)[CH][MR][NR], int chain, int64_t left = 0) {
  register_part<E, MR, NR, CH, 0>(x, ldx, w, gap, acc, chain % CH, left);
  if constexpr (E::parts == 2) register_part<E, MR, NR, CH, 1>(x, ldx, w, gap, acc, (chain + 1) % CH, left);
}

// NR rows of w, `gap` elements apart, whose sums are `gap_c` apart. With one row of x they are far from each other.
template <class E, int MR, int NR>
LK_INLINE void register_tile(const typename E::X* x, int64_t ldx, const typename E::Weight* w, int64_t gap, int64_t k,
                             float* c, int64_t ldc, int64_t gap_c, bool first) {
  constexpr int CH = chains<MR>();
  constexpr bool far = MR == 1;
  typename E::Sum acc[CH][MR][NR] = {};
  int64_t i = 0;
  constexpr int64_t bytes = sizeof(typename E::Weight);
  constexpr int64_t asked = (far ? 128 : 32 * E::parts) / bytes, chunk = asked > E::step ? asked : E::step;
  // Memory is asked for what comes next, into the second-level cache: into the first is slower. Far rows go on behind
  // their end, and the processor gets the second of two lines itself. Near rows end before it sees that each is read
  // in order: the next ones are asked for, twice a line where the loop has room, for some requests are dropped. A
  // prefetch may name memory behind the weight: it reads nothing there.
  const uintptr_t ahead = far ? kFarBytes : (uintptr_t)(NR * gap * bytes);
  for (; i + chunk <= k; i += chunk) {
#pragma GCC unroll 8
    for (int n = 0; n < NR; ++n) __builtin_prefetch((const void*)((uintptr_t)(w + n * gap + i) + ahead), 0, 2);
#pragma GCC unroll 8
    for (int64_t at = 0; at < chunk; at += E::step)
      register_step<E, MR, NR>(x + i + at, ldx, w + i + at, gap, acc, (int)(at / E::step) * E::parts);
  }
  for (; i + E::step <= k; i += E::step) register_step<E, MR, NR>(x + i, ldx, w + i, gap, acc, 0);
  if (i < k) register_step<E, MR, NR>(x + i, ldx, w + i, gap, acc, 0, k - i);
#pragma GCC unroll 8
  for (int m = 0; m < MR; ++m) {
    VF total[NR];
#pragma GCC unroll 8
    for (int n = 0; n < NR; ++n) {
      total[n] = E::total(acc[0][m][n]);
      if constexpr (CH == 2) total[n] += E::total(acc[1][m][n]);
    }
#pragma GCC unroll 8
    for (int n = 0; n < NR; n += 4) {
      constexpr VF none = {};
      Four v = sums(total[n], n + 1 < NR ? total[n + 1] : none, n + 2 < NR ? total[n + 2] : none,
                    n + 3 < NR ? total[n + 3] : none);
      float* to = c + m * ldc + n * gap_c;
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        if (n + j < NR) to[j * gap_c] = first ? v[j] : v[j] + to[j * gap_c];
      }
    }
  }
}

// A whole pass for NR rows of w.
template <class E, int MR, int NR>
LK_INLINE void rows_of_w(const typename E::X* x, int64_t ldx, const typename E::Weight* w, int64_t gap, int64_t k,
                         float* c, int64_t ldc, int64_t gap_c, bool first) {
  constexpr int64_t depth = depth_of<E>();
  for (int64_t i = 0; i < k; i += depth) {
    int64_t part = k - i < depth ? k - i : depth;
    register_tile<E, MR, NR>(x + i, ldx, w + i, gap, part, c, ldc, gap_c, first && i == 0);
  }
}

// Single-row products are memory-bound, and memory is fastest where several long pieces are read side by side: rows of
// w far from each other are taken at once, so that each is followed by the next one of its piece. More rows of x take
// neighbours.
template <class Form, int MR>
__attribute__((noinline)) void strip(const typename Form::X* x, int64_t ldx, const typename Form::Weight* w,
                                     int64_t ldw, int64_t nw, int64_t k, float* c, int64_t ldc, bool first) {
  typedef typename Chosen<Form, MR>::type E;
  constexpr bool far = MR == 1;
  // Where 4 x 3 sums fill the registers, 2 x 4 are what two rows have.
  constexpr int NR = MR == 1 ? LK_FAR : MR > 2 ? LK_NR : LK_MR > 4 ? 8 : 4;
  const int64_t pieces = nw / NR, gap = far ? pieces : 1, step = far ? 1 : NR;
  for (int64_t n = 0; n < pieces; ++n)
    rows_of_w<E, MR, NR>(x, ldx, w + n * step * ldw, gap * ldw, k, c + n * step, ldc, gap, first);
  for (int64_t n = pieces * NR; n < nw; ++n) rows_of_w<E, MR, 1>(x, ldx, w + n * ldw, ldw, k, c + n, ldc, 1, first);
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
    block<E>(x + k, a.ldx, m, w + k, a.ldw, nw, a.k - k < pass ? a.k - k : pass, c, a.tile_n, k == 0);
  }
}

template <class X, class Y>
void copy_rows(const void* x, int64_t ldx, void* y, int64_t ldy, int64_t width, int64_t rows) {
  for (int64_t r = 0; r < rows; ++r) {
    const X* from = static_cast<const X*>(x) + r * ldx;
    Y* to = static_cast<Y*>(y) + r * ldy;
    each_vector(width, [&](int64_t i, int64_t n) __attribute__((always_inline)) { put(to + i, get(from + i, n), n); });
  }
}

#if !defined(__AVX512BF16__)
// fp32 operands of bf16 weights lie in blocks of 2 W: first the elements at even places, then those at odd ones.
constexpr int64_t kBlock = 2 * W;

LK_INLINE void split(VU pairs, float* to) {
  store(to, float_of(pairs << 16));
  store(to + W, float_of(pairs & 0xffff0000u));
}

// The last block is filled up with zeros, as the weight's is when it is read.
LK_INLINE void split_row(const BF16* x, float* to, int64_t width) {
  int64_t i = 0;
  for (; i + kBlock <= width; i += kBlock) split(load_as<VU>(x + i), to + i);
  if (i < width) {
    BF16 rest[kBlock] = {};
    memcpy(rest, x + i, (width - i) * sizeof(BF16));
    split(load_as<VU>(rest), to + i);
  }
}

// W elements from place i on, a multiple of W: half of those of a block.
LK_INLINE void put_split(float* row, int64_t i, VF v) {
#if LK_WIDTH == 16
  v = __builtin_shufflevector(v, v, 0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
#elif LK_WIDTH == 8
  v = __builtin_shufflevector(v, v, 0, 2, 4, 6, 1, 3, 5, 7);
#else
  v = __builtin_shufflevector(v, v, 0, 2, 1, 3);
#endif
  float* to = row + i / kBlock * kBlock + i % kBlock / 2;
  memcpy(to, &v, sizeof v / 2);
  memcpy(to + W, (const char*)&v + sizeof v / 2, sizeof v / 2);
}
#endif

}  // namespace

#ifdef LK_PACKED
#include "packed.inl"
#include "turned.inl"
#endif

namespace {

LK_INLINE VF bias_part(const ProductArgs& a, int64_t at, int64_t n) {
  if (a.bias == nullptr) return VF{};
  if (a.bias_type == DType::bf16) return get(static_cast<const BF16*>(a.bias) + at, n);
  if (a.bias_type == DType::f16) return get(static_cast<const F16*>(a.bias) + at, n);
  return get(static_cast<const float*>(a.bias) + at, n);
}

// A NaN comes from a bf16 here or is the processor's own: the lower half of its bits is zero, and the quick rounding
// leaves it a NaN. Only the processor's own rounding needs care, for subnormals.
template <class WT>
LK_INLINE VF rounded(VF v) {
#if defined(__AVX512BF16__)
  return round_to<WT>(v);
#else
  return quick_round_to<WT>(v);
#endif
}

template <class WT, class Y>
void finish_plain(const ProductArgs& a, int64_t m0, int64_t m, int64_t n0, int64_t nw, const float* c) {
  for (int64_t r = 0; r < m; ++r) {
    Y* y = static_cast<Y*>(a.y) + (m0 + r) * a.ldy + n0;
    each_vector(nw, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
      put(y + i, rounded<WT>(get(c + r * a.tile_n + i, n) + bias_part(a, n0 + i, n)), n);
    });
  }
}

template <class WT, class Y, Activation act>
void finish_pair(const ProductArgs& a, int64_t m0, int64_t m, int64_t n0, int64_t nw, const float* c) {
  const float* up = c + a.tile_n / 2;
  for (int64_t r = 0; r < m; ++r) {
    Y* row = static_cast<Y*>(a.y) + (m0 + r) * a.ldy;
    each_vector(nw, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
      VF g = rounded<WT>(get(c + r * a.tile_n + i, n) + bias_part(a, n0 + i, n));
      VF u = rounded<WT>(get(up + r * a.tile_n + i, n) + bias_part(a, a.pair + n0 + i, n));
      VF h = rounded<WT>(rounded<WT>(activate<act>(g)) * u);
#if !defined(__AVX512BF16__)
      if constexpr (__is_same(WT, BF16) && __is_same(Y, float)) return put_split(row, n0 + i, h);
#endif
      put(row + n0 + i, h, n);
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
struct FormOf {
  typedef Widening<WT> type;
};
template <>
struct FormOf<BF16> {
  typedef OfBF16 type;
};

template <class WT>
void multiply(const ProductArgs& a, int64_t m0, int64_t m, int64_t n0, int64_t nw, float* c, float* panel) {
#ifdef LK_PACKED
  if (a.turned) return turned<WT>(a, n0, nw, c, panel);
  // By the rows of the whole pass, not of the tile, whose height depends on the number of threads.
  if (a.m >= kPackedRows) return packed<WT>(a, m0, m, n0, nw, c, panel);
#endif
  (void)panel;
  direct<typename FormOf<WT>::type>(a, m0, m, n0, nw, c);
}

template <class WT>
void product_from(const ProductArgs& a, int64_t task, float* scratch) {
  int64_t tiles_m = (a.m + a.tile_m - 1) / a.tile_m;
  int64_t m0 = task % tiles_m * a.tile_m, m = a.m - m0 < a.tile_m ? a.m - m0 : a.tile_m;
  int64_t columns = a.pair ? a.pair : a.n, tile = a.pair ? a.tile_n / 2 : a.tile_n;
  int64_t n0 = task / tiles_m * tile, nw = columns - n0 < tile ? columns - n0 : tile;
  float *c = scratch, *panel = scratch + kTileM * kTileN;
  multiply<WT>(a, m0, m, n0, nw, c, panel);
  if (a.pair) multiply<WT>(a, m0, m, a.pair + n0, nw, c + a.tile_n / 2, panel);
  if (a.y_type == DType::f32) {
    finish<WT, float>(a, m0, m, n0, nw, c);
  } else {
    finish<WT, WT>(a, m0, m, n0, nw, c);
  }
}

#ifdef LK_PACKED
constexpr int64_t kPanel = kPanelDepth * kPanelWidth;
constexpr int64_t kScratch =
    (kTileM * kTileN + (kPanel > kTurnedScratch ? kPanel : kTurnedScratch)) * (int64_t)sizeof(float);
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

void widen_level(const void* x, DType x_type, float* y, int64_t width) {
  if (x_type == DType::bf16) return copy_rows<BF16, float>(x, width, y, width, width, 1);
  if (x_type == DType::f16) return copy_rows<F16, float>(x, width, y, width, width, 1);
  copy_rows<float, float>(x, width, y, width, width, 1);
}

void copy_operand(const void* x, int64_t ldx, DType x_type, void* operand, int64_t ld, DType operand_type,
                  int64_t width, int64_t rows) {
  if (operand_type == DType::bf16) return copy_rows<BF16, BF16>(x, ldx, operand, ld, width, rows);
#if !defined(__AVX512BF16__)
  if (x_type == DType::bf16) {
    for (int64_t r = 0; r < rows; ++r)
      split_row(static_cast<const BF16*>(x) + r * ldx, static_cast<float*>(operand) + r * ld, width);
    return;
  }
#endif
  if (x_type == DType::f16) return copy_rows<F16, float>(x, ldx, operand, ld, width, rows);
  copy_rows<float, float>(x, ldx, operand, ld, width, rows);
}

void to_operand_level(const void* x, int64_t ldx, DType x_type, void* operand, int64_t ld, DType operand_type,
                      int64_t width, int64_t rows) {
  const int64_t tail = width / 32 * 32, size = size_of(operand_type);
  for (int64_t r = 0; tail < width && r < rows; ++r) memset((char*)operand + (r * ld + tail) * size, 0, 32 * size);
  copy_operand(x, ldx, x_type, operand, ld, operand_type, width, rows);
}

}  // namespace
