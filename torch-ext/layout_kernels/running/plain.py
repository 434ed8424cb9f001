"""Reading a module's parameters: where that gives what calling the module would, and at little cost.

Each token asks this of each layer, so it does not go through ``nn.Module.__getattr__`` where it need not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.modules import module as _every_module
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

TENSORS = (nn.Parameter, torch.Tensor)
_Module, _Linear = nn.Module, nn.Linear
_CALL, LINEAR_FORWARD = nn.Module.__call__, nn.Linear.forward
_len_function_modes = torch._C._len_torch_function_stack
_is_compiling = torch.compiler.is_compiling
_len_dispatch_modes = torch._C._len_torch_dispatch_stack
_functorch_level = torch._C._functorch.peek_interpreter_stack
_tracing_state = torch._C._get_tracing_state


def is_for_operators(x: Any) -> bool:
    """Whether a module may give ``x`` to an operation of this package, else its class's own forward must run.

    That is a dense tensor, not a proxy or a subclass that brings its own operators; and nobody transforms or records
    what runs, who is to find the stock model's operators: `torch.func`, forward-mode differentiation, a dispatch mode
    (a counter of FLOPs, a profiler), a trace, an export.
    """
    if type(x) not in TENSORS or x.layout is not torch.strided or x.is_nested:
        return False
    if _is_compiling():
        return not torch.compiler.is_exporting()
    return (
        _len_dispatch_modes() == 0
        and is_unwatched()
        and _functorch_level() is None
        and forward_ad._current_level < 0
        and _tracing_state() is None
    )


def is_unwatched() -> bool:
    """Whether no function mode stands between a caller and torch's functions."""
    return _len_function_modes() == 0 or _are_devices()


def _are_devices() -> bool:
    """Whether the function modes that are active only say where tensors are made (``torch.device`` as a context)."""
    return all(type(mode) is DeviceContext for mode in _get_current_function_mode_stack())


def mark_linear_forward(forward: Any) -> None:
    """Let `is_plain_linear` know a forward that computes what ``nn.Linear`` does; any copy of this package may ask."""
    forward.is_linear_forward = True


def is_plain_linear(module: nn.Module) -> bool:
    """Whether calling ``module`` is exactly ``F.linear(x, module.weight, module.bias)``.

    False for a subclass or a wrapper (LoRA, quantised), hooks (offloaded), a replaced forward, and a weight that is a
    tensor subclass: reading the weight there would give other values than calling the module.
    """
    return weight_and_bias(module) is not None


def weight_and_bias(module: nn.Module) -> tuple[nn.Parameter, torch.Tensor | None] | None:
    """Of a module for which :func:`is_plain_linear` holds, else None."""
    if type(module) is not nn.Linear:
        return None
    own = module.__dict__
    parameters = own["_parameters"]
    if (
        own["_forward_hooks"]
        or own["_forward_pre_hooks"]
        or own["_backward_hooks"]
        or own["_backward_pre_hooks"]
        or has_global_hooks()
        or not _has_linear_forward(module)
    ):
        return None
    # Registered and not shadowed, as nearly always; else what the module itself would read.
    usual = "weight" in parameters and "bias" in parameters and "weight" not in own and "bias" not in own
    weight = parameters["weight"] if usual else parameter(module, "weight")
    if type(weight) is not nn.Parameter:
        return None
    return weight, parameters["bias"] if usual else parameter(module, "bias")


def has_global_hooks() -> bool:
    """Whether there are hooks of every module."""
    return bool(
        _every_module._global_forward_hooks
        or _every_module._global_forward_pre_hooks
        or _every_module._global_backward_hooks
        or _every_module._global_backward_pre_hooks
    )


def is_patched() -> bool:
    """Whether calling a module, or the product of every ``nn.Linear``, is not torch's own any more."""
    return _Module.__call__ is not _CALL or _Linear.forward is not LINEAR_FORWARD


def has_hooks(module: nn.Module) -> bool:
    """Whether calling ``module`` runs hooks, its own or those of every module."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or has_global_hooks()
    )


def _has_linear_forward(module: nn.Module) -> bool:
    """Whether the instance has no forward of its own, or one of ours, or that of its class, as `kernels` binds it."""
    if _is_compiling():  # by attribute: a compiler guards that, and not the lack of a key
        forward: Any = module.forward
        return getattr(forward, "__func__", None) is nn.Linear.forward or getattr(forward, "is_linear_forward", False)
    bound = module.__dict__.get("forward")
    if bound is None or getattr(bound, "is_linear_forward", False):
        return True
    return getattr(bound, "__func__", None) is nn.Linear.forward and bound.__self__ is module


def parameter(module: nn.Module, name: str) -> Any:
    """``getattr(module, name)`` of what nearly always is a parameter."""
    parameters = module._parameters
    return parameters[name] if name in parameters and name not in module.__dict__ else getattr(module, name)


def child(module: nn.Module, name: str) -> Any:
    """``getattr(module, name)`` of what nearly always is a module below it."""
    modules = module._modules
    return modules[name] if name in modules and name not in module.__dict__ else getattr(module, name)
