"""The Hub of these tests itself, where a client would hide a mistake of it."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

import pytest

from tests.support.hub import Hub
from tests.support.hub_client import REPO


def ask(url: str, data: bytes | None = None, **headers: str) -> tuple[int, dict[str, str], bytes]:
    request = urllib.request.Request(url, data, {name.replace("_", "-"): value for name, value in headers.items()})
    try:
        with urllib.request.urlopen(request) as response:
            return response.status, dict(response.headers), response.read()
    except urllib.error.HTTPError as error:
        return error.code, dict(error.headers), error.read()


def test_a_range_is_that_part_of_the_file(published: Hub) -> None:
    url = f"{published.url}/kernels/{REPO}/resolve/v1/build/torch-cpu/layers.py"
    status, headers, whole = ask(url)
    assert (status, headers["Content-Length"]) == (200, str(len(whole)))
    for asked, part in (("bytes=10-19", whole[10:20]), ("bytes=100-", whole[100:])):
        status, headers, body = ask(url, Range=asked)
        assert (status, body) == (206, part)
        assert headers["Content-Range"].endswith(f"/{len(whole)}")
    assert ask(url, Range=f"bytes={len(whole)}-")[0] == 416


def test_a_listing_comes_in_pages_that_add_up(published: Hub) -> None:
    rows: list[dict[str, Any]] = []
    link = f"{published.url}/api/kernels/{REPO}/tree/refs%2Fheads%2Fv1/build?recursive=true"
    pages = 0
    while link:
        _, headers, body = ask(link)
        rows += json.loads(body)
        link = headers.get("Link", "").partition(">")[0].lstrip("<")
        pages += 1
    files = published.store.repository(REPO).resolve("v1").files
    assert pages > 1
    assert sorted(row["path"] for row in rows if row["type"] == "file") == sorted(p for p in files if "build/" in p)


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("api/kernels/no/body/refs", "RepoNotFound"),
        (f"api/kernels/{REPO}/tree/v9", "RevisionNotFound"),
        (f"kernels/{REPO}/resolve/v1/nothing.txt", "EntryNotFound"),
    ],
)
def test_what_is_not_there_has_the_error_code_that_clients_read(path: str, code: str, published: Hub) -> None:
    status, headers, _ = ask(f"{published.url}/{path}")
    assert (status, headers["X-Error-Code"]) == (404, code)


def test_writing_needs_the_token(empty_hub: Hub) -> None:
    body = json.dumps({"name": "a", "organization": "b", "type": "kernel"}).encode()
    assert ask(f"{empty_hub.url}/api/repos/create", body)[0] == 401
    assert not empty_hub.store.repositories
    assert ask(f"{empty_hub.url}/api/repos/create", body, Authorization=f"Bearer {empty_hub.token}")[0] == 200
    assert list(empty_hub.store.repositories) == ["b/a"]
