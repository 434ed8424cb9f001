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
from torch.utils._pytree import tree_leaves
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from tests.support.fake_npu_memory import DEVICE, MEMORY, describe, host, is_device, layout_of, to_device

# Operators in which the real backend, as CUDA's, takes CPU tensors beside its own.
_MIXED = ("copy_", "_copy_from", "_copy_from_and_resize", "_to_copy", "index", "index_put", "_index_put_impl", "set_")
_TO_HOST = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "_unique2", "unique_dim")
_libraries: list[torch.library.Library] = []


class Simulation:
    """What happened on the device, and what is not allowed at the moment."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.synchronisations = 0
        self.refuse_synchronisation = False
        self.recording: list[tuple[Callable[..., Any], Any, Any, Any]] | None = None
        self.current_device = 0
        self.product = "Ascend910B3"

    def synchronise(self, what: str) -> None:
        self.synchronisations += 1
        if self.refuse_synchronisation or self.recording is not None:
            raise RuntimeError(f"{what} synchronises the host with the simulated npu, which is not allowed here")

    @contextlib.contextmanager
    def asynchronous(self) -> Iterator[None]:
        """Refuse whatever makes the host wait for the device."""
        self.refuse_synchronisation = True
        try:
            yield
        finally:
            self.refuse_synchronisation = False

    @contextlib.contextmanager
    def watched(self) -> Iterator[list[str]]:
        """The names of the operators that run on the device inside."""
        self.calls, before = [], self.calls
        seen = self.calls
        try:
            yield seen
        finally:
            self.calls = before


SIMULATION = Simulation()


def _to_cpu(value: Any) -> Any:
    if isinstance(value, torch.device) and value.type == DEVICE:
        return torch.device("cpu")
    return value


def _map(function: Callable[[Any], Any], value: Any) -> Any:
    """`tree_map` over what operators take and give; several times faster, and it runs at every launch."""
    if isinstance(value, (tuple, list)) and not isinstance(value, torch.Size):
        return type(value)([_map(function, item) for item in value])
    if isinstance(value, dict):
        return {key: _map(function, item) for key, item in value.items()}
    return function(value)


def run(name: str, compute: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run what takes CPU tensors on device tensors: results share memory where the CPU's do."""
    originals: list[tuple[torch.Tensor, torch.Tensor, tuple[Any, ...]]] = []
    known: dict[int, torch.UntypedStorage] = {}

    def lend(value: Any) -> Any:
        if not is_device(value):
            return _to_cpu(value)
        twin = host(value)
        known.setdefault(twin.untyped_storage()._cdata, value.untyped_storage())
        originals.append((value, twin, layout_of(twin)))
        return twin

    lent_args, lent_kwargs = _map(lend, args), _map(lend, kwargs)
    result = compute(*lent_args, **lent_kwargs)
    for original, twin, before in originals:
        if layout_of(twin) != before:
            storage = known.get(twin.untyped_storage()._cdata)
            grown = storage is None or storage.nbytes() != twin.untyped_storage().nbytes()
            fresh = to_device(twin, {} if grown else known)
            known[twin.untyped_storage()._cdata] = fresh.untyped_storage()
            describe(original, twin, fresh.untyped_storage())
    back = {id(twin): original for original, twin, _ in originals}

    def give_back(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return back[id(value)] if id(value) in back else to_device(value, known)

    results = _map(give_back, result)
    SIMULATION.calls.append(name)
    if SIMULATION.recording is not None:
        SIMULATION.recording.append((compute, (args, kwargs), results, name))
    return results


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

    _map(check, arguments)


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
                return op(*_map(cast, args), **_map(cast, kwargs))

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


class Graph:
    """A captured sequence of launches: replayed on the same memory, as an NPUGraph is."""

    def __init__(self) -> None:
        self.launches: list[tuple[Callable[..., Any], Any, Any, Any]] = []

    def replay(self) -> None:
        for compute, arguments, results, _ in self.launches:
            args, kwargs = _map(lambda v: host(v) if is_device(v) else _to_cpu(v), arguments)
            again = compute(*args, **kwargs)
            flat = tree_leaves(results)
            for old, new in zip(flat, tree_leaves(again), strict=True):
                if is_device(old) and host(old).data_ptr() != new.data_ptr():
                    host(old).copy_(new)


@contextlib.contextmanager
def _capture(graph: Graph, **_: Any) -> Iterator[None]:
    SIMULATION.recording = graph.launches
    try:
        yield
    finally:
        SIMULATION.recording = None


def _device_module() -> types.ModuleType:
    module = types.ModuleType("torch.npu")

    @contextlib.contextmanager
    def device(index: Any) -> Iterator[None]:
        before, SIMULATION.current_device = SIMULATION.current_device, torch.device(DEVICE, index).index
        try:
            yield
        finally:
            SIMULATION.current_device = before

    def stream(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("nothing in this package may make a stream of its own")

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
        "Stream": stream,
        "NPUGraph": Graph,
        "graph": _capture,
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
