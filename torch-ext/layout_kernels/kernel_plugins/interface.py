"""Apply kernels by id, apply all that fit, and undo."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from . import live
from .base import BaseKernel
from .registry import Registry, scan_all_kernels


def apply_kernel(kernel_id: str, model: nn.Module | None = None, **kwargs: Any) -> Any:
    """Apply the kernel ``kernel_id`` to ``model`` and return the model. ``undo(model)`` takes it back.

    Args:
        kernel_id: such as "cpu_fused_rmsnorm"; ``Registry.ids()`` lists them.
        model: a loaded model. Only it changes, no class and no other model.
        **kwargs: for the kernel; ours accept ``optimizer=``, though parameters stay the same objects.

    Raises:
        ValueError: an unknown id (the message lists the ids), or no model.
        RuntimeError: missing dependencies, or nothing in the model matched.
    """
    kernel = _known(kernel_id)
    if model is None:
        raise ValueError(f"apply_kernel({kernel_id!r}) needs model=<the model to change>")
    return kernel.apply(model=model, **kwargs)


def _known(kernel_id: str) -> type[BaseKernel]:
    """The kernel with this id, whose dependencies are met; the errors of :func:`apply_kernel` if there is none."""
    scan_all_kernels()
    kernel = Registry.get(kernel_id)
    if kernel is None:
        raise Registry.unknown(kernel_id)
    kernel.require_deps()
    return kernel


def apply_default_kernels(model: nn.Module, include_kernels: str | bool | None = None, **kwargs: Any) -> Any:
    """Apply several kernels.

    Args:
        model: a loaded model.
        include_kernels: None, False or "": nothing. "auto" or True: all kernels for the current device that find
            something to do. Else ids, separated by commas, in order; one that is unknown or finds nothing is an error,
            and none of ours is applied then.
        **kwargs: as for :func:`apply_kernel`.
    """
    if include_kernels is None or include_kernels is False or include_kernels == "":
        return model
    if include_kernels is True or include_kernels == "auto":
        scan_all_kernels()
        for kernel_id in sorted(Registry.ids(), key=live.default_order):
            kernel = Registry.get(kernel_id)
            if kernel is not None and kernel.check_deps():
                try:
                    model = kernel.apply(model=model, **kwargs)
                except live.NothingMatchedError as error:
                    live.warn_left_out(model, error.left_out)
        return model
    if not isinstance(include_kernels, str):
        raise TypeError(
            f"include_kernels is a comma-separated string, 'auto', a bool or None, got {include_kernels!r}"
        )
    ids = [part.strip() for part in include_kernels.split(",") if part.strip()]
    kernels = [_known(kernel_id) for kernel_id in ids]  # all are looked up before the first is applied
    with live.all_or_none(model):
        for kernel in kernels:
            model = kernel.apply(model=model, **kwargs)
    return model


def undo(model: nn.Module, optimizer: Any = None) -> Any:  # noqa: ARG001
    """Take back every kernel that was applied to ``model`` or to a part of it.

    Args:
        model: the model. Modules and parameters stay the same objects, with their current values.
        optimizer: accepted for callers that have one; nothing is done to it.

    Raises:
        ValueError: no kernel was applied to the model.
        RuntimeError: something was done to a kernel's module since that would be lost (a parametrisation, a forward
            of its own). Nothing has changed then.
    """
    return live.undo(model)


def original_state_dict(model: nn.Module) -> dict[str, Any]:
    """``model.state_dict()``, which has the stock model's names and shapes."""
    return dict(model.state_dict())


def load_original_state_dict(model: nn.Module, state_dict: Mapping[str, Any], strict: bool = True) -> Any:
    """``model.load_state_dict(state_dict, strict)``, which takes the stock model's names."""
    return model.load_state_dict(state_dict, strict=strict)
