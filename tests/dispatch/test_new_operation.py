"""A new operation touches four places at most: shown by adding one to a copy of the package, under another name."""

from __future__ import annotations

import importlib
import shutil
import sys
from pathlib import Path

import pytest
import torch

import layout_kernels

PACKAGE = Path(layout_kernels.__file__).parent

INIT = '''"""`scale`: every element times a number."""

from __future__ import annotations

from typing import Any

from ...dispatch.contract import BackendModule, OpContract, Operation, PreparedKernel
from ...dispatch.runtime import prepared

CONTRACT = OpContract("scale", 1, (), False, "rounded once")
OPERATION = Operation(CONTRACT, (BackendModule(".reference", "any"),))


def prepare_scale(device: Any = None) -> PreparedKernel:
    return prepared("scale", device)


def __getattr__(name: str) -> Any:
    if name == "scale":
        from . import operator

        return operator.scale
    raise AttributeError(name)
'''

OPERATOR = '''"""`scale` for torch."""

from __future__ import annotations

import torch

from ...dispatch.launch import define_operator, is_direct
from ...dispatch.runtime import RUNTIME
from . import reference

_forward = RUNTIME.functions("scale")


def check_arguments(x: torch.Tensor, factor: float) -> None:
    """All are allowed."""


def _result(x: torch.Tensor, factor: float) -> torch.Tensor:
    return torch.empty_like(x)


FORWARD = define_operator("scale", check_arguments, _result, mutates_args=(), differentiable=reference.scale)


def scale(x: torch.Tensor, factor: float = 2.0) -> torch.Tensor:
    """x * factor."""
    if not torch.compiler.is_compiling() and is_direct(x):
        return _forward[x.device.type](x, factor)
    return FORWARD(x, factor)
'''

REFERENCE = '''"""`scale` in plain PyTorch."""

from __future__ import annotations

import torch

from ...dispatch import EXECUTION_MODES, register_kernel
from . import CONTRACT


@register_kernel(
    name="reference.scale",
    contract=CONTRACT,
    device="any",
    execution_modes=EXECUTION_MODES,
    input_domain="all",
    solution="reference",
    priority=-1000,
)
def scale(x: torch.Tensor, factor: float) -> torch.Tensor:
    return x * factor
'''

CASES = '''"""Cases of `scale`."""

from .cases import Case, generator, main_input

CASES = (Case((3, 4)), Case((0, 4), "bfloat16"))


def arguments(case):
    return main_input(case, generator(case)), 3.0
'''


def _replace(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1, f"{path} has {text.count(old)} times {old!r}"
    path.write_text(text.replace(old, new))


def _tree(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture
def copy(tmp_path, monkeypatch):
    """A copy of the package, importable as `another_copy`."""
    target = tmp_path / "another_copy"
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    shutil.copytree(PACKAGE, target, ignore=ignored)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield target
    for name in [name for name in sys.modules if name.partition(".")[0] == "another_copy"]:
        del sys.modules[name]


@pytest.fixture
def places(copy):
    """Adds `scale` to the copy; what that touched."""
    before = _tree(copy)
    folder = copy / "ops" / "scale"
    folder.mkdir()
    (folder / "__init__.py").write_text(INIT)
    (folder / "operator.py").write_text(OPERATOR)
    (folder / "reference.py").write_text(REFERENCE)
    _replace(copy / "dispatch" / "catalog.py", '_BUILTINS = (".rms_norm",', '_BUILTINS = (".scale", ".rms_norm",')
    (copy / "numerics" / "scale.py").write_text(CASES)
    _replace(
        copy / "__init__.py",
        '    "rms_norm": ".ops.rms_norm",\n',
        '    "rms_norm": ".ops.rms_norm",\n    "scale": ".ops.scale",\n',
    )
    return {
        name.rpartition("/")[0] if "scale" in name else name
        for name, text in _tree(copy).items()
        if before.get(name) != text
    }


def test_four_places_make_an_operation(places):
    assert places == {"ops/scale", "dispatch/catalog.py", "numerics", "__init__.py"}
    package = importlib.import_module("another_copy")
    suite = importlib.import_module("another_copy.numerics.scale")
    for case in suite.CASES:
        arguments = suite.arguments(case)
        torch.testing.assert_close(package.scale(*arguments), arguments[0] * 3)
    bindings = package.initialize("cpu")
    assert bindings["scale"].spec.name == "reference.scale"
    x = torch.randn(3, 4, requires_grad=True)
    operator = importlib.import_module("another_copy.ops.scale.operator").FORWARD
    assert set(torch.library.opcheck(operator, (x, 2.0)).values()) == {"SUCCESS"}


def test_the_copy_has_registries_and_operators_of_its_own_of_which_the_original_knows_nothing(places):
    package = importlib.import_module("another_copy")
    operator = importlib.import_module("another_copy.ops.scale.operator").FORWARD
    x, bindings = torch.randn(3, 4), package.initialize("cpu")
    original = layout_kernels.prepare_rms_norm("cpu")
    assert original.function is not bindings["rms_norm"].function
    weight = torch.randn(4)
    torch.testing.assert_close(package.rms_norm(x, weight), layout_kernels.rms_norm(x, weight))
    assert operator.name() == "_layout_kernels_source_another_copy::scale"
    assert not hasattr(torch.ops._layout_kernels_source, "scale")
    with pytest.raises(ValueError, match="unknown operation 'scale'"):
        importlib.import_module("layout_kernels.dispatch.runtime").prepared("scale", "cpu")
