"""What the products of the Ascend family take, as data that the `npu` modules share.

Facts of the pages aclnnRmsNorm, aclnnRmsNormGrad, aclnnGemmaRmsNorm, aclnnSwiGlu and aclnnSwiGluGrad of CANN's ops-nn,
and of torch_npu 2.14.0's own texts on its operators. Importing this loads torch, not torch_npu.

The `npu` modules set no device: torch_npu's wrapper of each operator sets that of its first tensor (in its wheel,
torchnpugen/custom_functions.py), as torch does for its own. They launch on the current stream and never wait for it.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_DIM = 8

# Atlas inference products (Ascend310*) take neither bfloat16, nor short rows, nor infinities; Atlas training products
# (the first Ascend910) have no fused activation. Atlas A2 is Ascend910B with a number; the bare name is an older one.
_LIMITED = ("Ascend910A", "Ascend910B", "Ascend910ProA", "Ascend910ProB", "Ascend910PremiumA")
_GEMMA = ("Ascend910B", "Ascend910_93")


@functools.cache
def _product(index: int | None) -> str:
    npu: Any = torch.npu  # type: ignore[attr-defined]  # torch_npu adds it
    return str(npu.get_device_name(index))


def takes(*tensors: torch.Tensor | None) -> bool:
    """Whether the vendor's operators take these dtypes, on the product that the tensors lie on."""
    for tensor in tensors:
        if tensor is not None and (tensor.dtype not in DTYPES or is_limited(tensor.device)):
            return False
    return True


def is_limited(device: torch.device) -> bool:
    """Whether the vendor's operators have gaps on this product that the operations here do not have."""
    name = _product(device.index)
    return name.startswith("Ascend310") or name in _LIMITED


def has_gemma_rms_norm(device: torch.device) -> bool:
    """Whether a product that `takes` lets through has the norm that scales by one plus the weight: Atlas A2 and A3."""
    return _product(device.index).startswith(_GEMMA)


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """The same rows in a number of dimensions that the vendor's norm takes, 2 to 8; the width stays last."""
    return x if 2 <= x.dim() <= MAX_DIM else x.reshape(-1, x.shape[-1])
