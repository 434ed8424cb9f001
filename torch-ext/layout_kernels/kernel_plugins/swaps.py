"""One exchange of live modules for a layout, and its inverse."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
from torch import nn

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
    merged: list[tuple[str, list[str]]] = field(default_factory=list)

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
            if optimizer is not None:
                optimizers.check_merge(optimizer, old)

    def do(self, optimizer: Any) -> None:
        """Exchange the modules. Renamed parameters and products that stay are the same objects."""
        for name, norm in self.norms():
            setattr(self.layout, name, norm.scale if getattr(norm, "is_layout", False) else norm.weight)
        mlp = self.mlp()
        if mlp is not None:
            self.layout.down_proj = mlp.down_proj
            if self.layout.packed:
                self.layout.gate_up_proj = mlp.gate_up_proj
        for kind, old in self.to_merge():
            new = nn.Parameter(torch.cat([p.detach() for p in old]), requires_grad=old[0].requires_grad)
            setattr(self.layout.gate_up_proj, kind, new)
            if optimizer is not None:
                optimizers.merge(optimizer, old, new)
            for linear in (mlp.gate_proj, mlp.up_proj):  # the memory goes: two copies of an MLP may not fit
                setattr(linear, kind, nn.Parameter(torch.empty_like(getattr(linear, kind), device="meta")))
        self.layout.verified, self.layout.child_names = True, self.names
        self.layout.train(self.children[0].training)
        for holder, name in self.slots:
            holder._modules[name] = self.layout
        for name in self.names[1:]:
            self.parent._modules[name] = nn.Identity()

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
        for child, name in zip(self.children, self.names, strict=True):
            child.train(self.layout.training)
            self.parent._modules[name] = child
        for holder, name in self.slots:
            holder._modules[name] = self.children[0]

    def _split(self, mlp: Any, optimizer: Any) -> None:
        linears = (mlp.gate_proj, mlp.up_proj)
        for rule in self.layout.rules():
            layer, _, kind = rule.target.rpartition(".")
            if layer != "gate_up_proj":
                continue
            merged = getattr(self.layout.gate_up_proj, kind)
            new = [nn.Parameter(p.clone(), merged.requires_grad) for p in split_parameter(merged.detach(), rule)]
            if optimizer is not None:
                optimizers.split(optimizer, merged, new)
            for linear, parameter in zip(linears, new, strict=True):
                setattr(linear, kind, parameter)

    def merged_parameters(self) -> Sequence[nn.Parameter]:
        """Parameters of the layout that exist only because of the exchange."""
        return () if self.mlp() is None or self.layout.packed else tuple(self.layout.gate_up_proj.parameters())


@dataclass
class Binding:
    """The forward of ``layer`` on one live module, which keeps its class and its parameters."""

    module: Any
    layer: type[nn.Module]

    def to_merge(self) -> list[tuple[str, list[nn.Parameter]]]:
        """Nothing: see :meth:`Swap.to_merge`."""
        return []

    def merged_parameters(self) -> Sequence[nn.Parameter]:
        """None: see :meth:`Swap.merged_parameters`."""
        return ()

    def check(self, optimizer: Any) -> None:
        """There is nothing to lose."""

    def do(self, optimizer: Any) -> None:  # noqa: ARG002
        """Bind the layer's forward."""
        self.module.forward = MethodType(self.layer.forward, self.module)

    def back(self, optimizer: Any) -> None:  # noqa: ARG002
        """The class's own forward again."""
        vars(self.module).pop("forward", None)
