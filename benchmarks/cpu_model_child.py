"""One variant of the model in a process of its own, which obeys the lines on its standard input.

The first line that it prints says the peak of its memory after loading, a prefill and a little decoding; each command
is answered by one line of JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.cpu_timing import clock
from tools.demo import models, timing
from tools.demo.__main__ import encode
from tools.demo.comparison import Trace, compare, follow

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
    found = {row.name: row.implementation for row in models.count_layers(model)}
    wanted = set() if kind == KINDS[0] else set(models.OPERATIONS)
    if set(found) != wanted or not all("native" in name for name in found.values()):
        raise RuntimeError(f"{kind}: our layers in the model are {found}, expected {sorted(wanted)}, native")
    linears = {module.forward.__qualname__ for module in model.modules() if type(module) is torch.nn.Linear}
    if kind == KINDS[2] and linears != {"Linear.forward"}:
        raise RuntimeError(f"{kind}: the plain linear layers run {sorted(linears)}")


class Child:
    """The commands."""

    def __init__(self, kind: str, checkpoint: Path, threads: int) -> None:
        from transformers import AutoTokenizer

        torch.set_num_threads(threads)
        self._model = load(kind, checkpoint)
        check_layers(kind, self._model)
        self._question = encode(AutoTokenizer.from_pretrained(checkpoint))
        self._prompt = self._question.repeat(1, -(-PREFILL // self._question.shape[1]))[:, :PREFILL]
        self._cache: Any = None

    def threads(self, count: str) -> None:
        """Use that many from now on."""
        torch.set_num_threads(int(count))

    @torch.inference_mode()
    def prefill(self) -> float:
        """Microseconds of a forward over the prompt."""
        now = clock()
        start = now()
        output = self._model(input_ids=self._prompt, use_cache=True, logits_to_keep=1)
        took = now() - start
        self._cache = output.past_key_values
        return took * 1e6

    @torch.inference_mode()
    def decode(self, count: str) -> float:
        """Microseconds of the shortest of `count` steps of one token after the prompt."""
        now, times = clock(), []
        for _ in range(int(count)):
            start = now()
            self._model(input_ids=self._prompt[:, -1:], past_key_values=self._cache, use_cache=True)
            times.append(now() - start)
        return min(times) * 1e6

    def peak(self) -> float:
        """MiB."""
        return timing.peak_mib()

    def sizes(self) -> dict[str, int]:
        """Elements of the linear layers' weights, without and with the output's."""
        head = self._model.get_output_embeddings()
        linears = [module for module in self._model.modules() if isinstance(module, torch.nn.Linear)]
        layers = sum(module.weight.numel() for module in linears if module is not head)
        return {"layers": layers, "head": head.weight.numel()}

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
    print(json.dumps({"answer": child.peak()}), flush=True)
    for line in sys.stdin:
        name, *arguments = line.rstrip("\n").split(" ", 1)
        print(json.dumps({"answer": getattr(child, name)(*arguments)}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
