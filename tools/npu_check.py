"""Proves and times the Ascend implementations on a machine with an Ascend card: one command, one report.

    python -m tools.npu_check                     numerics, then the benchmark, in eager and aclgraph
    python -m tools.npu_check --modes eager --output results/910b

Each mode runs in processes of its own, since an implementation is bound once. A benchmark runs only where the numerics
of its mode passed. Written to the folder: the reports of each command, `npu_check.json` and `npu_check.md`. The exit
status is 0 when everything that was asked for passed, 1 when something failed, 2 when there is no card to ask.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from layout_kernels.numerics.report import Table, markdown_table
from tools import source_environment

COMMANDS = ("numerics", "benchmark")
MODES = ("eager", "aclgraph")
Run = Callable[[str, list[str]], int]


@dataclass
class Step:
    """One command in one mode: how it was called, how it ended, and its own report where it wrote one."""

    command: str
    mode: str
    arguments: list[str]
    status: str = "not run"
    reason: str | None = None
    report: dict[str, Any] | None = field(default=None, repr=False)


def in_a_process(command: str, arguments: list[str], timeout: float | None = None) -> int:
    """Run `python -m layout_kernels.<command>` of this tree; its exit status, 124 where it took too long."""
    words = [sys.executable, "-m", f"layout_kernels.{command}", *arguments]
    try:
        return subprocess.run(words, env=source_environment(), check=False, timeout=timeout).returncode
    except subprocess.TimeoutExpired:
        return 124


def card() -> dict[str, Any]:
    """The card and its software, or why there is none.

    Raises:
        RuntimeError: torch_npu is missing or does not load, or sees no card.
    """
    try:
        torch_npu = importlib.import_module("torch_npu")
        collect = importlib.import_module("torch_npu.utils.collect_env")
    except (ImportError, OSError) as error:
        raise RuntimeError(f"torch_npu cannot be imported: {error}") from error
    import torch

    npu: Any = torch.npu  # type: ignore[attr-defined]  # torch_npu adds it
    if not npu.is_available():
        raise RuntimeError("torch_npu is there, but torch.npu.is_available() is False; see `npu-smi info`")
    simulated = "simulated" in torch_npu.__version__
    return {
        "evidence": "simulated NPU" if simulated else "NPU",
        "product": npu.get_device_name(0),
        "torch": torch.__version__,
        "torch_npu": torch_npu.__version__,
        "cann": collect.get_cann_version(),
    }


def take(step: Step, device: str, folder: Path, run: Run) -> None:
    """Run a step and read its report."""
    target = folder / f"{step.command}-{step.mode}.json"
    target.unlink(missing_ok=True)
    step.arguments += [
        "--device",
        device,
        "--mode",
        step.mode,
        "--output",
        str(target),
        str(target.with_suffix(".md")),
    ]
    code = run(step.command, step.arguments)
    if target.exists():
        step.report = json.loads(target.read_text(encoding="utf-8"))
    passed = code == 0 and step.report is not None and step.report["success"]
    step.status = "passed" if passed else "failed"
    if not passed:
        step.reason = (step.report or {}).get("error") or f"exit status {code}"


def check(
    modes: Sequence[str],
    folder: Path,
    run: Run,
    extra: Sequence[str] = (),
    *,
    device: str = "npu",
    commands: Sequence[str] = COMMANDS,
) -> list[Step]:
    """Every step, in order; what could not run says why."""
    steps = []
    for mode in modes:
        proven = True
        for command in commands:
            step = Step(command, mode, list(extra) if command == "numerics" else [])
            steps.append(step)
            if find_spec(f"layout_kernels.{command}") is None:
                step.reason = f"this tree has no layout_kernels.{command}"
            elif not proven:
                step.reason = "no speed is measured where a number is wrong"
            else:
                take(step, device, folder, run)
                proven = step.status == "passed"
    return steps


def markdown(found: dict[str, Any], steps: Sequence[Step], folder: Path) -> str:
    """The summary, then each command's own report."""
    facts = ", ".join(f"{key} {value}" for key, value in found.items() if key != "evidence")
    table = Table("Steps", ("command", "mode", "status", "cases", "reason"))
    for step in steps:
        counts = (step.report or {}).get("coverage", {})
        cases = ", ".join(f"{number} {name.replace('_', ' ')}" for name, number in counts.items())
        table.rows.append((step.command, step.mode, step.status, cases, step.reason or ""))
    lines = [f"# Ascend check: {found['evidence']}", "", facts, "", markdown_table(table)]
    for step in steps:
        text = folder / f"{step.command}-{step.mode}.md"
        if step.report is not None and text.exists():
            lines += ["", text.read_text(encoding="utf-8").replace("\n#", "\n##").replace("# ", "## ", 1)]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None, run: Run = in_a_process) -> int:
    """Command line; see the module. `run` runs a command of the package with arguments and returns its exit status."""
    parser = argparse.ArgumentParser(prog="tools.npu_check", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--operation", nargs="+", metavar="NAME", help="prove these only; default: every operation")
    parser.add_argument("--output", type=Path, default=Path("npu_check"), metavar="FOLDER")
    options = parser.parse_args(arguments)
    try:
        found = card()
    except RuntimeError as error:
        print(f"npu_check: {error}", file=sys.stderr)
        return 2
    options.output.mkdir(parents=True, exist_ok=True)
    extra = ["--operation", *options.operation] if options.operation else []
    steps = check(options.modes, options.output, run, extra)
    created = datetime.now(UTC).isoformat(timespec="seconds")
    payload = {"created": created, **found, "steps": [asdict(step) for step in steps]}
    (options.output / "npu_check.json").write_text(json.dumps(payload, indent=1) + "\n", encoding="utf-8")
    text = markdown(found, steps, options.output)
    (options.output / "npu_check.md").write_text(text, encoding="utf-8")
    print(text.partition("\n## ")[0])
    print(f"reports: {options.output}")
    ran = [step for step in steps if step.status != "not run"]
    return 0 if ran and all(step.status == "passed" for step in ran) else 1


if __name__ == "__main__":
    sys.exit(main())
