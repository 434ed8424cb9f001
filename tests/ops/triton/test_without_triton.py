"""The CUDA variant on a machine without Triton: it imports, the reference runs, and `excluded` says why."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import importlib.util, sys
from pathlib import Path
sys.modules["triton"] = None  # as if it were not installed
folder = Path({folder!r})
kernels = sorted(file.parent.name for file in folder.glob("ops/*/triton.py"))
assert kernels == ["gated_activation", "gated_rms_norm", "rms_norm", "rms_norm_mlp"], kernels
where = [str(folder)]
spec = importlib.util.spec_from_file_location("a_build", folder / "__init__.py", submodule_search_locations=where)
package = importlib.util.module_from_spec(spec)
sys.modules["a_build"] = package
spec.loader.exec_module(package)
import a_build.ops.rms_norm
for name, plan in package.initialize("cuda").items():
    if name.startswith(("rms_norm", "gated_")):
        assert plan.spec.solution == "reference", plan
        assert "triton" in plan.excluded["triton"], plan.excluded
"""


def test_the_built_variant_carries_the_kernels_and_says_what_they_need(built_kernel):
    folder = built_kernel / "torch-cuda"
    done = subprocess.run(
        [sys.executable, "-c", CODE.format(folder=str(folder))], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
