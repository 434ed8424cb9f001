"""Each level rounds where the contract says. One rounding left out lies within every tolerance; its bits tell."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch

from layout_kernels.numerics.cases import Case
from tests.native.test_every_level import native_function, suite

HALVES = ("bfloat16", "float16")
WIDTH = 520
MLP = import_module("layout_kernels.ops.rms_norm_mlp.reference").rms_norm_mlp


def share_that_differs(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Of a result in float32, what is further off than its own roundings: a half's are a hundred times as large."""
    assert found.dtype is wanted.dtype
    few = 2e-6 if found.dtype is torch.float32 else 0.0
    return 1 - torch.isclose(found, wanted, rtol=few, atol=few).float().mean().item()


def few_differ(found: Any, wanted: Any, case: Case) -> None:
    """A sum in another order, or another exp, turns a rounding now and then; one left out changes every fourth."""
    found, wanted = (made if isinstance(made, tuple) else (made,) for made in (found, wanted))
    pairs = [pair for pair in zip(found, wanted, strict=True) if pair != (None, None)]
    shares = [share_that_differs(*pair) for pair in pairs]
    assert max(shares) < 0.02, f"{case.case_id}: {shares}"


def check(package: Any, operation: str, case: Case) -> None:
    module, reference = suite(package, operation), import_module(f"layout_kernels.ops.{operation}.reference")
    arguments = module.arguments(case)
    few_differ(native_function(package, operation)(*arguments), getattr(reference, operation)(*arguments), case)
    arguments, name = module.backward_arguments(case), f"{operation}_backward"
    few_differ(native_function(package, name)(*arguments), getattr(reference, name)(*arguments), case)


# One row: a sum over rows would hide what is rounded before it. A weight in float32 has a gradient in float32, which
# nothing rounds again.
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("flavour", ["cast_then_scale", "scale_then_cast", "one_plus_scale"])
def test_a_norm_and_its_weight_s_gradient(package: Any, level: str, dtype: str, flavour: str) -> None:
    for weight in (dtype, "float32", None):
        check(package, "rms_norm", Case((1, WIDTH), dtype, settings={"flavour": flavour, "weight_dtype": weight}))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("order", ["gate_then_norm", "norm_then_gate"])
@pytest.mark.parametrize("flavour", ["cast_then_scale", "scale_then_cast"])
def test_a_gated_norm_and_its_gradients(package: Any, level: str, dtype: str, order: str, flavour: str) -> None:
    for weight in (dtype, "float32", None):
        settings = {"flavour": flavour, "order": order, "weight_dtype": weight, "gate_dtype": "float32"}
        check(package, "gated_rms_norm", Case((1, WIDTH), dtype, settings=settings))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_a_gated_activation_and_its_gradient(package: Any, level: str, dtype: str, activation: str) -> None:
    check(package, "gated_activation", Case((4, 2 * WIDTH), dtype, settings={"activation": activation}))


# One row, few, those that AVX2 packs, and those that it turns.
@pytest.mark.parametrize("rows", [1, 5, 16, 40])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_an_mlp(package: Any, level: str, dtype: str, activation: str, rows: int) -> None:
    """With the identity as its last product, and as its first ones, nothing but roundings is left."""
    settings = {"size": 128, "activation": activation}
    x, weight, _, _, eps, *_ = suite(package, "rms_norm_mlp").arguments(Case((rows, 128), dtype, settings=settings))
    one = torch.eye(128, dtype=x.dtype)
    code = ("silu", "gelu", "gelu_tanh").index(activation)
    native = import_module(f"{package.__name__}.ops.native").operators.cpu_rms_norm_mlp
    for norm, flavour, number in ((weight, "cast_then_scale", 0), (weight, "scale_then_cast", 1), (None, "none", 3)):
        wanted = MLP(x, norm, torch.cat((one, one.flip(0))), one, eps, flavour, activation, None, None)
        found = native(x, norm, torch.cat((one, one.flip(0))), one, eps, number, code, None, None)
        few_differ(found, wanted, Case((rows, 128), dtype, settings={**settings, "flavour": flavour}))
