"""Offsets of 2^31 elements and more, which 32 bits do not hold: in memory that is reserved, not had."""

from __future__ import annotations

import math
import mmap

import pytest
import torch
from triton.runtime import interpreter

from layout_kernels.numerics.cases import Case
from layout_kernels.ops import triton_launch as host
from tests.ops.triton.interpreted.calls import backward, forward, suite

BEFORE = 2**31  # a wrong offset lies up to so many elements before the tensor, and reads zeros there
DTYPE = torch.bfloat16
MAP_NORESERVE = 0x4000  # Linux's; the module names it from Python 3.13 on


def reserved(shape, strides=None):
    """A tensor of zeros; only what is written takes memory."""
    strides = strides or (shape[-1], 1)
    span = BEFORE + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + 2**20
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    return torch.frombuffer(mmap.mmap(-1, 2 * span, flags=flags), dtype=DTYPE).as_strided(shape, strides, BEFORE)


@pytest.fixture(autouse=True)
def _memory(monkeypatch):
    """What is large is reserved, and no kernel's tensors are copied onto themselves afterwards."""
    empty = torch.empty

    def large_is_reserved(*shape, **options):
        large = isinstance(shape[0], tuple) and math.prod(shape[0]) > 2**28
        return reserved(shape[0]) if large else empty(*shape, **options)

    monkeypatch.setattr(torch, "empty", large_is_reserved)
    monkeypatch.setattr(interpreter.GridExecutor, "_restore_args_dev", lambda *arguments: None)


def far(tensor, strides):
    return reserved(tensor.shape, strides).copy_(tensor)


STRIDES = {
    "outer": (2**30, 2000, 100, 1),
    "middle": (2000, 2**30, 100, 1),
    "inner": (4000, 1000, 2**30, 1),
    "column": (700, 200, 64, 2**27),
}


@pytest.mark.parametrize("which", STRIDES)
@pytest.mark.parametrize("operation", ["rms_norm", "gated_activation", "gated_rms_norm"])
def test_rows_and_their_elements_may_lie_far_apart(operation, which):
    """Every tensor that may have any strides: x, the gate and the gradient of the result."""
    case = Case((3, 3, 3, 18), "bfloat16")
    for find, arguments, compare in (
        (forward(operation), suite(operation).arguments(case), suite(operation).compare),
        (backward(operation), suite(operation).backward_arguments(case), suite(operation).compare_backward),
    ):
        apart = [far(a, STRIDES[which]) if isinstance(a, torch.Tensor) and a.ndim == 4 else a for a in arguments]
        assert compare(find(*apart), arguments) is None


@pytest.mark.parametrize("width", [64, 33_000])
@pytest.mark.parametrize("operation", ["rms_norm", "gated_rms_norm", "rms_norm_mlp"])
def test_the_elements_of_a_weight_may_lie_far_apart(operation, width):
    settings = {"size": 32, "bias": True} if operation == "rms_norm_mlp" else {}
    arguments = suite(operation).arguments(Case((2, width), "bfloat16", settings=settings))
    stride = 2**32 // width
    apart = [far(a, (stride,)) if isinstance(a, torch.Tensor) and a.shape == (width,) else a for a in arguments]
    if operation == "rms_norm_mlp":
        gate_up, bias = arguments[2], arguments[7]
        apart[2], apart[7] = far(gate_up, (2**26, 1)), far(bias, (2**26,))
    assert suite(operation).compare(forward(operation)(*apart), arguments) is None
    if operation == "rms_norm":
        grad = arguments[0].flip(0)
        found, plain = (backward(operation)(grad, *given, True, True) for given in (apart, arguments))
        assert all(map(torch.equal, found, plain))


def last_program(kernel, grid, device, *arguments, **options):
    """Only the last program of a launch."""
    with pytest.MonkeyPatch.context() as patch:
        last = tuple(size - 1 for size in (*grid, 1, 1)[:3])
        builder = interpreter.InterpreterBuilder
        patch.setattr(builder, "set_grid_dim", lambda self, *sizes: setattr(self, "grid_dim", (*grid, 1, 1)[:3]))
        patch.setattr(builder, "set_grid_idx", lambda self, *at: setattr(self, "grid_idx", last))
        kernel[(1,)](*arguments, **options)


@pytest.mark.parametrize(
    ("operation", "rows", "width"),
    [
        ("rms_norm", 600_000, 4096),  # held in registers
        ("rms_norm", 60_000, 40_000),  # looped over
        ("gated_rms_norm", 600_000, 4096),
        ("gated_activation", 600_000, 8192),
    ],
)
def test_a_tensor_may_have_rows_beyond_32_bits(monkeypatch, operation, rows, width):
    monkeypatch.setattr(host, "launch", last_program)
    monkeypatch.setattr(host, "processors", lambda device: 2**31)
    few = [*suite(operation).backward_arguments(Case((8, width), "bfloat16"))]
    if operation != "gated_activation":
        few[-1] = False  # the weight's gradient is of all rows
    many = [reserved((rows, a.shape[1])) if isinstance(a, torch.Tensor) and a.ndim == 2 else a for a in few]
    for large, small in zip(many, few, strict=True):
        if large is not small:
            large[-8:] = small
    needs = {"rms_norm": 2, "gated_rms_norm": 3, "gated_activation": 0}[operation]
    found = [forward(operation)(*many[1 : len(many) - needs]), backward(operation)(*many)]
    monkeypatch.undo()
    wanted = [forward(operation)(*few[1 : len(few) - needs]), backward(operation)(*few)]
    pairs = [(found[0], wanted[0])]
    pairs += zip(found[1], wanted[1], strict=True) if needs else [(found[1], wanted[1])]
    for large, small in pairs:
        # The last program makes the last columns of the last row, of gates and of what they multiply.
        assert large is small is None or torch.equal(large[-1, -16:], small[-1, -16:])
