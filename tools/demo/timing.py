"""Speed of two models side by side, and what loading one costs.

Speeds are taken in one process, the two models in turn (decoding changes over after each token) and the order changing
from round to round, so that whatever else the machine does hits both; a ratio is the median of the rounds' own ratios.
Loading and peak memory are taken in a fresh process for each model, since memory that one model took would hide what
the other needs.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from tools.project import ROOT

PREFILL_TOKENS = 512
PREFILL_ROUNDS = 5
DECODE_ROUNDS = 48


@dataclass(frozen=True)
class Speed:
    """Median speeds in tokens a second, and the median of the rounds' ratios (above 1: ours is faster)."""

    stock: float
    ours: float
    ratio: float


@dataclass(frozen=True)
class LoadCost:
    """What a fresh process needs to load one model and answer: seconds of loading, peak of memory in MiB."""

    seconds: float
    peak_mib: float


@torch.inference_mode()
def time_prefill(model: nn.Module, prompt: torch.Tensor) -> float:
    """Seconds for one forward over `prompt` [1, T]."""
    start = time.perf_counter()
    model(input_ids=prompt, use_cache=True, logits_to_keep=1)
    return time.perf_counter() - start


def decode_stepper(model: nn.Module, prompt: torch.Tensor) -> Callable[[], float]:
    """A function that runs one more single-token forward after `prompt` [1, T] and returns its seconds."""
    with torch.inference_mode():
        cache = model(input_ids=prompt, use_cache=True, logits_to_keep=1).past_key_values
    token = prompt[:, -1:]

    @torch.inference_mode()
    def step() -> float:
        start = time.perf_counter()
        model(input_ids=token, past_key_values=cache, use_cache=True)
        return time.perf_counter() - start

    return step


def interleave(stock: Callable[[], float], ours: Callable[[], float], tokens: int, rounds: int) -> Speed:
    """Run the two measurements in turn, after one unmeasured run of each."""
    stock()
    ours()
    pairs: list[tuple[float, float]] = []
    for index in range(rounds):
        if index % 2:
            second = ours()
            pairs.append((stock(), second))
        else:
            first = stock()
            pairs.append((first, ours()))
    return Speed(
        stock=tokens / statistics.median(pair[0] for pair in pairs),
        ours=tokens / statistics.median(pair[1] for pair in pairs),
        ratio=statistics.median(first / second for first, second in pairs),
    )


def measure_speeds(stock: nn.Module, ours: nn.Module, prompt: torch.Tensor) -> tuple[Speed, Speed]:
    """Prefill over the prompt, repeated to PREFILL_TOKENS, and decode after the prompt [1, T]."""
    long = prompt.repeat(1, -(-PREFILL_TOKENS // prompt.shape[1]))[:, :PREFILL_TOKENS]
    prefill = interleave(
        lambda: time_prefill(stock, long), lambda: time_prefill(ours, long), PREFILL_TOKENS, PREFILL_ROUNDS
    )
    decode = interleave(decode_stepper(stock, prompt), decode_stepper(ours, prompt), 1, DECODE_ROUNDS)
    return prefill, decode


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
    start = time.perf_counter()
    model = load(checkpoint)
    seconds = time.perf_counter() - start
    prompt = torch.arange(PREFILL_TOKENS).reshape(1, -1)
    time_prefill(model, prompt)
    decode_stepper(model, prompt)()
    print(json.dumps({"seconds": seconds, "peak_mib": peak_mib()}))


def peak_mib() -> float:
    """Peak of this process's memory in MiB, from Linux's /proc.

    Not ru_maxrss: that one survives exec, so a child of a large process starts with its parent's peak.
    """
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
