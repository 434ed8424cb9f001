from __future__ import annotations

from importlib import import_module

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from layout_kernels import gated_activation, gated_rms_norm, rms_norm, rms_norm_mlp
from layout_kernels.dispatch.runtime import RUNTIME, prepared
from layout_kernels.numerics.cases import LAYOUTS, lay_out
from layout_kernels.ops.gated_activation import ACTIVATIONS
from layout_kernels.ops.gated_rms_norm import FLAVOURS as GATED_FLAVOURS
from layout_kernels.ops.gated_rms_norm import ORDERS
from layout_kernels.ops.rms_norm import FLAVOURS, reference
from layout_kernels.ops.rms_norm import operator as rms_norm_operator
from layout_kernels.ops.rms_norm_mlp import mlp_of_parts


def double(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()


@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("weight", [True, False])
def test_rms_norm_first_and_second_derivatives(flavour, weight):
    def norm(x, *weights):
        return rms_norm(x, weights[0] if weights else None, 1e-5, flavour)

    inputs = (double(2, 3, 5), double(5, seed=1)) if weight else (double(2, 3, 5),)
    assert gradcheck(norm, inputs, check_forward_ad=True)
    assert gradgradcheck(norm, inputs)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gated_activation_first_and_second_derivatives(activation):
    inputs = (double(2, 3, 6),)
    assert gradcheck(lambda x: gated_activation(x, activation), inputs, check_forward_ad=True)
    assert gradgradcheck(lambda x: gated_activation(x, activation), inputs)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("flavour", GATED_FLAVOURS)
@pytest.mark.parametrize(("group_size", "activation"), [(None, "silu"), (3, "sigmoid")])
def test_gated_rms_norm_first_and_second_derivatives(order, flavour, group_size, activation):
    def norm(x, gate, weight):
        return gated_rms_norm(x, gate, weight, 1e-5, flavour, order, group_size, activation)

    inputs = double(2, 6), double(2, 6, seed=1), double(6, seed=2)
    assert gradcheck(norm, inputs, check_forward_ad=True)
    assert gradgradcheck(norm, inputs)


@pytest.mark.parametrize("bias", [True, False])
def test_rms_norm_mlp_first_and_second_derivatives(bias):
    def mlp(x, norm_weight, gate_up, down, *biases):
        return rms_norm_mlp(x, norm_weight, gate_up, down, 1e-5, "one_plus_scale", "silu", *biases)

    inputs = double(2, 4), double(4, seed=1), double(6, 4, seed=2), double(4, 3, seed=3)
    inputs += (double(6, seed=4), double(4, seed=5)) if bias else ()
    assert gradcheck(mlp, inputs, check_forward_ad=True)
    assert gradgradcheck(mlp, inputs)


@pytest.mark.parametrize("bias", [True, False])
def test_an_mlp_without_a_norm_first_and_second_derivatives(bias):
    def mlp(x, gate_up, down, *biases):
        return rms_norm_mlp(x, None, gate_up, down, 1e-5, "none", "gelu", *biases)

    def mlp_in_parts(x, gate_up, down, *biases):
        gate_bias, up_bias = biases[0].chunk(2) if biases else (None, None)
        return mlp_of_parts(x, *gate_up.chunk(2), down, "gelu", gate_bias, up_bias, *biases[1:])

    inputs = double(2, 4), double(6, 4, seed=2), double(4, 3, seed=3)
    inputs += (double(6, seed=4), double(4, seed=5)) if bias else ()
    for call in (mlp, mlp_in_parts):
        assert gradcheck(call, inputs, check_forward_ad=True)
        assert gradgradcheck(call, inputs)


@pytest.mark.parametrize("needed", [(True, False), (False, True), (True, True)])
def test_a_gradient_that_is_not_needed_is_not_asked_for(needed, monkeypatch):
    asked = []
    selected = RUNTIME.functions("rms_norm_backward")["cpu"]

    def backward(*args):
        asked.append(args[-2:])
        return selected(*args)

    monkeypatch.setitem(RUNTIME.functions("rms_norm_backward"), "cpu", backward)
    x, weight = torch.randn(3, 8, requires_grad=needed[0]), torch.randn(8, requires_grad=needed[1])
    rms_norm(x, weight).sum().backward()
    assert asked == [needed]
    assert (x.grad is not None, weight.grad is not None) == needed


def test_an_implementation_without_the_gradient_that_is_not_needed_may_return_none():
    x, weight = torch.randn(3, 8), torch.randn(8)
    grads = rms_norm_operator.BACKWARD(torch.ones(3, 8), x, weight, 1e-6, "cast_then_scale", False, True)
    assert [tuple(grad.shape) for grad in grads] == [(0,), (8,)]


def stock(model, name, *args, dtype, **kwargs):
    made = getattr(import_module(f"transformers.models.{model}.modeling_{model}"), name)(*args, **kwargs)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter)
    return made.to(dtype)


