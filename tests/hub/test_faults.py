"""What breaks on the way: each fault ends in a clear error or a recovery, and a retry succeeds with whole files."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kernels._rust import Digest, DigestAlgorithm, DigestValidationError, Metadata

from tests.hub.conftest import upload
from tests.support.hub import Hub
from tests.support.hub_client import REPO, ROOT, Client, Session

INSTALL = f"import kernels; answer = str(kernels.install_kernel({REPO!r}, version=1, trust_remote_code=True))"
FILE = r"GET /kernels/.*/resolve/.*/layers\.py"
LIBRARY = r"GET /kernels/.*/resolve/.*\.abi3\.so"


@pytest.fixture(scope="module")
def user(published: Hub, tmp_path_factory: pytest.TempPathFactory) -> Client:
    return Client(published, tmp_path_factory.mktemp("faults"))


@pytest.fixture(scope="module")
def running(user: Client) -> Iterator[Session]:
    """One process for all faults; it gives up on a silent server after a second where it has such a limit."""
    with user.session(HF_HUB_DOWNLOAD_TIMEOUT="1", HF_HUB_ETAG_TIMEOUT="1") as session:
        yield session


@pytest.fixture
def session(running: Session, user: Client) -> Iterator[Session]:
    """The process, with an empty cache and a Hub without faults."""
    shutil.rmtree(user.home / "hf", ignore_errors=True)
    user.hub.faults.clear()
    yield running
    user.hub.faults.clear()


def assert_installed(reply: dict[str, Any]) -> Path:
    """The reply names a variant whose files are those of its digest."""
    assert "error" not in reply, reply
    variant = Path(reply["answer"])
    recorded = Metadata.read_from_file(variant / "metadata.json").digest
    assert recorded is not None
    recorded.validate(Digest.hash_variant(DigestAlgorithm.SHA256, variant))
    return variant


def assert_retry_succeeds(session: Session, user: Client) -> None:
    user.hub.faults.clear()
    assert_installed(session.ask(INSTALL))


def test_a_connection_that_is_cut_in_the_middle_of_a_file_is_taken_up_where_it_broke(
    session: Session, user: Client
) -> None:
    user.hub.fail(LIBRARY, "cut", after=100_000)
    user.hub.fail(FILE, "cut", after=1_000, times=2)
    assert_installed(session.ask(INSTALL))
    assert user.hub.faults.happened == 3


def test_a_connection_that_is_cut_every_time_is_an_error_and_a_retry_succeeds(session: Session, user: Client) -> None:
    user.hub.fail(FILE, "cut", after=0, times=99)
    reply = session.ask(INSTALL)
    assert reply.get("error") == "RemoteProtocolError", reply
    assert_retry_succeeds(session, user)


@pytest.mark.parametrize(
    "request_", [r"GET .*/refs", FILE, r"GET .*metadata\.json"], ids=["refs", "a file", "metadata"]
)
def test_a_server_error_that_is_not_retried_is_said_and_a_retry_succeeds(
    request_: str, session: Session, user: Client
) -> None:
    user.hub.fail(request_, "status", status=500)
    reply = session.ask(INSTALL)
    assert reply.get("error") == "HfHubHTTPError", reply
    assert "500" in reply["message"]
    assert_retry_succeeds(session, user)


def test_server_errors_on_the_listing_and_too_many_requests_are_waited_for(session: Session, user: Client) -> None:
    user.hub.fail(r"GET .*/tree/", "status", status=503)
    user.hub.fail(FILE, "status", status=429, retry_after=1)
    user.hub.fail(r"HEAD .*/resolve/.*converter\.py", "status", status=429, retry_after=1)
    assert_installed(session.ask(INSTALL))
    assert user.hub.faults.happened == 3


def test_a_slow_server_only_takes_time_and_a_silent_one_is_asked_again(session: Session, user: Client) -> None:
    user.hub.fail(r"GET .*/tree/", "delay", seconds=1.5)
    user.hub.fail(r"HEAD .*/resolve/.*\.abi3\.so", "delay", seconds=0.5)
    # Half of the file, then nothing: the client's own limit ends the wait, and the rest is asked for.
    user.hub.fail(LIBRARY, "stall", after=200_000, seconds=20)
    begin = time.monotonic()
    assert_installed(session.ask(INSTALL))
    assert user.hub.faults.happened == 3
    assert time.monotonic() - begin < 18, "the client waited for the silent server to close"


def test_a_process_that_is_killed_in_the_middle_of_a_download_leaves_a_cache_that_the_next_one_completes(
    session: Session, user: Client
) -> None:
    user.hub.fail(LIBRARY, "stall", after=200_000, seconds=60)
    with user.session() as killed:
        killed.send(INSTALL)
        wait_until(lambda: user.hub.faults.happened == 1 and any(user.cache.rglob("*.incomplete")))
        killed.process.kill()
        killed.process.wait()
    assert any(user.cache.rglob("*.incomplete"))
    assert_retry_succeeds(session, user)


def wait_until(condition: Any, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the download did not begin"
        time.sleep(0.05)


VERIFY = f"""
import kernels
k = kernels.get_kernel({REPO!r}, version=1, trust_remote_code=True)
found = k.verify({REPO!r}, "v1")
answer = dict(valid=found.valid, text=str(found))
"""

VERIFY_UNLOADED = f"""
import sys
sys.path.insert(0, {str(ROOT / "torch-ext")!r})
import layout_kernels
answer = str(layout_kernels.verify({REPO!r}, "v1"))
"""


def test_a_file_that_was_changed_after_publishing_is_loaded_but_found_by_verify_and_mended(
    session: Session, user: Client
) -> None:
    repository = user.hub.store.repository(REPO)
    commit = repository.resolve("v1")
    (path,) = [name for name in commit.files if "stable-abi" in name and name.endswith("/plugin.py")]
    original = commit.files[path]
    data = user.hub.store.read(original)
    user.hub.store.change(REPO, "v1", path, data[:-1] + b" ")
    try:
        reply = session.ask(VERIFY)
    finally:
        commit.files[path] = original
    assert reply.get("answer", {}).get("valid") is False, reply
    assert "plugin.py" in reply["answer"]["text"]
    assert "changed or damaged" in reply["answer"]["text"]
    with pytest.raises(DigestValidationError):
        assert_installed(session.ask(INSTALL))
    mend = user.hf("download", REPO, "--type", "kernel", "--revision", "v1", "--force-download")
    assert mend.returncode == 0, mend.stderr
    assert session.ask(VERIFY)["answer"]["valid"] is True


def test_a_blob_that_is_missing_from_the_cache_is_named_and_mended(session: Session, user: Client) -> None:
    variant = assert_installed(session.ask(INSTALL))
    for name in ("plugin.py", "metadata.json"):
        (variant / name).resolve().unlink()
    text = session.ask(VERIFY_UNLOADED)["answer"]
    assert "plugin.py cannot be read: it leads to ../../../../blobs/" in text
    assert "metadata.json cannot be read: it leads to " in text
    assert "hf download REPOSITORY --type kernel --revision ... --force-download" in text
    mend = user.hf("download", REPO, "--type", "kernel", "--revision", "v1", "--force-download")
    assert mend.returncode == 0, mend.stderr
    assert "as published" in session.ask(VERIFY_UNLOADED)["answer"]


def test_a_file_that_a_proxy_shortens_is_refused(session: Session, user: Client) -> None:
    user.hub.fail(LIBRARY, "short", after=1000)
    reply = session.ask(INSTALL)
    assert reply.get("error") == "OSError", reply
    assert "Consistency check failed" in reply["message"]
    assert_retry_succeeds(session, user)


def test_a_missing_version_names_those_there_are(session: Session) -> None:
    reply = session.ask(INSTALL.replace("version=1", "version=7"))
    assert reply.get("error") == "ValueError"
    assert "available versions: 1, 2" in reply["message"]
    reply = session.ask(INSTALL.replace("version=1", "revision='v7'"))
    assert reply.get("error") in ("RevisionNotFoundError", "HfHubHTTPError", "FileNotFoundError"), reply


def test_a_missing_variant_is_said_with_what_is_there(empty_hub: Hub, builds: dict[int, Path], tmp_path: Path) -> None:
    only = tmp_path / "only"
    shutil.copytree(builds[1] / "torch-cuda", only / "torch-cuda")
    assert upload(Client(empty_hub, tmp_path / "maintainer"), only, 1).returncode == 0
    client = Client(empty_hub, tmp_path / "user")
    with client.session() as session:
        reply = session.ask(INSTALL)
        assert reply.get("error") == "FileNotFoundError", reply
        assert "Cannot find a build variant for this system" in reply["message"]
        assert "torch-cuda" in reply["message"]
        shutil.copytree(builds[1] / "torch-cpu", only / "torch-cpu")
        assert upload(Client(empty_hub, tmp_path / "maintainer"), only, 1).returncode == 0
        assert_installed(session.ask(INSTALL))


def test_a_full_disk_is_an_error_and_the_cache_stays_usable(session: Session, user: Client) -> None:
    """The compiled file does not fit on the disk of the cache, then it does."""
    result = on_a_disk_of(user, kilobytes=1_500)
    assert result.returncode != 0
    assert "No space left on device" in result.stderr or "File too large" in result.stderr, result.stderr
    assert_retry_succeeds(session, user)


def on_a_disk_of(user: Client, kilobytes: int) -> subprocess.CompletedProcess[str]:
    """Install with so much room for the cache: on a file system of that size, or where this user may not mount one,
    with that limit for each file, which ends in the same place of the client.
    """
    cache = user.home / "hf"
    cache.mkdir(parents=True, exist_ok=True)
    may_mount = subprocess.run(["unshare", "-rm", "true"], capture_output=True, check=False).returncode == 0
    install = [sys.executable, "-c", f"{INSTALL}; print(answer)"]
    if may_mount:
        mount = f'mount -t tmpfs -o size={kilobytes}k none "$HF_HOME" && exec "$@"'
        return user.run("unshare", "-rm", "sh", "-c", mount, "sh", *install)
    limit = f'ulimit -f {kilobytes}; exec "$@"'
    return user.run("bash", "-c", limit, "bash", *install)
