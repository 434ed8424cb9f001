"""``python -m layout_kernels plan PATH`` and ``python -m layout_kernels doctor``."""

from __future__ import annotations

import argparse
import sys


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit status. ``--help`` loads no torch."""
    parser = argparse.ArgumentParser(prog="python -m layout_kernels", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    plan = commands.add_parser("plan", help="which layer fits which module of a model, and why not")
    plan.add_argument("path", help="folder or Hub id of a checkpoint")
    plan.add_argument("--no-fuse", action="store_true", help="norms only: merge and fuse nothing")
    commands.add_parser("doctor", help="versions, devices, implementations, and what stands in the way")
    options = parser.parse_args(arguments)
    if options.command == "plan":
        from .models.plan import plan as make_plan

        try:
            print(make_plan(options.path, fuse=not options.no_fuse))
        except (OSError, ValueError, ImportError) as error:
            print(f"plan: {error}", file=sys.stderr)
            return 1
        return 0
    from .models.doctor import diagnose

    text, healthy = diagnose()
    print(text)
    return 0 if healthy else 1


if __name__ == "__main__":
    sys.exit(main())
