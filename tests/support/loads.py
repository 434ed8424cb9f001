"""Loading with the built kernel in two ways, and what a load leaves behind in the process."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import transformers
from transformers import KernelConfig, conversion_mapping, monkey_patching
from transformers.utils import kernel_config

REPO = "layout-kernels/layout-kernels"
Loading = Callable[[], AbstractContextManager[Any]]


def ref(layer: str) -> tuple[str, dict[str, Any]]:
    """The value of a KernelConfig for ``layer``; a revision, not a version, so that no Hub is asked."""
    return (f"{REPO}:{layer}", {"revision": "v1", "trust_remote_code": True})


def _subclasses(cls: type) -> Iterator[type]:
    for child in cls.__subclasses__():
        yield child
        yield from _subclasses(child)


def _recorded(value: Any) -> Any:
    several = value if isinstance(value, list) else [value]
    return [(id(v), getattr(v, "target_class", None)) for v in several]


def process_state() -> dict[str, Any]:
    """Everything process-wide in transformers that a load with kernels is known to write to."""
    models = {cls.__qualname__: cls for cls in _subclasses(transformers.PreTrainedModel)}
    table = conversion_mapping._checkpoint_conversion_mapping_cache or {}
    modules = {n: m for n, m in list(sys.modules.items()) if n.startswith("transformers.models.") and m is not None}
    return {
        "patches": dict(monkey_patching._monkey_patch_mapping_cache),
        "conversions": {name: [type(rule).__name__ for rule in rules] for name, rules in table.items()} or None,
        "registered": set(conversion_mapping.USER_REGISTERED_MAPPINGS),
        "devices": list(kernel_config.KERNELS_SUPPORTED_DEVICE_TYPES),
        "recorders": {
            name: {key: _recorded(value) for key, value in cls.__dict__["_can_record_outputs"].items()}
            for name, cls in models.items()
            if isinstance(cls.__dict__.get("_can_record_outputs"), dict)
        },
        "no_split": {n: list(c.__dict__.get("_no_split_modules") or []) for n, c in models.items()},
        "classes": {
            (name, attribute): value
            for name, module in modules.items()
            for attribute, value in list(vars(module).items())
            if isinstance(value, type)
        },
    }


@contextmanager
def by_hand() -> Iterator[None]:
    """A plain load: only "cpu" is admitted. The test harness, not the product, cleans up afterwards."""
    recorders = [
        (cls, copy.copy(cls.__dict__["_can_record_outputs"]))
        for cls in _subclasses(transformers.PreTrainedModel)
        if isinstance(cls.__dict__.get("_can_record_outputs"), dict)
    ]
    targets = [
        (recorder, recorder.target_class)
        for _, recorded in recorders
        for value in recorded.values()
        for recorder in (value if isinstance(value, list) else [value])
        if hasattr(recorder, "target_class")
    ]
    kernel_config.KERNELS_SUPPORTED_DEVICE_TYPES.append("cpu")
    try:
        yield
    finally:
        kernel_config.KERNELS_SUPPORTED_DEVICE_TYPES.remove("cpu")
        monkey_patching.clear_patch_mapping()
        conversion_mapping._checkpoint_conversion_mapping_cache = None
        conversion_mapping.USER_REGISTERED_MAPPINGS.clear()
        for cls, recorded in recorders:
            cls._can_record_outputs.clear()
            cls._can_record_outputs.update(recorded)
        for recorder, target in targets:
            recorder.target_class = target
        for cls in _subclasses(transformers.PreTrainedModel):
            names = cls.__dict__.get("_no_split_modules")
            if isinstance(names, list):
                cls._no_split_modules = [name for name in names if not name.startswith("Fused")]


def load(family: Any, folder: Any, mapping: dict[Any, Any] | None, **kwargs: Any) -> Any:
    """``from_pretrained`` of ``folder``, stock when ``mapping`` is None."""
    if mapping is not None:
        kwargs |= {"use_kernels": True, "kernel_config": KernelConfig(dict(mapping))}
    return family.auto.from_pretrained(folder, **kwargs)
