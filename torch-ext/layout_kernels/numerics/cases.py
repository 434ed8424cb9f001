"""A case of an operation, and the tensors of a case. Importing this loads no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

# How the main input lies in memory. Gaps between its elements hold NaN, so that a read outside of it shows.
LAYOUTS: Mapping[str, str] = {
    "contiguous": "as made",
    "offset": "contiguous, one element into its storage, so not aligned",
    "sliced": "x[..., 3:-4] of a wider tensor: rows further apart than they are long",
    "strided": "x[..., ::2]: the last stride is 2",
    "transposed": "the last two dimensions swapped in memory: the last stride is not 1",
    "heads": "the two dimensions before the last swapped in memory, as q_norm sees its input",
    "expanded": "the first dimension has stride 0",
}
VALUES: Mapping[str, str] = {
    "normal": "standard normal",
    "zeros": "rows of zeros",
    "large": "1000 times normal",
    "tiny": "normal times 1e-4",
    "nonfinite": "normal, with an infinity of each sign in the first row and a NaN in the last",
}
_LEAST_DIMENSIONS = {"transposed": 2, "heads": 3, "expanded": 2}


@dataclass(frozen=True)
class Case:
    """One set of arguments of an operation.

    Attributes:
        shape: of the main input.
        dtype: of the main input, a name such as "bfloat16".
        layout: one of `LAYOUTS`.
        values: one of `VALUES`.
        settings: what else the operation's `arguments` reads; defaults stand there.
        seed: of the generator that makes the values.
    """

    shape: tuple[int, ...]
    dtype: str = "float32"
    layout: str = "contiguous"
    values: str = "normal"
    settings: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0

    @property
    def case_id(self) -> str:
        """A name that tells cases apart and holds all that is needed to make one again."""
        shape = "x".join(map(str, self.shape))
        settings = "".join(f",{key}={value}" for key, value in self.settings.items())
        return f"{shape},{self.dtype},{self.layout},{self.values}{settings},seed={self.seed}"


def generator(case: Case) -> torch.Generator:
    """The source of a case's values."""
    import torch

    return torch.Generator().manual_seed(case.seed)


def dtype_named(name: str) -> torch.dtype:
    """The dtype called, for example, "bfloat16"."""
    import torch

    return getattr(torch, name)


def make_values(shape: Sequence[int], dtype: str, values: str, source: torch.Generator) -> torch.Tensor:
    """A contiguous tensor on the CPU of one of the kinds in `VALUES`."""
    import torch

    made = torch.randn(tuple(shape), generator=source, dtype=torch.float64)
    if values == "zeros":
        made = made * 0
    elif values in ("large", "tiny"):
        made = made * (1e3 if values == "large" else 1e-4)
    elif values == "nonfinite" and made.numel():
        rows = made.view(-1, made.shape[-1])
        rows[0, 0], rows[0, -1], rows[-1, rows.shape[-1] // 2] = float("inf"), float("-inf"), float("nan")
    return made.to(dtype_named(dtype))


def lay_out(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """The same values in memory as `LAYOUTS` describes; `expanded` repeats the first entry of the first dimension.

    Raises:
        ValueError: an unknown layout, or one that asks for more dimensions.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}; given {layout!r}")
    if tensor.dim() < _LEAST_DIMENSIONS.get(layout, 1):
        raise ValueError(f"layout {layout!r} needs {_LEAST_DIMENSIONS[layout]} dimensions, not {tensor.dim()}")
    shape, width = tensor.shape, tensor.shape[-1]
    if layout == "contiguous":
        return tensor
    if layout == "offset":
        room = tensor.new_full((tensor.numel() + 1,), float("nan"))
        return room[1:].view(shape).copy_(tensor)
    if layout == "sliced":
        room = tensor.new_full((*shape[:-1], width + 7), float("nan"))
        return room[..., 3 : 3 + width].copy_(tensor)
    if layout == "strided":
        room = tensor.new_full((*shape[:-1], 2 * width), float("nan"))
        return room[..., ::2].copy_(tensor)
    if layout == "transposed":
        return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)
    if layout == "heads":
        return tensor.transpose(-2, -3).contiguous().transpose(-2, -3)
    return tensor[:1].expand(shape)


def main_input(case: Case, source: torch.Generator) -> torch.Tensor:
    """The main input of a case."""
    return lay_out(make_values(case.shape, case.dtype, case.values, source), case.layout)
