// Compiled as level_avx512.cpp is, with -mavx512bf16 too.
#define LK_LEVEL avx512_bf16
#define LK_WIDTH 16
#define LK_MR 6
#define LK_NR 4
#define LK_FAR 4
#define LK_CHAINS 1
#include "level.inl"
