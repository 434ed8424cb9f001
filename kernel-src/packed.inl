// Products of many rows of x where registers are few (AVX2). Included by product.inl.
//
// A tile along k (product.inl) has room for 4 x 3 sums in 16 registers and adds up the lanes of each at its end: 0.65
// to 0.7 of the processor's rate. Here a part of the weight is turned once, widened, into a panel whose lanes are
// columns of the result; the rows of x are broadcast over it, 6 x 2 sums at a time, and no lanes are added. Turning
// costs as much as two or three rows of x; where these are few and fill their strips, turned.inl turns them instead.

namespace {

constexpr int64_t kPanelWidth = 2 * W;
constexpr int64_t kPanelDepth = 256;  // 16 KiB: the panel and a strip of x stay in the first-level cache
constexpr int kPanelStrip = 6;
constexpr int64_t kPanelsAhead = 4;
constexpr int64_t kPackedRows = 12;  // from here on packed is the faster one

// Of eight rows, four and four in the halves of `in`: out[j] holds element j of each row.
LK_INLINE void transpose(const __m256 (&in)[4], __m256 (&out)[4]) {
  __m256 low = _mm256_unpacklo_ps(in[0], in[1]), high = _mm256_unpackhi_ps(in[0], in[1]);
  __m256 low2 = _mm256_unpacklo_ps(in[2], in[3]), high2 = _mm256_unpackhi_ps(in[2], in[3]);
  out[0] = _mm256_shuffle_ps(low, low2, 0x44);
  out[1] = _mm256_shuffle_ps(low, low2, 0xee);
  out[2] = _mm256_shuffle_ps(high, high2, 0x44);
  out[3] = _mm256_shuffle_ps(high, high2, 0xee);
}

LK_INLINE __m256 both(__m128 low, __m128 high) { return _mm256_insertf128_ps(_mm256_castps128_ps256(low), high, 1); }
LK_INLINE __m128 four(const float* w) { return _mm_loadu_ps(w); }
LK_INLINE __m128 four(const F16* w) { return _mm_cvtph_ps(_mm_loadl_epi64((const __m128i*)w)); }

// The panel's first 16 rows of k from eight rows of the weight.
template <class WT>
LK_INLINE void turn(const WT* w, int64_t ldw, float* panel, int64_t ldp) {
#pragma GCC unroll 4
  for (int64_t k = 0; k < 16; k += 4) {
    __m256 rows[4], columns[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) rows[i] = both(four(w + i * ldw + k), four(w + (i + 4) * ldw + k));
    transpose(rows, columns);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) store(panel + (k + i) * ldp, (VF)columns[i]);
  }
}

// bf16: two neighbours of k are turned as one element, then told apart, and lie as x does: eight even k, eight odd.
LK_INLINE void turn(const BF16* w, int64_t ldw, float* panel, int64_t ldp) {
#pragma GCC unroll 2
  for (int64_t k = 0; k < 16; k += 8) {
    __m256 rows[4], columns[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i)
      rows[i] = both(load_as<__m128>(w + i * ldw + k), load_as<__m128>(w + (i + 4) * ldw + k));
    transpose(rows, columns);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      VU pair = (VU)columns[i];
      store(panel + (k / 2 + i) * ldp, float_of(pair << 16));
      store(panel + (W + k / 2 + i) * ldp, float_of(pair & 0xffff0000u));
    }
  }
}

// panel[k][n] = w[n][k] for 16 rows of w, zeros where they end, to the next multiple of 16.
template <class WT>
__attribute__((noinline)) void pack(const WT* w, int64_t ldw, int64_t nw, int64_t depth, float* panel, int64_t ldp) {
  for (int64_t k = 0; k < depth; k += 32) {  // 32: whole lines of a half-precision weight, before another row's
    for (int64_t n = 0; n < kPanelWidth; n += 8) {
      for (int64_t i = k; i < k + 32 && i < depth; i += 16) {
        const WT* from = w + n * ldw + i;
        int64_t ld = ldw, rows = nw - n, columns = depth - i;
        WT part[8 * 16];
        if (rows < 8 || columns < 16) {
          memset(part, 0, sizeof part);
          for (int64_t r = 0; r < 8 && r < rows; ++r) {
            memcpy(part + r * 16, from + r * ldw, (columns < 16 ? columns : 16) * sizeof(WT));
          }
          from = part;
          ld = 16;
        }
        turn(from, ld, panel + i * ldp + n, ldp);
      }
    }
  }
}

