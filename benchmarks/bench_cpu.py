"""The native CPU kernels beside stock transformers and PyTorch, a verdict a row: `make bench-cpu`.

Everything of a row is measured in turns in one process, and the shortest time of each counts: on a machine that
others use, the shortest is what the code takes. With one thread the thread's processor time is taken, which stands
still while others run. A processor with bf16 instructions runs the bf16 rows twice, the second time as one without:
PyTorch's products limited by ONEDNN_MAX_CPU_ISA, ours by LAYOUT_KERNELS_CPU_LEVEL.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import torch
from report import Row, line, write
from torch.nn import functional
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

import layout_kernels
from layout_kernels.ops import native

EMULATED = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE", "LAYOUT_KERNELS_CPU_LEVEL": "avx512"}
NORM_SHAPES = ((1, 576), (128, 576), (4096, 1024), (4096, 4096), (16384, 128))
MLP_SIZES = ((576, 1536), (1024, 3072), (2048, 8192))
MLP_ROWS = (1, 4, 8, 32, 128, 512)
# Speed over stock that a fused MLP must have, by rows.
MLP_TARGETS = {1: 2.5, 4: 3.0, 8: 3.0, 32: 4.0, 128: 5.0, 512: 5.0}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def shortest(calls: dict[str, Callable[[], Any]], seconds: float) -> dict[str, float]:
    """The shortest time of each call in microseconds, measured in turns for about `seconds` in all."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    repeats = {}
    for name, call in calls.items():
        call()
        start = clock()
        call()
        once = max(clock() - start, 1e-7)
        repeats[name] = max(1, int(seconds / 8 / len(calls) / once))
    best = dict.fromkeys(calls, math.inf)
    end = time.perf_counter() + seconds
    while True:
        for name, call in calls.items():
            start = clock()
            for _ in range(repeats[name]):
                call()
            best[name] = min(best[name], (clock() - start) / repeats[name] * 1e6)
        if time.perf_counter() > end:
            return best


def check(case: str, ours: torch.Tensor, stock: torch.Tensor) -> None:
    """No speed is printed of a result that is wrong: a few roundings of the dtype apart, in the mean.

    Raises:
        RuntimeError: the results differ by more.
    """
    error = float((ours.double() - stock.double()).norm() / stock.double().norm().clamp_min(1e-30))
    if not error < 4 * torch.finfo(stock.dtype).eps + 1e-6:
        raise RuntimeError(f"{case}: the result is off by {error:.2e} of stock's; no speed is measured of it")


def limits(seconds: float) -> tuple[float, float]:
    """Read bandwidth in bytes per microsecond and the rate of an fp32 product in operations per microsecond."""
    many, square = torch.ones(64 << 20), torch.randn(1024, 1024)
    found = shortest({"read": many.sum, "gemm": lambda: square @ square}, seconds)
    return many.nbytes / found["read"], 2 * 1024**3 / found["gemm"]


def compiled(module: Any) -> Any:
    """torch.compile of stock, made anew for one shape."""
    torch._dynamo.reset()
    return torch.compile(module, dynamic=False)


def norm_rows(machine: str, options: argparse.Namespace, names: list[str]) -> Iterator[Row]:
    """rms_norm forward, and backward with both gradients."""
    for name in names:
        dtype = DTYPES[name]
        views = {f"{r}x{w}": torch.randn(r, w).to(dtype) for r, w in NORM_SHAPES}
        # What q_norm sees: heads of a product that also holds keys and values.
        views["q_norm view 512x9x64"] = torch.randn(1, 512, 15 * 64).to(dtype)[..., : 9 * 64].view(1, 512, 9, 64)
        for shape, x in views.items():
            yield _norm_row(machine, options, name, shape, x)
        yield _norm_backward_row(machine, options, name)


def _norm_row(machine: str, options: argparse.Namespace, name: str, shape: str, x: torch.Tensor) -> Row:
    stock = LlamaRMSNorm(x.shape[-1]).to(x.dtype)
    weight, eps = stock.weight, stock.variance_epsilon
    calls: dict[str, Callable[[], Any]] = {
        "ours": lambda: layout_kernels.rms_norm(x, weight, eps),
        "stock": lambda: stock(x),
        "F": lambda: functional.rms_norm(x, x.shape[-1:], weight, eps),
        "clone": x.clone,
    }
    with torch.inference_mode():
        if options.compile:
            fast = compiled(stock)
            calls["compile"] = lambda: fast(x)
        check(f"rms_norm {shape} {name}", calls["ours"](), calls["stock"]())
        found = shortest(calls, options.seconds)
    others = min(time for key, time in found.items() if key not in ("ours", "clone"))
    met, target = found["ours"] <= others, "best of the others"
    if shape == "4096x4096":
        met, target = met and found["ours"] <= 1.5 * found["clone"], f"{target}, 1.5 clone"
    of_limit = found["clone"] / found["ours"]
    return Row(machine, torch.get_num_threads(), f"rms_norm {shape}", name, found["stock"], others, found["ours"],
               "x.clone()", of_limit, target, met)  # fmt: skip


