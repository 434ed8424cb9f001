"""`mlp_of_parts` in a compiled graph: the parameters are its inputs, and their memory is looked up when it runs."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.nn import functional

from layout_kernels.ops.adjacent import lay, rows_of
from layout_kernels.ops.rms_norm_mlp import mlp_of_parts, of_parts
from layout_kernels.ops.rms_norm_mlp.operator import rms_norm_mlp

WIDTH, SIZE, OUT = 48, 36, 40


class Stock(nn.Module):
    """The MLP of its modules."""

    def __init__(self, bias=False, dtype=torch.float32, activation="silu", seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.gate, self.up = (nn.Linear(WIDTH, SIZE, bias=bias, dtype=dtype) for _ in range(2))
        self.down = nn.Linear(SIZE, OUT, bias=bias, dtype=dtype)
        self.activation = activation

    def forward(self, x):
        return self.down(getattr(functional, self.activation)(self.gate(x)) * self.up(x))


class Ours(Stock):
    """The same by `mlp_of_parts`."""

    def forward(self, x):
        gate, up, down = self.gate, self.up, self.down
        weights = gate.weight, up.weight, down.weight
        return mlp_of_parts(x, *weights, self.activation, gate.bias, up.bias, down.bias)

    def lay(self):
        assert lay(self.gate.weight, self.up.weight)
        if self.gate.bias is not None:
            assert lay(self.gate.bias, self.up.bias)
        return self

    def as_one(self, x):
        """What the selected implementation makes of the one matrix of both."""
        gate, up, down = self.gate, self.up, self.down
        bias = None if gate.bias is None else torch.cat([gate.bias, up.bias])
        weights = torch.cat([gate.weight, up.weight]), down.weight
        return rms_norm_mlp(x, None, *weights, 1e-6, "none", self.activation, bias, down.bias)


def rows(*shape, dtype=torch.float32, seed=7):
    return torch.randn(*shape, WIDTH, generator=torch.Generator().manual_seed(seed)).to(dtype)


def compiled(module, backend="aot_eager", **options):
    return torch.compile(module, fullgraph=True, backend=backend, **options)


def equal(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def close(found, expected):
    # The native product sums in another order than PyTorch's, and each half rounds four times on its way: a few
    # roundings of the largest element.
    bound = 8 * torch.finfo(expected.dtype).eps * expected.abs().max().item()
    torch.testing.assert_close(found, expected, rtol=0, atol=bound)


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def fused(monkeypatch):
    """The matrices that the selected implementation of `rms_norm_mlp` was called with, and with which flavour."""
    calls, selected = [], of_parts._forward["cpu"]

    def spy(*args):
        calls.append((args[2].data_ptr(), args[5]))
        return selected(*args)

    monkeypatch.setitem(of_parts._forward, "cpu", spy)
    return calls


@pytest.fixture
def graphs():
    """The graphs that a compiler gets, forward and backward, and a backend that keeps them."""
    found = []
    return found, aot_autograd(fw_compiler=lambda graph, _: found.append(graph) or make_boxed_func(graph.forward))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("activation", "context"), [("silu", torch.no_grad), ("gelu", torch.inference_mode)])
def test_parameters_that_were_laid_out_run_as_one_matrix_in_a_compiled_graph(fused, dtype, bias, activation, context):
    ours, x = Ours(bias, dtype, activation).lay(), rows(2, 3, dtype=dtype)
    with context():
        found = compiled(ours)(x)
        assert fused == [(ours.gate.weight.data_ptr(), "none")]
        equal(found, ours.as_one(x))
        close(found, Stock(bias, dtype, activation)(x))
    assert found.is_contiguous()


@pytest.mark.parametrize(("bias", "laid"), [(False, ()), (True, ()), (True, ("weight",)), (True, ("bias",))])
def test_parameters_that_were_not_all_laid_out_give_the_stock_result(fused, bias, laid):
    ours, x = Ours(bias), rows(2, 3)
    assert all(lay(getattr(ours.gate, name), getattr(ours.up, name)) for name in laid)
    with torch.no_grad():
        equal(compiled(ours)(x), Stock(bias)(x))
    assert not fused


def other(seed):
    return torch.randn(SIZE, WIDTH, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_graph_follows_parameters_whose_memory_was_exchanged_without_being_compiled_again(fused, backend):
    ours, stock, x = Ours().lay(), Stock(), rows(5)
    call = compiled(ours, backend)
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        close(call(x), stock(x))
        assert len(fused) == 1
        for module in (ours, stock):
            module.gate.weight.data, module.up.weight.data = other(1), other(2)
        assert rows_of(ours.gate.weight, ours.up.weight) is None
        close(call(x), stock(x))
        assert len(fused) == 1, "the parts lie apart"
        ours.lay()
        close(call(x), stock(x))
        assert len(fused) == 2
        for module in (ours, stock):
            module.up.weight.mul_(2)
        close(call(x), stock(x))
        assert fused[1:] == [(ours.gate.weight.data_ptr(), "none")] * 2


@pytest.mark.parametrize("part", ["gate", "up"])
@torch.no_grad()
def test_a_graph_follows_one_parameter_that_left_its_place(fused, part):
    ours, stock, x = Ours().lay(), Stock(), rows(5)
    call = compiled(ours)
    call(x)
    for module in (ours, stock):
        getattr(module, part).weight.data = other(1)
    equal(call(x), stock(x))
    assert len(fused) == 1


def test_the_graph_of_an_inference_has_the_parameters_as_inputs_of_one_operator(graphs):
    found, backend = graphs
    ours, x = Ours().lay(), rows(5)
    with torch.no_grad():
        compiled(ours, backend)(x)
    (graph,) = found
    (node,) = graph.graph.find_nodes(op="call_function", target=of_parts.OF_PARTS)
    assert [argument.op for argument in node.args[:4]] == ["placeholder"] * 4


def test_the_graphs_of_a_training_hold_pytorchs_operators_only(graphs):
    found, backend = graphs
    compiled(Ours().lay(), backend)(rows(5)).sum().backward()
    assert len(found) == 2
    for graph in found:
        targets = {str(node.target) for node in graph.graph.nodes if node.op == "call_function"}
        assert not [target for target in targets if "layout_kernels" in target], targets


def gradients(module, call, x):
    result = call(x)
    return result, *torch.autograd.grad(result.square().sum(), [x, *module.parameters()])


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("laid", [True, False])
def test_results_and_gradients_of_a_training_are_those_of_the_stock_mlp(fused, bias, laid):
    ours, stock = Ours(bias), Stock(bias)
    if laid:
        ours.lay()
    x = rows(2, 3).requires_grad_()
    call = compiled(ours)
    for _ in range(2):
        equal(gradients(ours, call, x), gradients(stock, stock, x))
        for module in (ours, stock):
            module.gate.weight.data = other(1)
    assert not fused


def test_compiled_training_steps_are_those_of_stock_and_the_parts_stay_where_they_are():
    ours, stock, x = Ours().lay(), Stock(), rows(4, 3)
    call = compiled(ours)
    for module, step in ((ours, call), (stock, stock)):
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
        for _ in range(3):
            optimizer.zero_grad()
            step(x).square().sum().backward()
            optimizer.step()
    equal(list(ours.parameters()), list(stock.parameters()))
    assert rows_of(ours.gate.weight, ours.up.weight) is not None
    with torch.no_grad():
        close(call(x), stock(x))


def test_inductor_trains_as_stock_does():
    ours, stock = Ours().lay(), Stock()
    x = rows(2, 3).requires_grad_()
    found, expected = gradients(ours, compiled(ours, "inductor"), x), gradients(stock, stock, x)
    # Inductor's silu and its slope are other float32 formulas: a few roundings of the largest element of each.
    for one, other_one in zip(found, expected, strict=True):
        close(one, other_one)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("cached", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("eager", [True, False])
def test_autocast_gives_what_it_gives_the_stock_mlp(dtype, cached, grad, eager):
    ours, stock = Ours(True, dtype).lay().requires_grad_(grad), Stock(True, dtype).requires_grad_(grad)
    # No leaf: autocast would convert that once, and an activation for each product.
    x = rows(2, 3, dtype=dtype).requires_grad_(grad) * 1
    with torch.autocast("cpu", dtype=cached):
        found, expected = (ours if eager else compiled(ours))(x), stock(x)
    assert found.dtype is expected.dtype is cached
    same_operators = grad or dtype is not cached
    (equal if same_operators else close)(found, expected)
    if grad:
        leaves = [[x, *module.parameters()] for module in (ours, stock)]
        equal(torch.autograd.grad(found.sum(), leaves[0]), torch.autograd.grad(expected.sum(), leaves[1]))


@torch.no_grad()
def test_autocast_leaves_parameters_of_its_dtype_where_they_lie(fused):
    ours, x = Ours(dtype=torch.bfloat16).lay(), rows(5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = compiled(ours)(x)
    assert fused == [(ours.gate.weight.data_ptr(), "none")]
    equal(found, ours.as_one(x))


@pytest.mark.parametrize("laid", [True, False])
@pytest.mark.parametrize("grad", [True, False])
def test_an_input_of_another_dtype_is_converted_to_that_of_the_projections(laid, grad):
    ours, x = Ours(dtype=torch.bfloat16), rows(2, 3)
    if laid:
        ours.lay()
    with torch.set_grad_enabled(grad):
        found, expected = compiled(ours)(x), Stock(dtype=torch.bfloat16)(x.bfloat16())
    assert found.dtype is torch.bfloat16
    close(found, expected)


def test_an_input_of_any_strides_and_an_empty_one():
    ours, stock = Ours().lay(), Stock()
    call = compiled(ours)
    wide = torch.randn(4, WIDTH, 3)
    with torch.no_grad():
        for x in (wide.transpose(1, 2), torch.randn(5, 2 * WIDTH)[:, ::2], torch.randn(1, WIDTH).expand(4, -1)):
            found = call(x)
            close(found, stock(x))
            assert found.is_contiguous()
        assert call(torch.randn(0, WIDTH)).shape == (0, OUT)
        assert call(torch.randn(WIDTH)).shape == (OUT,)


def test_one_graph_serves_every_number_of_rows(fused):
    ours, stock = Ours().lay(), Stock()
    call = compiled(ours, dynamic=True)
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        for count in (2, 5, 11):
            close(call(rows(count, 3)), stock(rows(count, 3)))
    assert len(fused) == 3


def arguments(bias=True):
    ours = Ours(bias).lay()
    weights = ours.gate.weight, ours.up.weight, ours.down.weight
    return rows(3), *weights, "silu", ours.gate.bias, ours.up.bias, ours.down.bias


@pytest.mark.parametrize("bias", [True, False])
def test_opcheck(bias):
    torch.library.opcheck(of_parts.OF_PARTS, arguments(bias))


@pytest.mark.parametrize("grad", [True, False])
def test_wrong_arguments_are_refused_while_a_graph_is_made(grad):
    x, gate, up, down, *_ = arguments()
    with pytest.raises(Exception, match=r"up has shape \(35, 48\); it must be \(36, 48\)"):
        compiled(mlp_of_parts)(x.requires_grad_(grad), gate.detach(), up.detach()[1:], down.detach())
