"""Writing to the Hub, so that what is published is either the old state or the whole new one."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx2
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import HfHubHTTPError

from tools.publishing.difference import Difference, Remote

STAGING = "publishing-"


@dataclass(frozen=True)
class Target:
    """Where to write.

    Attributes:
        api: client of the Hub, with the token of a maintainer.
        repo_id: "owner/name".
        branch: branch of the version, for example "v1".
    """

    api: HfApi
    repo_id: str
    branch: str

    def create_repository(self) -> None:
        """Create the repository, of type kernel, where it is not there."""
        self.api.create_repo(self.repo_id, repo_type="kernel", exist_ok=True)

    def upload(self, local: Mapping[str, Path], difference: Difference, remote: Remote, message: str) -> str:
        """Make the branch hold the files, in one commit; returns its id.

        A branch that exists changes with that commit alone. One that does not is created from a finished commit of a
        staging branch, which no other publication uses: users never see a version without its files, nor with the
        files of two publications. Of two that create a version at once, the one whose branch comes second fails.

        Raises:
            RuntimeError: somebody else created the version meanwhile; nothing of this publication is visible.
        """
        if remote.commit is not None:
            commit = self._commit(self.branch, local, difference, message, remote.commit)
        else:
            commit = self._create(local, difference, message)
        # Once the version is there no staging branch can become it: those that are left belong to broken runs.
        self._forget(lambda name: name.startswith(f"{STAGING}{self.branch}-"))
        return commit

    def _create(self, local: Mapping[str, Path], difference: Difference, message: str) -> str:
        staging = f"{STAGING}{self.branch}-{uuid.uuid4().hex[:12]}"
        main = self._branches().get("main")
        try:
            self.api.create_branch(self.repo_id, branch=staging, revision=main, repo_type="kernel")
            commit = self._commit(staging, local, difference, message, main)
            self.api.create_branch(self.repo_id, branch=self.branch, revision=commit, repo_type="kernel")
        except HfHubHTTPError as error:
            if self.branch in self._branches():
                raise RuntimeError(
                    f"somebody else created {self.branch} of {self.repo_id} meanwhile, and nothing of this "
                    "publication is visible; run it again to publish on top of theirs"
                ) from error
            raise
        finally:
            self._forget(lambda name: name == staging)
        return commit

    def _commit(
        self, branch: str, local: Mapping[str, Path], difference: Difference, message: str, parent: str | None
    ) -> str:
        changed = (*difference.added, *difference.changed)
        operations: list[CommitOperationAdd | CommitOperationDelete] = [
            CommitOperationAdd(path_in_repo=path, path_or_fileobj=local[path]) for path in changed
        ]
        operations += [CommitOperationDelete(path_in_repo=path) for path in difference.removed]
        info = self.api.create_commit(
            self.repo_id,
            operations,
            commit_message=message,
            revision=branch,
            repo_type="kernel",
            parent_commit=parent,
        )
        return str(info.oid)

    def _branches(self) -> dict[str, str]:
        """The branches there are now, and their commits."""
        refs = self.api.list_repo_refs(self.repo_id, repo_type="kernel")
        return {ref.name: ref.target_commit for ref in refs.branches}

    def _forget(self, is_staging: Callable[[str], bool]) -> None:
        """Remove staging branches. One that stays, because the Hub fails, harms nobody and goes with the next run."""
        with contextlib.suppress(HfHubHTTPError, httpx2.HTTPError):
            for branch in filter(is_staging, self._branches()):
                self.api.delete_branch(self.repo_id, branch=branch, repo_type="kernel")

    def has_tag(self, tag: str) -> bool:
        """Whether the tag is there; also False where the repository is not."""
        try:
            refs = self.api.list_repo_refs(self.repo_id, repo_type="kernel")
        except HfHubHTTPError as error:
            if error.response is not None and error.response.status_code == 404:
                return False
            raise
        return any(ref.name == tag for ref in refs.tags)

    def tag(self, tag: str, commit: str) -> None:
        """Name a commit for good. The tag names its contents, so one that is there already says the same."""
        self.api.create_tag(self.repo_id, tag=tag, revision=commit, repo_type="kernel", exist_ok=True)

    def upload_card(self, card: Path, remote: Remote) -> None:
        """Put the card on main, where the Hub shows it."""
        operation = CommitOperationAdd(path_in_repo="README.md", path_or_fileobj=card)
        self.api.create_commit(
            self.repo_id,
            [operation],
            commit_message="Card",
            repo_type="kernel",
            parent_commit=remote.commit,
        )
