"""Which matrix products the native CPU kernels make, and which are left to PyTorch: measured limits, as data."""

from __future__ import annotations

from pathlib import Path

import torch

from .native import DTYPES, HALVES, level

# Rows of the input up to which our product is the faster one; none where PyTorch has no instructions for the dtype.
# PyTorch's own rearrange the weight for each call, which pays off with many rows (benchmarks/results/), in bf16 from
# some hundred on. In fp32 Intel's library, which PyTorch calls, is behind ours at any number of rows on an AMD
# processor; elsewhere, or where that was not measured, ours takes the few rows that a rearranged weight cannot
# pay for. AMX multiplies several times as fast as our kernels can: only memory-bound products are ours beside it,
# which is reasoned too.
_NO_LIMIT = 1 << 62
_ROWS = {
    ("avx512_bf16", torch.bfloat16): 128,
    ("portable", torch.float32): 0,
    ("avx2", torch.float32): 64,
    ("avx512", torch.float32): 64,
    ("avx512_bf16", torch.float32): 64,
}
_AHEAD_ON_AMD = ("avx2", "avx512", "avx512_bf16")
_ROWS_BESIDE_AMX = 4
_CPUINFO = Path("/proc/cpuinfo")


def _is_amd() -> bool:
    try:
        return "AuthenticAMD" in _CPUINFO.read_text(encoding="utf-8", errors="replace").partition("\n\n")[0]
    except OSError:
        return False


def _beside_amx(dtype: torch.dtype) -> bool:
    name = {torch.bfloat16: "_is_amx_tile_supported", torch.float16: "_is_amx_fp16_supported"}.get(dtype)
    ask = getattr(torch.cpu, name, None) if name is not None else None
    return ask is not None and bool(ask())


_AMD = _is_amd()
_AMX = frozenset(dtype for dtype in HALVES if _beside_amx(dtype))
_found: dict[tuple[str, torch.dtype], int] = {}


def _limit(dtype: torch.dtype) -> int:
    if dtype not in DTYPES:
        return -1
    if dtype in _AMX:
        return _ROWS_BESIDE_AMX
    here = level()
    if _AMD and dtype is torch.float32 and here in _AHEAD_ON_AMD:
        return _NO_LIMIT
    return _ROWS.get((here, dtype), _NO_LIMIT)


def is_ours(rows: int, dtype: torch.dtype) -> bool:
    """Whether a product of `rows` rows in this dtype goes to the native kernels."""
    case = level(), dtype
    limit = _found.get(case)
    if limit is None:
        limit = _found[case] = _limit(dtype)
    return rows <= limit


def has_rows(weight: torch.Tensor) -> bool:
    """Whether each row of a weight lies in one piece, as the native kernels read it."""
    return weight.is_contiguous() or weight.stride(1) == 1 or weight.shape[1] == 1


def is_vector(bias: torch.Tensor | None) -> bool:
    """Whether a bias is absent or lies in one piece."""
    return bias is None or bias.is_contiguous()
