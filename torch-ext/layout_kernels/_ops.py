"""The operator namespace of this copy of the package.

This file serves the source tree. A build replaces it by a generated one with the same names: `NAMESPACE`,
`EXTENSIONS`, `add_op_namespace_prefix` and `ops`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_SOURCE = "_layout_kernels_source"
_PACKAGE = __name__.rpartition(".")[0]

# A copy of the source tree under another name needs operators of its own: the namespace is process-wide.
NAMESPACE = _SOURCE if _PACKAGE == "layout_kernels" else f"{_SOURCE}_{re.sub(r'[^0-9A-Za-z]+', '_', _PACKAGE)}"

# Native extensions of this copy: what they serve, and the module in this package that holds them. A kind that is not
# listed was not built; one that is listed must load. The namespace is compiled in, so no other copy can use the file.
_BUILT = NAMESPACE == _SOURCE and any(Path(__file__).parent.glob(f"{_SOURCE}*.so"))
EXTENSIONS: Mapping[str, str] = {"cpu": _SOURCE} if _BUILT else {}


def add_op_namespace_prefix(name: str) -> str:
    """The qualified name `<namespace>::<name>` of one of this copy's operators."""
    return f"{NAMESPACE}::{name}"


def __getattr__(name: str) -> Any:
    """`ops`: this copy's operators, `torch.ops.<namespace>`; torch is imported by asking for them."""
    if name == "ops":
        import torch

        return getattr(torch.ops, NAMESPACE)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
