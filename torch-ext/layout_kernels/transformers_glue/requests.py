"""What transformers is doing when it calls us, read from its frames: it tells nobody, and we must know.

Outside of ``kernel_loading()`` none of its functions is ours to wrap, and a load through a plain ``KernelConfig`` must
refuse and load the same. A version of transformers that names its functions or variables otherwise loses what is
said here, nothing else: two keys that exclude each other are no early error, two rare families do not load, and a
pattern that covers several classes of a model is refused where they differ.

Sources: transformers 5.22.2, ``integrations/hub_kernels.py`` (``register_kernel_replacements_and_fusions``) and
``core_model_loading.py`` (``rename_source_key``). It may go when a layout is told which class it replaces, its rules
are asked for with the config, and a converter is given the key of the checkpoint.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from torch import nn

# Where the code of models is: in transformers, and beside checkpoints (trust_remote_code).
MODELS = ("transformers.models.", "transformers_modules.")


def _variables(function: str, depth: int) -> dict[str, Any]:
    """The variables of transformers' ``function`` where it is at most ``depth`` calls above the caller, else none."""
    frame = inspect.currentframe()
    for _ in range(depth + 1):
        frame = frame.f_back if frame is not None else None
        if frame is None:
            break
        if frame.f_code.co_name == function and frame.f_globals.get("__name__", "").startswith("transformers."):
            return frame.f_locals
    return {}


@dataclass(frozen=True)
class Request:
    """A ``KernelConfig`` that transformers is registering: its mapping, and for which model.

    ``model`` is the model on the meta device that transformers looks tuple keys up in; None before the first of them.
    """

    mapping: dict[Any, Any]
    model: nn.Module | None
    model_type: str | None


def requested_kernels() -> Request | None:
    """What transformers is registering now, or None.

    It patches by class name, so that of two keys that exclude each other one is dropped without a word.
    """
    found = _variables("register_kernel_replacements_and_fusions", 6)
    if not found:
        return None
    mapping, model = getattr(found.get("kernel_config"), "kernel_mapping", {}), found.get("meta_model")
    return Request(
        mapping if isinstance(mapping, dict) else {},
        model if isinstance(model, nn.Module) else None,
        getattr(found.get("config"), "model_type", None),
    )


@dataclass(frozen=True)
class Builder:
    """The function of a model's code that builds a layer: its module, and the names that it reads."""

    module: str
    names: tuple[str, ...]


def builder() -> Builder | None:
    """The function of a model's code in which a layout is being built, or None.

    A layout is not told which class it is built in place of; the class is one that this function names.
    """
    frame = inspect.currentframe()
    for _ in range(12):  # some of our own constructors, and what wraps those of models
        frame = frame.f_back if frame is not None else None
        if frame is None:
            break
        module = frame.f_globals.get("__name__", "")
        if module.startswith(MODELS):
            return Builder(module, frame.f_code.co_names)
    return None


def key_in_the_checkpoint() -> str | None:
    """The key that transformers is renaming now, as it stands in the checkpoint, or None."""
    key = _variables("rename_source_key", 4).get("source_key")
    return key if isinstance(key, str) else None
