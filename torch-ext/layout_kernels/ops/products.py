"""Which matrix products the native CPU kernels make, and which are left to PyTorch: measured limits, as data."""

from __future__ import annotations

import torch

from .native import DTYPES, HALVES, level

# Rows of the input up to which our product is the faster one; none where PyTorch has no instructions for the dtype.
# PyTorch's own rearrange the weight for each call, which pays off with many rows (benchmarks/results/): in bf16 from
# some hundred on; in fp32 ours still won at 128, but libraries differ from processor to processor, so the limit is
# lower. AMX multiplies several times as fast as our kernels can: only what waits for memory is ours there; that limit
# is reasoned, for none was at hand.
_NO_LIMIT = 1 << 62
_ROWS = {
    ("avx512_bf16", torch.bfloat16): 128,
    ("portable", torch.float32): 0,
    ("avx2", torch.float32): 64,
    ("avx512", torch.float32): 64,
    ("avx512_bf16", torch.float32): 64,
}
_ROWS_BESIDE_AMX = 4


def _beside_amx(dtype: torch.dtype) -> bool:
    name = {torch.bfloat16: "_is_amx_tile_supported", torch.float16: "_is_amx_fp16_supported"}.get(dtype)
    ask = getattr(torch.cpu, name, None) if name is not None else None
    return ask is not None and bool(ask())


_AMX = frozenset(dtype for dtype in HALVES if _beside_amx(dtype))


def is_ours(rows: int, dtype: torch.dtype) -> bool:
    """Whether a product of `rows` rows in this dtype goes to the native kernels."""
    limit = _ROWS_BESIDE_AMX if dtype in _AMX else _ROWS.get((level(), dtype), _NO_LIMIT)
    return dtype in DTYPES and rows <= limit


def has_rows(weight: torch.Tensor) -> bool:
    """Whether each row of a weight lies in one piece, as the native kernels read it."""
    return weight.stride(1) == 1 or weight.shape[1] == 1


def is_vector(bias: torch.Tensor | None) -> bool:
    """Whether a bias is absent or lies in one piece."""
    return bias is None or bias.is_contiguous()
