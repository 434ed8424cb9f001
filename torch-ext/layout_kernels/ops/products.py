"""Which matrix products the native CPU kernels make, and which are left to PyTorch."""

from __future__ import annotations

import torch

from ..dispatch.runtime import RUNTIME
from . import tuning
from .native import level

RUNTIME.on_initialize("cpu", tuning.prepare)


def is_ours(rows: int, dtype: torch.dtype) -> bool:
    """Whether a product of `rows` rows in this dtype goes to the native kernels."""
    measured = tuning.choice(dtype, level(), torch.get_num_threads())
    if measured is None:
        return tuning.is_shipped(rows, dtype, level())
    return measured[min(rows.bit_length(), tuning.LENGTHS)]


def has_rows(weight: torch.Tensor) -> bool:
    """Whether each row of a weight lies in one piece, as the native kernels read it."""
    return weight.is_contiguous() or weight.stride(1) == 1 or weight.shape[1] == 1


def is_vector(bias: torch.Tensor | None) -> bool:
    """Whether a bias is absent or lies in one piece."""
    return bias is None or bias.is_contiguous()