template <int MR>
LK_INLINE void put_tile(const VF (&acc)[MR][2], float* c, int64_t ldc, bool first) {
#pragma GCC unroll 8
  for (int m = 0; m < MR; ++m) {
#pragma GCC unroll 2
    for (int n = 0; n < 2; ++n) {
      float* to = c + m * ldc + n * W;
      store(to, first ? acc[m][n] : load(to) + acc[m][n]);
    }
  }
}

template <int MR>
__attribute__((noinline)) void panel_tile(const float* x, int64_t ldx, const float* panel, int64_t depth, float* c,
                                          int64_t ldc, bool first) {
  VF acc[MR][2] = {};
  for (int64_t k = 0; k < depth; ++k) {
    VF w0 = load(panel + k * kPanelWidth), w1 = load(panel + k * kPanelWidth + W);
#pragma GCC unroll 8
    for (int m = 0; m < MR; ++m) {
      VF xv = (VF)_mm256_broadcast_ss(x + m * ldx + k);
      acc[m][0] += xv * w0;
      acc[m][1] += xv * w1;
    }
  }
  put_tile<MR>(acc, c, ldc, first);
}

void panel_strip(int64_t rows, const float* x, int64_t ldx, const float* panel, int64_t depth, float* c, int64_t ldc,
                 bool first) {
  switch (rows) {
    case 1:
      return panel_tile<1>(x, ldx, panel, depth, c, ldc, first);
    case 2:
      return panel_tile<2>(x, ldx, panel, depth, c, ldc, first);
    case 3:
      return panel_tile<3>(x, ldx, panel, depth, c, ldc, first);
    case 4:
      return panel_tile<4>(x, ldx, panel, depth, c, ldc, first);
    case 5:
      return panel_tile<5>(x, ldx, panel, depth, c, ldc, first);
    default:
      return panel_tile<6>(x, ldx, panel, depth, c, ldc, first);
  }
}

// Asks for rows [begin, end) of a part of the weight. What lies behind the weight may be asked for: nothing is read
// there.
LK_INLINE void ask_for(uintptr_t w, int64_t row_bytes, int64_t begin, int64_t end, int64_t part_bytes) {
  for (int64_t r = begin; r < end; ++r) {
    for (int64_t i = 0; i < part_bytes; i += 64) __builtin_prefetch((const void*)(w + r * row_bytes + i), 0, 2);
  }
}

// Of the parts of k that a sum is cut into, about equal and whole lines of the weight.
LK_INLINE int64_t part_depth(int64_t k) {
  const int64_t parts = (k + kPanelDepth - 1) / kPanelDepth;
  return ((k + parts - 1) / parts + 31) / 32 * 32;
}

template <class WT>
void packed(const ProductArgs& a, int64_t m0, int64_t m, int64_t n0, int64_t nw, float* c, float* panel) {
  const float* x = static_cast<const float*>(a.x) + m0 * a.ldx;
  const WT* w = static_cast<const WT*>(a.w) + n0 * a.ldw;
  const int64_t columns = a.pair ? a.tile_n / 2 : a.tile_n;
  const int64_t parts = (a.k + kPanelDepth - 1) / kPanelDepth, depth = part_depth(a.k);
  for (int64_t part = 0; part * depth < a.k; ++part) {
    int64_t k = part * depth, deep = a.k - k < depth ? a.k - k : depth;
    const int64_t filled = __is_same(WT, BF16) ? (deep + kBlock - 1) / kBlock * kBlock : deep;
    // Memory works while the strips are computed: on what comes some panels later, in the next task behind the last
    // part.
    const int64_t later = part + (kPanelsAhead * kPanelWidth + columns - 1) / columns;
    const int64_t ahead = later / parts * columns * a.ldw + later % parts * depth;
    for (int64_t n = 0; n < nw; n += kPanelWidth) {
      pack(w + n * a.ldw + k, a.ldw, nw - n, deep, panel, kPanelWidth);
      const uintptr_t next = (uintptr_t)(w + n * a.ldw) + (uintptr_t)(ahead * (int64_t)sizeof(WT));
      int64_t strips = (m + kPanelStrip - 1) / kPanelStrip, asked = 0;
      for (int64_t r = 0, left = m; left > 0; --strips) {
        int64_t rows = (left + strips - 1) / strips, until = asked + (kPanelWidth - asked + strips - 1) / strips;
        ask_for(next, a.ldw * (int64_t)sizeof(WT), asked, until, depth * (int64_t)sizeof(WT));
        asked = until;
        panel_strip(rows, x + r * a.ldx + k, a.ldx, panel, filled, c + r * a.tile_n + n, a.tile_n, part == 0);
        r += rows;
        left -= rows;
      }
    }
  }
}

}  // namespace
