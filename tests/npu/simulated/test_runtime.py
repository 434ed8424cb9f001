"""What surrounds an operation on the simulated device: autograd, autocast, tracing, capture, threads, many calls."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import layout_kernels
from layout_kernels._ops import ops
from layout_kernels.numerics.tolerance import ulp
from tests.npu.simulated.inputs import fetch, normal, send
from tests.support.fake_npu_memory import MEMORY

layout_kernels.initialize("npu")
SIZES = {"x": (3, 4, 32), "weight": (32,), "gate": (3, 4, 32), "pair": (3, 4, 64), "up": (128, 32), "down": (32, 64)}
CALLS: dict[str, Any] = {
    "cast_then_scale": lambda x, weight, **_: layout_kernels.rms_norm(x, weight),
    "scale_then_cast": lambda x, weight, **_: layout_kernels.rms_norm(x, weight, 1e-6, "scale_then_cast"),
    "one_plus_scale": lambda x, weight, **_: layout_kernels.rms_norm(x, weight, 1e-6, "one_plus_scale"),
    "unscaled": lambda x, **_: layout_kernels.rms_norm(x, None),
    "silu": lambda pair, **_: layout_kernels.gated_activation(pair),
    "gelu": lambda pair, **_: layout_kernels.gated_activation(pair, "gelu"),
    "gelu_tanh": lambda pair, **_: layout_kernels.gated_activation(pair, "gelu_tanh"),
    "mlp": lambda x, weight, up, down, **_: layout_kernels.rms_norm_mlp(x, weight, up, down),
    "gated": lambda x, gate, weight, **_: layout_kernels.gated_rms_norm(x, gate, weight, group_size=8),
}


def arguments(dtype: torch.dtype, seed: int = 0) -> dict[str, torch.Tensor]:
    made = {name: normal(*shape, dtype=dtype, seed=seed + i) for i, (name, shape) in enumerate(SIZES.items())}
    made["up"], made["down"] = made["up"] / 32**0.5, made["down"] / 64**0.5
    return made


def gradients(call: Any, tensors: dict[str, torch.Tensor], device: str) -> list[torch.Tensor]:
    leaves = {name: tensor.to(device).requires_grad_() for name, tensor in tensors.items()}
    out = call(**leaves)
    out.backward(normal(*out.shape, dtype=out.dtype, seed=99).to(device))
    return [out.detach().cpu(), *(leaf.grad.cpu() for leaf in leaves.values() if leaf.grad is not None)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CALLS)
def test_results_and_gradients_equal_those_on_the_cpu(name, dtype):
    on_npu, on_cpu = (gradients(CALLS[name], arguments(dtype), device) for device in ("npu", "cpu"))
    # Both round each of the values in a chain once or twice, and sum products in orders of their own: some units of
    # the largest of a tensor.
    for found, expected in zip(on_npu, on_cpu, strict=True):
        assert found.dtype is expected.dtype
        bound = 16 * ulp(expected.double().abs().amax(), dtype)
        assert (found.double() - expected.double()).abs().max() <= bound


@pytest.mark.parametrize("name", CALLS)
def test_autocast_gives_the_dtypes_of_the_cpu(name):
    def dtype(device):
        tensors = {key: value.to(device) for key, value in arguments(torch.float32).items()}
        with torch.autocast(device, dtype=torch.bfloat16):
            return CALLS[name](**tensors).dtype

    assert dtype("npu") is dtype("cpu")


@pytest.mark.parametrize("name", CALLS)
def test_one_fullgraph_is_traced_and_gives_the_numbers_of_eager(name):
    tensors = {key: value.to("npu") for key, value in arguments(torch.bfloat16).items()}
    torch._dynamo.reset()
    compiled = torch.compile(CALLS[name], fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(fetch(compiled(**tensors)), fetch(CALLS[name](**tensors)), rtol=0, atol=0)


@pytest.mark.parametrize("name", CALLS)
def test_a_captured_graph_follows_its_inputs(name):
    tensors = send_all(arguments(torch.bfloat16))
    graph = torch.npu.NPUGraph()
    with torch.no_grad(), torch.npu.graph(graph):
        out = CALLS[name](**tensors)
    for seed in (20, 40):
        fresh = arguments(torch.bfloat16, seed)
        for key, tensor in tensors.items():
            fetch(tensor).copy_(fresh[key])
        graph.replay()
        torch.testing.assert_close(fetch(out), fetch(CALLS[name](**send_all(fresh))), rtol=0, atol=0)


def send_all(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: send(value.clone()) for key, value in tensors.items()}


@pytest.mark.parametrize("name", ["one_plus_scale", "silu", "mlp"])
def test_ten_thousand_calls_hold_no_memory(name):
    tensors = send_all(arguments(torch.bfloat16))
    small = {"x": tensors["x"][:1, :1], "gate": tensors["gate"][:1, :1], "pair": tensors["pair"][:1, :1].contiguous()}
    tensors |= small
    with torch.no_grad():
        CALLS[name](**tensors)
        gc.collect()
        before, MEMORY.peak = MEMORY.allocated, MEMORY.allocated
        CALLS[name](**tensors)
        one = MEMORY.peak
        for _ in range(10_000):
            CALLS[name](**tensors)
    assert MEMORY.allocated == before
    assert one == MEMORY.peak


def test_a_result_outlives_its_arguments():
    tensors = send_all(arguments(torch.float32))
    expected = fetch(layout_kernels.rms_norm(tensors["x"], tensors["weight"])).clone()
    out = layout_kernels.rms_norm(tensors["x"], tensors["weight"])
    tensors.clear()
    gc.collect()
    _ = [torch.full((3, 4, 32), float("nan"), device="npu") for _ in range(50)]
    torch.testing.assert_close(fetch(out), expected, rtol=0, atol=0)


def test_threads_share_the_binding():
    tensors = send_all(arguments(torch.float32))
    expected = {name: fetch(call(**tensors)) for name, call in CALLS.items()}
    wrong: list[str] = []

    def work() -> None:
        for name, call in CALLS.items():
            if not torch.equal(fetch(call(**tensors)), expected[name]):
                wrong.append(name)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


OPERATORS: dict[str, tuple[Any, tuple[int, ...], torch.dtype]] = {
    "npu_rms_norm": (
        lambda op, t: op(t["x"], t["weight"].float(), 1e-6, "cast_then_scale"),
        (3, 4, 32),
        torch.float32,
    ),
    "npu_gated_activation": (lambda op, t: op(t["pair"], "silu"), (3, 4, 32), torch.bfloat16),
    "npu_rms_norm_mlp": (
        lambda op, t: op(t["x"], None, t["up"], t["down"], 1e-6, "cast_then_scale", "silu", None, None),
        (3, 4, 32),
        torch.bfloat16,
    ),
    "npu_gated_rms_norm": (
        lambda op, t: op(t["x"], t["gate"], None, 1e-6, "cast_then_scale", "norm_then_gate", 8, "silu"),
        (3, 4, 32),
        torch.bfloat16,
    ),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_each_implementation_is_an_operator_that_tracing_sees(name):
    call, shape, dtype = OPERATORS[name]
    operator = getattr(ops, name).default
    real = call(operator, send_all(arguments(torch.bfloat16)))
    sent = send_all(arguments(torch.bfloat16))
    with FakeTensorMode() as mode:
        fake = call(operator, {key: mode.from_tensor(value) for key, value in sent.items()})
    for tensor in (real, fake):
        assert (tuple(tensor.shape), tensor.dtype, tensor.device.type) == (shape, dtype, "npu")
    assert torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), "PrivateUse1")
