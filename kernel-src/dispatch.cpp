// Which levels this processor runs. Compiled for the plainest processor.
#include <cstring>
#include <initializer_list>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

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

// The leaf that lists the caches, one a subleaf: Intel's is 4, AMD's lies with its extensions ("Cache Topology").
int64_t largest_cache() {
  unsigned a, b, c, d;
  int64_t most = 0;
  for (unsigned leaf : {0x4u, 0x8000001du}) {
    for (unsigned i = 0; i < 8 && __get_cpuid_count(leaf, i, &a, &b, &c, &d) && (a & 0x1f) != 0; ++i) {
      int64_t ways = (b >> 22) + 1, partitions = (b >> 12 & 0x3ff) + 1, line = (b & 0xfff) + 1, sets = (int64_t)c + 1;
      int64_t size = ways * partitions * line * sets;
      if (size > most) most = size;
    }
  }
  return most;
}

}  // namespace
#endif

int64_t last_level_cache() {
#if defined(__x86_64__)
  static const int64_t size = largest_cache();
  return size;
#else
  return 0;
#endif
}

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
