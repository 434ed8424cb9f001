"""``python -m layout_kernels plan PATH``, ``doctor`` and ``verify REPOSITORY``."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from .commands import run


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit status. ``--help`` loads no torch."""
    parser = argparse.ArgumentParser(prog="python -m layout_kernels", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    plan = commands.add_parser("plan", help="which layer fits which module of a model, and why not")
    plan.add_argument("path", help="folder or Hub id of a checkpoint")
    plan.add_argument("--no-fuse", action="store_true", help="norms only: merge and fuse nothing")
    plan.add_argument("--trust-remote-code", action="store_true", help="run the code that a checkpoint brings")
    commands.add_parser("doctor", help="versions, devices, implementations, and what stands in the way")
    _add_verify(commands)
    options = parser.parse_args(arguments)
    if options.command == "verify":
        return _verify(options)
    if options.command == "plan":
        from .models.plan import plan as make_plan

        try:
            print(make_plan(options.path, not options.no_fuse, options.trust_remote_code))
        except ModuleNotFoundError:
            raise
        except (OSError, ValueError, ImportError) as error:
            way_out = " (here: --trust-remote-code)" if "trust_remote_code" in str(error) else ""
            print(f"plan: {error}{way_out}", file=sys.stderr)
            return 1
        return 0
    from .models.doctor import diagnose

    text, healthy = diagnose()
    print(text)
    return 0 if healthy else 1


def _add_verify(commands: Any) -> None:
    verify = commands.add_parser("verify", help="downloaded variants beside their digest and signature")
    verify.add_argument("repository", help="owner/name on the Hub, or a folder of variants")
    verify.add_argument("--revision", help="branch, tag or commit, for example v1")
    verify.add_argument("--require-signature", action="store_true", help="a variant without signature is a problem")
    verify.add_argument("--identity", help="who must have signed: an address, or the URI of a workflow")
    verify.add_argument("--issuer", help="who vouches for the identity; needed beside --identity")


def _verify(options: argparse.Namespace) -> int:
    from .verification import verify

    if bool(options.identity) != bool(options.issuer):
        print("verify: --identity and --issuer belong together; give both", file=sys.stderr)
        return 2
    try:
        policies = None
        if options.identity:
            from sigstore.verify.policy import Identity

            policies = [Identity(identity=options.identity, issuer=options.issuer)]
        found = verify(
            options.repository,
            options.revision,
            policies=policies,
            require_signature=options.require_signature or policies is not None,
        )
    except (OSError, ValueError, ImportError) as error:
        print(f"verify: {error}", file=sys.stderr)
        return 2
    print(found)
    return 0 if found.valid else 1


if __name__ == "__main__":
    sys.exit(run(__package__ or "", main))
