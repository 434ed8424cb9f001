"""Reads every import of the package: which part may stand on which, and who may name an optional library.

The order is the one of CONTRIBUTING.md. Imports under `if TYPE_CHECKING` and in functions count too.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "torch-ext" / "layout_kernels"

# A part may import itself and every part of an earlier row, none of its own row.
ROWS: tuple[tuple[str, ...], ...] = (
    ("_ops", "commands", "layer_table"),
    ("plugin", "dispatch"),
    ("ops",),
    ("recognition",),
    ("running",),
    ("transformers_glue",),
    ("checkpoints",),
    ("layouts",),
    ("layers",),
    ("models",),
    ("kernel_plugins",),
)
# `package` is layout_kernels/__init__.py: it names the others, and imports them only when they are asked for.
ALLOWED: dict[str, set[str]] = {
    part: {earlier for row in ROWS[:index] for earlier in row} for index, parts in enumerate(ROWS) for part in parts
} | {
    "package": set(),
    "uncovered": set(),
    "verification": {"uncovered"},
    "__main__": {"commands", "models", "verification"},
    "numerics": {"_ops", "commands", "plugin", "dispatch", "ops"},
    "benchmark": {"_ops", "commands", "plugin", "dispatch", "ops", "numerics"},
}

# Optional libraries, and the parts that may name them. None is loaded by `import layout_kernels`.
ADAPTERS = {"triton": ("ops/*/triton.py", "ops/triton_parts.py"), "torch_npu": ("ops/*/npu.py",)}
NAMES_TRANSFORMERS = {"transformers_glue", "checkpoints", "layouts", "layers", "models", "kernel_plugins"}


@dataclass(frozen=True)
class Import:
    """One import that runs: where it stands, what it names, and whether an ImportError of it is caught."""

    file: Path
    line: int
    level: int
    target: str
    guarded: bool
    in_function: bool

    @property
    def place(self) -> str:
        return f"{self.file.relative_to(ROOT)}:{self.line}"

    @property
    def part(self) -> str:
        return part_of(self.file.relative_to(PACKAGE).parts)

    @property
    def top(self) -> str:
        return self.target.split(".")[0]

    def imported_part(self) -> str:
        """The part of this package that a relative import names."""
        folder = self.file.relative_to(PACKAGE).parent.parts
        base = folder[: len(folder) - (self.level - 1)]
        return part_of((*base, *self.target.split(".")))


def part_of(parts: tuple[str, ...]) -> str:
    first = parts[0].removesuffix(".py")
    return "package" if first in ("__init__", "") else first


def catches_import_error(node: ast.Try) -> bool:
    names = [ast.unparse(handler.type) for handler in node.handlers if handler.type is not None]
    return any("ImportError" in name or "ModuleNotFoundError" in name for name in names)


def walk(node: ast.AST, file: Path, guarded: bool = False, in_function: bool = False) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield Import(file, node.lineno, 0, alias.name, guarded, in_function)
    elif isinstance(node, ast.ImportFrom):
        if node.module is not None:
            yield Import(file, node.lineno, node.level, node.module, guarded, in_function)
        else:  # from . import a, b
            for alias in node.names:
                yield Import(file, node.lineno, node.level, alias.name, guarded, in_function)
    elif isinstance(node, ast.Try):
        for child in node.body:
            yield from walk(child, file, guarded or catches_import_error(node), in_function)
        for child in (*node.handlers, *node.orelse, *node.finalbody):
            yield from walk(child, file, guarded, in_function)
    else:
        inside = in_function or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        for child in ast.iter_child_nodes(node):
            yield from walk(child, file, guarded, inside)


def imports_of(source: str, file: Path) -> list[Import]:
    return list(walk(ast.parse(source), file))


def all_imports() -> list[Import]:
    found = []
    for file in sorted(PACKAGE.rglob("*.py")):
        found += imports_of(file.read_text(encoding="utf-8"), file)
    return found


def wrong_direction(imports: list[Import]) -> list[str]:
    wrong = []
    for item in imports:
        if item.level == 0:
            continue
        target = item.imported_part()
        if target != item.part and target not in ALLOWED.get(item.part, set()):
            wrong.append(f"{item.place}: {item.part} imports {target}")
    return wrong


def wrong_names(imports: list[Import]) -> list[str]:
    wrong = []
    for item in imports:
        where = item.file.relative_to(PACKAGE)
        if item.level == 0 and item.top == PACKAGE.name:
            wrong.append(f"{item.place}: absolute import of the package, which is loaded under other names")
        for library, files in ADAPTERS.items():
            if item.level == 0 and item.top == library and not any(where.match(file) for file in files):
                wrong.append(f"{item.place}: only {' and '.join(files)} import {library}")
        if item.level == 0 and item.top == "transformers":
            if item.part not in NAMES_TRANSFORMERS:
                wrong.append(f"{item.place}: {item.part} names transformers")
            elif not item.guarded and not item.in_function:
                wrong.append(f"{item.place}: transformers is imported without a guard")
    return wrong


def test_every_part_of_the_package_has_its_place_in_the_order() -> None:
    parts = {part_of(file.relative_to(PACKAGE).parts) for file in PACKAGE.rglob("*.py")}
    assert parts <= set(ALLOWED), f"say in ALLOWED what {sorted(parts - set(ALLOWED))} may import"


def test_no_import_of_the_package_runs_against_the_order() -> None:
    imports = all_imports()
    assert sum(item.level > 0 for item in imports) > 10, "the reader found too few imports to prove anything"
    assert not wrong_direction(imports)


def test_no_files_of_the_package_import_one_another_in_a_circle() -> None:
    files = {tuple(file.relative_to(PACKAGE).with_suffix("").parts): file for file in PACKAGE.rglob("*.py")}
    graph: dict[Path, set[Path]] = {file: set() for file in files.values()}
    for item in all_imports():
        if item.level > 0:
            folder = item.file.relative_to(PACKAGE).parent.parts
            target = (*folder[: len(folder) - (item.level - 1)], *filter(None, item.target.split(".")))
            if target in files and files[target] != item.file:
                graph[item.file].add(files[target])
    assert sum(map(len, graph.values())) > 100
    list(TopologicalSorter(graph).static_order())  # raises CycleError with the files


def test_only_the_named_places_import_optional_libraries_and_never_the_package_by_name() -> None:
    assert not wrong_names(all_imports())


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("ops/rms_norm/__init__.py", "from ...layers import RMSNorm"),
        ("ops/rms_norm/__init__.py", "from ... import checkpoints"),
        ("ops/rms_norm/__init__.py", "if TYPE_CHECKING:\n    from ...layouts.base import Layout"),
        ("dispatch/registry.py", "def f():\n    from ..ops import rms_norm"),
        ("recognition/norms.py", "from ..models.loading import kernel_loading"),
        ("numerics/rms_norm.py", "from ..layers import RMSNorm"),
    ],
)
def test_the_reader_sees_an_import_against_the_order(file: str, source: str) -> None:
    assert wrong_direction(imports_of(source, PACKAGE / file))


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("layers.py", "from layout_kernels import ops"),
        ("ops/rms_norm/reference.py", "import triton.language as tl"),
        ("dispatch/runtime.py", "try:\n    import torch_npu\nexcept ImportError:\n    pass"),
        ("recognition/norms.py", "try:\n    import transformers\nexcept ImportError:\n    pass"),
        ("layers.py", "from transformers import WeightConverter"),
    ],
)
def test_the_reader_sees_a_library_in_the_wrong_place(file: str, source: str) -> None:
    assert wrong_names(imports_of(source, PACKAGE / file))


def test_the_reader_accepts_what_the_order_allows() -> None:
    source = "import torch\nfrom ..rms_norm import rms_norm\nfrom ...dispatch import registry\nimport triton"
    imports = imports_of(source, PACKAGE / "ops" / "rms_norm_mlp" / "triton.py")
    assert len(imports) == 4
    assert not wrong_direction(imports)
    assert not wrong_names(imports)


def test_importing_the_package_loads_neither_torch_nor_an_sdk_nor_transformers() -> None:
    code = (
        "import sys, layout_kernels\n"
        "loaded = {'torch', 'triton', 'torch_npu', 'transformers', 'kernels'} & set(sys.modules)\n"
        "sys.exit(f'loaded: {sorted(loaded)}' if loaded else 0)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=PACKAGE.parent, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
