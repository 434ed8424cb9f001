"""Which matrix products the native CPU kernels make, and which are left to PyTorch: measured limits, as data."""

from __future__ import annotations

import torch

from .native import HALVES, level

# Rows of the input up to which our product is the faster one. Where PyTorch has no bf16 or fp16 instructions it always
# is. With AVX-512-BF16, oneDNN rearranges the weight for each call, which pays from some tens of rows on
# (benchmarks/results/).
_NO_LIMIT = 1 << 62
_ROWS = {("avx512_bf16", torch.bfloat16): 24}


def is_ours(rows: int, dtype: torch.dtype) -> bool:
    """Whether a product of `rows` rows with a weight of this dtype goes to the native kernels."""
    return dtype in HALVES and rows <= _ROWS.get((level(), dtype), _NO_LIMIT)


def has_rows(weight: torch.Tensor) -> bool:
    """Whether each row of a weight lies in one piece, as the native kernels read it."""
    return weight.stride(1) == 1 or weight.shape[1] == 1


def is_vector(bias: torch.Tensor | None) -> bool:
    """Whether a bias is absent or lies in one piece."""
    return bias is None or bias.is_contiguous()
