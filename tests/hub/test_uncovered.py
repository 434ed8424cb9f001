"""What a digest leaves out although Python could import it is reported: bytecode that is not its source's, links."""

from __future__ import annotations

import importlib.util
import marshal
import py_compile
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import layout_kernels
from tools.build_variants import build

TAG = sys.implementation.cache_tag
PLANTED = 'print("planted")'


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("uncovered")
    build(folder, backends=["cuda"])
    return folder / "torch-cuda"


@pytest.fixture
def variant(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "torch-cuda"))


def plant(file: Path, source: str = PLANTED, magic: bytes = importlib.util.MAGIC_NUMBER) -> None:
    """Bytecode that Python runs without a look at its source: the header says that a hash need not be checked."""
    file.parent.mkdir(exist_ok=True)
    code = compile(source, "planted.py", "exec")
    file.write_bytes(magic + b"\1\0\0\0" + b"\0" * 8 + marshal.dumps(code))


def problems(variant: Path) -> tuple[str, ...]:
    (found,) = layout_kernels.verify(variant).variants
    return found.problems


def test_bytecode_that_python_runs_in_place_of_a_source_is_reported(variant: Path) -> None:
    plant(variant / "__pycache__" / f"plugin.{TAG}.pyc")
    ran = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(variant)!r}); import plugin"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout == "planted\n"
    assert problems(variant) == (
        f"__pycache__/plugin.{TAG}.pyc is not what plugin.py compiles to; remove it, Python writes the bytecode that "
        "it needs",
    )


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("__pycache__/extra.py", "is covered by no digest"),
        ("__pycache__/native.so", "is covered by no digest"),
        (f"__pycache__/nothing.{TAG}.pyc", "is covered by no digest"),
        ("__pycache__/plugin.pyc", "is covered by no digest"),
        ("plugin.pyc", "is covered by no digest"),
        ("other.pyc", "is covered by no digest"),
        (f"ops/linear/__pycache__/cpu.{TAG}.opt-1.pyc", "is not what cpu.py compiles to"),
        ("__pycache__/plugin.cpython-399.pyc", "is bytecode of cpython-399"),
    ],
)
def test_whatever_the_digest_leaves_out_is_reported_with_its_name(name: str, reason: str, variant: Path) -> None:
    plant(variant / name)
    (found,) = problems(variant)
    assert found.startswith(f"{name} {reason}"), found
    assert "remove it" in found


@pytest.mark.parametrize("linked", ["ops/hidden", "__pycache__", "hidden"])
def test_a_linked_folder_is_reported(linked: str, variant: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "__init__.py").write_text(PLANTED)
    (variant / linked).symlink_to(elsewhere)
    assert problems(variant) == (f"{linked} is a link to a folder, which no digest covers; remove it",)


@pytest.mark.parametrize("optimize", [0, 1, 2])
def test_the_bytecode_that_python_writes_is_right(optimize: int, variant: Path) -> None:
    """Every file of the package, compiled as an import does, also at another path than the one it lies at now."""
    for source in variant.rglob("*.py"):
        py_compile.compile(str(source), doraise=True, optimize=optimize)
    moved = variant.rename(variant.with_name("torch-cpu"))
    assert len(list(moved.rglob("*.pyc"))) > 50
    assert problems(moved) == ()


def test_a_kernel_that_was_loaded_is_as_published(variant: Path) -> None:
    code = f"import sys; sys.path.insert(0, {str(variant.parent)!r}); import importlib as i; i.import_module('{{}}')"
    moved = variant.rename(variant.with_name("loaded"))
    for module in ("loaded.layers", "loaded.kernel_plugins.interface", "loaded.numerics.cli"):
        subprocess.run([sys.executable, "-c", code.format(module)], check=True, env={"PATH": ""})
    assert list(moved.rglob(f"__pycache__/layers.{TAG}.pyc"))
    assert problems(moved) == ()


def changed_constant(code: Any) -> Any:
    assert any(type(value) is int and value == 0 for value in code.co_consts)
    return code.replace(
        co_consts=tuple(False if type(value) is int and value == 0 else value for value in code.co_consts)
    )


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a constant of another type": changed_constant,
    "the size of the stack": lambda code: code.replace(co_stacksize=code.co_stacksize + 1),
    "no code": lambda code: (code,),
}


@pytest.mark.parametrize("change", CHANGES)
def test_bytecode_is_compared_in_every_field(change: str, variant: Path) -> None:
    source = variant / "uncovered.py"
    code = compile(source.read_bytes(), str(source), "exec")
    file = variant / "__pycache__" / f"uncovered.{TAG}.pyc"
    plant(file)
    header = file.read_bytes()[:16]
    file.write_bytes(header + marshal.dumps(code))
    assert problems(variant) == ()
    file.write_bytes(header + marshal.dumps(CHANGES[change](code)))
    assert "is not what uncovered.py compiles to" in problems(variant)[0]


@pytest.mark.parametrize("data", [b"", b"\0" * 40, importlib.util.MAGIC_NUMBER + b"\0" * 12 + b"c\xff\xff"])
def test_bytecode_that_is_none_is_reported(data: bytes, variant: Path) -> None:
    file = variant / "__pycache__" / f"plugin.{TAG}.pyc"
    file.parent.mkdir()
    file.write_bytes(data)
    (found,) = problems(variant)
    assert found.startswith(f"__pycache__/plugin.{TAG}.pyc ")
