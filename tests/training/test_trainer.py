"""Training with layouts is training of the stock model: Trainer, resume, checkpointing, autocast, compile, LoRA."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers as tf
from torchao.quantization import Int8WeightOnlyConfig, quantize_

from layout_kernels import kernel_plugins as kp
from tests.support.loads import load, ref
from tests.support.tiny import FAMILIES, randomise, save_family, tokens

FAMILY = FAMILIES["llama"]
MAPPING = {"RMSNorm": ref("CustomRMSNorm"), FAMILY.fusion_key(): ref("RMSNormMLP")}
# Adam divides by the size of the gradient, so a float32 rounding of it may move a weight by a fraction of lr = 1e-3
# at each of a few steps.
WEIGHT_TOLERANCE = 1e-4


class Sentences(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(3, 90, (9,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


def arguments(folder: Path, **extra: Any) -> tf.TrainingArguments:
    settings = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 2,
        "max_steps": 4,
        "learning_rate": 1e-3,
        "report_to": [],
        "save_steps": 2,
        "logging_steps": 1,
        "use_cpu": True,
        "seed": 1,
        "disable_tqdm": True,
    }
    return tf.TrainingArguments(**(settings | extra))


def original(model: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in kp.original_state_dict(model).items()}


def difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert sorted(a) == sorted(b)
    return max((a[name].float() - b[name].float()).abs().max().item() for name in a)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_family(FAMILY, tmp_path / "checkpoint")


@pytest.fixture(params=["at load", "live"])
def fast(request: pytest.FixtureRequest, kernel: Any, folder: Path) -> Any:
    """The model with our layers, put in at load or into the live model."""
    if request.param == "live":
        return kp.apply_default_kernels(load(FAMILY, folder, None), "auto")
    with kernel.kernel_loading():
        return load(FAMILY, folder, MAPPING)


def train(model: Any, folder: Path, resume: bool = False, **extra: Any) -> Any:
    trainer = tf.Trainer(model, arguments(folder, **extra), train_dataset=Sentences(), eval_dataset=Sentences())
    trainer.train(resume_from_checkpoint=resume or None)
    return trainer


def test_trainer_takes_the_same_steps_and_writes_stock_checkpoints(fast: Any, folder: Path, tmp_path: Path) -> None:
    stock = load(FAMILY, folder, None)
    runs = [train(stock, tmp_path / "stock"), train(fast, tmp_path / "fast")]
    expected, found = ([e["loss"] for e in run.state.log_history if "loss" in e] for run in runs)
    assert len(found) == 4
    assert found == pytest.approx(expected, rel=1e-4)  # the log rounds to four digits
    assert difference(original(fast), original(stock)) <= WEIGHT_TOLERANCE
    reloaded = load(FAMILY, tmp_path / "fast" / "checkpoint-4", None)
    assert difference(original(reloaded), original(fast)) == 0


def test_resuming_goes_on_from_the_checkpoint(fast: Any, kernel: Any, folder: Path, tmp_path: Path) -> None:
    train(fast, tmp_path / "run")
    whole = original(fast)
    with kernel.kernel_loading():
        fresh = load(FAMILY, folder, MAPPING)
    (tmp_path / "run" / "checkpoint-4").rename(tmp_path / "away")
    train(fresh, tmp_path / "run", resume=True)
    assert difference(original(fresh), whole) <= WEIGHT_TOLERANCE


@pytest.mark.parametrize("resumed", ["stock", "ours"])
def test_a_run_with_decay_goes_on_between_stock_and_ours(
    resumed: str, fast: Any, folder: Path, tmp_path: Path
) -> None:
    """The checkpoint of the other holds weights and optimizer state by stock's names, in stock's order."""
    decayed = {"weight_decay": 0.1, "learning_rate": 1e-2}
    steady = load(FAMILY, folder, None)
    train(steady, tmp_path / "steady", **decayed)
    first, then = (load(FAMILY, folder, None), fast) if resumed == "ours" else (fast, load(FAMILY, folder, None))
    train(first, tmp_path / "run", **decayed)
    shutil.rmtree(tmp_path / "run" / "checkpoint-4")
    train(then, tmp_path / "run", resume=True, **decayed)
    assert difference(original(then), original(steady)) <= 10 * WEIGHT_TOLERANCE  # ten times the rate
    assert difference(original(steady), original(load(FAMILY, folder, None))) > 100 * WEIGHT_TOLERANCE


def test_the_best_model_is_loaded_at_the_end(fast: Any, tmp_path: Path) -> None:
    options = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 2, "learning_rate": 1e-3}
    trainer = train(fast, tmp_path / "run", **options, metric_for_best_model="loss", greater_is_better=True)
    best = Path(trainer.state.best_model_checkpoint)
    assert best.name == "checkpoint-2"  # the greatest loss is asked for, which is not the last
    reloaded = load(FAMILY, best, None)
    assert difference(original(fast), original(reloaded)) == 0


def gradients(model: Any, run: Any = None) -> dict[str, torch.Tensor]:
    model.train()
    model.zero_grad()
    (model if run is None else run)(input_ids=tokens(), labels=tokens()).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_gradient_checkpointing_gives_the_same_gradients(fast: Any) -> None:
    expected = gradients(fast)
    fast.gradient_checkpointing_enable()
    found = gradients(fast)
    assert sorted(found) == sorted(expected)
    # The forward runs twice on the same numbers.
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_autocast_has_the_dtypes_of_stock(fast: Any, folder: Path) -> None:
    stock = load(FAMILY, folder, None)
    with torch.autocast("cpu", torch.bfloat16):
        expected, found = stock(tokens()).logits, fast(tokens()).logits
    assert found.dtype == expected.dtype
    # bfloat16 products (2**-8 relative) through two layers, each of which may round to a neighbour.
    assert (found - expected).abs().max() <= 4 * 2**-8 * expected.abs().max()


def test_a_compiled_model_gives_the_same_logits_without_a_graph_break(fast: Any) -> None:
    with torch.no_grad():
        expected = fast(tokens()).logits
        torch._dynamo.reset()
        compiled = torch.compile(fast, fullgraph=True, backend="aot_eager")
        assert (compiled(tokens()).logits - expected).abs().max() <= 1e-5  # float32, in another order
        assert (compiled(tokens(3, 7)).logits - fast(tokens(3, 7)).logits).abs().max() <= 1e-5


def test_a_compiled_model_trains_and_follows_weights_that_are_exchanged(fast: Any, folder: Path) -> None:
    stock = load(FAMILY, folder, None).train()
    torch._dynamo.reset()
    compiled = torch.compile(fast.train(), fullgraph=True, backend="aot_eager")
    for factor in (1.0, 0.5):
        for model in (stock, fast):
            for name, parameter in model.named_parameters():
                if "mlp" in name:
                    parameter.data = parameter.data * factor  # other memory: what lay side by side does not any more
        expected, found = (model(input_ids=tokens()).logits for model in (stock, compiled))
        assert (found - expected).abs().max() <= 1e-5 * expected.abs().max().clamp(min=1)  # float32, in another order
        with torch.no_grad():
            found = compiled(input_ids=tokens()).logits
        assert (found - expected).abs().max() <= 1e-5 * expected.abs().max().clamp(min=1)  # the same
        first, second = gradients(stock), gradients(fast, compiled)
        assert sorted(first) == sorted(second)
        for name, gradient in first.items():
            assert (second[name] - gradient).abs().max() <= 1e-5 * gradient.abs().max().clamp(min=1e-3), name


def test_lora_trains_around_the_layers(fast: Any, folder: Path, tmp_path: Path) -> None:
    settings = {"r": 2, "target_modules": ["q_proj", "gate_proj", "down_proj"], "lora_alpha": 8}
    stock = load(FAMILY, folder, None)
    models = []
    for model in (stock, fast):
        torch.manual_seed(0)
        models.append(peft.get_peft_model(model, peft.LoraConfig(**settings)))
    with torch.no_grad():
        for one, two in zip(_adapters(models[0]), _adapters(models[1]), strict=True):
            one.normal_(generator=torch.Generator().manual_seed(one.numel()))
            two.copy_(one)
    expected, found = (model(tokens()).logits for model in models)
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()  # float32 sums in another order
    models[1](tokens(), labels=tokens()).loss.backward()
    assert all(p.grad is not None for p in _adapters(models[1]))
    models[1].save_pretrained(tmp_path / "adapter")


def _adapters(model: Any) -> list[Any]:
    return [p for name, p in model.named_parameters() if "lora" in name]


def test_kernels_leave_products_with_an_adapter_as_they_are(folder: Path) -> None:
    model = peft.get_peft_model(load(FAMILY, folder, None), peft.LoraConfig(r=2, target_modules=["gate_proj"]))
    with pytest.raises(RuntimeError, match="no plain gated MLP"):
        kp.apply_kernel("cpu_fused_rmsnorm_mlp", model=model)
    expected = model(tokens()).logits
    kp.apply_kernel("cpu_fused_rmsnorm", model=model)
    assert (model(tokens()).logits - expected).abs().max() <= 1e-5  # float32 rounding
    kp.undo(model)


def test_quantised_products_are_refused_and_norms_are_right() -> None:
    model = randomise(FAMILY.build()).eval()
    quantize_(model, Int8WeightOnlyConfig())
    expected = model(tokens()).logits
    with pytest.raises(RuntimeError, match="quantised or sharded"):
        kp.apply_kernel("cpu_fused_rmsnorm_mlp", model=model)
    kp.apply_kernel("cpu_fused_rmsnorm", model=model)
    # A norm may round its last bit otherwise.
    assert (model(tokens()).logits - expected).abs().max() <= 1e-5 * expected.abs().max()
