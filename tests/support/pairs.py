"""The stock model beside the same checkpoint with our layers, and how the two are compared."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from layout_kernels import kernel_plugins as kp
from tests.support.loads import by_hand, load
from tests.support.observed import TREES, mapping, ours
from tests.support.tiny import tokens

KINDS = ("norm", "MLP", "fusion", "norm and fusion")
LIVE = ("live", "auto")
# Where a kernel comes from (a load inside kernel_loading(), a plain load, a live model), and which.
EVERY_WAY = (*((place, kind) for place in ("inside", "by hand") for kind in KINDS), LIVE)
# One load that merges and fuses, and one live model: for what happens after a model has got its layers.
TWO_WAYS = (("inside", "norm and fusion"), LIVE)
Way = tuple[str, str]
Weights = dict[str, torch.Tensor]


def with_kernels(name: str, folder: Path, way: Way, kernel: Any, **options: Any) -> Any:
    """The model in ``folder`` with our layers, each of which runs, the MLPs in one call."""
    place, kind = way
    if place == "live":
        model = kp.apply_default_kernels(load(TREES[name], folder, None, **options), kind)
    else:
        with kernel.kernel_loading() if place == "inside" else by_hand():
            model = load(TREES[name], folder, mapping(name, kind), **options)
    assert len(ours(model)) >= 2
    assert in_one_call(model, kernel)
    return model


def pair(folder: Path, way: Way, kernel: Any, name: str = "llama", **options: Any) -> tuple[Any, Any]:
    """The stock model and ours."""
    return load(TREES[name], folder, None, **options), with_kernels(name, folder, way, kernel, **options)


def in_one_call(model: Any, kernel: Any) -> bool:
    """Whether no gated MLP with our layer calls its products as modules."""
    return not any("called as modules" in row.fallback for row in kernel.report(model).rows)


def apart(found: Weights, expected: Weights) -> float:
    """The largest difference over all tensors, in units of the largest entry of each."""
    assert list(found) == list(expected)
    return max(_apart(found[name], value) for name, value in expected.items())


def _apart(found: torch.Tensor, expected: torch.Tensor) -> float:
    found, expected = whole(found).detach().float(), whole(expected).detach().float()
    assert found.shape == expected.shape
    size = expected.abs().max().clamp(min=1e-3) if expected.numel() else torch.ones(())
    return float((found - expected).abs().max() / size) if expected.numel() else 0.0


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A sharded tensor put together; every rank must ask."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=tokens()).logits


def same_logits(found: Any, expected: Any, relative: float = 1e-5) -> bool:
    """Equal but for the order in which float32 sums are added up: about 100 roundings of the largest logit."""
    first, second = logits(found), logits(expected)
    return first.dtype == second.dtype and _apart(first, second) <= relative


def gradients(model: Any, run: Callable[..., Any] | None = None) -> Weights:
    """Gradients of a loss by name, of all that have one."""
    model.zero_grad()
    (model if run is None else run)(input_ids=tokens(), labels=tokens()).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def same_gradients(found: Any, expected: Any, relative: float = 1e-5) -> bool:
    """As `same_logits`, relative to the largest entry of each gradient."""
    return apart(gradients(found), gradients(expected)) <= relative


def steps(model: Any, optimizer: Any, number: int = 3) -> Any:
    """Train ``number`` steps on one batch."""
    model.train()
    for _ in range(number):
        optimizer.zero_grad()
        model(input_ids=tokens(), labels=tokens()).loss.backward()
        optimizer.step()
    return model


def adamw(model: Any) -> torch.optim.AdamW:
    """AdamW whose eps is of the size of a gradient, so that a rounding of a small gradient moves no weight by lr."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.1, eps=1e-3)


def weights(model: Any, names: Iterable[str] | None = None) -> Weights:
    """Copies of the parameters, by name."""
    wanted = None if names is None else set(names)
    return {n: whole(p).detach().clone() for n, p in model.named_parameters() if wanted is None or n in wanted}
