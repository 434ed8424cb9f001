"""A small Hugging Face Hub on loopback: what the clients of kernel repositories ask for, over real HTTP.

``with Hub(folder) as hub`` listens on a free port; clients reach it through ``HF_ENDPOINT=hub.url``. Writing needs
``hub.token``. ``hub.faults`` breaks chosen answers, ``hub.requests`` lists what was asked, and
``python -m tests.support.hub FOLDER`` serves until it is interrupted.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import threading
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.support.hub_faults import Fault, Faults
from tests.support.hub_store import RefusedError, Repository, Store

JSON = "application/json"


class Hub:
    """The server, with its repositories and its faults.

    Attributes:
        store: repositories; tests read and change them directly.
        faults: see :class:`Fault`.
        requests: "METHOD /path" of every request so far.
        trusted: namespaces whose publisher the Hub calls trusted.
        organizations: namespaces that exist; None: all do.
        page: rows of a tree that one answer carries; the rest is on further pages.
    """

    token = "hf_loopbackloopbackloopback"

    def __init__(self, folder: Path) -> None:
        self.store = Store(folder)
        self.faults = Faults()
        self.requests: list[str] = []
        self.trusted: set[str] = set()
        self.page = 50
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._server.hub = self  # type: ignore[attr-defined]
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Hub:
        # The poll is how long a stop waits.
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.faults.stopped.set()
        self._server.shutdown()
        self._server.server_close()

    def fail(self, request: str, kind: Any, **how: Any) -> None:
        """Add a fault for the requests that match the expression ``request``; see :class:`Fault`."""
        self.faults.add(Fault(request, kind, **how))

    def count(self, request: str) -> int:
        """How many requests so far match a regular expression."""
        return sum(bool(re.search(request, seen)) for seen in self.requests)


class Handler(BaseHTTPRequestHandler):
    """One connection of a client."""

    protocol_version = "HTTP/1.1"
    wbufsize = -1  # an answer leaves in one packet, not one a header

    def log_message(self, *_: object) -> None:
        """The log is ``hub.requests``."""

    @property
    def hub(self) -> Hub:
        return self.server.hub  # type: ignore[attr-defined]

    def _serve(self) -> None:
        parsed = urllib.parse.urlsplit(self.path)
        self.parts = [urllib.parse.unquote(part) for part in parsed.path.strip("/").split("/")]
        self.query = urllib.parse.parse_qs(parsed.query)
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        request = f"{self.command} {urllib.parse.unquote(parsed.path)}"
        self.hub.requests.append(request)
        self.fault = self.hub.faults.take(request)
        try:
            if self.fault is not None and self.fault.kind == "delay":
                self.hub.faults.stopped.wait(self.fault.seconds)
            if self.fault is not None and self.fault.kind == "status":
                raise RefusedError(self.fault.status, "a fault that the test asked for")
            if self.command not in ("GET", "HEAD") and "paths-info" not in self.parts:
                self._require_token()
            self._route()
        except RefusedError as refused:
            self._refuse(refused)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = _serve  # noqa: N815 -- the names that http.server calls

    def _require_token(self) -> None:
        # LFS uploads go to signed addresses, without the token.
        if self.command != "PUT" and self.headers.get("Authorization") != f"Bearer {self.hub.token}":
            raise RefusedError(401, "Invalid username or password.")

    def _refuse(self, refused: RefusedError) -> None:
        headers = {"X-Error-Message": refused.message}
        if refused.code:
            headers["X-Error-Code"] = refused.code
        if self.fault is not None and self.fault.retry_after is not None:
            headers["Retry-After"] = str(self.fault.retry_after)
        body: dict[str, Any] = {"error": refused.message}
        if refused.url:
            body["url"] = refused.url
        self.answer(body, refused.status, headers)

    def answer(self, value: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        """A JSON answer."""
        self.send(json.dumps(value).encode(), status, {"Content-Type": JSON, **(headers or {})})

    def send(self, body: bytes, status: int, headers: dict[str, str]) -> None:
        """An answer, or the part of it that a fault lets through."""
        if self.fault is not None and self.fault.kind == "short":
            body = body[: self.fault.after]
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if self.fault is not None and self.fault.kind in ("cut", "stall"):
            self.wfile.write(body[: self.fault.after])
            self.wfile.flush()
            self.hub.faults.stopped.wait(self.fault.seconds)
            self.close_connection = True
            return
        self.wfile.write(body)

    def _route(self) -> None:
        match self.parts:
            case ["api", "kernels", owner, name, *rest]:
                with self.hub.store.lock:
                    self.answer(*self._kernel(self.hub.store.repository(f"{owner}/{name}"), rest))
            case ["kernels", owner, name, "resolve", revision, *path]:
                self._file(f"{owner}/{name}", revision, "/".join(path))
            case ["kernels", owner, name, "info", "lfs", "objects", "batch"] if name.endswith(".git"):
                objects = self.hub.store.large_files(self._json("objects"), self.hub.url)
                headers = {"Content-Type": "application/vnd.git-lfs+json"}
                self.answer({"transfer": "basic", "objects": objects}, headers=headers)
            case ["lfs", "verify"]:
                self.answer({})
            case ["lfs", sha256]:
                if self.hub.store.keep(self.body) != sha256:
                    raise RefusedError(400, f"the body is not {sha256}")
                self.send(b"", 200, {})
            case ["api", *rest]:
                with self.hub.store.lock:
                    self.answer(self._account(rest))
            case _:
                raise RefusedError(404, f"no such page: {self.path}")

    def _account(self, parts: list[str]) -> Any:
        hub = self.hub
        match parts:
            case ["repos", "create"]:
                name = self._named()
                if name in hub.store.repositories:
                    raise RefusedError(409, "You already created this kernel repo", url=f"{hub.url}/kernels/{name}")
                hub.store.create(name)
                return {"url": f"{hub.url}/kernels/{name}", "name": name}
            case ["repos", "delete"]:
                hub.store.repository(self._named())
                del hub.store.repositories[self._named()]
                return {}
            case ["validate-yaml"]:
                return {"errors": [], "warnings": []}
            case ["organizations", owner, "overview"]:
                return {"name": owner, "fullname": owner, "trustedKernelPublisher": owner in hub.trusted}
            case ["whoami-v2"]:
                return {"type": "user", "name": "tester", "orgs": [], "auth": {"type": "access_token"}}
            case ["agent-harnesses"]:
                return {}
        raise RefusedError(404, f"no such page: {self.path}")

    def _named(self) -> str:
        asked = json.loads(self.body)
        if asked.get("type") != "kernel":
            raise RefusedError(400, f"this Hub has kernel repositories only, asked for {asked.get('type')!r}")
        return f"{asked.get('organization') or 'tester'}/{asked['name']}"

    def _kernel(self, repository: Repository, parts: list[str]) -> tuple[Any, int, dict[str, str]]:
        """Requests below /api/kernels/owner/name: value, status, headers."""
        match parts:
            case [] | ["revision", _]:
                commit = repository.resolve(parts[1] if parts else "main")
                files = [{"rfilename": path} for path in sorted(commit.files)]
                return {"id": repository.name, "sha": commit.oid, "private": False, "siblings": files}, 200, {}
            case ["refs"]:
                return repository.refs(), 200, {}
            case ["commits", revision]:
                return repository.history(revision), 200, {}
            case ["tree", revision, *path]:
                rows = repository.tree(revision, "/".join(path), self.query.get("recursive") in (["true"], ["True"]))
                return self._pages(rows)
            case ["paths-info", revision]:
                wanted = urllib.parse.parse_qs(self.body.decode()).get("paths", [])
                there = repository.resolve(revision).files
                return [there[path].row(path) for path in wanted if path in there], 200, {}
            case ["preupload", revision]:
                return {"files": [repository.upload_mode(revision, row) for row in self._json("files")]}, 200, {}
            case ["commit", branch]:
                return self._commit(repository, branch), 200, {}
            case ["branch", name]:
                return self._ref(repository, repository.branches, name, self._json("startingPoint", "main")), 200, {}
            case ["tag", revision]:
                name = revision if self.command == "DELETE" else self._json("tag")
                return self._ref(repository, repository.tags, name, revision), 200, {}
        raise RefusedError(404, f"no such page: {self.path}")

    def _json(self, key: str, default: Any = None) -> Any:
        return (json.loads(self.body) if self.body else {}).get(key, default)

    def _pages(self, rows: list[dict[str, Any]]) -> tuple[Any, int, dict[str, str]]:
        start = int(self.query.get("cursor", ["0"])[0])
        end = start + self.hub.page
        if end >= len(rows):
            return rows[start:], 200, {}
        path = urllib.parse.urlsplit(self.path).path
        query = urllib.parse.urlencode({**{k: v[0] for k, v in self.query.items()}, "cursor": end})
        return rows[start:end], 200, {"Link": f'<{self.hub.url}{path}?{query}>; rel="next"'}

    def _ref(self, repository: Repository, names: dict[str, str], name: str, revision: str) -> Any:
        if self.command == "DELETE":
            if names.pop(name, None) is None:
                raise RefusedError(404, f"{name} does not exist", "RevisionNotFound")
        elif name in names:
            raise RefusedError(409, f"{name} already exists")
        else:
            names[name] = repository.resolve(revision).oid
        return {}

    def _commit(self, repository: Repository, branch: str) -> dict[str, Any]:
        if branch not in repository.branches:
            raise RefusedError(404, f"Invalid rev id: {branch}", "RevisionNotFound")
        head = repository.resolve(branch)
        files, title = dict(head.files), ""
        for line in self.body.decode().splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "header":
                title = value["summary"]
                if value.get("parentCommit") not in (None, head.oid):
                    raise RefusedError(412, "A commit has happened since. Please refresh and try again.")
            else:
                self.hub.store.apply(files, entry["key"], value)
        commit = repository.add(branch, title, files, head.oid)
        return {"commitOid": commit.oid, "commitUrl": f"{self.hub.url}/kernels/{repository.name}/commit/{commit.oid}"}

    def _file(self, name: str, revision: str, path: str) -> None:
        with self.hub.store.lock:
            commit = self.hub.store.repository(name).resolve(revision)
            file = commit.files.get(path)
            if file is None:
                raise RefusedError(404, f"{path} does not exist", "EntryNotFound")
            body = self.hub.store.read(file)
        headers = {"ETag": f'"{file.sha256 or file.oid}"', "X-Repo-Commit": commit.oid, "Accept-Ranges": "bytes"}
        if file.sha256:
            headers |= {"X-Linked-Etag": f'"{file.sha256}"', "X-Linked-Size": str(len(body))}
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if wanted is None:
            self.send(body, 200, headers)
            return
        first, last = int(wanted[1]), min(int(wanted[2] or len(body) - 1), len(body) - 1)
        if first >= len(body):
            raise RefusedError(416, f"the file has {len(body)} bytes")
        headers["Content-Range"] = f"bytes {first}-{last}/{len(body)}"
        self.send(body[first : last + 1], 206, headers)


def main() -> None:
    """Serve a folder until interrupted; prints the address."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(tempfile.mkdtemp(prefix="hub-"))
    with Hub(folder) as hub:
        hub.trusted.add("layout-kernels")
        print(f"HF_ENDPOINT={hub.url}  token {hub.token}", flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main()
