"""What releases before the one of development lack or do otherwise; docs/versions.md says which were tried."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from transformers.utils import kernel_config

from layout_kernels import kernel_loading
from tests.support.loads import load, ref
from tests.support.tiny import FAMILIES, save_family


def test_cpu_is_admitted_where_the_devices_stand_in_code_and_afterwards_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """transformers 5.20 has no list of devices but three functions with one."""

    def add(device: str) -> str:
        if device not in ["cuda", "rocm", "xpu", "npu"]:
            raise ValueError(device)
        return device

    monkeypatch.delattr(kernel_config, "KERNELS_SUPPORTED_DEVICE_TYPES")
    monkeypatch.setattr(kernel_config, "add_to_mapping", add)
    with kernel_loading():
        with kernel_loading():
            assert add("cpu") == "cpu"
        assert [add("cpu"), add("npu")] == ["cpu", "npu"]
        with pytest.raises(ValueError, match="tpu"):
            add("tpu")
    with pytest.raises(ValueError, match="cpu"):
        add("cpu")


def test_a_module_that_imports_what_is_absent_when_asked_for_its_names_is_not_asked(
    kernel: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers 5.20 has such aliases, for every image processor."""
    alias: Any = ModuleType("transformers.models.llama.image_processing_fast")
    alias.__dir__ = lambda: import_module("torchvision_that_is_absent")
    monkeypatch.setitem(sys.modules, alias.__name__, alias)
    with kernel.kernel_loading():
        model = load(FAMILIES["llama"], save_family(FAMILIES["llama"], tmp_path), {"RMSNorm": ref("CustomRMSNorm")})
    assert type(model.model.norm).is_adopted
    with pytest.raises(ModuleNotFoundError):
        dir(alias)
