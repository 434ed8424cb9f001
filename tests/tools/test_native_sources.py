"""The compiled variant depends on its sources, all of them, and on nothing else."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tools.native import compile as compiling
from tools.project import ROOT, read_project

BINDING = compiling.BINDING / "torch_binding.cpp"
EDIT_EACH = """
import json
from tools.native.compile import sources
from tools.project import ROOT, read_project
from tools.publishing.variants import expected_id

project = read_project()
VARIANTS = ("torch-cpu", "torch-stable-abi210-cpu-x86_64-linux", "torch-stable-abi210-cpu-aarch64-linux")

def ids():
    return [expected_id(project, name, "cpu", 1) for name in VARIANTS]

found = {"": ids()}
for path in sources():
    original = path.read_bytes()
    path.write_bytes(original + b"\\n")
    found[path.relative_to(ROOT).as_posix()] = ids()
    path.write_bytes(original)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of all that a build is made of."""
    tree = tmp_path_factory.mktemp("tree")
    for name in ("kernel-src", "torch-ext", "tools"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    shutil.copy(ROOT / "build.toml", tree)
    return tree


@pytest.fixture(scope="module")
def ids_after_edits(tree: Path) -> dict[str, list[str]]:
    """The ids that the tree gives, by the source that was edited; "" for none."""
    printed = subprocess.run([sys.executable, "-c", EDIT_EACH], cwd=tree, capture_output=True, text=True, check=False)
    assert printed.returncode == 0, printed.stderr
    return json.loads(printed.stdout)


def test_a_change_in_any_source_changes_the_id_of_the_compiled_variants_alone(
    ids_after_edits: dict[str, list[str]],
) -> None:
    pure, *compiled = ids_after_edits.pop("")
    assert {name.rpartition(".")[2] for name in ids_after_edits} == {"cpp", "h", "inl", "py"}
    assert set(read_project().table["kernel"]["cpu"]["src"]) < set(ids_after_edits)
    for name, (pure_after, *compiled_after) in ids_after_edits.items():
        assert pure_after == pure, name
        assert set(compiled_after).isdisjoint(compiled), name
    everything = [identifier for _, *after in ids_after_edits.values() for identifier in after]
    assert len(set(everything)) == len(everything), "two edits gave the same id"


@pytest.mark.parametrize("unit", [path for path in compiling.sources() if path.suffix == ".cpp"], ids=lambda p: p.name)
def test_every_file_of_the_tree_that_the_compiler_reads_is_a_source(unit: Path) -> None:
    """`sources()` goes into the id, so a header that it does not name could change without a new id."""
    read = {path.resolve() for path in headers_read(unit)}
    assert unit in read
    of_the_tree = {path for path in read if path.is_relative_to(ROOT) and ".venv" not in path.parts}
    assert of_the_tree <= set(compiling.sources())


def headers_read(unit: Path) -> set[Path]:
    command = ["g++", "-M", *compiling._flags(unit, "identifier", sanitize=False), str(unit)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {Path(word) for word in printed.partition(":")[2].replace("\\\n", " ").split()}


def links_to_torch(folder: Path) -> Path:
    """The part of torch that the compiler reads, in another environment: each file a link into a store, as some
    installers leave it."""
    torch = compiling.torch_folder()
    for file in [*headers_read(BINDING), torch / "version.py"]:
        if file.is_relative_to(torch):
            store = folder / "a store with a name of its own" / file.relative_to(torch)
            target = folder / "v" / "torch" / file.relative_to(torch)
            for place in (store, target):
                place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, store)
            target.symlink_to(store)
    return folder / "v" / "torch"


COMPILE = """
import sys
from pathlib import Path
from tools.native import compile as compiling
compiling.torch_folder = lambda: Path(sys.argv[2])
print(compiling._object("g++", compiling.BINDING / "torch_binding.cpp", "identifier", False, Path(sys.argv[1])))
"""


def test_the_same_tree_gives_the_same_bytes_wherever_it_and_torch_lie(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    here = compiling._object("g++", BINDING, "identifier", False, tmp_path / "here").read_bytes()
    elsewhere = links_to_torch(tmp_path / "elsewhere")
    command = [sys.executable, "-c", COMPILE, str(tmp_path / "there"), str(elsewhere)]
    there = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=True).stdout.strip()
    assert Path(there).read_bytes() == here
    for name in (str(tmp_path), str(ROOT), sys.prefix, sys.base_prefix):
        assert name.encode() not in here
    monkeypatch.setattr(compiling, "torch_folder", lambda: elsewhere)
    assert any(path.is_relative_to(elsewhere) for path in headers_read(BINDING)), "the other torch was not read"
