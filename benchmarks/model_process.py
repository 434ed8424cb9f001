"""One variant of the model in a process of its own, which obeys the lines on its standard input.

The first line that it prints says how long loading took, and the peak of its memory after a prefill and a little
decoding; each command is answered by one line of JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from layout_kernels.benchmark.memory import process_peak_mib
from layout_kernels.benchmark.timers import processor_clock, seconds_of
from tools import source_environment
from tools.demo import models, timing
from tools.demo.comparison import Trace, compare, follow
from tools.project import ROOT

PREFILL = 128
POSITIONS = 32
KINDS = ("stock", "norm + fusion", "norm + fusion + Linear")


def load(kind: str, checkpoint: Path) -> Any:
    """The model of a kind."""
    if kind == KINDS[0]:
        return models.load_stock(checkpoint)
    if kind == KINDS[1]:
        return models.load_with_kernels(checkpoint)
    from transformers import AutoModelForCausalLM, KernelConfig

    name, metadata = models.repository()
    layers = {models.NORM_KEY: "CustomRMSNorm", models.FUSION_KEY: "RMSNormMLP", "Linear": "Linear"}
    config = KernelConfig({key: (f"{name}:{layer}", metadata) for key, layer in layers.items()})
    settings = {"use_kernels": True, "kernel_config": config, "dtype": models.DTYPE}
    with models.kernel().kernel_loading(linear=True):
        return AutoModelForCausalLM.from_pretrained(checkpoint, **settings).eval()


def check_layers(kind: str, model: Any) -> None:
    """A model that was to have our layers and has none must not be taken for ours.

    Raises:
        RuntimeError: it lacks them.
    """
    found = {row.layer: row.implementation for row in models.kernel().report(model).rows}
    wanted = set() if kind == KINDS[0] else {"CustomRMSNorm", "RMSNormMLP"}
    if set(found) != wanted or not all("native" in name for name in found.values()):
        raise RuntimeError(f"{kind}: our layers in the model are {found}, expected {sorted(wanted)}, native")
    # The products inside a fused layer are its own, and their modules are not called.
    inside = {module for layer in ours(model) for module in layer.modules() if layer is not module}
    stock = [
        name
        for name, module in model.named_modules()
        if type(module) is torch.nn.Linear and module not in inside and not runs_our_linear(module)
    ]
    if kind == KINDS[2] and stock:
        raise RuntimeError(f"{kind}: {len(stock)} plain linear layers run PyTorch's forward, the first is {stock[0]}")


def runs_our_linear(module: Any) -> bool:
    """Whether a plain linear layer runs our forward; PyTorch's has the same qualified name."""
    return type(module) is torch.nn.Linear and getattr(module.forward, "__func__", None) is not torch.nn.Linear.forward


def ours(model: Any) -> list[Any]:
    """The modules that are our layers, what is inside of one left out."""
    found: list[Any] = []
    inside: set[Any] = set()
    for module in model.modules():
        if module not in inside and (getattr(module, "is_adopted", False) or runs_our_linear(module)):
            found.append(module)
            inside.update(module.modules())
    return found


class Process:
    """One variant of the model in a process of its own, seen from outside."""

    def __init__(self, kind: str, checkpoint: Path, threads: int) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed with the process
        command = [sys.executable, "-m", "benchmarks.model_process", kind, str(checkpoint), str(threads)]
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=source_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        self.kind = kind

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def answer(self) -> Any:
        """The next answer.

        Raises:
            RuntimeError: the process ended; the end of its output is in the message.
        """
        assert self._process.stdout is not None  # noqa: S101
        for line in self._process.stdout:
            if line.startswith('{"answer"'):
                return json.loads(line)["answer"]
        self._errors.seek(0)
        last = " ".join(self._errors.read().strip().splitlines()[-3:])
        raise RuntimeError(f"the process of {self.kind} ended: {last}")

    def ask(self, command: str) -> Any:
        """The answer to one command."""
        assert self._process.stdin is not None  # noqa: S101
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        return self.answer()


class Stopwatch:
    """Counts the seconds that are spent inside of some functions."""

    def __init__(self) -> None:
        self.now = processor_clock()
        self.spent = 0.0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, counted."""

        def counted(*args: Any, **kwargs: Any) -> Any:
            start = self.now()
            result = function(*args, **kwargs)
            self.spent += self.now() - start
            return result

        return counted

    def outside(self, call: Callable[[], Any]) -> tuple[float, float]:
        """The seconds of a call that are not spent inside, and all of them; both with what the counting takes."""
        self.spent = 0.0
        took = seconds_of(call, self.now)
        return took - self.spent, took


@contextmanager
def watched(model: Any) -> Iterator[Stopwatch]:
    """A stopwatch of our layers' forwards. They work, so the rest of the model finds the caches as they leave them."""
    watch = Stopwatch()
    before = [(module, module.__dict__.get("forward")) for module in ours(model)]
    for module, _ in before:
        module.forward = watch.around(module.forward)
    try:
        yield watch
    finally:
        for module, forward in before:
            del module.forward
            if forward is not None:
                module.forward = forward


