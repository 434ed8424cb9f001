"""The check of the Triton kernels sees what it is there to see. Processes of their own, since it replaces a driver."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SPILLING = """
import functools, torch
from tools.check_cuda import compiling
from tools.check_cuda.__main__ import _fault
from tools.check_cuda.calls import Call
from layout_kernels.ops.rms_norm import triton as kernels
make = functools.partial(compiling.meta, torch.float32)
call = Call("rms_norm", "fp32", 4096, None)
[good] = compiling.launches(lambda: kernels.rms_norm(make(4, 4096), make(4096), 1e-6, "cast_then_scale"))
assert not _fault(call, good, [compiling.cost(good, 90)]), "a kernel that fits is faulted"
# 16 values of each of several tensors do not fit into 32 registers.
bad = good._replace(options={**good.options, "maxnreg": 24})
assert compiling.cost(bad, 90).spilled > 0
assert "SPILLS" in _fault(call, bad, [compiling.cost(bad, 90)])
wide = good._replace(options={**good.options, "num_warps": 32})
assert "MORE REGISTERS" in _fault(call, wide, [compiling.Cost(72, 0, 0)])
"""
MOVING = """
from tools import triton_interpreter
triton_interpreter.repair()
import torch
from tools.check_cuda.calls import Call
from tools.check_cuda.moving import moved
from layout_kernels.ops.rms_norm import triton as kernels
def run(make, rows):
    x = make(rows, 64)
    return {"x": x}, lambda: kernels.rms_norm(x, None, 1e-6, "cast_then_scale")
def twice(make, rows):
    x = make(rows, 64)
    return {"x": x}, lambda: (kernels.rms_norm(x, None, 1e-6, "cast_then_scale"),
                              kernels.rms_norm(x, None, 1e-6, "cast_then_scale"))[0]
once = moved(Call("rms_norm", "fp32", 64, run))
assert once.rows == once.least == 2 * 3 * 64 * 4 and once.sums == 0, once
again = moved(Call("rms_norm", "fp32", 64, twice))
assert again.rows > again.least and again.sums > 0, again
"""


def in_a_process(code: str, interpret: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TRITON_INTERPRET": interpret, "PYTHONPATH": f"{ROOT}:{ROOT / 'torch-ext'}"}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)


def test_a_kernel_that_spills_or_cannot_be_launched_is_a_fault():
    done = in_a_process(SPILLING, "0")
    assert done.returncode == 0, done.stderr


def test_a_tensor_that_is_read_twice_is_counted_twice():
    done = in_a_process(MOVING, "1")
    assert done.returncode == 0, done.stderr
