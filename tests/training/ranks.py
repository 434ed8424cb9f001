"""What two ranks run, one mode after the other.

``torchrun --nproc-per-node 2 tests/training/ranks.py BUILD MODE=CHECKPOINT ...``
"""

from __future__ import annotations

import gc
import os
import sys
from importlib import import_module
from pathlib import Path

import kernels
import pytest
import torch
import torch.distributed as dist
from accelerate import FullyShardedDataParallelPlugin
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

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


def fsdp(checkpoint: str, build: str) -> None:
    """FSDP2 by the class of the layers, with full and sharded state dicts: equal to the stock model wrapped so.

    The memory of a block goes when the parameters leave it.
    """
    kernel = kernels.get_local_kernel(Path(build))
    blocks = import_module(f"{kernel.__name__}.ops.adjacent")._blocks
    ids, results = batch(dist.get_rank()), {}
    for kind in ("stock", "ours"):
        with kernel.kernel_loading():
            model = load(FAMILY, checkpoint, MAPPING if kind == "ours" else None).train()
        assert bool(blocks) == (kind == "ours")
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
        plugin.set_auto_wrap_policy(model)
        (wrapped,) = plugin.auto_wrap_policy.keywords["transformer_layer_cls"]
        for module in list(model.modules()):
            if isinstance(module, wrapped):
                fully_shard(module)
        fully_shard(model)
        assert not blocks
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            model(ids, labels=ids).loss.backward()
            optimizer.step()
            model.eval().train()  # between two steps, as whoever evaluates does
        sharded = get_model_state_dict(model)
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=False))
        set_model_state_dict(model, sharded)
        results[kind] = ({n: (type(v), v.shape, v.to_local()) for n, v in sharded.items()}, full, model(ids).logits)
        del model, optimizer
    (first, whole, logits), (second, found, other) = results["stock"], results["ours"]
    assert list(first) == list(second)
    assert list(whole) == list(found)
    for name, (kind, shape, part) in first.items():
        assert second[name][:2] == (kind, shape), name
        assert (second[name][2] - part).abs().max() <= 1e-5, name  # float32 sums in another order, two steps
    assert all((found[name] - value).abs().max() <= 1e-5 for name, value in whole.items())  # the same
    assert (other - logits).abs().max() <= 1e-4 * logits.abs().max()  # the same, through the model


def fsdp1(checkpoint: str, build: str) -> None:
    """FSDP1, whose flat parameters take the memory over: gradients are stock's, and no block stays."""
    kernel = kernels.get_local_kernel(Path(build))
    blocks = import_module(f"{kernel.__name__}.ops.adjacent")._blocks
    ids, losses = batch(0), []
    for mapping in (None, MAPPING):
        with kernel.kernel_loading():
            model = load(FAMILY, checkpoint, mapping).train()
        wrapped = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            loss = wrapped(ids, labels=ids).loss
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
        assert not blocks
    assert abs(losses[0] - losses[1]) <= 1e-5 * abs(losses[0])  # float32 sums in another order, three steps


def zero(checkpoint: str, build: str) -> None:
    """ZeroRedundancyOptimizer, whose buckets hold the parameters: each rank has stock's weights after three steps."""
    kernel, ids, found = kernels.get_local_kernel(Path(build)), batch(dist.get_rank()), []
    for mapping in (None, MAPPING):
        with kernel.kernel_loading():
            model = load(FAMILY, checkpoint, mapping)
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
        options = {"optimizer_class": torch.optim.SGD, "parameters_as_bucket_view": True, "lr": 0.1}
        optimizer = ZeroRedundancyOptimizer(model.parameters(), **options)
        for _ in range(3):
            wrapped.train()
            optimizer.zero_grad()
            wrapped(ids, labels=ids).loss.backward()
            optimizer.step()
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert (found[0] - found[1]).abs().max() <= 1e-5  # float32 sums in another order, three steps
    others = [torch.empty_like(found[1]) for _ in range(2)]
    dist.all_gather(others, found[1])
    assert torch.equal(*others)


MODES = {"ddp": ddp, "tp": tp, "fsdp": fsdp, "fsdp1": fsdp1, "zero": zero}


def main(build: str, *given: str) -> None:
    dist.init_process_group("gloo")
    os.environ["LOCAL_KERNELS"] = f"{REPO}={build}"
    for text in given:
        mode, _, checkpoint = text.partition("=")
        MODES[mode](checkpoint, build)
        dist.barrier()
        gc.collect()  # models of one mode are no blocks of memory in the next
        if dist.get_rank() == 0:
            print(f"{text}: ranks agree", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
