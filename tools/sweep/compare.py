"""One family: built small and random, saved, loaded stock and with its plan, and compared."""

from __future__ import annotations

import itertools
import re
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .families import Family
from .inputs import Inputs, make_inputs, run
from .overrides import OUTSIDE
from .shrink import MAX_PARAMETERS, build_config

REPO = "layout-kernels/layout-kernels"
VERDICTS = ("equal", "refused", "wrong", "error", "unbuildable", "no norm", "outside")
# Merged products add up the same terms as separate ones, possibly in another order, and a kernel sums a row in another
# order than PyTorch: float32 roundings, 6e-8 each, carried through a few layers that amplify them.
# Gradients pass through every layer twice, recurrences included.
TOLERANCE = {"result": 2e-5, "gradient": 1e-4}


@dataclass(frozen=True)
class Result:
    """What the sweep found out about one family."""

    model_type: str
    verdict: str
    layers: tuple[tuple[str, int], ...] = ()
    inputs: str = ""
    reason: str = ""
    seconds: float = 0.0


def _is_norm(module: torch.nn.Module) -> bool:
    return "norm" in type(module).__name__.lower()


def has_rms_norm(model: torch.nn.Module) -> bool:
    """Whether a module of the model is an RMSNorm by its class's name, or one of those with other names."""
    names = {type(module).__name__ for module in model.modules()}
    return any("rmsnorm" in name.lower() or name.endswith("T5LayerNorm") or name == "ChameleonNorm" for name in names)


def randomise(model: torch.nn.Module) -> None:
    """Weights of a size that shows an error, and norm weights on both sides of one."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for module in model.modules():
            for parameter in module.parameters(recurse=False):
                value = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(1 + 0.4 * value if _is_norm(module) and parameter.dim() <= 1 else 0.15 * value)
        for module in model.modules():
            if isinstance(module, torch.nn.Embedding) and module.padding_idx is not None:
                module.weight[module.padding_idx] = 0  # as from_pretrained leaves it in some families


def build(family: Family) -> Any:
    """The family's smallest model, random, float32.

    Raises:
        RuntimeError: it is not small: a size has a name that the shrinker does not know.
    """
    import transformers

    config = build_config(family.model_type, getattr(transformers, family.config))
    cls = getattr(transformers, family.model)
    with torch.device("meta"):
        sizes = {name: p.numel() for name, p in cls(config).named_parameters()}
    if sum(sizes.values()) > MAX_PARAMETERS:
        largest = max(sizes, key=sizes.__getitem__)
        raise RuntimeError(f"{sum(sizes.values())} parameters, {largest} has {sizes[largest]}: add an override")
    torch.manual_seed(1)
    model = cls(config).float().eval()
    randomise(model)
    return model


def gradients(model: Any, inputs: Inputs) -> dict[str, torch.Tensor]:
    """Gradients under the checkpoint's names, of a loss that all results enter."""
    from transformers.core_model_loading import revert_weight_conversion

    model.train()
    results = [value.float() for value in run(model, inputs).values() if value.requires_grad]
    if not results:
        return {}
    sum(
        (value * torch.linspace(-1, 1, value.shape[-1])).mean() if value.dim() else value for value in results
    ).backward()  # type: ignore[union-attr]
    model.state_dict()
    # A tower that the inputs did not reach has no gradients; the conversion back wants all parts of a merged tensor.
    found = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}
    return revert_weight_conversion(model, found)


def saved_tensors(model: Any, folder: Path) -> dict[str, torch.Tensor]:
    """What ``save_pretrained`` writes."""
    from safetensors.torch import load_file

    model.save_pretrained(folder)
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def _difference(kind: str, found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], exact: bool) -> str:
    """The first difference of two sets of tensors, in words; empty when there is none."""
    if sorted(found) != sorted(expected):
        return (
            f"{kind}: missing {sorted(set(expected) - set(found))[:3]}, extra {sorted(set(found) - set(expected))[:3]}"
        )
    for name, wanted in expected.items():
        given = found[name]
        if given.shape != wanted.shape or given.dtype != wanted.dtype:
            return f"{kind} {name}: {tuple(given.shape)} {given.dtype}, expected {tuple(wanted.shape)} {wanted.dtype}"
        if exact and not torch.equal(given, wanted):
            return f"{kind} {name}: not the same values"
        if exact or not wanted.numel():
            continue
        error, size = (given.double() - wanted.double()).abs().max().item(), wanted.double().abs().max().item()
        if not error <= TOLERANCE[kind] * max(size, 1e-3):
            return f"{kind} {name}: off by {error:.2e} at a size of {size:.2e}"
    return ""


def _half_precision_norms(stock: Any, fast: Any) -> str:
    """Norms one by one on bfloat16 with float32 and bfloat16 weights, where the flavours differ; empty when equal."""
    import copy

    for path, module in fast.named_modules():
        weight = getattr(module, "weight", None)
        if not getattr(module, "is_adopted", False) or weight is None:
            continue
        x = torch.randn(3, weight.shape[-1], generator=torch.Generator().manual_seed(4)).bfloat16()
        for dtype in (torch.float32, torch.bfloat16):
            ours, theirs = (copy.deepcopy(m).to(dtype) for m in (module, stock.get_submodule(path)))
            with torch.no_grad():
                found, wanted = ours(x), theirs(x)
            # Two roundings to bfloat16, each of 2**-8 relative, may turn.
            if found.dtype != wanted.dtype or (found - wanted).abs().max() > 2 * 2**-8 * wanted.abs().max():
                return f"norm {path} in bfloat16: {found.dtype}, expected {wanted.dtype}, or other values"
    return ""


