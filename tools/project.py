"""What build.toml says about this project, read through the official parser first."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernels._rust import Backend, Build, KernelName

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Project:
    """The fields of build.toml that the tools use.

    Attributes:
        name: kernel name, with dashes, for example "layout-kernels".
        version: major version, the N of branch vN on the Hub.
        license: SPDX identifier.
        repo_id: repository on the Hub, "owner/name".
        backends: backend names in the order of build.toml, for example ("cuda", "cann", "cpu").
        table: the whole file as a dictionary, for steps that read a section of their own.
    """

    name: KernelName
    version: int
    license: str
    repo_id: str
    backends: tuple[str, ...]
    table: dict[str, Any]

    @property
    def package(self) -> Path:
        """Folder of the Python package that every variant carries."""
        return ROOT / "torch-ext" / self.name.python_name

    @property
    def compiled_backends(self) -> list[str]:
        """Backends that have compiled variants beside the pure-Python one."""
        return sorted({section["backend"] for section in self.table.get("kernel", {}).values()})

    def python_depends(self, backend: str) -> list[str]:
        """Python packages that a variant of the backend declares."""
        general = self.table["general"]
        return sorted([*general.get("python-depends", []), *general.get(backend, {}).get("python-depends", [])])


def read_project(root: Path = ROOT) -> Project:
    """Read `root`/build.toml.

    The official parser (`kernels._rust.Build`) decides whether the file is valid; it shows only the backends to
    Python, so the other fields are then taken from the same TOML.

    Raises:
        ValueError: if the official parser refuses the file, or a field that the tools need is missing.
    """
    build = Build.open(root)
    table = tomllib.loads((root / "build.toml").read_text(encoding="utf-8"))
    general = table["general"]
    missing = [key for key in ("version", "license") if key not in general]
    if "repo-id" not in general.get("hub", {}):
        missing.append("hub.repo-id")
    if missing:
        fields = ", ".join(f"general.{key}" for key in missing)
        raise ValueError(f"{root / 'build.toml'} lacks {fields}; a build needs them, add them to the file")
    return Project(
        name=KernelName(general["name"]),
        version=general["version"],
        license=general["license"],
        repo_id=general["hub"]["repo-id"],
        backends=tuple(backend_name(backend) for backend in build.general.backends),
        table=table,
    )


def backend_name(backend: Backend) -> str:
    """Name of a backend as build.toml and metadata.json write it, for example "cann"."""
    return str(backend).lower()
