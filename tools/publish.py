"""Publish this kernel on the Hub: `make publish REPO=owner/name`, or `python -m tools.publish owner/name`.

Builds, checks, runs the numerics of what this machine can run, then uploads: the variants with the benchmarks to the
branch v<version> in one commit, a tag that names its contents, and the card to main. What is there already is not
uploaded again. Whatever fails, the published branch is either as it was or complete.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

# The storage that hf_xet talks to is another service than the Hub itself; plain uploads need the Hub alone.
os.environ.setdefault("HF_HUB_DISABLE_XET", "1")

import httpx2
from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import HFValidationError, validate_repo_id
from kernels._rust import DigestValidationError, Metadata

from tools.build_variants import build
from tools.check_build import READ, check, print_verdicts
from tools.project import ROOT, read_project
from tools.publishing import difference as differences
from tools.publishing.hub import Target
from tools.publishing.names import public_names, removed_names
from tools.publishing.published_names import names_on_hub
from tools.publishing.steps import Steps
from tools.publishing.variants import gather, still_valid

CARD = ROOT / "CARD.md"
NUMERICS = """
import sys
from importlib import import_module
from pathlib import Path
from kernels import get_local_kernel
kernel = get_local_kernel(Path(sys.argv[1]))
sys.exit(import_module(f"{kernel.__name__}.numerics.cli").main(["--device", sys.argv[2]]))
"""


class Publishing:
    """One publication, step by step; `run` does it all.

    Args:
        options: what the command line says.
        steps: where progress is shown.
        version: major version; None: the one of build.toml.
    """

    def __init__(self, options: argparse.Namespace, steps: Steps, version: int | None = None) -> None:
        self.options = options
        self.steps = steps
        project = read_project()
        self.version = project.version if version is None else version
        self.project = replace(project, version=self.version)
        self.branch = f"v{self.version}"
        self.api = HfApi()
        self.target = Target(self.api, options.repo, self.branch)
        self.folders: list[Path] = []

    def run(self) -> None:
        """Every step; raises at the first that fails."""
        self._build()
        self._check()
        self._numerics()
        self.upload()

    def upload(self) -> None:
        """Make the Hub hold `folders`, the benchmarks and the card; with `dry_run` only say what that would change."""
        self.steps.begin("compare with the Hub")
        remote = differences.read_remote(self.api, self.options.repo, self.branch)
        main = differences.read_remote(self.api, self.options.repo, "main")
        self._check_names(remote)
        kept = still_valid(self.api, self.options.repo, remote, self.project, self.folders, self.version)
        local = differences.local_files(self.folders, ROOT / "benchmarks")
        change = differences.compare(local, remote, keep=[f"build/{name}/" for name in kept])
        card = differences.compare({"README.md": CARD}, main)
        tag = f"{self.branch}-{differences.digest(local)}"
        self._say_changes(remote, change, bool(card.added or card.changed), tag, kept)
        if self.options.dry_run:
            self.steps.say("dry run: nothing was written")
            return
        self._write(local, change, remote, tag)
        self._write_card(bool(card.added or card.changed))

    def _build(self) -> None:
        self.steps.begin("build")
        build(self.options.output, self.version)
        self.folders = gather(self.project, self.options.output, self.options.extra, self.version)
        for folder in self.folders:
            metadata = Metadata.read_from_file(folder / "metadata.json")
            self.steps.say(f"{folder.name}  {metadata.id}")
            provenance = metadata.provenance
            self._refuse_unless(
                self.options.allow_dirty or (provenance is not None and not provenance.dirty),
                f"{folder.name} was built {'outside a git checkout' if provenance is None else 'with changes'} that "
                "no commit holds, so nobody can build it again; commit them, or say --allow-dirty",
            )

    def _refuse_unless(self, allowed: bool, message: str) -> None:
        if not allowed:
            raise ValueError(message)

    def _check(self) -> None:
        self.steps.begin("check the build")
        verdicts = [check(self.options.output, say=self.steps.work, project=self.project)]
        verdicts += [check(folder, READ, self.steps.work, self.project) for folder in self.options.extra]
        self.steps.clear()
        kept = [print_verdicts(found) for found in verdicts]  # each is printed, also after a broken one
        if not all(kept):
            raise ValueError("a rule of Hub kernels is broken, see above; nothing was uploaded")

    def _numerics(self) -> None:
        for device in devices():
            self.steps.begin(f"numerics on {device}")
            command = [sys.executable, "-c", NUMERICS, str(self.options.output), device]
            result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
            lines = result.stdout.strip().splitlines() or [""]
            if result.returncode != 0:
                raise ValueError(f"numerics failed on {device}; nothing was uploaded\n{result.stdout}{result.stderr}")
            self.steps.say(lines[-1])

    def _check_names(self, remote: differences.Remote) -> None:
        published = names_on_hub(self.api, self.options.repo, remote)
        missing = removed_names(published, public_names(self.folders[0])) if published else []
        self._refuse_unless(
            not missing,
            f"the published {self.branch} has {', '.join(missing)}, this build has not; users of version "
            f"{self.version} would break: keep them, or raise version in build.toml",
        )

    def _say_changes(
        self, remote: differences.Remote, change: differences.Difference, card: bool, tag: str, kept: list[str]
    ) -> None:
        say = self.steps.say
        say(f"branch {self.branch} {'is there' if remote.commit else 'is new'}: {change}")
        if self.options.dry_run or change.removed:
            for word, paths in (("add", change.added), ("change", change.changed), ("remove", change.removed)):
                for path in paths:
                    say(f"  {word} {path}")
        for name in kept:
            say(f"  {name}, built elsewhere from the same sources, stays")
        say(f"tag {tag}")
        say(f"card on main: {'CARD.md as README.md' if card else 'nothing to upload'}")

    def _write(
        self,
        local: dict[str, Path],
        change: differences.Difference,
        remote: differences.Remote,
        tag: str,
    ) -> None:
        self.steps.begin(f"upload to {self.branch}")
        commit = remote.commit
        if commit is None:
            self.target.create_repository()
        if change or commit is None:
            commit = self.target.upload(local, change, remote, f"Version {self.version}, {tag}")
            self.steps.say(f"{self.branch} is now {commit}")
        self.steps.begin("tag")
        if not self.target.has_tag(tag):
            self.target.tag(tag, commit)

    def _write_card(self, needed: bool) -> None:
        self.steps.begin("card")
        if needed:
            self.target.upload_card(CARD, differences.read_remote(self.api, self.options.repo, "main"))


def devices() -> list[str]:
    """The devices whose variants can run here: always the CPU, and an accelerator that torch sees."""
    import torch

    found = ["cpu"]
    if torch.cuda.is_available():
        found.append("cuda")
    npu = getattr(torch, "npu", None)
    if npu is not None and npu.is_available():
        found.append("npu")
    return found


def without_token(text: str) -> str:
    """The text, with the token of this machine blotted out should anything have printed it."""
    token = get_token()
    return text.replace(token, "<token>") if token else text


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.publish", description="Publish this kernel on the Hub.")
    parser.add_argument("repo", nargs="?", help="owner/name; default: general.hub.repo-id of build.toml")
    parser.add_argument("--dry-run", action="store_true", help="print all that would be done, write nothing")
    parser.add_argument("--allow-dirty", action="store_true", help="publish although changes are not committed")
    parser.add_argument("--output", type=Path, default=ROOT / "build", help="folder for the variants (default: build)")
    parser.add_argument(
        "--extra", type=Path, nargs="+", default=[], metavar="FOLDER", help="variants of this commit built elsewhere"
    )
    options = parser.parse_args(arguments)
    options.repo = options.repo or read_project().repo_id
    return options


def guarded(work: Callable[[], None]) -> int:
    """Do the work; what can go wrong becomes a message and an exit status."""
    try:
        work()
    except (ValueError, RuntimeError, OSError, HfHubHTTPError, DigestValidationError, httpx2.HTTPError) as error:
        message = without_token(f"{error}")
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status in (401, 403):
            message += "\nlog in with `hf auth login`, or set HF_TOKEN, with a token that may write to this repository"
        if status == 412:
            message += "\nsomebody else published meanwhile; run this again"
        print(f"publish: {message}", file=sys.stderr)
        return 1
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    options = parse(arguments)
    try:
        validate_repo_id(options.repo)
        if options.repo.count("/") != 1:
            raise HFValidationError(f"{options.repo!r} is not owner/name")
    except HFValidationError as error:
        print(f"publish: {error}", file=sys.stderr)
        return 2
    with Steps(7 if options.dry_run is False else 4) as steps:
        status = guarded(Publishing(options, steps).run)
    if status == 0 and not options.dry_run:
        print(f"published {options.repo}")
    return status


if __name__ == "__main__":
    sys.exit(main())
