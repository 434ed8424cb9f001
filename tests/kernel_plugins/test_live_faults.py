"""What was done to a model between apply and undo, or beside it, is kept or named in an error; never dropped."""

from __future__ import annotations

import warnings
from types import MethodType
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn.utils import parametrize

from layout_kernels import kernel_plugins as kp
from tests.kernel_plugins.test_live import BLOCK, LINEAR, MLP, NORM, built, logits, snapshot
from tests.support.tiny import FAMILIES, save_family, tokens


def test_half_of_one_parameter_is_an_error_where_all_others_are_absent() -> None:
    model = built()
    kp.apply_kernel(MLP, model=model)
    name = "model.layers.0.mlp.gate_proj.weight"
    half = {name: kp.original_state_dict(model)[name]}
    with pytest.raises(RuntimeError, match=r"lacks .*up_proj"):
        model.load_state_dict(half, strict=False)


def test_a_norm_at_two_places_has_its_original_name_at_both() -> None:
    model = built()
    model.model.layers[1].input_layernorm = model.model.layers[0].input_layernorm
    names, expected = list(model.state_dict()), logits(model)
    kp.apply_kernel(NORM, model=model)
    originals = {key: value.clone() for key, value in kp.original_state_dict(model).items()}
    assert sorted(originals) == sorted(names)
    with torch.no_grad():
        model.model.layers[0].input_layernorm.scale.zero_()
    model.load_state_dict(originals)
    torch.testing.assert_close(logits(model), expected)


def adapted(model: Any, *targets: str) -> Any:
    return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=list(targets), init_lora_weights=False))


@pytest.mark.parametrize("kernel_id", [MLP, BLOCK])
def test_an_adapter_of_modules_that_are_gone_does_not_load(kernel_id: str, tmp_path: Any) -> None:
    adapted(built(), "q_proj", "gate_proj", "up_proj").save_pretrained(tmp_path / "mlp")
    adapted(built(), "q_proj", "v_proj").save_pretrained(tmp_path / "attention")
    model = kp.apply_kernel(kernel_id, model=built())
    peft.PeftModel.from_pretrained(model, tmp_path / "attention")
    model = kp.apply_kernel(kernel_id, model=built())
    with pytest.raises(RuntimeError, match=r"gate_proj\.lora_A.* load it on the stock model"):
        peft.PeftModel.from_pretrained(model, tmp_path / "mlp")


class Doubled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


def _layout(model: Any) -> Any:
    return next(module for module in model.modules() if hasattr(module, "gate_up_proj"))


def _adapt(model: Any) -> None:
    peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=["gate_up_proj"], init_lora_weights=False), model)


def _parametrise(model: Any) -> None:
    parametrize.register_parametrization(_layout(model).gate_up_proj, "weight", Doubled())


def _parametrise_scale(model: Any) -> None:
    parametrize.register_parametrization(_layout(model), "scale", Doubled())


def _hook_product(model: Any) -> None:
    _layout(model).gate_up_proj.register_forward_hook(lambda *_: None)


def _hook_layout(model: Any) -> None:
    _layout(model).register_forward_pre_hook(lambda *_: None)


def _replace_layout(model: Any) -> None:
    model.model.layers[0].post_attention_layernorm = nn.Identity()


def _replace_filler(model: Any) -> None:
    model.model.layers[1].mlp = nn.Dropout().eval()


def _wrap_down(model: Any) -> None:
    _layout(model).down_proj = nn.Sequential(_layout(model).down_proj)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_adapt, r"layers\.1: .* gate_up_proj was replaced by a peft\."),
        (_parametrise, "no plain nn.Linear"),
        (_parametrise_scale, "were added"),
        (_hook_product, "no plain nn.Linear"),
        (_hook_layout, "has hooks"),
        (_replace_layout, r"layers\.0: post_attention_layernorm: a Identity was put there"),
        (_replace_filler, r"layers\.1: mlp: a Dropout was put there"),
        (_wrap_down, r"down_proj was replaced by a .*Sequential"),
    ],
)
def test_undo_refuses_to_drop_what_was_put_on_a_layout(change: Any, reason: str) -> None:
    model = built()
    kp.apply_default_kernels(model, f"{NORM},{BLOCK}")
    change(model)
    before, expected = snapshot(model), logits(model)
    with pytest.raises(RuntimeError, match=reason):
        kp.undo(model)
    assert snapshot(model) == before
    assert torch.equal(logits(model), expected)


