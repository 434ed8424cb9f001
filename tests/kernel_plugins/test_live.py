"""Kernels on a loaded model: one model changes, to the same results, and comes back with its current values."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file
from torch import nn

from layout_kernels import kernel_plugins as kp
from layout_kernels.models.report import report
from layout_kernels.ops.adjacent import lay
from layout_kernels.running import adopted
from tests.support.loads import load, process_state, ref
from tests.support.tiny import FAMILIES, TEXT, Family, _causal, randomise, save_family, tokens

NORM, MLP, BLOCK = "cpu_fused_rmsnorm", "cpu_fused_swiglu", "cpu_fused_rmsnorm_mlp"
LINEAR = "cpu_linear"
FAMILY = {
    "llama": FAMILIES["llama"],
    "qwen3": FAMILIES["qwen3"],
    "phi3": FAMILIES["phi3"],
    "gemma2": Family(_causal("Gemma2"), "", ""),
    "olmo2": Family(_causal("Olmo2"), "", ""),
}


def built(name: str = "llama", seed: int = 0) -> Any:
    return randomise(FAMILY[name].build(), seed).eval()


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens()).logits


def snapshot(model: Any) -> dict[str, Any]:
    """Everything of a model that undo must restore."""
    return {
        "classes": [(path, type(module)) for path, module in model.named_modules()],
        "names": list(model.state_dict()),
        "attributes": {
            p: sorted(k for k in vars(m) if k != "_is_full_backward_hook") for p, m in model.named_modules()
        },
        "modules": [id(module) for module in model.modules()],
        "parameters": [(name, id(parameter)) for name, parameter in model.named_parameters()],
        "hooks": len(model._load_state_dict_pre_hooks),
        "training": [(path, module.training) for path, module in model.named_modules()],
    }


@pytest.mark.parametrize("name", list(FAMILY))
@pytest.mark.parametrize("ids", [NORM, MLP, BLOCK, f"{NORM},{BLOCK}", f"{BLOCK},{NORM}", LINEAR, "auto"])
def test_results_names_and_undo(name: str, ids: str, tmp_path: Path) -> None:
    model = built(name)
    if name == "olmo2" and BLOCK in ids:
        with pytest.raises(RuntimeError, match=r"does not hand|no norm of"):
            kp.apply_default_kernels(model, BLOCK)
        return
    expected, before = logits(model), snapshot(model)
    original = {key: value.clone() for key, value in model.state_dict().items()}
    model.save_pretrained(tmp_path / "stock")
    kp.apply_default_kernels(model, ids)
    # Merged products add up the same terms as separate ones, possibly in another order: float32 rounding only.
    assert (logits(model) - expected).abs().max() <= 1e-5 * expected.abs().max().clamp(min=1)
    assert report(model).rows
    named = kp.original_state_dict(model)
    assert sorted(named) == sorted(original)
    assert all(torch.equal(named[key], original[key]) for key in original)
    model.save_pretrained(tmp_path / "fast")
    stock, saved = (load_file(tmp_path / part / "model.safetensors") for part in ("stock", "fast"))
    assert sorted(saved) == sorted(stock)
    assert all(torch.equal(saved[key], stock[key]) for key in stock)
    kp.undo(model)
    assert snapshot(model) == before
    assert torch.equal(logits(model), expected)


def test_the_same_parameters_and_bits_as_at_load(kernel: Any, tmp_path: Path) -> None:
    family = FAMILIES["llama"]
    folder = save_family(family, tmp_path)
    mapping = {"RMSNorm": ref("CustomRMSNorm"), family.fusion_key(): ref("RMSNormMLP"), "Linear": ref("Linear")}
    with kernel.kernel_loading(linear=True):
        loaded = load(family, folder, mapping)
    model = load(family, folder, None)
    kernel.apply_default_kernels(model, "auto")
    there, here = dict(loaded.named_parameters()), dict(model.named_parameters())
    assert list(there) == list(here)
    assert all(torch.equal(there[key], here[key]) for key in there)
    assert torch.equal(logits(model), logits(loaded))


def test_only_this_model_changes_and_nothing_of_the_process() -> None:
    model, other = built(), built()
    kept = copy.deepcopy(other)
    before, classes = process_state(), [type(module) for module in other.modules()]
    kp.apply_default_kernels(model, "auto")
    assert [type(module) for module in other.modules()] == classes
    assert torch.equal(logits(other), logits(kept))
    assert process_state() == before
    assert [type(module) for module in built().modules()] == classes


def test_undo_gives_back_the_current_values_after_training() -> None:
    model = built()
    kp.apply_default_kernels(model, "auto")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01)
    expected, named = logits(model), kp.original_state_dict(model)
    kp.undo(model)
    assert (logits(model) - expected).abs().max() <= 1e-5  # float32 rounding, as above
    assert all(torch.equal(value, named[key]) for key, value in model.state_dict().items())


def test_state_dicts_load_whole_and_in_part() -> None:
    model, source = built(), built(seed=1)
    kp.apply_default_kernels(model, "auto")
    model.load_state_dict(source.state_dict())
    assert (logits(model) - logits(source)).abs().max() <= 1e-5  # float32 rounding, as above
    kp.load_original_state_dict(model, built(seed=2).state_dict())
    gates = {name: value for name, value in source.state_dict().items() if "gate_proj" in name}
    stock = built(seed=2)
    for each in (model, stock):
        missing = each.load_state_dict(gates, strict=False).missing_keys
        assert len(missing) == len(source.state_dict()) - len(gates)
    assert (logits(model) - logits(stock)).abs().max() <= 1e-5  # as above


def test_parameters_are_the_same_objects_in_the_same_order_and_ties_hold() -> None:
    model = randomise(tf.LlamaForCausalLM(tf.LlamaConfig(**TEXT, tie_word_embeddings=True)))
    before = [(name, id(parameter)) for name, parameter in model.named_parameters()]
    kp.apply_default_kernels(model, "auto")
    assert [(name, id(parameter)) for name, parameter in model.named_parameters()] == before
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("ids", [NORM, BLOCK])
def test_norms_of_one_block_have_an_epsilon_each(ids: str) -> None:
    model = built("gemma2")
    for number, module in enumerate(module for module in model.modules() if hasattr(module, "eps")):
        module.eps = 0.1 * (1 + number)
    expected = logits(model)
    kp.apply_kernel(ids, model=model)
    assert (logits(model) - expected).abs().max() <= 1e-5  # as above


def test_a_failure_in_the_middle_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = built()
    expected = logits(model)
    model.model.layers[0].train()  # as frozen parts stay in eval() when others are trained
    before = snapshot(model)
    calls = []

    def failing(*parts: Any, **options: Any) -> bool:
        calls.append(parts)
        if len(calls) == 3:  # the biases of the first layer are the second
            raise MemoryError("full")
        return lay(*parts, **options)

    monkeypatch.setattr(adopted, "lay", failing)
    with pytest.raises(MemoryError):
        kp.apply_kernel(BLOCK, model=model)
    assert snapshot(model) == before
    assert torch.equal(logits(model), expected)
    with pytest.raises(ValueError, match="no kernel was applied"):
        kp.undo(model)


@pytest.mark.parametrize("given", [lambda optimizer: {}, lambda optimizer: {"optimizer": optimizer}])
@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adafactor])
def test_an_optimizer_goes_on_whether_or_not_it_is_given(optimizer_class: Any, given: Any) -> None:
    def step(model: Any, optimizer: Any) -> None:
        optimizer.zero_grad()
        model(tokens(), labels=tokens()).loss.backward()
        optimizer.step()

    options = {"lr": 1e-2} | ({"momentum": 0.9} if optimizer_class is torch.optim.SGD else {})
    stock, fast = built(), built()
    stock_optimizer = optimizer_class(stock.parameters(), **options)
    optimizer = optimizer_class(fast.parameters(), **options)
    step(stock, stock_optimizer)
    step(fast, optimizer)
    kp.apply_default_kernels(fast, "auto", **given(optimizer))
    held = [p for group in optimizer.param_groups for p in group["params"]]
    assert [id(p) for p in held] == [id(p) for p in fast.parameters()]
    for _ in range(2):
        step(stock, stock_optimizer)
        step(fast, optimizer)
    kp.undo(fast, **given(optimizer))
    step(stock, stock_optimizer)
    step(fast, optimizer)
    for (name, expected), found in zip(stock.named_parameters(), fast.parameters(), strict=True):
        # Adam divides by the size of the gradient, so a rounding of it may move a weight by a fraction of lr.
        assert (found - expected).abs().max() <= 0.02 * options["lr"], name
    assert len(optimizer.state) == len(stock_optimizer.state)


def test_shared_modules_stay_shared() -> None:
    model = built()
    layers = model.model.layers
    layers[1].input_layernorm = layers[0].input_layernorm
    layers[1].mlp = layers[0].mlp
    expected, before = logits(model), snapshot(model)
    for ids in (NORM, MLP):
        kp.apply_kernel(ids, model=model)
        assert layers[1].input_layernorm is layers[0].input_layernorm
        torch.testing.assert_close(logits(model), expected)
    kp.undo(model)
    assert snapshot(model) == before


def test_weights_that_two_mlps_share_in_part_are_right() -> None:
    model = built()
    first, second = (layer.mlp for layer in model.model.layers)
    second.gate_proj.weight = first.gate_proj.weight  # it can lie beside one of the two only
    expected = logits(model)
    kp.apply_kernel(MLP, model=model)
    assert second.gate_proj.weight is first.gate_proj.weight
    torch.testing.assert_close(logits(model), expected)


class Wrapped(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + 1


def _wrap(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp.gate_proj = Wrapped(layer.mlp.gate_proj)


def _meta(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp.to("meta")


@pytest.mark.parametrize(("change", "reason"), [(_wrap, "no plain gated MLP"), (_meta, "not in memory")])
def test_children_that_are_not_plain_are_refused_with_the_reason(change: Any, reason: str) -> None:
    model = built()
    change(model)
    for kernel_id in (MLP, BLOCK):
        with pytest.raises(RuntimeError, match=reason):
            kp.apply_kernel(kernel_id, model=model)
    kp.apply_kernel(NORM, model=model)


def test_a_module_without_the_attribute_that_the_kernel_reads_is_refused_with_its_name() -> None:
    model = built()
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            del module.variance_epsilon
    with pytest.raises(RuntimeError, match="variance_epsilon"):
        kp.apply_kernel(NORM, model=model)
