"""Speed of two models side by side.

Speeds are taken in one process, the two models in turn (decoding changes over after each token), so that whatever else
the machine does hits both; a ratio is the median of the turns' own ratios.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from layout_kernels.benchmark.timers import Burst
from layout_kernels.benchmark.turns import medians

PREFILL_TOKENS = 512
# Each model has two turns a round.
PREFILL_ROUNDS = 3
DECODE_ROUNDS = 24


@dataclass(frozen=True)
class Speed:
    """Median speeds in tokens a second, the median of the turns' ratios (above 1: ours is faster), what disturbed."""

    stock: float
    ours: float
    ratio: float
    disturbance: str | None = None


@torch.inference_mode()
def prefill(model: nn.Module, prompt: torch.Tensor) -> Any:
    """One forward over `prompt` [1, T]; its cache."""
    return model(input_ids=prompt, use_cache=True, logits_to_keep=1).past_key_values


@torch.inference_mode()
def step(model: nn.Module, token: torch.Tensor, cache: Any) -> None:
    """One more forward over `token` [1, 1], which lengthens the cache."""
    model(input_ids=token, past_key_values=cache, use_cache=True)


def decode_stepper(model: nn.Module, prompt: torch.Tensor) -> Callable[[], None]:
    """A function that decodes one more token after `prompt` [1, T]."""
    return partial(step, model, prompt[:, -1:], prefill(model, prompt))


def beside(stock: Callable[[], Any], ours: Callable[[], Any], tokens: int, rounds: int) -> Speed:
    """Run the two in turn, after one unmeasured run of each."""
    found = medians({"stock": Burst(stock, 1), "ours": Burst(ours, 1)}, "cpu", rounds=rounds)
    per_second = {name: tokens / found.summary(name)["median"] for name in found.samples}
    return Speed(**per_second, ratio=found.ratio("stock", "ours"), disturbance=found.disturbance())


def measure_speeds(stock: nn.Module, ours: nn.Module, prompt: torch.Tensor) -> tuple[Speed, Speed]:
    """Prefill over the prompt, repeated to PREFILL_TOKENS, and decode after the prompt [1, T]."""
    long = prompt.repeat(1, -(-PREFILL_TOKENS // prompt.shape[1]))[:, :PREFILL_TOKENS]
    return (
        beside(partial(prefill, stock, long), partial(prefill, ours, long), PREFILL_TOKENS, PREFILL_ROUNDS),
        beside(decode_stepper(stock, prompt), decode_stepper(ours, prompt), 1, DECODE_ROUNDS),
    )
