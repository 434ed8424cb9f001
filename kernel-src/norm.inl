// RMSNorm, forward and backward, for one level. Included by level.inl.

namespace {

// 64-bit division takes as long as a short row: it is left to what needs it.
LK_INLINE int64_t offset_of_row(const Rows& rows, int64_t r) {
  if (rows.size[0] * rows.size[1] == 1) return r * rows.stride[2];
  int64_t rest, middle;
  if (r <= UINT32_MAX && rows.size[2] <= UINT32_MAX && rows.size[1] <= UINT32_MAX) {
    rest = (uint32_t)r / (uint32_t)rows.size[2];
    middle = (uint32_t)rest / (uint32_t)rows.size[1];
  } else {
    rest = r / rows.size[2];
    middle = rest / rows.size[1];
  }
  int64_t inner = r - rest * rows.size[2];
  return middle * rows.stride[0] + (rest - middle * rows.size[1]) * rows.stride[1] + inner * rows.stride[2];
}

// The offsets of rows in their order, without a division for each.
struct RowCursor {
  const Rows& rows;
  int64_t outer, middle, inner;  // what offset_of_row takes a row apart into

  LK_INLINE RowCursor at(const Rows& rows, int64_t r) {
    int64_t rest = r / rows.size[2];
    int64_t outer = rest / rows.size[1];
    return {rows, outer, rest - outer * rows.size[1], r - rest * rows.size[2]};
  }
  inline __attribute__((always_inline)) int64_t next() {
    int64_t offset = outer * rows.stride[0] + middle * rows.stride[1] + inner * rows.stride[2];
    if (++inner == rows.size[2]) {
      inner = 0;
      if (++middle == rows.size[1]) {
        middle = 0;
        ++outer;
      }
    }
    return offset;
  }
};

// Calls body(i, n): n is W but for the last part of a row.
template <class Body>
LK_INLINE void each_vector(int64_t width, Body body) {
  int64_t i = 0;
  for (; i + W <= width; i += W) body(i, W);
  if (i < width) body(i, width - i);
}

template <class T>
LK_INLINE VF get(const T* p, int64_t n) {
  return n == W ? load(p) : load_part(p, n);
}
template <class T>
LK_INLINE void put(T* p, VF v, int64_t n) {
  if (n == W) {
    store(p, v);
  } else {
    store_part(p, v, n);
  }
}

// Sums run over a block in fp32 and over the blocks in double: the error of a wide row does not grow with its width.
constexpr int64_t kSquares = 64 * 4 * W;

template <class X>
LK_INLINE double squares_of_block(const X* x, int64_t width) {
  VF a = {}, b = {}, c = {}, d = {};
  int64_t i = 0;
  for (; i + 4 * W <= width; i += 4 * W) {
    VF v0 = load(x + i), v1 = load(x + i + W), v2 = load(x + i + 2 * W), v3 = load(x + i + 3 * W);
    a += v0 * v0;
    b += v1 * v1;
    c += v2 * v2;
    d += v3 * v3;
  }
  for (; i < width; i += W) {
    VF v = get(x + i, width - i < W ? width - i : W);
    a += v * v;
  }
  return sum_in_double((a + b) + (c + d));
}

template <class X>
LK_INLINE double sum_of_squares(const X* x, int64_t width) {
  double sum = 0;
  for (int64_t i = 0; i < width; i += kSquares)
    sum += squares_of_block(x + i, width - i < kSquares ? width - i : kSquares);
  return sum;
}

#if defined(__AVX512BF16__)
// By products of pairs, which take subnormals for 0. That is below 2^-126 a square, so a mean from `small` on does not
// show it; a row below is summed again.
LK_INLINE double squares_by_pairs(const BF16* x, int64_t width) {
  VF sum[4] = {};
  int64_t i = 0;
  for (; i + 8 * W <= width; i += 8 * W) {
#pragma GCC unroll 4
    for (int at = 0; at < 4; ++at) {
      __m512bh v = load_as<__m512bh>(x + i + at * 2 * W);
      sum[at] = (VF)_mm512_dpbf16_ps((__m512)sum[at], v, v);
    }
  }
#pragma GCC unroll 4
  for (int at = 0; at < 4; ++at) {
    const int64_t left = width - i - at * 2 * W;
    if (left <= 0) break;
    const uint32_t mask = left < 2 * W ? first(left) : ~0u;
    __m512bh v = (__m512bh)_mm512_maskz_loadu_epi16(mask, x + i + at * 2 * W);
    sum[at] = (VF)_mm512_dpbf16_ps((__m512)sum[at], v, v);
  }
  return sum_in_double((sum[0] + sum[1]) + (sum[2] + sum[3]));
}

LK_INLINE double sum_of_squares(const BF16* x, int64_t width) {
  double squares = 0;
  for (int64_t i = 0; i < width; i += kSquares)
    squares += squares_by_pairs(x + i, width - i < kSquares ? width - i : kSquares);
  constexpr double small = 1e-30;
  if (__builtin_expect(squares < small * (double)width, 0)) return sum_of_squares<BF16>(x, width);
  return squares;
}
#endif

// In double from the sum of a block on: the scale of a whole row is then rounded once more only.
LK_INLINE float inverse_rms(double squares, int64_t width, float eps) {
  return (float)(1.0 / __builtin_sqrt(squares / (double)width + (double)eps));
}

// What is read next is asked for: the processor does not guess it while a row is read for the second time. Such an
// address may lie behind the tensor; nothing is read there.
LK_INLINE void ask_for(const void* p, uintptr_t ahead) {
  if (ahead != 0) __builtin_prefetch((const void*)((uintptr_t)p + ahead), 0, 2);
}

template <class X, class Y, bool round_first>
LK_INLINE void scale_rest(const X* x, float r, const float* scale, Y* y, int64_t begin, int64_t width) {
  for (int64_t i = begin; i < width; i += W) {
    const int64_t n = width - i < W ? width - i : W;
    VF v = get(x + i, n) * r;
    if (round_first) v = round_to<X>(v);
    if (scale != nullptr) v = v * get(scale + i, n);
    put(y + i, v, n);
  }
}

// Two vectors at a time, rounded quickly; a row in which that would be wrong is done again, which nearly none is.
template <class X, class Y, bool round_first, bool streamed>
LK_INLINE void scale_row(const X* x, float r, const float* scale, Y* y, int64_t width, uintptr_t ahead) {
  constexpr bool rare_first = round_first && has_rare<X>(), rare_last = has_rare<Y>();
  constexpr int64_t line = 64 / (int64_t)sizeof(X);
  Mask odd = {};
  int64_t i = 0;
  for (; i + 2 * W <= width; i += 2 * W) {
#pragma GCC unroll 2
    for (int64_t at = 0; at < 2 * W; at += line) ask_for(x + i + at, ahead);
    VF a = load(x + i) * r, b = load(x + i + W) * r;
    if (rare_first) odd |= rare(a) | rare(b);
    if (round_first) a = quick_round_to<X>(a), b = quick_round_to<X>(b);
    if (scale != nullptr) a = a * load(scale + i), b = b * load(scale + i + W);
    if (rare_last && (!rare_first || scale != nullptr)) odd |= rare(a) | rare(b);
    quick_store<streamed>(y + i, a, b);
  }
  if ((rare_first || rare_last) && __builtin_expect(any(odd), 0)) i = 0;
  scale_rest<X, Y, round_first>(x, r, scale, y, i, width);
}

// The lines that a row will be written to are had while it is summed, when nothing else is written.
template <class Y>
LK_INLINE void fetch_row(const Y* y, int64_t width) {
  constexpr int64_t line = 64 / (int64_t)sizeof(Y);
  for (int64_t i = 0; i < width; i += line) __builtin_prefetch(y + i, 1, 2);
}

// Some short rows are taken at once: the sum, the root and the division of one then run beside those of the others.
template <class X, class Y, bool round_first, bool streamed>
void norm_rows(const RmsNormArgs& a, int64_t begin, int64_t end) {
  constexpr int64_t most = 8, elements = 8192 / (int64_t)sizeof(X);
  const int64_t step = a.width * most <= elements ? most : a.width * 2 <= elements ? elements / a.width : 1;
  RowCursor cursor = RowCursor::at(a.rows, begin);
  for (int64_t first = begin; first < end; first += step) {
    const int64_t rows = end - first < step ? end - first : step;
    const X* x[most];
    double squares[most] = {};
    float r[most];
    for (int64_t i = 0; i < rows; ++i) {
      x[i] = static_cast<const X*>(a.x) + cursor.next();
      if (!streamed && sizeof(Y) == 4 && a.width >= elements / 4)
        fetch_row(static_cast<const Y*>(a.y) + (first + i) * a.width, a.width);
      squares[i] = sum_of_squares(x[i], a.width);
    }
    for (int64_t i = 0; i < most; ++i) r[i] = inverse_rms(squares[i], a.width, a.eps);
    const uintptr_t ahead = step * a.width >= elements / 4 ? (uintptr_t)(step * a.width * (int64_t)sizeof(X)) : 0;
    for (int64_t i = 0; i < rows; ++i) {
      Y* y = static_cast<Y*>(a.y) + (first + i) * a.width;
      scale_row<X, Y, round_first, streamed>(x[i], r[i], a.scale, y, a.width, ahead);
    }
  }
  if (streamed) end_of_streams();
}

template <class X, class Y, bool round_first>
void norm_to(const RmsNormArgs& a, int64_t begin, int64_t end) {
  if (kStreams && a.streamed) return norm_rows<X, Y, round_first, kStreams>(a, begin, end);
  norm_rows<X, Y, round_first, false>(a, begin, end);
}

template <class X>
void norm_from(const RmsNormArgs& a, int64_t begin, int64_t end) {
  if (a.y_type == DType::f32) {
    a.round_first ? norm_to<X, float, true>(a, begin, end) : norm_to<X, float, false>(a, begin, end);
  } else {
    a.round_first ? norm_to<X, X, true>(a, begin, end) : norm_to<X, X, false>(a, begin, end);
  }
}

void rms_norm_level(const RmsNormArgs& a, int64_t begin, int64_t end) {
  if (a.x_type == DType::bf16) return norm_from<BF16>(a, begin, end);
  if (a.x_type == DType::f16) return norm_from<F16>(a, begin, end);
  norm_from<float>(a, begin, end);
}

// With n = x * r and g = dy * scale: dx = r * (g - n * mean(g * n)) and dscale = sum over rows of dy * n, n rounded to
// x's dtype where the forward rounds it.
template <class X, class G, bool round_first>
void norm_backward_rows(const RmsNormBackwardArgs& a, int64_t begin, int64_t end, float* dscale) {
  for (int64_t row = begin; row < end; ++row) {
    const X* x = static_cast<const X*>(a.x) + offset_of_row(a.x_rows, row);
    const G* dy = static_cast<const G*>(a.dy) + offset_of_row(a.dy_rows, row);
    float r = inverse_rms(sum_of_squares(x, a.width), a.width, a.eps);
    VF dot = {};
    auto reduce = [&](int64_t i, int64_t n) __attribute__((always_inline)) {
      VF norm = get(x + i, n) * r;
      VF g = get(dy + i, n);
      if (dscale != nullptr) put(dscale + i, get(dscale + i, n) + g * (round_first ? round_to<X>(norm) : norm), n);
      if (a.scale != nullptr) g = g * get(a.scale + i, n);
      dot += g * norm;
    };
    each_vector(a.width, reduce);
    if (a.dx == nullptr) continue;
    float mean = sum(dot) / (float)a.width;
    X* dx = static_cast<X*>(a.dx) + row * a.width;
    auto finish = [&](int64_t i, int64_t n) __attribute__((always_inline)) {
      VF g = get(dy + i, n);
      if (a.scale != nullptr) g = g * get(a.scale + i, n);
      put(dx + i, (g - get(x + i, n) * r * mean) * r, n);
    };
    each_vector(a.width, finish);
  }
}

template <class X>
void norm_backward_from(const RmsNormBackwardArgs& a, int64_t begin, int64_t end, float* dscale) {
  if (a.dy_type == DType::f32) {
    a.round_first ? norm_backward_rows<X, float, true>(a, begin, end, dscale)
                  : norm_backward_rows<X, float, false>(a, begin, end, dscale);
  } else {
    a.round_first ? norm_backward_rows<X, X, true>(a, begin, end, dscale)
                  : norm_backward_rows<X, X, false>(a, begin, end, dscale);
  }
}

void rms_norm_backward_level(const RmsNormBackwardArgs& a, int64_t begin, int64_t end, float* dscale) {
  if (a.x_type == DType::bf16) return norm_backward_from<BF16>(a, begin, end, dscale);
  if (a.x_type == DType::f16) return norm_backward_from<F16>(a, begin, end, dscale);
  norm_backward_from<float>(a, begin, end, dscale);
}

}  // namespace
