"""`rms_norm`: the argument check and the public function."""

from __future__ import annotations

import torch

from ..arguments import check_choice, check_eps, check_rows, check_vector
from . import FLAVOURS
from . import reference


def check_arguments(x: torch.Tensor, weight: torch.Tensor | None, eps: float, flavour: str) -> None:
    """What every launch, fake implementation and suite asks of the arguments.

    Raises:
        TypeError, ValueError: they name the argument, what was given and what is allowed.
    """
    check_rows("x", x)
    if weight is not None:
        check_vector("weight", weight, x.shape[-1], x)
    check_eps(eps)
    check_choice("flavour", flavour, FLAVOURS)


def result_dtype(x: torch.dtype, weight: torch.dtype | None, flavour: str) -> torch.dtype:
    """The dtype of the result: that of x, but cast_then_scale with a wider weight gives the wider dtype."""
    if weight is None or flavour != "cast_then_scale":
        return x
    return torch.promote_types(x, weight)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float = 1e-6, flavour: str = "cast_then_scale"
) -> torch.Tensor:
    """Root mean square norm over the last dimension.

    n = x / sqrt(mean(x^2) + eps), computed in float32 (float64 for float64), then

    - `cast_then_scale`: weight * round(n), round being to the dtype of x (source: transformers' `LlamaRMSNorm`);
    - `scale_then_cast`: round(weight * n) (`Olmo2RMSNorm`, `Gemma3nRMSNorm`);
    - `one_plus_scale`: round((1 + weight) * n), the sum in the dtype of the computation (`GemmaRMSNorm`).

    Args:
        x: [..., width], any strides; float16, bfloat16, float32 or float64; one dimension at least, width at least 1.
        weight: [width], of the same dtypes (float64 only beside float64), or None: unscaled, round(n).
        eps: finite and at least 0.
        flavour: one of the three names.

    Returns:
        [..., width], contiguous, memory of its own. The dtype of x; with cast_then_scale, x's and weight's promoted.

    Raises:
        TypeError, ValueError: an argument is not as above.
        NotImplementedError: called under `torch.func.vmap`; leading dimensions already are a batch.
    """
    check_arguments(x, weight, eps, flavour)
    return reference.rms_norm(x, weight, eps, flavour)
