"""The unmodified `kernels` command and library against what was published."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
from kernels._rust import Digest, DigestAlgorithm, Metadata

from tests.support.hub import Hub
from tests.support.hub_client import REPO, ROOT, Client

EXAMPLE = ROOT / "examples" / "locked-app"
NATIVE = "torch-stable-abi210-cpu"


def native(folder: Path) -> Path:
    """The compiled variant of this machine."""
    (found,) = folder.glob(f"{NATIVE}-*")
    return found


def identifier(folder: Path) -> str:
    return Metadata.read_from_file(native(folder) / "metadata.json").id


def assert_whole(variant: Path) -> None:
    """The downloaded files are those of the digest."""
    recorded = Metadata.read_from_file(variant / "metadata.json").digest
    assert recorded is not None
    recorded.validate(Digest.hash_variant(DigestAlgorithm.SHA256, variant))


def test_versions_and_info_describe_what_is_published(client: Client) -> None:
    versions = client.kernels("versions", REPO)
    assert versions.returncode == 0, versions.stderr
    one, _, two = versions.stdout.partition("Version 2:")
    for part in (one, two):
        assert f"{NATIVE}-" in part
        assert "compatible, preferred" in part
        assert "torch-cpu" in part
    info = client.kernels("info", REPO, "--version", "1", "--json")
    assert info.returncode == 0, info.stderr
    described = json.loads(info.stdout)
    assert (described["revision"], described["version"], described["license"]) == ("v1", 1, "Apache-2.0")
    assert described["backends"] == ["cpu", "cuda", "npu"]


LOOK = """
import json, sys, logging
import kernels
repo = sys.argv[1]
kernel = kernels.get_kernel(repo, version=1, trust_remote_code=True)
try:
    kernels.get_kernel(repo, version=9, trust_remote_code=True)
except ValueError as error:
    missing = str(error)
import torch
out = kernel.rms_norm(torch.full((2, 4), 3.0), torch.ones(4))
print(json.dumps({
    "id": kernel.__name__, "file": kernel.__file__, "missing": missing, "out": out.flatten().tolist(),
    "layer": kernel.layers.CustomRMSNorm.__module__,
    "has": [kernels.has_kernel(repo, version=v, trust_remote_code=True) for v in (1, 2)],
    "variants": [d.variant.variant_str for d in kernels.get_kernel_variants(repo, version=1)
                 if isinstance(d, kernels.VariantAccepted)],
}))
"""


def test_get_kernel_loads_the_best_variant_of_a_version_and_names_the_versions_there_are(
    client: Client, builds: dict[int, Path]
) -> None:
    found = client.python(LOOK, REPO)
    assert found["id"] == identifier(builds[1])
    assert found["layer"] == f"{found['id']}.layers"
    # 3 / rms(3) is 1 but for epsilon: 1e-6 beside 9.
    assert found["out"] == pytest.approx([1.0] * 8, abs=1e-6)
    assert found["has"] == [True, True]
    assert found["variants"] == [native(builds[1]).name, "torch-cpu"]
    assert "available versions: 1, 2" in found["missing"]
    assert str(client.cache) in found["file"]
    assert_whole(Path(found["file"]).parent)


def test_an_untrusted_publisher_is_refused_until_the_user_says_so(client: Client, published: Hub) -> None:
    code = """
import json, sys, kernels
replies = []
for trust in (False, ["someone/else"], [sys.argv[1]]):
    try:
        replies.append(kernels.get_kernel(sys.argv[1], version=1, trust_remote_code=trust).__name__)
    except ValueError as error:
        replies.append(str(error))
