"""`python -m tools.mutation [WORD ...]`: plant each fault alone in a copy of the tree, and run the tests that ought to
notice. Prints a line a fault and the share that was caught; exit status 1 where that is below 95 %.

A test that also fails without the fault proves nothing, so in the end those that noticed run once more without any.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from itertools import count
from pathlib import Path

from tools.mutation.fault import Fault, files_of_tests, place_of, planted
from tools.mutation.faults import FAULTS

ROOT = Path(__file__).resolve().parents[2]
LEAST_SHARE = 0.95
MOST_SECONDS = 900
# What tests of these folders ask of their process.
ENVIRONMENTS = {
    "/interpreted/": {"TRITON_INTERPRET": "1"},
    "/simulated/": {"LAYOUT_KERNELS_SIMULATED_NPU": "1"},
}
_mtimes = count(int(time.time()))


def copy_tree(folder: Path) -> None:
    """The tree as it is, without what git ignores, and its native extension."""
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        check=True,
    ).stdout
    for name in filter(None, listed.decode().split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    subprocess.run([sys.executable, "-m", "tools.native.compile"], cwd=folder, check=True, capture_output=True)


def _write(path: Path, text: str) -> None:
    """Python takes bytecode for that of a source of the same size and second, so each text has a second of its own."""
    path.write_text(text, encoding="utf-8")
    second = next(_mtimes)
    os.utime(path, (second, second))


def run_tests(folder: Path, tests: Sequence[str], *options: str) -> subprocess.CompletedProcess[str]:
    """The named tests of the tree in ``folder``."""
    environment = {**os.environ, "PYTHONPATH": "torch-ext", "OMP_NUM_THREADS": "1"}
    for part, added in ENVIRONMENTS.items():
        if any(part in test for test in tests):
            environment |= added
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, *tests],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=MOST_SECONDS,
    )


def failures(output: str) -> list[str]:
    """The tests that pytest's summary names as failed."""
    return re.findall(r"^(?:FAILED|ERROR) (\S+?(?:\[.*?\])?)(?: - .*)?$", output, flags=re.MULTILINE)


def attempt(fault: Fault, folder: Path) -> str | None:
    """What noticed the fault: a test, or a text in brackets where no test can be named. None: nothing did.

    Raises:
        ValueError: the table does not fit the tree.
        RuntimeError: pytest could not run the tests.
    """
    place, tests = place_of(fault, folder), files_of_tests(fault, folder)
    before = place.read_text(encoding="utf-8")
    _write(place, planted(fault, before))
    try:
        done = run_tests(folder, tests, "-x")
    except subprocess.TimeoutExpired:
        return f"(nothing: the tests took more than {MOST_SECONDS} seconds)"
    finally:
        _write(place, before)
    if done.returncode == 0:
        return None
    if done.returncode in (3, 4, 5):
        raise RuntimeError(f"{fault.name!r}: pytest ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    found = failures(done.stdout)
    return found[0] if found else f"(the process ended with {done.returncode})"


def failing_without(folder: Path, tests: Iterable[str]) -> set[str]:
    """Those of ``tests`` that fail in the tree without a fault."""
    groups: dict[str, list[str]] = {}
    for test in dict.fromkeys(tests):
        part = next((part for part in ENVIRONMENTS if part in test), "")
        # A simulated device stays in its process, and each file of its tests makes one.
        groups.setdefault(test.partition("::")[0] if part == "/simulated/" else part, []).append(test)
    return {name for group in groups.values() for name in failures(run_tests(folder, group).stdout)}


def chosen(words: Sequence[str]) -> list[Fault]:
    """The faults whose name, file or tests hold one of ``words``; all without words."""
    return [fault for fault in FAULTS if not words or any(word in " ".join(map(str, fault)) for word in words)]


def report(caught: dict[str, str | None], unproven: set[str]) -> int:
    """Print what is to be mended, and the share; returns the exit status."""
    for name, test in caught.items():
        if test is None:
            print(f"SURVIVED  {name}")
        elif test in unproven:
            print(f"UNPROVEN  {name}: {test} fails without it too")
    number = sum(test is not None and test not in unproven for test in caught.values())
    share = number / len(caught) if caught else 0.0
    print(f"mutation: {number} of {len(caught)} faults were caught, {share:.1%}; the least is {LEAST_SHARE:.0%}")
    return int(share < LEAST_SHARE)


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.mutation", description=__doc__)
    parser.add_argument("words", nargs="*", metavar="WORD", help="faults whose name, file or tests hold it")
    options = parser.parse_args(arguments)
    caught: dict[str, str | None] = {}
    with tempfile.TemporaryDirectory(prefix="mutation-") as name:
        folder = Path(name).resolve()
        copy_tree(folder)
        for fault in chosen(options.words):
            start = time.monotonic()
            test = caught[fault.name] = attempt(fault, folder)
            seconds = f"{time.monotonic() - start:4.0f} s"
            print(f"{seconds}  {fault.name}: " + (f"caught by {test}" if test else "SURVIVED"), flush=True)
        unproven = failing_without(folder, [test for test in caught.values() if test and not test.startswith("(")])
    return report(caught, unproven)


if __name__ == "__main__":
    sys.exit(main())
