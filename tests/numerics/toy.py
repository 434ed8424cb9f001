"""An operation with arguments of its own that returns a mapping; what shared code must prove without knowing it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from layout_kernels.dispatch import KernelSpec, OpContract, PreparedKernel
from layout_kernels.numerics.checks import validate_call
from layout_kernels.numerics.suite import OperationSuite, PreparedCase

CONTRACT = OpContract("toy", 1, (), False, "exact")


def correct(x, scale):
    return {"scaled": x * scale, "parts": [x + 1, (x * 0).to(torch.int32)]}


def plan(function, name="candidate.toy") -> PreparedKernel:
    return PreparedKernel(
        KernelSpec(name, CONTRACT, "cpu", ("eager",), "all", "toy"), function, {"toy.gone": "absent"}
    )


@dataclass
class ToyCase:
    size: int
    scale: float
    can_change: bool = True

    @property
    def case_id(self):
        return f"size={self.size},scale={self.scale},seed=0"

    @property
    def parameters(self):
        return {"size": self.size, "scale": self.scale}

    def unsupported_reason(self, plan):
        return "size 13 is not taken" if self.size == 13 else None

    def values(self, seed):
        return torch.randn(self.size, generator=torch.Generator().manual_seed(seed))

    def prepare(self, plan):
        x = self.values(0)
        held = {"seed": 0}

        def judge(result):
            wanted = correct(self.values(held["seed"]), self.scale)
            for one, other in ((result["scaled"], wanted["scaled"]), (result["parts"][0], wanted["parts"][0])):
                if not torch.equal(one, other):
                    return f"{one.tolist()} is not {other.tolist()}"
            return None

        def validate(function):
            return validate_call(
                function,
                inputs={"x": x},
                mutates=(),
                aliases_inputs=False,
                device="cpu",
                expected=correct(self.values(0).to("meta"), self.scale),
                judge=judge,
            )

        def change(seed):
            held["seed"] = seed
            x.copy_(self.values(seed))

        metadata = {"bytes": 8 * self.size, "size": self.size}
        return PreparedCase(
            lambda: plan.function(x, self.scale), validate, metadata, change if self.can_change else None
        )


def make_suite(function=correct, *, baseline=correct, case=ToyCase, peers=()) -> OperationSuite:
    """The suite of an operation whose candidate is `function`."""

    def add_arguments(parser):
        parser.add_argument("--sizes", nargs="+", type=int, default=[5])
        parser.add_argument("--scale", type=float, default=2.0)

    def prepare(device, mode, implementation) -> PreparedKernel:
        if implementation == "reference":
            return plan(baseline, "reference.toy")
        return plan(function)

    def cases(options: Any):
        if min(options.sizes) < 1:
            raise ValueError("--sizes must be at least 1")
        return [case(size, options.scale) for size in options.sizes]

    return OperationSuite("toy", add_arguments, cases, prepare, lambda device, mode: peers)
