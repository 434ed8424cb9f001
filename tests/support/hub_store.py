"""What a Hub keeps: repositories with commits, branches and tags, and the contents of files on disk.

Commit ids are hashes of what a commit holds, so the same publication gets the same id on every Hub.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DATE = "2026-01-02T03:04:05.000Z"


class RefusedError(Exception):
    """An answer of the Hub that is no success: HTTP status, message, error code of the Hub, where to look instead."""

    def __init__(self, status: int, message: str, code: str = "", url: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.url = url


def git_oid(data: bytes) -> str:
    """The id that git gives to a file."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@dataclass(frozen=True)
class File:
    """One file of a commit. ``key`` names its contents in the store; ``sha256`` is set for a large file (LFS)."""

    key: str
    size: int
    oid: str
    sha256: str = ""

    def row(self, path: str) -> dict[str, Any]:
        row: dict[str, Any] = {"type": "file", "oid": self.oid, "size": self.size, "path": path}
        if self.sha256:
            row["lfs"] = {"oid": self.sha256, "size": self.size, "pointerSize": 130}
        return row


@dataclass(frozen=True)
class Commit:
    """A state of the repository, the first parent and what was said about it."""

    oid: str
    parent: str
    title: str
    files: dict[str, File]

    def row(self) -> dict[str, Any]:
        return {"id": self.oid, "title": self.title, "message": "", "date": DATE, "authors": [{"user": "tester"}]}


@dataclass
class Repository:
    """A repository of type kernel. Its branch main exists from the start, with one file, as on the real Hub."""

    name: str
    commits: dict[str, Commit] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)

    def resolve(self, revision: str) -> Commit:
        """The commit of a branch, a tag or a commit id."""
        name = revision.removeprefix("refs/heads/").removeprefix("refs/tags/")
        oid = self.branches.get(name) or self.tags.get(name) or name
        if oid not in self.commits:
            raise RefusedError(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return self.commits[oid]

    def add(self, branch: str, title: str, files: dict[str, File], parent: str) -> Commit:
        """A new commit at the end of a branch."""
        content = json.dumps([parent, title, {path: file.oid for path, file in sorted(files.items())}])
        commit = Commit(hashlib.sha1(content.encode()).hexdigest(), parent, title, files)
        self.commits[commit.oid] = commit
        self.branches[branch] = commit.oid
        return commit

    def refs(self) -> dict[str, Any]:
        def rows(kind: str, names: dict[str, str]) -> list[dict[str, str]]:
            return [{"name": n, "ref": f"refs/{kind}/{n}", "targetCommit": oid} for n, oid in names.items()]

        return {"branches": rows("heads", self.branches), "tags": rows("tags", self.tags), "converts": []}

    def history(self, revision: str) -> list[dict[str, Any]]:
        commit: Commit | None = self.resolve(revision)
        rows = []
        while commit is not None:
            rows.append(commit.row())
            commit = self.commits.get(commit.parent)
        return rows

    def tree(self, revision: str, folder: str, recursive: bool) -> list[dict[str, Any]]:
        """Rows of the files and folders below ``folder``."""
        files = self.resolve(revision).files
        prefix = f"{folder}/" if folder else ""
        below = {path: file for path, file in files.items() if path.startswith(prefix)}
        if folder and not below:
            raise RefusedError(404, f"{folder} does not exist on {revision!r}", "EntryNotFound")
        rows = []
        folders: set[str] = set()
        for path, file in sorted(below.items()):
            parts = path.removeprefix(prefix).split("/")
            folders.update(prefix + "/".join(parts[:depth]) for depth in range(1, len(parts)))
            if recursive or len(parts) == 1:
                rows.append(file.row(path))
        chosen = {name for name in folders if recursive or "/" not in name.removeprefix(prefix)}
        ids = {name: hashlib.sha1(name.encode()).hexdigest() for name in chosen}
        return [*({"type": "directory", "oid": ids[n], "size": 0, "path": n} for n in sorted(chosen)), *rows]

    def upload_mode(self, revision: str, asked: dict[str, Any]) -> dict[str, Any]:
        """How a file is to be uploaded: as a large file where it is binary, and whether it is there already."""
        present = self.resolve(revision).files.get(asked["path"])
        binary = b"\0" in base64.b64decode(asked["sample"])
        answer = {"path": asked["path"], "uploadMode": "lfs" if binary else "regular", "shouldIgnore": False}
        return answer if present is None else {**answer, "oid": present.sha256 or present.oid}


class Store:
    """All repositories of one Hub, and the contents of their files in ``folder``. Calls hold ``lock``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.folder.mkdir(parents=True, exist_ok=True)
        self.repositories: dict[str, Repository] = {}
        self.lock = threading.RLock()

    def keep(self, data: bytes) -> str:
        """Store contents; returns the key under which they are read."""
        key = hashlib.sha256(data).hexdigest()
        (self.folder / key).write_bytes(data)
        return key

    def has(self, key: str) -> bool:
        return (self.folder / key).is_file()

    def read(self, file: File) -> bytes:
        return (self.folder / file.key).read_bytes()

    def repository(self, name: str) -> Repository:
        if name not in self.repositories:
            raise RefusedError(404, f"Repository not found: {name}", "RepoNotFound")
        return self.repositories[name]

    def create(self, name: str) -> Repository:
        if name in self.repositories:
            raise RefusedError(409, "You already created this kernel repo")
        repository = self.repositories[name] = Repository(name)
        repository.add("main", "initial commit", {".gitattributes": self.regular(b"*.so filter=lfs\n")}, "")
        return repository

    def regular(self, data: bytes) -> File:
        return File(self.keep(data), len(data), git_oid(data))

    def large(self, sha256: str, size: int) -> File:
        """A file whose contents were uploaded before, through LFS."""
        if not self.has(sha256):
            raise RefusedError(400, f"large file {sha256} was not uploaded")
        pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n"
        return File(sha256, size, git_oid(pointer.encode()), sha256)

    def large_files(self, asked: list[dict[str, Any]], url: str) -> list[dict[str, Any]]:
        """Where large files are to be sent; those that are here already need not be."""
        rows = []
        for wanted in asked:
            row: dict[str, Any] = {"oid": wanted["oid"], "size": wanted["size"]}
            if not self.has(wanted["oid"]):
                names = {"upload": wanted["oid"], "verify": "verify"}
                row["actions"] = {action: {"href": f"{url}/lfs/{name}"} for action, name in names.items()}
            rows.append(row)
        return rows

    def apply(self, files: dict[str, File], key: str, value: dict[str, Any]) -> None:
        """One line of a commit, applied to ``files``."""
        path = value["path"]
        if key == "file":
            files[path] = self.regular(base64.b64decode(value["content"]))
        elif key == "lfsFile":
            files[path] = self.large(value["oid"], value["size"])
        elif key == "deletedFile" and path in files:
            del files[path]
        elif key == "deletedFolder":
            for name in [name for name in files if name.startswith(path.rstrip("/") + "/")]:
                del files[name]
        else:
            raise RefusedError(400, f"cannot apply {key} to {path}", "EntryNotFound")

    def change(self, name: str, revision: str, path: str, data: bytes) -> None:
        """Other contents for a file that is published already: same commit, same ETag, as a hostile mirror does."""
        with self.lock:
            commit = self.repository(name).resolve(revision)
            old = commit.files[path]
            commit.files[path] = File(self.keep(data), len(data), old.oid, old.sha256)
