"""One rank of a tensor-parallel load, run by torchrun: what each KernelConfig gave, as JSON in the output folder."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import kernels
import torch
import torch.distributed as dist

from tests.support.loads import REPO, load, ref
from tests.support.tiny import FAMILIES, Family, save_family, tokens


def gradients(model: Any) -> dict[str, torch.Tensor]:
    """Gradients of the norms' weights by module, whole on every rank."""
    model.zero_grad()
    output = model(tokens()).logits
    (output.float() * torch.linspace(-1, 1, output.shape[-1])).mean().backward()
    found = {}
    for path, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if "norm" in path and weight is not None and weight.grad is not None:
            grad = weight.grad
            found[path] = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
    return found


def outcome(family: Family, folder: Path, mapping: dict[Any, Any], stock: Any, kernel: Any) -> dict[str, Any]:
    """The largest differences to the stock model loaded the same way, or the error."""
    try:
        with kernel.kernel_loading():
            model = load(family, folder, mapping, tp_plan="auto")
    except ValueError as error:
        return {"error": str(error)}
    expected, found = gradients(stock), gradients(model)
    return {
        "logits": (model(tokens()).logits - stock(tokens()).logits).abs().max().item(),
        "gradients": {n: ((found[n] - g).abs().max() / g.abs().max()).item() for n, g in expected.items()},
        "layers": sorted({row.layer for row in kernel.report(model).rows}),
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
        results[name] = {
            "norms": outcome(family, folder, {"RMSNorm": ref("CustomRMSNorm")}, stock, kernel),
            "hub name": hub_name(family, folder, kernel),
            "fusion": outcome(family, folder, {family.fusion_key(): ref("RMSNormMLP")}, stock, kernel),
            "MLP": outcome(family, folder, {family.mlp_class: ref("GatedMLP")}, stock, kernel),
        }
    (out / f"{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
