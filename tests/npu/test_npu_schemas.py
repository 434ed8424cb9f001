"""What the tool reads from a torch_npu wheel, and that a wheel that says otherwise is noticed."""

from __future__ import annotations

import ast
import json
import zipfile
from pathlib import Path

import pytest

from tools import npu_schemas

ROOT = Path(__file__).resolve().parents[2]
COMMITTED = json.loads(npu_schemas.EXTRACT.read_text())["versions"]
NEWEST = list(COMMITTED)[-1]


def wheel(folder: Path, schemas: dict[str, str], version: str = NEWEST, differentiable: str = "") -> Path:
    path = folder / f"torch_npu-{version}-cp311-cp311-manylinux_2_28_x86_64.whl"
    known = differentiable.split() or COMMITTED[NEWEST]["differentiable"]
    with zipfile.ZipFile(path, "w") as archive:
        texts = b"".join(b"\0" + schema.encode() + b"\0" for schema in schemas.values())
        archive.writestr("torch_npu/lib/libtorch_npu.so", b"\x7fELF" + texts + b"\0npu_rms_norm_backward\0")
        declared = "\n".join(f"at::Tensor {name}(c10::DispatchKeySet ks);" for name in known)
        archive.writestr("torch_npu/include/torch_npu/csrc/aten/VariableType.h", declared)
    return path


def test_a_wheel_as_committed_passes(tmp_path, capsys):
    assert npu_schemas.main([str(wheel(tmp_path, COMMITTED[NEWEST]["schemas"]))]) == 0
    assert "as committed" in capsys.readouterr().out


def test_a_new_version_with_another_schema_fails(tmp_path, capsys):
    changed = COMMITTED[NEWEST]["schemas"] | {"npu_swiglu": "npu_swiglu(Tensor input, int dim=-1, int m=0) -> Tensor"}
    assert npu_schemas.main([str(wheel(tmp_path, changed, "99.0.0"))]) == 1
    assert "npu_swiglu(Tensor input, int dim=-1, int m=0)" in capsys.readouterr().out


def test_an_operator_that_autograd_learnt_fails(tmp_path):
    path = wheel(tmp_path, COMMITTED[NEWEST]["schemas"], differentiable="npu_rms_norm npu_gemma_rms_norm")
    assert npu_schemas.main([str(path)]) == 1


def test_a_wheel_without_an_operator_is_refused(tmp_path):
    schemas = {name: schema for name, schema in COMMITTED[NEWEST]["schemas"].items() if name != "npu_geglu"}
    with pytest.raises(ValueError, match="0 schemas of npu_geglu"):
        npu_schemas.read_wheel(wheel(tmp_path, schemas))


def test_the_schemas_are_the_same_in_every_version_that_was_read():
    assert len(COMMITTED) >= 4
    assert all(entry == COMMITTED[NEWEST] for entry in COMMITTED.values())


def test_every_operator_that_an_implementation_calls_is_in_the_extract():
    called = set()
    for path in (ROOT / "torch-ext/layout_kernels/ops").glob("*/npu.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "torch_npu":
                called.add(node.attr)
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr":
                called.add(ast.literal_eval(node.args[1]))
    assert called == set(COMMITTED[NEWEST]["schemas"])
