"""Writing to the Hub, so that what is published is either the old state or the whole new one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

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
        staging branch: users never see a version without its files.
        """
        if remote.commit is not None:
            return self._commit(self.branch, local, difference, message, remote.commit)
        staging = STAGING + self.branch
        self._forget(staging)
        self.api.create_branch(self.repo_id, branch=staging, repo_type="kernel")
        commit = self._commit(staging, local, difference, message, None)
        self.api.create_branch(self.repo_id, branch=self.branch, revision=commit, repo_type="kernel")
        self._forget(staging)
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

    def _forget(self, branch: str) -> None:
        """Remove a branch that an earlier, broken run may have left."""
        refs = self.api.list_repo_refs(self.repo_id, repo_type="kernel")
        if any(ref.name == branch for ref in refs.branches):
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
        """Name a commit for good."""
        self.api.create_tag(self.repo_id, tag=tag, revision=commit, repo_type="kernel")

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
