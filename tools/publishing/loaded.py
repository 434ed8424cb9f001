"""The rules of a Hub kernel that need the build to be loaded, in processes of their own.

`python -m tools.publishing.loaded bare|layers VARIANT...` loads variants as `kernels` does and prints as JSON what it
found of each; `bare` without GPU, Triton, torch_npu and transformers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from tools.project import ROOT
from tools.publishing.build_under_test import BuildUnderTest

MARK = "found: "
ABSENT = ("triton", "torch_npu", "transformers")


def imports_bare(build: BuildUnderTest) -> list[str]:
    """Every variant loads and computes with torch alone and no GPU."""
    without = ", ".join(ABSENT)
    return [
        f"{variant} does not load without a GPU, {without}: {found['error']}"
        for variant, found in _in_process("bare", build).items()
        if "error" in found
    ]


def operators_under_the_id(build: BuildUnderTest) -> list[str]:
    """Operators that loading and first use register lie in the namespace of the variant's id."""
    problems = []
    for variant, found in _in_process("bare", build).items():
        foreign = [name for name in found.get("operators", []) if not name.startswith(f"{found['id']}::")]
        if foreign:
            problems.append(f"{variant} registers {', '.join(foreign)} outside {found['id']}")
        elif not found.get("operators"):
            problems.append(f"{variant} registered no operator: {found.get('error', 'none was found')}")
    return problems


def layers_pure(build: BuildUnderTest) -> list[str]:
    """`kernels`' own validator accepts every layer: no `__init__`, no members but forward and flags, same call."""
    problems = []
    for variant, found in _in_process("layers", build).items():
        own = [f"does not load: {found['error']}"] if "error" in found else found["problems"]
        problems += [f"{variant}: {problem}" for problem in own]
    return problems


def names_resolve(build: BuildUnderTest) -> list[str]:
    """Every name of an `__all__` is there: of the package, and of the modules that its names load."""
    problems = []
    for variant, found in _in_process("layers", build).items():
        own = [f"does not load: {found['error']}"] if "error" in found else found["missing"]
        problems += [f"{variant}: {problem}" for problem in own]
    return problems


# One process serves several rules that read the same findings; a build that changed is looked at again.
_RESULTS: dict[tuple[str, tuple[tuple[str, int], ...]], dict[str, Any]] = {}


def _in_process(command: str, build: BuildUnderTest) -> dict[str, dict[str, Any]]:
    """What the command found of each variant, by the name of its folder."""
    state = tuple((str(path), path.lstat().st_mtime_ns) for path in sorted(build.folder.rglob("*")))
    if (command, state) not in _RESULTS:
        _RESULTS[command, state] = _run(command, build.variants)
    return _RESULTS[command, state]


