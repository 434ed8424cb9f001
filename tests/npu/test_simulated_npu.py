"""Runs the tests of `simulated`, each file in a process of its own: a simulated device cannot be taken away again.

What they prove is "simulated NPU": the adapters' logic, and the limits that the vendor documents. No number of a card.
"""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from tests.npu.conftest import IN_SUBPROCESS

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(path.name for path in (Path(__file__).parent / "simulated").glob("test_*.py"))


@pytest.mark.parametrize("name", FILES)
def test_on_the_simulated_npu(name: str, tmp_path: Path, record_property) -> None:
    report = tmp_path / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-x", f"--junitxml={report}", "-p", "no:cacheprovider"]
    environment = {**os.environ, IN_SUBPROCESS: "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, f"tests/npu/simulated/{name}"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    suite = ElementTree.parse(report).getroot()[0].attrib
    record_property("simulated NPU tests passed", suite["tests"])
    assert int(suite["tests"]) > 0
    assert (suite["skipped"], suite["failures"], suite["errors"]) == ("0", "0", "0")


def test_no_file_of_the_simulation_is_left_out() -> None:
    assert {"test_device.py", "test_vendor.py", "test_operations.py", "test_runtime.py", "test_models.py"} <= set(
        FILES
    )
