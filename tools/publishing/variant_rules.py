"""The rules of a Hub kernel on the folders of a build: their names, metadata, digests and compiled files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from kernels._rust import Build, Digest, DigestValidationError, Metadata

from tools.build_variants import native_directory, pure_directory
from tools.native import check_abi
from tools.native.elf import MACHINES, is_elf
from tools.project import ROOT, Project, backend_name
from tools.publishing.build_under_test import BuildUnderTest, read_metadata

COMPILED = "torch-stable-abi"


def folder_backends(project: Project) -> dict[str, str]:
    """Every folder that build.toml gives on some machine, and its backend."""
    folders = {pure_directory(backend): backend for backend in project.backends}
    for backend in project.compiled_backends:
        folders |= {native_directory(project, backend, machine, "linux"): backend for machine in MACHINES}
    return folders


def folders_of_build_toml(build: BuildUnderTest) -> list[str]:
    """Folders have the names that build.toml gives: `kernels` takes others for what they say, or ignores them."""
    known = folder_backends(build.project)
    return [
        f"{variant.name} is no folder of this build, which may have {', '.join(known)}; remove it, or add its backend "
        "to build.toml"
        for variant in build.variants
        if variant.name not in known
    ]


def metadata_and_digest(build: BuildUnderTest) -> list[str]:
    """The official parser takes `metadata.json`, it says what folder and build.toml say, and its digest agrees."""
    if not build.variants:
        return [f"{build.folder} holds no variant; run make build"]
    problems = []
    seen: dict[str, str] = {}
    for variant in build.variants:
        metadata = read_metadata(variant)
        if isinstance(metadata, str):
            problems.append(f"{variant.name}: {metadata}")
            continue
        found = [*_field_problems(build, variant, metadata), *_digest_problems(variant, metadata)]
        problems += [f"{variant.name}: {problem}" for problem in found]
        if metadata.id in seen:
            problems.append(f"{variant.name} has the id of {seen[metadata.id]}; ids must differ")
        seen[metadata.id] = variant.name
    return problems


def _field_problems(build: BuildUnderTest, variant: Path, metadata: Metadata) -> Iterator[str]:
    project = build.project
    backend = backend_name(metadata.backend.backend_type)
    expected = {
        "name": (str(metadata.name), str(project.name)),
        "version": (metadata.version, project.version),
        "license": (metadata.license, project.license),
        "python-depends": (sorted(metadata.python_depends), project.python_depends(backend)),
    }
    for field, (found, wanted) in expected.items():
        if found != wanted:
            yield f"metadata.json has {field} {found}, build.toml {wanted}; build it again"
    if set(metadata.kernel_depends) != set(Build.open(ROOT).all_kernel_depends(metadata.backend.backend_type)):
        yield f"metadata.json depends on the kernels {metadata.kernel_depends}, build.toml not; build it again"
    folder = folder_backends(project).get(variant.name, backend)
    if backend != folder:
        yield f"metadata.json has the backend {backend}, its folder is for {folder}"
    if not metadata.id.startswith(f"_{project.name.python_name}_{backend}_"):
        yield f"the id {metadata.id} is not _{project.name.python_name}_{backend}_<unique>"


def _digest_problems(variant: Path, metadata: Metadata) -> Iterator[str]:
    if metadata.digest is None:
        yield "metadata.json has no digest"
        return
    try:
        metadata.digest.validate(Digest.hash_variant(metadata.digest.algorithm, variant))
    except DigestValidationError as error:
        yield f"the digest does not agree: {error}"
    except OSError as error:
        yield f"the files cannot be hashed: {error}"


def nothing_beside_the_digest(build: BuildUnderTest) -> list[str]:
    """A digest covers regular files. Bytecode, which Python would run in place of the source, and links are none."""
    problems = []
    for path in sorted(build.folder.rglob("*")):
        if path.name == "__pycache__" or path.suffix in (".pyc", ".pyo"):
            problems.append(f"{build.where(path)} is bytecode; remove it")
        elif path.is_symlink():
            problems.append(f"{build.where(path)} is a link; put what it leads to in its place")
    return problems


def abi_limits(build: BuildUnderTest) -> list[str]:
    """Compiled files load on Python from 3.9, Linux since manylinux_2_28, and torch from its stable ABI on."""
    problems = []
    for variant in build.variants:
        files = [path for path in sorted(variant.rglob("*")) if path.is_file() and is_elf(path)]
        problems += _extension_problems(variant, [path.relative_to(variant).as_posix() for path in files])
        machine = variant.name.split("-")[-2] if variant.name.startswith(COMPILED) else None
        for path in files:
            problems += [f"{build.where(path)} {problem}" for problem in check_abi.problems(path, machine)]
    return problems


def _extension_problems(variant: Path, files: list[str]) -> list[str]:
    metadata = read_metadata(variant)
    extension = "<id>.abi3.so" if isinstance(metadata, str) else f"{metadata.id}.abi3.so"
    expected = [extension] if variant.name.startswith(COMPILED) else []
    if files == expected:
        return []
    return [
        f"{variant.name} holds {len(files)} compiled files ({', '.join(files) or 'none'}) and must hold "
        f"{', '.join(expected) or 'none'}: its extension where it is a compiled variant, and nothing else"
    ]
