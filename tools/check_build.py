"""Check a build against the rules of a Hub kernel: `make check-build`, or `python -m tools.check_build [FOLDER]`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tools.project import ROOT, Project, read_project
from tools.publishing import loaded, names, rules, variant_rules
from tools.publishing.build_under_test import BuildUnderTest

Rule = Callable[[BuildUnderTest], list[str]]
RULES: dict[str, Rule] = {
    "folders of build.toml": variant_rules.folders_of_build_toml,
    "metadata and digest valid": variant_rules.metadata_and_digest,
    "nothing beside the digest": variant_rules.nothing_beside_the_digest,
    "readable Python": rules.readable,
    "relative imports only": rules.relative_imports,
    "allowed dependencies": rules.allowed_dependencies,
    "literal __all__": rules.literal_all,
    "layers exposed": rules.layers_exposed,
    "operator names from _ops": rules.namespaced_operators,
    "abi3 and manylinux limits": variant_rules.abi_limits,
    "public names only added": names.names_only_added,
    "loads without GPU, Triton, torch_npu, transformers": loaded.imports_bare,
    "operators lie under the id": loaded.operators_under_the_id,
    "layers accepted by kernels' validator": loaded.layers_pure,
    "names of __all__ resolve": loaded.names_resolve,
}
# Rules that need no loading, so that they hold for variants of another processor too.
READ = [name for name, rule in RULES.items() if rule.__module__ != loaded.__name__]


@dataclass(frozen=True)
class Verdict:
    """What one rule says of a build: it is kept when there are no problems."""

    rule: str
    problems: tuple[str, ...]


def check(
    folder: Path,
    only: list[str] | None = None,
    say: Callable[[str], None] = lambda _: None,
    project: Project | None = None,
) -> list[Verdict]:
    """Hold the variants below `folder` against every rule, or those named in `only`.

    Args:
        folder: the build.
        only: names of rules; None: all.
        say: gets the name of each rule before it is applied.
        project: what the build is held against; None: build.toml.
    """
    build = BuildUnderTest(read_project() if project is None else project, folder)
    verdicts = []
    for name in RULES if only is None else only:
        say(name)
        verdicts.append(Verdict(name, tuple(_problems(RULES[name], build))))
    return verdicts


def _problems(rule: Rule, build: BuildUnderTest) -> list[str]:
    try:
        return rule(build)
    except Exception as error:  # noqa: BLE001 -- a rule that cannot be applied is not kept, and the others still are
        return [f"cannot be applied to this build: {type(error).__name__}: {error}"]


def print_verdicts(verdicts: list[Verdict]) -> bool:
    """Print each rule with its verdict; returns whether all are kept."""
    width = max(len(verdict.rule) for verdict in verdicts)
    for verdict in verdicts:
        print(f"  {verdict.rule.ljust(width)}  {'broken' if verdict.problems else 'kept'}")
        for problem in verdict.problems:
            print(f"      {problem}")
    broken = sum(bool(verdict.problems) for verdict in verdicts)
    print(f"check-build: {len(verdicts) - broken} rules kept, {broken} broken")
    return not broken


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.check_build", description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=ROOT / "build", help="default: build")
    parser.add_argument("--record", action="store_true", help="add new public names to the record of this version")
    options = parser.parse_args(arguments)
    if options.record:
        try:
            names.record_names(BuildUnderTest(read_project(), options.folder))
        except ValueError as error:
            print(f"check-build: {error}", file=sys.stderr)
            return 1
    return 0 if print_verdicts(check(options.folder)) else 1


if __name__ == "__main__":
    sys.exit(main())
