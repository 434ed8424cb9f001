"""Verification of downloads: damage is found from the digest, a signature goes to `kernels`' own verifier."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import kernels.verify
import pytest
import sigstore.models
from kernels._rust import Digest, DigestAlgorithm
from sigstore.errors import VerificationError
from sigstore.verify.policy import Identity

import layout_kernels
from tests.support.hub_client import ROOT
from tools.build_variants import build


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("verify")
    build(folder, backends=["cuda", "cann"])
    return folder


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "build"))


def test_a_build_is_as_published_and_unsigned(folder: Path) -> None:
    found = layout_kernels.verify(folder)
    assert found.valid
    assert [(v.variant, v.signed, v.problems) for v in found.variants] == [
        ("torch-cuda", False, ()),
        ("torch-npu", False, ()),
    ]
    assert layout_kernels.verify(folder.parent).valid, "the folder above build/ means the same"


@pytest.mark.parametrize("damage", ["changed", "missing", "added"])
def test_every_damage_is_named_with_its_file_and_variant(damage: str, folder: Path) -> None:
    file = folder / "torch-npu" / "ops" / "rms_norm" / "reference.py"
    if damage == "changed":
        file.write_text(file.read_text() + "\n")
    elif damage == "missing":
        file.unlink()
    else:
        file = file.with_name("extra.py")
        file.write_text("")
    found = layout_kernels.verify(folder)
    assert not found.valid
    cuda, npu = found.variants
    assert cuda.problems == ()
    assert len(npu.problems) == 1
    assert f"ops/rms_norm/{file.name}" in npu.problems[0]


def test_metadata_that_is_broken_or_has_no_digest_is_a_problem(folder: Path) -> None:
    metadata = folder / "torch-cuda" / "metadata.json"
    table = json.loads(metadata.read_text())
    del table["digest"]
    metadata.write_text(json.dumps(table))
    (folder / "torch-npu" / "metadata.json").write_text("{")
    cuda, npu = layout_kernels.verify(folder).variants
    assert cuda.problems == ("metadata.json has no digest to compare with",)
    assert npu.problems[0].startswith("metadata.json cannot be read")


def test_a_signature_can_be_required(folder: Path) -> None:
    found = layout_kernels.verify(folder, require_signature=True)
    assert not found.valid
    assert "a signature was asked for" in str(found)


def test_a_policy_from_python_requires_a_signature(folder: Path) -> None:
    """Without one anybody could change a file and write the digest that agrees with it."""
    variant = folder / "torch-cuda"
    (variant / "layers.py").write_text("")
    table = json.loads((variant / "metadata.json").read_text())
    table["digest"]["files"] = Digest.hash_variant(DigestAlgorithm.SHA256, variant).files
    (variant / "metadata.json").write_text(json.dumps(table))
    assert layout_kernels.verify(variant).valid, "the digest alone cannot know"
    policy = Identity(identity="right@example.org", issuer="https://accounts.example.org")
    for policies in ([policy], []):
        (found,) = layout_kernels.verify(variant, policies=policies).variants
        assert found.problems == ("metadata.json.sigstore is absent, and a signature was asked for",)


def test_a_bundle_that_is_none_is_refused_by_the_verifier_of_kernels(folder: Path) -> None:
    (folder / "torch-cuda" / "metadata.json.sigstore").write_text("{}")
    cuda, npu = layout_kernels.verify(folder).variants
    assert cuda.signed
    assert "SignatureBundleInvalid" in cuda.problems[-1]
    assert npu.problems == ()


class FakeVerifier:
    """Sigstore's verifier without its trust root, which comes over the network; it knows one signer."""

    seen: Any = None

    def verify_artifact(self, data: bytes, bundle: Any, policy: Any) -> None:
        FakeVerifier.seen = (data, policy)
        if "right@example.org" not in repr([vars(inner) for inner in policy._children]):
            raise VerificationError("Certificate's SANs do not match")


