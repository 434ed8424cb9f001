"""What was done to a model between apply and undo, or beside it, is kept or named in an error; never dropped."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch

from layout_kernels import kernel_plugins as kp
from tests.kernel_plugins.test_live import BLOCK, MLP, NORM, built, logits


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
    assert torch.equal(logits(model), expected)


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
