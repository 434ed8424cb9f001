"""What two ranks run: ``torchrun --nproc-per-node 2 tests/training/ranks.py MODE CHECKPOINT BUILD``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import kernels
import pytest
import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "torch-ext")]

from layout_kernels import kernel_plugins as kp  # noqa: E402
from tests.support.loads import REPO, load, ref  # noqa: E402
from tests.support.tiny import FAMILIES  # noqa: E402

FAMILY = FAMILIES["llama"]
MAPPING = {"RMSNorm": ref("CustomRMSNorm"), FAMILY.fusion_key(): ref("RMSNormMLP")}


def batch(rank: int) -> torch.Tensor:
    return torch.randint(3, 90, (2, 7 + 2 * rank), generator=torch.Generator().manual_seed(rank))


def ddp(checkpoint: str, build: str) -> None:
    """Gradients averaged over ranks that see different lengths equal those of one stock process."""
    kernel = kernels.get_local_kernel(Path(build))
    stock = load(FAMILY, checkpoint, None).train()
    for rank in range(2):
        (stock(batch(rank), labels=batch(rank)).loss / 2).backward()
    expected = {name: p.grad for name, p in stock.named_parameters()}
    with kernel.kernel_loading():
        loaded = load(FAMILY, checkpoint, MAPPING)
    for model in (loaded.train(), kp.apply_default_kernels(load(FAMILY, checkpoint, None), "auto").train()):
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
        ids = batch(dist.get_rank())
        wrapped(ids, labels=ids).loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.grad)
        for name, gradient in kp.original_state_dict(model).items():
            limit = 1e-5 * expected[name].abs().max().clamp(min=1e-3)  # float32 sums in another order
            assert (gradient - expected[name]).abs().max() <= limit, name


def tp(checkpoint: str, build: str) -> None:
    """A tensor-parallel load: equal, or refused with the reason; never silently whole weights on each rank."""
    kernel = kernels.get_local_kernel(Path(build))
    expected = load(FAMILY, checkpoint, None)(batch(0)).logits
    parallel = load(FAMILY, checkpoint, None, tp_plan="auto")
    with pytest.raises(RuntimeError, match="DTensor"):
        kp.apply_kernel("cpu_fused_rmsnorm_mlp", model=parallel)
    for mapping in (MAPPING, {"RMSNorm": ref("CustomRMSNorm")}):
        with kernel.kernel_loading():
            model = load(FAMILY, checkpoint, mapping, tp_plan="auto")
        assert (model(batch(0)).logits - expected).abs().max() <= 1e-5  # float32 sums in another order


if __name__ == "__main__":
    dist.init_process_group("gloo")
    os.environ["LOCAL_KERNELS"] = f"{REPO}={sys.argv[3]}"
    {"ddp": ddp, "tp": tp}[sys.argv[1]](*sys.argv[2:])
    dist.barrier()
    if dist.get_rank() == 0:
        print(f"{sys.argv[1]}: ranks agree")
    dist.destroy_process_group()
