"""Run the tests of the kernels under AddressSanitizer and UndefinedBehaviorSanitizer: `make sanitize`.

The compiled variant is built with both and Python is started with their run-time libraries in front, so that a read or
write outside of any tensor, which torch takes from malloc, ends the run.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

from tools.build_variants import Variant, plan_variants, write_variant
from tools.native.compile import compile_extension
from tools.project import ROOT, read_project

# Python and torch keep what they allocate until the process ends, and torch's allocator may refuse absurd sizes.
OPTIONS = "detect_leaks=0:allocator_may_return_null=1"
RUNTIMES = ("libasan.so", "libubsan.so")
# The tests of one process with several extensions, and of broken files, are not about memory.
TESTS = tuple(f"tests/native/test_{name}.py" for name in ("every_level", "norms", "threads"))


def build_sanitized(output: Path) -> Path:
    """Write the compiled CPU variant with the sanitizers into `output`; returns its folder."""
    project = read_project()
    (plain,) = (variant for variant in plan_variants(project, ["cpu"]) if variant.native is not None)
    native = partial(compile_extension, sanitize=True)
    return write_variant(project, Variant(plain.directory, plain.backend, plain.native_sources, native), 1, output)


def runtime_libraries() -> list[str]:
    """Paths of the sanitizers' libraries of the compiler.

    Raises:
        RuntimeError: the compiler has none.
    """
    compiler, found = os.environ.get("CXX", "g++"), []
    for name in RUNTIMES:
        result = subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True)
        path = Path(result.stdout.strip())
        if not path.is_absolute():
            raise RuntimeError(f"{compiler} has no {name}; install the sanitizers of the compiler, or set CXX")
        found.append(str(path.resolve()))
    return found


def main(arguments: list[str] | None = None) -> int:
    """Build with the sanitizers and run the tests; arguments are handed to pytest; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.native.sanitize", description=main.__doc__)
    _, rest = parser.parse_known_args(arguments)
    with tempfile.TemporaryDirectory(prefix="sanitize-") as folder:
        build_sanitized(Path(folder))
        environment = {
            **os.environ,
            "LD_PRELOAD": " ".join(runtime_libraries()),
            "ASAN_OPTIONS": OPTIONS,
            "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
            "LAYOUT_KERNELS_BUILD_UNDER_TEST": folder,
            "PYTHONPATH": "torch-ext",
        }
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS, *rest]
        return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
