"""List the C functions of torch's stable interface in a wheel of torch: `python -m tools.native.torch_names WHEEL`.

Its output is `torch_names.txt`, which `check_abi` holds a compiled variant against. The wheel is one of the oldest
torch that is served; `pip download --no-deps --platform manylinux_2_28_aarch64 --only-binary :all: torch==...` gets
one without CUDA.
"""

from __future__ import annotations

import re
import sys
import tempfile
import zipfile
from pathlib import Path

from tools.native.elf import read_shared_object

# What torch calls its stable C interface. The shims that it generates for AOTInductor change from release to release.
SHIMS = ("torch/csrc/stable/c/shim.h", "torch/csrc/inductor/aoti_torch/c/shim.h")
DECLARATION = re.compile(r"\b((?:aoti_)?torch_\w+)\s*\(")


def stable_names(headers: list[str], exported: set[str]) -> list[str]:
    """The functions that the headers declare and the library has."""
    declared = {name for text in headers for name in DECLARATION.findall(text)}
    return sorted(declared & exported)


def read_wheel(wheel: Path) -> str:
    """The list, with a line that says what it is of."""
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as folder:
        headers = [archive.read(f"torch/include/{name}").decode() for name in SHIMS]
        library = Path(archive.extract("torch/lib/libtorch_cpu.so", folder))
        names = stable_names(headers, set(read_shared_object(library).exported))
    version = wheel.name.split("-")[1]
    return "\n".join([f"# torch {version}: {' and '.join(SHIMS)}, by tools.native.torch_names", *names])


if __name__ == "__main__":
    print(read_wheel(Path(sys.argv[1])))
