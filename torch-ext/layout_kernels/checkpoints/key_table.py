"""Where the layouts of a model stand, and which checkpoint key belongs to which of their parameters.

``nn.Module.state_dict`` tells every module its full path. transformers calls it right before it renames the keys of
a checkpoint and before it saves, so a layout that takes note of it need not guess where it stands.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Rule:
    """One parameter of a layout and the checkpoint tensors that it is made of.

    ``target`` is the parameter's name inside the layout, ``sources`` are names inside the replaced child number
    ``child`` (0: the child whose place the layout took). Several sources are concatenated along dimension 0, in
    order, and split into equal parts on the way back.
    """

    target: str
    sources: tuple[str, ...]
    child: int = 0

    def merge(self, tensors: Sequence[torch.Tensor], name: str, expected: torch.Size) -> torch.Tensor:
        """The parameter that ``tensors`` make: concatenated along dimension 0 in the order of ``sources``.

        A single tensor that has the parameter's own shape is taken as it is: the checkpoint was saved in this layout.

        Raises:
            ValueError: tensors are missing, or the result has another shape than the parameter.
        """
        if len(tensors) == 1 and len(self.sources) > 1 and tensors[0].shape != expected:
            raise ValueError(
                f"{name}: only one of {list(self.sources)} is in the checkpoint (shape {tuple(tensors[0].shape)}), "
                f"the parameter needs all of them (shape {tuple(expected)})"
            )
        merged = tensors[0] if len(tensors) == 1 else torch.cat(list(tensors), dim=0)
        if merged.shape != expected:
            raise ValueError(
                f"{name}: the checkpoint's {list(self.sources)} give shape {tuple(merged.shape)}, "
                f"the layout has {tuple(expected)}; the layout was built with sizes of another module"
            )
        return merged

    def split(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The inverse of :meth:`merge`: equal parts along dimension 0, each contiguous."""
        return [part.contiguous() for part in torch.chunk(tensor, len(self.sources), dim=0)]


@dataclass(frozen=True)
class Match:
    """A checkpoint key that belongs to a layout: the key to load it as, and which source of which parameter it is."""

    target: str
    source_index: int
    full_target: str


def join(*parts: str) -> str:
    """``join("model.norm", "weight")`` is ``"model.norm.weight"``; empty parts are left out."""
    return ".".join(part for part in parts if part)


def parent_path(path: str) -> str:
    """``parent_path("model.norm")`` is ``"model"``."""
    return path.rpartition(".")[0]


def source_names(layout: Any, path: str, rule: Rule) -> tuple[str, ...] | None:
    """Full checkpoint names of ``rule``'s sources for ``layout`` at ``path``; None: a sibling's name is unknown."""
    if rule.child == 0:
        return tuple(join(path, source) for source in rule.sources)
    children = layout.child_names
    if children is None or rule.child >= len(children):
        return None
    return tuple(join(parent_path(path), children[rule.child], source) for source in rule.sources)


def layouts_of(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Path and layout of every layout of ``model``, whichever copy of this package it belongs to.

    One that stands at two places comes twice: a state dict names its parameters at both.
    """
    for path, module in model.named_modules(remove_duplicate=False):
        if getattr(module, "is_layout", False):
            yield path, module


class Locations(threading.local):
    """Where the layouts of the model stand whose ``state_dict()`` was called last in this thread."""

    def __init__(self) -> None:
        self._destination: weakref.ref[Any] | None = None
        self._layouts: list[tuple[str, weakref.ref[Any]]] = []
        self._index: dict[str, Match] | None = None
        self._siblings: dict[str, list[tuple[str, Rule]]] = {}

    def note(self, layout: Any, path: str, destination: Any) -> None:
        """Record that ``layout`` wrote its parameters below ``path`` into ``destination``."""
        if self._destination is None or self._destination() is not destination:
            self._destination = weakref.ref(destination)
            self._layouts = []
        self._layouts.append((path, weakref.ref(layout)))
        self._index = None

    def forget(self) -> None:
        """Answer for no model: its layouts have settled."""
        self._destination, self._layouts, self._index, self._siblings = None, [], None, {}

    def layouts(self) -> Iterator[tuple[str, Any]]:
        """Path and layout of those that still exist and have not settled."""
        for path, reference in self._layouts:
            layout = reference()
            if getattr(layout, "is_layout", False):
                yield path, layout

    def _build(self) -> dict[str, Match]:
        index: dict[str, Match] = {}
        self._siblings = {}
        for path, layout in self.layouts():
            for rule in layout.rules():
                target = join(path, rule.target)
                names = source_names(layout, path, rule)
                if names is None:
                    self._siblings.setdefault(parent_path(path), []).append((target, rule))
                    names = ()
                for number, name in enumerate(names):
                    index[name] = Match(target, number, target)
                index.setdefault(target, Match(target, 0, target))
        self._index = index
        return index

    def _find_sibling(self, key: str) -> Match | None:
        """A key below a sibling of unknown name: ours when the model has no such tensor and one layout wants it."""
        live = self._destination() if self._destination is not None else None
        if live is None or key in live:
            return None
        for place, wanted in self._siblings.items():
            rest = key.removeprefix(f"{place}.") if place else key
            if rest == key and place:
                continue
            name = rest.partition(".")[2]
            found = [Match(t, r.sources.index(name), t) for t, r in wanted if name in r.sources]
            if len(found) == 1:
                return found[0]
        return None

    def has(self, key: str) -> bool:
        """Whether the model has a tensor of this name."""
        live = self._destination() if self._destination is not None else None
        return live is not None and key in live

    def find(self, key: str) -> Match | None:
        """The parameter that checkpoint key ``key`` belongs to, or None.

        A checkpoint of a base model lacks the head model's leading component ("model."), and the reverse;
        transformers adds or removes it after the renames, so the answer keeps the key's own form.
        """
        if self._destination is None or self._destination() is None:
            return None  # what was noted is of an earlier load
        index = self._index if self._index is not None else self._build()
        match = index.get(key) or self._find_sibling(key)
        if match is not None or self.has(key):
            return match  # a tensor of this very name is the model's own
        for head in {path.partition(".")[0] for path, _ in self._layouts}:
            match = index.get(join(head, key)) or self._find_sibling(join(head, key))
            if match is not None and head:
                return Match(match.target.removeprefix(f"{head}."), match.source_index, match.full_target)
        head, _, rest = key.partition(".")
        match = index.get(rest) or self._find_sibling(rest)
        return Match(join(head, match.target), match.source_index, match.full_target) if match is not None else None


locations = Locations()
