"""The demo's model, loaded as stock transformers loads it and with our layers."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from tools.project import ROOT, read_project

QUESTION = "Explain in a few sentences why the sky is blue."
DTYPE = torch.bfloat16
NORM_KEY = "RMSNorm"
FUSION_KEY = (("RMSNorm", "model.layers.*.post_attention_layernorm"), ("MLP", "model.layers.*.mlp"))


def repository() -> tuple[str, dict[str, Any]]:
    """Repository on the Hub and the metadata that a KernelConfig entry takes.

    "revision" and not "version": with a version the Hub is asked, although LOCAL_KERNELS names a folder.
    """
    return read_project().repo_id, {"revision": "v1", "trust_remote_code": True}


def use_local_build(folder: Path = ROOT / "build") -> None:
    """Let `kernels` take our repository from a local build, in this process and in its children."""
    # It warns that a build of uncommitted sources cannot be reproduced: true of what is published, noise here.
    logging.getLogger("kernels.validate").setLevel(logging.ERROR)
    os.environ["LOCAL_KERNELS"] = f"{repository()[0]}={folder}"


def encode(tokenizer: Any) -> torch.Tensor:
    """The question in the model's chat form [1, T]."""
    messages = [{"role": "user", "content": QUESTION}]
    encoded = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    return encoded["input_ids"]


def load_stock(checkpoint: Path) -> nn.Module:
    """The model as plain transformers gives it."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=DTYPE).eval()


def load_with_kernels(checkpoint: Path) -> nn.Module:
    """The model with our norms, and with our fused norm + MLP where the layer has that pair."""
    from transformers import AutoModelForCausalLM, KernelConfig

    name, metadata = repository()
    config = KernelConfig(
        {NORM_KEY: (f"{name}:CustomRMSNorm", metadata), FUSION_KEY: (f"{name}:RMSNormMLP", metadata)},
    )
    with kernel().kernel_loading():
        model = AutoModelForCausalLM.from_pretrained(checkpoint, use_kernels=True, kernel_config=config, dtype=DTYPE)
    return model.eval()


def kernel() -> ModuleType:
    """The kernel's module, as users get it."""
    from kernels import get_kernel

    name, metadata = repository()
    return get_kernel(name, **metadata)
