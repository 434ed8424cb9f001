"""What was done to a model between apply and undo, or beside it, is kept or named in an error; never dropped."""

from __future__ import annotations

import copy
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
from layout_kernels.running import adopted
from tests.kernel_plugins.test_live import BLOCK, LINEAR, MLP, NORM, built, logits, snapshot
from tests.support.tiny import FAMILIES, save_family, tokens


def test_a_norm_at_two_places_has_its_original_name_at_both() -> None:
    model = built()
    model.model.layers[1].input_layernorm = model.model.layers[0].input_layernorm
    names, expected = list(model.state_dict()), logits(model)
    kp.apply_kernel(NORM, model=model)
    originals = {key: value.clone() for key, value in kp.original_state_dict(model).items()}
    assert sorted(originals) == sorted(names)
    with torch.no_grad():
        model.model.layers[0].input_layernorm.weight.zero_()
    model.load_state_dict(originals)
    torch.testing.assert_close(logits(model), expected)


class Doubled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


def _parametrise(model: Any) -> None:
    parametrize.register_parametrization(model.model.norm, "weight", Doubled())


def _shard(model: Any) -> None:
    cls = type(model.model.norm)  # as fully_shard does
    model.model.norm.__class__ = type(f"FSDP{cls.__name__}", (cls,), {})


@pytest.mark.parametrize("change", [_parametrise, _shard])
def test_undo_refuses_to_drop_a_class_that_was_made_of_ours(change: Any) -> None:
    model = built()
    kp.apply_default_kernels(model, f"{NORM},{BLOCK}")
    change(model)
    before, expected = snapshot(model), logits(model)
    with pytest.raises(RuntimeError, match=r"undo of model\.norm: its class was changed"):
        kp.undo(model)
    assert snapshot(model) == before
    assert torch.equal(logits(model), expected)


def _adapt(model: Any) -> None:
    config = peft.LoraConfig(r=2, target_modules=["gate_proj", "down_proj"], init_lora_weights=False)
    peft.inject_adapter_in_model(config, model)


def _parametrise_product(model: Any) -> None:
    parametrize.register_parametrization(model.model.layers[1].mlp.up_proj, "weight", Doubled())


def _hook_product(model: Any) -> None:
    model.model.layers[0].mlp.gate_proj.register_forward_hook(lambda module, args, output: output + 1)


def _hook_norm(model: Any) -> None:
    model.model.layers[0].post_attention_layernorm.register_forward_hook(lambda module, args, output: output * 2)


def _hook_activation(model: Any) -> None:
    model.model.layers[0].mlp.act_fn.register_forward_hook(lambda module, args, output: output + 1)


def _exchange_activation(model: Any) -> None:
    model.model.layers[1].mlp.act_fn = nn.ReLU()


def _change_activation(model: Any) -> None:
    model.model.layers[1].mlp.act_fn.forward = torch.tanh


def _replace_norm(model: Any) -> None:
    model.model.layers[0].post_attention_layernorm = nn.Identity()


def _wrap_down(model: Any) -> None:
    model.model.layers[0].mlp.down_proj = nn.Sequential(model.model.layers[0].mlp.down_proj, nn.Tanh())


@pytest.mark.parametrize(
    "change",
    [
        _adapt,
        _parametrise_product,
        _hook_product,
        _hook_norm,
        _hook_activation,
        _exchange_activation,
        _change_activation,
        _replace_norm,
        _wrap_down,
    ],
)
@pytest.mark.parametrize("first", ["kernel", "change"])
def test_what_is_done_to_a_module_counts_and_stays(change: Any, first: str) -> None:
    torch.manual_seed(0)
    stock = built()
    untouched = logits(stock)
    change(stock)
    expected, classes = logits(stock), [type(module) for module in stock.modules()]
    assert not torch.allclose(expected, untouched)
    torch.manual_seed(0)
    model = built()
    for step in ("kernel", "change") if first == "kernel" else ("change", "kernel"):
        if step == "change":
            change(model)
        else:
            kp.apply_default_kernels(model, "auto")
    for _ in range(2):
        # Merged products add up the same terms as separate ones, possibly in another order: float32 rounding only.
        assert (logits(model) - expected).abs().max() <= 1e-5 * expected.abs().max().clamp(min=1)
        if _ == 0:
            kp.undo(model)
    assert [type(module).__name__ for module in model.modules()] == [cls.__name__ for cls in classes]


