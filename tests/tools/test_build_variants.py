"""The built variants: what `kernels` makes of them, and that several live in one process."""

from __future__ import annotations

import ast
import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import kernels
import pytest
from kernels._rust import Digest, DigestAlgorithm, DigestValidationError, Metadata

from tools import build_variants
from tools.project import ROOT, read_project

NATIVE = f"torch-stable-abi210-cpu-{platform.machine()}-linux"
DIRECTORIES = {"torch-cuda": "cuda", "torch-npu": "cann", "torch-cpu": "cpu", NATIVE: "cpu"}


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Versions 1 and 2 of the tree as it is, each in a folder of its own."""
    folder = tmp_path_factory.mktemp("builds")
    for version in (1, 2):
        build_variants.build(folder / f"v{version}", version=version)
    return {version: folder / f"v{version}" for version in (1, 2)}


def run_python(code: str, **environment: str) -> str:
    """Run `code` in a fresh process without the source tree on its path; returns what it printed."""
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": os.environ["PATH"], "HOME": os.environ["HOME"], "HF_HUB_OFFLINE": "1", **environment},
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_build_holds_one_folder_a_backend_with_the_metadata_of_build_toml(builds: dict[int, Path]) -> None:
    assert {path.name for path in builds[1].iterdir()} == set(DIRECTORIES)
    for name, backend in DIRECTORIES.items():
        metadata = Metadata.read_from_file(builds[1] / name / "metadata.json")
        assert str(metadata.backend.backend_type) == backend
        assert metadata.id.startswith(f"_layout_kernels_{backend}_")
        assert (str(metadata.name), metadata.version, metadata.license) == ("layout-kernels", 1, "Apache-2.0")
        assert metadata.python_depends == []


def test_the_digest_in_the_metadata_agrees_and_finds_a_changed_file(builds: dict[int, Path], tmp_path: Path) -> None:
    for name in DIRECTORIES:
        folder = builds[1] / name
        recorded = Metadata.read_from_file(folder / "metadata.json").digest
        assert recorded is not None
        recorded.validate(Digest.hash_variant(DigestAlgorithm.SHA256, folder))
    changed = shutil.copytree(builds[1] / "torch-cpu", tmp_path / "torch-cpu")
    with (changed / "layers.py").open("a") as file:
        file.write("\n")
    recorded = Metadata.read_from_file(changed / "metadata.json").digest
    assert recorded is not None
    with pytest.raises(DigestValidationError):
        recorded.validate(Digest.hash_variant(DigestAlgorithm.SHA256, changed))


def test_a_build_ships_every_source_file_and_no_bytecode(builds: dict[int, Path]) -> None:
    package = read_project().package
    shipped = {str(path.relative_to(package)) for path in package.rglob("*.py") if "_native" not in path.parts}
    for name in DIRECTORIES:
        files = set(snapshot(builds[1] / name))
        identifier = Metadata.read_from_file(builds[1] / name / "metadata.json").id
        extension = {f"{identifier}.abi3.so"} if name == NATIVE else set()
        assert files == shipped | {"metadata.json"} | extension, files ^ shipped


def test_the_same_tree_gives_the_same_bytes(builds: dict[int, Path], tmp_path: Path) -> None:
    again = tmp_path / "somewhere" / "else"
    build_variants.build(again, version=1)
    assert snapshot(again) == snapshot(builds[1])


def test_ids_depend_on_content_backend_and_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = read_project()
    copy = shutil.copytree(project.package, tmp_path / "layout_kernels", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(type(project), "package", property(lambda self: copy))
    cpu, cuda, native = build_variants.plan_variants(project, ["cpu", "cuda"])
    assert (native.directory, native.backend) == (NATIVE, "cpu")
    original = build_variants.kernel_id(project, cpu, 1)
    assert build_variants.kernel_id(project, cpu, 1) == original
    unique = {
        build_variants.kernel_id(project, variant, version).rpartition("_")[2]
        for variant in (cpu, cuda, native)
        for version in (1, 2)
    }
    assert len(unique) == 6
    (copy / "__pycache__").mkdir()
    (copy / "__pycache__" / "layers.cpython-311.pyc").write_bytes(b"bytecode")
    assert build_variants.kernel_id(project, cpu, 1) == original
    (copy / "extra.py").write_text("")
    assert build_variants.kernel_id(project, cpu, 1) != original


def public_names(source: str) -> set[str]:
    names: set[str] = set()
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
        elif isinstance(node, ast.Assign):
            names.update(target.id for target in node.targets if isinstance(target, ast.Name))
    return {name for name in names if not name.startswith("_") or name == "__getattr__"}


def test_the_generated_ops_has_the_public_names_of_the_source_tree() -> None:
    source = (read_project().package / "_ops.py").read_text(encoding="utf-8")
    generated = build_variants.generate_ops("_layout_kernels_cpu_0", {"cpu": "_layout_kernels_cpu_0"})
    assert public_names(generated) == public_names(source)
    namespace: dict[str, object] = {"__name__": "generated"}
    exec(compile(generated, "_ops.py", "exec"), namespace)
    assert namespace["NAMESPACE"] == "_layout_kernels_cpu_0"
    assert namespace["EXTENSIONS"] == {"cpu": "_layout_kernels_cpu_0"}


def test_a_native_step_adds_its_files_before_the_digest_and_its_sources_to_the_id(tmp_path: Path) -> None:
    project = read_project()
    calls: list[str] = []

    def native(folder: Path, identifier: str) -> None:
        calls.append(identifier)
        (folder / f"{identifier}.abi3.so").write_bytes(b"compiled")

    plain = build_variants.Variant("torch-stable-abi210-cpu-x86_64-linux", "cpu")
    variant = build_variants.Variant(plain.directory, "cpu", (ROOT / "build.toml",), native)
    folder = build_variants.write_variant(project, variant, 1, tmp_path)
    metadata = Metadata.read_from_file(folder / "metadata.json")
    assert calls == [metadata.id]
    assert metadata.id != build_variants.kernel_id(project, plain, 1)
    assert metadata.digest is not None
    assert f"{metadata.id}.abi3.so" in metadata.digest.files
    assert f'EXTENSIONS: Mapping[str, str] = {{"cpu": "{metadata.id}"}}' in (folder / "_ops.py").read_text()


def test_a_failed_native_step_leaves_the_older_variant_in_place(tmp_path: Path) -> None:
    project = read_project()
    older = build_variants.write_variant(project, build_variants.Variant("torch-cpu", "cpu"), 1, tmp_path)
    before = snapshot(older)

    def native(folder: Path, identifier: str) -> None:
        raise RuntimeError("no compiler")

    with pytest.raises(RuntimeError, match="no compiler"):
        build_variants.write_variant(project, build_variants.Variant("torch-cpu", "cpu", (), native), 2, tmp_path)
    assert snapshot(older) == before
    assert {path.name for path in tmp_path.iterdir()} == {"torch-cpu"}


def test_a_whole_build_removes_older_variants_and_a_partial_one_does_not(tmp_path: Path) -> None:
    stale = tmp_path / "torch-xpu"
    stale.mkdir()
    (stale / "metadata.json").write_text("{}")
    (tmp_path / "torch-notes").mkdir()
    assert build_variants.main(["--allow-dirty", "--output", str(tmp_path), "--backends", "cpu"]) == 0
    assert stale.is_dir()
    assert build_variants.main(["--allow-dirty", "--output", str(tmp_path)]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {*DIRECTORIES, "torch-notes"}


def test_a_dirty_tree_is_refused_unless_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    dirty = {"kernel-builder": {"version": "a"}, "kernel": {"commit": "0" * 40, "dirty": True}}
    monkeypatch.setattr(build_variants, "read_provenance", lambda: dirty)
    words = ["--output", str(tmp_path), "--backends", "cuda"]
    assert build_variants.main(words) == 1
    assert "--allow-dirty" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    assert build_variants.main([*words, "--allow-dirty"]) == 0
    provenance = Metadata.read_from_file(tmp_path / "torch-cuda" / "metadata.json").provenance
    assert provenance is not None
    assert provenance.dirty


def test_an_unknown_backend_is_refused_with_those_that_exist(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert build_variants.main(["--allow-dirty", "--output", str(tmp_path), "--backends", "rocm"]) == 1
    message = capsys.readouterr().err
    assert "rocm" in message
    assert "cuda, cann, cpu" in message


@pytest.mark.parametrize(
    "line", ["version = 1", 'license = "Apache-2.0"', 'repo-id = "layout-kernels/layout-kernels"']
)
def test_a_build_toml_without_a_field_that_builds_need_is_refused(line: str, tmp_path: Path) -> None:
    text = (ROOT / "build.toml").read_text()
    assert line in text
    (tmp_path / "build.toml").write_text(text.replace(line, ""))
    with pytest.raises(ValueError, match=line.split(" ")[0]):
        read_project(tmp_path)


def test_a_build_toml_that_the_official_parser_refuses_is_refused(tmp_path: Path) -> None:
    (tmp_path / "build.toml").write_text((ROOT / "build.toml").read_text() + "unknown-field = 1\n")
    with pytest.raises(ValueError, match="unknown-field"):
        read_project(tmp_path)


def test_get_local_kernel_loads_a_build_offline(builds: dict[int, Path]) -> None:
    kernel = kernels.get_local_kernel(builds[1])
    metadata = Metadata.read_from_file(builds[1] / NATIVE / "metadata.json")
    assert kernel.__name__ == metadata.id
    assert kernel.layers.CustomRMSNorm.__module__ == f"{metadata.id}.layers"


def test_local_kernels_serves_the_repository_offline(builds: dict[int, Path]) -> None:
    repository = read_project().repo_id
    code = (
        "import kernels\n"
        f"module = kernels.get_kernel({repository!r}, revision='v1', trust_remote_code=True)\n"
        "print(module.__name__, module.layers.RMSNormMLP.__name__)"
    )
    printed = run_python(code, LOCAL_KERNELS=f"{repository}={builds[1]}").split()
    assert printed == [Metadata.read_from_file(builds[1] / NATIVE / "metadata.json").id, "RMSNormMLP"]


SIDE_BY_SIDE = """
import json, sys
from pathlib import Path
import torch, kernels, layout_kernels
copies = [kernels.get_local_kernel(Path(sys.argv[1])), kernels.get_local_kernel(Path(sys.argv[2])), layout_kernels]
x = torch.randn(3, 8)
weight = torch.randn(8, requires_grad=True)  # a gradient is wanted, so that the operator runs and not a direct call
outputs = [copy.rms_norm(x, weight) for copy in copies]
assert all(torch.allclose(outputs[0], other) for other in outputs)  # the source tree may have no native kernels
modules = [sys.modules[copy.__name__ + "._ops"] for copy in copies]
registries = {id(sys.modules[copy.__name__ + ".dispatch.registry"]) for copy in copies}
operators = [sorted(name for name in dir(module.ops) if not name.startswith(("_", "cpu_"))) for module in modules]
print(json.dumps({"namespaces": [m.NAMESPACE for m in modules], "registries": len(registries),
                  "layers": len({id(copy.layers.CustomRMSNorm) for copy in copies}), "operators": operators}))
"""


def test_two_versions_and_the_source_tree_live_side_by_side(builds: dict[int, Path]) -> None:
    result = subprocess.run(
        [sys.executable, "-c", SIDE_BY_SIDE, str(builds[1]), str(builds[2])],
        cwd=ROOT / "torch-ext",
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    ids = [Metadata.read_from_file(builds[version] / NATIVE / "metadata.json").id for version in (1, 2)]
    assert found["namespaces"] == [*ids, "_layout_kernels_source"]
    assert found["registries"] == 3
    assert found["layers"] == 3
    first, *others = found["operators"]
    assert any("rms_norm" in name for name in first), first
    assert all(names == first for names in others)
