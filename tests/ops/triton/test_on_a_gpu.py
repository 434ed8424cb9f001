"""What the interpreter cannot show: launches, streams, graphs, devices and memory of a GPU."""

from __future__ import annotations

import gc
from importlib import import_module

import pytest
import torch

from layout_kernels import gated_activation, gated_rms_norm, rms_norm, rms_norm_mlp
from layout_kernels.dispatch.runtime import prepared
from layout_kernels.numerics import main as numerics
from layout_kernels.ops.gated_activation.reference import gated_activation as plain_activation
from layout_kernels.ops.rms_norm.reference import rms_norm as plain_norm

pytestmark = pytest.mark.gpu
OPERATIONS = ("rms_norm", "gated_activation", "gated_rms_norm", "rms_norm_mlp")


def values(*shape, dtype=torch.bfloat16, device="cuda", seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def test_triton_is_what_runs():
    assert {name: prepared(name, "cuda").spec.solution for name in OPERATIONS} == dict.fromkeys(OPERATIONS, "triton")


@pytest.mark.parametrize("mode", ["eager", "compile", "cudagraph"])
def test_the_numerics_matrix_passes(mode):
    assert numerics(["--device", "cuda", "--mode", mode]) == 0


def test_a_graph_replays_the_numbers_of_eager_after_one_warm_up():
    x, w = values(6, 4096), values(4096, seed=1)
    up, down = values(2 * 1024, 4096, seed=2) / 64, values(4096, 1024, seed=3) / 32
    rms_norm_mlp(rms_norm(x, w), w, up, down)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = rms_norm_mlp(rms_norm(x, w), w, up, down)
    x.copy_(values(6, 4096, seed=4))
    graph.replay()
    assert torch.equal(out, rms_norm_mlp(rms_norm(x, w), w, up, down))


def test_kernels_run_on_the_current_stream():
    x, w = values(4096, 4096), values(4096, seed=1)
    expected = rms_norm(x, w)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        y = torch.zeros_like(x).copy_(x)
        out = rms_norm(y, w)
    assert not stream.query(), "the call waited for the stream"
    stream.synchronize()
    assert torch.equal(out, expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="waits for a second GPU")
def test_tensors_on_a_device_that_is_not_current():
    x, w = values(5, 576, device="cuda:1"), values(576, device="cuda:1", seed=1)
    with torch.cuda.device(0):
        out = rms_norm(x, w)
    assert out.device == x.device
    torch.testing.assert_close(out, plain_norm(x, w, 1e-6, "cast_then_scale"))


def test_ten_thousand_calls_take_no_more_memory():
    x, w = values(64, 1024).requires_grad_(), values(1024, seed=1).requires_grad_()

    def step():
        torch.autograd.grad(rms_norm(x, w).sum(), (x, w))

    step()
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_reserved()
    for _ in range(10_000):
        step()
    torch.cuda.synchronize()
    assert torch.cuda.memory_reserved() == before


def test_offsets_beyond_32_bits():
    # 80,000 rows of 36,864 elements: 5.9 GB in bfloat16, and the last rows lie beyond 2^31 elements.
    x = values(1, 36_864).expand(80_000, -1).contiguous()
    out = rms_norm(x, None)
    assert torch.equal(out[-1], out[0])
    packed = gated_activation(x)
    assert torch.equal(packed[-1], packed[0])
    torch.testing.assert_close(packed[:1], plain_activation(x[:1], "silu"), rtol=2**-7, atol=2**-7)
    strided = values(2, 3).repeat(1, 800_000_000)[:, ::2]
    assert rms_norm(strided, None).isfinite().all()


def test_offsets_beyond_32_bits_of_rows_that_registers_hold():
    # 600,000 rows of 4096 elements; tests/ops/triton/interpreted/test_offsets.py has the other kernels.
    x, weight = values(1, 4096).expand(600_000, -1).contiguous(), values(4096, seed=1)
    out = rms_norm(x, weight)
    assert torch.equal(out[-1], out[0])
    grad = torch.autograd.grad(rms_norm(x.requires_grad_(), weight), x, x.detach())[0]
    assert torch.equal(grad[-1], grad[0])


def test_gradients_equal_those_of_the_reference_in_training():
    x, gate, w = (values(300, 1024, seed=s).requires_grad_() for s in range(3))
    weight = w[0].detach().clone().requires_grad_()
    ours = torch.autograd.grad(gated_rms_norm(x, gate, weight).float().square().sum(), (x, gate, weight))
    from layout_kernels.ops.gated_rms_norm.reference import gated_rms_norm as plain

    out = plain(x, gate, weight, 1e-6, "cast_then_scale", "gate_then_norm", None, "silu")
    theirs = torch.autograd.grad(out.float().square().sum(), (x, gate, weight))
    for mine, other in zip(ours, theirs, strict=True):
        # Autograd of the reference rounds to bfloat16 at other places: a few of its ulps of the largest element.
        assert (mine.float() - other.float()).abs().max() <= 4 * 2**-8 * other.float().abs().max()


@pytest.mark.parametrize("operation", OPERATIONS)
def test_compiled_calls_give_the_numbers_of_eager(operation):
    suite = import_module(f"layout_kernels.numerics.{operation}")
    call = getattr(import_module("layout_kernels"), operation)
    arguments = [a.cuda() if isinstance(a, torch.Tensor) else a for a in suite.arguments(suite.CASES[1])]
    assert torch.equal(torch.compile(call, fullgraph=True)(*arguments), call(*arguments))