def test_a_forward_bound_over_ours_is_not_dropped() -> None:
    model = kp.apply_kernel(LINEAR, model=built())
    linear = model.lm_head
    linear.forward = MethodType(lambda self, x: x @ self.weight.T, linear)
    with pytest.raises(RuntimeError, match="lm_head: its forward was replaced"):
        kp.undo(model)


@pytest.mark.parametrize("outer_first", [True, False])
def test_kernels_of_an_inner_and_an_outer_model_are_undone_from_either(outer_first: bool, tmp_path: Any) -> None:
    model = built()
    expected, before = logits(model), snapshot(model)
    kp.apply_kernel(NORM, model=model.model)
    kp.apply_kernel(BLOCK, model=model)
    kp.undo(model if outer_first else model.model)
    assert snapshot(model) == before
    assert torch.equal(logits(model), expected)
    with pytest.raises(ValueError, match="no kernel was applied"):
        kp.undo(model)


def test_pending_gradients_stay() -> None:
    model = built()
    model(tokens(), labels=tokens()).loss.backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    kp.apply_default_kernels(model, "auto")
    assert all(parameter.grad is expected[name] for name, parameter in model.named_parameters())
    kp.undo(model)
    assert all(parameter.grad is expected[name] for name, parameter in model.named_parameters())


def test_a_replaced_forward_of_the_parent_is_respected() -> None:
    model = built()
    layer = model.model.layers[0]
    layer.forward = MethodType(lambda self, x, *_, **__: self.mlp(x) + self.post_attention_layernorm(x), layer)
    expected = logits(model)
    kp.apply_kernel(BLOCK, model=model)
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
    assert hasattr(model.model.layers[0].mlp.down_proj.forward, "is_linear_forward") == (kernel_id == LINEAR)
    assert adopted.is_adopted(model.model.layers[0].mlp) == (kernel_id != LINEAR)
    kp.undo(model)
    assert snapshot(model) == before


def test_ids_are_looked_up_before_any_is_applied() -> None:
    model = built()
    before = snapshot(model)
    with pytest.raises(ValueError, match="no kernel with the id 'nonsense'"):
        kp.apply_default_kernels(model, f"{NORM},nonsense")
    assert snapshot(model) == before


def test_of_several_ids_all_are_applied_or_none_and_the_reason_is_the_true_one() -> None:
    model = kp.apply_kernel(LINEAR, model=built())
    before = snapshot(model)
    with pytest.raises(RuntimeError, match=r"layers\.0\.mlp: it runs RMSNormMLP already"):
        kp.apply_default_kernels(model, f"{NORM},{BLOCK},{MLP}")
    assert snapshot(model) == before
    assert hasattr(model.lm_head.forward, "is_linear_forward")


def test_a_kernel_of_another_device_says_so_however_it_is_called() -> None:
    from layout_kernels.kernel_plugins.ops.ours import KERNELS

    model = built()
    before = snapshot(model)
    with pytest.raises(RuntimeError, match=r"'npu_fused_rmsnorm' .* it is for npu, the current device is cpu"):
        KERNELS["npu_fused_rmsnorm"].apply(model=model)
    assert snapshot(model) == before


@pytest.mark.parametrize("ids", ["auto", BLOCK, MLP])
def test_one_layer_whose_weights_cannot_be_moved_is_left_out_with_one_warning(ids: str) -> None:
    model = built()
    model.model.layers[0].mlp.share_memory()
    before, expected = snapshot(model), logits(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        kp.apply_default_kernels(model, ids)
    told = [str(warning.message) for warning in caught if "left as they are" in str(warning.message)]
    assert len(told) == 1
    assert "model.layers.0.mlp: its weights are shared with other processes" in told[0]
    assert [adopted.is_adopted(layer.mlp) for layer in model.model.layers] == [False, True]
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
    originals = copy.deepcopy(plugins.original_state_dict(model))
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


def test_another_setting_of_the_same_activation_counts() -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_proj, self.up_proj, self.down_proj = nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(12, 8)
            self.act = nn.GELU()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))

    model = nn.ModuleDict({"mlp": Gated()})
    kp.apply_kernel("cpu_fused_swiglu", model=model)
    x = 3 * torch.randn(5, 8)
    for approximate in ("none", "tanh"):
        model["mlp"].act.approximate = approximate
        gate, up = model["mlp"].gate_proj(x), model["mlp"].up_proj(x)
        expected = model["mlp"].down_proj(nn.functional.gelu(gate, approximate=approximate) * up)
        torch.testing.assert_close(model["mlp"](x), expected)