def assert_gradients_close(found, expected, dtype, rows):
    # Stock rounds intermediate gradients to the dtype, ours once: four roundings of the largest gradient, of which
    # sums over rows hold the root of the number of rows.
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype
        bound = 4 * torch.finfo(dtype).eps * rows**0.5 * theirs.abs().max().item()
        torch.testing.assert_close(ours.double(), theirs.double(), rtol=0, atol=bound)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("model", "name", "flavour"),
    [
        ("llama", "LlamaRMSNorm", "cast_then_scale"),
        ("olmo2", "Olmo2RMSNorm", "scale_then_cast"),
        ("gemma", "GemmaRMSNorm", "one_plus_scale"),
    ],
)
def test_gradients_equal_those_of_the_stock_norm(model, name, flavour, dtype):
    norm = stock(model, name, 64, eps=1e-6, dtype=dtype)
    x = torch.randn(5, 7, 64).to(dtype).requires_grad_()
    grad = torch.randn(5, 7, 64).to(dtype)
    expected = torch.autograd.grad(norm(x), (x, norm.weight), grad)
    found = torch.autograd.grad(rms_norm(x, norm.weight, 1e-6, flavour), (x, norm.weight), grad)
    assert_gradients_close(found, expected, dtype, rows=35)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_weight_gradient_over_many_rows_is_summed_in_single_precision(dtype):
    # 20,000 rows of about 1: a sum in bfloat16 would stop at 256, in float16 at 2,048 or overflow.
    x, weight = torch.ones(20_000, 8, dtype=dtype), torch.ones(8, dtype=dtype, requires_grad=True)
    rms_norm(x, weight).backward(torch.full((20_000, 8), 0.5, dtype=dtype))
    torch.testing.assert_close(weight.grad.float(), torch.full((8,), 10_000.0), rtol=torch.finfo(dtype).eps, atol=0)


def test_two_norms_on_one_tensor_and_inputs_that_are_views():
    base = torch.randn(2, 3, 4, 8, requires_grad=True)
    first, second = torch.randn(8, requires_grad=True), torch.randn(8, requires_grad=True)
    kept = base.detach().clone()

    def ours(w, v):
        heads = base.transpose(1, 2)
        return (rms_norm(heads, w) * rms_norm(heads, v)).sum() + rms_norm(base.view(2, 3, 32), None).sin().sum()

    def theirs(w, v):
        def norm(x, scale):
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * scale

        heads = base.transpose(1, 2)
        return (norm(heads, w) * norm(heads, v)).sum() + norm(base.view(2, 3, 32), 1.0).sin().sum()

    found = torch.autograd.grad(ours(first, second), (base, first, second))
    expected = torch.autograd.grad(theirs(first, second), (base, first, second))
    assert_gradients_close(found, expected, torch.float32, rows=24)
    torch.testing.assert_close(base.detach(), kept, rtol=0, atol=0)


