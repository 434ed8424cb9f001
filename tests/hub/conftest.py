"""A Hub on loopback with versions 1 and 2 of the tree under test, and users of it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.hub import Hub
from tests.support.hub_client import REPO, Client
from tools.build_variants import build

Upload = Callable[..., "subprocess.CompletedProcess[str]"]


def upload(client: Client, folder: Path, version: int, *options: str) -> subprocess.CompletedProcess[str]:
    """What a maintainer's machine does after the checks."""
    return client.run(
        *(sys.executable, "-m", "tests.support.publish_prebuilt", str(folder), str(version), *options),
        HF_TOKEN=client.hub.token,
    )


@pytest.fixture(scope="session")
def builds(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Versions 1 and 2, each in a folder of its own."""
    folder = tmp_path_factory.mktemp("hub-builds")
    for version in (1, 2):
        build(folder / f"v{version}", version)
    return {version: folder / f"v{version}" for version in (1, 2)}


@pytest.fixture(scope="session")
def published(builds: dict[int, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    """A Hub that has both versions. Its publisher is trusted; tests leave its files as they are."""
    folder = tmp_path_factory.mktemp("hub")
    with Hub(folder / "data") as hub:
        hub.trusted.add(REPO.split("/")[0])
        for version, built in builds.items():
            result = upload(Client(hub, folder / "maintainer"), built, version)
            assert result.returncode == 0, result.stderr
        yield hub


@pytest.fixture
def client(published: Hub, tmp_path: Path) -> Client:
    """A user with an empty cache."""
    published.faults.clear()
    return Client(published, tmp_path / "user")


@pytest.fixture
def empty_hub(tmp_path: Path) -> Iterator[Hub]:
    """A Hub where nothing is published yet."""
    with Hub(tmp_path / "hub") as hub:
        yield hub
