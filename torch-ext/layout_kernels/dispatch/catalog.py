"""Which operations there are, and the import of their backends."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec

from .. import _ops
from .contract import ANY_DEVICE, Operation

_ROOT = __package__.rpartition(".")[0]
_EXTENSION = "extension:"

# The modules of the operations, relative to `ops`: the only list of them.
_BUILTINS = (".rms_norm", ".gated_activation", ".rms_norm_mlp", ".gated_rms_norm", ".linear")


@dataclass(frozen=True)
class Entry:
    """An operation, and the package that its backends' names are relative to."""

    operation: Operation
    package: str


def discover(modules: Iterable[str] = _BUILTINS) -> Mapping[str, Entry]:
    """All operations by name: `OPERATION` of each module, and `BACKWARD` where it has one. Loads no torch.

    Raises:
        TypeError: a module without an `OPERATION`.
        ValueError: two operations of one name, or one that follows an operation that is not there.
    """
    entries: dict[str, Entry] = {}
    for name in modules:
        module = import_module(name, f"{_ROOT}.ops")
        for operation in (getattr(module, "OPERATION", None), getattr(module, "BACKWARD", None)):
            if operation is None:
                continue
            key = operation.contract.operation
            if key in entries:
                raise ValueError(f"operation {key!r} is defined by {entries[key].package} and {module.__name__}")
            entries[key] = Entry(operation, module.__name__)
        if not isinstance(getattr(module, "OPERATION", None), Operation):
            raise TypeError(f"{module.__name__} must define OPERATION, an Operation")
    for key, entry in entries.items():
        if entry.operation.follows is not None and entry.operation.follows not in entries:
            raise ValueError(f"operation {key!r} follows {entry.operation.follows!r}, which is not in the catalog")
    return entries


def missing_requirement(requires: Iterable[str]) -> str | None:
    """Why a backend cannot be imported here, or None.

    Raises:
        ImportError: a native extension that this copy was built with does not load.
        ValueError: a requirement that is neither a top-level package nor an extension.
    """
    for requirement in requires:
        if requirement.startswith(_EXTENSION):
            kind = requirement.removeprefix(_EXTENSION)
            if kind not in _ops.EXTENSIONS:
                return f"this copy of the package was built without the native extension for {kind}"
            import_module(f".{_ops.EXTENSIONS[kind]}", _ROOT)
        elif not requirement.isidentifier():
            raise ValueError(f"a backend requires {requirement!r}; name a top-level package or extension:<kind>")
        elif not _is_installed(requirement):
            return f"requires {requirement}, which is not installed"
    return None


def _is_installed(package: str) -> bool:
    # find_spec raises for a module without a spec, which a stand-in in sys.modules may be.
    return sys.modules[package] is not None if package in sys.modules else find_spec(package) is not None


def import_backends(entry: Entry, device: str) -> dict[str, str]:
    """Import the operation's backends for a device type; what was left out, each with its reason.

    Raises:
        Exception: whatever the import of a backend whose requirements are present raises.
    """
    excluded: dict[str, str] = {}
    for backend in entry.operation.backends:
        if backend.device not in (device, ANY_DEVICE):
            continue
        reason = missing_requirement(backend.requires)
        if reason is None:
            import_module(backend.module, entry.package)
        else:
            excluded[backend.module.lstrip(".")] = reason
    return excluded
