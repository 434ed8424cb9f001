// Drivers of the matrix products: operands, tiles, and the two products of a gated MLP.
#include <cstring>

#include "kernels.h"
#include "parallel.h"

namespace layout_kernels {

namespace {

// Rows of x that one pass takes: bounds the scratch; the weight is read once a pass.
constexpr int64_t kPassRows = 256;
// Scratch kept between calls.
constexpr int64_t kKeep = 4 << 20;
// Columns of a task, unless the rows are so many that they leave the second-level cache for each task: then as many as
// the level takes and still leaves some tasks to each thread.
constexpr int64_t kNarrow = 32;
constexpr int64_t kTall = 100;
constexpr int64_t kStrip = 16;  // rows of x that are turned together
constexpr int64_t kTurnedColumns = 128, kTurnedDepth = 128;
// With one row memory is what a task waits for, and long pieces of the weight are read faster than short ones: so few
// tasks a thread, unless columns are many.
constexpr int64_t kLeastOfOneRow = 128, kMostOfOneRow = 512;
// Work (multiplications) below which one thread does it all.
constexpr int64_t kSerialWork = 64 * 1024;

thread_local Scratch tile_scratch;
thread_local Scratch operand_scratch;
thread_local Scratch turned_scratch;

// Rows of a pass: about as many in each, so that none is left with a few, whose sums may run in another order.
int64_t pass_rows(int64_t m) { return ceil_div(m, ceil_div(m, kPassRows)); }

// Leading dimension of an operand: a whole number of cache lines, off the powers of two, whose rows would share cache
// sets.
int64_t leading(int64_t width) { return round_up(width, 32) + 32; }

// Columns of a task of one row.
int64_t one_row_tile(int64_t columns, int64_t threads) {
  int64_t share = columns / (threads * kLeastOfOneRow);
  int64_t tasks = threads == 1 ? 1 : threads * (share > 1 ? share : 1);
  int64_t tile = round_up(ceil_div(columns, tasks), 16);
  return tile < kMostOfOneRow ? tile : kMostOfOneRow;
}

// Whether x is turned: few rows that leave at most a sixteenth of their strips empty, and a product that is large
// enough to pay for it.
bool turns(const Kernels& kernels, const ProductArgs& a) {
  return a.m <= kernels.max_turned && 16 * a.m >= 15 * round_up(a.m, kStrip) && a.n >= kTurnedColumns &&
         a.k >= kTurnedDepth;
}

void turn(const Kernels& kernels, const Pool& pool, ProductArgs& a) {
  const float* x = static_cast<const float*>(a.x);
  int64_t strips = ceil_div(a.m, kStrip);
  float* turned = static_cast<float*>(turned_scratch.get(strips * kStrip * a.ldx * (int64_t)sizeof(float)));
  for_each_task(pool, strips, [&](int64_t task) {
    int64_t r = task * kStrip;
    kernels.turn(x + r * a.ldx, a.ldx, a.m - r < kStrip ? a.m - r : kStrip, round_up(a.k, 32), turned + r * a.ldx);
  });
  a.x = turned;
  a.turned = true;
}

// Cuts a product into tiles; the number of its tasks. `used`: the pool, with the threads that are worth their start.
int64_t cut(const Kernels& kernels, const Pool& pool, ProductArgs& a, Pool& used) {
  int64_t columns = a.pair ? a.pair : a.n;
  a.tile_m = a.m < kernels.max_tile_m ? a.m : kernels.max_tile_m;
  used = pool;
  if (a.m * a.n * a.k <= kSerialWork) used.threads = 1;
  if (turns(kernels, a)) turn(kernels, used, a);
  a.tile_n = kernels.max_tile_n;
  if (a.m == 1) a.tile_n = one_row_tile(columns, used.threads) * (a.pair ? 2 : 1);
  const bool narrow = a.m > 1 && a.m < kTall && !a.turned;
  while (a.m > 1 && a.tile_n > kNarrow && (narrow || ceil_div(a.n, a.tile_n) < 8 * used.threads)) a.tile_n /= 2;
  int64_t tile = a.pair ? a.tile_n / 2 : a.tile_n;
  // Few columns: also cut the rows, so that each thread finds work.
  while (a.tile_m >= 64 && ceil_div(columns, tile) * ceil_div(a.m, a.tile_m) < 4 * used.threads) {
    a.tile_m = ceil_div(a.tile_m, 2);
  }
  return ceil_div(columns, tile) * ceil_div(a.m, a.tile_m);
}

void run_product(const Kernels& kernels, const Pool& pool, ProductArgs& a) {
  Pool used;
  int64_t tasks = cut(kernels, pool, a, used);
  for_each_task(used, tasks,
                [&](int64_t task) { kernels.product(a, task, tile_scratch.get(kernels.product_scratch)); });
}

// The second reads what the first writes.
void run_products(const Kernels& kernels, const Pool& pool, ProductArgs& a, ProductArgs& b) {
  if (turns(kernels, a) || turns(kernels, b)) {
    run_product(kernels, pool, a);
    run_product(kernels, pool, b);
    return;
  }
  Pool used, used_next;
  int64_t tasks = cut(kernels, pool, a, used), next_tasks = cut(kernels, pool, b, used_next);
  if (used_next.threads > used.threads) used = used_next;
  for_each_task_in_turn(
      used, tasks, [&](int64_t task) { kernels.product(a, task, tile_scratch.get(kernels.product_scratch)); },
      next_tasks, [&](int64_t task) { kernels.product(b, task, tile_scratch.get(kernels.product_scratch)); });
}

template <class Body>
void over_blocks(const Pool& pool, int64_t rows, int64_t work, const Body& body) {
  Pool used = pool;
  if (work <= kSerialWork) used.threads = 1;
  int64_t step = ceil_div(rows, used.threads * 2);
  if (step < 1) step = 1;
  for_each_task(used, ceil_div(rows, step), [&](int64_t task) {
    int64_t begin = task * step;
    body(begin, begin + step < rows ? begin + step : rows);
  });
}

const char* bytes(const void* p) { return static_cast<const char*>(p); }

}  // namespace

void linear(const Kernels& kernels, const Pool& pool, const LinearArgs& a) {
  DType operand = kernels.operand_type(a.type);
  int64_t es = size_of(a.type), os = size_of(operand), ld = leading(a.k);
  const int64_t most = pass_rows(a.m);
  for (int64_t m0 = 0; m0 < a.m; m0 += most) {
    int64_t m = a.m - m0 < most ? a.m - m0 : most;
    char* x = static_cast<char*>(operand_scratch.get(m * ld * os));
    over_blocks(pool, m, m * a.k, [&](int64_t begin, int64_t end) {
      kernels.to_operand(bytes(a.x) + (m0 + begin) * a.ldx * es, a.ldx, a.type, x + begin * ld * os, ld, operand, a.k,
                         end - begin);
    });
    ProductArgs p{};
    p.x = x;
    p.w = a.w;
    p.bias = a.bias;
    p.y = static_cast<char*>(a.y) + m0 * a.n * es;
    p.m = m, p.n = a.n, p.k = a.k, p.ldx = ld, p.ldw = a.ldw, p.ldy = a.n;
    p.w_type = p.y_type = p.bias_type = a.type;
    run_product(kernels, pool, p);
  }
  operand_scratch.trim(kKeep);
  turned_scratch.trim(kKeep);
}

namespace {

// Normalised rows as an operand: norm into the tensor's dtype, then widen, row by row in cache.
void norm_operand(const Kernels& kernels, const MlpArgs& a, int64_t m0, int64_t begin, int64_t end, char* x,
                  int64_t ld, DType operand, char* row) {
  int64_t es = size_of(a.type), os = size_of(operand);
  for (int64_t r = begin; r < end; ++r) {
    const char* from = bytes(a.x) + (m0 + r) * a.ldx * es;
    if (a.normalise) {
      RmsNormArgs n{from,  row,    a.norm_scale, {{1, 1, 1}, {0, 0, 0}}, a.hidden,
                    a.eps, a.type, a.type,       a.round_first,          false};
      kernels.rms_norm(n, 0, 1);
      from = row;
    }
    kernels.to_operand(from, a.hidden, a.type, x + r * ld * os, ld, operand, a.hidden, 1);
  }
}

}  // namespace

void rms_norm_mlp(const Kernels& kernels, const Pool& pool, const MlpArgs& a) {
  DType operand = kernels.operand_type(a.type);
  int64_t es = size_of(a.type), os = size_of(operand);
  int64_t ldx = leading(a.hidden), ldh = leading(a.intermediate);
  const int64_t most = pass_rows(a.m);
  for (int64_t m0 = 0; m0 < a.m; m0 += most) {
    int64_t m = a.m - m0 < most ? a.m - m0 : most;
    char* x = static_cast<char*>(operand_scratch.get(m * (ldx + ldh) * os));
    char* h = x + m * ldx * os;
    // What fills up the last block of a row, which no column writes.
    const int64_t tail = a.intermediate / 32 * 32;
    if (tail < a.intermediate)
      for (int64_t r = 0; r < m; ++r) std::memset(h + (r * ldh + tail) * os, 0, 32 * os);
    over_blocks(pool, m, m * a.hidden, [&](int64_t begin, int64_t end) {
      char* row = static_cast<char*>(tile_scratch.get(a.hidden * es));
      norm_operand(kernels, a, m0, begin, end, x, ldx, operand, row);
    });
    ProductArgs up{};
    up.x = x, up.w = a.gate_up, up.bias = a.gate_up_bias, up.y = h;
    up.m = m, up.n = 2 * a.intermediate, up.k = a.hidden, up.ldx = ldx, up.ldw = a.ld_gate_up, up.ldy = ldh;
    up.pair = a.intermediate, up.w_type = up.bias_type = a.type, up.y_type = operand, up.activation = a.activation;
    ProductArgs down{};
    down.x = h, down.w = a.down, down.bias = a.down_bias, down.y = static_cast<char*>(a.y) + m0 * a.out * es;
    down.m = m, down.n = a.out, down.k = a.intermediate, down.ldx = ldh, down.ldw = a.ld_down, down.ldy = a.out;
    down.w_type = down.y_type = down.bias_type = a.type;
    run_products(kernels, pool, up, down);
  }
  operand_scratch.trim(kKeep);
  turned_scratch.trim(kKeep);
}

}  // namespace layout_kernels
