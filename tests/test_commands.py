"""The command lines say in one line what is missing, and how to get it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
WITHOUT = """
import runpy, sys
sys.modules[{package!r}], sys.argv = None, {argv!r}
runpy.run_module({module!r}, run_name="__main__")
"""


def without(package: str, module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    code = WITHOUT.format(package=package, argv=[module, *arguments], module=module)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "torch-ext")}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=ROOT)


@pytest.mark.parametrize(
    ("package", "module", "arguments"),
    [
        ("torch", "layout_kernels", ("plan", "somewhere")),
        ("transformers", "layout_kernels", ("plan", "somewhere")),
        ("torch", "layout_kernels.numerics", ("--operation", "rms_norm")),
        ("torch", "layout_kernels.benchmark", ("--operation", "rms_norm")),
    ],
)
def test_a_missing_package_is_one_line(package: str, module: str, arguments: tuple[str, ...]) -> None:
    done = without(package, module, *arguments)
    name = module.rpartition(".")[2]
    assert done.stderr == f"{name}: {package} is not installed; python -m pip install {package}\n"
    assert done.returncode == 2


@pytest.mark.parametrize("package", ["torch", "transformers"])
def test_doctor_says_what_is_in_the_way(package: str) -> None:
    done = without(package, "layout_kernels", "doctor")
    assert f"in the way: {package} is not installed; python -m pip install {package}" in done.stdout
    assert (done.returncode, done.stderr) == (1, "")


def test_the_demo_without_a_compiler_is_one_line(tmp_path: Path) -> None:
    environment = {**os.environ, "CXX": "no-such-compiler"}
    command = [sys.executable, "-m", "tools.demo"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=ROOT)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("demo: no-such-compiler is not installed; install")
    assert "Traceback" not in done.stderr
