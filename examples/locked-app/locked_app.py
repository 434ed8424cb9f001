"""An application that loads layout-kernels at the commit in kernels.lock, and never anything newer.

kernels lock .                  writes kernels.lock: the newest commit of the versions in pyproject.toml
kernels download .              gets the variant for this machine, for `kernels.get_locked_kernel`
python locked_app.py download   gets the whole commit, which a load without network needs
python locked_app.py            runs, also with HF_HUB_OFFLINE=1

The kernels.lock beside this file shows the form: it was written against a Hub on loopback. Lock again before use.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import kernels
import torch
from huggingface_hub import snapshot_download
from kernels.locking import get_locked_kernel_revision

REPOSITORY = "layout-kernels/layout-kernels"
LOCKFILE = Path(__file__).with_name("kernels.lock")


def load() -> Any:
    """The kernel, from the cache; nothing is downloaded and no branch is asked for."""
    return kernels.load_kernel(REPOSITORY, lockfile=LOCKFILE)


def download() -> None:
    """Get all files of the locked commit. `kernels download` leaves out those that no variant needs, and
    huggingface_hub then takes the commit for incomplete when it may not ask the Hub.
    """
    snapshot_download(REPOSITORY, repo_type="kernel", revision=options()["revision"])


def options() -> dict[str, Any]:
    """What a `KernelConfig` needs to take the locked commit: `(f"{REPOSITORY}:CustomRMSNorm", options())`."""
    locks, dependency = get_locked_kernel_revision(REPOSITORY, LOCKFILE)
    return {"revision": locks[dependency].commit, "trust_remote_code": True}


def run() -> float:
    """Put our norms into a small live model; returns the largest difference to the model before."""
    from transformers import LlamaConfig, LlamaForCausalLM

    size = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=99, **size)).eval()
    tokens = torch.arange(3, 12)[None]
    with torch.no_grad():
        before = model(tokens).logits
        load().apply_default_kernels(model, "auto")
        return (model(tokens).logits - before).abs().max().item()


if __name__ == "__main__":
    if sys.argv[1:] == ["download"]:
        download()
    else:
        print(f"largest difference of the logits: {run():.1e}")
