"""Every operation on the simulated device: the reference's numbers, within what the vendor's operators take."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import layout_kernels
from layout_kernels.dispatch.registry import REGISTRIES
from layout_kernels.dispatch.runtime import Runtime
from tests.npu.simulated.inputs import fetch, normal, send
from tests.ops.catalog import Subject, subjects, tensors_of

BOUND = layout_kernels.initialize("npu")
BF16, FP16 = torch.bfloat16, torch.float16


def results(value: Any) -> Any:
    """What a comparison reads: a backward's gradients, of which an operator gives empty ones for None."""
    return fetch(value)


@pytest.mark.parametrize("subject", subjects())
def test_an_implementation_equals_the_reference_without_waiting_for_the_device(npu, subject: Subject):
    arguments = subject.arguments()
    sent = send(arguments)
    before = [fetch(tensor).clone() for tensor in tensors_of(sent)]
    with npu.asynchronous():
        found = BOUND[subject.name].function(*sent)
    assert subject.compare(results(found), arguments) is None
    lent = {tensor.untyped_storage()._cdata for tensor in tensors_of(sent)}
    for tensor in tensors_of(found):
        assert tensor.is_contiguous()
        assert tensor.untyped_storage()._cdata not in lent
    for tensor, old in zip(tensors_of(sent), before, strict=True):
        torch.testing.assert_close(fetch(tensor), old, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("subject", subjects(lambda case: case.values == "normal"))
def test_the_operator_gives_what_the_implementation_gives(subject: Subject):
    sent = send(subject.arguments())
    direct, through = BOUND[subject.name].function(*sent), subject.operator(*sent)
    for one, other in zip(tensors_of(direct), tensors_of(through), strict=False):
        torch.testing.assert_close(fetch(one), fetch(other), rtol=0, atol=0)


# The gated norm has no backward of the vendor's; the reference's runs.
BY_TORCH_NPU = {
    "rms_norm",
    "rms_norm_backward",
    "gated_activation",
    "gated_activation_backward",
    "rms_norm_mlp",
    "gated_rms_norm",
}


def test_the_operations_are_bound_to_torch_npu_in_every_mode_but_cudagraph():
    for mode in ("eager", "compile", "aclgraph"):
        kernels = Runtime(REGISTRIES).initialize("npu", mode)
        assert {name for name, kernel in kernels.items() if kernel.spec.solution == "torch_npu"} == BY_TORCH_NPU
    kernels = Runtime(REGISTRIES).initialize("npu", "cudagraph")
    assert {kernel.spec.solution for kernel in kernels.values()} == {"reference"}
    assert "cudagraph" in kernels["rms_norm"].excluded["npu.torch_npu.rms_norm"]


def x(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return send(normal(*shape, dtype=dtype, seed=seed))


def norm(rows: torch.Tensor, weight: torch.Tensor | None, flavour: str = "cast_then_scale") -> Any:
    return BOUND["rms_norm"].function(rows, weight, 1e-6, flavour)


def act(pair: torch.Tensor, activation: str = "silu") -> Any:
    return BOUND["gated_activation"].function(pair, activation)


def act_backward(grad: torch.Tensor, pair: torch.Tensor, activation: str = "silu") -> Any:
    return BOUND["gated_activation_backward"].function(grad, pair, activation)


def mlp(rows: torch.Tensor, dtype: torch.dtype) -> Any:
    weights = x(16, dtype=dtype), x(64, 16, dtype=dtype), x(16, 32, dtype=dtype)
    return BOUND["rms_norm_mlp"].function(rows, *weights, 1e-6, "cast_then_scale", "silu", None, None)


def mlp_alone(rows: torch.Tensor, dtype: torch.dtype) -> Any:
    weights = x(64, 16, dtype=dtype), x(16, 32, dtype=dtype)
    return BOUND["rms_norm_mlp"].function(rows, None, *weights, 0.0, "none", "silu", None, None)


CHOICES: dict[str, tuple[Any, list[str]]] = {
    "a norm": (lambda: norm(x(2, 16, dtype=BF16), x(16, dtype=BF16)), ["npu_rms_norm"]),
    "a strided norm": (lambda: norm(x(2, 32)[:, ::2], x(16)), ["npu_rms_norm"]),
    "an empty norm": (lambda: norm(x(0, 16), x(16)), ["npu_rms_norm"]),
    "a vector": (lambda: norm(x(16), x(16)), ["npu_rms_norm"]),
    "an unscaled norm": (lambda: norm(x(2, 16, dtype=FP16), None), ["npu_rms_norm"]),
    "a float32 weight": (lambda: norm(x(2, 16, dtype=BF16), x(16)), ["npu_rms_norm"]),
    "a float64 norm": (lambda: norm(x(2, 16, dtype=torch.float64), None), []),
    "Gemma's norm": (lambda: norm(x(2, 16), x(16), "one_plus_scale"), ["npu_gemma_rms_norm"]),
    "Gemma's, strided": (lambda: norm(x(2, 32)[:, ::2], x(16), "one_plus_scale"), ["npu_rms_norm"]),
    "Gemma's, empty": (lambda: norm(x(0, 16), x(16), "one_plus_scale"), ["npu_rms_norm"]),
    "Gemma's, float32 weight": (lambda: norm(x(2, 16, dtype=BF16), x(16), "one_plus_scale"), ["npu_rms_norm"]),
    "silu": (lambda: act(x(2, 32)), ["npu_swiglu"]),
    "silu, strided": (lambda: act(x(2, 64)[:, ::2]), []),
    "silu, empty": (lambda: act(x(0, 32)), []),
    "silu in float64": (lambda: act(x(2, 32, dtype=torch.float64)), []),
    "silu of nine dimensions": (lambda: act(x(*[1] * 8, 32)), []),
    "gelu, strided": (lambda: act(x(2, 64)[:, ::2], "gelu"), ["npu_geglu"]),
    "gelu_tanh": (lambda: act(x(2, 32), "gelu_tanh"), ["npu_geglu"]),
    "backward of silu": (lambda: act_backward(x(2, 16), x(2, 32)), ["npu_swiglu_backward"]),
    "backward of silu, short rows": (lambda: act_backward(x(2, 7), x(2, 14)), []),
    "backward of silu, strided gradient": (lambda: act_backward(x(2, 32)[:, ::2], x(2, 32)), ["npu_swiglu_backward"]),
    "backward of silu, two dtypes": (lambda: act_backward(x(2, 64), x(2, 128, dtype=BF16)), []),
    "backward of gelu": (lambda: act_backward(x(2, 16), x(2, 32), "gelu"), ["npu_geglu", "npu_geglu_grad"]),
    "a norm and an MLP": (lambda: mlp(x(2, 16, dtype=BF16), BF16), ["npu_rms_norm", "npu_swiglu"]),
    "an MLP alone": (lambda: mlp_alone(x(2, 16, dtype=BF16), BF16), ["npu_swiglu"]),
    "an MLP alone of strided rows": (lambda: mlp_alone(x(2, 32)[:, ::2], BF16), ["npu_swiglu"]),
}


@pytest.mark.parametrize("name", CHOICES)
def test_the_vendors_operator_runs_where_it_takes_the_arguments(npu, name):
    call, expected = CHOICES[name]
    with npu.watched() as calls:
        call()
    assert [called for called in calls if called.startswith("npu_")] == expected


def test_a_float32_weight_is_not_rounded_to_half_precision_first():
    rows, weight = normal(64, 16, dtype=BF16), normal(16)
    found = norm(send(rows), send(weight), "scale_then_cast")
    expected = layout_kernels.rms_norm(rows.float(), weight, 1e-6, "scale_then_cast").to(BF16)
    # Both compute in float32 and round once; the native CPU norm may sum in another order, which turns few roundings.
    assert (fetch(found) != expected).float().mean() < 0.01


def test_a_product_without_gemmas_norm_takes_the_plain_one(npu):
    npu.product = "Ascend950PR_9589"
    rows, weight = normal(2, 16, dtype=BF16), normal(16, dtype=BF16)
    with npu.watched() as calls:
        found = norm(send(rows), send(weight), "one_plus_scale")
    assert "npu_rms_norm" in calls
    assert "npu_gemma_rms_norm" not in calls
    expected = layout_kernels.rms_norm(rows, weight, 1e-6, "one_plus_scale")
    torch.testing.assert_close(fetch(found), expected)


@pytest.mark.parametrize("product", ["Ascend310P3", "Ascend910A", "Ascend910B"])
def test_a_product_with_gaps_runs_the_reference(npu, product):
    npu.product = product
    with npu.watched() as calls:
        norm(x(2, 16, dtype=BF16), x(16, dtype=BF16))
        norm(x(2, 16), x(16), "one_plus_scale")
        act(x(2, 14))
        act_backward(x(2, 16), x(2, 32))
        mlp(x(2, 16), torch.float32)
    assert not [called for called in calls if called.startswith("npu_")]


@pytest.mark.parametrize("product", ["Ascend910B3", "Ascend910_9382"])
def test_atlas_a2_and_a3_have_gemmas_norm(npu, product):
    npu.product = product
    with npu.watched() as calls:
        norm(x(2, 16), x(16), "one_plus_scale")
    assert "npu_gemma_rms_norm" in calls


def test_the_tensors_device_is_asked_for_its_product_not_the_current_one(npu):
    # The simulation knows device 0 only and refuses every other.
    with torch.npu.device(1):
        norm(x(2, 16), x(16), "one_plus_scale")
