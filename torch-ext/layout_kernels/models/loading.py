"""``kernel_loading()``: load a model with kernels and leave the process as it was.

A load through ``KernelConfig`` changes things that belong to the whole process: transformers keeps the class
patches and the conversion rules for every later load, lets the output recorders of shared classes point at fused
classes, does not put classes back when a constructor raises, and its list of devices lacks "cpu".

Sources: transformers 5.22.2, ``monkey_patching.py``, ``conversion_mapping.py``, ``utils/kernel_config.py``.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from functools import partial, wraps
from typing import Any

from ..running.plain import is_plain_linear
from ..transformers_glue import class_patches
from ..transformers_glue.versions import check_versions
from .settling import exchanged, settling


class _Shared:
    """The lock, and how often it is held: one for the process, whichever copies of this package are in it."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.depth = 0


def _shared() -> Any:
    from transformers import monkey_patching

    return vars(monkey_patching).setdefault("_layout_kernels_loading", _Shared())


@contextmanager
def _restored(get: Callable[[], Any], put: Callable[[Any], None]) -> Iterator[None]:
    before = get()
    try:
        yield
    finally:
        put(before)


def _refill(target: Any, content: Any) -> None:
    """Give a shared container back its content; whoever imported it by name keeps seeing it."""
    target.clear()
    (target.extend if isinstance(target, list) else target.update)(content)


def _copied_conversions(module: Any) -> dict[str, Any]:
    module.get_checkpoint_conversion_mapping("")  # builds the table on first use, which takes as long as a small load
    return {name: list(rules) for name, rules in module._checkpoint_conversion_mapping_cache.items()}


@contextmanager
def _registries() -> Iterator[None]:
    """Class patches, conversion rules, the names that users registered, and the device list, with "cpu" in it."""
    from transformers import conversion_mapping, monkey_patching

    patches = monkey_patching._monkey_patch_mapping_cache
    names = conversion_mapping.USER_REGISTERED_MAPPINGS

    def put_conversions(table: dict[str, Any]) -> None:
        conversion_mapping._checkpoint_conversion_mapping_cache = table  # type: ignore[assignment]

    with ExitStack() as stack:
        for shared in (patches, names):
            stack.enter_context(_restored(shared.copy, partial(_refill, shared)))
        stack.enter_context(_restored(lambda: _copied_conversions(conversion_mapping), put_conversions))
        stack.enter_context(_cpu_admitted())
        yield


@contextmanager
def _cpu_admitted() -> Iterator[None]:
    """Let a ``KernelConfig`` have "cpu": in transformers' list of devices, or before 5.21 in the code that has it."""
    from transformers.utils import kernel_config

    devices = getattr(kernel_config, "KERNELS_SUPPORTED_DEVICE_TYPES", None)
    with ExitStack() as stack:
        if devices is not None:
            stack.enter_context(_restored(devices.copy, partial(_refill, devices)))
            if "cpu" not in devices:
                devices.append("cpu")
        else:
            for function in (*vars(kernel_config).values(), *vars(kernel_config.KernelConfig).values()):
                if (code := getattr(function, "__code__", None)) is not None:
                    stack.callback(setattr, function, "__code__", code)
                    function.__code__ = code.replace(co_consts=tuple(map(_with_cpu, code.co_consts)))
        yield


def _with_cpu(constant: Any) -> Any:
    """``constant``, or where it is a list of devices that list with "cpu"."""
    return (*constant, "cpu") if isinstance(constant, tuple) and {"cuda", "npu"} <= {*constant} else constant


def _recorder_state(recorders: Any) -> Any:
    """A copy of a ``_can_record_outputs`` value, with the target class of each recorder object, which is shared."""
    several = recorders if isinstance(recorders, list) else [recorders]
    return list(recorders) if isinstance(recorders, list) else recorders, [
        (recorder, recorder.target_class) for recorder in several if hasattr(recorder, "target_class")
    ]


@contextmanager
def _output_recorders() -> Iterator[None]:
    """Put back what ``patch_output_recorders`` writes into the classes of a model's submodules.

    The patched model does not need it: a fused class is a subclass of the recorded one, which records it too.
    """
    from transformers import modeling_utils

    original = modeling_utils.patch_output_recorders
    saved: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}

    def saving(model: Any) -> None:
        for module in model.modules():
            recorded = getattr(module, "_can_record_outputs", None)
            if isinstance(recorded, dict) and id(recorded) not in saved:
                saved[id(recorded)] = (recorded, {k: _recorder_state(v) for k, v in recorded.items()})
        original(model)

    modeling_utils.patch_output_recorders = saving
    try:
        yield
    finally:
        modeling_utils.patch_output_recorders = original
        for recorded, content in saved.values():
            for name, (recorders, targets) in content.items():
                recorded[name] = recorders
                for recorder, target in targets:
                    recorder.target_class = target


def _transformers_modules() -> list[Any]:
    modules = list(sys.modules.items())
    return [module for name, module in modules if name.startswith("transformers.") and module is not None]


