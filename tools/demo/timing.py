"""Speed of two models side by side, and what loading one costs.

Speeds are taken in one process, the two models in turn (decoding changes over after each token), so that whatever else
the machine does hits both; a ratio is the median of the turns' own ratios.
Loading and peak memory are taken in a fresh process for each model, since memory that one model took would hide what
the other needs.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from layout_kernels.benchmark.memory import process_peak_mib
from layout_kernels.benchmark.timers import Burst, seconds_of
from layout_kernels.benchmark.turns import medians
from tools.project import ROOT

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


@dataclass(frozen=True)
class LoadCost:
    """What a fresh process needs to load one model and answer: seconds of loading, peak of memory in MiB."""

    seconds: float
    peak_mib: float


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


def measure_load(kind: str, checkpoint: Path) -> LoadCost:
    """Load cost of the model `kind` ("stock" or "kernels") in a process of its own.

    Raises:
        RuntimeError: if that process fails; its output is in the message.
    """
    command = [sys.executable, "-m", "tools.demo.timing", kind, str(checkpoint)]
    result = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise RuntimeError(f"loading the {kind} model failed in a process of its own:\n{result.stderr.strip()}")
    return LoadCost(**json.loads(result.stdout.splitlines()[-1]))


def main(kind: str, checkpoint: Path) -> None:
    """Body of the process that `measure_load` starts: load, answer a little, print the cost as JSON."""
    import transformers

    from tools.demo import models

    transformers.utils.logging.disable_progress_bar()
    load = {"stock": models.load_stock, "kernels": models.load_with_kernels}[kind]
    loaded: list[nn.Module] = []
    seconds = seconds_of(lambda: loaded.append(load(checkpoint)), time.perf_counter)
    decode_stepper(loaded[0], torch.arange(PREFILL_TOKENS).reshape(1, -1))()
    print(json.dumps({"seconds": seconds, "peak_mib": process_peak_mib()}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
