"""Check that the compiled CPU variant keeps its promises about other systems: `make check-abi`.

It must load on any Python from 3.9 (abi3audit), any Linux since manylinux_2_28 (the newest glibc symbol), and any
torch from 2.10 (only C functions of torch's stable interface, no C++ name of torch), and bring no library of its own.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

from tools.project import ROOT

GLIBC_LIMIT = (2, 28)
# libgcc_s and libm belong to every Linux that manylinux_2_28 names; the rest is torch's.
LIBRARIES = re.compile(r"lib(torch|torch_cpu|c10)\.so|lib(c|m|pthread|dl|rt|gcc_s)\.so\.\d+|ld-linux-[\w-]+\.so\.\d+")
# What torch promises to keep: the C functions of its shims. What Python promises is abi3audit's to check.
TORCH_STABLE = re.compile(r"(aoti_)?torch_\w+")
PYTHON = re.compile(r"_?Py\w+")
TORCH_UNSTABLE = re.compile(r"_ZN?K?(T[ISV]N)?\d*(2at|3c10|5torch)\w*")


def problems(file: Path) -> list[str]:
    """What keeps an extension from loading on other systems; empty when nothing does."""
    return [*_libraries(file), *_symbols(file), *_exports(file), *_limited_api(file)]


def _run(*command: str) -> str:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed: {result.stdout}{result.stderr}")
    return result.stdout


def _libraries(file: Path) -> list[str]:
    needed = re.findall(r"\(NEEDED\).*\[(.+?)\]", _run("readelf", "-d", str(file)))
    return [f"links {name}, which is not torch's" for name in needed if not LIBRARIES.fullmatch(name)]


def _symbols(file: Path) -> list[str]:
    found = []
    for line in _run("nm", "-D", "--undefined-only", str(file)).splitlines():
        *_, kind, symbol = line.split()
        name, _, version = symbol.partition("@")
        number = re.fullmatch(r"@?GLIBC_(\d+)\.(\d+)(\.\d+)?", version)
        if number and (int(number[1]), int(number[2])) > GLIBC_LIMIT:
            found.append(
                f"needs {name} of {version.lstrip('@')}; the limit is GLIBC_{GLIBC_LIMIT[0]}.{GLIBC_LIMIT[1]}"
            )
        elif not number and version and not version.lstrip("@").startswith("GCC_"):
            found.append(f"needs {name} of {version.lstrip('@')}; link it statically")
        elif TORCH_UNSTABLE.match(name):
            found.append(f"uses {name}, which is no part of torch's stable interface")
        # A weak name resolves to nothing where it is absent.
        elif not version and kind not in "wv" and not TORCH_STABLE.fullmatch(name) and not PYTHON.fullmatch(name):
            found.append(f"uses {name}, which neither torch's stable interface nor Python has")
    return found


def _exports(file: Path) -> list[str]:
    names = [line.split()[-1] for line in _run("nm", "-D", "--defined-only", str(file)).splitlines()]
    expected = f"PyInit_{file.name.partition('.')[0]}"
    return [] if names == [expected] else [f"exports {', '.join(names) or 'nothing'}; it must export {expected} alone"]


def _limited_api(file: Path) -> list[str]:
    tool = Path(sys.executable).with_name("abi3audit")
    if not tool.is_file():
        raise RuntimeError(f"{tool} is missing; install the packages of requirements-dev.txt")
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
        found = problems(file)
        for problem in found:
            print(f"{file}: {problem}", file=sys.stderr)
        status |= bool(found)
        if not found:
            print(f"{file}: loads on manylinux_2_28, Python 3.9 and torch 2.10 or newer")
    return status


if __name__ == "__main__":
    sys.exit(main())
