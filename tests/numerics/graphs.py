"""A stand-in for graph capture that runs on the CPU: a replay calls the function again and writes to the outputs."""

from __future__ import annotations

import torch

from layout_kernels.numerics.checks import tensors_in
from layout_kernels.numerics.modes import CaptureError, Runner


class FakeGraph:
    """Set `after_replay` to a function of the list of outputs to make a graph that is wrong."""

    device = None
    after_replay = None
    stale = False

    @classmethod
    def prepare(cls, function, device, calls=64):  # noqa: ARG003, as the real modes
        outputs = [function() for _ in range(calls)]
        kept = [[tensor.clone() for _, tensor in tensors_in(output)] for output in outputs]

        def replay():
            for index, output in enumerate(outputs):
                fresh = kept[index] if cls.stale else [tensor for _, tensor in tensors_in(function())]
                for (_, tensor), new in zip(tensors_in(output), fresh, strict=True):
                    tensor.copy_(new)
            if cls.after_replay is not None:
                cls.after_replay(outputs)

        return Runner(replay, calls, lambda: outputs, is_graph=True)


class BrokenGraph:
    """A capture that fails."""

    device = None

    @staticmethod
    def prepare(function, device, calls=64):  # noqa: ARG004, as the real modes
        raise CaptureError("not permitted while capturing")


def spoil(tensor: torch.Tensor) -> None:
    """Make one element wrong."""
    tensor.view(-1)[-1] += 1