@contextmanager
def _loaded_names_only() -> Iterator[None]:
    """Let ``dir()`` of transformers' lazy modules name what is loaded: the rest has no class to patch yet.

    ``apply_patches`` asks every module for its names, and a lazy module takes 40 ms to list thousands of others. The
    aliases of 5.20 import what they stand for, which fails where that needs a package (torchvision) that is absent.
    """
    from transformers.utils.import_utils import _LazyModule

    with ExitStack() as stack:
        stack.enter_context(exchanged(_LazyModule, "__dir__", lambda self: list(vars(self))))
        for module in _transformers_modules():
            if "__dir__" in vars(module):
                stack.enter_context(exchanged(module, "__dir__", partial(list, vars(module))))
        yield


@contextmanager
def _class_patches() -> Iterator[None]:
    """Put classes back that ``apply_patches`` left replaced, because a constructor raised or another thread loaded."""
    from transformers import modeling_utils
    from transformers.monkey_patching import get_patch_mapping

    original, replaced = modeling_utils.apply_patches, class_patches.replaced_now
    mine: set[type] = set()

    def put_back() -> None:
        for (module, name), cls in replaced.items():
            if vars(sys.modules[module]).get(name) in mine:
                setattr(sys.modules[module], name, cls)
        replaced.clear()

    @contextmanager
    def applying() -> Iterator[None]:
        mapping = get_patch_mapping()
        mine.update(mapping.values())
        for module in _transformers_modules() if mapping else ():
            for name, value in list(vars(module).items()):
                if isinstance(value, type) and value not in mine and class_patches.replacement(name, mapping):
                    replaced.setdefault((module.__name__, name), value)
        patches = original()
        try:
            with _loaded_names_only():
                patches.__enter__()
            yield
            patches.__exit__(None, None, None)
        except BaseException:
            put_back()
            raise

    modeling_utils.apply_patches = applying
    try:
        yield
    finally:
        modeling_utils.apply_patches = original
        put_back()


@contextmanager
def _kernel_configs() -> Iterator[None]:
    """Give transformers, which rewrites the ``KernelConfig`` of a load, a copy: one serves several loads."""
    from transformers import PreTrainedModel

    start: Any = PreTrainedModel.from_pretrained

    @wraps(start.__func__)
    def starting(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("kernel_config") is not None:
            kwargs["kernel_config"] = deepcopy(kwargs["kernel_config"])
        return start.__func__(cls, *args, **kwargs)

    with exchanged(PreTrainedModel, "from_pretrained", classmethod(starting)):
        yield


@contextmanager
def _whole_parents() -> Iterator[None]:
    """Put back the ``_no_split_modules`` of the classes to which a layout added its fused parent."""
    from transformers import PreTrainedModel

    def classes() -> dict[type, Any]:
        found: dict[type, Any] = {}
        waiting: list[type] = [PreTrainedModel]
        while waiting:
            cls = waiting.pop()
            waiting.extend(cls.__subclasses__())
            if "_no_split_modules" in vars(cls):
                found[cls] = vars(cls)["_no_split_modules"]
        return found

    before = classes()
    try:
        yield
    finally:
        for cls, names in classes().items():
            kept = [n for n in names or () if not _is_fused_name(n, cls)] if isinstance(names, list) else names
            cls._no_split_modules = before.get(cls, kept)  # type: ignore[attr-defined]


def _is_fused_name(name: str, cls: type) -> bool:
    return name.startswith("Fused") and name not in vars(sys.modules[cls.__module__])


@contextmanager
def _linear_has_a_hub_name() -> Iterator[None]:
    """Give plain ``nn.Linear`` modules the hub name "Linear" while models are loaded, and take it back."""
    from kernels import replace_kernel_forward_from_hub
    from torch import nn

    names = ("kernel_layer_name", "kernel_condition")
    before = {name: vars(nn.Linear)[name] for name in names if name in vars(nn.Linear)}
    # Without hooks or another forward: what is offloaded or wrapped keeps its own.
    replace_kernel_forward_from_hub(nn.Linear, "Linear", condition=is_plain_linear)
    try:
        yield
    finally:
        for name in names:
            delattr(nn.Linear, name)
        for name, value in before.items():
            setattr(nn.Linear, name, value)


@contextmanager
def kernel_loading(linear: bool = False) -> Iterator[None]:
    """Load models with our layers inside this context: ``with kernel_loading(): AutoModel.from_pretrained(...)``.

    Admits "cpu" as a device of ``KernelConfig``. On exit, after success or an error, every process-wide registry of
    transformers that a kernel load writes to is as it was on entry, so the next stock load is stock. The loaded model
    keeps its layers, runs, trains and saves outside. May be nested; other threads that enter it wait, since the
    registries are shared. A load that another thread makes outside of it meanwhile may get our layers.

    Args:
        linear: give plain ``nn.Linear`` modules the hub name "Linear", so that a ``KernelConfig`` may have that key
            (``"<repo>:Linear"``). No class of transformers carries it.

    Raises:
        ImportError: transformers and kernels are not installed in versions that work together.
    """
    check_versions()
    shared = _shared()
    with shared.lock, ExitStack() as stack:
        if shared.depth == 0:
            for scope in (_registries, _output_recorders, _class_patches, _whole_parents, _kernel_configs, settling):
                stack.enter_context(scope())
        else:
            stack.enter_context(_registries())
        if linear:
            stack.enter_context(_linear_has_a_hub_name())
        shared.depth += 1
        try:
            yield
        finally:
            shared.depth -= 1
