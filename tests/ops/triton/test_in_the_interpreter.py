"""Runs every test of `interpreted/` in a process whose Triton interprets, and counts them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.support.triton_report import INTERPRETED
from tools import triton_interpreter

HERE = Path(__file__).parent
ROOT = HERE.parents[2]


def test_every_case_of_every_kernel_passes_in_the_interpreter(record_property):
    assert not triton_interpreter.is_on(), "run the folder interpreted/ itself in a process that interprets"
    # NumPy warns where eager PyTorch is silent: a quotient by zero, an infinity times zero.
    command = [sys.executable, "-W", "ignore::RuntimeWarning", "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(HERE / "interpreted")], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    found = re.search(r"(\d+) passed", done.stdout)
    assert found is not None, done.stdout[-2000:]
    assert "skipped" not in done.stdout.splitlines()[-1]
    record_property(INTERPRETED, int(found[1]))