def test_the_users_policy_reaches_the_verifier_and_decides(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sigstore.models.Bundle, "from_json", staticmethod(lambda raw: object()))
    monkeypatch.setattr(kernels.verify.Verifier, "production", staticmethod(FakeVerifier))
    variant = folder / "torch-cuda"
    (variant / "metadata.json.sigstore").write_text("{}")

    def verified(identity: str) -> layout_kernels.verification.Verification:
        policy = Identity(identity=identity, issuer="https://accounts.example.org")
        return layout_kernels.verify(variant, policies=[policy], require_signature=True)

    assert verified("right@example.org").valid
    assert FakeVerifier.seen[0] == (variant / "metadata.json").read_bytes()
    refused = verified("wrong@example.org")
    assert "SANs do not match" in str(refused)
    (variant / "layers.py").write_text("")
    assert not verified("right@example.org").valid


def test_a_trust_root_that_cannot_be_reached_is_no_success(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable() -> None:
        raise ConnectionError("no network")

    monkeypatch.setattr(sigstore.models.Bundle, "from_json", staticmethod(lambda raw: object()))
    monkeypatch.setattr(kernels.verify.Verifier, "production", staticmethod(unreachable))
    (folder / "torch-cuda" / "metadata.json.sigstore").write_text("{}")
    found = layout_kernels.verify(folder)
    assert not found.valid
    assert "could not be checked" in str(found)


def test_what_is_not_there_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERNELS_CACHE", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="hf download nobody/nothing --type kernel --revision v1"):
        layout_kernels.verify("nobody/nothing", "v1")
    with pytest.raises(ValueError, match="which revision"):
        layout_kernels.verify("nobody/nothing")
    with pytest.raises(FileNotFoundError, match="holds no variant"):
        layout_kernels.verify(tmp_path)


def test_a_revision_names_a_repository_also_where_a_folder_has_its_name(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(folder, tmp_path / "nobody" / "nothing" / "build")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KERNELS_CACHE", str(tmp_path / "cache"))
    with pytest.raises(FileNotFoundError, match="revision v1 of nobody/nothing is not in the cache"):
        layout_kernels.verify("nobody/nothing", "v1")
    assert layout_kernels.verify("nobody/nothing").folder == Path("nobody/nothing/build")


def test_a_folder_with_a_revision_is_refused(folder: Path) -> None:
    for named in (folder, str(folder), "./build", "build"):
        with pytest.raises(ValueError, match=r"only a repository has one.*leave the revision out"):
            layout_kernels.verify(named, "v1")


def test_a_file_that_cannot_be_read_is_named_with_the_reason(folder: Path) -> None:
    """A snapshot of the cache holds links to blobs, and a blob may be gone."""
    variant = folder / "torch-npu"
    for name in ("layers.py", "metadata.json"):
        (variant / name).unlink()
        (variant / name).symlink_to(f"../../blobs/{name}")
    os.mkfifo(variant / "pipe.py")
    found = layout_kernels.verify(folder)
    assert found.variants[1].problems == (
        "layers.py cannot be read: it leads to ../../blobs/layers.py, which is missing",
        "metadata.json cannot be read: it leads to ../../blobs/metadata.json, which is missing",
        "pipe.py cannot be read: it is neither a file nor a folder",
    )
    assert found.variants[0].problems == ()
    assert "--force-download" in str(found)


def test_metadata_that_is_missing_is_said(folder: Path) -> None:
    (folder / "torch-npu" / "metadata.json").unlink()
    assert layout_kernels.verify(folder).variants[1].problems == (
        "metadata.json is missing, so there is no digest to compare with",
    )


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "layout_kernels", "verify", *arguments]
    environment = {"PATH": "", "HF_HUB_OFFLINE": "1", "HOME": "/nonexistent"}
    return subprocess.run(words, cwd=ROOT / "torch-ext", capture_output=True, text=True, check=False, env=environment)


def test_the_command_says_what_it_found_in_its_exit_status(folder: Path) -> None:
    good = command(str(folder))
    assert (good.returncode, "as published" in good.stdout) == (0, True), good.stderr
    (folder / "torch-npu" / "layers.py").write_text("")
    bad = command(str(folder))
    assert bad.returncode == 1
    assert "layers.py" in bad.stdout
    assert command("nobody/nothing", "--revision", "v1").returncode == 2
    assert "give both" in command(str(folder), "--identity", "me@example.org").stderr
