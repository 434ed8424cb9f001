"""What may go straight to a callable that reads pointers, and what must go through the operator."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from layout_kernels import rms_norm
from layout_kernels.dispatch.launch import is_direct
from layout_kernels.ops.rms_norm import operator


class Subclass(torch.Tensor):
    pass


class Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Function(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_plain_tensors_and_parameters_without_a_gradient_are_direct():
    x, weight = torch.randn(2, 4), torch.nn.Parameter(torch.randn(4))
    assert is_direct(x, None)
    assert is_direct(x, weight.detach())
    assert not is_direct(x, weight)
    assert is_direct(x, torch.nn.Parameter(torch.randn(4), requires_grad=False))
    with torch.no_grad():
        assert is_direct(x, weight)
    with torch.inference_mode():
        assert is_direct(x, weight)


def test_what_is_not_a_plain_tensor_is_not_direct():
    x = torch.randn(2, 4)
    assert not is_direct(x.as_subclass(Subclass))
    assert not is_direct(torch.view_as_complex(torch.randn(2, 4, 2)).conj().imag)
    assert not is_direct(torch._efficientzerotensor((2, 4)))
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(x)
    assert not is_direct(fake)


@pytest.mark.parametrize("mode", [Dispatch, Function, FakeTensorMode, lambda: torch.device("cpu")])
def test_no_mode_is_passed_by(mode):
    x = torch.randn(2, 4)
    with mode():
        assert not is_direct(x)
    assert is_direct(x)


def test_no_transform_is_passed_by():
    x, seen = torch.randn(2, 4), []

    def record(y):
        seen.append(is_direct(x))
        return y.sum()

    torch.func.grad(record)(x)
    torch.func.vmap(record)(x)
    torch.func.jvp(record, (x,), (x,))
    with forward_ad.dual_level():
        record(x)
    torch.jit.trace(record, (x,), check_trace=False)
    assert seen == [False] * 5


@pytest.fixture
def calls(monkeypatch):
    """Which way rms_norm takes: `direct` for each call of the callable with no operator above it."""
    found = []
    selected = operator._forward["cpu"]
    in_operator = []

    def function(*args):
        found.append("operator" if in_operator else "direct")
        assert all(type(a) in (torch.Tensor, torch.nn.Parameter) for a in args[:2] if a is not None)
        return selected(*args)

    real = operator.FORWARD

    def forward(*args):
        in_operator.append(1)
        try:
            return real(*args)
        finally:
            in_operator.pop()

    monkeypatch.setitem(operator._forward, "cpu", function)
    monkeypatch.setattr(operator, "FORWARD", forward)
    return found


def test_the_public_function_takes_the_direct_way_in_inference_only(calls):
    x, weight = torch.randn(2, 4), torch.nn.Parameter(torch.randn(4))
    with torch.inference_mode():
        rms_norm(x, weight)
    with torch.no_grad():
        rms_norm(x, weight)
    assert calls == ["direct", "direct"]
    rms_norm(x, weight)
    with Dispatch():
        rms_norm(x, weight)
    with torch.no_grad(), Function():
        rms_norm(x, weight)
    assert calls[2:] == ["operator"] * 3


def test_a_pending_negation_is_carried_out_before_the_callable_reads(calls):
    x = torch.view_as_complex(torch.randn(2, 4, 2)).conj().imag
    assert x.is_neg()
    torch.testing.assert_close(rms_norm(x, None), rms_norm(x.clone(), None), rtol=0, atol=0)
    assert calls == ["operator", "direct"]


def test_fake_tensors_never_reach_an_implementation(calls):
    with FakeTensorMode():
        assert rms_norm(torch.empty(3, 4), torch.empty(4)).shape == (3, 4)
    assert calls == []


def test_a_tensor_is_dispatched_by_its_own_device(calls):
    assert rms_norm(torch.empty(3, 4, device="meta"), None).device.type == "meta"
    assert calls == []
    with torch.device("meta"):
        assert rms_norm(torch.ones(3, 4, device="cpu"), None).device.type == "cpu"
    assert calls == ["operator"]
