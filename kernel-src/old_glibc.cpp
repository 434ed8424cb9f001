// Lets a file linked on a new system load on any since glibc 2.28: the C++ library that is linked in asks for two
// newer names.
#if __has_include(<features.h>)
#include <features.h>
#endif

#if defined(__GLIBC__)
#include <pthread.h>

// glibc 2.32 tells libstdc++ here that no thread was started; "there may be threads" is always right.
extern "C" {
__attribute__((visibility("hidden"))) char __libc_single_threaded = 0;
}

#if defined(__x86_64__)
// glibc 2.34 gave pthread_once a new version when it moved to another library; the old one is still there.
extern "C" int layout_kernels_pthread_once(pthread_once_t*, void (*)(void));
__asm__(".symver layout_kernels_pthread_once, pthread_once@GLIBC_2.2.5");

extern "C" __attribute__((visibility("hidden"))) int pthread_once(pthread_once_t* control, void (*routine)(void)) {
  return layout_kernels_pthread_once(control, routine);
}
#endif
#endif
