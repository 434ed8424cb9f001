"""Workloads for `kernels benchmark .`, in its own format: it loads the built kernel, checks and times each.

`kernels` runs this file alone, against the built kernel, and compares with an absolute tolerance of 0.01: hence
float32, inputs from the built kernel's own `numerics`, and PyTorch's operators to compare with. Numbers to be relied
on come from `python -m layout_kernels.benchmark`, which this does not replace.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from kernels.benchmark import Benchmark
from torch.nn import functional


class _Workload:
    """One operation of the kernel on the arguments of one of its cases; no Benchmark, which `kernels` would run."""

    seed = 0
    kernel: Any
    device: str

    def _prepare(self, operation: str, shape: tuple[int, ...], **settings: Any) -> None:
        """The arguments of a case, as the kernel's own numerics makes them, on the benchmark's device."""
        suite = import_module(f"{self.kernel.__name__}.numerics.{operation}")
        made = suite.arguments(suite.Case(shape, "float32", settings=settings))
        self.arguments = [value.to(self.device) if isinstance(value, torch.Tensor) else value for value in made]
        self.function = getattr(self.kernel, operation)
        self.out = self.function(*self.arguments)

    def _run(self) -> None:
        self.out = self.function(*self.arguments)


class RMSNormBenchmark(_Workload, Benchmark):
    """`rms_norm`, one token and a prompt."""

    def setup_decode(self) -> None:
        """One row."""
        self._prepare("rms_norm", (1, 2048))

    def setup_prefill(self) -> None:
        """512 rows."""
        self._prepare("rms_norm", (512, 2048))

    benchmark_decode = benchmark_prefill = _Workload._run

    def verify_decode(self) -> torch.Tensor:
        """PyTorch's own norm."""
        x, weight, eps, _ = self.arguments
        return functional.rms_norm(x, weight.shape, weight, eps)

    verify_prefill = verify_decode


class GatedActivationBenchmark(_Workload, Benchmark):
    """`gated_activation`, one token and a prompt."""

    def setup_decode(self) -> None:
        """One row."""
        self._prepare("gated_activation", (1, 2 * 6144))

    def setup_prefill(self) -> None:
        """512 rows."""
        self._prepare("gated_activation", (512, 2 * 6144))

    benchmark_decode = benchmark_prefill = _Workload._run

    def verify_decode(self) -> torch.Tensor:
        """silu of one half times the other."""
        gate, up = self.arguments[0].chunk(2, dim=-1)
        return functional.silu(gate) * up

    verify_prefill = verify_decode


class RMSNormMLPBenchmark(_Workload, Benchmark):
    """`rms_norm_mlp`, one token and a short prompt."""

    def setup_decode(self) -> None:
        """One row."""
        self._prepare("rms_norm_mlp", (1, 1024), factor=3)

    def setup_prefill(self) -> None:
        """64 rows."""
        self._prepare("rms_norm_mlp", (64, 1024), factor=3)

    benchmark_decode = benchmark_prefill = _Workload._run

    def verify_decode(self) -> torch.Tensor:
        """The norm and the gated MLP behind it, operator by operator."""
        x, weight, gate_up, down, eps, *_ = self.arguments
        gate, up = functional.linear(functional.rms_norm(x, weight.shape, weight, eps), gate_up).chunk(2, dim=-1)
        return functional.linear(functional.silu(gate) * up, down)

    verify_prefill = verify_decode
