"""Compile the native CPU extension with the installed compiler; `python -m tools.native.compile` builds it in place.

The extension holds kernel-src/ and torch-ext/torch_binding.cpp. It uses torch's stable ABI and Python's limited API,
so one file serves every torch from 2.10 and every Python from 3.9. Its name is its operator namespace.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tools.project import ROOT, read_project

KERNELS = ROOT / "kernel-src"
BINDING = ROOT / "torch-ext"
SOURCE_NAME = "_layout_kernels_source"
SUFFIX = ".abi3.so"

AVX2 = ("-mavx2", "-mfma", "-mf16c")
AVX512 = (*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512")
# One translation unit a level; the others are compiled for the plainest processor of the architecture.
LEVEL_FLAGS = {
    "level_portable.cpp": (),
    "level_avx2.cpp": AVX2,
    "level_avx512.cpp": AVX512,
    "level_avx512_bf16.cpp": (*AVX512, "-mavx512bf16"),
}
COMMON = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-math-errno",
    "-ffunction-sections",
    "-fdata-sections",
    "-Wall",
    "-Wextra",
    # GCC 12 takes its own _mm512_undefined_ps() for a mistake, and mentions vectors wider than the ABI's.
    "-Wno-maybe-uninitialized",
    "-Wno-uninitialized",
    "-Wno-psabi",
)
BINDING_FLAGS = (
    "-DTORCH_TARGET_VERSION=0x020a000000000000",
    "-DTORCH_STABLE_ONLY",
    # GCC would write the real path of a header behind a link, which no map below knows.
    "-fno-canonical-system-headers",
    # Functions torch declares for a CUDA build are not used here.
    "-Wno-unused-parameter",
)
# The standard library is linked in: the compiler's is newer than what manylinux_2_28 promises.
LINK = ("-shared", "-static-libstdc++", "-Wl,--gc-sections", "-Wl,--as-needed", "-Wl,-s")
SANITIZE = ("-fsanitize=address,undefined", "-fno-omit-frame-pointer", "-fno-sanitize-recover=undefined", "-g", "-O1")


def sources() -> list[Path]:
    """The files that decide what the extension contains."""
    kernels = [path for path in KERNELS.iterdir() if path.suffix in (".cpp", ".h", ".inl")]
    binding = [BINDING / "torch_binding.cpp", BINDING / "torch_binding.h"]
    return sorted([*kernels, *binding, Path(__file__).resolve()])


def compile_extension(folder: Path, identifier: str, sanitize: bool = False) -> Path:
    """Compile the extension into `folder` and return its file, `<identifier>.abi3.so`.

    Args:
        folder: where the file goes; it must exist.
        identifier: name of the extension module and of its operator namespace.
        sanitize: with AddressSanitizer and UndefinedBehaviorSanitizer, which must then be preloaded into Python.

    Raises:
        RuntimeError: no compiler is found, or it fails; the message holds its output.
    """
    if not identifier.isidentifier():
        raise ValueError(
            f"identifier {identifier!r} is no name of a Python module; use letters, digits and underscores"
        )
    compiler = os.environ.get("CXX", "g++")
    units = [path for path in sources() if path.suffix == ".cpp" and _applies(path)]
    objects = ROOT / "build" / ".objects"
    objects.mkdir(parents=True, exist_ok=True)
    # Headers of torch and Python change only with the installed versions, which are part of each object's key.
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        compiled = list(pool.map(lambda unit: _object(compiler, unit, identifier, sanitize, objects), units))
    target = folder / f"{identifier}{SUFFIX}"
    library = torch_folder() / "lib"
    extra = SANITIZE if sanitize else ()
    # The sanitizers' run-time libraries come with the compiler's own libstdc++, and their reports need symbols.
    link = [flag for flag in LINK if not (sanitize and flag in ("-Wl,-s", "-static-libstdc++"))]
    exports = objects / f"{identifier}.map"
    exports.write_text(f"{{ global: PyInit_{identifier}; local: *; }};\n", encoding="utf-8")
    link.append(f"-Wl,--version-script={exports}")
    # Under another name first: a process that holds the old file keeps it, and a build that fails leaves it.
    fresh = target.with_suffix(".new")
    arguments = [*link, *extra, *map(str, compiled), f"-L{library}", "-ltorch", "-ltorch_cpu", "-lc10"]
    _run([compiler, *arguments, "-o", str(fresh)])
    fresh.replace(target)
    return target


def torch_folder() -> Path:
    """The installed torch, found without importing it.

    Raises:
        RuntimeError: torch is not installed.
    """
    from importlib.util import find_spec

    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        raise RuntimeError("torch is not installed here; the extension is compiled against its headers")
    return Path(spec.origin).parent


def _applies(unit: Path) -> bool:
    return platform.machine() == "x86_64" or unit.name in ("level_portable.cpp",) or unit.name not in LEVEL_FLAGS


def _flags(unit: Path, identifier: str, sanitize: bool) -> list[str]:
    # Messages name files as they lie in the repository, in torch and in Python, wherever these are: the same tree
    # gives the same bytes. Of several maps that fit, the last one counts.
    flags = [*COMMON, *LEVEL_FLAGS.get(unit.name, ()), f"-ffile-prefix-map={ROOT}/=", f"-I{KERNELS}"]
    if unit.parent == BINDING:
        torch, python = torch_folder(), sysconfig.get_paths()["include"]
        flags += [*BINDING_FLAGS, f"-DTORCH_EXTENSION_NAME={identifier}", f"-isystem{torch / 'include'}"]
        flags += [f"-isystem{python}", f"-ffile-prefix-map={torch}/=torch/", f"-ffile-prefix-map={python}/=python/"]
    return [*flags, *(SANITIZE if sanitize else ())]


def _object(compiler: str, unit: Path, identifier: str, sanitize: bool, objects: Path) -> Path:
    flags = _flags(unit, identifier, sanitize)
    key = _key([compiler, *flags, unit.name], sources(), extra=(torch_folder() / "version.py").read_bytes())
    target = objects / f"{unit.stem}-{key}.o"
    if not target.is_file():
        fresh = objects / f"{unit.stem}-{key}.{os.getpid()}.tmp.o"
        _run([compiler, *flags, "-c", str(unit), "-o", str(fresh)])
        fresh.replace(target)
    return target


def _key(words: Sequence[str], files: Iterable[Path], extra: bytes) -> str:
    digest = hashlib.sha256(extra)
    for word in words:
        digest.update(word.encode() + b"\0")
    for path in files:
        digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _run(command: list[str]) -> None:
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise RuntimeError(f"{command[0]} is not installed; install g++ or set CXX to a C++17 compiler") from None
    if result.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\nfailed:\n{result.stdout}{result.stderr}")
    if result.stderr:
        print(result.stderr, file=sys.stderr)


def main(arguments: list[str] | None = None) -> int:
    """Compile the extension of the source tree in place; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.native.compile", description=main.__doc__)
    parser.add_argument("--sanitize", action="store_true", help="with AddressSanitizer and UndefinedBehaviorSanitizer")
    parser.add_argument("--output", type=Path, default=read_project().package, help="folder (default: the package's)")
    options = parser.parse_args(arguments)
    try:
        options.output.mkdir(parents=True, exist_ok=True)
        print(compile_extension(options.output, SOURCE_NAME, options.sanitize))
    except RuntimeError as error:
        print(f"compile: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
