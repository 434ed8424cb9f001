"""A stand-in for `torch_npu` on the simulated device: the operators that this package calls, and what they refuse.

Schemas are those of the wheel (`tests/npu/torch_npu_schemas.json`), so a call that the real operators would not take
does not pass here. Limits and rounding are facts of the vendor's pages and kernels: the operators' texts in torch_npu
2.14.0 (`_op_plugin_docs.py`, `meta/_meta_registrations.py`), and of CANN's ops-nn aclnnRmsNorm, aclnnRmsNormGrad,
aclnnGemmaRmsNorm, aclnnSwiGlu, aclnnSwiGluGrad, aclnnGeGluV3. Where two of them differ, the narrower limit is here.
"""

# ruff: noqa: A002, the arguments have the names of the vendor's schemas
from __future__ import annotations

import json
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

SCHEMAS = Path(__file__).resolve().parents[1] / "npu" / "torch_npu_schemas.json"
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_A2_AND_A3 = ("Ascend910B3", "Ascend910_9382")
_libraries: list[torch.library.Library] = []


class RefusedError(RuntimeError):
    """What the vendor's operator does not take."""


def _refuse(name: str, *reasons: tuple[bool, str]) -> None:
    for wrong, reason in reasons:
        if wrong:
            raise RefusedError(f"{name}: {reason}")


def _common(name: str, product: str, least_dim: int, *tensors: torch.Tensor) -> None:
    first = tensors[0]
    _refuse(
        name,
        *((t.dtype not in _DTYPES, f"dtype {t.dtype}") for t in tensors),
        *((t.dtype is not first.dtype, f"dtypes {first.dtype} and {t.dtype} differ") for t in tensors),
        (not least_dim <= first.dim() <= 8, f"{first.dim()} dimensions"),
        (product.startswith("Ascend310") and first.dtype is torch.bfloat16, f"bfloat16 on {product}"),
    )


def _rms_norm(product: str, input: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6) -> Any:
    _common("npu_rms_norm", product, 2, input, gamma)
    _refuse(
        "npu_rms_norm",
        (gamma.shape != input.shape[-gamma.dim() :], f"gamma {tuple(gamma.shape)} for {tuple(input.shape)}"),
        (
            product.startswith("Ascend310") and input.shape[-1] * input.element_size() < 32,
            f"rows below 32 bytes on {product}",
        ),
    )
    return _norm(input, gamma.float(), epsilon)


def _norm(input: torch.Tensor, gamma: torch.Tensor, epsilon: float) -> tuple[torch.Tensor, torch.Tensor]:
    rows = input.float()
    # The card's last bit of a reciprocal root is not documented; torch's stands in for it.
    rstd = torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + epsilon)
    # The product is made in float32 and rounded once, in every flavour of the vendor's kernel.
    return (rows * rstd * gamma).to(input.dtype).contiguous(), rstd


def _rms_norm_backward(
    product: str, dy: torch.Tensor, input: torch.Tensor, gamma: torch.Tensor, rstd: torch.Tensor
) -> Any:
    _common("npu_rms_norm_backward", product, 2, input, dy, gamma)
    _refuse(
        "npu_rms_norm_backward",
        (input.numel() == 0, "an empty tensor"),
        (dy.shape != input.shape, f"dy {tuple(dy.shape)} for {tuple(input.shape)}"),
        (rstd.dtype is not torch.float32, f"rstd of {rstd.dtype}"),
        (rstd.shape != (*input.shape[:-1], 1), f"rstd {tuple(rstd.shape)}"),
    )
    normed, grad = input.float() * rstd, dy.float()
    scaled = grad * gamma.float()
    dx = rstd * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))
    dgamma = (grad * normed).reshape(-1, input.shape[-1]).sum(0)
    return dx.to(input.dtype).contiguous(), dgamma


def _gemma_rms_norm(product: str, input: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6) -> Any:
    _common("npu_gemma_rms_norm", product, 1, input, gamma)
    _refuse(
        "npu_gemma_rms_norm",
        (product not in _A2_AND_A3, f"{product}, which lacks it"),
        (gamma.shape != input.shape[-gamma.dim() :], f"gamma {tuple(gamma.shape)} for {tuple(input.shape)}"),
        (input.numel() == 0, "an empty tensor"),
        (not (input.is_contiguous() and gamma.is_contiguous()), "a strided tensor"),
    )
    return _norm(input, 1.0 + gamma.float(), epsilon)