print(json.dumps(replies))
"""
    published.trusted.clear()
    try:
        refused, other, loaded = client.python(code, REPO)
        lock = client.kernels("lock", str(EXAMPLE))
    finally:
        published.trusted.add(REPO.split("/")[0])
    assert "not from a trusted publisher" in refused
    assert "not from a trusted publisher" in other
    assert loaded.startswith("_layout_kernels_cpu_")
    assert lock.returncode != 0
    assert "not from a trusted publisher" in lock.stderr


SIDE_BY_SIDE = """
import json, sys, torch, kernels
sys.path.insert(0, sys.argv[2])
import layout_kernels
copies = [kernels.get_kernel(sys.argv[1], version=v, trust_remote_code=True) for v in (1, 2)] + [layout_kernels]
x, weight = torch.randn(3, 8), torch.randn(8, requires_grad=True)
outputs = [copy.rms_norm(x, weight) for copy in copies]
print(json.dumps({"names": [copy.__name__ for copy in copies],
                  "layers": len({id(copy.layers.CustomRMSNorm) for copy in copies}),
                  "spaces": [sys.modules[copy.__name__ + "._ops"].NAMESPACE for copy in copies],
                  "error": max((output - outputs[0]).abs().max().item() for output in outputs)}))
"""


def test_two_versions_from_the_hub_and_the_source_tree_live_in_one_process(
    client: Client, builds: dict[int, Path]
) -> None:
    found = client.python(SIDE_BY_SIDE, REPO, str(ROOT / "torch-ext"))
    ids = [identifier(builds[version]) for version in (1, 2)]
    assert found["names"] == [*ids, "layout_kernels"]
    assert found["spaces"] == [*ids, "_layout_kernels_source"]
    assert found["layers"] == 3
    # Three float32 roundings of values near 1; the source tree may run the reference beside native code.
    assert found["error"] < 1e-5


APP = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import locked_app
kernel = locked_app.load()
import kernels
try:
    kernels.load_kernel("someone/else", lockfile=locked_app.LOCKFILE)
except ValueError as error:
    unknown = str(error)
layer = kernels.LockedLayerRepository(locked_app.REPOSITORY, lockfile=locked_app.LOCKFILE, layer_name="CustomRMSNorm",
                                      trust_remote_code=True)
print(json.dumps({"id": kernel.__name__, "locked": kernels.get_locked_kernel(
    locked_app.REPOSITORY, lockfile=locked_app.LOCKFILE, trust_remote_code=True).__name__,
    "layer": layer.load().__module__, "unknown": unknown, "config": locked_app.options(),
    "same": locked_app.run() < 1e-5}))
"""


def test_the_example_locks_downloads_and_runs_offline_at_the_locked_commit(
    client: Client, builds: dict[int, Path], tmp_path: Path, published: Hub
) -> None:
    project = Path(shutil.copytree(EXAMPLE, tmp_path / "app"))
    written = (project / "kernels.lock").read_text()
    (project / "kernels.lock").unlink()
    nothing = client.kernels("download", str(project))
    assert nothing.returncode == 1
    assert "No kernels.lock" in nothing.stderr

    lock = client.kernels("lock", str(project))
    assert lock.returncode == 0, lock.stderr
    commit = published.store.repository(REPO).resolve("v1").oid
    fresh = json.loads((project / "kernels.lock").read_text())
    assert commit in json.dumps(fresh)
    # The file in the repository has the same form: only the commit is another.
    assert json.dumps(json.loads(written)).replace(locked_commit(written), commit) == json.dumps(fresh)

    download = client.kernels("download", str(project))
    assert download.returncode == 0, download.stderr
    (variant,) = (client.cache / "snapshots" / commit / "build").glob(f"{NATIVE}-*")
    assert_whole(variant)
    whole = client.run(sys.executable, str(project / "locked_app.py"), "download")
    assert whole.returncode == 0, whole.stderr
    for variant in (client.cache / "snapshots" / commit / "build").iterdir():
        assert_whole(variant)
    found = client.python(APP, str(project), offline=True)
    assert found["id"] == found["locked"] == identifier(builds[1])
    assert found["layer"] == f"{found['id']}.layers"
    assert "not locked" in found["unknown"]
    assert found["config"] == {"revision": commit, "trust_remote_code": True}
    assert found["same"]


def locked_commit(text: str) -> str:
    """The one commit that a lock file holds."""
    import re

    (commit,) = set(re.findall(r"\b[0-9a-f]{40}\b", text))
    return commit
