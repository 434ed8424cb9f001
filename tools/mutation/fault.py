"""A fault as data, and where it belongs in a tree."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class Fault(NamedTuple):
    """One small mistake that somebody could make.

    Attributes:
        name: what is wrong, for people.
        file: a glob in the tree, so that a module may move; all that it matches together hold ``old`` once.
        old: the text that is replaced.
        new: what stands there instead.
        tests: globs below ``tests/``, of the files that ought to notice.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


def place_of(fault: Fault, root: Path) -> Path:
    """The file of ``root`` that a fault is planted in.

    Raises:
        ValueError: its text occurs never or more than once.
    """
    counts = {path: path.read_text(encoding="utf-8").count(fault.old) for path in root.glob(fault.file)}
    found = [path for path, count in counts.items() if count]
    if sum(counts.values()) != 1:
        where = ", ".join(sorted(path.relative_to(root).as_posix() for path in found)) or "no file"
        raise ValueError(
            f"{fault.name!r}: the text {fault.old!r} occurs {sum(counts.values())} times in {fault.file} ({where}); "
            "it must occur once: take more, or today's, text of that place"
        )
    return found[0]


def files_of_tests(fault: Fault, root: Path) -> list[str]:
    """The test files of a fault, relative to ``root``.

    Raises:
        ValueError: a pattern matches none.
    """
    files: list[str] = []
    for pattern in fault.tests:
        found = sorted(path.relative_to(root).as_posix() for path in (root / "tests").glob(pattern))
        if not found:
            raise ValueError(f"{fault.name!r}: tests/{pattern} matches no file; name the tests that ought to notice")
        files += found
    return list(dict.fromkeys(files))


def planted(fault: Fault, text: str) -> str:
    """``text`` with the fault."""
    return text.replace(fault.old, fault.new)
