"""Wrong arguments: the message names the argument, what was given and what is allowed, in every way of calling."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from layout_kernels import gated_activation, gated_rms_norm, rms_norm, rms_norm_mlp
from layout_kernels.ops.gated_activation.operator import FORWARD as GATED_ACTIVATION
from layout_kernels.ops.rms_norm.operator import BACKWARD as RMS_NORM_BACKWARD
from layout_kernels.ops.rms_norm.operator import FORWARD as RMS_NORM
from layout_kernels.ops.rms_norm_mlp import mlp_of_parts

X, W = torch.randn(3, 8), torch.randn(8)
UP, DOWN = torch.randn(6, 8), torch.randn(8, 3)
GATE = UP[:3]
NO_NORM = {"flavour": "none"}

WRONG = [
    (rms_norm, ([1.0], W), {}, TypeError, r"x must be a torch\.Tensor, not list"),
    (rms_norm, (X.long(), W), {}, TypeError, r"x must be float16, bfloat16, float32 or float64, not torch\.int64"),
    (rms_norm, (X.to(torch.complex64), None), {}, TypeError, r"not torch\.complex64"),
    (rms_norm, (X.to(torch.float8_e4m3fn), None), {}, TypeError, r"not torch\.float8_e4m3fn"),
    (rms_norm, (X.to_sparse(), None), {}, TypeError, r"x must be a dense tensor, not torch\.sparse_coo"),
    (rms_norm, (torch.tensor(1.0), None), {}, ValueError, "x must have at least one dimension"),
    (rms_norm, (torch.empty(3, 0), None), {}, ValueError, r"x has shape \(3, 0\); its last dimension must be"),
    (rms_norm, (X, W[:7]), {}, ValueError, r"weight has shape \(7,\); it must be \[8\]"),
    (rms_norm, (X, W[None]), {}, ValueError, r"weight has shape \(1, 8\); it must be \[8\]"),
    (rms_norm, (X, W.double()), {}, TypeError, r"weight is float64 and the input torch\.float32"),
    (rms_norm, (X, W.to("meta")), {}, ValueError, "weight is on meta, the input on cpu; move one of them"),
    (rms_norm, (X, W, None), {}, TypeError, "eps must be a float, not NoneType"),
    (rms_norm, (X, W, True), {}, TypeError, "eps must be a float, not bool"),
    (rms_norm, (X, W, -1e-6), {}, ValueError, "eps must be finite and at least 0; given -1e-06"),
    (rms_norm, (X, W, float("nan")), {}, ValueError, "given nan"),
    (rms_norm, (X, W, 1e-6, "gemma"), {}, ValueError, "flavour must be one of 'cast_then_scale'.*given 'gemma'"),
    (gated_activation, (torch.randn(3, 7),), {}, ValueError, r"gate_up has shape \(3, 7\).*must be even"),
    (gated_activation, (X, "relu"), {}, ValueError, "activation must be one of 'silu', 'gelu', 'gelu_tanh'"),
    (rms_norm_mlp, (X, W, UP[:5], DOWN), {}, ValueError, r"gate_up has shape \(5, 8\); it must be \[2 \* size, 8\]"),
    (rms_norm_mlp, (X, W, UP[:, :7], DOWN), {}, ValueError, r"gate_up has shape \(6, 7\)"),
    (rms_norm_mlp, (X, W, UP, DOWN[:, :2]), {}, ValueError, r"down has shape \(8, 2\); it must be \[out, 3\]"),
    (rms_norm_mlp, (X, W, UP, DOWN.half()), {}, TypeError, r"down is torch\.float16 and gate_up torch\.float32"),
    (rms_norm_mlp, (X, W, UP, DOWN), {"down_bias": W[:3]}, ValueError, r"down_bias has shape \(3,\)"),
    (rms_norm_mlp, (X, W, UP, DOWN), {"gate_up_bias": W}, ValueError, r"gate_up_bias has shape \(8,\)"),
    (rms_norm_mlp, ("x", W, UP, DOWN), {}, TypeError, r"x must be a torch\.Tensor, not str"),
    (rms_norm_mlp, (X, W, "up", DOWN), {}, TypeError, r"gate_up must be a torch\.Tensor, not str"),
    (rms_norm_mlp, (X, W, UP, DOWN), {"flavour": "no"}, ValueError, "one of 'cast_then_scale'.*'none'; given 'no'"),
    (rms_norm_mlp, (X, W, UP, DOWN), NO_NORM, ValueError, "norm_weight must be None with the flavour 'none'.*Tensor"),
    (rms_norm_mlp, (X, None, UP, DOWN, -1.0), NO_NORM, ValueError, r"eps must be finite and at least 0; given -1\.0"),
    (rms_norm_mlp, (X[:, :0], None, UP, DOWN), NO_NORM, ValueError, r"x has shape \(3, 0\); its last dimension must"),
    (rms_norm_mlp, (X.long(), None, UP, DOWN), NO_NORM, TypeError, r"x must be float16.*not torch\.int64"),
    (rms_norm_mlp, (X, None, UP[:, :7], DOWN), NO_NORM, ValueError, r"gate_up has shape \(6, 7\)"),
    (rms_norm, (X, None, 1e-6, "none"), {}, ValueError, "flavour must be one of 'cast_then_scale'.*given 'none'"),
    (mlp_of_parts, ("x", GATE, GATE, DOWN), {}, TypeError, r"x must be a torch\.Tensor, not str"),
    (mlp_of_parts, (X, "gate", GATE, DOWN), {}, TypeError, r"gate must be a torch\.Tensor, not str"),
    (mlp_of_parts, (X, GATE, None, DOWN), {}, TypeError, r"up must be a torch\.Tensor, not NoneType"),
    (mlp_of_parts, (X, GATE[:, :7], GATE, DOWN), {}, ValueError, r"gate has shape \(3, 7\); it must be \[size, 8\]"),
    (mlp_of_parts, (X, GATE[:0], GATE[:0], DOWN), {}, ValueError, r"gate has shape \(0, 8\).*size at least 1"),
    (
        mlp_of_parts,
        (X, GATE, GATE[:2], DOWN),
        {},
        ValueError,
        r"up has shape \(2, 8\); it must be \(3, 8\), the shape",
    ),
    (mlp_of_parts, (X, GATE, GATE, DOWN[:, :2]), {}, ValueError, r"down has shape \(8, 2\); it must be \[out, 3\]"),
    (mlp_of_parts, (X, GATE, GATE.half(), DOWN), {}, TypeError, r"up is torch\.float16 and gate torch\.float32"),
    (mlp_of_parts, (X, GATE, GATE, DOWN.half()), {}, TypeError, r"down is torch\.float16 and gate torch\.float32"),
    (mlp_of_parts, (X, GATE, GATE.to("meta"), DOWN), {}, ValueError, "up is on meta, the input on cpu"),
    (mlp_of_parts, (X, GATE, GATE, DOWN, "relu"), {}, ValueError, "activation must be one of 'silu', 'gelu'"),
    (mlp_of_parts, (X, GATE, GATE, DOWN), {"gate_bias": W[:3]}, ValueError, "up_bias is None and gate_bias is not"),
    (
        mlp_of_parts,
        (X, GATE, GATE, DOWN),
        {"up_bias": W[:3]},
        ValueError,
        "gate_bias is None and up_bias is not; give",
    ),
    (
        mlp_of_parts,
        (X, GATE, GATE, DOWN, "silu", W[:3], W),
        {},
        ValueError,
        r"up_bias has shape \(8,\); it must be \[3",
    ),
    (mlp_of_parts, (X, GATE, GATE, DOWN), {"down_bias": W[:3]}, ValueError, r"down_bias has shape \(3,\)"),
    (gated_rms_norm, (X, X[:2], W), {}, ValueError, r"gate has shape \(2, 8\); it must be \(3, 8\)"),
    (gated_rms_norm, (X, X, W), {"order": "both"}, ValueError, "order must be one of 'gate_then_norm', 'norm_then"),
    (gated_rms_norm, (X, X, W), {"group_size": 3}, ValueError, "group_size must divide the width 8; given 3"),
    (gated_rms_norm, (X, X, W), {"group_size": 0}, ValueError, "group_size must divide the width 8; given 0"),
    (gated_rms_norm, (X, X, W), {"group_size": 2.0}, TypeError, "group_size must be an int or None, not float"),
    (gated_rms_norm, (X, X.double(), W), {}, TypeError, r"gate is float64 and x torch\.float32"),
    (gated_rms_norm, (X, X, W), {"flavour": "one_plus_scale"}, ValueError, "flavour must be one of"),
]


@pytest.mark.parametrize(("function", "args", "kwargs", "error", "message"), WRONG)
@pytest.mark.parametrize("grad", [True, False])
def test_wrong_arguments_are_refused_alike_with_and_without_a_gradient(function, args, kwargs, error, message, grad):
    if grad and isinstance(args[0], torch.Tensor) and args[0].is_floating_point():
        args = (args[0].detach().requires_grad_(), *args[1:])
    with pytest.raises(error, match=message):
        function(*args, **kwargs)


def test_operators_and_their_fakes_check_as_well():
    with pytest.raises(ValueError, match=r"weight has shape \(7,\)"):
        RMS_NORM(X, W[:7], 1e-6, "cast_then_scale")
    with pytest.raises(ValueError, match=r"grad has shape \(2, 8\); it must be \(3, 8\)"):
        RMS_NORM_BACKWARD(X[:2], X, W, 1e-6, "cast_then_scale", True, True)
    with FakeTensorMode(allow_non_fake_inputs=True):
        with pytest.raises(ValueError, match=r"weight has shape \(7,\)"):
            RMS_NORM(X, W[:7], 1e-6, "cast_then_scale")
        with pytest.raises(ValueError, match="must be even"):
            GATED_ACTIVATION(torch.empty(3, 7), "silu")


@pytest.mark.parametrize(
    "call",
    [
        lambda x: rms_norm(x, W),
        lambda x: gated_activation(x),
        lambda x: rms_norm_mlp(x, W, UP, DOWN),
        lambda x: rms_norm_mlp(x, None, UP, DOWN, flavour="none"),
        lambda x: mlp_of_parts(x, GATE, UP[3:], DOWN),
        lambda x: gated_rms_norm(x, x, W),
    ],
)
def test_vmap_is_refused_with_the_way_out(call):
    with pytest.raises(NotImplementedError, match=r"cannot be called under torch\.func\.vmap; call it on the whole"):
        torch.func.vmap(call)(X)
    # With a gradient to record torch.func gets plain PyTorch, which it can batch.
    gradient = torch.func.grad(lambda x: call(x).square().sum())
    expected = torch.stack([gradient(row) for row in X])
    # Sums in another order: a few roundings of the largest element.
    bound = 1e-5 * expected.abs().max().item()
    torch.testing.assert_close(torch.func.vmap(gradient)(X), expected, rtol=0, atol=bound)


def test_nested_tensors_are_refused():
    nested = torch.nested.nested_tensor([torch.randn(2, 8), torch.randn(3, 8)])
    with pytest.raises(TypeError, match="x must be a dense tensor, not nested"):
        rms_norm(nested, W)


@pytest.fixture
def mesh(tmp_path):
    from torch.distributed.device_mesh import init_device_mesh

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("grad", [True, False])
def test_sharded_tensors_are_refused_and_never_gathered(mesh, grad):
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    x = distribute_tensor(torch.randn(4, 8), mesh, [Shard(1)]).requires_grad_(grad)
    weight = distribute_tensor(torch.randn(8), mesh, [Replicate()])
    with pytest.raises(NotImplementedError, match=r"rms_norm\.default does not have a sharding strategy registered"):
        rms_norm(x, weight)
    # The way out: local tensors, which is what transformers' tensor parallelism hands to its norms.
    local = rms_norm(x.to_local(), weight.to_local())
    assert local.shape == (4, 8)
