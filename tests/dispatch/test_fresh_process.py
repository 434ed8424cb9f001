from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "torch-ext"


def _run(code, **variables):
    # A fresh process: overrides are read when a device is bound, which happens once.
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", **variables}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120)


def test_an_override_that_is_nonsense_fails_with_the_choices():
    code = "import layout_kernels; layout_kernels.initialize('cpu')"
    done = _run(code, LAYOUT_KERNELS_OVERRIDE_RMS_NORM="nonsense")
    assert done.returncode == 1
    assert "override 'nonsense' selects nothing for rms_norm on cpu in mode eager; choices: " in done.stderr
    assert "reference.rms_norm (solution reference)" in done.stderr


def test_an_override_to_the_reference_runs_and_is_reported():
    code = (
        "import torch, layout_kernels as k\n"
        "y = k.rms_norm(torch.ones(2, 4), torch.ones(4))\n"
        "print(k.prepare_rms_norm().spec.name, y.sum().item())\n"
    )
    done = _run(code, LAYOUT_KERNELS_OVERRIDE_RMS_NORM="reference")
    assert done.stderr == ""
    name, total = done.stdout.split()
    assert name == "reference.rms_norm"
    # Eight ones over sqrt(1 + eps) each, eps being 1e-6.
    assert float(total) == pytest.approx(8.0, rel=1e-6)


def test_discovery_and_registration_load_no_torch_and_no_sdk():
    code = (
        "import sys, layout_kernels\n"
        "from layout_kernels import BasePlugin, register_kernel, initialize, prepare_rms_norm\n"
        "from layout_kernels.dispatch.catalog import discover\n"
        "from layout_kernels.ops.rms_norm import CONTRACT\n"
        "import layout_kernels.numerics.rms_norm, layout_kernels.dispatch.custom_ops\n"
        "register_kernel(name='mine', contract=CONTRACT, device='cpu', execution_modes=('eager',),\n"
        "                input_domain='all', solution='mine')(len)\n"
        "assert len(discover()) >= 7\n"
        "loaded = {'torch', 'triton', 'torch_npu', 'transformers', 'kernels', 'numpy'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
    )
    done = _run(code)
    assert (done.returncode, done.stderr) == (0, "")
