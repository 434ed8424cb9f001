"""An adapter that was made on stock works on our model, and the other way round: same names, same results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

from tests.support.loads import load
from tests.support.observed import TREES, close, logits, with_layers
from tests.support.tiny import save_family, tokens

LLAMA = TREES["llama"]
MLP = ["q_proj", "gate_proj", "up_proj", "down_proj"]
CONFIGS = {
    "LoRA": lambda: peft.LoraConfig(r=4, target_modules=MLP, init_lora_weights=False),
    "LoRA of all": lambda: peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False),
    "LoRA of down": lambda: peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False),
    "LoRA and a norm": lambda: peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["norm"]),
    "DoRA": lambda: peft.LoraConfig(r=4, target_modules=MLP, use_dora=True, init_lora_weights=False),
    "IA3": lambda: peft.IA3Config(
        target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"], init_ia3_weights=False
    ),
    "AdaLoRA": lambda: peft.AdaLoraConfig(target_modules=MLP, total_step=10, init_lora_weights=False),
    "LNTuning": lambda: peft.LNTuningConfig(target_modules=["input_layernorm", "post_attention_layernorm"]),
    "VeRA": lambda: peft.VeraConfig(r=4, target_modules=["gate_proj", "up_proj"], init_weights=False),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_family(LLAMA, tmp_path_factory.mktemp("llama"))


WAYS, MODELS = ("norm and fusion", "live"), ("stock", "ours")


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def adapted(model: Any, name: str, steps: int = 0) -> Any:
    """``model`` with an adapter of its own random values, trained some steps."""
    torch.manual_seed(0)
    wrapped = peft.get_peft_model(model, CONFIGS[name]())
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    optimizer = torch.optim.SGD([p for p in wrapped.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        wrapped(input_ids=tokens(), labels=tokens()).loss.backward()
        optimizer.step()
    return wrapped.eval()


def trained(wrapped: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in wrapped.named_parameters() if p.requires_grad}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", list(CONFIGS))
def test_training_merging_and_unmerging_are_stock_s(name: str, way: str, kernel: Any, folder: Path) -> None:
    stock, ours = (
        adapted(model, name, steps=3)
        for model in (load(LLAMA, folder, None), with_layers("llama", folder, way, kernel))
    )
    first, second = trained(stock), trained(ours)
    assert list(first) == list(second)
    for key, value in first.items():
        assert close(second[key], value), key
    assert close(logits(ours), logits(stock))
    if name == "LoRA and a norm":
        return  # nothing to merge in the norm
    for step in ("merge_adapter", "unmerge_adapter"):
        for each in (stock, ours):
            getattr(each, step)()
        assert close(logits(ours), logits(stock)), step
    merged = [each.merge_and_unload() for each in (stock, ours)]
    assert close(logits(merged[1]), logits(merged[0]))
    assert [n for n, _ in merged[1].named_parameters()] == [n for n, _ in merged[0].named_parameters()]


# Each adapter in each direction, with each way in.
GIVEN = [(name, made_on, WAYS[(n + m) % 2]) for n, name in enumerate(CONFIGS) for m, made_on in enumerate(MODELS)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "made_on", "way"), GIVEN, indirect=["way"])
def test_an_adapter_of_either_loads_on_the_other(
    name: str, made_on: str, way: str, kernel: Any, folder: Path, tmp_path: Path
) -> None:
    def stock() -> Any:
        return load(LLAMA, folder, None)

    def ours() -> Any:
        return with_layers("llama", folder, way, kernel)

    make, take = (stock, ours) if made_on == "stock" else (ours, stock)
    source = adapted(make(), name)
    expected = logits(source)
    assert not close(expected, logits(stock()))
    source.save_pretrained(tmp_path)
    assert close(logits(peft.PeftModel.from_pretrained(take(), tmp_path)), expected)
    if name == "VeRA":
        return  # transformers' own loader does not take what PEFT writes for it, on stock either
    both = stock(), ours()
    for model in both:
        torch.manual_seed(2)
        model.load_adapter(str(tmp_path))
    if name != "DoRA":  # transformers' loader drops its magnitudes, on stock too, and draws others
        assert close(logits(both[0]), expected)
    expected = logits(both[0])
    assert close(logits(both[1]), expected)
    if way == "live" or made_on == "ours" or name == "DoRA":
        return
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "base_model_name_or_path": str(folder)}))
    assert close(logits(with_layers("llama", tmp_path, way, kernel)), expected)
