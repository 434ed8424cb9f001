"""Write the Hub variants of this kernel: `make build`, or `python -m tools.build_variants`.

kernel-builder cannot build this mix of pure-Python and native backends (see CONTRIBUTING.md), so this tool writes
what `kernels` loads: one folder a backend with the package's files, `_ops.py` generated for it, and metadata.json.

A variant's id is `_<python_name>_<backend>_<unique>`; it is the import name of the variant and the namespace of its
operators. `<unique>` is a hash of content, backend and version, so that several builds live in one process.
The same tree gives the same ids and digests: nothing depends on time, paths or the order of a directory listing.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernels._rust import Digest, DigestAlgorithm, Metadata

from tools.native.compile import compile_extension, sources
from tools.project import ROOT, Project, read_project

UNIQUE_LENGTH = 12
# `kernels` looks for torch-npu where the metadata says cann; a folder torch-cann is refused by its loader.
PURE_DIRECTORIES = {"cann": "torch-npu"}
OPS_TEMPLATE = '''"""The operator namespace of this build. Generated, with the names of the source tree's file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NAMESPACE = "@NAMESPACE@"

EXTENSIONS: Mapping[str, str] = @EXTENSIONS@


def add_op_namespace_prefix(name: str) -> str:
    """The qualified name `<namespace>::<name>` of one of this build's operators."""
    return f"{NAMESPACE}::{name}"


def __getattr__(name: str) -> Any:
    """`ops`: this build's operators, `torch.ops.<namespace>`; torch is imported by asking for them."""
    if name == "ops":
        import torch

        return getattr(torch.ops, NAMESPACE)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
