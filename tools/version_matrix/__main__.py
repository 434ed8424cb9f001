"""`python -m tools.version_matrix`: try every combination of versions that the documents name, write docs/versions.md.

Each has a fresh virtual environment in a temporary folder. torch is installed alone and first, as a CPU build
(`torch==X+cpu`, which PyPI does not have: the wheels there bring gigabytes of CUDA), and pinned by a constraints file
while the others are installed, so that no resolver replaces it. The variants are built once, by this environment.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from typing import NamedTuple

from tools.build_variants import build
from tools.version_matrix.checks import NAMES, REPO

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "versions.md"
MOST_SECONDS = 900


class Versions(NamedTuple):
    """One combination."""

    transformers: str
    kernels: str
    torch: str = "2.13.0"


TRANSFORMERS = ("5.20.0", "5.20.1", "5.20.2", "5.21.0", "5.21.1", "5.22.0", "5.22.1", "5.22.2")
COMBINATIONS = (
    *(Versions(release, "0.17.2") for release in TRANSFORMERS),
    *(Versions(release, "0.18.2") for release in ("5.23.0", "5.24.0")),
    *(Versions("5.22.2", "0.17.2", torch) for torch in ("2.10.0", "2.11.0", "2.12.0")),
)


def _run(command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=MOST_SECONDS,
    )


def _install(python: str, folder: Path, versions: Versions) -> str | None:
    """Why an environment cannot be had, or None."""
    torch = f"torch=={versions.torch}+cpu"
    constraints = folder / "constraints.txt"
    constraints.write_text(f"{torch}\n", encoding="utf-8")
    others = [f"transformers=={versions.transformers}", f"kernels=={versions.kernels}"]
    if _run([python, "-m", "pip", "install", "--quiet", torch]).returncode:
        return f"not tried: pip has no {torch}, and other builds bring CUDA"
    done = _run([python, "-m", "pip", "install", "--quiet", *others, f"-c{constraints}"])
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
        return (
            f"not tried: {(errors or ['pip failed'])[0].removeprefix('ERROR: ').partition(' (from versions')[0][:160]}"
        )
    return None


def attempt(versions: Versions, variants: Path) -> dict[str, str]:
    """The result of each check, or `environment` with the reason why there is none."""
    with tempfile.TemporaryDirectory(prefix="versions-") as name:
        folder = Path(name)
        venv.create(folder / "venv", with_pip=True)
        python = str(folder / "venv" / "bin" / "python")
        try:
            reason = _install(python, folder, versions)
            if reason is not None:
                return {"environment": reason}
            program = str(Path(__file__).with_name("checks.py"))
            done = _run(
                [python, program, str(variants), name],
                LOCAL_KERNELS=f"{REPO}={variants}",
                HF_HUB_OFFLINE="1",
                HF_HOME=str(folder / "cache"),
                PYTHONPATH="",
            )
        except subprocess.TimeoutExpired as error:
            return {"environment": f"took more than {error.timeout} seconds"}
    if done.returncode:
        return {"environment": f"ended with {done.returncode}: {done.stderr.strip().splitlines()[-1:]}"}
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


def row(versions: Versions, found: dict[str, str]) -> str:
    """A line of the table."""
    cells = [found.get("environment", "") or found.get(NAMES[0], ""), *(found.get(name, "") for name in NAMES[1:])]
    return "| " + " | ".join([*versions, *(cell.replace("|", "/") for cell in cells)]) + " |"


def page(rows: list[str]) -> str:
    """docs/versions.md."""
    place = f"Python {platform.python_version()}, {platform.machine()}"
    return f"""# Versions that were tried

Written by `make version-matrix` ({place}), each row in an environment of its own.

- doctor: it is content, and the norm that runs.
- load: a tiny Llama under a norm key and a fusion key equals stock, and the report has our layers.
- save: it writes the stock checkpoint, and a stock load afterwards is stock.
- apply: kernels on a live model equal stock, and `undo` gives that back.

| transformers | kernels | torch | {" | ".join(NAMES)} |
|{" --- |" * (3 + len(NAMES))}
""" + "".join(f"{line}\n" for line in rows)


def main() -> int:
    """Try all of them and write the page; 1 where one that could be tried did not pass."""
    parser = argparse.ArgumentParser(prog="version_matrix", description=__doc__)
    parser.add_argument("--only", metavar="TRANSFORMERS", nargs="+", help="releases to try; nothing is written then")
    options = parser.parse_args()
    rows, failed = [], False
    with tempfile.TemporaryDirectory(prefix="variants-") as name:
        variants = Path(name)
        build(variants)
        for versions in COMBINATIONS:
            if options.only and versions.transformers not in options.only:
                continue
            found = attempt(versions, variants)
            passed = len(found) == len(NAMES) and all(found[check] == "passed" for check in NAMES[1:])
            failed |= not passed and not found.get("environment", "").startswith("not tried")
            rows.append(row(versions, found))
            print(rows[-1], flush=True)
    if not options.only:
        PAGE.write_text(page(rows), encoding="utf-8")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
