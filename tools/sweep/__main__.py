"""``python -m tools.sweep``: the sweep on the command line; ``make sweep`` also writes the table of docs/models.md."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # before huggingface_hub is imported: nothing here needs the network

from tools.build_variants import build

from .compare import Result
from .families import Family, families
from .overrides import SHORT
from .pool import run_all
from .table import write_table

QUIET = ("equal", "refused", "no norm", "outside")


def summary(results: list[Result]) -> str:
    """The last line: ``sweep: E equal R refused 0 wrong 0 errors``, and what it does not count."""
    count = Counter(result.verdict for result in results)
    counted = (
        f"sweep: {count['equal']} equal {count['refused']} refused {count['wrong']} wrong {count['error']} errors"
    )
    aside = {"unbuildable": "need another package", "no norm": "without RMSNorm", "outside": "outside its scope"}
    rest = [f"{count[verdict]} {words}" for verdict, words in aside.items() if count[verdict]]
    return "\n".join([*([f"not counted: {', '.join(rest)}"] if rest else []), counted])


def _show(result: Result, done: int, total: int, started: float) -> None:
    if result.verdict not in QUIET:
        print(f"\r\033[K{result.verdict}: {result.model_type}: {result.reason}")
    left = (time.monotonic() - started) / done * (total - done)
    bar = "#" * (30 * done // total)
    end = "\r" if sys.stdout.isatty() else "\n"
    print(
        f"\r\033[K[{bar:30}] {done}/{total} {result.model_type} {result.verdict}, {left:.0f} s left",
        end=end,
        flush=True,
    )


def _chosen(names: list[str], short: bool) -> list[Family]:
    known = {family.model_type: family for family in families()}
    wanted = names or (list(SHORT) if short else list(known))
    unknown = sorted(set(wanted) - set(known))
    if unknown:
        raise SystemExit(f"no family with an RMSNorm is called {unknown}")
    return [known[name] for name in wanted]


def main() -> int:
    """Sweep, print the verdicts and return 1 when a family is wrong or an error."""
    parser = argparse.ArgumentParser(prog="python -m tools.sweep", description=__doc__)
    parser.add_argument("families", nargs="*", help="model types; all when none is given")
    parser.add_argument("--short", action="store_true", help="a subset that shows every kind of finding")
    parser.add_argument("--jobs", type=int, default=1, help="processes at the same time")
    parser.add_argument("--timeout", type=int, default=180, help="seconds for one family")
    parser.add_argument("--build", type=Path, help="a build of the kernel; made when it is not given")
    parser.add_argument("--table", type=Path, help="write the table of all families into this file")
    options = parser.parse_args()
    chosen = _chosen(options.families, options.short)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        kernel = options.build or Path(folder)
        if options.build is None:
            build(kernel)
        results = []
        for result in run_all(chosen, kernel.resolve(), options.jobs, options.timeout):
            results.append(result)
            _show(result, len(results), len(chosen), started)
    print()
    if options.table is not None:
        write_table(results, options.table)
    print(summary(results))
    return 1 if any(result.verdict in ("wrong", "error") for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
