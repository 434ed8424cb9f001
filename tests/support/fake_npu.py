"""A simulated `npu` device in pure Python, for tests on machines without an Ascend card.

Every ATen operator that is not made of others runs on the CPU over the same bytes (`fake_npu_memory`). What the real
device refuses is refused: tensors of two devices in one operator. What it makes slow or impossible can be counted or
refused: copies to the host and other synchronisations. Graph capture is recorded and replayed on the same memory.

`install()` registers the backend for the rest of the process: call it in a process of its own.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from typing import Any

import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from tests.support.fake_npu_memory import DEVICE, MEMORY, host, is_device
from tests.support.fake_npu_run import (
    CURRENT_STREAM,
    SIMULATION,
    Event,
    Graph,
    Simulation,
    Stream,
    capture,
    map_values,
    run,
)

# Operators in which the real backend, as CUDA's, takes CPU tensors beside its own.
_MIXED = ("copy_", "_copy_from", "_copy_from_and_resize", "_to_copy", "index", "index_put", "_index_put_impl", "set_")
_TO_HOST = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "_unique2", "unique_dim")
_libraries: list[torch.library.Library] = []


def _kernel(op: torch._ops.OpOverload) -> Callable[..., Any]:
    name = op._schema.name.removeprefix("aten::")
    wants_device = any(argument.name == "device" for argument in op._schema.arguments)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        with torch._C._AutoDispatchBelowAutograd():
            if wants_device and device is not None and device.type != DEVICE:
                SIMULATION.synchronise(name)
                return op(*(host(a) if is_device(a) else a for a in args), **kwargs)
            if name in _TO_HOST:
                SIMULATION.synchronise(name)
            if name in ("copy_", "_copy_from") and not is_device(args[0] if name == "copy_" else args[1]):
                SIMULATION.synchronise(name)
                (args[0] if name == "copy_" else args[1]).copy_(host(args[1] if name == "copy_" else args[0]))
                return args[0] if name == "copy_" else args[1]
            if name not in _MIXED:
                _one_device(name, (args, kwargs))
            return run(name, op, args, kwargs)

    return kernel


def _one_device(name: str, arguments: Any) -> None:
    def check(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and not is_device(value) and value.dim() > 0:
            raise RuntimeError(f"{name}: expected all tensors to be on the same device, found npu:0 and cpu")
        return value

    map_values(check, arguments)


def _register_operators() -> None:
    library = torch.library.Library("aten", "IMPL")
    for qualified in torch._C._dispatch_get_all_op_names():
        if not qualified.startswith("aten::") or _has(qualified, "CompositeImplicitAutograd"):
            continue
        name, _, overload = qualified.removeprefix("aten::").partition(".")
        op = getattr(getattr(torch.ops.aten, name, None), overload or "default", None)
        # Views that torch makes for every device work on the real storage; `detach` must not return a Python object.
        if op is None or (_is_view(op) and _has(qualified, "CompositeExplicitAutograd")):
            continue
        kernel = _no_fused_attention if name == "_fused_sdp_choice" else _kernel(op)
        library.impl(qualified.removeprefix("aten::"), kernel, "PrivateUse1")
    _libraries.append(library)


def _register_autocast() -> None:
    """Products in the lower dtype, as every backend's autocast has them; all else keeps its dtypes."""
    fall_through = torch.library.Library("_", "IMPL")
    fall_through.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    products = torch.library.Library("aten", "IMPL")

    def product(op: Any) -> Callable[..., Any]:
        def cast(value: Any) -> Any:
            wide = isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype is not torch.float64
            return value.to(torch.get_autocast_dtype(DEVICE)) if wide else value

        def kernel(*args: Any, **kwargs: Any) -> Any:
            excluded = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)
            with torch._C._ExcludeDispatchKeyGuard(excluded):
                return op(*map_values(cast, args), **map_values(cast, kwargs))

        return kernel

    for name in ("linear", "matmul", "mm", "bmm", "addmm"):
        products.impl(name, product(getattr(torch.ops.aten, name).default), "AutocastPrivateUse1")
    _libraries.extend((fall_through, products))


def _has(qualified: str, key: str) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(qualified, key))


def _is_view(op: torch._ops.OpOverload) -> bool:
    aliased = (result.alias_info for result in op._schema.returns)
    return any(alias is not None and not alias.is_write for alias in aliased)


def _no_fused_attention(*args: Any, **kwargs: Any) -> int:
    """The real backend has attention kernels of its own; here the composition runs that every backend can run."""
    return 0


def _device_module() -> types.ModuleType:
    module = types.ModuleType("torch.npu")

    @contextlib.contextmanager
    def device(index: Any) -> Iterator[None]:
        before, SIMULATION.current_device = SIMULATION.current_device, torch.device(DEVICE, index).index
        try:
            yield
        finally:
            SIMULATION.current_device = before

    def name(index: Any = None) -> str:
        if getattr(index, "index", index) not in (None, 0):
            raise RuntimeError(f"there is one simulated npu; given {index}")
        return SIMULATION.product

    members: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: SIMULATION.current_device,
        "set_device": lambda index: None,
        "get_device_name": name,
        "is_bf16_supported": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "manual_seed": lambda seed: torch.manual_seed(seed),
        "manual_seed_all": lambda seed: None,
        "synchronize": lambda device=None: SIMULATION.synchronise("synchronize"),
        "empty_cache": lambda: None,
        "memory_allocated": lambda device=None: MEMORY.allocated,
        "max_memory_allocated": lambda device=None: MEMORY.peak,
        "mem_get_info": lambda device=None: (2**35, 2**35),
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
        "get_device_capability": lambda device=None: None,
        "device": device,
        "Stream": Stream,
        "Event": Event,
        "stream": lambda stream: contextlib.nullcontext(),
        "current_stream": lambda device=None: CURRENT_STREAM,
        "NPUGraph": Graph,
        "graph": capture,
    }
    for key, value in members.items():
        setattr(module, key, value)
    return module


def install(vendor: types.ModuleType | None = None) -> Simulation:
    """Register the device, and the stand-in `torch_npu`, for the rest of the process."""
    if torch._C._get_privateuse1_backend_name() == DEVICE:
        return SIMULATION
    _setup_privateuseone_for_python_backend(DEVICE, backend_module=_device_module())
    _register_operators()
    _register_autocast()
    from tests.support import fake_torch_npu

    module = vendor or fake_torch_npu.make(run, SIMULATION)
    module.__spec__ = ModuleSpec("torch_npu", None)
    collect = types.ModuleType("torch_npu.utils.collect_env")
    collect.get_cann_version = lambda: "8.5.0"  # type: ignore[attr-defined]
    utils = types.ModuleType("torch_npu.utils")
    sys.modules.update({"torch_npu": module, "torch_npu.utils": utils, "torch_npu.utils.collect_env": collect})
    return SIMULATION
