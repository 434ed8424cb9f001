"""What a publication would change: local files beside the files of a branch. Nothing here writes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import EntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.hf_api import RepoFile


@dataclass(frozen=True)
class Remote:
    """A branch of the repository, or that it is not there.

    Attributes:
        commit: id of its last commit; None where there is no such branch or repository.
        files: its files; the key is the path.
    """

    commit: str | None = None
    files: Mapping[str, RepoFile] = field(default_factory=dict)


@dataclass(frozen=True)
class Difference:
    """Paths that one commit adds, changes and removes."""

    added: tuple[str, ...]
    changed: tuple[str, ...]
    removed: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.added or self.changed or self.removed)

    def __str__(self) -> str:
        if not self:
            return "nothing to upload"
        return f"{len(self.added)} files added, {len(self.changed)} changed, {len(self.removed)} removed"


def read_remote(api: HfApi, repo_id: str, branch: str) -> Remote:
    """The branch as the Hub has it now."""
    try:
        refs = api.list_repo_refs(repo_id, repo_type="kernel")
    except RepositoryNotFoundError:
        return Remote()
    commit = next((ref.target_commit for ref in refs.branches if ref.name == branch), None)
    if commit is None:
        return Remote()
    try:
        rows = api.list_repo_tree(repo_id, recursive=True, revision=commit, repo_type="kernel")
        return Remote(commit, {row.path: row for row in rows if isinstance(row, RepoFile)})
    except (EntryNotFoundError, RevisionNotFoundError):
        return Remote(commit)


def is_same(path: Path, remote: RepoFile) -> bool:
    """Whether a file has the contents that the Hub names: the sha256 of a large file, git's id of another."""
    data = path.read_bytes()
    if len(data) != remote.size:
        return False
    if remote.lfs is not None:
        return hashlib.sha256(data).hexdigest() == remote.lfs.sha256
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest() == remote.blob_id


def compare(local: Mapping[str, Path], remote: Remote, keep: Iterable[str] = ()) -> Difference:
    """What makes the branch hold the local files.

    Args:
        local: the files to be there, by path in the repository.
        remote: the branch.
        keep: prefixes of paths that stay although they are not in ``local``.
    """
    kept = tuple(keep)
    ours = ("build/", "benchmarks/")
    removed = [p for p in remote.files if p not in local and p.startswith(ours) and not p.startswith(kept)]
    return Difference(
        tuple(sorted(path for path in local if path not in remote.files)),
        tuple(sorted(p for p, file in local.items() if p in remote.files and not is_same(file, remote.files[p]))),
        tuple(sorted(removed)),
    )


def local_files(build: Iterable[Path], benchmarks: Path) -> dict[str, Path]:
    """The files of a version branch: the variants below `build/`, and the scripts of `benchmarks/`."""
    files = {}
    for folder in build:
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                files[f"build/{folder.name}/{path.relative_to(folder).as_posix()}"] = path
    for path in sorted(benchmarks.glob("benchmark*.py")):
        files[f"benchmarks/{path.name}"] = path
    return files


def digest(files: Mapping[str, Path]) -> str:
    """A hash of names and contents; the same files give the same tag."""
    listing = {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in sorted(files.items())}
    return hashlib.sha256(json.dumps(listing).encode()).hexdigest()[:12]
