"""How an operation's public function reaches an implementation: directly where that is safe, else as an operator.

Under compile, autograd, FakeTensorMode, functorch and every other mode the operator is called, so that torch sees it.
In eager inference on plain tensors the selected callable is, which saves the dispatcher's time.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

from .custom_ops import library, register_custom_op
from .flops import count, tell_counters
from .runtime import RUNTIME

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_STRIDED = torch.strided
_len_dispatch_modes = torch._C._len_torch_dispatch_stack
_len_function_modes = torch._C._len_torch_function_stack
_functorch_level = torch._C._functorch.peek_interpreter_stack
_tracing_state = torch._C._get_tracing_state
_is_recording = torch.is_grad_enabled
_any_requires_grad = torch._C._any_requires_grad


def is_direct(*tensors: torch.Tensor | None) -> bool:
    """Whether a callable that may read pointers can be given these tensors, and no gradient is to be recorded.

    Only plain tensors and parameters, outside every mode, transform and trace. A sparse or nested tensor, one with a
    pending negation (`y.conj().imag`) and one without memory (an efficient zero tensor) are not plain.
    """
    for tensor in tensors:
        if tensor is not None and (
            type(tensor) not in _PLAIN
            or tensor.layout is not _STRIDED
            or tensor.is_nested
            or tensor.is_neg()
            or tensor._is_zerotensor()
        ):
            return False
    if _len_dispatch_modes() != 0:
        tell_counters()
        return False
    return (
        not (_is_recording() and _any_requires_grad(*tensors))
        and _len_function_modes() == 0
        and _functorch_level() is None
        and forward_ad._current_level < 0
        and _tracing_state() is None
    )


def define_operator(
    name: str,
    check: Callable[..., None],
    result: Callable[..., Any],
    *,
    mutates_args: tuple[str, ...],
    differentiable: Callable[..., Any],
    plain: Callable[..., Any] | None = None,
    returns: Any = torch.Tensor,
    like: int = 0,
    launch: Callable[..., Any] | None = None,
    flops: Callable[..., int] | None = None,
) -> torch._ops.OpOverload:
    """Make an operator of this copy's namespace, which runs the implementation that is selected for its device.

    Args:
        name: of the operation, and of the operator without namespace.
        check: raises for arguments that are not allowed; its annotated arguments are the operator's.
        result: the results of the arguments without values: shapes, dtypes, device, and None for one that was not
            asked for.
        mutates_args: the arguments that are written to.
        differentiable: called in place of the operator when a gradient is to be recorded; made of what autograd
            knows.
        plain: the same from torch's own operators only, for forward-mode differentiation and the transforms of
            torch.func; None: `differentiable` is.
        returns: the annotation of the result.
        like: which argument says the device; a result that is None becomes an empty tensor of its dtype.
        launch: called in place of the selected implementation.
        flops: how many its products take, from the shapes of the arguments; None: it has no product.

    Returns:
        The operator, which refuses `torch.func.vmap`.
    """
    selected = RUNTIME.functions(name)

    def run(*args: Any) -> Any:
        check(*args)
        found = (selected[args[like].device.type] if launch is None else launch)(*args)
        return _filled(found, args[like])

    def fake(*args: Any) -> Any:
        check(*args)
        return _filled(result(*args), args[like])

    run.__wrapped__ = check  # type: ignore[attr-defined]  # where its annotations are understood
    run.__signature__ = inspect.signature(check).replace(return_annotation=returns)  # type: ignore[attr-defined]
    run.__annotations__ = {**check.__annotations__, "return": returns}
    fresh = not hasattr(getattr(torch.ops, library().ns), name)
    operator = register_custom_op(
        name, run, mutates_args=mutates_args, dispatch_key="CompositeExplicitAutograd", fake_impl=fake
    )
    if flops is not None:
        count(operator, flops)
    if fresh:
        autograd = _autograd_kernel(operator, *(_tensors(f, like) for f in (differentiable, plain or differentiable)))
        library().impl(name, autograd, "Autograd", with_keyset=True)
        library().impl(name, _refuse_vmap(name), "FuncTorchBatched")
    return operator


def _tensors(function: Callable[..., Any], like: int) -> Callable[..., Any]:
    return lambda *args: _filled(function(*args), args[like])


def _filled(found: Any, like: torch.Tensor) -> Any:
    """Results of which none is None: an operator must return tensors."""
    if not isinstance(found, tuple):
        return found
    return tuple(like.new_empty(0) if tensor is None else tensor for tensor in found)


def _autograd_kernel(
    operator: torch._ops.OpOverload, differentiable: Callable[..., Any], plain: Callable[..., Any]
) -> Callable[..., Any]:
    def autograd(keyset: torch._C.DispatchKeySet, *args: Any) -> Any:
        if forward_ad._current_level >= 0 and any(map(_has_tangent, args)):
            return plain(*args)
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*args):
            # An autograd.Function cannot be applied below functorch's dispatch.
            return plain(*args) if torch._C._are_functorch_transforms_active() else differentiable(*args)
        with torch._C._AutoDispatchBelowAutograd():
            return operator.redispatch(keyset & torch._C._after_autograd_keyset, *args)

    return autograd


def _has_tangent(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and forward_ad.unpack_dual(value).tangent is not None


def _refuse_vmap(name: str) -> Callable[..., Any]:
    def refuse(*args: Any) -> Any:
        raise NotImplementedError(
            f"{name} cannot be called under torch.func.vmap; call it on the whole batch, since every dimension "
            "but the last already is one"
        )

    return refuse
