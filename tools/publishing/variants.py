"""Which variants a publication holds: those built here, those built elsewhere, and those that stay on the branch."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from huggingface_hub import HfApi
from kernels._rust import Digest, DigestValidationError, Metadata

from tools.build_variants import Variant, kernel_id
from tools.native.compile import sources
from tools.project import Project, backend_name
from tools.publishing.difference import Remote


def variant_folders(build: Path) -> list[Path]:
    """The variants below a folder."""
    return sorted(path.parent for path in build.glob("torch*/metadata.json"))


def expected_id(project: Project, directory: str, backend: str, version: int) -> str:
    """The id that this tree gives a variant, also one for another processor, which is not compiled for that."""
    native = tuple(sources()) if directory.startswith("torch-stable-abi") else ()
    return kernel_id(project, Variant(directory, backend, native), version)


def check_foreign(project: Project, folder: Path, version: int) -> None:
    """A variant that was built on another machine must come from the same tree and be whole.

    Raises:
        ValueError: it does not, or is not.
    """
    metadata = Metadata.read_from_file(folder / "metadata.json")
    expected = expected_id(project, folder.name, backend_name(metadata.backend.backend_type), version)
    if metadata.id != expected:
        raise ValueError(
            f"{folder} has the id {metadata.id}, this tree gives {expected}: it was built from other sources; "
            "build it from this commit"
        )
    if metadata.digest is None:
        raise ValueError(f"{folder} has no digest; build it with tools.build_variants of this commit")
    try:
        metadata.digest.validate(Digest.hash_variant(metadata.digest.algorithm, folder))
    except (DigestValidationError, OSError) as error:
        raise ValueError(f"{folder} is not as it was built: {error}; copy it again from its machine") from error


def gather(project: Project, build: Path, extra: Iterable[Path], version: int) -> list[Path]:
    """The variants to publish: all of `build`, and of each folder in `extra` those that `build` lacks."""
    folders = {folder.name: folder for folder in variant_folders(build)}
    for other in extra:
        found = variant_folders(other)
        if not found:
            raise ValueError(f"{other} holds no variant; name the output folder of a build from another machine")
        for folder in found:
            if folder.name not in folders:
                check_foreign(project, folder, version)
                folders[folder.name] = folder
    return [folders[name] for name in sorted(folders)]


def still_valid(
    api: HfApi, repo_id: str, remote: Remote, project: Project, ours: list[Path], version: int
) -> list[str]:
    """Variants on the branch, not in `ours`, that this tree would build with the same id: they stay.

    Any other is out of date beside the new ones, and is removed with the same commit.
    """
    names = {path.split("/")[1] for path in remote.files if path.startswith("build/") and path.count("/") > 1}
    kept = []
    for name in sorted(names - {folder.name for folder in ours}):
        if f"build/{name}/metadata.json" not in remote.files:
            continue
        path = api.hf_hub_download(repo_id, f"build/{name}/metadata.json", repo_type="kernel", revision=remote.commit)
        metadata = Metadata.read_from_file(path)
        if metadata.id == expected_id(project, name, backend_name(metadata.backend.backend_type), version):
            kept.append(name)
    return kept
