"""Products that transformers' tensor-parallel plan has sharded by rows: what each rank holds of them.

A plan replaces the forward of each product. Where it shards rows (column-wise, as it is called there), takes a whole
input and gives each rank its part of the result, the rank's rows of parallel products are one product of this rank.

Source: transformers 5.22.2, ``distributed/tensor_parallel.py`` (``ColwiseParallel``, ``install_forward``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .plain import has_hooks


def is_sharded(weight: Any) -> bool:
    """Whether a parameter is a part of one that several ranks hold."""
    return type(weight).__name__ == "DTensor"


def local(weight: Any) -> torch.Tensor:
    """What this rank holds, without a gradient: the very tensor, where ``to_local()`` gives a view of it."""
    return weight._local_tensor


def _style(linear: nn.Module) -> Any:
    """The object of the plan that wraps the product's forward, or None."""
    forward: Any = vars(linear).get("forward")
    names = getattr(getattr(forward, "__code__", None), "co_freevars", ())
    if getattr(forward, "__name__", "") != "tp_forward" or "self" not in names:
        return None
    return forward.__closure__[names.index("self")].cell_contents


def rows_here(linear: Any) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """This rank's rows of a product and its bias, where calling the module in inference is their product."""
    style = _style(linear)
    weight, bias = linear._parameters.get("weight"), linear._parameters.get("bias")
    if (
        type(style).__name__ != "ColwiseParallel"
        or not is_sharded(weight)
        or not style.input_layouts.is_replicate()
        or not style.output_layouts.is_shard()
        or not style.use_local_output
        or has_hooks(linear)
    ):
        return None
    return local(weight), None if bias is None else local(bias)
