"""What our layers can do for a model, decided by what its modules compute, before anything is loaded.

``plan`` builds the model without memory for its weights (the meta device), runs each class of norm and MLP on a small
input (``recognition/``), reads from each parent's source whether norm and MLP follow one another and
then builds the model once more with the layers in place, so that what a load would refuse is left out, with the
reason.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..layer_table import MLP_LAYER_OF, NORM_LAYER_OF
from ..recognition import adjacency, gated_norms, mlps, norms
from ..running.adopted import is_adopted
from .dry_load import refusals

Key = str | tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Entry:
    """One kind of module: where it stands, its class, how many, and the layer for it or why there is none."""

    pattern: str
    class_name: str
    count: int
    layer: str | None
    key: Key | None = None
    reason: str = ""


@dataclass(frozen=True)
class Plan:
    """The layers for one model: ``print`` shows a table, :meth:`kernel_config` is for ``from_pretrained``."""

    model_class: str
    entries: tuple[Entry, ...] = field(default=())

    @property
    def mapping(self) -> dict[Key, str]:
        """Layer name for each key, one entry a key."""
        return {entry.key: entry.layer for entry in self.entries if entry.key is not None and entry.layer is not None}

    def kernel_config(
        self,
        repo_id: str,
        *,
        version: int | None = None,
        revision: str | None = None,
        trust_remote_code: bool = True,
    ) -> Any:
        """A transformers ``KernelConfig`` for ``from_pretrained(..., use_kernels=True, kernel_config=...)``.

        Args:
            repo_id: the kernel repository, "owner/name".
            version: the kernel's major version; exactly one of ``version`` and ``revision`` is given.
            revision: a branch, tag or commit of the repository.
            trust_remote_code: whether to load from a publisher that the Hub does not list as trusted.

        Raises:
            ValueError: both or neither of ``version`` and ``revision``, or the plan has no layer at all.
        """
        if (version is None) == (revision is None):
            raise ValueError(f"give one of version and revision, got version={version!r}, revision={revision!r}")
        if not self.mapping:
            raise ValueError(f"no layer fits {self.model_class}; print(plan) gives the reason for each module")
        from transformers import KernelConfig

        where = {"version": version} if version is not None else {"revision": revision}
        options = {**where, "trust_remote_code": trust_remote_code}
        mapping = {key: (f"{repo_id}:{layer}", options) for key, layer in self.mapping.items()}
        return KernelConfig(mapping, inherit_mapping=False)  # else transformers asks the Hub for kernels of its own

    def __str__(self) -> str:
        rows = [("modules", "class", "count", "layer")]
        rows += [(e.pattern, e.class_name, str(e.count), e.layer or f"- {e.reason}") for e in self.entries]
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        lines = ["  ".join([*(c.ljust(w) for c, w in zip(row[:3], widths, strict=True)), row[3]]) for row in rows]
        return "\n".join([f"{self.model_class}", *(f"  {line}" for line in lines)])


def pattern_of(path: str) -> str:
    """``pattern_of("model.layers.0.mlp")`` is ``"model.layers.*.mlp"``."""
    return ".".join("*" if part.isdigit() else part for part in path.split("."))


def resolve_model(source: Any, trust_remote_code: bool = False) -> tuple[type[nn.Module], Any]:
    """The model class and config that ``source`` names: a model, a config, or the path or Hub id of a checkpoint.

    Args:
        source: a model, a config, or the path or Hub id of a checkpoint.
        trust_remote_code: whether to run the code of a checkpoint that brings its model's class.

    Raises:
        TypeError: ``source`` is something else.
        ValueError: the config names no model class of transformers.
    """
    import transformers

    if isinstance(source, transformers.PreTrainedModel):
        return type(source), source.config
    if isinstance(source, str | Path):
        if str(source).startswith((".", "/", "~")) and not Path(source).expanduser().exists():
            raise ValueError(f"there is no folder {str(source)!r}")
        folder, source = source, transformers.AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
        remote = _remote_class(folder, source) if trust_remote_code else None
        if remote is not None:
            return remote, source
    if not isinstance(source, transformers.PretrainedConfig):
        raise TypeError(f"expected a model, a config or the path of a checkpoint, got {type(source).__name__}")
    named = [getattr(transformers, name, None) for name in source.architectures or ()]
    if not any(named):
        autos = (transformers.AutoModelForCausalLM, transformers.AutoModelForImageTextToText, transformers.AutoModel)
        named = [auto._model_mapping.get(type(source), None) for auto in autos]
    cls = next((candidate for candidate in named if candidate is not None), None)
    if cls is None:
        raise ValueError(f"{type(source).__name__} names no model class of transformers: {source.architectures}")
    return (cls[0] if isinstance(cls, tuple) else cls), source


def _remote_class(folder: Any, config: Any) -> type[nn.Module] | None:
    """The class that the code of a checkpoint gives for its architecture, or None where it gives none."""
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    for name in config.architectures or ():
        for reference in (getattr(config, "auto_map", None) or {}).values():
            if isinstance(reference, str) and reference.rpartition(".")[2] == name:
                return get_class_from_dynamic_module(reference, folder)  # type: ignore[no-any-return]
    return None


def is_norm(module: nn.Module) -> bool:
    """Whether ``module`` may be a norm; ``norms.norm_flavour`` says what it computes."""
    return "norm" in type(module).__name__.lower() and not any(True for _ in module.children())


def _class_key(cls: type) -> str:
    """The key for ``cls`` alone. A key is also searched for as a pattern, so a longer name needs the anchors."""
    longer = [name for name in vars(sys.modules[cls.__module__]) if cls.__name__ in name and name != cls.__name__]
    return f"^{cls.__name__}$" if longer else cls.__name__


def _norm_entries(model: nn.Module) -> Iterator[Entry]:
    by_class: dict[type, list[tuple[str, nn.Module]]] = {}
    for path, module in model.named_modules():
        if is_norm(module):
            by_class.setdefault(type(module), []).append((path, module))
    for cls, members in by_class.items():
        decide = _gated_layer if gated_norms.takes_gate(members[0][1]) else _norm_layer
        layer, reason = decide([module for _, module in members])
        key = None if layer is None else gated_norms.HUB_NAME if layer == gated_norms.HUB_NAME else _class_key(cls)
        for pattern, count in Counter(pattern_of(path) for path, _ in members).items():
            yield Entry(pattern, cls.__name__, count, layer, key, reason)


def _norm_layer(modules: list[nn.Module]) -> tuple[str | None, str]:
    """The layer for the norms of one class, or None and why there is none."""
    findings = {norms.norm_flavour(module) for module in modules}
    with_weight = [module for module in modules if getattr(module, "weight", None) is not None]
    # Without a weight the flavours are one.
    names = {norms.norm_flavour(module).flavour for module in with_weight or modules}
    names |= {None for finding in findings if finding.flavour is None}
    layer = NORM_LAYER_OF.get(next(iter(names)) or "") if len(names) == 1 else None
    reasons = sorted({finding.reason for finding in findings if finding.reason})
    return layer, "" if layer else "; ".join(reasons) or f"instances compute {sorted(map(str, names))}"


def _gated_layer(modules: list[nn.Module]) -> tuple[str | None, str]:
    reasons = sorted({reason for module in modules if (reason := gated_norms.why_not_bound(module))})
    return None if reasons else gated_norms.HUB_NAME, "; ".join(reasons)


def is_mlp(module: nn.Module) -> bool:
    """Whether ``module`` may be a gated MLP; ``mlps.mlp_kind`` says what it computes."""
    names = {name for name, _ in module.named_children()}
    return "down_proj" in names and bool(names & {"gate_proj", "gate_up_proj"})


def chain_of(parent: nn.Module, mlp_name: str) -> tuple[str, ...]:
    """Names of the children that can become one: norm, MLP and, where it follows directly, a second norm."""
    norms = [n for n, child in parent.named_children() if is_norm(child) and _has_weight(child)]
    cls: Any = type(parent)
    for first in norms:
        for last in norms:
            if last != first and adjacency.why_not_adjacent(cls, (first, mlp_name, last)) is None:
                return (first, mlp_name, last)
    return next(((f, mlp_name) for f in norms if adjacency.why_not_adjacent(cls, (f, mlp_name)) is None), (mlp_name,))


def _all_of(model: nn.Module, pattern: str, cls: type) -> bool:
    """Whether every module that ``pattern`` names is a ``cls``. transformers patches the class of each of them, so a
    pattern that also names others (a dense MLP where other layers have experts) has to give way to one exact path."""
    return all(type(module) is cls for path, module in model.named_modules() if pattern_of(path) == pattern)


def _has_weight(module: Any) -> bool:
    if getattr(module, "weight", None) is None:
        return False
    return is_adopted(module) or norms.norm_flavour(module).flavour is not None


def _block_entries(model: nn.Module) -> Iterator[Entry]:
    parents: dict[tuple[type, str], list[tuple[str, nn.Module]]] = {}
    for path, parent in model.named_modules():
        for name, child in parent.named_children():
            if is_mlp(child):
                parents.setdefault((type(parent), name), []).append((path, parent))
    everywhere = Counter(type(module) for module in model.modules())
    taken: set[type] = set()
    for (cls, name), members in parents.items():
        path, parent = members[0]
        found = {mlps.mlp_kind(p.get_submodule(name)) for _, p in members}
        mlp_class = type(parent.get_submodule(name)).__name__
        pattern = pattern_of(path)
        reason = next((f.reason for f in found if f.activation is None), "")
        if not reason and everywhere[cls] != len(members):
            reason = f"other {cls.__name__} have another {name}, and a key covers them all"
        if not reason and cls in taken:
            reason = f"{cls.__name__} has a second MLP, and one parent takes one key"
        if not reason and not pattern:
            reason = "it stands at the root of the model"
        chain = chain_of(parent, name)
        where = f"{pattern}.({' -> '.join(chain)})" if len(chain) > 1 else f"{pattern}.{name}"
        if reason:
            yield Entry(where, mlp_class, len(members), None, None, reason)
            continue
        taken.add(cls)
        parent_key = pattern if _all_of(model, pattern, cls) else path
        key = tuple(("MLP" if child == name else "RMSNorm", f"{parent_key}.{child}") for child in chain)
        yield Entry(where, mlp_class, len(members), MLP_LAYER_OF[len(chain)], key)


def plan(source: Any, fuse: bool = True, trust_remote_code: bool = False) -> Plan:
    """The layers that fit a model, and for each norm and MLP without one the reason.

    Args:
        source: a transformers model, a config, or the path or Hub id of a checkpoint.
        fuse: also merge gate and up products, and fuse MLPs with the norms around them; else norms only.
        trust_remote_code: as for ``from_pretrained``, for a checkpoint that brings its model's class.

    Raises:
        TypeError, ValueError: ``source`` names no model; see :func:`resolve_model`.
    """
    cls, config = resolve_model(source, trust_remote_code)
    with torch.device("meta"):
        model = cls(config)
    entries = [*_norm_entries(model), *(_block_entries(model) if fuse else ())]
    result = Plan(cls.__name__, tuple(entries))
    for _ in range(4):  # leaving a key out can only make a later trial find less
        refused = refusals(cls, config, result.mapping)
        if not refused:
            break
        result = replace(result, entries=tuple(_without(entry, refused) for entry in result.entries))
    return result


def _without(entry: Entry, refused: dict[Key, str]) -> Entry:
    reason = refused.get(entry.key) if entry.key is not None else None
    return entry if reason is None else replace(entry, layer=None, key=None, reason=reason)
