"""A device that is asked for again or wrongly: the same binding, or an error that names what differs."""

from __future__ import annotations

import dataclasses

import pytest

from layout_kernels.dispatch import KernelSpec


@pytest.mark.parametrize("first", ["eager", "compile"])
@pytest.mark.parametrize(
    ("mode", "overrides"),
    [("compile", None), ("eager", {"scale": "fast"}), ("eager", {"scale": "fast.scale"}), ("eager", {"scale": ""})],
)
def test_a_configuration_that_chooses_the_same_is_the_same(world, first, mode, overrides):
    world.simple("scale", fast=1)
    bindings = world.runtime.initialize("cpu", first)
    assert world.runtime.initialize("cpu", mode, overrides) is bindings


def test_what_differs_in_a_contract_is_named(world):
    world.simple("scale")
    contract = dataclasses.replace(world.entries["scale"].operation.contract, mutates=("x",), numerical_mode="none")
    spec = KernelSpec("other", contract, "cpu", ("eager",), "all", "other")
    world.registries.register(spec, len, __name__)
    with pytest.raises(
        ValueError, match=r"other, fulfils another contract: mutates is \('x',\), not \(\); numerical_"
    ):
        world.runtime.initialize("cpu", overrides={"scale": "other"})


def test_an_override_for_another_device_says_so(world):
    world.simple("scale")
    with pytest.raises(ValueError, match="by its name it is for cuda, and an override holds for every device"):
        world.runtime.initialize("cpu", overrides={"scale": "cuda.triton.scale"})


def test_nothing_is_registered_for_any_device_once_one_is_in_use(world):
    world.simple("scale")
    world.runtime.initialize("cpu")
    spec = KernelSpec("late", world.entries["scale"].operation.contract, "any", ("eager",), "all", "other")
    with pytest.raises(RuntimeError, match="cannot register 'late': any is initialised and its registry frozen"):
        world.registries.register(spec, len, __name__)
