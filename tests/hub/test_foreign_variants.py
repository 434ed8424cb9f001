"""Variants that another machine built: published whole or not at all, and kept while their sources are this tree's."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.hub.conftest import upload
from tests.hub.test_publish import build_files, published_files
from tests.support.hub import Hub
from tests.support.hub_client import REPO, Client
from tools.project import read_project
from tools.publishing.variants import expected_id, gather

OTHER = "torch-stable-abi210-cpu-aarch64-linux"


@pytest.fixture
def maintainer(empty_hub: Hub, tmp_path: Path) -> Client:
    return Client(empty_hub, tmp_path / "maintainer")


def set_id(variant: Path, identifier: str) -> None:
    metadata = json.loads((variant / "metadata.json").read_text())
    metadata["id"] = identifier
    (variant / "metadata.json").write_text(json.dumps(metadata))


@pytest.fixture
def ours(builds: dict[int, Path], tmp_path: Path) -> Path:
    """What this machine built."""
    shutil.copytree(builds[1] / "torch-cpu", tmp_path / "ours" / "torch-cpu")
    return tmp_path / "ours"


@pytest.fixture
def theirs(builds: dict[int, Path], tmp_path: Path) -> Path:
    """What a machine with another processor built from the same tree: its compiled variant, with its id."""
    (compiled,) = builds[1].glob("torch-stable-abi*")
    other = Path(shutil.copytree(compiled, tmp_path / "theirs" / OTHER))
    set_id(other, expected_id(read_project(), OTHER, "cpu", 1))
    return other.parent


def both(ours: Path, theirs: Path, folder: Path) -> Path:
    shutil.copytree(ours, folder)
    return Path(shutil.copytree(theirs, folder, dirs_exist_ok=True))


def test_a_variant_of_another_processor_is_published_and_stays_while_the_sources_are_the_same(
    ours: Path, theirs: Path, maintainer: Client, tmp_path: Path
) -> None:
    assert [path.name for path in gather(read_project(), ours, [theirs], 1)] == ["torch-cpu", OTHER]
    assert upload(maintainer, both(ours, theirs, tmp_path / "both"), 1).returncode == 0
    alone = upload(maintainer, ours, 1)
    assert f"{OTHER}, built elsewhere from the same sources, stays" in alone.stdout, alone.stderr
    names = published_files(maintainer.hub.store.repository(REPO), "v1")
    assert build_files(theirs) <= names


def test_a_variant_of_another_processor_from_other_sources_leaves_the_branch(
    ours: Path, theirs: Path, maintainer: Client, tmp_path: Path
) -> None:
    set_id(theirs / OTHER, "_layout_kernels_cpu_000000000000")
    assert upload(maintainer, both(ours, theirs, tmp_path / "both"), 1).returncode == 0
    alone = upload(maintainer, ours, 1)
    assert f"remove build/{OTHER}/metadata.json" in alone.stdout, alone.stderr
    names = published_files(maintainer.hub.store.repository(REPO), "v1")
    assert {name for name in names if name.startswith("build/")} == build_files(ours)


def test_a_foreign_variant_from_other_sources_is_refused(ours: Path, theirs: Path) -> None:
    set_id(theirs / OTHER, "_layout_kernels_cpu_000000000000")
    with pytest.raises(ValueError, match=r"built from other sources; build it from this commit"):
        gather(read_project(), ours, [theirs], 1)


@pytest.mark.parametrize("pattern", ["*.abi3.so", "ops/rms_norm/reference.py"])
def test_a_foreign_variant_with_one_bit_changed_is_refused(pattern: str, ours: Path, theirs: Path) -> None:
    (file,) = (theirs / OTHER).glob(pattern)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(ValueError, match=rf"(?s){OTHER} is not as it was built: .*{file.name}.*; copy it again"):
        gather(read_project(), ours, [theirs], 1)


@pytest.mark.parametrize("name", ["ops/rms_norm/reference.py", "ops/rms_norm/extra.py"])
def test_a_foreign_variant_with_a_file_too_few_or_too_many_is_refused(name: str, ours: Path, theirs: Path) -> None:
    file = theirs / OTHER / name
    file.unlink() if file.exists() else file.write_text("")
    with pytest.raises(ValueError, match=rf"(?s){OTHER} is not as it was built: .*{name}.*; copy it again"):
        gather(read_project(), ours, [theirs], 1)


def test_a_foreign_variant_without_a_digest_is_refused(ours: Path, theirs: Path) -> None:
    file = theirs / OTHER / "metadata.json"
    metadata = json.loads(file.read_text())
    del metadata["digest"]
    file.write_text(json.dumps(metadata))
    with pytest.raises(ValueError, match="has no digest"):
        gather(read_project(), ours, [theirs], 1)


def test_a_folder_without_variants_is_refused(ours: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no variant"):
        gather(read_project(), ours, [tmp_path / "nothing"], 1)
