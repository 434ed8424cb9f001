"""What publishing does to a Hub: all of it, in one step, once; and what it leaves after a failure."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from kernels._rust import Digest, DigestAlgorithm

from tests.hub.conftest import upload
from tests.support.hub import Hub
from tests.support.hub_client import REPO, ROOT, Client
from tests.support.hub_store import Repository

WRITES = r"^(POST|PUT|DELETE) (?!.*paths-info)"


@pytest.fixture
def maintainer(empty_hub: Hub, tmp_path: Path) -> Client:
    return Client(empty_hub, tmp_path / "maintainer")


def state(hub: Hub) -> dict[str, dict[str, str]]:
    return {name: dict(repository.branches) for name, repository in hub.store.repositories.items()}


def published_files(repository: Repository, branch: str) -> set[str]:
    return set(repository.resolve(branch).files)


def build_files(folder: Path) -> set[str]:
    return {f"build/{path.relative_to(folder).as_posix()}" for path in folder.rglob("*") if path.is_file()}


def small_build(folder: Path, text: str, variants: tuple[str, ...] = ("torch-cpu", "torch-cuda")) -> Path:
    """Variants with the fewest files that an uploader looks at."""
    for variant in variants:
        target = folder / variant
        target.mkdir(parents=True, exist_ok=True)
        (target / "__init__.py").write_text(f'"""{text}"""\n\n__all__ = ["layers"]\n')
        (target / "layers.py").write_text(f'"""{text}"""\n\n\nclass Layer:\n    pass\n')
        (target / "library.abi3.so").write_bytes(b"\0" + text.encode() * 1000)
        digest = Digest.hash_variant(DigestAlgorithm.SHA256, target)
        metadata = {
            "id": f"_layout_kernels_cpu_{text}",
            "name": "layout-kernels",
            "version": 1,
            "license": "Apache-2.0",
            "python-depends": [],
            "backend": {"type": "cpu"},
            "digest": {"algorithm": "sha256", "files": dict(sorted(digest.files.items()))},
        }
        (target / "metadata.json").write_text(json.dumps(metadata))
    return folder


def test_a_publication_is_branches_tags_card_and_every_file(published: Hub, builds: dict[int, Path]) -> None:
    repository = published.store.repository(REPO)
    assert set(repository.branches) == {"main", "v1", "v2"}
    for version, folder in builds.items():
        commit = repository.resolve(f"v{version}")
        for path in (path for path in folder.rglob("*") if path.is_file()):
            name = f"build/{path.relative_to(folder).as_posix()}"
            assert published.store.read(commit.files[name]) == path.read_bytes()
        assert not any("__pycache__" in name for name in commit.files)
        assert [tag for tag, oid in repository.tags.items() if oid == commit.oid and tag.startswith(f"v{version}-")]
    card = repository.resolve("main").files["README.md"]
    assert published.store.read(card) == (ROOT / "CARD.md").read_bytes()
    assert "README.md" not in published_files(repository, "v1")
    # A binary file goes the way of large files, as on the real Hub.
    assert [name for name, file in repository.resolve("v1").files.items() if file.sha256 and name.endswith(".so")]


def test_a_second_run_uploads_nothing_and_a_dry_run_writes_nothing(maintainer: Client, tmp_path: Path) -> None:
    hub, folder = maintainer.hub, small_build(tmp_path / "build", "one")
    dry = upload(maintainer, folder, 1, "--dry-run")
    assert dry.returncode == 0, dry.stderr
    assert "add build/torch-cuda/layers.py" in dry.stdout
    assert "branch v1 is new: " in dry.stdout
    assert "CARD.md" in dry.stdout
    assert hub.count(WRITES) == 0
    assert hub.store.repositories == {}

    assert upload(maintainer, folder, 1).returncode == 0
    before, written = state(hub), hub.count(WRITES)
    assert written > 0
    again = upload(maintainer, folder, 1)
    assert again.returncode == 0, again.stderr
    assert "branch v1 is there: nothing to upload" in again.stdout
    assert state(hub) == before
    assert hub.count(WRITES) == written


def test_a_new_build_replaces_what_changed_in_one_commit(maintainer: Client, tmp_path: Path) -> None:
    folder = small_build(tmp_path / "build", "one")
    assert upload(maintainer, folder, 1).returncode == 0
    repository = maintainer.hub.store.repository(REPO)
    first = repository.resolve("v1")
    shutil.rmtree(folder / "torch-cuda")
    small_build(folder, "two", ("torch-cpu",))
    result = upload(maintainer, folder, 1)
    assert result.returncode == 0, result.stderr
    assert "remove build/torch-cuda/layers.py" in result.stdout
    second = repository.resolve("v1")
    assert second.parent == first.oid
    assert {name.split("/")[1] for name in second.files if name.startswith("build/")} == {"torch-cpu"}
    assert maintainer.hub.store.read(second.files["build/torch-cpu/library.abi3.so"]).startswith(b"\0two")
    assert {first.oid, second.oid} <= set(repository.tags.values())


@pytest.mark.parametrize("broken", [r"POST .*/commit/", r"PUT /lfs/", r"POST .*/preupload/", r"POST .*/branch/"])
def test_a_failure_in_the_middle_leaves_no_half_version_and_a_retry_completes(
    broken: str, maintainer: Client, tmp_path: Path
) -> None:
    hub, folder = maintainer.hub, small_build(tmp_path / "build", "one")
    hub.fail(broken, "status", status=400, times=99)
    result = upload(maintainer, folder, 1)
    assert result.returncode == 1
    assert result.stderr.startswith("publish: "), result.stderr
    assert "Traceback" not in result.stderr
    assert "v1" not in hub.store.repository(REPO).branches
    hub.faults.clear()
    retry = upload(maintainer, folder, 1)
    assert retry.returncode == 0, retry.stderr
    assert set(hub.store.repository(REPO).branches) == {"main", "v1"}


def test_a_failed_update_leaves_the_published_branch_as_it_was(maintainer: Client, tmp_path: Path) -> None:
    hub, folder = maintainer.hub, small_build(tmp_path / "build", "one")
    assert upload(maintainer, folder, 1).returncode == 0
    before = state(hub)
    small_build(folder, "two")
    hub.fail(r"POST .*/commit/v1", "status", status=400, times=99)
    assert upload(maintainer, folder, 1).returncode == 1
    assert state(hub) == before


def test_a_publication_meanwhile_is_noticed(maintainer: Client, tmp_path: Path) -> None:
    hub, folder = maintainer.hub, small_build(tmp_path / "build", "one")
    assert upload(maintainer, folder, 1).returncode == 0
    small_build(folder, "two")
    hub.fail(r"POST .*/commit/v1", "status", status=412)
    result = upload(maintainer, folder, 1)
    assert result.returncode == 1
    assert "somebody else published meanwhile" in result.stderr


@pytest.mark.parametrize("late", [r"POST .*/branch/publishing-", r"POST .*/commit/publishing-", r"POST .*/branch/v1$"])
def test_of_two_first_publications_at_once_one_wins_whole_and_the_other_is_told(
    late: str, empty_hub: Hub, tmp_path: Path
) -> None:
    """The slower one is stopped at each of its steps while the faster one does all of its own."""
    hub = empty_hub
    slow, fast = (Client(hub, tmp_path / name) for name in ("slow", "fast"))
    slow_build = small_build(tmp_path / "one", "one", ("torch-cpu", "torch-cuda"))
    fast_build = small_build(tmp_path / "two", "two", ("torch-cpu", "torch-npu"))
    hub.fail(late, "delay", seconds=120)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(upload, slow, slow_build, 1)
        while hub.faults.happened == 0:
            assert not waiting.done(), waiting.result()
            time.sleep(0.05)
        won = upload(fast, fast_build, 1)
        hub.faults.stopped.set()
        lost = waiting.result()
    assert won.returncode == 0, won.stderr
    assert lost.returncode == 1, lost.stdout
    assert "somebody else created v1" in lost.stderr
    assert "run it again" in lost.stderr
    repository = hub.store.repository(REPO)
    assert set(repository.branches) == {"main", "v1"}
    assert {name for name in published_files(repository, "v1") if name.startswith("build/")} == build_files(fast_build)
    again = upload(slow, slow_build, 1)
    assert again.returncode == 0, again.stderr
    assert "build/torch-npu/layers.py" not in published_files(repository, "v1")


def test_two_first_publications_that_commit_at_the_same_moment_give_the_files_of_one(
    empty_hub: Hub, tmp_path: Path
) -> None:
    texts = {"one": ("torch-cpu", "torch-cuda"), "two": ("torch-cpu", "torch-npu")}
    builds = [small_build(tmp_path / text, text, variants) for text, variants in texts.items()]
    empty_hub.fail(r"POST .*/commit/publishing-", "delay", seconds=120, times=2)
    with ThreadPoolExecutor(2) as pool:
        running = [pool.submit(upload, Client(empty_hub, tmp_path / f"home{i}"), builds[i], 1) for i in (0, 1)]
        while empty_hub.faults.happened < 2:
            assert not any(future.done() for future in running), [future.result() for future in running]
            time.sleep(0.05)
        empty_hub.faults.stopped.set()
        codes = [future.result().returncode for future in running]
    assert sorted(codes) == [0, 1]
    winner = builds[codes.index(0)]
    files = empty_hub.store.repository(REPO).resolve("v1").files
    assert {name for name in files if name.startswith("build/")} == build_files(winner)
    assert empty_hub.store.read(files["build/torch-cpu/layers.py"]) == (winner / "torch-cpu/layers.py").read_bytes()


def test_a_staging_branch_that_a_killed_run_left_goes_with_the_next_publication(
    maintainer: Client, tmp_path: Path
) -> None:
    folder = small_build(tmp_path / "build", "one")
    repository = maintainer.hub.store.create(REPO)
    repository.branches["publishing-v1-0123456789ab"] = repository.branches["main"]
    repository.branches["publishing-v2-0123456789ab"] = repository.branches["main"]
    assert upload(maintainer, folder, 1).returncode == 0
    assert set(repository.branches) == {"main", "v1", "publishing-v2-0123456789ab"}, "another version is not ours"


def test_a_name_that_users_have_cannot_leave_a_version(maintainer: Client, tmp_path: Path) -> None:
    folder = small_build(tmp_path / "build", "one")
    assert upload(maintainer, folder, 1).returncode == 0
    before = state(maintainer.hub)
    layers = folder / "torch-cpu" / "layers.py"
    layers.write_text(layers.read_text().replace("class Layer", "class Other"))
    result = upload(maintainer, folder, 1)
    assert result.returncode == 1
    assert "layers.Layer" in result.stderr
    assert state(maintainer.hub) == before


def test_a_token_is_never_printed_and_a_wrong_one_is_said(maintainer: Client, tmp_path: Path) -> None:
    folder = small_build(tmp_path / "build", "one")
    result = upload(maintainer, folder, 1)
    assert maintainer.hub.token not in result.stdout + result.stderr
    wrong = "hf_thisisthewrongtoken"
    small_build(folder, "two")
    command = (sys.executable, "-m", "tests.support.publish_prebuilt", str(folder), "1")
    refused = maintainer.run(*command, HF_TOKEN=wrong)
    assert refused.returncode == 1
    assert "log in with `hf auth login`" in refused.stderr
    assert wrong not in refused.stdout + refused.stderr


def test_a_token_in_an_error_is_blotted_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tools import publish

    monkeypatch.setattr(publish, "get_token", lambda: "hf_secret")

    def work() -> None:
        raise ValueError("https://user:hf_secret@hub")

    assert publish.guarded(work) == 1
    assert capsys.readouterr().err == "publish: https://user:<token>@hub\n"


def test_the_command_refuses_what_is_no_repository() -> None:
    command = [sys.executable, "-m", "tools.publish", "no-owner", "--dry-run"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert "owner/name" in result.stderr
