// Products of one or two strips of 16 rows of x that are nearly full, where registers are few (AVX2). Included by
// product.inl.
//
// Turning the weight (packed.inl) costs as much as two or three rows of x, an eighth of the time at 32. Here x is
// turned instead, once for the whole product: [strip][k][16 rows]. The weight's elements are broadcast over it, taken
// as they lie, so that memory and registers hold them as bf16 until they are multiplied. The result comes turned, with
// 16 rows of x in two vectors, and is turned back at the end of a task. Sums run in the order of packed.inl.

namespace {

constexpr int64_t kTurnedRows = 32;
constexpr int64_t kWideRow = kPanelDepth + 16;  // off the powers of two
constexpr int64_t kTurnedScratch = kTileN * kTurnedRows + kPanelStrip * kWideRow;

void turn_level(const void* x, int64_t ldx, int64_t rows, int64_t width, void* to) {
  pack(static_cast<const float*>(x), ldx, rows, width, static_cast<float*>(to), kPanelWidth);
}

// Eight elements of each row of w at places `part`, part + 2, ... times the panel's eight rows. An element is told
// from its neighbour by a mask, wherever it stands in its word: a word may begin one element early, but at the first
// one, before which no memory may be read.
template <int part, int MR>
LK_INLINE void half_block(const BF16* w, int64_t ldw, const float* panel, VF (&acc)[MR][2]) {
#pragma GCC unroll 8
  for (int64_t j = 0; j < 8; ++j) {
    VF x0 = load(panel + j * kPanelWidth), x1 = load(panel + j * kPanelWidth + W);
    const bool early = part == 0 && j > 0, low = part == 0 && j == 0;
#pragma GCC unroll 8
    for (int m = 0; m < MR; ++m) {
      VU pair = (VU)_mm256_set1_epi32(load_as<int32_t>(w + m * ldw + 2 * j - early));
      VF v = float_of(low ? pair << 16 : pair & 0xffff0000u);
      acc[m][0] += x0 * v;
      acc[m][1] += x1 * v;
    }
  }
}

template <int MR>
__attribute__((noinline)) void pair_tile(const BF16* w, int64_t ldw, const float* panel, int64_t depth, float* c,
                                         int64_t ldc, bool first) {
  VF acc[MR][2] = {};
  for (int64_t k = 0; k < depth; k += kBlock) {
    half_block<0, MR>(w + k, ldw, panel + k * kPanelWidth, acc);
    half_block<1, MR>(w + k, ldw, panel + (k + W) * kPanelWidth, acc);
  }
  put_tile<MR>(acc, c, ldc, first);
}

void pair_strip(int64_t rows, const BF16* w, int64_t ldw, const float* panel, int64_t depth, float* c, int64_t ldc,
                bool first) {
  switch (rows) {
    case 1:
      return pair_tile<1>(w, ldw, panel, depth, c, ldc, first);
    case 2:
      return pair_tile<2>(w, ldw, panel, depth, c, ldc, first);
    case 3:
      return pair_tile<3>(w, ldw, panel, depth, c, ldc, first);
    case 4:
      return pair_tile<4>(w, ldw, panel, depth, c, ldc, first);
    case 5:
      return pair_tile<5>(w, ldw, panel, depth, c, ldc, first);
    default:
      return pair_tile<6>(w, ldw, panel, depth, c, ldc, first);
  }
}

// Some rows of w, at most kPanelStrip, against every strip of x, `deep` elements of k.
template <class WT>
LK_INLINE void over_strips(int64_t rows, const WT* w, int64_t ldw, const float* x, int64_t ldx, int64_t deep,
                           int64_t strips, float* c, int64_t ldc, bool first, float* buffer) {
  if constexpr (__is_same(WT, BF16)) {
    if (deep % kBlock == 0) {
      for (int64_t s = 0; s < strips; ++s)
        pair_strip(rows, w, ldw, x + s * ldx, deep, c + s * kPanelWidth, ldc, first);
      return;
    }
  }
  const float* wide;
  if constexpr (__is_same(WT, float)) {
    wide = w;
  } else {
    if constexpr (__is_same(WT, BF16)) {
      for (int64_t r = 0; r < rows; ++r) split_row(w + r * ldw, buffer + r * kWideRow, deep);
      deep = (deep + kBlock - 1) / kBlock * kBlock;
    } else {
      copy_rows<WT, float>(w, ldw, buffer, kWideRow, deep, rows);
    }
    wide = buffer, ldw = kWideRow;
  }
  for (int64_t s = 0; s < strips; ++s)
    panel_strip(rows, wide, ldw, x + s * ldx, deep, c + s * kPanelWidth, ldc, first);
}

template <class WT>
void turned(const ProductArgs& a, int64_t n0, int64_t nw, float* c, float* scratch) {
  const float* x = static_cast<const float*>(a.x);
  const WT* w = static_cast<const WT*>(a.w) + n0 * a.ldw;
  const int64_t strips = (a.m + kPanelWidth - 1) / kPanelWidth, ldc = strips * kPanelWidth;
  const int64_t columns = a.pair ? a.tile_n / 2 : a.tile_n, depth = part_depth(a.k);
  float* buffer = scratch + kTileN * kTurnedRows;
  for (int64_t k = 0; k < a.k; k += depth) {
    const int64_t deep = a.k - k < depth ? a.k - k : depth;
    // Memory works meanwhile: on the next part of these rows, behind the last one on the next task's.
    const int64_t next = k + depth < a.k ? k + depth : columns * a.ldw;
    int64_t tiles = (nw + kPanelStrip - 1) / kPanelStrip;
    for (int64_t n = 0; tiles > 0; --tiles) {
      const int64_t rows = (nw - n + tiles - 1) / tiles;
      ask_for((uintptr_t)(w + n * a.ldw) + (uintptr_t)(next * (int64_t)sizeof(WT)), a.ldw * (int64_t)sizeof(WT), 0,
              rows, depth * (int64_t)sizeof(WT));
      over_strips(rows, w + n * a.ldw + k, a.ldw, x + k * kPanelWidth, kPanelWidth * a.ldx, deep, strips,
                  scratch + n * ldc, ldc, k == 0, buffer);
      n += rows;
    }
  }
  for (int64_t n = 0; n < nw; n += kPanelWidth) pack(scratch + n * ldc, ldc, nw - n, ldc, c + n, a.tile_n);
}

}  // namespace
