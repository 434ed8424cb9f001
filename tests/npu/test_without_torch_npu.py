"""A machine without torch_npu can import everything but the `npu` modules, and says why they are left out."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import sys
import layout_kernels
from layout_kernels.dispatch.catalog import discover, import_backends
import layout_kernels.ops.ascend, layout_kernels.layers
excluded = {name: import_backends(entry, "npu") for name, entry in discover().items()}
wanted = "requires torch_npu, which is not installed"
assert excluded["rms_norm"]["npu"] == excluded["rms_norm_mlp"]["npu"] == wanted, excluded
kernels = layout_kernels.initialize("npu")
assert {kernel.spec.solution for kernel in kernels.values()} == {"reference"}, kernels
assert kernels["gated_activation"].excluded["npu"] == wanted
assert "torch_npu" not in sys.modules
"""


def test_the_reference_is_bound_and_the_reason_kept() -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT / "torch-ext")}
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr


def test_the_check_for_a_card_ends_with_the_reason() -> None:
    command = [sys.executable, "-m", "tools.npu_check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 2
    assert "torch_npu cannot be imported" in done.stderr
