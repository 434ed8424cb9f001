"""The options that the commands share, and the two steps in which they are read. Loads no torch.

First the operation is found, then its suite adds options of its own; so `--operation X --help` shows those too.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..dispatch import EXECUTION_MODES
from .report import ReportPlugin, unwritable
from .suite import OperationSuite


@dataclass(frozen=True)
class Request:
    """What a command line asks for.

    Attributes:
        common: the options that are no suite's.
        suites: each suite with all options, its own among them.
        command: the command line itself.
    """

    common: argparse.Namespace
    suites: tuple[tuple[OperationSuite, argparse.Namespace], ...]
    command: tuple[str, ...]


def _at_least(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdigit() or int(text) < least:
            raise argparse.ArgumentTypeError(f"must be a whole number of at least {least}, not {text!r}")
        return int(text)

    return parse


positive, not_negative = _at_least(1), _at_least(0)


def _report_path(text: str) -> Path:
    path = Path(text)
    if path.suffix.lstrip(".") not in ReportPlugin.names():
        known = ", ".join(f".{name}" for name in ReportPlugin.names())
        raise argparse.ArgumentTypeError(f"{text!r}: the ending says which report to write; there are {known}")
    reason = unwritable(path)
    if reason is not None:
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written: {reason}")
    return path


def _parser(prog: str, description: str, own: Callable[[argparse.ArgumentParser], None]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=prog, description=description, allow_abbrev=False, add_help=False)
    parser.add_argument("-h", "--help", action="store_true", help="with --operation: the suite's own options too")
    parser.add_argument("--operation", nargs="+", metavar="NAME", help="what to run; the default is every operation")
    parser.add_argument("--implementation", metavar="NAME", help="a full name, or a solution beside --operation")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, npu, or with a number: cuda:1 (default: cpu)")
    parser.add_argument("--mode", choices=EXECUTION_MODES, default="eager", help="how calls are run (default: eager)")
    parser.add_argument("--warmup", type=not_negative, default=3, metavar="N", help="calls before a capture")
    parser.add_argument("--revision", metavar="TEXT", help="which revision is tested, for the report")
    parser.add_argument(
        "--output", nargs="+", type=_report_path, default=[], metavar="FILE", help="reports to write, by their ending"
    )
    own(parser)
    return parser


def _choose(common: argparse.Namespace, suites: Mapping[str, OperationSuite]) -> list[OperationSuite]:
    # The last part of a full name is its operation: cpu.native.<operation>.
    last = (common.implementation or "").rpartition(".")[2]
    owner = last if last in suites else None
    names = common.operation or ([owner] if owner else [])
    for name in names:
        if name not in suites:
            raise ValueError(f"unknown operation {name!r}; there are {', '.join(suites)}")
        if owner is not None and owner != name:
            raise ValueError(f"{common.implementation} implements {owner}, not {name}")
    if names:
        return [suites[name] for name in dict.fromkeys(names)]
    if common.implementation is not None:
        known = ", ".join(suites)
        raise ValueError(f"{common.implementation!r} does not end in an operation ({known}); name its --operation")
    return list(suites.values())


def read(
    argv: Sequence[str] | None,
    suites: Mapping[str, OperationSuite],
    *,
    prog: str,
    description: str,
    own: Callable[[argparse.ArgumentParser], None],
) -> Request:
    """Read a command line.

    Args:
        argv: its words; None: those of the process.
        suites: what there is, by operation.
        prog: the command.
        description: what it does.
        own: adds the command's own options.

    Raises:
        SystemExit: after help (0) or an error in the options (2).
    """
    words = tuple(sys.argv[1:] if argv is None else argv)
    base = _parser(prog, description, own)
    common, _ = base.parse_known_args(words)
    try:
        chosen = _choose(common, suites)
    except ValueError as error:
        base.error(str(error))
    if common.help and not (common.operation or common.implementation):
        base.epilog = f"Operations: {', '.join(suites)}. --operation X --help shows the options of its suite."
        base.print_help()
        raise SystemExit(0)
    found = []
    for suite in chosen:
        parser = _parser(prog, f"{description} Options for {suite.operation} stand last.", own)
        suite.add_arguments(parser)
        if common.help:
            parser.print_help()
            raise SystemExit(0)
        found.append((suite, parser.parse_args(words)))
    return Request(common, tuple(found), (prog, *words))
