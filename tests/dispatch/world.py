"""A small world for dispatch: throw-away operations whose backends are real modules, and a runtime of their own."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

from layout_kernels.dispatch import BackendModule, OpContract, Operation, registry
from layout_kernels.dispatch.catalog import Entry
from layout_kernels.dispatch.registry import Registries
from layout_kernels.dispatch.runtime import Runtime

_numbers = itertools.count()

REGISTER = """
from layout_kernels.dispatch import register_kernel
from {package} import CONTRACT

@register_kernel(name={name!r}, contract=CONTRACT, device={device!r}, execution_modes={modes!r}, input_domain="all",
                 solution={solution!r}, priority={priority!r})
def run(*args):
    return {name!r}
"""


class World:
    """Operations are added with `add`; `runtime` binds them."""

    def __init__(self, folder: Path, monkeypatch) -> None:
        self.folder = folder
        self.registries = Registries()
        self.entries: dict[str, Entry] = {}
        self.runtime = Runtime(self.registries, lambda: self.entries)
        monkeypatch.setattr(registry, "REGISTRIES", self.registries)
        monkeypatch.syspath_prepend(str(folder))

    def add(
        self, operation: str, *backends: BackendModule, follows: str | None = None, version: int = 1
    ) -> OpContract:
        """An operation; its backends' files are written with `backend` or `write`."""
        package = f"throwaway_{next(_numbers)}_{operation}"
        contract = OpContract(operation, version, (), False, "exact")
        (self.folder / package).mkdir()
        (self.folder / package / "__init__.py").write_text(
            "from layout_kernels.dispatch import OpContract\n"
            f"CONTRACT = OpContract({operation!r}, {version}, (), False, 'exact')\n"
        )
        self.entries[operation] = Entry(Operation(contract, backends, follows), package)
        return contract

    def write(self, operation: str, module: str, text: str) -> None:
        """The file of a backend module."""
        package = self.entries[operation].package
        path = self.folder / package / f"{module.lstrip('.')}.py"
        path.write_text(text.replace("{package}", package))
        # The import system remembers the folder's content for as long as its time stamp stays.
        sys.path_importer_cache.pop(str(path.parent), None)

    def backend(
        self,
        operation: str,
        module: str,
        *,
        name: str | None = None,
        device: str = "cpu",
        modes: tuple[str, ...] = ("eager", "compile"),
        solution: str | None = None,
        priority: int = 0,
    ) -> None:
        """A backend module that registers one implementation, called `<module>.<operation>`."""
        text = REGISTER.format(
            package=self.entries[operation].package,
            name=name or f"{module.lstrip('.')}.{operation}",
            device=device,
            modes=modes,
            solution=solution or module.lstrip("."),
            priority=priority,
        )
        self.write(operation, module, text)

    def is_imported(self, operation: str, module: str) -> bool:
        """Whether the backend module has been imported."""
        return f"{self.entries[operation].package}{module}" in sys.modules

    def simple(self, operation: str = "scale", **priorities: int) -> None:
        """An operation with a reference on any device, and a CPU backend for each keyword, of that priority."""
        backends = [BackendModule(".reference", "any"), *(BackendModule(f".{name}", "cpu") for name in priorities)]
        self.add(operation, *backends)
        every = ("eager", "compile", "cudagraph", "aclgraph")
        self.backend(operation, ".reference", device="any", modes=every, priority=-1000)
        for name, priority in priorities.items():
            self.backend(operation, f".{name}", priority=priority)
