"""How checkpoint tensors become a layout's parameters, and how they become checkpoint tensors again.

A layout states its rules as data: each of its parameters is one checkpoint tensor under another name, or several
checkpoint tensors concatenated along their first dimension. From these rules one transformers ``WeightConverter``
is made, which serves every layout, on the way in and on the way out.

Names are never guessed from patterns: each layout knows where it stands (``locations.py``), and the converter looks
keys up in a table; a key that belongs to no layout is left alone, whatever it looks like. A fused layout takes
tensors from its former siblings (``mlp.gate_proj.weight`` goes into ``post_attention_layernorm``); their names come
from the class that transformers' fusion made. What was converted is remembered by the model's own converter, so
that saving is the exact inverse for exactly those tensors.

Sources: ``transformers/core_model_loading.py`` (``WeightTransform``, ``convert_and_load_state_dict_in_model``,
``revert_weight_conversion``) of transformers 5.22.2.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch

from .locations import Rule, join, locations, parent_path, source_names
from .pages import pages
from .state import accept_original_state_dicts, layouts_of, merge, split

try:
    from transformers.core_model_loading import ConversionOps, WeightConverter
except ImportError:  # transformers is absent, or older than 5.20: the layers still work, loading through it does not
    ConversionOps = WeightConverter = None  # type: ignore[assignment,misc]

if TYPE_CHECKING:
    from .layout import Layout


class Applied:
    """Full names of the parameters that a model's converter made. Shared by the copies that transformers takes."""

    def __init__(self) -> None:
        self.targets: set[str] = set()

    def __deepcopy__(self, memo: dict[int, Any]) -> Applied:
        # Empty: the registered template is being copied for a new model. Otherwise: one model's converter is copied
        # once for each of its tensors, and all of these must write into the same record.
        return self if self.targets else Applied()


def owner_of(model: torch.nn.Module, full_name: str) -> tuple[Layout, str, Rule]:
    """The layout that owns parameter ``full_name`` of ``model``, its path, and the parameter's rule."""
    path = full_name
    while path:
        path = parent_path(path)
        module = model.get_submodule(path)
        if getattr(module, "is_layout", False):
            layout: Any = module
            for rule in layout.rules():
                if join(path, rule.target) == full_name:
                    return layout, path, rule
    raise ValueError(f"{full_name!r} is not a parameter of a layout of this model")


def why_not_merge(model: torch.nn.Module) -> str | None:
    """Why products of ``model`` must stay as the checkpoint has them, or None."""
    if getattr(model, "is_quantized", False):
        return "the model is loaded quantised, and its quantiser names gate_proj, up_proj and down_proj themselves"
    if any(type(parameter).__name__ == "DTensor" for parameter in model.parameters()):
        return (
            "the model is loaded tensor-parallel, and its plan shards gate_proj, up_proj and down_proj: the merged "
            "weights would stay whole on every rank"
        )
    return None


def remember_conversions(model: torch.nn.Module) -> None:
    """Let every transformers model in ``model`` that holds layouts save the original names, also when saved alone.

    ``from_pretrained`` gives a list of conversions to the model that it loads, and none to the models inside it.
    """
    from transformers import PreTrainedModel
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange

    for module in model.modules():
        part: Any = module
        if not isinstance(part, PreTrainedModel) or part.__dict__.get("_weight_conversions") is not None:
            continue
        targets = {join(path, rule.target) for path, layout in layouts_of(part) for rule in layout.rules()}
        if targets:
            found = get_model_conversion_mapping(part, add_legacy=False)
            ours = LayoutConverter()
            ours.applied.targets = targets
            kept = [rule for rule in found if not isinstance(rule, LayoutConverter | PrefixChange)]
            vars(part)["_weight_conversions"] = [*kept, ours]


def verify_all(model: torch.nn.Module) -> None:
    """Have every layout of ``model`` checked, also those to which no checkpoint tensor leads.

    The model also learns to load state dicts in the stock model's names, as a Trainer does when it resumes.
    """
    accept_original_state_dicts(model)
    reason = why_not_merge(model)
    for path, module in model.named_modules():
        if getattr(module, "is_layout", False):
            layout: Any = module
            if reason is not None and hasattr(layout, "down_proj"):
                layout.refuse(f"{reason}. Use a norm layer alone for such a load")
            layout.verify(model, path)
    remember_conversions(model)


def _before_renaming(key: str) -> str:
    """The key as it stands in the checkpoint, when ``key`` is what transformers' renamings made of it and no tensor of
    the model is called so; else ``key``.

    transformers then takes the key as it was, if the model has it (a loose rule of DeepSeek V4 turns ``model.norm``
    into ``model.kv_norm``), but a model with layouts lacks it. Converters are not told, so the caller is asked.
    """
    frame = inspect.currentframe()
    for _ in range(3):
        frame = frame.f_back if frame is not None else None
    if frame is None or frame.f_code.co_name != "rename_source_key" or locations.has(key):
        return key
    original = frame.f_locals.get("source_key")
    return original if isinstance(original, str) else key