def _run(command: str, variants: list[Path]) -> dict[str, Any]:
    result = subprocess.run(
        [sys.executable, "-m", "tools.publishing.loaded", command, *map(str, variants)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"},
    )
    # A build may print while it is imported, or end the process.
    lines = result.stdout.splitlines()
    if result.returncode == 0 and lines and lines[-1].startswith(MARK):
        return json.loads(lines[-1].removeprefix(MARK))
    error = f"exit status {result.returncode}: {(result.stderr.strip().splitlines() or ['no message'])[-1]}"
    return {variant.name: {"error": error} for variant in variants}


def _each(variants: list[Path], look: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    found = {}
    for variant in variants:
        try:
            found[variant.name] = look(variant)
        except Exception as error:  # noqa: BLE001 -- whatever a build raises is a finding
            found[variant.name] = {"error": f"{type(error).__name__}: {error}"}
    return found


def _bare(variants: list[Path]) -> dict[str, Any]:
    for name in ABSENT:
        sys.modules[name] = None  # type: ignore[assignment]
    import torch
    from kernels import get_local_kernel

    torchs_own = _namespaces_of_torch()

    def look(variant: Path) -> dict[str, Any]:
        before = set(torch._C._dispatch_get_all_op_names())
        kernel = get_local_kernel(variant)
        kernel.initialize("cpu")
        weight = torch.ones(8, requires_grad=True)
        kernel.rms_norm(torch.ones(2, 8), weight).sum().backward()
        if kernel.layers.__name__ != f"{kernel.__name__}.layers":
            raise RuntimeError(f"the attribute layers is {kernel.layers.__name__}")
        new = set(torch._C._dispatch_get_all_op_names()) - before
        names = sorted(name for name in new if name.partition("::")[0] not in torchs_own)
        return {"id": kernel.__name__, "operators": names}

    return _each(variants, look)


def _namespaces_of_torch() -> set[str]:
    """A set that receives the namespaces that torch's own modules register when they are first imported."""
    import torch

    found: set[str] = set()
    folder = str(Path(torch.__file__).parent)
    machinery = (f"{folder}/library.py", f"{folder}/_library")
    original = torch.library.Library.__init__

    def record(self: Any, namespace: str, *arguments: Any, **options: Any) -> None:
        frames = [frame.filename for frame in traceback.extract_stack()[:-1]]
        author = next(name for name in reversed(frames) if not name.startswith(machinery))
        if author.startswith(folder):
            found.add(namespace)
        original(self, namespace, *arguments, **options)

    torch.library.Library.__init__ = record  # type: ignore[method-assign, assignment]
    return found


def _layers(variants: list[Path]) -> dict[str, Any]:
    from kernels import get_local_kernel

    def look(variant: Path) -> dict[str, Any]:
        kernel = get_local_kernel(variant)
        return {"missing": _missing_names(kernel), "problems": _layer_problems(kernel)}

    return _each(variants, look)


def _missing_names(kernel: Any) -> list[str]:
    missing = []
    todo, seen = [kernel], set()
    while todo:
        module = todo.pop()
        seen.add(module.__name__)
        for name in getattr(module, "__all__", ()):
            try:
                value = getattr(module, name)
            except Exception as error:  # noqa: BLE001 -- whatever a build raises is a finding
                place = module.__name__.removeprefix(kernel.__name__)
                missing.append(f"__all__ of {place or 'the package'} names {name}: {type(error).__name__}: {error}")
                continue
            inner = getattr(value, "__name__", "") if isinstance(value, ModuleType) else ""
            if inner.startswith(f"{kernel.__name__}.") and inner not in seen:
                todo.append(value)
    return missing


def _layer_problems(kernel: Any) -> list[str]:
    from importlib import import_module

    from kernels.layer.layer import _validate_layer

    layers = kernel.layers
    # `kernels` compares the two when it binds a layer. A layer with a layout is compared with that as well, since the
    # layout is the class that a loaded model has.
    stands_for = {row.name: row.stands_for for row in import_module(".layer_table", kernel.__name__).ROWS}
    own = {n: v for n, v in vars(layers).items() if isinstance(v, type) and v.__module__ == layers.__name__}
    problems = []
    for name, layer in own.items():
        # Layouts, and what they share, are no layers.
        if name.endswith("Layout") or name.startswith("_"):
            continue
        others = [own[f"{name}Layout"]] if f"{name}Layout" in own else []
        if stands_for.get(name):
            module, _, attribute = stands_for[name].partition(":")
            others.append(getattr(import_module(module), attribute))
        if not others:
            problems.append(
                f"layer {name} has no layout and stands for nothing in layer_table.py: say what it is put in place of"
            )
        for other in others:
            try:
                _validate_layer(check_cls=other, cls=layer, repo=name)
            except TypeError as error:
                problems.append(f"layer {name} beside {other.__name__}: {error}")
    return problems


if __name__ == "__main__":
    work = {"bare": _bare, "layers": _layers}[sys.argv[1]]
    print("\n" + MARK + json.dumps(work([Path(name) for name in sys.argv[2:]])))
