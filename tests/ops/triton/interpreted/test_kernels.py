"""What no single case shows: order of sums, gradients left out, strides of gradients, bytes moved."""

from __future__ import annotations

import pytest
import torch

from layout_kernels.ops import gated_rms_norm as gated_module
from layout_kernels.ops import triton_launch as host
from layout_kernels.ops.gated_activation import reference as activation_reference
from layout_kernels.ops.gated_activation import triton as activation
from layout_kernels.ops.gated_rms_norm import reference as gated_reference
from layout_kernels.ops.gated_rms_norm import triton as gated
from layout_kernels.ops.rms_norm import reference
from layout_kernels.ops.rms_norm import triton as norm
from layout_kernels.ops.rms_norm_mlp import reference as mlp_reference
from layout_kernels.ops.rms_norm_mlp import triton as mlp
from tools.triton_interpreter import Traffic, counting


def values(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_the_weight_s_gradient_is_the_same_bits_each_time():
    grad, x, weight = values(301, 64), values(301, 64, seed=1), values(64, seed=2)
    first = norm.rms_norm_backward(grad, x, weight, 1e-6, "cast_then_scale", True, True)
    second = norm.rms_norm_backward(grad, x, weight, 1e-6, "cast_then_scale", True, True)
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])


@pytest.mark.parametrize("width", [64, 16400])
def test_a_gradient_that_is_not_needed_is_neither_made_nor_paid_for(width, monkeypatch):
    launched = []
    launch = host.launch
    monkeypatch.setattr(
        host, "launch", lambda kernel, *args, **kw: (launched.append(kernel), launch(kernel, *args, **kw))
    )
    grad, x, weight = values(5, width), values(5, width, seed=1), values(width, seed=2)
    args = grad, x, weight, 1e-6, "scale_then_cast"
    whole = norm.rms_norm_backward(*args, True, True)
    both = len(launched)
    only_x = norm.rms_norm_backward(*args, True, False)
    assert len(launched) - both == 1, "the gradient of x alone takes one launch"
    only_weight = norm.rms_norm_backward(*args, False, True)
    assert only_x[1] is None
    assert only_weight[0] is None
    torch.testing.assert_close(only_x[0], whole[0], rtol=0, atol=0)
    torch.testing.assert_close(only_weight[1], whole[1], rtol=0, atol=0)
    assert norm.rms_norm_backward(*args, False, False) == (None, None)


def test_gated_gradients_that_are_not_needed_are_none():
    tensors = values(5, 96), values(5, 96, seed=1), values(5, 96, seed=2), values(96, seed=3)
    for order in ("gate_then_norm", "norm_then_gate"):
        args = *tensors, 1e-6, "cast_then_scale", order, 32, "silu"
        whole = gated.gated_rms_norm_backward(*args, True, True, True)
        for index in range(3):
            wanted = [position == index for position in range(3)]
            found = gated.gated_rms_norm_backward(*args, *wanted)
            assert [grad is not None for grad in found] == wanted
            torch.testing.assert_close(found[index], whole[index], rtol=0, atol=0)


@pytest.mark.parametrize("lay", ["expanded", "transposed", "strided"])
def test_a_gradient_may_lie_in_memory_in_any_way(lay):
    x, weight = values(7, 5, 48), values(48, seed=1)
    grad = {
        "expanded": values(1, 1, 48, seed=2).expand(7, 5, 48),
        "transposed": values(48, 5, 7, seed=2).permute(2, 1, 0),
        "strided": values(7, 5, 96, seed=2)[..., ::2],
    }[lay]
    args = x, weight, 1e-6, "cast_then_scale", True, True
    found, packed = norm.rms_norm_backward(grad, *args), norm.rms_norm_backward(grad.contiguous(), *args)
    torch.testing.assert_close(found[0], packed[0], rtol=0, atol=0)
    # The rows are added in another order where they are numbered by other dimensions.
    torch.testing.assert_close(found[1], packed[1], rtol=1e-5, atol=1e-5)
    gate_up = values(7, 5, 96, seed=3)
    torch.testing.assert_close(
        activation.gated_activation_backward(grad, gate_up, "gelu_tanh"),
        activation.gated_activation_backward(grad.contiguous(), gate_up, "gelu_tanh"),
        rtol=0,
        atol=0,
    )


