"""One exchange of live modules for a layout, and its inverse."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
from torch import nn

from .. import plain
from ..locations import Rule
from ..probing import blank_copy
from ..state import split as split_parameter
from . import optimizers


def meta_twin(module: nn.Module) -> nn.Module:
    """``module`` with products and parameters that have no memory: enough to build a layout from, at no cost."""
    if getattr(module, "is_layout", False):
        return module
    twin = blank_copy(module)
    for name, parameter in module.named_parameters(recurse=False):
        twin.register_parameter(name, nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False))
    for name, child in module.named_children():
        if type(child) is nn.Linear:
            bias = child.bias is not None
            small = nn.Linear(child.in_features, child.out_features, bias, device="meta", dtype=child.weight.dtype)
            twin.add_module(name, small)
        else:
            twin.add_module(name, child)
    return twin


def concatenated(old: Sequence[nn.Parameter]) -> nn.Parameter:
    """One parameter of ``old`` along dimension 0, and of their gradients where there are any."""
    new = nn.Parameter(torch.cat([p.detach() for p in old]), requires_grad=old[0].requires_grad)
    grads = [p.grad for p in old if p.grad is not None]
    if grads:
        new.grad = torch.cat(grads)
    return new


def separated(merged: nn.Parameter, rule: Rule) -> list[nn.Parameter]:
    """The inverse of :func:`concatenated`, in memory of their own."""
    new = [nn.Parameter(part.clone(), merged.requires_grad) for part in split_parameter(merged.detach(), rule)]
    if merged.grad is not None:
        for parameter, grad in zip(new, split_parameter(merged.grad, rule), strict=True):
            parameter.grad = grad.clone()
    return new


@dataclass(frozen=True)
class Contents:
    """What a layout holds: names of parameters and buffers, and the modules themselves."""

    tensors: frozenset[str]
    modules: dict[str, Any]


def contents(layout: nn.Module) -> Contents:
    """What ``layout`` holds now."""
    return Contents(frozenset(layout._parameters) | frozenset(layout._buffers), dict(layout._modules))


@dataclass
class Swap:
    """Children ``names`` of ``parent`` become ``layout``, which stands in the place of the first.

    ``slots`` are all places that the first child has in the model: a shared module is exchanged in each of them.
    """

    parent: Any
    names: tuple[str, ...]
    layout: Any
    children: tuple[Any, ...]
    slots: list[tuple[Any, str]] = field(default_factory=list)
    fillers: tuple[nn.Module, ...] = ()
    made: Contents | None = None

    def norms(self) -> list[tuple[str, Any]]:
        """(name of the layout's parameter, the norm it comes from)."""
        found = []
        for prefix, child in zip(("", "", "post_"), self.children, strict=False):
            if hasattr(self.layout, f"{prefix}scale") and not hasattr(child, "down_proj"):
                found.append((f"{prefix}scale", child))
        return found

    def mlp(self) -> Any:
        """The gated MLP among the children, or None."""
        return next((child for child in self.children if hasattr(child, "down_proj")), None)

    def to_merge(self) -> list[tuple[str, list[nn.Parameter]]]:
        """(name of a merged parameter, the parameters that it is made from)."""
        mlp = self.mlp()
        if mlp is None or self.layout.packed:
            return []
        kinds = ["weight"] + (["bias"] if mlp.gate_proj.bias is not None else [])
        return [(kind, [getattr(mlp.gate_proj, kind), getattr(mlp.up_proj, kind)]) for kind in kinds]

    def check(self, optimizer: Any) -> None:
        """Raise RuntimeError when the exchange would lose something; changes nothing."""
        for kind, old in self.to_merge():
            if len({(p.requires_grad, p.dtype, p.device) for p in old}) > 1:
                raise RuntimeError(f"gate_proj and up_proj differ in requires_grad, dtype or device of their {kind}")
            if len({p.grad is None for p in old}) > 1:
                raise RuntimeError(f"only one of gate_proj and up_proj has a gradient of its {kind}: call zero_grad()")
            if optimizer is not None:
                optimizers.check_merge(optimizer, old)

    def do(self, optimizer: Any) -> None:
        """Exchange the modules. Renamed parameters and products that stay are the same objects."""
        merged = [(kind, old, concatenated(old)) for kind, old in self.to_merge()]  # may fail, so before any change
        for name, norm in self.norms():
            setattr(self.layout, name, norm.scale if getattr(norm, "is_layout", False) else norm.weight)
        mlp = self.mlp()
        if mlp is not None:
            self.layout.down_proj = mlp.down_proj
            if self.layout.packed:
                self.layout.gate_up_proj = mlp.gate_up_proj
        for kind, old, new in merged:
            if optimizer is not None:
                optimizers.merge(optimizer, old, new)
            setattr(self.layout.gate_up_proj, kind, new)
            for linear in (mlp.gate_proj, mlp.up_proj):  # the memory goes: two copies of an MLP may not fit
                setattr(linear, kind, nn.Parameter(torch.empty_like(getattr(linear, kind), device="meta")))
        self.layout.verified, self.layout.child_names, self.layout.put_live = True, self.names, True
        self.layout.train(self.children[0].training)
        for holder, name in self.slots:
            holder._modules[name] = self.layout
        self.fillers = tuple(nn.Identity() for _ in self.names[1:])
        for name, filler in zip(self.names[1:], self.fillers, strict=True):
            self.parent._modules[name] = filler
        self.made = contents(self.layout)

    def back(self, optimizer: Any) -> None:
        """Put the original modules back, with the values that the layout has now."""
        for name, norm in self.norms():
            setattr(norm, "scale" if getattr(norm, "is_layout", False) else "weight", getattr(self.layout, name))
        mlp = self.mlp()
        if mlp is not None:
            mlp.down_proj = self.layout.down_proj
            if self.layout.packed:
                mlp.gate_up_proj = self.layout.gate_up_proj
            else:
                self._split(mlp, optimizer)
        for child in self.children:
            child.train(self.layout.training)
        for holder, name, child in self.put_back():
            holder._modules[name] = child

    def _split(self, mlp: Any, optimizer: Any) -> None:
        linears = (mlp.gate_proj, mlp.up_proj)
        made = []
        for rule in self.layout.rules():
            layer, _, kind = rule.target.rpartition(".")
            if layer != "gate_up_proj":
                continue
            merged = getattr(self.layout.gate_up_proj, kind)
            made.append((kind, merged, separated(merged, rule)))
        for kind, merged, new in made:
            if optimizer is not None:
                optimizers.split(optimizer, merged, new)
            for linear, parameter in zip(linears, new, strict=True):
                setattr(linear, kind, parameter)
            setattr(self.layout.gate_up_proj, kind, nn.Parameter(torch.empty_like(merged, device="meta")))

    def check_back(self, optimizer: Any, holds: Callable[[Any, str], Any]) -> None:
        """Raise RuntimeError when :meth:`back` would lose what was done since; ``holds`` tells what a slot has."""
        wanted = [(holder, name, self.layout) for holder, name in self.slots]
        wanted += [(self.parent, name, f) for name, f in zip(self.names[1:], self.fillers, strict=True)]
        for holder, name, ours in wanted:
            found = holds(holder, name)
            if found is not ours:
                raise RuntimeError(f"{name}: {_stranger(found)}")
        reason = changed(self.layout, self.made)
        if reason is None and self.merged_parameters() and not plain.is_plain_linear(self.layout.gate_up_proj):
            reason = "gate_up_proj is no plain nn.Linear any more (an adapter, hooks, a parametrisation, or sharding)"
        if reason is None and any(p.is_meta for p in self.merged_parameters()):
            reason = "the weights of gate_up_proj are not in memory (offloaded)"
        if reason is not None:
            raise RuntimeError(f"{self.names[0]}: {reason}, and would be lost; take that back first")
        for parameter in self.merged_parameters() if optimizer is not None else ():
            optimizers.check_split(optimizer, parameter)

    def put_back(self) -> list[tuple[Any, str, Any]]:
        """(holder, name, module) of each place that :meth:`back` fills."""
        found = [(self.parent, name, child) for name, child in zip(self.names, self.children, strict=True)]
        return [*found, *((holder, name, self.children[0]) for holder, name in self.slots)]

    def merged_parameters(self) -> Sequence[nn.Parameter]:
        """Parameters of the layout that exist only because of the exchange."""
        return () if self.mlp() is None or self.layout.packed else tuple(self.layout.gate_up_proj.parameters())


def _stranger(found: Any) -> str:
    """Why undo stops at a module that is not the one which apply put there."""
    if getattr(found, "put_live", False):
        return (
            "another kernel stands there, applied through another model object (the outer model, or an inner one): "
            "undo that one first"
        )
    return f"a {type(found).__name__} was put there after the kernel was applied, and would be lost; take it out first"


def changed(layout: nn.Module, made: Contents | None) -> str | None:
    """What was done to ``layout`` since it was ``made``, other than to the values of its parameters, or None."""
    now = contents(layout)
    if made is None or now.tensors != made.tensors or now.modules.keys() != made.modules.keys():
        return "parameters, buffers or modules were added to it or taken from it (a parametrisation, an adapter)"
    for name, module in now.modules.items():
        if module is not made.modules[name] and not plain.is_plain_linear(module):
            return f"its {name} was replaced by a {type(module).__module__}.{type(module).__qualname__}"
    return "it has hooks" if has_hooks(layout) else "its forward was replaced" if foreign_forward(layout) else None


def has_hooks(module: nn.Module) -> bool:
    """Whether calling ``module`` runs hooks."""
    before, after = module._forward_pre_hooks or module._backward_pre_hooks, module._forward_hooks
    return bool(before or after or module._backward_hooks)


def foreign_forward(module: nn.Module) -> bool:
    """Whether the instance has a forward other than that of its class, which `kernels` binds too, or ours."""
    bound = vars(module).get("forward")
    if bound is None or getattr(bound, "is_linear_forward", False):
        return False
    return getattr(bound, "__func__", None) is not type(module).forward or bound.__self__ is not module


@dataclass
class Binding:
    """The forward of ``layer`` on one live module, which keeps its class and its parameters."""

    module: Any
    layer: type[nn.Module]
    before: Any = None

    def to_merge(self) -> list[tuple[str, list[nn.Parameter]]]:
        """Nothing: see :meth:`Swap.to_merge`."""
        return []

    def merged_parameters(self) -> Sequence[nn.Parameter]:
        """None: see :meth:`Swap.merged_parameters`."""
        return ()

    def check(self, optimizer: Any) -> None:
        """There is nothing to lose."""

    def check_back(self, optimizer: Any, holds: Callable[[Any, str], Any]) -> None:  # noqa: ARG002
        """Raise RuntimeError when another forward was bound since."""
        if getattr(vars(self.module).get("forward"), "__func__", None) is not self.layer.forward:
            raise RuntimeError("its forward was replaced after the kernel was applied; take that back first")

    def put_back(self) -> list[tuple[Any, str, Any]]:
        """None: the module stays."""
        return []

    def do(self, optimizer: Any) -> None:  # noqa: ARG002
        """Bind the layer's forward."""
        self.before = vars(self.module).get("forward")
        self.module.forward = MethodType(self.layer.forward, self.module)

    def back(self, optimizer: Any) -> None:  # noqa: ARG002
        """The forward that was there before."""
        vars(self.module).pop("forward", None)
        if self.before is not None:
            self.module.forward = self.before
