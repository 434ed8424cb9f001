"""Compare downloaded variants of a kernel with the digest in their metadata, and with a signature where there is one.

`kernels` 0.17.2 checks no contents when it loads: a body that was damaged or exchanged on the way stays in the cache
and is run. The digest finds damage; only a signature finds an exchange by whoever can write metadata.json as well.
What the digest leaves out although Python could import it, `uncovered.py` finds.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .uncovered import uncovered_problems, unreadable_files

SIGNATURE = "metadata.json.sigstore"


@dataclass(frozen=True)
class VariantVerification:
    """What was found of one variant.

    Attributes:
        variant: name of its folder, for example "torch-cuda".
        signed: it has a sigstore bundle.
        problems: what is wrong; empty when its files are those that the metadata, and the signature if any, promise.
    """

    variant: str
    signed: bool
    problems: tuple[str, ...]


@dataclass(frozen=True)
class Verification:
    """What was found of a kernel.

    Attributes:
        folder: where its variants lie.
        variants: one entry a variant that is there, which after a usual download is the one that was loaded.
    """

    folder: Path
    variants: tuple[VariantVerification, ...]

    @property
    def valid(self) -> bool:
        """Whether no variant has a problem."""
        return not any(found.problems for found in self.variants)

    def __str__(self) -> str:
        lines = [f"{self.folder}"]
        for found in self.variants:
            signature = "signed" if found.signed else "not signed"
            lines.append(
                f"  {found.variant}: {'changed or damaged' if found.problems else 'as published'}, {signature}"
            )
            lines += [f"    {problem}" for problem in found.problems]
        if not self.valid:
            lines.append(
                "  mend a download with `hf download REPOSITORY --type kernel --revision ... --force-download`"
            )
        return "\n".join(lines)


def verify(
    repo_id: str | Path,
    revision: str | None = None,
    *,
    policies: Sequence[Any] | None = None,
    require_signature: bool = False,
) -> Verification:
    """Compare the downloaded variants of a kernel with what they promise; nothing is downloaded, loaded or run.

    Args:
        repo_id: "owner/name" on the Hub, whose files are looked for in the cache; or a folder of variants.
        revision: branch, tag or commit, for example "v1"; needed with "owner/name". A text beside a revision is
            always a repository, also where a folder of that name lies in the working directory.
        policies: who may have signed, as policies of `sigstore.verify.policy` or `kernels.verify`; one must hold, and
            a variant without signature is a problem. None: the publishers that `kernels` trusts by default, asked
            only where a variant has a bundle.
        require_signature: count a variant without signature as a problem, whoever may have signed.

    Returns:
        The findings; `valid` says whether all is as published.

    Raises:
        ValueError: a repository without a revision, or a folder with one.
        FileNotFoundError: the revision, or the folder, has no variant here.
        ImportError: `kernels` is not installed.
    """
    folder = _folder(repo_id, revision)
    must_be_signed = require_signature or policies is not None
    # `kernels info` and `lock` leave metadata.json alone of a variant: that one was not downloaded.
    named = [*folder.glob("torch*"), *folder.glob("tvm-ffi*")]
    variants = sorted(path for path in named if path.is_dir() and _is_there(path))
    if not variants and (folder / "metadata.json").is_file():
        variants = [folder]
    if not variants:
        raise FileNotFoundError(f"{folder} holds no variant; name a folder that `kernels` downloaded or a build")
    return Verification(folder, tuple(_verify_variant(path, policies, must_be_signed) for path in variants))


def _is_there(variant: Path) -> bool:
    return any(path.name not in ("metadata.json", SIGNATURE) for path in variant.iterdir())


def _folder(repo_id: str | Path, revision: str | None) -> Path:
    if revision is not None:
        if isinstance(repo_id, Path) or repo_id.count("/") != 1 or repo_id.startswith((".", "/")):
            raise ValueError(
                f"{repo_id} has no revision {revision}: only a repository has one, named as 'owner/name'; "
                "leave the revision out to verify a folder"
            )
        return _snapshot(repo_id, revision) / "build"
    folder = Path(repo_id)
    if not isinstance(repo_id, Path) and not folder.is_dir():
        raise ValueError(f"which revision of {repo_id}? Name a branch, tag or commit, for example revision='v1'")
    return folder / "build" if (folder / "build").is_dir() else folder


def _snapshot(repo_id: str, revision: str) -> Path:
    """The folder of a revision in the cache. What a branch is the Hub says, or offline the cache.

    `snapshot_download(local_files_only=True)` refuses what `kernels` leaves: one variant, by commit, without a branch.
    """
    from huggingface_hub import HfApi, constants
    from huggingface_hub.file_download import repo_folder_name

    cache = Path(os.environ.get("KERNELS_CACHE") or constants.HF_HUB_CACHE)
    repository = cache / repo_folder_name(repo_id=repo_id, repo_type="kernel")
    commit = revision
    if (repository / "snapshots" / revision).is_dir():
        pass
    elif not constants.HF_HUB_OFFLINE:
        commit = HfApi().repo_info(repo_id, revision=revision, repo_type="kernel").sha or revision
    elif (repository / "refs" / revision).is_file():
        commit = (repository / "refs" / revision).read_text().strip()
    snapshot = repository / "snapshots" / commit
    if not snapshot.is_dir():
        raise FileNotFoundError(
            f"revision {revision} of {repo_id} is not in the cache; load it, or get all of it with "
            f"`hf download {repo_id} --type kernel --revision {revision}`"
        )
    return snapshot


def _verify_variant(path: Path, policies: Sequence[Any] | None, must_be_signed: bool) -> VariantVerification:
    signed = (path / SIGNATURE).is_symlink() or (path / SIGNATURE).exists()
    problems = unreadable_files(path)
    if not problems:
        problems += _digest_problems(path)
        if signed:
            problems += _signature_problems(path, policies)
    if not signed and must_be_signed:
        problems.append(f"{SIGNATURE} is absent, and a signature was asked for")
    problems += uncovered_problems(path)
    return VariantVerification(path.name, signed, tuple(dict.fromkeys(problems)))


def _digest_problems(path: Path) -> list[str]:
    from kernels._rust import Digest, DigestValidationError, DigestViolation, Metadata

    if not (path / "metadata.json").exists():
        return ["metadata.json is missing, so there is no digest to compare with"]
    try:
        metadata = Metadata.read_from_file(path / "metadata.json")
    except (OSError, ValueError) as error:
        return [f"metadata.json cannot be read: {error}"]
    if metadata.digest is None:
        return ["metadata.json has no digest to compare with"]
    try:
        metadata.digest.validate(Digest.hash_variant(metadata.digest.algorithm, path))
    except DigestValidationError as error:
        extra = DigestViolation.UnknownFile
        return [f"{found}; remove it" if isinstance(found, extra) else f"{found}" for found in error.violations]
    except (OSError, RuntimeError) as error:  # the files changed while they were read
        return [f"the files cannot be hashed: {error}"]
    return []


def _signature_problems(path: Path, policies: Sequence[Any] | None) -> list[str]:
    from kernels.verify import VerificationResult, verify_variant

    try:
        result = verify_variant(path, None if policies is None else list(policies))
    except Exception as error:  # noqa: BLE001 -- the verifier renews its trust root over the network: many errors
        return [f"the signature could not be checked: {type(error).__name__}: {error}"]
    if isinstance(result, VerificationResult.Success):
        return []
    if isinstance(result, VerificationResult.DigestVerificationFailure):
        return [str(violation) for violation in result.violations]
    return [f"the signature is not accepted: {type(result).__name__} {getattr(result, 'reason', '')}".rstrip()]
