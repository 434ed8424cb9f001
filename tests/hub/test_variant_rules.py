"""What a variant's folder and metadata say is held against build.toml, and against the compiled file."""

from __future__ import annotations

import json
import platform
import shutil
from pathlib import Path
from typing import Any

import pytest
from kernels.variants import parse_variant

from tests.hub.test_check_build import renew_digest
from tools import check_build
from tools.build_variants import build
from tools.project import read_project
from tools.publishing.variant_rules import folder_backends

COMPILED = f"torch-stable-abi210-cpu-{platform.machine()}-linux"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("folders")
    build(folder, backends=["cpu"])
    return folder


def problems(rule: str, folder: Path) -> tuple[str, ...]:
    (verdict,) = check_build.check(folder, [rule])
    return verdict.problems


def test_kernels_knows_every_folder_that_build_toml_gives() -> None:
    folders = folder_backends(read_project())
    assert folders == {
        "torch-cuda": "cuda",
        "torch-npu": "cann",
        "torch-cpu": "cpu",
        "torch-stable-abi210-cpu-x86_64-linux": "cpu",
        "torch-stable-abi210-cpu-aarch64-linux": "cpu",
    }
    assert [parse_variant(name).variant_str for name in folders] == list(folders)


@pytest.mark.parametrize(
    "name",
    [
        "torch-xpu",
        "torch-foo",
        "torch-cann",
        "torch_strange",
        "torch-stable-abi29-cpu-x86_64-linux",
        "torch-stable-abi210-cu126-x86_64-linux",
        "torch-stable-abi210-cpu-riscv64-linux",
        "torch-stable-abi210-cpu-x86_64-darwin",
        "torch210-cxx11-cpu-x86_64-linux",
        "tvm-ffi01-cpu-x86_64-linux",
    ],
)
@pytest.mark.parametrize("of", ["torch-cpu", COMPILED])
def test_a_folder_that_build_toml_does_not_give_is_broken(name: str, of: str, original: Path, tmp_path: Path) -> None:
    shutil.copytree(original / of, tmp_path / name)
    (problem,) = problems("folders of build.toml", tmp_path)
    assert problem.startswith(f"{name} is no folder of this build, which may have torch-cuda, torch-npu, torch-cpu, ")
    assert "remove it, or add its backend to build.toml" in problem


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("name", "other", "has name other, build.toml layout-kernels"),
        ("version", 2, "has version 2, build.toml 1"),
        ("version", None, "metadata.json is refused"),
        ("license", "MIT", "has license MIT, build.toml Apache-2.0"),
        ("license", None, "metadata.json is refused"),
        ("python-depends", ["einops"], "has python-depends ['einops'], build.toml []"),
        ("python-depends", ["no-such-package"], "has python-depends ['no-such-package'], build.toml []"),
        ("backend", {"type": "cuda"}, "has the backend cuda, its folder is for cpu"),
        ("id", "_layout_kernels_cuda_0123456789ab", "is not _layout_kernels_cpu_<unique>"),
        ("digest", None, "metadata.json has no digest"),
    ],
)
def test_metadata_that_differs_from_build_toml_or_the_folder_is_broken(
    field: str, value: Any, message: str, original: Path, tmp_path: Path
) -> None:
    file = Path(shutil.copytree(original / "torch-cpu", tmp_path / "torch-cpu")) / "metadata.json"
    table = json.loads(file.read_text())
    table[field] = value
    file.write_text(json.dumps({key: entry for key, entry in table.items() if entry is not None}))
    found = problems("metadata and digest valid", tmp_path)
    assert any(problem.startswith("torch-cpu: ") and message in problem for problem in found), found


def test_metadata_that_depends_on_another_kernel_is_broken(original: Path, tmp_path: Path) -> None:
    file = Path(shutil.copytree(original / "torch-cpu", tmp_path / "torch-cpu")) / "metadata.json"
    table = json.loads(file.read_text())
    table["kernels-depends" if "kernels-depends" in table else "kernel-depends"] = [
        {"repo-id": "acme/other", "version": 1}
    ]
    file.write_text(json.dumps(table))
    (problem,) = problems("metadata and digest valid", tmp_path)
    assert "kernel" in problem


def test_two_variants_with_one_id_are_broken(original: Path, tmp_path: Path) -> None:
    for name in ("torch-cpu", COMPILED):
        shutil.copytree(original / "torch-cpu", tmp_path / name)
    assert any("has the id of torch-cpu" in problem for problem in problems("metadata and digest valid", tmp_path))


def test_a_library_of_one_processor_in_the_folder_of_another_is_broken(original: Path, tmp_path: Path) -> None:
    other = COMPILED.replace(platform.machine(), "aarch64" if platform.machine() == "x86_64" else "x86_64")
    shutil.copytree(original / COMPILED, tmp_path / other)
    (problem,) = problems("abi3 and manylinux limits", tmp_path)
    assert problem.startswith(f"{other}/_layout_kernels_cpu_")
    assert "is compiled for EM_" in problem


@pytest.mark.parametrize("change", ["none", "two", "renamed"])
def test_a_compiled_variant_holds_its_extension_alone(change: str, original: Path, tmp_path: Path) -> None:
    variant = Path(shutil.copytree(original / COMPILED, tmp_path / COMPILED))
    (extension,) = variant.glob("*.so")
    if change == "two":
        shutil.copy(extension, variant / "ops" / "helper.so.1")
    elif change == "renamed":
        extension.rename(variant / "layout_kernels.abi3.so")
    else:
        extension.unlink()
    renew_digest(variant)
    assert f"must hold {extension.name}" in problems("abi3 and manylinux limits", tmp_path)[0]
