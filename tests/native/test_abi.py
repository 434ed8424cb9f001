"""What the compiled variant promises about other systems holds, and the check finds what breaks it."""

from __future__ import annotations

from pathlib import Path

import torch

from tools.native import check_abi
from tools.native import compile as compiling
from tools.project import ROOT, read_project


def test_the_compiled_variant_loads_on_other_systems(built_kernel: Path) -> None:
    (file,) = built_kernel.glob("torch-stable-abi*/*.so")
    assert check_abi.problems(file) == []


def test_the_check_finds_unstable_names_foreign_libraries_and_exports() -> None:
    """torch's own Python library breaks each rule: it is bound to one torch and brings libraries of its own."""
    (file,) = (Path(torch.__file__).parent / "lib").glob("libtorch_python.so")
    found = "\n".join(check_abi.problems(file))
    assert "which is no part of torch's stable interface" in found
    assert "it must export PyInit_libtorch_python alone" in found
    assert "links libtorch_python" not in found
    assert "which is not torch's" in found


def test_build_toml_lists_every_source_of_the_extension() -> None:
    table = read_project().table
    listed = {*table["kernel"]["cpu"]["src"], *table["torch"]["src"]}
    present = {
        path.relative_to(ROOT).as_posix()
        for path in compiling.sources()
        if path.parent != Path(compiling.__file__).parent
    }
    assert listed == present
