"""Check that the compiled CPU variant keeps its promises about other systems: `make check-abi`.

It must load on any Python from 3.9 (abi3audit), any Linux since manylinux_2_28 (the newest glibc symbol), and any
torch from 2.10 (only C functions of torch's stable interface that 2.10 has, no C++ name of torch), bring no library of
its own, and ask for nothing that a hardened system refuses: an executable stack, code that can be written.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

from tools.native.elf import MACHINES, SharedObject, Symbol, read_shared_object
from tools.project import ROOT

GLIBC_LIMIT = (2, 28)
# libgcc_s and libm belong to every Linux that manylinux_2_28 names; the rest is torch's.
LIBRARIES = re.compile(r"lib(torch|torch_cpu|c10)\.so|lib(c|m|pthread|dl|rt|gcc_s)\.so\.\d+|ld-linux-[\w-]+\.so\.\d+")
# What torch promises to keep is the C functions of its shims; the file lists those of the oldest torch. What Python
# promises is abi3audit's to check.
TORCH_LIMIT = "2.10"
TORCH_NAMES = Path(__file__).with_name("torch_names.txt")
TORCH_STABLE = re.compile(r"(aoti_)?torch_\w+")
PYTHON = re.compile(r"_?Py\w+")
TORCH_UNSTABLE = re.compile(r"_ZN?K?(T[ISV]N)?\d*(2at|3c10|5torch)\w*")


def problems(file: Path, machine: str | None = None) -> list[str]:
    """What keeps an extension from loading on other systems; empty when nothing does.

    Args:
        file: the extension.
        machine: the processor that it must be for, as folders of variants name it; None: whichever it is.
    """
    try:
        found = read_shared_object(file)
    except ValueError as error:
        return [str(error)]
    return [*_machine(found, machine), *_libraries(found), *_hardening(found), *_symbols(found), *_rest(file, found)]


def _machine(found: SharedObject, machine: str | None) -> list[str]:
    if machine is None or found.machine == MACHINES.get(machine):
        return []
    return [f"is compiled for {found.machine}, its folder says {machine}"]


def _libraries(found: SharedObject) -> list[str]:
    foreign = [f"links {name}, which is not torch's" for name in found.needed if not LIBRARIES.fullmatch(name)]
    paths = [f"searches libraries in {path}; link it without rpath" for path in found.search_paths]
    return [*foreign, *paths]


def _hardening(found: SharedObject) -> list[str]:
    problems = []
    if found.executable_stack:
        problems.append("asks for an executable stack; link it with -z noexecstack")
    if found.open_segments:
        problems.append("has a segment that is writable and executable; link it with -z separate-code")
    if found.changes_code:
        problems.append("is relocated in its code; compile it with -fPIC")
    return problems


def _symbols(found: SharedObject) -> list[str]:
    return [problem for symbol in found.undefined if (problem := _symbol_problem(symbol))]


def _symbol_problem(symbol: Symbol) -> str:
    name, version = symbol.name, symbol.version
    number = re.fullmatch(r"GLIBC_(\d+)\.(\d+)(\.\d+)?", version)
    if number and (int(number[1]), int(number[2])) > GLIBC_LIMIT:
        return f"needs {name} of {version}; the limit is GLIBC_{GLIBC_LIMIT[0]}.{GLIBC_LIMIT[1]}"
    if not number and version and not version.startswith("GCC_"):
        return f"needs {name} of {version}; link it statically"
    if TORCH_UNSTABLE.match(name):
        return f"uses {name}, which is no part of torch's stable interface"
    if version or symbol.weak or PYTHON.fullmatch(name) or name in torch_names():
        return ""
    if TORCH_STABLE.fullmatch(name):
        return f"uses {name}, which the stable interface of torch {TORCH_LIMIT} has not; do without it"
    return f"uses {name}, which neither torch's stable interface nor Python has"


@cache
def torch_names() -> frozenset[str]:
    """The C functions of torch's stable interface in the oldest torch that is served."""
    lines = TORCH_NAMES.read_text(encoding="utf-8").splitlines()
    return frozenset(line for line in lines if line and not line.startswith("#"))


def _rest(file: Path, found: SharedObject) -> list[str]:
    expected = f"PyInit_{file.name.partition('.')[0]}"
    exports = []
    if found.exported != (expected,):
        exports = [f"exports {', '.join(found.exported) or 'nothing'}; it must export {expected} alone"]
    return [*exports, *_limited_api(file)]


def _limited_api(file: Path) -> list[str]:
    tool = Path(sys.executable).with_name("abi3audit")
    if not tool.is_file():
        return [f"cannot be held against Python's limited API: {tool} is missing; pip install -r requirements-dev.txt"]
    command = [str(tool), "--strict", "--assume-minimum-abi3", "3.9", str(file)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return [] if result.returncode == 0 else [f"abi3audit: {result.stdout}{result.stderr}"]


def main(arguments: list[str] | None = None) -> int:
    """Check the extensions below a folder; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.native.check_abi", description=main.__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=ROOT / "build", help="default: build")
    folder = parser.parse_args(arguments).folder
    files = sorted(folder.glob("torch-stable-abi*/*.so"))
    if not files:
        print(f"check-abi: no extension below {folder}; run make build first", file=sys.stderr)
        return 1
    status = 0
    for file in files:
        found = problems(file, file.parent.name.split("-")[-2])
        for problem in found:
            print(f"{file}: {problem}", file=sys.stderr)
        status |= bool(found)
        if not found:
            print(f"{file}: loads on manylinux_2_28, Python 3.9 and torch 2.10 or newer")
    return status


if __name__ == "__main__":
    sys.exit(main())