def test_a_forward_bound_over_ours_is_not_dropped() -> None:
    model = kp.apply_kernel(LINEAR, model=built())
    linear = model.lm_head
    linear.forward = MethodType(lambda self, x: x @ self.weight.T, linear)
    with pytest.raises(RuntimeError, match="lm_head: its forward was replaced"):
        kp.undo(model)


def test_undo_goes_from_the_outer_model_to_the_inner_one(tmp_path: Any) -> None:
    model = built()
    expected, names = logits(model), list(model.state_dict())
    kp.apply_kernel(NORM, model=model.model)
    kp.apply_kernel(BLOCK, model=model)
    applied, results = snapshot(model), logits(model)
    with pytest.raises(RuntimeError, match="undo that one first"):
        kp.undo(model.model)
    assert snapshot(model) == applied
    assert torch.equal(logits(model), results)
    kp.undo(model)
    kp.undo(model.model)
    assert list(model.state_dict()) == names
    assert torch.equal(logits(model), expected)
    model.save_pretrained(tmp_path)
    assert sorted(load_file(tmp_path / "model.safetensors")) == sorted(names)


def test_undo_that_fails_in_the_middle_leaves_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    from layout_kernels.kernel_plugins.swaps import Swap

    model = built()
    original, expected = snapshot(model), logits(model)
    kp.apply_kernel(BLOCK, model=model)
    before, results = snapshot(model), logits(model)
    back, calls = Swap.back, []

    def failing(self: Swap, optimizer: Any) -> None:
        calls.append(self)
        if len(calls) == 2:
            raise MemoryError("full")
        back(self, optimizer)

    with monkeypatch.context() as patch:
        patch.setattr(Swap, "back", failing)
        with pytest.raises(MemoryError):
            kp.undo(model)
    assert snapshot(model) == before
    assert torch.equal(logits(model), results)
    kp.undo(model)
    assert snapshot(model) == original
    assert torch.equal(logits(model), expected)


def test_pending_gradients_are_merged_and_split() -> None:
    model = built()
    model(tokens(), labels=tokens()).loss.backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    kp.apply_default_kernels(model, "auto")
    assert all(parameter.grad is not None for parameter in model.parameters())
    kp.undo(model)
    assert all(torch.equal(parameter.grad, expected[name]) for name, parameter in model.named_parameters())
    for layer in model.model.layers:
        layer.mlp.up_proj.weight.grad = None
    with pytest.raises(RuntimeError, match=r"layers\.0: only one of .* has a gradient"):
        kp.apply_kernel(MLP, model=model)


def test_a_replaced_forward_of_the_parent_is_respected() -> None:
    model = built()
    layer = model.model.layers[0]
    layer.forward = MethodType(lambda self, x, *_, **__: x + 1, layer)
    other = model.model.layers[1]
    other.forward = MethodType(type(other).forward, other)
    expected = logits(model)
    kp.apply_kernel(BLOCK, model=model)
    assert [hasattr(part.post_attention_layernorm, "gate_up_proj") for part in model.model.layers] == [False, True]
    # Merged products add up the same terms as separate ones, possibly in another order: float32 rounding only.
    assert (logits(model) - expected).abs().max() <= 1e-5 * expected.abs().max().clamp(min=1)


@pytest.mark.parametrize("kernel_id", [MLP, BLOCK, LINEAR])
def test_a_bound_forward_that_is_the_class_s_own_is_no_obstacle(kernel_id: str) -> None:
    model = built()
    for layer in model.model.layers:
        for module in (layer.mlp.act_fn, layer.mlp.down_proj, layer.mlp):
            module.forward = MethodType(type(module).forward, module)
    before = snapshot(model)
    kp.apply_kernel(kernel_id, model=model)
    down = model.model.layers[0].mlp.down_proj if kernel_id == LINEAR else _layout(model).down_proj
    assert hasattr(down.forward, "is_linear_forward") == (kernel_id == LINEAR)
    kp.undo(model)
    assert snapshot(model) == before


