// Compiled with -mavx512f -mavx512bw -mavx512dq -mavx512vl -mfma -mf16c.
#define LK_LEVEL avx512
#define LK_WIDTH 16
#define LK_MR 6
#define LK_NR 4
#define LK_FAR 4
#define LK_CHAINS 1
#include "level.inl"