def _halves(name: str, product: str, input: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    _common(name, product, 1, input)
    _refuse(name, (input.shape[dim] % 2 == 1, f"{input.shape[dim]} elements along dim {dim}, which is odd"))
    first, second = input.float().chunk(2, dim)
    return first, second


def _unaligned(input: torch.Tensor) -> bool:
    return input.shape[-1] * input.element_size() % 64 != 0


def _swiglu(product: str, input: torch.Tensor, dim: int = -1) -> torch.Tensor:
    gate, up = _halves("npu_swiglu", product, input, dim)
    _refuse(
        "npu_swiglu",
        (input.numel() == 0, "an empty tensor"),
        (not input.is_contiguous(), "a strided tensor"),
        (product.startswith("Ascend310") and _unaligned(input), f"rows that are no multiple of 64 bytes on {product}"),
    )
    return (functional.silu(gate.contiguous()) * up).to(input.dtype)


def _swiglu_backward(product: str, grad_output: torch.Tensor, input: torch.Tensor, dim: int = -1) -> torch.Tensor:
    gate, up = _halves("npu_swiglu_backward", product, input, dim)
    _common("npu_swiglu_backward", product, 1, input, grad_output)
    _refuse(
        "npu_swiglu_backward",
        (input.numel() == 0, "an empty tensor"),
        (not grad_output.is_contiguous(), "a strided gradient"),
        (grad_output.shape != gate.shape, f"a gradient of shape {tuple(grad_output.shape)}"),
        (_unaligned(input), "rows that are no multiple of 64 bytes"),
    )
    grad, sigmoid = grad_output.float(), torch.sigmoid(gate)
    both = (grad * up * (sigmoid + gate * sigmoid * (1 - sigmoid)), grad * gate * sigmoid)
    return torch.cat(both, dim).to(input.dtype)


def _approximate(name: str, value: int) -> str:
    _refuse(name, (value not in (0, 1), f"approximate={value}"))
    return "tanh" if value == 1 else "none"


def _geglu(
    product: str, input: torch.Tensor, dim: int = -1, approximate: int = 1, activate_left: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    left, right = _halves("npu_geglu", product, input, dim)
    activated, other = (left, right) if activate_left else (right, left)
    kind = _approximate("npu_geglu", approximate)
    # On the CPU torch's gelu(inf) is inf for a strided tensor and NaN for a contiguous one; the reference's forward
    # has the second and its backward the first, to which these two results are compared.
    value = functional.gelu(activated.contiguous(), approximate=kind) * other
    return value.to(input.dtype), functional.gelu(activated, approximate=kind).to(input.dtype)


def _geglu_grad(
    product: str,
    grad_output: torch.Tensor,
    input: torch.Tensor,
    gelu: torch.Tensor,
    dim: int = -1,
    approximate: int = 1,
    activate_left: bool = False,
) -> torch.Tensor:
    left, right = _halves("npu_geglu_grad", product, input, dim)
    _common("npu_geglu_grad", product, 1, input, grad_output, gelu)
    _refuse(
        "npu_geglu_grad",
        (grad_output.shape != left.shape, f"a gradient of shape {tuple(grad_output.shape)}"),
        (gelu.shape != left.shape, f"gelu of shape {tuple(gelu.shape)}"),
    )
    activated, other = (left, right) if activate_left else (right, left)
    grad = grad_output.float()
    kind = _approximate("npu_geglu_grad", approximate)
    slope = torch.ops.aten.gelu_backward(grad * other, activated, approximate=kind)
    through = grad * gelu.float()
    return torch.cat((slope, through) if activate_left else (through, slope), dim).to(input.dtype)


_OPERATORS: dict[str, Callable[..., Any]] = {
    "npu_rms_norm": _rms_norm,
    "npu_rms_norm_backward": _rms_norm_backward,
    "npu_gemma_rms_norm": _gemma_rms_norm,
    "npu_swiglu": _swiglu,
    "npu_swiglu_backward": _swiglu_backward,
    "npu_geglu": _geglu,
    "npu_geglu_grad": _geglu_grad,
}


def newest_schemas() -> tuple[str, dict[str, str]]:
    """The newest version in the extract, and its schemas."""
    version, wheel = list(json.loads(SCHEMAS.read_text())["versions"].items())[-1]
    return version, wheel["schemas"]


def make(run: Callable[..., Any], simulation: Any) -> types.ModuleType:
    """The module `torch_npu`, whose operators run by `run` on the simulated device."""
    module = types.ModuleType("torch_npu")
    version, schemas = newest_schemas()
    library = torch.library.Library("npu", "DEF")
    for name, schema in schemas.items():
        library.define(schema)

        def kernel(*args: Any, _name: str = name, **kwargs: Any) -> Any:
            if any(value is None for value in args):
                raise RefusedError(f"{_name}: a tensor is missing")

            def compute(*values: Any, **named: Any) -> Any:
                return _OPERATORS[_name](simulation.product, *values, **named)

            return run(_name, compute, args, kwargs)

        library.impl(name, kernel, "PrivateUse1")
        setattr(module, name, getattr(torch.ops.npu, name))
    _libraries.append(library)

    def npu_fusion_attention(*args: Any, **kwargs: Any) -> Any:
        raise RefusedError("the simulated npu has no fused attention; load with attn_implementation='eager' or 'sdpa'")

    members: dict[str, Any] = {
        "__version__": f"{version}+simulated",
        "npu_fusion_attention": npu_fusion_attention,
        "npu": torch.get_device_module("npu"),
    }
    for key, value in members.items():
        setattr(module, key, value)
    return module