if WeightConverter is not None:
    # Unique per copy of this package: transformers keys its converters by these strings.
    _SOURCES = [f"{__name__}.source_{number}" for number in range(2)]
    _TARGET = f"{__name__}.target"

    class LayoutOperation(ConversionOps):
        """Checkpoint tensors to one layout parameter; checks on the way that the layout may stand where it stands."""

        @torch.no_grad()
        def convert(  # type: ignore[override]
            self,
            input_dict: dict[str, Any],
            source_patterns: list[str],
            target_patterns: list[str],  # noqa: ARG002 the interface of transformers
            full_layer_name: str,
            model: Any,
            **kwargs: Any,  # noqa: ARG002
        ) -> dict[str, torch.Tensor]:
            """See ``ConversionOps.convert``."""
            layout, _, rule = owner_of(model, full_layer_name)
            if not layout.verified:
                verify_all(model)
            tensors: list[torch.Tensor] = []
            for pattern in source_patterns:
                given = input_dict.pop(pattern, [])
                tensors.extend(given if isinstance(given, list) else [given])
            if layout.refusal is not None:  # raised at the end of the load, as it is; here it would be wrapped
                return {full_layer_name: torch.cat(tensors)}
            parameter = layout.get_parameter(rule.target)
            if len(tensors) == len(rule.sources):  # transformers itself reports, or ignores, another shape
                merged = torch.cat(tensors) if len(tensors) > 1 else tensors[0]
            else:
                merged = merge(tensors, rule, full_layer_name, parameter.shape)
            if len(tensors) > 1:
                for tensor in tensors:
                    pages.note(tensor)
            layout.note_loaded(rule.target)
            return {full_layer_name: merged}

        @property
        def reverse_op(self) -> ConversionOps:
            """The operation that writes the checkpoint's tensors again."""
            return OriginalOperation()

    class OriginalOperation(ConversionOps):
        """One layout parameter to the checkpoint tensors it was made of."""

        @torch.no_grad()
        def convert(  # type: ignore[override]
            self,
            input_dict: dict[str, Any],
            source_patterns: list[str],  # noqa: ARG002 the interface of transformers
            target_patterns: list[str],  # noqa: ARG002
            full_layer_name: str,
            model: Any,
            **kwargs: Any,  # noqa: ARG002
        ) -> dict[str, torch.Tensor]:
            """See ``ConversionOps.convert``."""
            layout, path, rule = owner_of(model, full_layer_name)
            layout.resolve_child_names(path, model)
            names = source_names(layout, path, rule)
            if names is None:
                raise ValueError(
                    f"{full_layer_name}: the name of the module that {list(rule.sources)} came from is unknown, so "
                    "the checkpoint's own names cannot be written; save with save_original_format=False"
                )
            ((_, given),) = input_dict.items()
            tensor = given[0] if isinstance(given, list) else given
            return dict(zip(names, split(tensor, rule), strict=True))

        @property
        def reverse_op(self) -> ConversionOps:
            """The operation that reads the checkpoint's tensors."""
            return LayoutOperation()

    class LayoutConverter(WeightConverter):
        """The ``WeightConverter`` of every layout: looks keys up by where the layouts stand, not by a pattern."""

        def __init__(self) -> None:
            super().__init__(list(_SOURCES), _TARGET, operations=[LayoutOperation()])
            self.applied = Applied()

        def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
            """The key of the parameter that ``source_key`` belongs to and its place in it, or the key and None."""
            match = locations.find(source_key) or locations.find(_before_renaming(source_key))
            if match is None:
                return source_key, None
            self._was_used = True
            self.applied.targets.add(match.full_target)
            return match.target, self.source_patterns[match.source_index]

        def reverse_transform(self) -> OriginalConverter:
            """The converter that saves what this one loaded."""
            return OriginalConverter(self.applied)

        def __deepcopy__(self, memo: dict[int, Any]) -> LayoutConverter:
            copied = LayoutConverter()
            copied.applied = self.applied.__deepcopy__(memo)
            copied._was_used = self._was_used
            return copied

    class OriginalConverter(WeightConverter):
        """Writes layout parameters under their checkpoint names: those that were loaded so, or all when none were."""

        def __init__(self, applied: Applied) -> None:
            super().__init__(_TARGET, list(_SOURCES), operations=[OriginalOperation()])
            self.applied = applied

        def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
            """The key itself, claimed when it is a parameter that has checkpoint tensors to be written as."""
            if source_key not in self._targets():
                return source_key, None
            return source_key, self.source_patterns[0]

        def _targets(self) -> set[str]:
            if self.applied.targets:
                return self.applied.targets
            return {join(path, rule.target) for path, layout in locations.layouts() for rule in layout.rules()}

        def __deepcopy__(self, memo: dict[int, Any]) -> OriginalConverter:
            return OriginalConverter(self.applied)
