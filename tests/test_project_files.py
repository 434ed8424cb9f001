"""The files around the package say the same thing."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from layout_kernels.transformers_glue import versions
from tools.version_matrix.__main__ import COMBINATIONS, Versions
from tools.version_matrix.checks import NAMES

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def pins() -> dict[str, str]:
    lines = (ROOT / "requirements-dev.txt").read_text(encoding="utf-8").splitlines()
    entries = [line for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9_.-]+==[0-9][0-9A-Za-z.]*", entry) for entry in entries), entries
    return dict(entry.split("==") for entry in entries)


def test_every_development_pin_is_exact_and_torch_comes_first() -> None:
    assert next(iter(pins())) == "torch"


def test_the_pair_that_messages_and_the_readme_name_is_the_pair_that_is_tested() -> None:
    pinned = pins()
    for name in ("transformers", "kernels"):
        assert f"{name}=={pinned[name]}" in versions.PAIR
    assert f"| {pinned['transformers']} | {pinned['kernels']} | what is developed and tested here" in README


def tried() -> list[tuple[Versions, bool]]:
    """The rows of docs/versions.md: versions, and whether every check passed."""
    lines = (ROOT / "docs" / "versions.md").read_text(encoding="utf-8").splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if re.match(r"\| \d", line)]
    return [(Versions(*row[:3]), row[4:] == ["passed"] * (len(NAMES) - 1)) for row in rows]


def test_the_versions_that_are_named_are_those_that_were_tried_and_passed() -> None:
    """README, versions.py (`doctor` and `kernel_loading()` go by it), docs/versions.md, and what the matrix tries."""
    assert [row for row, _ in tried()] == list(COMBINATIONS), "make version-matrix"
    passed = {(row.transformers.rpartition(".")[0], row.kernels) for row, fine in tried() if fine}
    named = set()
    for first, last, kernels in re.findall(r"^\| (5\.\d+) to (5\.\d+) \| (\S+) \|", README, re.MULTILINE):
        ends = [int(text.partition(".")[2]) for text in (first, last)]
        named |= {(f"5.{number}", kernels) for number in range(ends[0], ends[1] + 1)}
    failed = {
        row.transformers.rpartition(".")[0] for row, fine in tried() if not fine and row.torch == pins()["torch"]
    }
    assert not failed & {release for release, _ in named}
    assert not failed or min(failed) in re.findall(r"^\| (5\.\d+) and later .* not tried", README, re.MULTILINE)
    assert min(named, key=lambda pair: int(pair[0][2:]))[0] == ".".join(map(str, versions.FIRST))
    assert named <= passed
    assert (pins()["transformers"], pins()["kernels"], pins()["torch"]) in {
        tuple(row) for row, fine in tried() if fine
    }


def test_the_runtime_dependencies_force_no_torch_and_the_licence_is_one() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    general = tomllib.loads((ROOT / "build.toml").read_text(encoding="utf-8"))["general"]
    assert project["dependencies"] == []
    assert project["license"] == general["license"] == "Apache-2.0"
    assert project["name"] == general["name"]
    assert "Apache License" in (ROOT / "LICENSE").read_text(encoding="utf-8")


def test_the_two_commands_stand_at_the_top_of_the_readme_and_exist() -> None:
    makefiles = [ROOT / "Makefile", *ROOT.glob("tools/*/*.mk")]
    text = "\n".join(path.read_text(encoding="utf-8") for path in makefiles)
    targets = set(re.findall(r"^([a-z-]+):", text, flags=re.MULTILINE))
    first_block = README.split("```")[1]
    commands = re.findall(r"^make ([a-z-]+)", first_block, flags=re.MULTILINE)
    assert commands == ["demo", "test"]
    assert set(re.findall(r"\bmake ([a-z-]+)", README)) <= targets


def test_continuous_integration_runs_the_test_command_of_the_readme() -> None:
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert "set -euo pipefail" in script
    assert "\nmake test\n" in script
    assert "make test" in README


def test_the_layers_of_the_readme_are_the_layers_of_the_package() -> None:
    from layout_kernels import layers

    defined = {
        name
        for name, value in vars(layers).items()
        if isinstance(value, type) and value.__module__ == layers.__name__ and not name.endswith("Layout")
    }
    table = README.split("## Layers")[1].split("## ")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", table, flags=re.MULTILINE)) == defined
