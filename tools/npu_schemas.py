"""The schemas of the torch_npu operators that this package calls, read from a wheel, which is never imported.

    python -m tools.npu_schemas torch_npu-2.14.0-*.whl ...            compare with the committed extract
    python -m tools.npu_schemas --write torch_npu-2.14.0-*.whl ...    replace it by what these wheels say

Importing torch_npu needs CANN, and having it installed breaks `import torch` without; its wheel can be had from PyPI
with `pip download --no-deps torch_npu`. Comparing ends with 1 when a wheel differs.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import zipfile
from pathlib import Path
from typing import TypedDict

EXTRACT = Path(__file__).resolve().parents[1] / "tests" / "npu" / "torch_npu_schemas.json"
OPERATORS = (
    "npu_rms_norm",
    "npu_rms_norm_backward",
    "npu_gemma_rms_norm",
    "npu_swiglu",
    "npu_swiglu_backward",
    "npu_geglu",
    "npu_geglu_grad",
)
_LIBRARY = "torch_npu/lib/libtorch_npu.so"
_AUTOGRAD = "torch_npu/include/torch_npu/csrc/aten/VariableType.h"


class Wheel(TypedDict):
    """What a wheel says: the schema of each operator, and which of them autograd differentiates."""

    schemas: dict[str, str]
    differentiable: list[str]


def read_wheel(path: Path) -> tuple[str, Wheel]:
    """The version of a torch_npu wheel, and what it says.

    The schemas are the texts that its library registers with torch; the operators that autograd knows are the
    functions that its header of autograd kernels declares.

    Raises:
        ValueError: an operator is missing, or its schema is not unique.
    """
    with zipfile.ZipFile(path) as wheel:
        library = wheel.read(_LIBRARY)
        autograd = wheel.read(_AUTOGRAD).decode()
    version = path.name.split("-")[1]
    schemas = {name: _schema(library, name, path) for name in OPERATORS}
    differentiable = [name for name in OPERATORS if re.search(rf"\b{name}\(c10::DispatchKeySet", autograd)]
    return version, {"schemas": schemas, "differentiable": differentiable}


def _schema(library: bytes, name: str, path: Path) -> str:
    # Texts end with a zero byte; the name stands at the start of one, or behind the namespace.
    pattern = rb"(?:\x00|npu::)(" + name.encode() + rb"\([^\x00]*\) -> [^\x00]*)\x00"
    found = {match.decode() for match in re.findall(pattern, library)}
    if len(found) != 1:
        raise ValueError(f"{path.name} has {len(found)} schemas of {name}, expected one: {sorted(found)}")
    return found.pop()


def differences(committed: dict[str, Wheel], version: str, wheel: Wheel) -> list[str]:
    """What a wheel says otherwise than the extract does for its version, or for the newest where it has none."""
    newest = max(committed, key=lambda name: tuple(int(part) for part in re.findall(r"\d+", name)))
    known = committed.get(version, committed[newest])
    found = [
        f"{name}: {schema}, not {known['schemas'].get(name)}"
        for name, schema in wheel["schemas"].items()
        if schema != known["schemas"].get(name)
    ]
    if wheel["differentiable"] != known["differentiable"]:
        found.append(f"autograd differentiates {wheel['differentiable']}, not {known['differentiable']}")
    return found


def main(arguments: list[str] | None = None) -> int:
    """Command line; see the module."""
    parser = argparse.ArgumentParser(prog="tools.npu_schemas", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("wheels", nargs="+", type=Path)
    parser.add_argument("--write", action="store_true", help="replace the committed extract")
    options = parser.parse_args(arguments)
    read = dict(read_wheel(path) for path in options.wheels)
    if options.write:
        document = {"source": f"torch_npu wheels on PyPI: {_LIBRARY} and {_AUTOGRAD}", "versions": read}
        EXTRACT.write_text(json.dumps(document, indent=2) + "\n")
        return 0
    committed = json.loads(EXTRACT.read_text())["versions"]
    reasons = {version: differences(committed, version, wheel) for version, wheel in read.items()}
    for version, found in reasons.items():
        print(f"torch_npu {version}: {'as committed' if not found else '; '.join(found)}")
    return int(any(reasons.values()))


if __name__ == "__main__":
    sys.exit(main())
