"""One test for each that looks at a model by name, class or shape: families, keys and ways in, each beside stock."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from accelerate import infer_auto_device_map
from accelerate.utils import compute_module_sizes, find_tied_parameters
from accelerate.utils.dataclasses import get_module_class_from_name

from layout_kernels import kernel_plugins as kp
from tests.support.loads import load, ref
from tests.support.observed import TREES, ours
from tests.support.pairs import EVERY_WAY, TWO_WAYS, Way, with_kernels
from tests.support.tiny import save_family

NOT_FUSED = ("olmo2", "deepseek_v3")  # the norm before the MLP belongs to no pair in every layer
# Every way in for one family; each other family once through each door, by the keys that use all of its layers; and
# the keys of its own for what is loaded otherwise: packed products, weights offset by one, a norm after the MLP.
OWN_KEYS = {"phi3": ("MLP", "fusion"), "gemma2": ("norm", "fusion"), "olmo2": ("norm", "MLP")}
CASES = [
    *(("llama", way) for way in EVERY_WAY),
    *((name, way) for name in TREES if name != "llama" for way in (*TWO_WAYS, ("by hand", "norm and fusion"))),
    *((name, ("inside", kind)) for name, kinds in OWN_KEYS.items() for kind in kinds),
]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "-".join((case[0], *case[1])))
def case(request: pytest.FixtureRequest) -> tuple[str, Way]:
    return request.param


@pytest.fixture(scope="module")
def name(case: tuple[str, Way]) -> str:
    return case[0]


_folders: dict[str, Path] = {}


@pytest.fixture(scope="module")
def folder(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if name not in _folders:
        _folders[name] = save_family(TREES[name], tmp_path_factory.mktemp(name))
    return _folders[name]


_stock: dict[str, Any] = {}


@pytest.fixture(scope="module")
def stock(name: str, folder: Path) -> Any:
    if name not in _stock:
        _stock[name] = load(TREES[name], folder, None)
    return _stock[name]


@pytest.fixture(scope="module")
def model(case: tuple[str, Way], folder: Path, kernel: Any) -> Any:
    return with_kernels(case[0], folder, case[1], kernel)


def pairs(stock: Any, model: Any) -> Any:
    return zip(stock.named_modules(), model.named_modules(), strict=True)


def test_parameters_have_stock_s_names_shapes_dtypes_and_order(stock: Any, model: Any) -> None:
    first, second = (
        [(n, p.shape, p.dtype, p.device, p.requires_grad, type(p)) for n, p in each.named_parameters()]
        for each in (stock, model)
    )
    assert second == first
    for each in (stock, model):  # each parameter is whole in memory: nobody finds a view of something larger
        assert all(p.untyped_storage().nbytes() == p.nbytes for p in each.parameters())


def test_the_state_dict_has_stock_s_names_order_and_bits(stock: Any, model: Any) -> None:
    first, second = stock.state_dict(), model.state_dict()
    assert list(second) == list(first)
    assert list(second._metadata) == list(first._metadata)
    assert all(torch.equal(second[key], value) for key, value in first.items())


def test_buffers_are_stock_s(stock: Any, model: Any) -> None:
    first, second = dict(stock.named_buffers()), dict(model.named_buffers())
    assert list(second) == list(first)
    assert all(torch.equal(second[key], value) for key, value in first.items())


def test_modules_have_stock_s_paths_in_stock_s_order(stock: Any, model: Any) -> None:
    for once in (True, False):
        first, second = ([path for path, _ in m.named_modules(remove_duplicate=once)] for m in (stock, model))
        assert second == first
    assert [path for path, _ in model.named_children()] == [path for path, _ in stock.named_children()]


def test_only_replaced_modules_have_another_class_which_is_a_subclass_under_the_same_name(
    stock: Any, model: Any
) -> None:
    replaced = ours(model)
    assert replaced
    for (path, module), (_, other) in pairs(stock, model):
        if path in replaced:
            cls = type(other)
            assert isinstance(other, type(module))
            assert cls is not type(module)
            assert (cls.__name__, cls.__qualname__, cls.__module__, cls.__doc__) == (
                type(module).__name__,
                type(module).__qualname__,
                type(module).__module__,
                type(module).__doc__,
            )
        else:
            assert type(other) is type(module), path


def test_a_class_that_is_found_by_its_name_covers_the_modules_that_stock_s_covers(stock: Any, model: Any) -> None:
    """As FSDP's wrap policies find it: accelerate takes the class of the first module with that name."""
    for cls in sorted({type(module).__name__ for module in stock.modules()}):
        first, second = (
            [
                path
                for path, module in each.named_modules()
                if isinstance(module, get_module_class_from_name(each, cls))
            ]
            for each in (stock, model)
        )
        assert second == first, cls


def test_replaced_modules_take_their_arguments_under_stock_s_names(stock: Any, model: Any) -> None:
    for (path, module), (_, other) in pairs(stock, model):
        if path in ours(model):
            first, second = (inspect.signature(type(each).forward).parameters for each in (module, other))
            assert list(second) == list(first), path


def test_what_must_not_be_split_and_where_auto_would_place_it(stock: Any, model: Any) -> None:
    assert sorted(model._no_split_modules or ()) == sorted(stock._no_split_modules or ())
    assert compute_module_sizes(model) == compute_module_sizes(stock)
    assert find_tied_parameters(model) == find_tied_parameters(stock)
    memory = {"cpu": int(0.9 * compute_module_sizes(stock)[""])}  # the rest goes to disk
    first, second = (infer_auto_device_map(m, memory, sorted(m._no_split_modules or ())) for m in (stock, model))
    assert second == first
    assert len(set(first.values())) == 2


