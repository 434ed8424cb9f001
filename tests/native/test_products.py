"""Which products are ours, by processor, rows and dtype."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch


@pytest.fixture(scope="module")
def products(package):
    """The module under test."""
    return import_module(f"{package.__name__}.ops.products")


@pytest.fixture(scope="module")
def limits(package):
    """The module with the shipped limits."""
    return import_module(f"{package.__name__}.ops.tuning")


@pytest.fixture
def processor(monkeypatch, products, limits):
    """Let the processor be another: its level, and the dtypes that it multiplies with AMX."""

    def use(level, amx=(), amd=False):
        monkeypatch.setattr(products, "level", lambda: level)
        monkeypatch.setattr(limits, "_tables", {})
        monkeypatch.setattr(limits, "_AMD", amd)
        monkeypatch.setattr(limits, "_AMX", frozenset(amx))

    return use


@pytest.mark.parametrize("level", ["portable", "avx2", "avx512"])
def test_without_bf16_instructions_every_half_product_is_ours(processor, products, level):
    processor(level)
    assert all(products.is_ours(rows, dtype) for rows in (1, 10**6) for dtype in (torch.bfloat16, torch.float16))


def test_with_them_few_rows_are_ours_and_many_are_left_to_pytorch(processor, products):
    processor("avx512_bf16")
    assert products.is_ours(128, torch.bfloat16)
    assert not products.is_ours(129, torch.bfloat16)
    assert products.is_ours(10**6, torch.float16)


def test_beside_amx_only_what_waits_for_memory_is_ours(processor, products):
    processor("avx512_bf16", (torch.bfloat16,))
    assert products.is_ours(4, torch.bfloat16)
    assert not products.is_ours(5, torch.bfloat16)
    assert products.is_ours(10**6, torch.float16)


def test_in_full_precision_few_rows_are_ours_where_there_are_vectors_for_it(processor, products):
    processor("avx2")
    assert products.is_ours(64, torch.float32)
    assert not products.is_ours(65, torch.float32)
    processor("avx512", amd=True)
    assert products.is_ours(10**6, torch.float32)
    processor("avx2", amd=True)
    assert products.is_ours(10**6, torch.float32)
    processor("portable", amd=True)
    assert not products.is_ours(1, torch.float32)


def test_the_vendor_is_read_where_linux_tells_it(monkeypatch, limits, tmp_path):
    file = tmp_path / "cpuinfo"
    monkeypatch.setattr(limits, "_CPUINFO", file)
    assert not limits._is_amd()
    file.write_text("processor\t: 0\nvendor_id\t: AuthenticAMD\n\nprocessor\t: 1\n")
    assert limits._is_amd()
    file.write_text("processor\t: 0\nvendor_id\t: GenuineIntel\n\nprocessor\t: 1\n")
    assert not limits._is_amd()


def test_double_precision_is_never_ours(processor, products):
    processor("avx512")
    assert not products.is_ours(1, torch.float64)


@pytest.mark.parametrize(("given", "expected"), [(True, True), (False, False), (None, False)])
def test_amx_is_asked_of_torch_and_a_torch_that_does_not_tell_has_none(monkeypatch, limits, given, expected):
    monkeypatch.delattr(torch.cpu, "_is_amx_tile_supported", raising=False)
    if given is not None:
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: given, raising=False)
    assert limits._beside_amx(torch.bfloat16) is expected
    assert not limits._beside_amx(torch.float32)
