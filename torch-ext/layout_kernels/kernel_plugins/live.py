"""Layers in a live model: change all modules at once or none, and undo.

A module that is changed stays the same object with the same parameters; its class changes (``running/adopted.py``), or
its forward where the class must stay (`nn.Linear`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from ..checkpoints.mapped_memory import pages
from ..ops import prepare_for
from ..running.adopted import adoption_of, release, why_not_release
from .finding import BEFORE, Change, Found, foreign_forward, unbind_linear

_told: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()


class NothingMatchedError(RuntimeError):
    """The model has no module that a kernel fits; the message gives the reason for each that came close, ``left_out``
    those that concern layers which would fit, but whose weights cannot be moved."""

    def __init__(self, message: str, left_out: list[str]) -> None:
        super().__init__(message)
        self.left_out = left_out


def default_order(kernel_id: str) -> tuple[int, str]:
    """Blocks before their parts: a norm, an MLP or a product that is left over then gets a layer of its own."""
    rank = 0 if kernel_id.endswith("rmsnorm_mlp") else 2 if kernel_id.endswith("linear") else 1
    return (rank, kernel_id)


def apply(kernel_id: str, find: Callable[[nn.Module], Found], model: Any = None, optimizer: Any = None) -> Any:  # noqa: ARG001
    """Change all modules of ``model`` that ``find`` names, or none; returns the model.

    Args:
        kernel_id: for messages.
        find: names the modules.
        model: the model.
        optimizer: accepted for callers that have one; parameters stay what they are, so nothing is done to it.

    Raises:
        ValueError: no model.
        NothingMatchedError: ``find`` names none; with the reasons.
    """
    if model is None:
        raise ValueError(f"{kernel_id} needs model=<the model to change>")
    found = find(model)
    if not found.changes:
        listed = "; ".join([*found.left_out, *found.reasons][:8]) or "no norm or gated MLP in it"
        message = f"{kernel_id} found nothing to do in {type(model).__name__}: {listed}"
        raise NothingMatchedError(message, found.left_out)
    warn_left_out(model, found.left_out)
    done: list[Change] = []
    try:
        for change in found.changes.values():
            change.do()
            done.append(change)
    except BaseException:
        for change in reversed(done):
            change.back(change.module)
        raise
    finally:
        pages.release()
    prepare_for(model)
    return model


def warn_left_out(model: nn.Module, left_out: list[str]) -> None:
    """Warn of layers of ``model`` whose weights cannot be moved, once for each, however many kernels come by."""
    told = _told.setdefault(model, set())
    new = [reason for reason in left_out if reason not in told]
    told.update(new)
    if new:
        warnings.warn(f"layers of {type(model).__name__} left as they are: {'; '.join(new)}", stacklevel=3)


def _why_not_undo(module: Any) -> str:
    is_taken_off = BEFORE in vars(module) and "forward" not in vars(module)
    if is_taken_off or foreign_forward(module):
        return "its forward was replaced after the kernel was applied (as accelerate's hooks do); take that back first"
    return "" if BEFORE in vars(module) else why_not_release(module)


def _changed(model: nn.Module) -> list[tuple[str, Any]]:
    """Path and module of all to which a kernel was applied."""
    return [
        (path, module)
        for path, module in model.named_modules()
        if BEFORE in vars(module) or ((adoption := adoption_of(module)) is not None and adoption.is_live)
    ]


def _take_back(module: Any) -> None:
    (unbind_linear if BEFORE in vars(module) else release)(module)


@contextmanager
def all_or_none(model: nn.Module) -> Iterator[None]:
    """Several kernels: when one of them fails, what the others have changed in here is taken back."""
    before = {id(module) for _, module in _changed(model)}
    try:
        yield
    except BaseException:
        for _, module in _changed(model):
            if id(module) not in before:
                _take_back(module)
        raise


def undo(model: Any) -> Any:
    """Take back all that was applied below ``model``, or nothing; see ``interface.undo``."""
    changed = _changed(model)
    if not changed:
        raise ValueError(f"no kernel was applied to this {type(model).__name__}")
    for path, module in changed:
        reason = _why_not_undo(module)
        if reason:
            raise RuntimeError(f"undo of {path}: {reason}. Nothing was changed")
    for _, module in changed:
        _take_back(module)
    _told.pop(model, None)
    return model
