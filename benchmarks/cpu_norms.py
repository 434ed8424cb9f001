"""The benchmark's rows of rms_norm, forward and backward."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import layout_kernels
from benchmarks.cpu_row import EQUAL, Row, geometric_mean
from benchmarks.cpu_timing import Calls, WrongResultError, compiled, measured

SHAPES = ((1, 576), (128, 576), (4096, 1024), (4096, 4096), (16384, 128))
QUICK_SHAPES = ((1, 576), (4096, 1024))
LARGEST = "4096x4096"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def norm_rows(machine: str, options: argparse.Namespace, names: list[str]) -> Iterator[Row]:
    """Every shape in every dtype, the backward, and the geometric mean in bf16."""
    for name in names:
        forward = []
        for shape, x in _inputs(DTYPES[name], options.quick).items():
            forward.append(_forward_row(machine, options, name, shape, x))
            yield forward[-1]
        if name == "bf16":
            yield geometric_mean(forward)
        yield _backward_row(machine, options, name)


def _inputs(dtype: torch.dtype, quick: bool) -> dict[str, torch.Tensor]:
    shapes = QUICK_SHAPES if quick else SHAPES
    inputs = {f"{rows}x{width}": torch.randn(rows, width).to(dtype) for rows, width in shapes}
    # What q_norm sees: heads of a product that also holds keys and values.
    product = torch.randn(1, 512, 15 * 64).to(dtype)
    return inputs | {"q_norm view 512x9x64": product[..., : 9 * 64].view(1, 512, 9, 64)}


def _forward_row(machine: str, options: argparse.Namespace, name: str, shape: str, x: torch.Tensor) -> Row:
    stock = LlamaRMSNorm(x.shape[-1]).to(x.dtype)
    torch.nn.init.normal_(stock.weight, 1.0, 0.1)
    weight, eps = stock.weight, stock.variance_epsilon
    calls: Calls = {
        "ours": lambda: layout_kernels.rms_norm(x, weight, eps),
        "stock": lambda: stock(x),
        "F": lambda: functional.rms_norm(x, x.shape[-1:], weight, eps),
        "clone": x.clone,
    }
    case = f"rms_norm {shape}"
    what: dict[str, Any] = {"machine": machine, "threads": torch.get_num_threads(), "case": case, "dtype": name}
    with torch.inference_mode():
        if options.compile:
            fast = compiled(stock, dynamic=False)
            fast(x)
            calls["compile"] = lambda: fast(x)
        try:
            found = measured(f"{case} {name}", calls, options.seconds)
        except WrongResultError as error:
            return Row(**what, target="best of the others", failure=str(error))
    return forward_row(what, found, x.nbytes)


def forward_row(what: dict[str, Any], found: dict[str, float], nbytes: int) -> Row:
    """The row of a norm's times: not behind the best of the others, at the largest shape 1.5 copies at most."""
    required = min(time for key, time in found.items() if key not in ("ours", "clone")) / EQUAL
    target = "best of the others"
    if what["case"].endswith(LARGEST):
        required, target = min(required, 1.5 * found["clone"]), f"{target}, 1.5 clone"
    return _row(what, found, 2 * nbytes, found["clone"], required=required, target=target)


def _backward_row(machine: str, options: argparse.Namespace, name: str) -> Row:
    x = torch.randn(4096, 1024).to(DTYPES[name]).requires_grad_()
    stock, grad = LlamaRMSNorm(1024).to(x.dtype), torch.randn(4096, 1024).to(x.dtype)
    torch.nn.init.normal_(stock.weight, 1.0, 0.1)
    results = {
        "ours": layout_kernels.rms_norm(x, stock.weight, stock.variance_epsilon),
        "stock": stock(x),
        "F": functional.rms_norm(x, x.shape[-1:], stock.weight, stock.variance_epsilon),
    }
    if options.compile:
        results["compile"] = compiled(stock, dynamic=False)(x)
    calls: Calls = {key: _backward_of(result, (x, stock.weight), grad) for key, result in results.items()}
    if options.compile:
        calls["compile"]()
    calls["clone"] = x.detach().clone
    case = "rms_norm backward 4096x1024"
    what: dict[str, Any] = {"machine": machine, "threads": torch.get_num_threads(), "case": case, "dtype": name}
    try:
        found = measured(f"{case} {name}", calls, options.seconds)
    except WrongResultError as error:
        return Row(**what, target="2 stock", wanted=2.0, failure=str(error))
    # Two tensors are read and one is written, where a copy reads one and writes one.
    limit, required = 1.5 * found["clone"], found["stock"] / 2
    return _row(what, found, 3 * x.nbytes, limit, required=required, target="2 stock", wanted=2.0)


def _backward_of(result: torch.Tensor, wanted: tuple[torch.Tensor, ...], grad: torch.Tensor) -> Any:
    return lambda: torch.autograd.grad(result, wanted, grad, retain_graph=True)


def _row(what: dict[str, Any], found: dict[str, float], nbytes: int, limit: float, **fields: Any) -> Row:
    times: dict[str, Any] = {"stock": found["stock"], "functional": found.get("F"), "compiled": found.get("compile")}
    return Row(**what, **times, ours=found["ours"], limit="x.clone()", limit_us=limit, work=nbytes, **fields)