def test_factored_optimizer_state_is_refused_before_anything_changes() -> None:
    def step(model: Any, optimizer: Any) -> None:
        model(tokens(), labels=tokens()).loss.backward()
        optimizer.step()

    model = built()
    optimizer = torch.optim.Adafactor(model.parameters())
    step(model, optimizer)
    with pytest.raises(RuntimeError, match=r"'row_var' .*cannot be merged"):
        kp.apply_kernel(BLOCK, model=model, optimizer=optimizer)
    optimizer.state.clear()
    kp.apply_kernel(BLOCK, model=model, optimizer=optimizer)
    step(model, optimizer)
    before = snapshot(model)
    with pytest.raises(RuntimeError, match=r"'row_var' .*cannot be split"):
        kp.undo(model, optimizer=optimizer)
    assert snapshot(model) == before
    optimizer.state.clear()
    kp.undo(model, optimizer=optimizer)


def test_ids_are_looked_up_before_any_is_applied() -> None:
    model = built()
    before = snapshot(model)
    with pytest.raises(ValueError, match="no kernel with the id 'nonsense'"):
        kp.apply_default_kernels(model, f"{NORM},nonsense")
    assert snapshot(model) == before


@pytest.mark.parametrize("ids", ["auto", BLOCK, MLP])
def test_one_layer_that_cannot_be_merged_is_left_out_with_one_warning(ids: str) -> None:
    model = built()
    model.model.layers[0].mlp.gate_proj.weight.requires_grad_(False)
    before, expected = snapshot(model), logits(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        kp.apply_default_kernels(model, ids)
    told = [str(warning.message) for warning in caught if "left as they are" in str(warning.message)]
    assert len(told) == 1
    assert "model.layers.0: gate_proj and up_proj differ" in told[0]
    merged = [any(hasattr(m, "gate_up_proj") for m in layer.modules()) for layer in model.model.layers]
    assert merged == [False, True]
    # Merged products add up the same terms as separate ones, possibly in another order: float32 rounding only.
    assert (logits(model) - expected).abs().max() <= 1e-5 * expected.abs().max().clamp(min=1)
    kp.undo(model)
    assert snapshot(model) == before


def test_undo_leaves_a_model_that_was_loaded_with_layouts_its_original_names(kernel: Any, tmp_path: Any) -> None:
    from tests.support.loads import load, ref

    family = FAMILIES["llama"]
    with kernel.kernel_loading():
        model = load(family, save_family(family, tmp_path), {"RMSNorm": ref("CustomRMSNorm")})
    plugins = kernel.kernel_plugins
    originals = plugins.original_state_dict(model)
    plugins.apply_kernel(MLP, model=model)
    plugins.undo(model)
    model.load_state_dict(originals)
    model.save_pretrained(tmp_path / "again")
    assert sorted(load_file(tmp_path / "again" / "model.safetensors")) == sorted(originals)


def test_inner_models_save_original_names_relative_to_themselves(tmp_path: Any) -> None:
    model = built()
    model.model.save_pretrained(tmp_path / "stock")
    kp.apply_default_kernels(model, "auto")
    model.model.save_pretrained(tmp_path / "fast")
    kp.undo(model)
    model.model.save_pretrained(tmp_path / "undone")
    stock, fast, undone = (load_file(tmp_path / part / "model.safetensors") for part in ("stock", "fast", "undone"))
    assert sorted(stock) == sorted(fast) == sorted(undone)
    assert all(torch.equal(fast[key], stock[key]) for key in stock)


def test_undo_of_the_inner_model_keeps_the_names_of_the_outer_ones_layouts(tmp_path: Any) -> None:
    model = built()
    kp.apply_kernel(BLOCK, model=model)
    kp.apply_kernel(NORM, model=model.model)
    kp.undo(model.model)
    model.model.save_pretrained(tmp_path / "fast")
    built().model.save_pretrained(tmp_path / "stock")
    stock, fast = (load_file(tmp_path / part / "model.safetensors") for part in ("stock", "fast"))
    assert sorted(stock) == sorted(fast)