def test_a_weight_may_be_strided():
    x, weight = values(3, 64), values(128, seed=1)[::2]
    torch.testing.assert_close(
        norm.rms_norm(x, weight, 1e-6, "cast_then_scale"), reference.rms_norm(x, weight, 1e-6, "cast_then_scale")
    )


def test_the_sums_over_many_rows_are_made_in_float32():
    # In bfloat16 a sum of 4096 ones stays at 256.
    x = torch.ones(4096, 16, dtype=torch.bfloat16)
    _, found = norm.rms_norm_backward(torch.ones_like(x), x, x[0], 0.0, "scale_then_cast", False, True)
    assert found.tolist() == [4096.0] * 16


@pytest.mark.parametrize("eps", [0.0, 1e-6])
def test_the_rows_that_a_tile_lacks_add_nothing_to_the_weight_s_gradient(eps):
    # With eps 0 the 1 / rms of a missing row is infinite, and zero times that is NaN.
    grad, x, weight = values(3, 24), values(3, 24, seed=1), values(24, seed=2)
    for dtype in (torch.float32, torch.bfloat16):
        args = grad.to(dtype), x.to(dtype), weight.to(dtype), eps, "cast_then_scale", True, True
        _, found = norm.rms_norm_backward(*args)
        torch.testing.assert_close(found, reference.rms_norm_backward(*args)[1])
    settings = eps, "cast_then_scale", "gate_then_norm", 8, "silu", True, True, True
    gate = values(3, 24, seed=3)
    found = gated.gated_rms_norm_backward(grad, x, gate, weight, *settings)
    wanted = gated_reference.gated_rms_norm_backward(grad, x, gate, weight, *settings)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def few_differ(found, wanted):
    """A sum in another order turns a rounding to half precision now and then; one left out changes every fourth."""
    assert found.dtype is wanted.dtype
    assert (found != wanted).float().mean() < 0.01


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_results_are_rounded_where_the_contract_says(dtype):
    x, gate, weight = values(40, 96, dtype=dtype), values(40, 96, dtype=dtype, seed=1), values(96, dtype=dtype, seed=2)
    for flavour in ("cast_then_scale", "scale_then_cast", "one_plus_scale"):
        few_differ(norm.rms_norm(x, weight, 1e-6, flavour), reference.rms_norm(x, weight, 1e-6, flavour))
    for order in gated_module.ORDERS:
        for flavour in gated_module.FLAVOURS:
            args = x, gate, weight, 1e-6, flavour, order, 32, "silu"
            few_differ(gated.gated_rms_norm(*args), gated_reference.gated_rms_norm(*args))
    for name in ("silu", "gelu", "gelu_tanh"):
        few_differ(activation.gated_activation(x, name), activation_reference.gated_activation(x, name))
    # An identity as the last product shows the roundings before it.
    gate_up, down = values(2 * 64, 96, dtype=dtype, seed=3) / 8, torch.eye(64, dtype=dtype)
    args = x[:5], weight, gate_up, down, 1e-6, "cast_then_scale", "silu", None, None
    few_differ(mlp.rms_norm_mlp(*args), mlp_reference.rms_norm_mlp(*args))
    args = x[:5], None, gate_up, down, 1e-6, "none", "silu", None, None
    few_differ(mlp.rms_norm_mlp(*args), mlp_reference.rms_norm_mlp(*args))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_weight_s_gradient_sums_what_the_forward_rounded(dtype):
    # One row and a weight in float32, so that neither a sum nor the result's own rounding hides those before it.
    x, gate, grad, weight = values(1, 512, dtype=dtype), values(1, 512, seed=1), values(1, 512, seed=2), values(512)
    for flavour in ("cast_then_scale", "scale_then_cast"):
        args = grad, x, weight, 1e-6, flavour, False, True
        pairs = [(norm.rms_norm_backward(*args)[1], reference.rms_norm_backward(*args)[1])]
        for order in gated_module.ORDERS:
            args = grad, x, gate, weight, 1e-6, flavour, order, 32, "silu", False, True, True
            pairs += zip(
                gated.gated_rms_norm_backward(*args), gated_reference.gated_rms_norm_backward(*args), strict=True
            )
        for found, wanted in (pair for pair in pairs if pair[0] is not None):
            # Roundings of float32 are a hundred times smaller than those of a half.
            assert (~torch.isclose(found, wanted, rtol=4e-6, atol=4e-6)).float().mean() < 0.02


