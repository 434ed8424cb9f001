"""The files around the package that the Hub and its tools read."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib

import pytest
from kernels._rust import Build

from tests.support.hub_client import REPO, ROOT
from tools.publishing.names import public_names

CARD = (ROOT / "CARD.md").read_text(encoding="utf-8")


def test_build_toml_is_taken_by_the_official_parser_and_complete() -> None:
    build = Build.open(ROOT)
    assert [str(backend).lower() for backend in build.general.backends] == ["cuda", "cann", "cpu"]
    table = tomllib.loads((ROOT / "build.toml").read_text(encoding="utf-8"))
    assert (table["general"]["edition"], table["general"]["hub"]["repo-id"]) == (5, REPO)
    assert table["torch"]["stable-abi"] == {"cpu": "2.10"}


def test_every_source_that_build_toml_names_is_there_and_every_kernel_source_is_named() -> None:
    table = tomllib.loads((ROOT / "build.toml").read_text(encoding="utf-8"))
    named = {*table["torch"]["src"], *(name for kernel in table["kernel"].values() for name in kernel["src"])}
    assert all((ROOT / name).is_file() for name in named)
    present = {f"kernel-src/{path.name}" for path in (ROOT / "kernel-src").iterdir() if path.suffix != ".md"}
    assert present == {name for name in named if name.startswith("kernel-src/")}


def test_flake_nix_is_nix_and_calls_kernel_builder_with_this_tree() -> None:
    parser = shutil.which("nix-instantiate")
    if parser is None:
        pytest.skip("nix-instantiate is absent: `apt-get install nix-bin`, as .ci/run does, to parse flake.nix")
    result = subprocess.run([parser, "--parse", "flake.nix"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    # The parser prints the expression in one form whatever its layout in the file.
    assert "genKernelFlakeOutputs { path = " in result.stdout
    assert "inherit self" in result.stdout


def test_the_card_has_the_fields_of_a_kernel_and_names_every_layer() -> None:
    head = CARD.split("---")[1]
    fields = dict(re.findall(r"^(\w+): *(.*)$", head, flags=re.MULTILINE))
    assert (fields["library_name"], fields["license"]) == ("kernels", "apache-2.0")
    names = public_names(ROOT / "torch-ext" / "layout_kernels")["layers"]
    layers = {name for name in names if not name.endswith("Layout")}
    section = CARD.split("## Layers")[1].split("## ")[0]
    assert layers == set(re.findall(r"`(\w+)`", section))


def test_the_example_depends_on_what_is_published() -> None:
    project = tomllib.loads((ROOT / "examples" / "locked-app" / "pyproject.toml").read_text(encoding="utf-8"))
    version = tomllib.loads((ROOT / "build.toml").read_text(encoding="utf-8"))["general"]["version"]
    assert project["tool"]["kernels"]["dependencies"] == {REPO: version}