def _norm_backward_row(machine: str, options: argparse.Namespace, name: str) -> Row:
    x = torch.randn(4096, 1024).to(DTYPES[name]).requires_grad_()
    stock, grad = LlamaRMSNorm(1024).to(x.dtype), torch.randn(4096, 1024).to(x.dtype)
    wanted = (x, stock.weight)
    theirs = stock(x)
    ours = layout_kernels.rms_norm(x, stock.weight, stock.variance_epsilon)
    found = shortest(
        {
            "ours": lambda: torch.autograd.grad(ours, wanted, grad, retain_graph=True),
            "stock": lambda: torch.autograd.grad(theirs, wanted, grad, retain_graph=True),
            "clone": x.detach().clone,
        },
        options.seconds,
    )
    met = found["stock"] >= 2 * found["ours"]
    return Row(machine, torch.get_num_threads(), "rms_norm backward 4096x1024", name, found["stock"], found["stock"],
               found["ours"], "x.clone()", found["clone"] / found["ours"], "2.0 stock", met)  # fmt: skip


def mlp_rows(machine: str, options: argparse.Namespace, names: list[str], native_bf16: bool) -> Iterator[Row]:
    """The fused norm and MLP."""
    for name in names:
        for hidden, size in MLP_SIZES:
            mlp = LlamaMLP(LlamaConfig(hidden_size=hidden, intermediate_size=size)).to(DTYPES[name])
            norm = LlamaRMSNorm(hidden).to(DTYPES[name])
            for rows in MLP_ROWS:
                yield _mlp_row(machine, options, name, (norm, mlp), rows, native_bf16)


def _mlp_row(
    machine: str, options: argparse.Namespace, name: str, pair: tuple[Any, Any], rows: int, native_bf16: bool
) -> Row:
    norm, mlp = pair
    down = mlp.down_proj.weight
    hidden, size = down.shape
    gate_up = torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight)).detach()
    x = torch.randn(rows, hidden).to(DTYPES[name])
    arguments = (x, norm.weight, gate_up, down, norm.variance_epsilon)
    calls = {"ours": lambda: layout_kernels.rms_norm_mlp(*arguments), "stock": lambda: mlp(norm(x))}
    case = f"rms_norm_mlp {hidden}/{size} rows {rows}"
    with torch.inference_mode():
        check(f"{case} {name}", calls["ours"](), calls["stock"]())
        bandwidth, rate = limits(options.seconds / 4)
        found = shortest(calls, options.seconds)
    nbytes, operations = 3 * hidden * size * x.element_size(), 2 * 3 * hidden * size * rows
    by_bytes, by_operations = nbytes / bandwidth, operations / rate
    limit = "bytes" if by_bytes > by_operations else "fp32 operations"
    of_limit = max(by_bytes, by_operations) / found["ours"]
    # Where PyTorch has an instruction for the dtype, as on every machine in fp32, only "never slower" is asked.
    wanted = 1.0 if name == "fp32" or (native_bf16 and name == "bf16") else MLP_TARGETS[rows]
    met = found["stock"] >= (wanted if wanted > 1 else 0.97) * found["ours"]
    target = f"{wanted} stock"
    if wanted > 1 and (rows == 1 or rows >= 128):
        met, target = met and of_limit >= 0.8, f"{target}, 0.8 of the limit"
    return Row(machine, torch.get_num_threads(), case, name, found["stock"], found["stock"], found["ours"], limit,
               of_limit, target, met)  # fmt: skip


def measure(options: argparse.Namespace) -> list[Row]:
    """All rows of this process."""
    emulated = "ONEDNN_MAX_CPU_ISA" in os.environ
    has_bf16 = native.levels()[-1] == "avx512_bf16" and not emulated
    machine = f"as {native.level()}" if emulated else native.level()
    rows = []
    for threads in options.threads:
        torch.set_num_threads(threads)
        names = options.dtypes if not emulated else [name for name in options.dtypes if name == "bf16"]
        if not emulated:
            rows += _printed(norm_rows(machine, options, names))
        rows += _printed(mlp_rows(machine, options, names, has_bf16))
    return rows


def _printed(rows: Iterator[Row]) -> list[Row]:
    kept = []
    for row in rows:
        kept.append(row)
        print(line(row), flush=True)
    return kept


def in_emulation(arguments: list[str]) -> list[Row]:
    """The rows of a second process that stands for a processor without bf16 instructions."""
    command = [sys.executable, __file__, *arguments, "--json"]
    result = subprocess.run(command, env={**os.environ, **EMULATED}, stdout=subprocess.PIPE, text=True, check=True)
    *lines, last = result.stdout.strip().splitlines()
    print("\n".join(lines))
    return [Row(**fields) for fields in json.loads(last)]


def main(arguments: list[str]) -> int:
    """Measure, write benchmarks/results/ and return 1 where a row misses its target."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--threads", type=int, nargs="+", default=[2, 1])
    parser.add_argument("--dtypes", nargs="+", choices=list(DTYPES), default=list(DTYPES))
    parser.add_argument("--seconds", type=float, default=1.0, help="for each row")
    parser.add_argument("--compile", action="store_true", help="torch.compile of stock beside the norms too")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON at the end and write nothing")
    options = parser.parse_args(arguments)
    rows = measure(options)
    if options.json:
        print(json.dumps([asdict(row) for row in rows]))
        return 0
    if "avx512_bf16" in native.levels() and "bf16" in options.dtypes:
        rows += in_emulation(arguments)
    write(rows)
    return 0 if all(row.met for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
