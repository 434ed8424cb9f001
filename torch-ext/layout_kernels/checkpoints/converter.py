"""How checkpoint tensors become a layout's parameters, and how they become checkpoint tensors again.

A layout states its rules as data: each of its parameters is one checkpoint tensor under another name, or several
checkpoint tensors concatenated along their first dimension. From these rules one transformers ``WeightConverter``
is made, which serves every layout, on the way in and on the way out.

Names are never guessed from patterns: each layout knows where it stands (``key_table.py``), and the converter looks
keys up in a table; a key that belongs to no layout is left alone, whatever it looks like. A fused layout takes
tensors from its former siblings (``mlp.gate_proj.weight`` goes into ``post_attention_layernorm``); their names come
from the class that transformers' fusion made. When the load ends the layouts settle and nothing is left to convert;
the inverse serves layouts that have not settled.

Sources: ``transformers/core_model_loading.py`` (``WeightTransform``, ``convert_and_load_state_dict_in_model``,
``revert_weight_conversion``) of transformers 5.22.2.
"""

from __future__ import annotations

from typing import Any

import torch

from ..transformers_glue import requests
from .key_table import Rule, join, layouts_of, locations, parent_path, source_names
from .mapped_memory import pages

try:
    from transformers.core_model_loading import ConversionOps, WeightConverter
except ImportError:  # transformers is absent, or older than 5.20: the layers still work, loading through it does not
    ConversionOps = WeightConverter = None  # type: ignore[assignment,misc]


def owner_of(model: torch.nn.Module, full_name: str) -> tuple[Any, str, Rule]:
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


def forget_conversions(model: torch.nn.Module) -> None:
    """Take our converter out of what ``model`` saves by: its tensors have their stock names again."""
    for module in model.modules():
        conversions = vars(module).get("_weight_conversions")
        if conversions:
            vars(module)["_weight_conversions"] = [c for c in conversions if not isinstance(c, LayoutConverter)]


def verify_all(model: torch.nn.Module) -> None:
    """Have every layout of ``model`` checked, also those to which no checkpoint tensor leads."""
    reason = why_not_merge(model)
    for path, layout in layouts_of(model):
        if reason is not None and hasattr(layout, "down_proj"):
            layout.refuse(f"{reason}. Load inside kernel_loading(), which keeps the stock names then")
        layout.verify(model, path)


if WeightConverter is not None:
    # Unique per copy of this package: transformers keys its converters by these strings.
    _SOURCES = [f"{__name__}.source_{number}" for number in range(2)]
    _TARGET = f"{__name__}.target"

    class LayoutOperation(ConversionOps):
        """Checkpoint tensors to one layout parameter; checks on the way that the layout may stand where it stands."""

        @torch.inference_mode(False)  # what is made in it can never be trained
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
                merged = rule.merge(tensors, full_layer_name, parameter.shape)
            if len(tensors) > 1:
                for tensor in tensors:
                    pages.note(tensor)
            share = (parameter.shape[0] // len(tensors), *parameter.shape[1:])
            if (
                len(tensors) > 1
                and merged.shape != parameter.shape
                and share in map(tuple, map(torch.Tensor.size, tensors))
            ):
                # Without ignore_mismatched_sizes transformers raises; with it, it would initialise what fits as well.
                shapes = [tuple(tensor.shape) for tensor in tensors]
                layout.refuse(
                    f"the checkpoint has {list(rule.sources)} of shapes {shapes}, which do not make "
                    f"{tuple(parameter.shape)}: load the stock model, then apply_default_kernels()"
                )
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
            return dict(zip(names, rule.split(tensor), strict=True))

        @property
        def reverse_op(self) -> ConversionOps:
            """The operation that reads the checkpoint's tensors."""
            return LayoutOperation()

    class LayoutConverter(WeightConverter):
        """The ``WeightConverter`` of every layout: looks keys up by where the layouts stand, not by a pattern."""

        def __init__(self) -> None:
            super().__init__(list(_SOURCES), _TARGET, operations=[LayoutOperation()])

        def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
            """The key of the parameter that ``source_key`` belongs to and its place in it, or the key and None."""
            match = locations.find(source_key) or locations.find(self._before_renaming(source_key))
            if match is None:
                return source_key, None
            self._was_used = True
            return match.target, self.source_patterns[match.source_index]

        def _before_renaming(self, key: str) -> str:
            """``key`` as it stands in the checkpoint, where a loose renaming made a name of it that no tensor has.

            transformers then takes the key as it was, if the model has it (a loose rule of DeepSeek V4 turns
            ``model.norm`` into ``model.kv_norm``), but a model with layouts lacks it.
            """
            return key if locations.has(key) else requests.key_in_the_checkpoint() or key

        def reverse_transform(self) -> OriginalConverter:
            """The converter that saves what this one loaded."""
            return OriginalConverter()

        def __deepcopy__(self, memo: dict[int, Any]) -> LayoutConverter:
            copied = LayoutConverter()
            copied._was_used = self._was_used
            return copied

    class OriginalConverter(WeightConverter):
        """Writes the parameters of layouts that have not settled under their checkpoint names."""

        def __init__(self) -> None:
            super().__init__(_TARGET, list(_SOURCES), operations=[OriginalOperation()])

        def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
            """The key itself, claimed when it is a parameter that has checkpoint tensors to be written as."""
            layouts = locations.layouts()
            if not any(source_key == join(path, rule.target) for path, layout in layouts for rule in layout.rules()):
                return source_key, None
            return source_key, self.source_patterns[0]

        def __deepcopy__(self, memo: dict[int, Any]) -> OriginalConverter:
            return OriginalConverter()