def _tree_difference(stock: Any, fast: Any) -> str:
    """Paths, classes, parameters, shapes and order, as whoever goes by names sees them; empty when equal."""

    def trees(look: Callable[[Any], list[Any]]) -> tuple[list[Any], list[Any]]:
        return look(stock), look(fast)

    for kind, (wanted, found) in (
        ("module", trees(lambda model: [(path, type(m).__name__) for path, m in model.named_modules()])),
        ("parameter", trees(lambda model: [(n, tuple(p.shape), p.dtype) for n, p in model.named_parameters()])),
        ("tensor", trees(lambda model: list(model.state_dict()))),
    ):
        for one, other in itertools.zip_longest(wanted, found):
            if one != other:
                return f"{kind} {other}, stock has {one}"
    return ""


def _compare(stock: Any, fast: Any, inputs: Inputs, folder: Path) -> str:
    with torch.no_grad():
        first, second = run(stock, inputs), run(fast, inputs)
    return (
        _tree_difference(stock, fast)
        or _difference("result", second, first, exact=False)
        or _half_precision_norms(stock, fast)
        or _difference("gradient", gradients(fast, inputs), gradients(stock, inputs), exact=False)
        or _difference(
            "file", saved_tensors(fast, folder / "fast"), saved_tensors(stock, folder / "stock"), exact=True
        )
    )


def left_behind() -> list[str]:
    """Classes of transformers that are still replaced by a layout or a fused class, as ``module.name``."""
    found = []
    for name, module in list(sys.modules.items()):
        if name.startswith("transformers.models.") and module is not None:
            for attribute, value in list(vars(module).items()):
                fused = isinstance(value, type) and value.__name__.startswith("Fused") and value.__name__ != attribute
                if isinstance(value, type) and (hasattr(value, "is_layout") or fused):
                    found.append(f"{name}.{attribute}")
    return found


def _short(error: BaseException) -> str:
    place = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{'/'.join(Path(place.filename).parts[-2:])}:{place.lineno}"
    return f"{type(error).__name__}: {' '.join(str(error).split())[:400]} ({where})"


def _packages(error: ImportError) -> str:
    """The packages that an import error of transformers or Python asks for, else the error itself."""
    named = re.findall(r"requires the (\w+) library|No module named '(\w+)'", str(error))
    return ", ".join(dict.fromkeys(first or second for first, second in named)) or _short(error)


def default_plan(folder: Path) -> Any:
    """The plan of the tree under test."""
    from layout_kernels import plan

    return plan(folder)


def _judge(family: Family, kernel: Any, folder: Path, planner: Callable[[Path], Any]) -> Result:
    name = family.model_type
    if name in OUTSIDE:
        return Result(name, "outside", reason=OUTSIDE[name])
    model = build(family)
    cls = type(model)
    if not has_rms_norm(model):
        return Result(name, "no norm")
    model.save_pretrained(folder / "checkpoint")
    stock = cls.from_pretrained(folder / "checkpoint")
    lost = [key for key, value in model.state_dict().items() if not torch.equal(value, stock.state_dict()[key])]
    if lost:
        raise RuntimeError(f"stock transformers does not load what it saved: {lost[:3]}")
    inputs, kind = make_inputs(stock, name)
    made = planner(folder / "checkpoint")
    if not made.mapping:
        reasons = {e.class_name: e.reason for e in made.entries}
        return Result(
            name, "refused", inputs=kind, reason="; ".join(reasons.values()) or "no norm or MLP of a known kind"
        )
    with kernel.kernel_loading():
        fast = cls.from_pretrained(
            folder / "checkpoint", use_kernels=True, kernel_config=made.kernel_config(REPO, revision="v1")
        )
    rows = [row.layer for row in kernel.report(fast).rows]
    layers = tuple((layer, rows.count(layer)) for layer in sorted(set(rows)))
    unbound = set(made.mapping.values()) - set(rows)
    problem = f"planned and not bound: {sorted(unbound)}" if unbound else _compare(stock, fast, inputs, folder)
    problem = problem or ", ".join(f"{name} is still replaced after the load" for name in left_behind())
    return Result(name, "wrong" if problem else "equal", layers, kind, problem)


def sweep_family(family: Family, kernel: Any, planner: Callable[[Path], Any] = default_plan) -> Result:
    """The verdict on one family; whatever is raised on the way is the verdict "error"."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            return _judge(family, kernel, Path(folder), planner)
    except ImportError as error:
        return Result(family.model_type, "unbuildable", reason=_packages(error))
    except Exception as error:  # noqa: BLE001 any exception of a foreign model is a finding
        return Result(family.model_type, "error", reason=_short(error))
