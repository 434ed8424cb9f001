// Which levels this processor runs. Compiled for the plainest processor.
#include <cstring>

#include "kernels.h"

namespace layout_kernels {

extern const Kernels portable;
#if defined(__x86_64__)
extern const Kernels avx2;
extern const Kernels avx512;
extern const Kernels avx512_bf16;

namespace {

// The compiler's checks ask the operating system too: registers it does not save count as absent.
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
bool has_avx512_bf16() { return has_avx512() && __builtin_cpu_supports("avx512bf16"); }

}  // namespace
#endif

namespace {

const Kernels* at(int64_t i) {
  switch (i) {
    case 0:
      return &portable;
#if defined(__x86_64__)
    case 1:
      return has_avx2() ? &avx2 : nullptr;
    case 2:
      return has_avx512() ? &avx512 : nullptr;
    case 3:
      return has_avx512_bf16() ? &avx512_bf16 : nullptr;
#endif
  }
  return nullptr;
}

}  // namespace

int64_t level_count() { return 4; }

const char* level_name(int64_t i) {
  const Kernels* k = at(i);
  return k ? k->name : nullptr;
}

const Kernels* best_level() {
  const Kernels* best = &portable;
  for (int64_t i = 1; i < level_count(); ++i) {
    if (const Kernels* k = at(i)) best = k;
  }
  return best;
}

const Kernels* level(const char* name) {
  for (int64_t i = 0; i < level_count(); ++i) {
    const Kernels* k = at(i);
    if (k && std::strcmp(k->name, name) == 0) return k;
  }
  return nullptr;
}

}  // namespace layout_kernels
