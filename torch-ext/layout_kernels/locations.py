"""Where the layouts of a model stand, and which checkpoint key belongs to which of their parameters.

``nn.Module.state_dict`` tells every module its full path. transformers calls it right before it renames the keys of
a checkpoint and before it saves, so a layout that takes note of it need not guess where it stands.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .layout import Layout


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


def source_names(layout: Layout, path: str, rule: Rule) -> tuple[str, ...] | None:
    """Full checkpoint names of ``rule``'s sources for ``layout`` at ``path``; None: a sibling's name is unknown."""
    if rule.child == 0:
        return tuple(join(path, source) for source in rule.sources)
    children = layout.child_names
    if children is None or rule.child >= len(children):
        return None
    return tuple(join(parent_path(path), children[rule.child], source) for source in rule.sources)


class Locations(threading.local):
    """Where the layouts of the model stand whose ``state_dict()`` was called last in this thread."""

    def __init__(self) -> None:
        self._destination: weakref.ref[Any] | None = None
        self._layouts: list[tuple[str, weakref.ref[Layout]]] = []
        self._index: dict[str, Match] | None = None
        self._siblings: dict[str, list[tuple[str, Rule]]] = {}

    def note(self, layout: Layout, path: str, destination: Any) -> None:
        """Record that ``layout`` wrote its parameters below ``path`` into ``destination``."""
        if self._destination is None or self._destination() is not destination:
            self._destination = weakref.ref(destination)
            self._layouts = []
        self._layouts.append((path, weakref.ref(layout)))
        self._index = None

    def layouts(self) -> Iterator[tuple[str, Layout]]:
        """Path and layout of those that still exist."""
        for path, reference in self._layouts:
            layout = reference()
            if layout is not None:
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
