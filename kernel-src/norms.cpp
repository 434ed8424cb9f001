// Drivers of the row-wise operations: how rows are cut into tasks.
#include <cstring>

#include "kernels.h"
#include "parallel.h"

namespace layout_kernels {

namespace {

// Elements below which a second thread costs more than it saves: a fork and join of the pool is a few microseconds.
constexpr int64_t kSerialElements = 32 * 1024;
// Backward sums of the scale are formed per block of rows and then added in order, so their bits do not depend on the
// number of threads. At most this many blocks.
constexpr int64_t kMaxBlocks = 64;
constexpr int64_t kLine = 64;  // bytes of a line of the caches

template <class Body>
void over_rows(const Pool& pool, int64_t rows, int64_t width, const Body& body) {
  if (rows * width <= kSerialElements || pool.threads == 1) {
    body(0, rows);
    return;
  }
  // About eight tasks a thread, none below the serial limit.
  int64_t share = ceil_div(rows, pool.threads * 8);
  int64_t least = ceil_div(kSerialElements, width ? width : 1);
  int64_t step = share > least ? share : least;
  for_each_task(pool, ceil_div(rows, step), [&](int64_t task) {
    int64_t begin = task * step;
    body(begin, begin + step < rows ? begin + step : rows);
  });
}

// Runs body(begin, end, partial) over blocks that depend on `rows` alone and adds the partial sums in order.
template <class Body>
void with_sums(const Pool& pool, int64_t rows, int64_t width, float* total, const Body& body) {
  if (total == nullptr) {
    over_rows(pool, rows, width, [&](int64_t begin, int64_t end) { body(begin, end, nullptr); });
    return;
  }
  int64_t step = ceil_div(rows, kMaxBlocks);
  if (step < 16) step = 16;
  int64_t blocks = ceil_div(rows, step);
  Scratch memory;
  float* partial = static_cast<float*>(memory.get((blocks ? blocks : 1) * width * (int64_t)sizeof(float)));
  Pool used = pool;
  if (rows * width <= kSerialElements) used.threads = 1;
  for_each_task(used, blocks, [&](int64_t task) {
    float* mine = partial + task * width;
    std::memset(mine, 0, width * sizeof(float));
    int64_t begin = task * step;
    body(begin, begin + step < rows ? begin + step : rows, mine);
  });
  for (int64_t i = 0; i < width; ++i) total[i] = 0.0f;
  for (int64_t b = 0; b < blocks; ++b) {
    for (int64_t i = 0; i < width; ++i) total[i] += partial[b * width + i];
  }
}

}  // namespace

void rms_norm(const Kernels& k, const Pool& pool, const RmsNormArgs& args, int64_t rows) {
  RmsNormArgs a = args;
  // Where x and y do not fit the last cache together, nobody would find y there.
  const int64_t row = a.width * size_of(a.y_type), all = rows * a.width * (size_of(a.x_type) + size_of(a.y_type));
  const int64_t cache = last_level_cache();
  a.streamed = cache != 0 && all >= cache && row % kLine == 0 && reinterpret_cast<uintptr_t>(a.y) % kLine == 0;
  over_rows(pool, rows, a.width, [&](int64_t begin, int64_t end) { k.rms_norm(a, begin, end); });
}

void rms_norm_backward(const Kernels& k, const Pool& pool, const RmsNormBackwardArgs& a, int64_t rows, float* dscale) {
  with_sums(pool, rows, a.width, dscale,
            [&](int64_t begin, int64_t end, float* sums) { k.rms_norm_backward(a, begin, end, sums); });
}

void gated_activation(const Kernels& k, const Pool& pool, const GatedActivationArgs& a, int64_t rows, bool backward) {
  auto* kernel = backward ? k.gated_activation_backward : k.gated_activation;
  over_rows(pool, rows, a.width * 2, [&](int64_t begin, int64_t end) { kernel(a, begin, end); });
}

void gated_norm(const Kernels& k, const Pool& pool, const GatedNormArgs& a, int64_t rows) {
  int64_t width = a.width * a.groups;
  over_rows(pool, rows, width, [&](int64_t begin, int64_t end) { k.gated_norm(a, begin, end); });
}

void gated_norm_backward(const Kernels& k, const Pool& pool, const GatedNormArgs& a, int64_t rows, float* dscale) {
  with_sums(pool, rows, a.width * a.groups, dscale,
            [&](int64_t begin, int64_t end, float* sums) { k.gated_norm_backward(a, begin, end, sums); });
}

}  // namespace layout_kernels
