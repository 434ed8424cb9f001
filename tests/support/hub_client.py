"""Unmodified clients of a loopback Hub, each in a process of its own with a home of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.hub import Hub

ROOT = Path(__file__).resolve().parents[2]
REPO = "layout-kernels/layout-kernels"

# Executes code that arrives line by line as JSON, and answers what `answer` was set to, or the error. So one process
# can be asked several times, between which the test changes the Hub.
SESSION = """
import json, sys
lines, out = sys.stdin, sys.stdout
sys.stdout = sys.stderr
for line in lines:
    names = {}
    try:
        exec(json.loads(line), names)
        reply = {"answer": names.get("answer")}
    except BaseException as error:
        reply = {"error": type(error).__name__, "message": str(error)}
    print(json.dumps(reply), file=out, flush=True)
"""


class Client:
    """A user of the Hub: ``HF_HOME`` in a folder of its own, and nothing of the source tree on its path.

    Args:
        hub: the Hub that it asks.
        home: its home; the cache of the clients is below.
    """

    def __init__(self, hub: Hub, home: Path) -> None:
        self.hub = hub
        self.home = home
        home.mkdir(parents=True, exist_ok=True)

    @property
    def cache(self) -> Path:
        """The folder of huggingface_hub's cache for our repository."""
        return self.home / "hf" / "hub" / f"kernels--{REPO.replace('/', '--')}"

    def environment(self, offline: bool, **more: str) -> dict[str, str]:
        """What the process of a client has in its environment."""
        return {
            "PATH": os.environ["PATH"],
            "HOME": str(self.home),
            "HF_HOME": str(self.home / "hf"),
            # Offline nothing may be asked, so an address that answers nobody.
            "HF_ENDPOINT": "http://127.0.0.1:9" if offline else self.hub.url,
            "HF_HUB_OFFLINE": "1" if offline else "0",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            **more,
        }

    def run(self, *command: str, offline: bool = False, **more: str) -> subprocess.CompletedProcess[str]:
        """Run a command and return how it ended."""
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
            cwd=self.home,
            env=self.environment(offline, **more),
        )

    def kernels(self, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """The `kernels` command."""
        return self.run(str(Path(sys.executable).with_name("kernels")), *arguments, **options)

    def hf(self, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """The `hf` command."""
        return self.run(str(Path(sys.executable).with_name("hf")), *arguments, **options)

    def python(self, code: str, *arguments: str, offline: bool = False, **more: str) -> Any:
        """Run code that prints one line of JSON at its end, and return that."""
        result = self.run(sys.executable, "-c", code, *arguments, offline=offline, **more)
        assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
        return json.loads(result.stdout.strip().splitlines()[-1])

    def session(self, **more: str) -> Session:
        """A process that can be asked several times."""
        return Session(self.environment(False, **more), self.home)


class Session:
    """A running client; a context manager."""

    def __init__(self, environment: dict[str, str], folder: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", SESSION],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
            cwd=folder,
        )

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def send(self, code: str) -> None:
        """Give it code to execute, without waiting."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(code) + "\n")
        self.process.stdin.flush()

    def ask(self, code: str) -> dict[str, Any]:
        """Execute code; returns {"answer": ...} or {"error": ..., "message": ...}."""
        self.send(code)
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())
