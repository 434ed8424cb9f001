"""The public names of what is published now."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import HfApi

from tools.publishing.difference import Remote
from tools.publishing.names import public_names

FILES = ("__init__.py", "layers.py")


def names_on_hub(api: HfApi, repo_id: str, remote: Remote) -> dict[str, list[str]]:
    """The names of a variant on the branch; empty where nothing is published."""
    for path in sorted(remote.files):
        variant, _, name = path.rpartition("/")
        if name == "metadata.json" and all(f"{variant}/{file}" in remote.files for file in FILES):
            local = [
                api.hf_hub_download(repo_id, f"{variant}/{file}", repo_type="kernel", revision=remote.commit)
                for file in FILES
            ]
            return public_names(Path(local[0]).parent)
    return {}
