"""torch.compile over the operations: one graph, any shape, the numbers of eager."""

from __future__ import annotations

import pytest
import torch

from layout_kernels import gated_activation, gated_rms_norm, rms_norm, rms_norm_mlp

CALLS = {
    "rms_norm": lambda x, w, up, down: rms_norm(x, w, 1e-5, "scale_then_cast"),
    "unscaled": lambda x, w, up, down: rms_norm(x, None),
    "gated_activation": lambda x, w, up, down: gated_activation(x, "gelu_tanh"),
    "rms_norm_mlp": lambda x, w, up, down: rms_norm_mlp(x, w, up, down),
    "an MLP without a norm": lambda x, w, up, down: rms_norm_mlp(x, None, up, down, flavour="none"),
    "gated_rms_norm": lambda x, w, up, down: gated_rms_norm(x, x + 1, w, group_size=4, order="norm_then_gate"),
}


def inputs(rows, dtype=torch.float32, grad=False):
    generator = torch.Generator().manual_seed(rows)
    shapes = (2, rows, 8), (8,), (12, 8), (8, 6)
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_(grad) for shape in shapes]


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("grad", [False, True])
def test_one_graph_for_every_shape_with_the_result_of_eager(name, grad):
    call, graphs = CALLS[name], []

    def count(graph, example):
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, example)

    compiled = torch.compile(lambda *args: call(*args) * 2, fullgraph=True, dynamic=True, backend=count)
    for rows in (3, 5, 11):
        args = inputs(rows, grad=grad)
        found, expected = compiled(*args), call(*args) * 2
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        if grad:
            first = torch.autograd.grad(expected.sum(), args, allow_unused=True)
            second = torch.autograd.grad(found.sum(), args, allow_unused=True)
            torch.testing.assert_close([g for g in second if g is not None], [g for g in first if g is not None])
            assert [g is None for g in second] == [g is None for g in first]
    # After a reset the compiler also hands over a graph without nodes; ours are those that do something.
    ours = [graph for graph in graphs if any("layout_kernels" in str(node.target) for node in graph.graph.nodes)]
    assert len(ours) == 1
    assert all(graph.code.count("pass") for graph in graphs if graph is not ours[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inductor_gives_the_result_of_eager(dtype):
    def block(x, w, up, down):
        return x + rms_norm_mlp(rms_norm(x, w), w, up, down)

    args = inputs(5, dtype)
    with torch.no_grad():
        found, expected = torch.compile(block, fullgraph=True)(*args), block(*args)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_the_first_call_of_a_process_may_be_compiled():
    # Nothing is bound yet when the graph is traced; the device is bound when it runs.
    import subprocess
    import sys
    from pathlib import Path

    code = (
        "import torch, layout_kernels as k\n"
        "from layout_kernels.dispatch.runtime import RUNTIME\n"
        "f = torch.compile(lambda x: k.rms_norm(x, None), fullgraph=True, backend='aot_eager')\n"
        "y = f(torch.ones(2, 4))\n"
        "print(RUNTIME.bound_devices(), y.sum().item() > 7.9)\n"
    )
    environment = {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[2] / "torch-ext")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120)
    assert done.stdout == "('cpu',) True\n", done.stderr


def test_autocast_under_compile_equals_autocast_without():
    compiled = torch.compile(CALLS["rms_norm_mlp"], fullgraph=True, backend="aot_eager")
    args = inputs(5)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        found, expected = compiled(*args), CALLS["rms_norm_mlp"](*args)
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_export_keeps_the_operator():
    class Norm(torch.nn.Module):
        def forward(self, x):
            return rms_norm(x, None)

    program = torch.export.export(Norm(), (torch.randn(2, 8),))
    assert any(node.target is torch.ops._layout_kernels_source.rms_norm.default for node in program.graph.nodes)
    x = torch.randn(2, 8)
    torch.testing.assert_close(program.module()(x), rms_norm(x, None), rtol=0, atol=0)
