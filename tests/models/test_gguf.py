"""GGUF files, whose tensors transformers renames but does not convert: inside ``kernel_loading()`` they load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers as tf
from transformers import KernelConfig

from layout_kernels import kernel_plugins as kp
from tests.support.loads import by_hand, ref
from tests.support.observed import close, logits, ours
from tests.support.tiny import FAMILIES

WIDTH, INNER, HEADS, VOCABULARY = 32, 64, 4, 99
FUSION = FAMILIES["llama"].fusion_key()
MAPPINGS: dict[str, dict[Any, Any]] = {
    "norm": {"RMSNorm": ref("CustomRMSNorm")},
    "MLP": {"LlamaMLP": ref("GatedMLP")},
    "norm and fusion": {"RMSNorm": ref("CustomRMSNorm"), FUSION: ref("RMSNormMLP")},
}


def write(file: Path, kind: Any) -> None:
    """A random Llama with products of this kind of GGUF."""
    writer, numbers = gguf.GGUFWriter(file, "llama"), np.random.default_rng(0)
    for name, value in {
        "block_count": 2,
        "context_length": 64,
        "embedding_length": WIDTH,
        "feed_forward_length": INNER,
        "head_count": HEADS,
        "head_count_kv": HEADS,
        "layer_norm_rms_eps": 1e-5,
        "vocab_size": VOCABULARY,
        "rope_freq_base": 1e4,
        "rope_dimension_count": WIDTH // HEADS,
    }.items():
        getattr(writer, f"add_{name}")(value)

    def add(name: str, *shape: int) -> None:
        values = (numbers.standard_normal(shape) * 0.2 + (len(shape) == 1)).astype(np.float32)
        if kind is not None and name.startswith("blk") and len(shape) == 2:
            writer.add_tensor(f"{name}.weight", gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(f"{name}.weight", values)

    for name, shape in {
        "token_embd": (VOCABULARY, WIDTH),
        "output": (VOCABULARY, WIDTH),
        "output_norm": (WIDTH,),
        **{f"blk.{i}.{norm}": (WIDTH,) for i in range(2) for norm in ("attn_norm", "ffn_norm")},
        **{f"blk.{i}.attn_{part}": (WIDTH, WIDTH) for i in range(2) for part in ("q", "k", "v", "output")},
        **{f"blk.{i}.ffn_{part}": (INNER, WIDTH) for i in range(2) for part in ("gate", "up")},
        **{f"blk.{i}.ffn_down": (WIDTH, INNER) for i in range(2)},
    }.items():
        add(name, *shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module", params=[None, gguf.GGMLQuantizationType.Q8_0], ids=["F32", "Q8_0"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gguf")
    write(folder / "model.gguf", request.param)
    return folder


def read(folder: Path, mapping: dict[Any, Any] | None = None, **options: Any) -> Any:
    if mapping is not None:
        options |= {"use_kernels": True, "kernel_config": KernelConfig(dict(mapping))}
    return tf.AutoModelForCausalLM.from_pretrained(folder, gguf_file="model.gguf", **options)


@pytest.mark.parametrize("kind", MAPPINGS)
@pytest.mark.parametrize("dequantized", [False, True])
def test_inside_kernel_loading_it_is_stock_s_with_merged_products(
    dequantized: bool, kind: str, folder: Path, kernel: Any
) -> None:
    options = {"quantization_config": tf.GgufConfig(dequantize=True)} if dequantized else {}
    stock = read(folder, **options)
    with kernel.kernel_loading():
        model = read(folder, MAPPINGS[kind], **options)
    assert len(ours(model)) >= 2
    assert not any(row.fallback for row in kernel.report(model).rows)
    assert [(n, type(p)) for n, p in model.named_parameters()] == [(n, type(p)) for n, p in stock.named_parameters()]
    assert close(logits(model), logits(stock))


@pytest.mark.parametrize("kind", MAPPINGS)
def test_elsewhere_each_key_is_refused_with_the_ways_out(kind: str, folder: Path) -> None:
    with by_hand(), pytest.raises(ValueError, match=r"kernel_loading\(\)"):
        read(folder, MAPPINGS[kind])
    model = kp.apply_default_kernels(read(folder), "auto")
    assert len(ours(model)) == 7
    assert close(logits(model), logits(read(folder)))


def test_a_load_that_gives_its_information_too_is_laid_out(folder: Path, kernel: Any) -> None:
    with kernel.kernel_loading():
        model, told = read(folder, MAPPINGS["MLP"], output_loading_info=True)
    assert not told["missing_keys"]
    assert not any(row.fallback for row in kernel.report(model).rows)
    assert torch.isfinite(logits(model)).all()