def test_rows_are_merged_as_far_as_their_strides_allow():
    x = values(2, 3, 5, 8)
    assert host.rows_of(x)[:3] == (30, 1, 1)
    heads = x.transpose(1, 2)
    lines = host.rows_of(heads)
    assert (lines.number, lines.middle, lines.inner) == (30, 5, 3)
    assert lines.tensors[0].data_ptr() == x.data_ptr()
    wide = values(2, 3, 5, 4, 8).permute(3, 2, 1, 0, 4)
    assert host.rows_of(wide).strides[0] == (8, 0, 0, 1), "four dimensions that do not merge are copied"


def test_more_rows_than_a_launch_can_number_are_refused():
    with pytest.raises(ValueError, match="split the call"):
        host.rows_of(torch.zeros(1, 1).expand(2**31, 1))
    with pytest.raises(ValueError, match="split the call"):
        host.grid_of(2**31)


# Bytes moved against the least: each tensor once, but for what the comments name.
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("width", [96, 4096, 16384])
def test_rms_norm_moves_each_tensor_once(width, dtype):
    x, grad, weight = values(9, width, dtype=dtype), values(9, width, dtype=dtype), values(width, dtype=dtype)
    size = x.numel() * x.element_size()
    traffic = Traffic({"x": x, "grad": grad})
    with counting(traffic):
        norm.rms_norm(x, weight, 1e-6, "cast_then_scale")
    assert traffic.loaded == {"x": size, "grad": 0}
    with counting(traffic):
        norm.rms_norm_backward(grad, x, weight, 1e-6, "cast_then_scale", True, True)
    assert traffic.loaded == {"x": 2 * size, "grad": size}
    assert traffic.stored == {"x": 0, "grad": 0}


def test_few_rows_of_an_mlp_are_read_once_more_for_their_norm_and_without_one_they_are_not():
    x, gate_up, down = values(3, 256, dtype=torch.bfloat16), values(96, 256, dtype=torch.bfloat16), values(1, 48)
    programs = 48 // 16  # each has the rows in its cache, reads its own rows of the weight and makes 16 elements
    size, weight = x.numel() * x.element_size(), gate_up.numel() * gate_up.element_size()
    for flavour, times in (("cast_then_scale", 2), ("none", 1)):
        traffic = Traffic({"x": x, "gate_up": gate_up})
        with counting(traffic):
            mlp.rms_norm_mlp(x, None, gate_up, down.bfloat16(), 1e-6, flavour, "silu", None, None)
        assert traffic.loaded == {"x": times * programs * size, "gate_up": weight}


def test_gated_operations_move_each_tensor_once():
    x, gate, grad, weight = (values(9, 256, seed=seed) for seed in range(4))
    size = x.numel() * x.element_size()
    traffic = Traffic({"x": x, "gate": gate, "grad": grad})
    settings = 1e-6, "cast_then_scale", "gate_then_norm", 64, "silu"
    with counting(traffic):
        gated.gated_rms_norm(x, gate, weight[0], *settings)
        gated.gated_rms_norm_backward(grad, x, gate, weight[0], *settings, True, True, True)
    assert traffic.loaded == {"x": 2 * size, "gate": 2 * size, "grad": size}
    traffic = Traffic({"x": x, "grad": grad})
    with counting(traffic):
        activation.gated_activation(x, "silu")
        activation.gated_activation_backward(grad[:, :128].contiguous(), x, "silu")
    assert traffic.loaded == {"x": 2 * size, "grad": 0}
