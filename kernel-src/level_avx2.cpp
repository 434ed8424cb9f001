// Compiled with -mavx2 -mfma -mf16c.
#define LK_LEVEL avx2
#define LK_WIDTH 8
#define LK_MR 4
#define LK_NR 3
#define LK_FAR 4
#define LK_CHAINS 2
#define LK_PACKED 1
#include "level.inl"