class Child:
    """The commands."""

    def __init__(self, kind: str, checkpoint: Path, threads: int) -> None:
        from transformers import AutoTokenizer

        torch.set_num_threads(threads)
        loaded: list[Any] = []
        self.seconds = seconds_of(lambda: loaded.append(load(kind, checkpoint)), time.perf_counter)
        (self._model,) = loaded
        check_layers(kind, self._model)
        self._question = models.encode(AutoTokenizer.from_pretrained(checkpoint))
        self._prompt = self._question.repeat(1, -(-PREFILL // self._question.shape[1]))[:, :PREFILL]
        self._cache: Any = None

    def threads(self, count: str) -> None:
        """Use that many from now on."""
        torch.set_num_threads(int(count))

    def prefill(self) -> float:
        """Microseconds of a forward over the prompt."""
        return seconds_of(self._prefill, processor_clock()) * 1e6

    def decode(self, count: str) -> float:
        """Microseconds of the shortest of `count` steps of one token after the prompt."""
        now = processor_clock()
        return min(seconds_of(self._step, now) for _ in range(int(count))) * 1e6

    def _prefill(self) -> None:
        self._cache = timing.prefill(self._model, self._prompt)

    def _step(self) -> None:
        timing.step(self._model, self._prompt[:, -1:], self._cache)

    def turn(self, count: str) -> dict[str, dict[str, float]]:
        """Microseconds of prefill and decode, and of what a model with our layers spends outside of them."""
        times = {"prefill": self.prefill(), "decode": self.decode(count)}
        return {"times": times, "rests": dict(zip(times, self.rest(count), strict=True)) if ours(self._model) else {}}

    @torch.inference_mode()
    def rest(self, count: str) -> tuple[float, float]:
        """Microseconds outside of our layers, of a prefill and the shortest of `count` steps after it.

        A watched step takes longer than others, by the watching; that is taken off the rest.
        """
        with watched(self._model) as watch:
            prefill, _ = watch.outside(self.prefill)
        steps, times = [], []
        for _ in range(int(count)):
            times.append(self.decode("1"))
            with watched(self._model) as watch:
                steps.append(watch.outside(self._step))
        outside, took = (min(each) * 1e6 for each in zip(*steps, strict=True))
        return prefill * 1e6, outside - max(0.0, took - min(times))

    def sizes(self) -> dict[str, int]:
        """Elements of the weights that our layers multiply by: in the decoder's layers, and in the output's."""
        head = self._model.get_output_embeddings()
        linears = {
            module
            for part in ours(self._model)
            for module in part.modules()
            if isinstance(module, torch.nn.Linear) and module is not head
        }
        layers = sum(module.weight.numel() for module in linears)
        return {"layers": layers, "head": head.weight.numel() if head in ours(self._model) else 0}

    def write_trace(self, path: str) -> None:
        """The greedy answer of this model, for `compare_trace` of the others."""
        torch.save(vars(follow(self._model, self._question, POSITIONS)), path)

    def compare_trace(self, path: str) -> dict[str, int]:
        """How many positions of stock's answer are equal, near ties included."""
        stock = Trace(**torch.load(path))
        led = follow(self._model, self._question, POSITIONS, forced=stock.tokens)
        weights = self._model.get_output_embeddings().weight
        found = compare(stock, led, weights, self._model.config.num_hidden_layers)
        return {"equal": found.equal, "ties": found.ties, "total": found.total}

    def profile(self, what: str) -> list[tuple[str, float]]:
        """The operators that take most of a prefill or a step, with their share of the time."""
        call = self.prefill if what == "prefill" else lambda: self.decode("1")
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            call()
        events = profiler.key_averages()
        total = sum(event.self_cpu_time_total for event in events)
        largest = sorted(events, key=lambda event: -event.self_cpu_time_total)[:6]
        return [(event.key, event.self_cpu_time_total / total) for event in largest]


def main(kind: str, checkpoint: Path, threads: int) -> None:
    """Load, then obey until the input ends."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    child = Child(kind, checkpoint, threads)
    child.prefill()
    child.decode("4")
    print(json.dumps({"answer": {"seconds": child.seconds, "peak_mib": process_peak_mib()}}), flush=True)
    for line in sys.stdin:
        name, *arguments = line.rstrip("\n").split(" ", 1)
        print(json.dumps({"answer": getattr(child, name)(*arguments)}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