'''
IGNORED_NAMES = {"__pycache__", "_native", ".DS_Store"}
IGNORED_SUFFIXES = {".pyc", ".pyo", ".so"}


@dataclass(frozen=True)
class Variant:
    """One folder of a build.

    Attributes:
        directory: its name, which `kernels` parses, for example "torch-cpu".
        backend: backend name in metadata.json, for example "cann".
        native_sources: files beyond the package that decide what the variant contains; they are part of its id.
        native: called as `native(folder, id)` once the Python files lie in `folder`; it adds the extension module
            `id`, compiled for the operator namespace `id`, which serves `backend`. None for a pure-Python variant.
    """

    directory: str
    backend: str
    native_sources: tuple[Path, ...] = ()
    native: Callable[[Path, str], object] | None = None


def plan_variants(project: Project, backends: Iterable[str]) -> list[Variant]:
    """The variants to write for `backends`, pure-Python ones first.

    Raises:
        ValueError: if a backend is not in build.toml.
    """
    chosen = list(dict.fromkeys(backends))
    unknown = [name for name in chosen if name not in project.backends]
    if unknown:
        raise ValueError(
            f"unknown backends {', '.join(unknown)}: build.toml has {', '.join(project.backends)}; "
            "name one of these, or add the backend to general.backends"
        )
    pure = [Variant(pure_directory(name), name) for name in chosen]
    return [*pure, *(variant for name in chosen for variant in _native_variants(project, name))]


def pure_directory(backend: str) -> str:
    """The folder of the pure-Python variant of a backend."""
    return PURE_DIRECTORIES.get(backend, f"torch-{backend}")


def native_directory(project: Project, backend: str, machine: str, system: str) -> str:
    """The folder of the compiled variant of a backend for a processor and an operating system."""
    abi = project.table["torch"]["stable-abi"][backend].replace(".", "")
    return f"torch-stable-abi{abi}-{backend}-{machine}-{system}"


def _native_variants(project: Project, backend: str) -> Iterator[Variant]:
    """The compiled variants of a backend: one for this machine where build.toml has a [kernel.*] section for it."""
    if backend in project.compiled_backends:
        directory = native_directory(project, backend, platform.machine(), platform.system().lower())
        yield Variant(directory, backend, tuple(sources()), compile_extension)


def package_files(package: Path) -> Iterator[Path]:
    """The files of the package that ship, sorted by path: no bytecode, no in-place native build, no `_ops.py`."""
    for path in sorted(package.rglob("*"), key=lambda p: p.relative_to(package).as_posix()):
        parts = path.relative_to(package).parts
        if parts == ("_ops.py",) or not IGNORED_NAMES.isdisjoint(parts) or path.suffix in IGNORED_SUFFIXES:
            continue
        if path.is_file():
            yield path


def kernel_id(project: Project, variant: Variant, version: int) -> str:
    """`_<python_name>_<backend>_<unique>`, where `<unique>` hashes content, folder, backend and version."""
    digest = hashlib.sha256()

    def feed(data: bytes) -> None:
        # The length in front keeps two different lists of parts from giving the same stream.
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)

    for part in (project.name.python_name, variant.directory, variant.backend, str(version), OPS_TEMPLATE):
        feed(part.encode())
    for path in package_files(project.package):
        feed(path.relative_to(project.package).as_posix().encode())
        feed(path.read_bytes())
    for path in sorted(variant.native_sources, key=_native_name):
        feed(_native_name(path).encode())
        feed(path.read_bytes())
    return f"_{project.name.python_name}_{variant.backend}_{digest.hexdigest()[:UNIQUE_LENGTH]}"


def _native_name(path: Path) -> str:
    return path.resolve().relative_to(ROOT).as_posix()


def generate_ops(identifier: str, extensions: dict[str, str]) -> str:
    """`_ops.py` of a build, with the public names of the one in the source tree.

    Args:
        identifier: the variant's id, which becomes the namespace of its operators.
        extensions: native extensions in the variant: what each serves, and the name of its module in the package.
    """
    return OPS_TEMPLATE.replace("@NAMESPACE@", identifier).replace("@EXTENSIONS@", json.dumps(extensions))


def write_variant(project: Project, variant: Variant, version: int, output: Path) -> Path:
    """Write one variant under `output` and return its folder. An older one of that name is replaced at the end."""
    identifier = kernel_id(project, variant, version)
    target = output / variant.directory
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".build-", dir=output) as scratch:
        folder = Path(scratch) / variant.directory
        for path in package_files(project.package):
            copy = folder / path.relative_to(project.package)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
        extensions = {} if variant.native is None else {variant.backend: identifier}
        (folder / "_ops.py").write_text(generate_ops(identifier, extensions), encoding="utf-8")
        if variant.native is not None:
            variant.native(folder, identifier)
        _write_metadata(project, variant, version, identifier, folder)
        if target.exists():
            shutil.rmtree(target)
        folder.rename(target)
    return target


def _write_metadata(project: Project, variant: Variant, version: int, identifier: str, folder: Path) -> None:
    digest = Digest.hash_variant(DigestAlgorithm.SHA256, folder)
    metadata: dict[str, Any] = {
        "id": identifier,
        "name": str(project.name),
        "version": version,
        "license": project.license,
        "python-depends": project.python_depends(variant.backend),
        "backend": {"type": variant.backend},
        "digest": {"algorithm": "sha256", "files": dict(sorted(digest.files.items()))},
    }
    provenance = read_provenance()
    if provenance is not None:
        metadata["provenance"] = provenance
    text = json.dumps(metadata, indent=2) + "\n"
    Metadata.from_bytes(text.encode())  # what `kernels` would refuse is refused here
    (folder / "metadata.json").write_text(text, encoding="utf-8")


def read_provenance() -> dict[str, Any] | None:
    """Which commit a build comes from, in the form of metadata.json; None outside a git checkout.

    The format has a field for the version of kernel-builder and wants it filled: it names this tool instead.
    """

    def git(*arguments: str) -> str | None:
        result = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
        return result.stdout.strip() if result.returncode == 0 else None

    if shutil.which("git") is None or git("rev-parse", "--show-toplevel") != str(ROOT):
        return None
    commit = git("rev-parse", "HEAD")
    if commit is None:
        return None
    # Only what a build is made of counts: a note in the README does not make a build unreproducible.
    changes = git("status", "--porcelain", "--", "torch-ext", "kernel-src", "build.toml", "tools")
    return {
        "kernel-builder": {"version": "layout-kernels tools.build_variants"},
        "kernel": {"commit": commit, "dirty": bool(changes)},
    }


def refuse_dirty() -> None:
    """Nobody can build again what was never committed.

    Raises:
        ValueError: something that a build is made of has changes.
    """
    provenance = read_provenance()
    if provenance is not None and provenance["kernel"]["dirty"]:
        raise ValueError(
            "torch-ext, kernel-src, build.toml or tools have changes that are not committed; commit them, or say "
            "--allow-dirty (make build ALLOW_DIRTY=1), which metadata.json then records"
        )


def remove_stale(output: Path, variants: list[Variant]) -> None:
    """Remove the variants under `output` that a whole build no longer writes."""
    current = {variant.directory for variant in variants}
    for folder in sorted(output.glob("torch*")):
        if folder.name not in current and (folder / "metadata.json").is_file():
            shutil.rmtree(folder)


def build(output: Path, version: int | None = None, backends: Iterable[str] | None = None) -> list[Path]:
    """Write the variants and return their folders.

    Args:
        output: folder that receives one folder a variant; `kernels.get_local_kernel(output)` loads from it.
        version: overrides build.toml's version.
        backends: a subset of build.toml's backends; all when None, and then older variants are removed as well.

    Raises:
        ValueError: see `read_project` and `plan_variants`.
        RuntimeError: see `compile_extension`.
    """
    project = read_project()
    variants = plan_variants(project, project.backends if backends is None else backends)
    number = project.version if version is None else version
    folders = [write_variant(project, variant, number, output) for variant in variants]
    if backends is None:
        remove_stale(output, variants)
    return folders


def main(arguments: list[str] | None = None) -> int:
    """Command line of the build; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.build_variants", description="Write the Hub variants.")
    parser.add_argument("--output", type=Path, default=ROOT / "build", help="folder for the variants (default: build)")
    parser.add_argument("--version", type=int, help="override the version of build.toml")
    parser.add_argument("--backends", nargs="+", metavar="NAME", help="build only these backends of build.toml")
    parser.add_argument("--allow-dirty", action="store_true", help="build although changes are not committed")
    options = parser.parse_args(arguments)
    try:
        if not options.allow_dirty:
            refuse_dirty()
        folders = build(options.output, options.version, options.backends)
    except (ValueError, RuntimeError) as error:
        print(f"build: {error}", file=sys.stderr)
        return 1
    for folder in folders:
        print(f"{folder}  {Metadata.read_from_file(folder / 'metadata.json').id}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
