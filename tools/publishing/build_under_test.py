"""A folder of variants, read once for all rules. Nothing of it is imported here."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from kernels._rust import Metadata
from kernels.variants import get_variants_local

from tools.project import Project


@dataclass(frozen=True)
class BuildUnderTest:
    """A folder of variants, and the project that they are a build of."""

    project: Project
    folder: Path

    @cached_property
    def variants(self) -> list[Path]:
        """Folders that name themselves variants or that `kernels` takes for some, also those without metadata."""
        names = {variant.variant_str for variant in get_variants_local(self.folder)}
        names |= {path.name for path in self.folder.glob("torch*") if path.is_dir()}
        return [self.folder / name for name in sorted(names)]

    @cached_property
    def _parsed(self) -> list[tuple[Path, Path, ast.Module | str]]:
        return [(variant, path, _parse(path)) for variant in self.variants for path in sorted(variant.rglob("*.py"))]

    @cached_property
    def sources(self) -> list[tuple[Path, Path, ast.Module]]:
        """Variant, file and syntax tree of each Python file that can be read."""
        return [(variant, path, tree) for variant, path, tree in self._parsed if isinstance(tree, ast.Module)]

    @cached_property
    def unreadable(self) -> list[tuple[Path, str]]:
        """The other Python files, and why."""
        return [(path, reason) for _, path, reason in self._parsed if isinstance(reason, str)]

    def where(self, path: Path, node: ast.AST | None = None) -> str:
        """The place of a problem, relative to the build."""
        line = "" if node is None else f":{getattr(node, 'lineno', 0)}"
        return f"{path.relative_to(self.folder)}{line}"


def read_metadata(variant: Path) -> Metadata | str:
    """The metadata of a variant, or why there is none."""
    file = variant / "metadata.json"
    if not file.is_file():
        return "metadata.json is missing; build the variant again"
    try:
        return Metadata.read_from_file(file)
    except (OSError, ValueError) as error:
        return f"metadata.json is refused: {error}"


def _parse(path: Path) -> ast.Module | str:
    try:
        return ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
