// One level: all kernels compiled with the flags of the file that includes this one. It defines
//   LK_LEVEL  the level's name, an identifier
//   LK_WIDTH  floats in a vector
//   LK_MR, LK_NR  the register tile of a product: LK_MR * LK_NR sums and LK_NR + 1 operands fit the registers
//   LK_FAR, LK_CHAINS  one row of x: the rows of the weight that are read side by side, and the sums of each
//   LK_PACKED  defined where products of many rows turn the weight or x (packed.inl, turned.inl)
#include "kernels.h"
#include "vec.h"

using namespace layout_kernels;

#include "norm.inl"
#include "activation.inl"
#include "gated_norm.inl"
#include "product.inl"

#define LK_NAME_(x) #x
#define LK_NAME(x) LK_NAME_(x)

namespace layout_kernels {
extern const Kernels LK_LEVEL;
const Kernels LK_LEVEL = {
    LK_NAME(LK_LEVEL),
    rms_norm_level,
    rms_norm_backward_level,
    gated_activation_level,
    gated_activation_backward_level,
    gated_norm_level,
    gated_norm_backward_level,
    to_operand_level,
    operand_type_level,
    widen_level,
    product_level,
    kScratch,
    kTileM,
    kTileN,
#ifdef LK_PACKED
    turn_level,
    kTurnedRows,
#else
    nullptr,
    0,
#endif
};
}  // namespace layout_kernels
