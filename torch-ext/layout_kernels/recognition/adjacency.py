"""Whether a module runs some of its children one directly after the other, read from its class's source.

Fusion puts ``b(a(x))`` in the place of ``a`` and nothing in the place of ``b``. That is right only where the parent
hands what ``a`` returns to ``b`` and to nothing else: Llama's ``post_attention_layernorm`` and ``mlp`` do, in OLMo 2
the child of the same name comes after the MLP, in Cohere attention reads the norm's result too. The names do not tell,
the statements of ``forward`` do: they are followed as data flow, and what is not understood counts as no proof.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from torch import nn


@dataclass(frozen=True)
class _Site:
    """One call of a child: the block of statements and the place in it, the statement, and the call."""

    block: tuple[ast.stmt, ...]
    index: int
    call: ast.Call
    in_loop: bool
    function: ast.FunctionDef

    @property
    def statement(self) -> ast.stmt:
        return self.block[self.index]


def _blocks(body: list[ast.stmt], in_loop: bool = False) -> Iterator[tuple[tuple[ast.stmt, ...], bool]]:
    """``body`` and every block of statements nested in it, each with whether it is repeated."""
    yield tuple(body), in_loop
    for statement in body:
        repeated = in_loop or isinstance(statement, ast.For | ast.While)
        for name in ("body", "orelse", "finalbody"):
            nested = getattr(statement, name, None)
            if isinstance(nested, list) and nested and isinstance(nested[0], ast.stmt):
                yield from _blocks(nested, repeated)
        for handler in getattr(statement, "handlers", []):
            yield from _blocks(handler.body, repeated)


def _own_nodes(statement: ast.stmt) -> Iterator[ast.AST]:
    """Nodes of ``statement`` without the statements nested in it."""
    waiting: list[ast.AST] = [statement]
    while waiting:
        node = waiting.pop()
        yield node
        waiting.extend(child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.stmt))


def _child_name(node: ast.AST) -> str | None:
    """``name`` when ``node`` is ``self.name``."""
    is_own = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    return node.attr if is_own else None  # type: ignore[attr-defined]


@lru_cache(maxsize=512)
def _functions(cls: type, _forward: Any) -> tuple[ast.FunctionDef, ...] | None:
    """The functions that instances of ``cls`` run, those of its transformers bases included; None without source."""
    found: dict[str, ast.FunctionDef] = {}
    for base in cls.__mro__:
        if base in (nn.Module, object) or base.__name__ in ("PreTrainedModel", "GradientCheckpointingLayer"):
            continue
        for name, value in vars(base).items():
            function = inspect.unwrap(value) if inspect.isfunction(value) else None
            if function is None or name in found or name == "__init__":
                continue
            try:
                tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
            except (OSError, TypeError, SyntaxError):
                return None
            if isinstance(tree.body[0], ast.FunctionDef):
                found[name] = tree.body[0]
    return tuple(found.values())


def _uses(functions: tuple[ast.FunctionDef, ...], child: str) -> tuple[list[_Site], int]:
    """Call sites of ``self.<child>``, and how often it is mentioned at all."""
    sites, mentions = [], 0
    for function in functions:
        for block, in_loop in _blocks(function.body):
            for index, statement in enumerate(block):
                for node in _own_nodes(statement):
                    mentions += _child_name(node) == child
                    if isinstance(node, ast.Call) and _child_name(node.func) == child:
                        sites.append(_Site(block, index, node, in_loop, function))
    return sites, mentions


def _names(node: ast.AST, context: type) -> list[str]:
    return [n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, context)]


def _result_name(site: _Site) -> str | None:
    """The variable that holds exactly what the call returns."""
    statement = site.statement
    if isinstance(statement, ast.Assign) and statement.value is site.call and len(statement.targets) == 1:
        target = statement.targets[0]
        return target.id if isinstance(target, ast.Name) else None
    return None


def _read_later(site: _Site, name: str) -> bool:
    """Whether ``name`` is read after ``site``'s statement before it is assigned again."""
    if name in _names(site.statement, ast.Store):
        return False
    for statement in site.block[site.index + 1 :]:
        if name in _names(statement, ast.Load):
            return True
        if name in _names(statement, ast.Store) and isinstance(statement, ast.Assign):
            return False
    last = site.block[-1].end_lineno or 0  # the block is left with the name still holding the result
    loads = (n for n in ast.walk(site.function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load))
    return any(n.id == name and n.lineno > last for n in loads)


def _follows(first: _Site, second: _Site) -> bool:
    """Whether the result of ``first`` goes to ``second`` as its one argument, and nowhere else."""
    if len(second.call.args) != 1 or second.call.keywords:
        return False
    (given,) = second.call.args
    if given is first.call:
        return True
    name = _result_name(first)
    if (
        first.in_loop
        or name is None
        or not isinstance(given, ast.Name)
        or given.id != name
        or first.block[0] is not second.block[0]
    ):
        return False
    between = first.block[first.index + 1 : second.index]
    if first.index >= second.index or any(n == name for s in between for n in _names(s, ast.Load | ast.Store)):  # type: ignore[arg-type]
        return False
    return _names(second.statement, ast.Load).count(name) == 1 and not _read_later(second, name)


def why_not_adjacent(cls: Any, children: tuple[str, ...]) -> str | None:
    """None when ``cls`` computes ``children[-1](...children[1](children[0](x)))`` and uses no result in between.

    Otherwise the reason, for a message: a child is called more than once or not at all, the result of one goes
    elsewhere too, or the source cannot be read.
    """
    return _why_not(cls, cls.forward, children)


@lru_cache(maxsize=512)
def _why_not(cls: type, forward: Any, children: tuple[str, ...]) -> str | None:
    functions = _functions(cls, forward)
    if functions is None:
        return f"the source of {cls.__name__} cannot be read"
    sites: list[_Site] = []
    for child in children:
        calls, mentions = _uses(functions, child)
        if len(calls) != 1 or mentions != 1:
            return f"{cls.__name__} uses its {child} {max(mentions, len(calls))} times, expected one call"
        sites.append(calls[0])
    for (first, a), (second, b) in zip(
        zip(sites, children, strict=True), zip(sites[1:], children[1:], strict=True), strict=False
    ):
        if not _follows(first, second):
            return f"{cls.__name__} does not hand the result of {a} to {b} and to nothing else"
    return None
