"""One rank of a tensor-parallel load, run by torchrun: what each KernelConfig gave, as JSON in the output folder."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import kernels
import torch
import torch.distributed as dist
from transformers.distributed.tensor_parallel import ColwiseParallel

from tests.support.loads import REPO, load, ref
from tests.support.tiny import FAMILIES, Family, save_family, tokens


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A sharded tensor put together; every rank must ask."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def gradients(model: Any) -> dict[str, torch.Tensor]:
    """Gradients by name, whole on every rank."""
    model.zero_grad()
    output = model(tokens()).logits
    (output.float() * torch.linspace(-1, 1, output.shape[-1])).mean().backward()
    return {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def outcome(family: Family, folder: Path, mapping: dict[Any, Any], stock: Any, kernel: Any) -> dict[str, Any]:
    """The largest differences to the stock model loaded the same way, and what was called in inference."""
    with kernel.kernel_loading():
        model = load(family, folder, mapping, tp_plan="auto")
    expected, found = gradients(stock), gradients(model)
    model.eval()
    mlp, calls = model.model.layers[0].mlp, []
    transform = ColwiseParallel.transform_inputs_pre_forward

    def counted(style: Any, module: Any, *rest: Any) -> Any:
        calls.append(module)
        return transform(style, module, *rest)

    with torch.no_grad(), mock.patch.object(ColwiseParallel, "transform_inputs_pre_forward", counted):
        logits = model(tokens()).logits
    with torch.no_grad():
        inference = (logits - stock(tokens()).logits).abs().max().item()
    gate, up = (part.weight.to_local() for part in (mlp.gate_proj, mlp.up_proj))
    shapes = [[(n, p.shape) for n, p in each.named_parameters()] for each in (model, stock)]
    return {
        "names": shapes[0] == shapes[1],
        "inference": inference,
        "logits": (model(tokens()).logits - stock(tokens()).logits).abs().max().item(),
        "gradients": {n: ((found[n] - g).abs().max() / g.abs().max()).item() for n, g in expected.items()},
        "layers": sorted({row.layer for row in kernel.report(model).rows}),
        "adjacent": up.data_ptr() == gate.data_ptr() + gate.numel() * gate.element_size(),
        "calls of gate_proj": sum(module is mlp.gate_proj for module in calls),
    }


def hub_name(family: Family, folder: Path, kernel: Any) -> dict[str, Any]:
    """A layer without a layout, in inference; on the CPU ``train()`` unbinds it again."""
    with kernel.kernel_loading():
        model = load(family, folder, {"RMSNorm": ref("RMSNorm")}, tp_plan="auto")
    layers = sorted({row.layer for row in kernel.report(model).rows})
    with torch.no_grad():
        difference = (model(tokens()).logits - load(family, folder, None)(tokens()).logits).abs().max().item()
    return {"logits": difference, "layers": layers}


def main(out: Path, build: Path) -> None:
    """Load each family under each kind of key and write the outcomes of this rank."""
    os.environ["LOCAL_KERNELS"] = f"{REPO}={build}"
    dist.init_process_group("gloo")
    kernel = kernels.get_local_kernel(build)
    results: dict[str, Any] = {}
    for name in ("llama", "qwen3"):
        family, folder = FAMILIES[name], out / name
        if dist.get_rank() == 0:
            save_family(family, folder)
        dist.barrier()
        stock = load(family, folder, None, tp_plan="auto")
        assert any(type(parameter).__name__ == "DTensor" for parameter in stock.parameters())
        # With the norms: `kernels` binds the forward of a norm that it has no kernel for anew, without what the plan
        # put around it, so that gradients of a stock q_norm are wrong once kernels are used (kernels 0.17.2).
        norms = {"RMSNorm": ref("CustomRMSNorm")}
        results[name] = {
            "norms": outcome(family, folder, norms, stock, kernel),
            "hub name": hub_name(family, folder, kernel),
            "fusion": outcome(family, folder, {**norms, family.fusion_key(): ref("RMSNormMLP")}, stock, kernel),
            "MLP": outcome(family, folder, {**norms, family.mlp_class: ref("GatedMLP")}, stock, kernel),
        }
    (out / f"{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
