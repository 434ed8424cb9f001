"""How the extension is found, chosen and refused."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tools.native import compile as compiling
from tools.project import read_project

# Runs in a process of its own: the namespace of operators and the environment belong to a process.
INITIALISE = """
import layout_kernels
kernel = layout_kernels.initialize("cpu")["rms_norm"]
print(kernel.spec.name, dict(kernel.excluded))
"""


def run(code: str, tree: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(tree), **environment},
    )


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the source tree with the extension built in place."""
    folder = tmp_path_factory.mktemp("tree")
    package = read_project().package
    shutil.copytree(package, folder / package.name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    compiling.compile_extension(folder / package.name, compiling.SOURCE_NAME)
    return folder


def test_the_source_tree_uses_an_extension_that_was_built_in_place(tree: Path) -> None:
    assert run(INITIALISE, tree).stdout.startswith("cpu.native.rms_norm")


def test_without_an_extension_the_reference_runs_and_says_why(tree: Path, tmp_path: Path) -> None:
    shutil.copytree(tree, tmp_path / "tree", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    result = run(INITIALISE, tmp_path / "tree")
    assert result.stdout.startswith("reference.rms_norm"), result.stderr
    assert "built without the native extension for cpu" in result.stdout


def test_an_extension_that_does_not_load_is_an_error(tree: Path, tmp_path: Path) -> None:
    broken = Path(shutil.copytree(tree, tmp_path / "tree"))
    (file,) = broken.glob("layout_kernels/*.so")
    file.write_bytes(b"no shared library")
    result = run(INITIALISE, broken)
    assert result.returncode != 0
    assert "ImportError" in result.stderr


def test_an_extension_of_another_interface_is_refused_with_the_way_out(tree: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(tree, tmp_path / "tree"))
    file = other / "layout_kernels" / "ops" / "native.py"
    file.write_text(file.read_text().replace("INTERFACE = 3", "INTERFACE = 999"))
    result = run(INITIALISE, other)
    assert result.returncode != 0
    assert "interface 3, this package needs 999" in result.stderr
    assert "make native" in result.stderr


def test_the_environment_chooses_the_level_and_an_unknown_one_is_refused_with_the_choices(tree: Path) -> None:
    code = f"{INITIALISE}\nimport layout_kernels.ops.native as native\nprint(native.level())"
    assert run(code, tree, LAYOUT_KERNELS_CPU_LEVEL="portable").stdout.split()[-1] == "portable"
    refused = run(code, tree, LAYOUT_KERNELS_CPU_LEVEL="mmx")
    assert refused.returncode != 0
    assert "LAYOUT_KERNELS_CPU_LEVEL" in refused.stderr
    assert "portable" in refused.stderr.rpartition("ValueError")[2]


def test_the_best_level_is_the_default(native: ModuleType) -> None:
    assert native.levels()[0] == "portable"
    assert native.level() == native.levels()[-1]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda o: o.cpu_linear(double(3, 4), double(5, 4), None), "x must be float32, bfloat16 or float16"),
        (lambda o: o.cpu_linear(half(3, 4), half(5, 6), None), "weight must be"),
        (lambda o: o.cpu_linear(half(3, 4), half(4, 5).t(), None), "contiguous rows"),
        (lambda o: o.cpu_linear(half(3, 4), half(5, 4), half(4)), "bias must be"),
        (lambda o: o.cpu_rms_norm(half(3, 4), half(5), 1e-6, 0), "weight must be"),
        (lambda o: o.cpu_linear(torch.randn(3, 4), half(5, 4), None), "the dtype of x"),
        (lambda o: o.cpu_rms_norm(double(3, 4), None, 1e-6, 0), "float32, bfloat16 or float16"),
        (lambda o: o.cpu_gated_rms_norm(half(3, 4), half(3, 4), None, 1e-6, 0, 0, 3, 0), "group_size"),
    ],
)
def test_an_operator_refuses_what_it_would_read_out_of_bounds(native: ModuleType, call, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        call(native.operators)


def double(*shape: int) -> torch.Tensor:
    return torch.randn(shape).double()


def half(*shape: int) -> torch.Tensor:
    return torch.randn(shape).bfloat16()


REFUSED = {
    "mlp without an intermediate size": "mlp(x, None, empty(0, 8), empty(5, 0), 1e-6, 0, 0, None, None)",
    "mlp without a result": "mlp(x, None, ones(6, 8), empty(0, 3), 1e-6, 0, 0, None, None)",
    "mlp whose down is no matrix": "mlp(x, None, ones(6, 8), empty(()), 1e-6, 0, 0, None, None)",
    "mlp with half a pair of rows": "mlp(x, None, ones(7, 8), ones(5, 3), 1e-6, 0, 0, None, None)",
    "mlp of an unknown flavour": "mlp(x, None, ones(6, 8), ones(5, 3), 1e-6, 4, 0, None, None)",
    "mlp of a negative flavour": "mlp(x, None, ones(6, 8), ones(5, 3), 1e-6, -1, 0, None, None)",
    "mlp with the weight of no norm": "mlp(x, ones(8), ones(6, 8), ones(5, 3), 1e-6, 3, 0, None, None)",
    "mlp alone with an unknown activation": "mlp(x, None, ones(6, 8), ones(5, 3), 1e-6, 3, 3, None, None)",
    "mlp with an unknown activation": "mlp(x, None, ones(6, 8), ones(5, 3), 1e-6, 0, 3, None, None)",
    "linear of no width": "ops.cpu_linear(empty(4, 0), empty(16, 0), ones(16))",
    "linear without a result": "ops.cpu_linear(x, empty(0, 8), None)",
    "norm of no width": "ops.cpu_rms_norm(empty(3, 0), None, 1e-6, 0)",
    "norm of an unknown flavour": "ops.cpu_rms_norm(x, None, 1e-6, 3)",
    "gated norm of no width": "ops.cpu_gated_rms_norm(empty(3, 0), empty(3, 0), None, 1e-6, 0, 0, 1, 0)",
    "activation of an unknown code": "ops.cpu_gated_activation(x, -1)",
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("rows", [1, 20])
def test_an_operator_refuses_what_it_has_no_answer_for(package: ModuleType, level: str, case: str, rows: int) -> None:
    ops = import_module(f"{package.__name__}.ops.native").operators
    x, empty, ones = torch.ones(rows, 8), torch.empty, torch.ones
    names = {"ops": ops, "mlp": ops.cpu_rms_norm_mlp, "x": x, "empty": empty, "ones": ones}
    with pytest.raises(RuntimeError, match=r"must (be|have)"):
        eval(REFUSED[case], names)
