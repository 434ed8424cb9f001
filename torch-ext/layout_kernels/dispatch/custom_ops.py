"""Registration of operators with torch, in this copy's namespace. torch is imported by calling, not by importing."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from .._ops import NAMESPACE, add_op_namespace_prefix

if TYPE_CHECKING:
    import torch

# A Library takes its registrations with it when it is collected.
_libraries: list[torch.library.Library] = []
_kernels: dict[tuple[str, str], Callable[..., Any]] = {}
_fakes: dict[str, Callable[..., Any]] = {}


def library() -> torch.library.Library:
    """The library that holds what this copy registers; it lives as long as the process."""
    import torch

    if not _libraries:
        _libraries.append(torch.library.Library(NAMESPACE, "FRAGMENT"))
    return _libraries[0]


def register_custom_op(
    name: str,
    fn: Callable[..., Any] | None = None,
    *,
    mutates_args: Iterable[str] | None = None,
    dispatch_key: str | None = None,
    fake_impl: Callable[..., Any] | None = None,
) -> torch._ops.OpOverload:
    """Register an operator of this copy's namespace; calling it again with the same functions changes nothing.

    With `fn`: the schema is read from its annotations and defined unless it is there, and `fn` becomes the kernel of
    `dispatch_key`. Without: the schema exists, for example from a native extension, and only `fake_impl` is added.

    Args:
        name: of the operator, without namespace.
        fn: the kernel; every argument and result annotated.
        mutates_args: the arguments that `fn` writes to; () for none.
        dispatch_key: for example "CPU", "CUDA", "PrivateUse1" or "CompositeExplicitAutograd".
        fake_impl: shapes and dtypes of the results, for tracing.

    Returns:
        The operator.

    Raises:
        TypeError: `mutates_args` or `dispatch_key` is given without `fn`, or is missing beside it.
        ValueError: there is another kernel or fake implementation, or another schema, under the name.
        RuntimeError: there is no such schema; or what torch raises.
    """
    if (fn is None) != (mutates_args is None) or (fn is None) != (dispatch_key is None):
        raise TypeError(
            f"register_custom_op({name!r}): give fn, mutates_args and dispatch_key for an operator of your own, or "
            "none of them for one whose schema exists"
        )
    if fn is not None and mutates_args is not None and dispatch_key is not None:
        _register_kernel(name, fn, tuple(mutates_args), dispatch_key)
    operator = _find(name)
    if operator is None:
        raise RuntimeError(
            f"operator {add_op_namespace_prefix(name)} has no schema; load the extension that defines it first, or "
            "pass fn, mutates_args and dispatch_key"
        )
    if fake_impl is not None:
        _register_fake(name, fake_impl)
    return operator


def _find(name: str) -> torch._ops.OpOverload | None:
    import torch

    packet = getattr(getattr(torch.ops, NAMESPACE), name, None)
    return None if packet is None else packet.default


def _schema(fn: Callable[..., Any], mutates_args: tuple[str, ...]) -> str:
    import torch

    # torch reads annotations that are text with a few names of its own only; a stand-in carries them resolved.
    hints = typing.get_type_hints(fn)
    signature = inspect.signature(fn)
    parameters = [p.replace(annotation=hints.get(p.name, p.annotation)) for p in signature.parameters.values()]
    result = hints.get("return", signature.return_annotation)

    def prototype() -> None: ...

    prototype.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=parameters, return_annotation=None if result is type(None) else result
    )
    return torch.library.infer_schema(prototype, mutates_args=mutates_args)


def _register_kernel(name: str, fn: Callable[..., Any], mutates_args: tuple[str, ...], dispatch_key: str) -> None:
    import torch

    known = _kernels.get((name, dispatch_key))
    if known is not None:
        if known is not fn:
            raise ValueError(f"operator {add_op_namespace_prefix(name)} already has a kernel for {dispatch_key}")
        return
    schema = _schema(fn, mutates_args)
    operator = _find(name)
    if operator is None:
        library().define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    else:
        present = str(operator._schema).partition("(")[2]
        if present != schema.partition("(")[2]:
            raise ValueError(f"operator {add_op_namespace_prefix(name)} has the schema ({present}, not {schema}")
        if torch._C._dispatch_has_kernel_for_dispatch_key(add_op_namespace_prefix(name), dispatch_key):
            # The same build was loaded from two places: one id is one content, so its kernel is this one.
            _kernels[name, dispatch_key] = fn
            return
    library().impl(name, fn, dispatch_key)
    _kernels[name, dispatch_key] = fn


def _register_fake(name: str, fake_impl: Callable[..., Any]) -> None:
    import torch

    if name in _fakes:
        if _fakes[name] is not fake_impl:
            raise ValueError(f"operator {add_op_namespace_prefix(name)} already has a fake implementation")
        return
    if not torch._C._dispatch_has_kernel_for_dispatch_key(add_op_namespace_prefix(name), "Meta"):
        torch.library.register_fake(add_op_namespace_prefix(name), fake_impl, lib=library())
    _fakes[name] = fake_impl
