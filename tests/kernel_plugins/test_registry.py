"""Kernels by id: what may be registered, what is found, and what each mistake says."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from torch import nn

from layout_kernels import kernel_plugins as kp
from layout_kernels.kernel_plugins import base, registry


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    """The table as it was, whatever a test puts into it."""
    kp.scan_all_kernels()
    table, elsewhere = dict(kp.KernelPlugin._registry), dict(kp.Registry._elsewhere)
    yield
    kp.KernelPlugin._registry.clear()
    kp.KernelPlugin._registry.update(table)
    kp.Registry._elsewhere.clear()
    kp.Registry._elsewhere.update(elsewhere)


def kernel(kernel_id: Any, device: Any = kp.DeviceType.CPU, **methods: Any) -> type[Any]:
    body = {"_kernel_id": kernel_id, "_device": device, "apply": classmethod(lambda cls, **kwargs: kwargs["model"])}
    return type("Given", (kp.BaseKernel,), {**body, **methods})


def test_a_user_s_own_kernel_is_applied_by_its_id() -> None:
    own = kp.register_kernel(kernel("cpu_own"))
    model = nn.Linear(2, 2)
    assert kp.Registry.get("cpu_own") is own
    assert kp.apply_kernel("cpu_own", model=model) is model
    assert kp.KernelPlugin("cpu_own").apply(model=model) is model


def test_what_is_no_kernel_is_a_type_error() -> None:
    for wrong in (nn.Linear, object(), lambda: None):
        with pytest.raises(TypeError, match="subclass of BaseKernel"):
            kp.register_kernel(wrong)  # type: ignore[type-var]
    with pytest.raises(TypeError, match="DeviceType"):
        kp.register_kernel(kernel("cpu_text", device="cpu"))


def test_an_id_is_needed_and_is_taken_once() -> None:
    for empty in ("", None):
        with pytest.raises(ValueError, match="no id"):
            kp.register_kernel(kernel(empty))
    first = kp.register_kernel(kernel("cpu_taken"))
    assert kp.register_kernel(first) is first
    with pytest.raises(ValueError, match="'cpu_taken' is taken"):
        kp.register_kernel(kernel("cpu_taken"))
    with pytest.raises(ValueError, match="'cpu_taken' is taken"):
        kp.KernelPlugin("cpu_taken").register()(kernel(""))
    with pytest.raises(ValueError, match="give one id"):
        kp.KernelPlugin("cpu_other").register()(kernel("cpu_third"))
    with pytest.raises(ValueError, match="needs an id"):
        kp.KernelPlugin().register()


def test_the_plugin_s_table_is_the_registry_s() -> None:
    given = kp.KernelPlugin("cpu_by_plugin").register()(kernel(""))
    assert kp.Registry.get("cpu_by_plugin") is given
    assert given._kernel_id == "cpu_by_plugin"


def test_a_kernel_of_another_device_is_returned_and_not_registered() -> None:
    other = kernel("npu_own", device=kp.DeviceType.NPU)
    assert kp.register_kernel(other) is other
    assert kp.Registry.get("npu_own") is None
    with pytest.raises(ValueError, match="'npu_own' is for npu, the current device is cpu"):
        kp.apply_kernel("npu_own", model=nn.Linear(2, 2))


def test_the_ids_of_this_package_depend_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = ("fused_rmsnorm", "fused_rmsnorm_mlp", "fused_swiglu")
    assert {f"cpu_{name}" for name in wanted} <= set(kp.Registry.ids())
    with pytest.raises(ValueError, match="'npu_fused_rmsnorm' is for npu"):
        kp.apply_kernel("npu_fused_rmsnorm", model=nn.Linear(2, 2))
    monkeypatch.setattr(registry, "current_device", lambda: kp.DeviceType.NPU)
    monkeypatch.setattr(base, "current_device", lambda: kp.DeviceType.NPU)
    from layout_kernels.kernel_plugins.ops.ours import KERNELS

    kp.register_kernel(KERNELS["npu_fused_rmsnorm"])
    assert KERNELS["npu_fused_rmsnorm"].check_deps()
    assert not KERNELS["cpu_fused_rmsnorm"].check_deps()


def test_each_mistake_of_a_caller_has_its_error() -> None:
    with pytest.raises(ValueError, match=r"no kernel with the id 'cpu_none'; there are: .*cpu_fused_rmsnorm"):
        kp.apply_kernel("cpu_none", model=nn.Linear(2, 2))
    with pytest.raises(ValueError, match="needs model="):
        kp.apply_kernel("cpu_fused_rmsnorm")
    with pytest.raises(RuntimeError, match="found nothing to do in Linear"):
        kp.apply_kernel("cpu_fused_rmsnorm", model=nn.Linear(2, 2))
    kp.register_kernel(kernel("cpu_unmet", check_deps=classmethod(lambda cls: False)))
    with pytest.raises(RuntimeError, match="dependencies of 'cpu_unmet' are not met"):
        kp.apply_kernel("cpu_unmet", model=nn.Linear(2, 2))
    with pytest.raises(TypeError, match="comma-separated"):
        kp.apply_default_kernels(nn.Linear(2, 2), 3)  # type: ignore[arg-type]


def test_a_kernel_without_apply_cannot_be_defined() -> None:
    with pytest.raises(TypeError, match="apply"):
        type("Half", (kp.BaseKernel,), {"_kernel_id": "cpu_half"})


@pytest.mark.parametrize("include", [None, False, ""])
def test_nothing_is_applied_when_nothing_is_included(include: Any) -> None:
    model = nn.Linear(2, 2)
    before = dict(vars(model))
    assert kp.apply_default_kernels(model, include) is model
    assert vars(model) == before


def test_a_list_is_applied_in_its_order() -> None:
    calls: list[str] = []
    for name in ("cpu_b", "cpu_a"):
        apply = classmethod(lambda cls, **kwargs: (calls.append(cls._kernel_id), kwargs["model"])[1])
        kp.register_kernel(kernel(name, apply=apply))
    kp.apply_default_kernels(nn.Linear(2, 2), " cpu_b , cpu_a,")
    assert calls == ["cpu_b", "cpu_a"]
    with pytest.raises(ValueError, match="cpu_none"):
        kp.apply_default_kernels(nn.Linear(2, 2), "cpu_a,cpu_none")


def test_an_import_error_of_a_kernel_module_surfaces(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    (tmp_path / "broken.py").write_text("raise ImportError('torn')\n")
    from layout_kernels.kernel_plugins import ops

    monkeypatch.setattr(ops, "__path__", [*ops.__path__, str(tmp_path)])
    with pytest.raises(ImportError, match="torn"):
        kp.scan_all_kernels()


def test_every_file_below_ops_is_imported_also_in_folders_that_are_no_packages(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    from layout_kernels.kernel_plugins import ops

    (tmp_path / "loose" / "deep").mkdir(parents=True)
    (tmp_path / "loose" / "deep" / "torn.py").write_text("raise ImportError('found below')\n")
    monkeypatch.setattr(ops, "__path__", [*ops.__path__, str(tmp_path)])
    with pytest.raises(ImportError, match="found below"):
        kp.scan_all_kernels()


def test_the_decorator_imports_without_torch() -> None:
    code = (
        "from layout_kernels.kernel_plugins import BaseKernel, DeviceType, KernelPlugin\n"
        "import sys; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": "torch-ext"})
