"""The workloads of `kernels benchmark .`, as it runs them on the built kernel."""

from __future__ import annotations

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch
from kernels.benchmark import Benchmark

FILE = Path(__file__).parents[2] / "benchmarks" / "benchmark.py"
# Of `kernels` itself, which compares so.
ABSOLUTE_TOLERANCE = 1e-2


def workloads():
    spec = spec_from_file_location("workloads", FILE)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return [kind for kind in vars(module).values() if isinstance(kind, type) and issubclass(kind, Benchmark)]


@pytest.mark.parametrize("size", ["decode", "prefill"])
@pytest.mark.parametrize(
    "kind", [kind for kind in workloads() if kind is not Benchmark], ids=lambda kind: kind.__name__
)
def test_a_workload_runs_and_a_wrong_result_would_show(kernel, kind, size):
    workload = kind()
    workload.kernel, workload.device = kernel, "cpu"
    getattr(workload, f"setup_{size}")()
    workload.out = None
    getattr(workload, f"benchmark_{size}")()
    expected = getattr(workload, f"verify_{size}")()
    assert torch.allclose(workload.out, expected, atol=ABSOLUTE_TOLERANCE)
    assert not torch.allclose(workload.out * 1.1, expected, atol=ABSOLUTE_TOLERANCE)