def test_gate_and_up_may_be_one_tensor():
    x = torch.randn(3, 8, requires_grad=True)
    found = torch.autograd.grad(gated_activation(torch.cat([x, x], -1)).sum(), x)
    expected = torch.autograd.grad((torch.nn.functional.silu(x) * x).sum(), x)
    assert_gradients_close(found, expected, torch.float32, rows=1)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_gradient_of_any_layout_gives_the_same(layout):
    x, weight = torch.randn(2, 3, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    grad = lay_out(torch.randn(2, 3, 8), layout)
    found = torch.autograd.grad(rms_norm(x, weight), (x, weight), grad)
    expected = torch.autograd.grad(rms_norm(x, weight), (x, weight), grad.contiguous())
    assert_gradients_close(found, expected, torch.float32, rows=6)


def test_gradients_of_a_backward_that_is_called_twice_are_added_and_saved_tensors_are_watched():
    x, weight = torch.randn(3, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    y = rms_norm(x, weight).sum()
    y.backward(retain_graph=True)
    once = x.grad.clone()
    y.backward()
    torch.testing.assert_close(x.grad, 2 * once, rtol=0, atol=0)
    y = rms_norm(x, weight).sum()
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


@pytest.mark.parametrize("call", [lambda x, w: rms_norm(x, w), lambda x, w: gated_rms_norm(x, x * 2, w)])
def test_torch_func_grad_equals_autograd(call):
    x, weight = double(3, 8), double(8, seed=1)
    expected = torch.autograd.grad(call(x, weight).sin().sum(), (x, weight))
    found = torch.func.grad(lambda a, b: call(a, b).sin().sum(), argnums=(0, 1))(x.detach(), weight.detach())
    # Autograd takes the formula of the backward and torch.func differentiates the forward: double roundings apart.
    torch.testing.assert_close(found, expected)


def test_checkpointed_gradients_equal_plain_ones():
    from torch.utils.checkpoint import checkpoint

    x, weight = torch.randn(3, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    expected = torch.autograd.grad(rms_norm(x, weight).sum(), (x, weight))
    found = torch.autograd.grad(checkpoint(rms_norm, x, weight, use_reentrant=False).sum(), (x, weight))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_a_weight_s_gradient_is_of_the_norm_as_the_forward_rounded_it():
    x, weight = torch.randn(1, 64, generator=torch.Generator().manual_seed(3)).bfloat16(), torch.ones(64)
    for backward in prepared("rms_norm_backward", "cpu").function, reference.rms_norm_backward:
        for flavour in FLAVOURS:
            _, found = backward(torch.ones(1, 64), x, weight, 1e-6, flavour, False, True)
            # One row and a gradient of one: the norm itself, which cast_then_scale has in bfloat16.
            assert torch.equal(found, found.bfloat16().float()) == (flavour == "cast_then_scale")


def test_autocast_leaves_float64_as_stock_does():
    x, gate_up, down = double(2, 4), double(6, 4, seed=1), double(4, 3, seed=2)
    expected = rms_norm_mlp(x, None, gate_up, down, flavour="none")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.nn.functional.linear(x, gate_up).dtype is torch.float64
        found = rms_norm_mlp(x, None, gate_up, down, flavour="none")
        parts = mlp_of_parts(x, *gate_up.chunk(2), down)
    assert torch.equal(found, expected)
    assert torch.equal(parts, expected)


@pytest.mark.parametrize("cached", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("grad", [True, False])
def test_autocast_gives_what_it_gives_the_stock_modules(cached, dtype, grad):
    class Config:
        hidden_size, intermediate_size, hidden_act, mlp_bias = 48, 36, "silu", True

    norm = stock("llama", "LlamaRMSNorm", 48, dtype=dtype).requires_grad_(grad)
    mlp = stock("llama", "LlamaMLP", Config(), dtype=dtype).requires_grad_(grad)
    x = torch.randn(2, 5, 48).to(dtype).requires_grad_(grad)
    gate_up = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
    bias = torch.cat([mlp.gate_proj.bias, mlp.up_proj.bias])
    with torch.autocast("cpu", dtype=cached):
        normed, expected = norm(x), mlp(norm(x))
        found_norm = rms_norm(x, norm.weight)
        named = {"gate_up_bias": bias, "down_bias": mlp.down_proj.bias}
        found = rms_norm_mlp(x, norm.weight, gate_up, mlp.down_proj.weight, **named)
        in_two = rms_norm_mlp(norm(x), None, gate_up, mlp.down_proj.weight, flavour="none", **named)
    assert (found_norm.dtype, found.dtype) == (normed.dtype, expected.dtype) == (dtype, cached)
    # Both round at the same places; sums of the products may be ordered otherwise.
    for ours, theirs in ((found_norm, normed), (found, expected), (in_two, expected)):
        bound = 4 * torch.finfo(cached).eps * theirs.abs().max().item()
        torch.testing.assert_close(ours, theirs, rtol=0, atol=bound)
    if grad:
        leaves = (x, norm.weight, mlp.down_proj.weight, mlp.gate_proj.weight, mlp.up_proj.bias)
        wanted = torch.autograd.grad(expected, leaves, torch.ones_like(expected))
        for ours in (found, in_two):
            assert_gradients_close(torch.autograd.grad(ours, leaves, torch.ones_like(ours)), wanted, cached, rows=10)
