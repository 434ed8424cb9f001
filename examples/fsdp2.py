"""Train with FSDP2 on two ranks and compare with one process.

    torchrun --nproc-per-node 2 examples/fsdp2.py

Every rank applies the kernels before it shards, and sees sequences of another length than the other. At the end the
gathered weights, under the stock model's names, are compared with those of one process that took the same steps.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "torch-ext"))

from layout_kernels.kernel_plugins import apply_default_kernels, original_state_dict

STEPS = 3
CONFIG = transformers.LlamaConfig(
    vocab_size=99,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)


def batch(rank: int, step: int) -> torch.Tensor:
    """Token ids [2, 7 + 3 * rank]: the ranks see different lengths."""
    generator = torch.Generator().manual_seed(100 * rank + step)
    return torch.randint(3, 90, (2, 7 + 3 * rank), generator=generator)


def build() -> transformers.LlamaForCausalLM:
    """The same random model in every process."""
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(CONFIG)


def one_process(world_size: int) -> dict[str, torch.Tensor]:
    """The stock model after the same steps, the gradient averaged over what the ranks see."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(world_size):
            ids = batch(rank, step)
            (model(ids, labels=ids).loss / world_size).backward()
        optimizer.step()
    return copy.deepcopy(dict(model.state_dict()))


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A sharded tensor put together; every rank must ask."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def main() -> int:
    """Train, compare, print on rank 0; returns the exit status."""
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = apply_default_kernels(build(), "auto")
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        ids = batch(rank, step)
        model(ids, labels=ids).loss.backward()
        optimizer.step()
    with torch.no_grad():
        for module in model.modules():
            for name, parameter in list(module._parameters.items()):
                if parameter is not None:
                    module._parameters[name] = torch.nn.Parameter(whole(parameter))
    found, expected = original_state_dict(model), one_process(world_size)
    worst = max((found[name] - expected[name]).abs().max().item() for name in expected)
    equal = sorted(found) == sorted(expected) and worst < 1e-5  # float32 sums in another order, over three steps
    if rank == 0:
        kind = "equal" if equal else "DIFFERENT"
        print(
            f"fsdp2: {world_size} ranks against one process after {STEPS} steps: {kind}, worst difference {worst:.1e}"
        )
    dist.destroy_process_group()
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
