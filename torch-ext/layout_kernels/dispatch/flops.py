"""FLOPs of operations whose products torch does not see, told to `torch.utils.flop_counter`: as many as stock's.

That module takes as long to import as a small model, so it is told when a mode of it is first met, and never loaded.
Source: torch 2.13, ``torch/utils/flop_counter.py`` (``flop_registry``; a counter copies it when it is made).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

Formula = Callable[..., int]
_formulas: dict[Any, Formula] = {}
_told: set[int] = set()


def count(operator: Any, formula: Formula) -> None:
    """Let an operator count as `formula` of its arguments' shapes (and of what else they are) says."""
    _formulas[operator.overloadpacket] = formula


def tell_counters() -> None:
    """Tell the counters that are active now, and those that are made later. Called where a mode is active."""
    counters: Any = sys.modules.get("torch.utils.flop_counter")
    if counters is None:
        return
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    registries = [counters.flop_registry]
    registries += [m.counter.flop_registry for m in _get_current_dispatch_mode_stack() if hasattr(m, "counter")]
    for registry in registries:
        for packet, formula in _formulas.items():
            registry.setdefault(packet, counters.shape_wrapper(formula))
