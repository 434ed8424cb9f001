"""What a variant's digest does not cover although Python could import it: bytecode and linked folders.

`kernels` hashes the regular files of a variant. It leaves out `__pycache__` and `.pyc` files, which Python writes into
the download when it loads a kernel, and does not enter linked folders. Bytecode runs in place of its source, so each
file of it is compared with what the source compiles to. It is read, never run.
"""

from __future__ import annotations

import marshal
import os
import re
import sys
from collections.abc import Iterator
from importlib.util import MAGIC_NUMBER
from pathlib import Path
from types import CodeType

CACHE = "__pycache__"
HEADER_SIZE = 16
# Where the code was compiled decides nothing; co_lnotab is co_linetable in an older form.
CODE_FIELDS = tuple(
    name
    for name in dir(CodeType)
    if name.startswith("co_") and not callable(getattr(CodeType, name)) and name not in ("co_filename", "co_lnotab")
)


def unreadable_files(variant: Path) -> list[str]:
    """What keeps a file of the variant from being hashed, one line a file: it is missing, no file, or not allowed."""
    found = [(path, _obstacle(path)) for path in _files(variant)]
    return [f"{path.relative_to(variant).as_posix()} cannot be read: {reason}" for path, reason in found if reason]


def uncovered_problems(variant: Path) -> list[str]:
    """Linked folders, and bytecode that is not what its source compiles to; one line each."""
    problems = [
        f"{path.relative_to(variant).as_posix()} is a link to a folder, which no digest covers; remove it"
        for path in _folders(variant)
        if path.is_symlink()
    ]
    for path in _files(variant):
        if CACHE not in path.relative_to(variant).parts and path.suffix != ".pyc":
            continue
        reason = "" if _obstacle(path) else _bytecode_problem(path)
        if reason:
            name = path.relative_to(variant).as_posix()
            problems.append(f"{name} {reason}; remove it, Python writes the bytecode that it needs")
    return problems


def _folders(variant: Path) -> Iterator[Path]:
    for folder, names, _ in os.walk(variant):
        yield from (Path(folder, name) for name in sorted(names))


def _files(variant: Path) -> Iterator[Path]:
    """Everything below the variant that is no folder, without following linked folders."""
    for folder, names, files in os.walk(variant):
        names.sort()
        yield from (Path(folder, name) for name in sorted(files))


def _obstacle(path: Path) -> str:
    """Why a file cannot be read; empty where it can."""
    try:
        if path.is_symlink() and not path.exists():
            return f"it leads to {os.readlink(path)}, which is missing"
        if not path.is_file():
            return "it is neither a file nor a folder"
        with path.open("rb"):
            return ""
    except OSError as error:
        return error.strerror or type(error).__name__


def _bytecode_problem(path: Path) -> str:
    """What is wrong with a file of bytecode; empty where it is what its source compiles to."""
    name = re.fullmatch(r"(\w+)\.([\w-]+?)(?:\.opt-([12]))?\.pyc", path.name)
    source = path.parent.parent / f"{name[1]}.py" if name else path
    if name is None or path.parent.name != CACHE or not source.is_file():
        return "is covered by no digest and is not the bytecode of a source file"
    if name[2] != sys.implementation.cache_tag:
        return f"is bytecode of {name[2]}, which only that Python can compare with its source"
    data = path.read_bytes()
    try:
        expected = compile(source.read_bytes(), str(source), "exec", dont_inherit=True, optimize=int(name[3] or 0))
        same = data.startswith(MAGIC_NUMBER) and _same_code(expected, marshal.loads(data[HEADER_SIZE:]))
    except Exception as error:  # noqa: BLE001 -- bytes that were planted can fail in any way
        return f"cannot be compared with its source ({type(error).__name__}: {error})"
    return "" if same else f"is not what {source.name} compiles to"


def _same_code(first: object, second: object) -> bool:
    """Whether two constants of compiled code are equal, type by type and field by field."""
    if isinstance(first, CodeType) and isinstance(second, CodeType):
        return all(_same_code(getattr(first, name), getattr(second, name)) for name in CODE_FIELDS)
    if type(first) is not type(second):
        return False
    if isinstance(first, tuple) and isinstance(second, tuple):
        return len(first) == len(second) and all(map(_same_code, first, second))
    if isinstance(first, frozenset) and isinstance(second, frozenset):
        return sorted(map(repr, first)) == sorted(map(repr, second))
    # repr tells 0.0 from -0.0, and takes one NaN for another.
    return repr(first) == repr(second)
