// Plain C++: SSE2 on x86-64, NEON on aarch64, whatever the compiler takes for granted elsewhere.
#define LK_LEVEL portable
#define LK_WIDTH 4
#define LK_MR 4
#define LK_NR 2
#define LK_FAR 8
#define LK_CHAINS 1
#include "level.inl"