def test_weight_decay_by_name_takes_what_it_takes_of_stock(stock: Any, model: Any) -> None:
    trainer = tf.Trainer.__new__(tf.Trainer)
    first, second = (trainer.get_decay_parameter_names(each) for each in (stock, model))
    assert second == first
    assert any("mlp" in name for name in first)
    assert not any("layernorm" in name for name in first)


def test_freezing_by_name_freezes_what_it_freezes_of_stock(stock: Any, model: Any) -> None:
    for part in ("mlp", "norm", "layers.1.", "gate", "up_proj.weight", "down_proj"):
        first, second = ([(n, p.numel()) for n, p in m.named_parameters() if part in n] for m in (stock, model))
        assert second == first
        assert first, part
        for each in (stock, model):
            for name, _ in first:
                each.get_parameter(name).requires_grad_(False)
        counts = [m.num_parameters(only_trainable=True) for m in (stock, model)]
        for each in (stock, model):
            each.requires_grad_(True)
        assert counts[0] == counts[1] == stock.num_parameters() - sum(size for _, size in first), part


def test_sizes_that_are_counted_are_stock_s(stock: Any, model: Any) -> None:
    assert model.get_memory_footprint() == stock.get_memory_footprint()
    assert model.num_parameters(exclude_embeddings=True) == stock.num_parameters(exclude_embeddings=True)
    assert model.dtype == stock.dtype


def test_outputs_are_stock_s(name: str, stock: Any, model: Any) -> None:
    inputs = TREES[name].inputs()
    with torch.no_grad():
        first, second = (m(**inputs, output_hidden_states=True, output_attentions=True) for m in (stock, model))
    assert list(second) == list(first)
    for kind in ("hidden_states", "attentions"):
        assert len(second[kind]) == len(first[kind])
        assert [t.shape for t in second[kind]] == [t.shape for t in first[kind]]
    # float32 sums in another order, about 100 roundings of the largest logit.
    assert (second.logits - first.logits).abs().max() <= 1e-5 * first.logits.abs().max().clamp(min=1)


def test_nothing_is_left_to_convert_and_the_files_are_stock_s_byte_for_byte(
    stock: Any, model: Any, tmp_path: Path
) -> None:
    first, second = ([type(c) for c in getattr(m, "_weight_conversions", None) or ()] for m in (stock, model))
    assert second == first
    for kind, each in (("stock", stock), ("ours", model)):
        each.save_pretrained(tmp_path / kind)
    files = sorted(file.name for file in (tmp_path / "stock").iterdir())
    assert "model.safetensors" in files
    assert sorted(file.name for file in (tmp_path / "ours").iterdir()) == files
    for file in files:
        assert (tmp_path / "ours" / file).read_bytes() == (tmp_path / "stock" / file).read_bytes(), file


def test_the_guide_s_names_give_the_tensors(model: Any) -> None:
    for path in sorted(ours(model)):
        module = model.get_submodule(path)
        if not hasattr(module, "down_proj"):
            assert module.scale is module.weight
        elif "gate_up_proj" not in module._modules:
            rows = module.gate_up_proj.weight
            assert torch.equal(rows, torch.cat([module.gate_proj.weight, module.up_proj.weight]))
            assert rows.data_ptr() == module.gate_proj.weight.data_ptr()  # in place, as the merged product reads it
            both = module.gate_proj.bias, module.up_proj.bias
            assert (module.gate_up_proj.bias is None) == (both[0] is None)
            assert both[0] is None or torch.equal(module.gate_up_proj.bias, torch.cat(both))


IDS = ("cpu_fused_rmsnorm_mlp", "cpu_fused_rmsnorm", "cpu_fused_swiglu")


@pytest.mark.parametrize(
    ("family", "kernel_id"),
    [*((family, None) for family in TREES), *((family, one) for family in ("llama", "phi3", "olmo2") for one in IDS)],
)
def test_a_live_model_keeps_its_objects(family: str, kernel_id: str | None, tmp_path: Path) -> None:
    model = load(TREES[family], save_family(TREES[family], tmp_path), None)
    before = [(n, id(p), id(p.grad)) for n, p in model.named_parameters()]
    modules = [(n, id(m), type(m)) for n, m in model.named_modules()]
    values = {n: p.clone() for n, p in model.named_parameters()}
    if kernel_id == "cpu_fused_rmsnorm_mlp" and family == "olmo2":
        with pytest.raises(RuntimeError, match="hands its result to it alone"):
            kp.apply_kernel(kernel_id, model=model)
        return
    if kernel_id is None:
        kp.apply_default_kernels(model, "auto")
    else:
        kp.apply_kernel(kernel_id, model=model)
    assert ours(model)
    assert [(n, id(p), id(p.grad)) for n, p in model.named_parameters()] == before
    assert [(n, id(m)) for n, m in model.named_modules()] == [(n, m) for n, m, _ in modules]
    kp.undo(model)
    assert [(n, id(p), id(p.grad)) for n, p in model.named_parameters()] == before
    assert [(n, id(m), type(m)) for n, m in model.named_modules()] == modules
    assert all(torch.equal(p, values[n]) for n, p in model.named_parameters())


@pytest.mark.parametrize("family", NOT_FUSED)
def test_a_fusion_that_does_not_fit_is_refused_and_the_next_load_is_stock_s(
    family: str, loading: Any, tmp_path: Path
) -> None:
    tree = TREES[family]
    folder = save_family(tree, tmp_path)
    reason = "cannot be fused|cannot be taken over"
    with loading(), pytest.raises(ValueError, match=reason):
        load(tree, folder, {tree.fusion_key(): ref("RMSNormMLP")})
    classes = {type(module).__module__.partition(".")[0] for module in load(tree, folder, None).modules()}
    assert classes == {"transformers", "torch"}
